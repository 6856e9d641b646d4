package rdmacm

import (
	"errors"
	"fmt"
	"testing"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// tap keeps the CM messages that arrive at a side.
func tap(s *side) func() []mad.Message {
	var seen []mad.Message
	s.dev.SetTap(func(out bool, p []byte) {
		if out || len(p) < 20+8+12+8+verbs.MADLen || p[0]>>4 != 4 || p[20+8+7] != 1 { // QP 1
			return
		}
		if _, msg, err := mad.Parse(p[20+8+12+8:][:verbs.MADLen]); err == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			seen = append(seen, msg)
		}
	})
	return func() []mad.Message {
		s.mu.Lock()
		defer s.mu.Unlock()
		return append([]mad.Message(nil), seen...)
	}
}

// rejOf waits for a REJ.
func rejOf(t *testing.T, heard func() []mad.Message) mad.REJ {
	t.Helper()
	var rej mad.REJ
	expect.Eventually(t, "a REJ", func() (ok bool) {
		for _, m := range heard() {
			if rej, ok = m.(mad.REJ); ok {
				return true
			}
		}
		return false
	})
	return rej
}

// request is a REQ from a to port 1 of b, whose REP nobody takes.
func request(a *side, qp verbs.QP, transport ib.Transport, mtu ib.MTU) {
	a.do(cm.Connect{Handle: 1 << 40, Local: gidOf(addrs[0]), Remote: gidOf(addrs[1]), ServiceID: serviceid.RDMAIP(1),
		Transport: transport, QPN: qp.QPN(), PathMTU: mtu, RetryCount: 7, ResponderResources: 2, InitiatorDepth: 3,
		PrivateData: Header{SrcPort: 9, Src: addrs[0], Dst: addrs[1]}.Append(nil)})
}

// A REQ for UC is refused with REJ 9: what is carried is RDMA.
func TestUnreliableREQ(t *testing.T) {
	a, b := pair(t)
	if _, err := b.Listen(1); err != nil {
		t.Fatal(err)
	}
	heard := tap(a)
	request(a, a.qp(), ib.UC, ib.MTU1024)
	rej := rejOf(t, heard)
	expect.Equal(t, rej.Reason, 9, "reason of the REJ")
	expect.Equal(t, rej.MessageRejected, 0, "what the REJ refuses")
}

// REJ 26 says which path MTU would be taken: code 3 is 1024 octets.
func TestPathMTUIsTold(t *testing.T) {
	a := newSide(t, 0)
	b := newSideOn(t, 1, func(p verbs.Provider) verbs.Provider {
		return &fickle{Provider: p, gids: p.Port().GIDs, mtu: ib.MTU1024}
	})
	if _, err := b.Listen(1); err != nil {
		t.Fatal(err)
	}
	heard := tap(a)
	request(a, a.qp(), ib.RC, ib.MTU4096)
	rej := rejOf(t, heard)
	if rej.Reason != 26 {
		t.Errorf("%v, want reason 26", rej)
	}
	expect.Equal(t, rej.ARILength, 1, "octets of additional information")
	expect.Equal(t, rej.ARI[0], 3, "the additional information")
}

// A request beyond those that wait is refused with REJ 3.
func TestRefusedBeyondWaiting(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	for range MaxWaiting {
		l.requests <- &Request{port: b.Port}
	}
	var f *FailedError
	if _, err = a.Dial(within(t), addrs[1], 1, Setup{QP: a.qp()}); !errors.As(err, &f) || f.Reason != 3 {
		t.Errorf("%v, want REJ 3", err)
	}
}

// A listener that closes refuses who waits, and its port is nobody's then.
func TestListenerCloses(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	req := mad.REQ{ServiceID: serviceid.RDMAIP(1)}
	m := &verbs.MAD{Remote: gidOf(addrs[0]), Local: gidOf(addrs[1])}
	if _, err := req.AppendBinary(m.Data[:0]); err != nil {
		t.Fatal(err)
	}
	if !b.Owns(m) {
		t.Error("a REQ for an open listener is owned by nobody")
	}
	dialed := make(chan error, 1)
	go func() {
		_, err := a.Dial(within(t), addrs[1], 1, Setup{QP: a.qp()})
		dialed <- err
	}()
	expect.Eventually(t, "a request that waits", func() bool { return len(l.requests) > 0 })
	l.Close()
	var f *FailedError
	if err := <-dialed; !errors.As(err, &f) || f.Reason != 28 {
		t.Errorf("who waited got %v, want REJ 28", err)
	}
	m.Data[15]++ // another exchange
	if b.Owns(m) {
		t.Error("a REQ for a closed listener is owned by somebody")
	}
}

