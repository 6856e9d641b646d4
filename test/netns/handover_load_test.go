package netns

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var handOverLoad = flag.Int("handover.load", -1,
	"measure in TestHandOverGaps how long a ping stands still at a restart beside so many busy processes")

var handOverBy = flag.String("handover.by", "", "a command that starts the daemon in TestHandOverGaps, such as nice")

// TestHandOverGaps measures the gaps of a ping of 20 ms at ten restarts beside busy processes.
func TestHandOverGaps(t *testing.T) {
	if *handOverLoad < 0 {
		t.Skip("measures: go test ./test/netns -run TestHandOverGaps -v -handover.load 24")
	}
	const restarts = 10
	s, a, b := newPair(t)
	b.run()
	k := newKeeper(a)
	if *handOverBy != "" {
		a.old = filepath.Join(s.dir, "started")
		s.must(os.WriteFile(a.old, []byte("#!/bin/sh\nexec "+*handOverBy+" "+program+" \"$@\"\n"), 0o755))
	}
	k.start()
	a.connect(b, "RC")
	for range *handOverLoad {
		busy := exec.Command("timeout", "120", "sh", "-c", "while :; do :; done")
		s.must(busy.Start())
		t.Cleanup(func() {
			_ = busy.Process.Signal(unix.SIGTERM) // which timeout passes on
			_ = busy.Wait()
		})
	}
	var gaps []time.Duration
	for i := range restarts {
		m := a.measureGap(b.v4)
		time.Sleep(500 * time.Millisecond)
		k.restart()
		time.Sleep(500 * time.Millisecond)
		gap, lost := m.end()
		t.Logf("restart %d: gap %v, %d lost", i, gap.Round(time.Millisecond), lost)
		gaps = append(gaps, gap)
	}
	slices.Sort(gaps)
	t.Logf("%d busy processes, started by %q: median %v, %v to %v", *handOverLoad, *handOverBy, gaps[restarts/2].Round(time.Millisecond),
		gaps[0].Round(time.Millisecond), gaps[restarts-1].Round(time.Millisecond))
}
