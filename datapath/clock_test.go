package datapath

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What waits, ages or is refilled here does so by a clock that an operator, or NTP, cannot set:
// set forward by hours it would take all that waits for late, set back it would
// keep what has had its time.
func TestNoWallClock(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, call := range []string{"UnixNano(", "UnixMilli(", "Unix()", "Round(0)"} {
			if strings.Contains(string(b), call) {
				t.Errorf("%s has %s: want nanotime", name, call)
			}
		}
	}
	first := nanotime()
	if second := nanotime(); first <= 0 || second < first {
		t.Errorf("nanotime is %d, then %d", first, second)
	}
}
