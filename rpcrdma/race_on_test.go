//go:build race

package rpcrdma

// raceDetector says that the tests run under the race detector, where a
// simulation has fewer seeds.
const raceDetector = true
