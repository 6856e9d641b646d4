//go:build race

package netns

// raceDetector says that the tests run under the race detector. The agents are
// then built with it too, and transfers are a tenth.
const raceDetector = true
