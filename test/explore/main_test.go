package explore

import (
	"os"
	"runtime/debug"
	"testing"

	"ipoibcm/internal/long"
)

// TestMain has the short form collect garbage more seldom, which takes a third of its time
// otherwise. The long form would need too much memory.
func TestMain(m *testing.M) {
	if !long.Form() {
		debug.SetGCPercent(300)
	}
	os.Exit(m.Run())
}
