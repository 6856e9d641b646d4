package explore

import (
	"os"
	"runtime/debug"
	"testing"
)

// TestMain has garbage collected more seldom, which takes a quarter of the time otherwise, but in time to stay
// below 2 GiB, which programs for 32 bits have as well.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	debug.SetMemoryLimit(2 << 30)
	os.Exit(m.Run())
}
