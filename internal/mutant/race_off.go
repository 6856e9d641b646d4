//go:build !race

package mutant

const raceDetector = false
