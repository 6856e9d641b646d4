//go:build !race

package long

// Race reports whether the tests run under the race detector.
const Race = false