// Neither side has more READs outstanding than the other answers, and neither
// answers more than the other asks for.
func TestDepthsAreTheLesser(t *testing.T) {
	for _, tt := range []struct {
		resources, depth         uint8 // of the passive side
		wantResources, wantDepth uint8
	}{
		{30, 40, 3, 2}, // the REQ offers 2 and wants 3
		{1, 1, 1, 1},
		{0, 0, 0, 0},
		{3, 2, 3, 2},
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			a, b := pair(t)
			l, err := b.Listen(1)
			if err != nil {
				t.Fatal(err)
			}
			heard := tap(a)
			request(a, a.qp(), ib.RC, ib.MTU1024)
			r, err := l.Next(within(t))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.Begin(Setup{QP: b.qp(), Private: make([]byte, 197)}); err == nil {
				t.Error("197 octets of private data were taken for a REP")
			}
			c, err := r.Begin(Setup{QP: b.qp(), ResponderResources: tt.resources, InitiatorDepth: tt.depth})
			if err != nil {
				t.Fatal(err)
			}
			// Of the pair before, which had the same addresses, a REP may still be on its way.
			var rep mad.REP
			expect.Eventually(t, "a REP", func() bool {
				for _, m := range heard() {
					if r, ok := m.(mad.REP); ok && r.LocalCommID == c.Params().LocalCommID {
						rep = r
					}
				}
				return rep.LocalCommID != 0
			})
			if rep.ResponderResources != tt.wantResources || rep.InitiatorDepth != tt.wantDepth {
				t.Errorf("%d and %d: the REP says %d and %d, want %d and %d", tt.resources, tt.depth,
					rep.ResponderResources, rep.InitiatorDepth, tt.wantResources, tt.wantDepth)
			}
			if p := c.Params(); p.ResponderResources != tt.wantResources || p.InitiatorDepth != tt.wantDepth {
				t.Errorf("%d and %d: the queue pair has %d and %d, want %d and %d", tt.resources, tt.depth,
					p.ResponderResources, p.InitiatorDepth, tt.wantResources, tt.wantDepth)
			}
		})
	}
}

// Data stands for an RTU that was lost.
func TestDataForRTU(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	request(a, a.qp(), ib.RC, ib.MTU1024) // nobody answers the REP
	r, err := l.Next(within(t))
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.Begin(Setup{QP: b.qp()})
	if err != nil {
		t.Fatal(err)
	}
	b.Event(verbs.Event{Kind: verbs.CommEst, QPN: c.QP().QPN() ^ 1}) // another's
	select {
	case <-c.settled:
		t.Fatal("it is up without RTU and data")
	default:
	}
	b.Event(verbs.Event{Kind: verbs.CommEst, QPN: c.QP().QPN()})
	select {
	case <-c.settled:
		if c.err != nil {
			t.Error(c.err)
		}
	default:
		t.Error("data does not stand for the RTU")
	}
}

// A queue pair that fails takes its connection along, and the peer hears of it.
func TestQPFails(t *testing.T) {
	a, b := pair(t)
	ca, cb := connect(t, a, b, 9)
	b.Event(verbs.Event{Kind: verbs.QPFatal, QPN: cb.QP().QPN()})
	if err := ends(t, cb); err != nil {
		t.Errorf("this side: %v", err)
	}
	var d *DisconnectedError
	if err := ends(t, ca); !errors.As(err, &d) || d.By != cm.ByPeer {
		t.Errorf("the other side: %v", err)
	}
}

// The low half of a header's first octet is its minor version, which changes
// nothing; a major version other than 0 is another header (IBA annex A11).
func TestHeaderVersion(t *testing.T) {
	for first, want := range map[byte]bool{0x00: true, 0x01: true, 0x0f: true, 0x10: false, 0xf0: false} {
		b := Header{SrcPort: 1, Src: addrs[0], Dst: addrs[1]}.Append(nil)
		b[0] = first
		if h, _, err := ParseHeader(b); (err == nil) != want {
			t.Errorf("version octet %#x: %+v, %v", first, h, err)
		}
	}
}
