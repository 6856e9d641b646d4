//go:build !race

package long

// Race says that the tests run under the race detector.
const Race = false
