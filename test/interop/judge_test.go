package interop

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"ipoibcm/test/interop/judge"
	"ipoibcm/test/interop/vm"
)

// maxJudged is how many packets of one capture tshark reads: it is slow.
const maxJudged = 4000

// watch captures until the test ends. Then the ICRC of every packet either side
// has sent is checked, and tshark looks for anything malformed.
func (w *world) watch(t *testing.T) *vm.Capture {
	t.Helper()
	c := w.seg.Capture()
	lost := w.seg.Dropped()
	t.Cleanup(func() {
		packets, err := c.Stop()
		if err != nil {
			t.Error(err)
		}
		if n := w.seg.Dropped() - lost; n > 0 {
			t.Errorf("the segment itself lost %d frames", n)
		}
		judgeAll(t, packets)
	})
	return c
}

func judgeAll(t *testing.T, packets []vm.Packet) {
	t.Helper()
	checked, wrong := map[string]int{}, 0
	for i, p := range packets {
		if _, _, ok := judge.RoCE(p.Frame); !ok {
			continue
		}
		checked[p.From]++
		if err := judge.CheckICRC(p.Frame); err != nil {
			if wrong++; wrong <= 5 {
				t.Errorf("packet %d from %s: %v", i, p.From, err)
			}
		}
	}
	t.Logf("ICRC right in packets by sender: %v", checked)
	if len(packets) > maxJudged {
		// The ends tell most: connecting, and what came last.
		packets = append(packets[:maxJudged/2:maxJudged/2], packets[len(packets)-maxJudged/2:]...)
	}
	file := filepath.Join(t.TempDir(), "capture.pcap")
	if err := vm.WritePcap(file, packets); err != nil {
		t.Error(err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	bad, err := judge.Malformed(ctx, file)
	switch {
	case errors.Is(err, judge.ErrNoTshark):
		t.Log(err)
		return
	case err != nil:
		t.Error(err)
	}
	for i, b := range bad {
		if i == 5 {
			t.Errorf("and %d more", len(bad)-i)
			break
		}
		t.Error("tshark: " + b)
	}
}
