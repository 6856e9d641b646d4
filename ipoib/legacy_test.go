package ipoib

import (
	"testing"
	"time"
)

// TestLegacy runs testdata/legacy-*.txt: the 0x10 service IDs, and Linux, which knows no other
// (docs/adr/0007-both-service-ids.md).
func TestLegacy(t *testing.T) { playScripts(t, "legacy-*") }

// An RNR NAK of Linux asks for 655 ms and means the least: it is waited out for less. One of
// our own kind means what it says.
func TestRNRWait(t *testing.T) {
	w := newWorld(t, 8)
	a, b, _ := w.node(1, Options{}), w.node(2, Options{}), w.linux(3)
	w.run(2 * time.Second)
	a.ping(a.peerAddr(b), 9000, true)
	a.ping("10.0.0.3", 9000, true)
	w.run(time.Second)
	if len(a.qps) != 2 {
		t.Fatalf("%d connections, want 2", len(a.qps))
	}
	for _, q := range a.qps {
		want := time.Duration(0)
		if q.destGID == gid(3) {
			want = 10 * time.Millisecond
		}
		if q.rnrWait != want {
			t.Errorf("to %v an RNR NAK is waited out for %v, want %v", q.destGID, q.rnrWait, want)
		}
	}
}
