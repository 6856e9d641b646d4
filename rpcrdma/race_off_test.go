//go:build !race

package rpcrdma

// raceDetector says that the tests run under the race detector.
const raceDetector = false
