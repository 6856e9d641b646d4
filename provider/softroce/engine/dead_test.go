package engine

import (
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A peer that is gone is known before TCP's first retransmission timeout of 1 s,
// with the ACK timeout of 67 ms and the seven retries that connections use.
// 4755-7.1-1
func TestDeadPeerIsKnownWithinOneSecond(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	if _, err := p.a.PostSend([]verbs.SendWR{{ID: 1, Opcode: verbs.Send, Flags: verbs.Signaled}}, p.now); err != nil {
		t.Fatal(err)
	}
	sent := 0
	for len(p.a.send) == 0 {
		sent += len(p.output(p.a)) // lost, all of them
		at := p.a.Deadline()
		if at.IsZero() {
			t.Fatal("no deadline although nothing was acknowledged")
		}
		p.now = at
		p.a.Wake(p.now)
	}
	took := p.now.Sub(start)
	if got := p.a.send[0].Status; got != verbs.RetryExceeded {
		t.Errorf("status %v, want %v", got, verbs.RetryExceeded)
	}
	if took > time.Second || took < 300*time.Millisecond {
		t.Errorf("given up after %v and %d packets, want 0.3 s to 1 s", took, sent)
	}
	if sent < 8 {
		t.Errorf("%d packets sent, want at least the first and seven retries", sent)
	}
}
