package engine

import (
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// inputMarked is input of a packet that was marked on its way.
func (p *pair) inputMarked(e *end, b []byte) DropReason {
	var pkt roce.Packet
	if err := pkt.Parse(b); err != nil {
		p.t.Fatal(err)
	}
	return e.Receive(&pkt, &Source{Src: p.other(e).gid, Dst: e.gid, CE: true}, p.now)
}

// A marked packet is answered by a CNP, one in 50 us at most, and the message that it
// belongs to says so (RoCEv2 annex A17, 17.9.3).
func TestMarkedPackets(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	cnps := func() (n int) {
		for _, b := range p.output(p.b) {
			if h := roce.BTH(b); h.Opcode() == roce.CNP {
				n++
				if !h.BECN() || h.PSN() != 0 || h.DestQPN() != p.a.QPN() || len(b) != roce.BTHLen+cnpReserved+roce.ICRCLen {
					t.Errorf("a CNP of %x", b)
				}
			}
		}
		return n
	}
	for i, tt := range []struct {
		after  time.Duration
		marked bool
		cnps   int
	}{{time.Second, true, 1}, {20 * time.Microsecond, true, 0}, {cnpEvery, true, 1}, {time.Second, false, 0}} {
		p.now = p.now.Add(tt.after)
		p.b.postRecv(uint64(i), make([]byte, 100))
		p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 100))})
		b := p.output(p.a)[0]
		if tt.marked {
			p.inputMarked(p.b, b)
		} else {
			p.input(p.b, b)
		}
		if n := cnps(); n != tt.cnps {
			t.Errorf("packet %d: %d CNPs, want %d", i, n, tt.cnps)
		}
		if got := p.b.recv[i].Flags&verbs.WithCE != 0; got != tt.marked {
			t.Errorf("packet %d: its completion says marked %v, want %v", i, got, tt.marked)
		}
	}
}

// A CNP lowers the window, the first by little, those that keep coming by more; from
// elsewhere it does nothing.
func TestNotificationLowersTheWindow(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	b := make([]byte, roce.BTHLen+cnpReserved+roce.ICRCLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.CNP, PKey: ib.DefaultPKey, DestQPN: p.a.QPN()})
	var pkt roce.Packet
	if err := pkt.Parse(b); err != nil {
		t.Fatal(err)
	}
	window := p.a.req.cc.window
	if r := p.a.Receive(&pkt, &Source{Src: ib.GID{15: 9}, Dst: gidA}, p.now); r != DropSource {
		t.Errorf("from elsewhere: %v, want %v", r, DropSource)
	}
	if got := p.a.req.cc.window; got != window {
		t.Errorf("from elsewhere: window %d, want %d", got, window)
	}
	for i := range 40 {
		p.now = p.now.Add(10 * time.Millisecond)
		if r := p.a.Receive(&pkt, &Source{Src: gidB, Dst: gidA}, p.now); r != NoDrop {
			t.Fatalf("CNP %d: %v", i, r)
		}
		if got := p.a.req.cc.window; got >= window && window > minWindow || got < window/2 {
			t.Fatalf("CNP %d: window %d after %d", i, got, window)
		}
		window = p.a.req.cc.window
	}
	if window > 8 {
		t.Errorf("a window of %d after 40 notifications", window)
	}
}
