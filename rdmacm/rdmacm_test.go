package rdmacm

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/provider/softroce"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

const patience = time.Minute

var addrs = [2]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")}

// A side is one end: device, port and what a queue pair is made of.
type side struct {
	*Port
	t   *testing.T
	dev *softroce.Device
	cq  verbs.CQ
	mem *verbs.Region

	mu    sync.Mutex
	notes []cm.Note
}

func newSide(t *testing.T, n int) *side {
	t.Helper()
	return newSideOn(t, n, func(p verbs.Provider) verbs.Provider { return p })
}

// newSideOn opens the port on what as makes of the device.
func newSideOn(t *testing.T, n int, as func(verbs.Provider) verbs.Provider) *side {
	t.Helper()
	dev, err := softroce.Open(softroce.Options{Underlay: "lo", GID: gidOf(addrs[n])})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	s := &side{t: t, dev: dev}
	if s.cq, err = dev.CreateCQ(16); err != nil {
		t.Fatal(err)
	}
	if s.mem, err = dev.Alloc(4096); err != nil {
		t.Fatal(err)
	}
	if s.Port, err = Open(Options{Provider: as(dev), Log: func(n cm.Note) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.notes = append(s.notes, n)
	}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func pair(t *testing.T) (a, b *side) { return newSide(t, 0), newSide(t, 1) }

// qp returns a queue pair with one receive posted.
func (s *side) qp() verbs.QP {
	s.t.Helper()
	qp, err := s.dev.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: s.cq, RecvCQ: s.cq, SendDepth: 4,
		RecvDepth: 4, MaxSendSGE: 1, MaxRecvSGE: 1})
	if err == nil {
		err = qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey})
	}
	if err == nil {
		_, err = qp.PostRecv([]verbs.RecvWR{{ID: 7, SG: []verbs.SGE{{Region: s.mem, Buf: s.mem.Buf[2048:]}}}})
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return qp
}

// wait returns the next completion.
func (s *side) wait() verbs.WC {
	s.t.Helper()
	var wc [1]verbs.WC
	expect.Eventually(s.t, "a completion", func() bool { return s.cq.Poll(wc[:]) == 1 })
	return wc[0]
}

func (s *side) send(qp verbs.QP, text string) {
	s.t.Helper()
	n := copy(s.mem.Buf, text)
	if _, err := qp.PostSend([]verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled,
		SG: []verbs.SGE{{Region: s.mem, Buf: s.mem.Buf[:n]}}}}); err != nil {
		s.t.Fatal(err)
	}
	wc := s.wait()
	expect.MustEqual(s.t, wc.Status, verbs.Success, "status of a completion")
	expect.MustEqual(s.t, wc.Opcode, verbs.Send, "opcode of a completion")
}

func (s *side) expect(text string) {
	s.t.Helper()
	wc := s.wait()
	expect.MustEqual(s.t, wc.Status, verbs.Success, "Status")
	expect.MustEqual(s.t, wc.Opcode, verbs.Recv, "Opcode")
	expect.MustEqual(s.t, string(s.mem.Buf[2048:2048+wc.ByteLen]), text, "Buf[2048:2048+wc.ByteLen]")
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func ends(t *testing.T, c *Conn) error {
	t.Helper()
	select {
	case <-c.Done():
		return c.Err()
	case <-time.After(patience):
		t.Fatal("the connection does not end")
		return nil
	}
}

// connect makes a connection from a to b, and checks what both learn.
func connect(t *testing.T, a, b *side, port uint16) (ca, cb *Conn) {
	t.Helper()
	l, err := b.Listen(port)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan *Conn, 1)
	go func() {
		defer close(got)
		r, err := l.Next(within(t))
		if err != nil {
			t.Error(err)
			return
		}
		switch {
		case r.Header.Src != addrs[0]:
			t.Errorf("Header.Src is %v, want %v", r.Header.Src, addrs[0])
		case r.Header.Dst != addrs[1]:
			t.Errorf("Header.Dst is %v, want %v", r.Header.Dst, addrs[1])
		case r.Header.SrcPort == 0:
			t.Errorf("the header has source port 0")
		case !bytes.HasPrefix(r.Private, []byte("of the REQ\x00")):
			t.Errorf("HasPrefix(r.Private, []byte(\"of the REQ\\x00\")) is false, want true")
		case len(r.Private) != MaxPrivateData:
			t.Errorf("Private has %v elements, want %v", len(r.Private), MaxPrivateData)
		}
		c, err := r.Accept(within(t), Setup{QP: b.qp(), ResponderResources: 3, InitiatorDepth: 9, RNRRetry: 7,
			Private: []byte("of the REP")})
		if err != nil {
			t.Error(err)
			return
		}
		got <- c
	}()
	ca, err = a.Dial(within(t), addrs[1], port, Setup{QP: a.qp(), ResponderResources: 5, InitiatorDepth: 4,
		RNRRetry: 7, Private: []byte("of the REQ")})
	if err != nil {
		t.Fatal(err)
	}
	if cb = <-got; cb == nil {
		t.FailNow()
	}
	if !bytes.HasPrefix(ca.Private(), []byte("of the REP\x00")) {
		t.Errorf("the active side has private data %q, want that of the REP", ca.Private())
	}
	expect.Equal(t, ca.Remote(), addrs[1], "Remote at the active side")
	expect.Equal(t, cb.Remote(), addrs[0], "Remote at the passive side")
	expect.Equal(t, ca.Params().InitiatorDepth, 3, "InitiatorDepth at the active side")
	expect.Equal(t, ca.Params().ResponderResources, 5, "ResponderResources at the active side")
	expect.Equal(t, cb.Params().InitiatorDepth, 5, "InitiatorDepth at the passive side")
	expect.Equal(t, cb.Params().ResponderResources, 3, "ResponderResources at the passive side")
	return ca, cb
}

func TestConnection(t *testing.T) {
	for _, closer := range []string{"active", "passive"} {
		t.Run(closer, func(t *testing.T) {
			a, b := pair(t)
			ca, cb := connect(t, a, b, 20049)
			a.send(ca.QP(), "ping")
			b.expect("ping")
			b.send(cb.QP(), "pong")
			a.expect("pong")
			first, other := ca, cb
			if closer == "passive" {
				first, other = cb, ca
			}
			first.Close()
			if err := ends(t, first); err != nil {
				t.Error(err)
			}
			var d *DisconnectedError
			if err := ends(t, other); !errors.As(err, &d) || d.By != cm.ByPeer {
				t.Errorf("the other side: %v", err)
			}
			expect.Equal(t, ca.QP().State(), verbs.StateError, "state at the active side")
			expect.Equal(t, cb.QP().State(), verbs.StateError, "state at the passive side")
			first.Close() // again does nothing
			if len(a.conns)+len(b.conns)+len(a.byQPN)+len(b.byQPN) != 0 {
				t.Error("a connection is left")
			}
		})
	}
}

func TestNobodyListens(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Listen(1); !errors.Is(err, ErrInUse) {
		t.Errorf("a second listener: %v", err)
	}
	l.Close()
	l.Close()
	if _, err := l.Next(within(t)); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	var f *FailedError
	_, err = a.Dial(within(t), addrs[1], 1, Setup{QP: a.qp()})
	switch {
	case !errors.As(err, &f):
		t.Error(err)
	case f.Cause != cm.Rejected:
		t.Errorf("Cause is %v, want %v", f.Cause, cm.Rejected)
	case f.Reason != cm.ReasonInvalidServiceID:
		t.Errorf("Reason is %v, want %v", f.Reason, cm.ReasonInvalidServiceID)
	case !strings.Contains(err.Error(), "nobody listens"):
		t.Errorf("%q does not say \"nobody listens\"", err.Error())
	}
}

func TestReject(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		if r, err := l.Next(within(t)); err == nil {
			r.Reject([]byte("not you"))
		}
	}()
	var f *FailedError
	_, err = a.Dial(within(t), addrs[1], 1, Setup{QP: a.qp()})
	expect.MustEqual(t, errors.As(err, &f), true, "As(err, &f)")
	expect.Equal(t, f.Reason, cm.ReasonConsumer, "Reason")
	expect.Equal(t, bytes.HasPrefix(f.Private, []byte("not you\x00")), true, "not you as prefix of %q", f.Private)
}

// A REQ without the header is not taken for one of a librdmacm.
func TestForeignREQ(t *testing.T) {
	a, b := pair(t)
	if _, err := b.Listen(1); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	a.notes = nil
	a.mu.Unlock()
	qp := a.qp()
	a.do(cm.Connect{Handle: 1 << 40, Local: gidOf(addrs[0]), Remote: gidOf(addrs[1]),
		ServiceID: serviceid.RDMAIP(1), Transport: ib.RC, QPN: qp.QPN(), PathMTU: ib.MTU1024, PrivateData: []byte{0x10}})
	expect.Eventually(t, "a REJ", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return slices.ContainsFunc(a.notes, func(n cm.Note) bool {
			return n.Message == "REJ" && n.Dir == cm.Received && n.Reason == cm.ReasonUnsupported
		})
	})
}

// Nobody answers: the caller's time decides, and nothing is left.
func TestSilence(t *testing.T) {
	a := newSide(t, 0)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := a.Dial(ctx, addrs[1], 1, Setup{QP: a.qp()}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if len(a.conns) != 0 {
		t.Error("a connection is left")
	}
	if _, err := a.Dial(ctx, netip.MustParseAddr("fd00::1"), 1, Setup{QP: a.qp()}); !errors.Is(err, ErrNoAddress) {
		t.Error(err)
	}
	if _, err := a.Dial(ctx, addrs[1], 1, Setup{QP: a.qp(), Private: make([]byte, MaxPrivateData+1)}); err == nil {
		t.Error("too much private data was taken")
	}
}

// Those who never answer requests do not hold more than MaxWaiting of them.
func TestWaitingIsBounded(t *testing.T) {
	b := newSide(t, 1)
	l, err := b.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	b.Port.mu.Lock()
	for i := range MaxWaiting + 5 {
		b.requested(cm.RequestReceived{Handle: 1<<63 + cm.Handle(i),
			Params: cm.Params{ServiceID: serviceid.RDMAIP(1), Transport: ib.RC,
				PrivateData: Header{Src: addrs[0], Dst: addrs[1]}.Append(nil)}})
	}
	b.Port.mu.Unlock()
	if len(l.requests) != MaxWaiting {
		t.Errorf("%d requests wait", len(l.requests))
	}
}

// fickle is a provider whose GIDs and MTU change.
type fickle struct {
	verbs.Provider
	gids []ib.GID
	mtu  ib.MTU
}

func (f *fickle) Port() verbs.Port {
	p := f.Provider.Port()
	p.GIDs = f.gids
	if f.mtu != 0 {
		p.MTU = f.mtu
	}
	return p
}

func opened(t *testing.T, o Options) *Port {
	t.Helper()
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// A listener listens at the GIDs that there are, and forgets those that there
// were: as many as come and go in the life of a device would be without bound.
func TestGIDsChange(t *testing.T) {
	b := newSide(t, 1)
	f := &fickle{Provider: b.dev, gids: []ib.GID{gidOf(addrs[0]), gidOf(addrs[1])}}
	p := opened(t, Options{Provider: f, Shared: true})
	l, err := p.Listen(9)
	if err != nil {
		t.Fatal(err)
	}
	at := func(g ib.GID) bool {
		req := mad.REQ{ServiceID: serviceid.RDMAIP(9)}
		m := &verbs.MAD{Remote: gidOf(addrs[0]), Local: g}
		if _, err := req.AppendBinary(m.Data[:0]); err != nil {
			t.Fatal(err)
		}
		return p.Owns(m)
	}
	first, second, third := gidOf(addrs[0]), gidOf(addrs[1]), gidOf(netip.MustParseAddr("127.0.0.3"))
	expect.Equal(t, at(first), true, "at(first)")
	expect.Equal(t, at(second), true, "at(second)")
	expect.Equal(t, at(third), false, "at(third)")
	f.gids = []ib.GID{second, third}
	p.Event(verbs.Event{Kind: verbs.GIDChange})
	expect.Equal(t, at(first), false, "at(first)")
	expect.Equal(t, at(second), true, "at(second)")
	expect.Equal(t, at(third), true, "at(third)")
	f.gids = []ib.GID{first} // which nobody has told yet
	l.Close()
	expect.Equal(t, at(first), false, "at(first)")
	expect.Equal(t, at(second), false, "at(second)")
	expect.Equal(t, at(third), false, "at(third)")
}

// A path MTU that our underlay does not carry is refused: large messages would
// be lost, and nobody could tell why.
func TestPathMTU(t *testing.T) {
	a := newSide(t, 0)
	dev, err := softroce.Open(softroce.Options{Underlay: "lo", GID: gidOf(addrs[1])})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	p := opened(t, Options{Provider: &fickle{Provider: dev, gids: dev.Port().GIDs, mtu: ib.MTU1024}})
	l, err := p.Listen(9)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = a.Dial(ctx, addrs[1], 9, Setup{QP: a.qp()})
	var failed *FailedError
	expect.MustEqual(t, errors.As(err, &failed), true, "a path MTU of 4096 where 1024 is carried: As(err, &failed)")
	expect.Equal(t, failed.Cause, cm.Rejected, "a path MTU of 4096 where 1024 is carried: Cause")
	expect.Equal(t, failed.Reason, cm.ReasonInvalidMTU, "a path MTU of 4096 where 1024 is carried: Reason")
}

// A request that the CM has given up, and keeps for repeats of the REQ, makes no
// connection that nobody ever ends.
func TestAnswerTooLate(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen(9)
	if err != nil {
		t.Fatal(err)
	}
	dialed := make(chan error, 1)
	go func() {
		_, err := a.Dial(within(t), addrs[1], 9, Setup{QP: a.qp()})
		dialed <- err
	}()
	r, err := l.Next(within(t))
	if err != nil {
		t.Fatal(err)
	}
	b.do(cm.Disconnect{Handle: r.handle}) // as when time runs out
	c, err := r.Begin(Setup{QP: b.qp()})
	if err != nil {
		t.Fatal(err)
	}
	if ends(t, c) == nil {
		t.Error("no error")
	}
	b.Port.mu.Lock()
	defer b.Port.mu.Unlock()
	if n, m := len(b.conns), len(b.byQPN); n+m != 0 {
		t.Errorf("%d connections and %d queue pairs are still known", n, m)
	}
	if <-dialed == nil {
		t.Error("a connection")
	}
}

// A port that closes takes its connections along, and the peer hears of it.
func TestPortCloses(t *testing.T) {
	a, b := pair(t)
	ca, cb := connect(t, a, b, 7)
	a.Close()
	if err := ends(t, ca); err != nil && !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := ends(t, cb); err == nil {
		t.Error("the peer thinks it did it")
	}
	if _, err := a.Dial(within(t), addrs[1], 7, Setup{QP: a.qp()}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if _, err := a.Listen(7); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// Owns tells the MADs of two managers on one QP 1 apart.
func TestOwns(t *testing.T) {
	var mu sync.Mutex
	var seen []*verbs.MAD
	a, b := pair(t)
	b.dev.SetTap(func(out bool, p []byte) {
		if out || len(p) < 20+8+12+8+verbs.MADLen || p[0]>>4 != 4 || p[20+8+7] != 1 { // QP 1
			return
		}
		m := &verbs.MAD{Remote: gidOf(addrs[0]), Local: gidOf(addrs[1])}
		copy(m.Data[:], p[20+8+12+8:])
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, m)
	})
	other := opened(t, Options{Provider: b.dev, Shared: true})
	ca, cb := connect(t, a, b, 9)
	listens, err := b.Listen(9)
	if err != nil {
		t.Fatal(err)
	}
	defer listens.Close()
	mu.Lock()
	for _, m := range seen {
		expect.Equal(t, b.Owns(m), true, "attribute %#x: Owns of the host it is for", m.Data[16:18])
		expect.Equal(t, other.Owns(m), false, "attribute %#x: Owns of another", m.Data[16:18])
	}
	if len(seen) < 2 {
		t.Errorf("%d MADs were seen", len(seen))
	}
	mu.Unlock()
	ca.Close()
	ends(t, cb)
}

// The octets are those that Linux's rdma_cm sends, as captured from rping.
func TestHeader(t *testing.T) {
	for _, tt := range []struct {
		h    Header
		want string
	}{
		{Header{0x9c40, netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")},
			"00409c40" + "000000000000000000000000" + "0a000001" + "000000000000000000000000" + "0a000002"},
		{Header{1, netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")},
			"00600001" + "fe800000000000000000000000000001" + "fe800000000000000000000000000002"},
	} {
		b := tt.h.Append(nil)
		if hex.EncodeToString(b) != tt.want {
			t.Errorf("%v: %x", tt.h, b)
		}
		h, rest, err := ParseHeader(append(b, "rest"...))
		if err != nil {
			t.Errorf("err is %v, want nil", err)
		}
		expect.Equal(t, h, tt.h, "h")
		expect.Equal(t, string(rest), "rest", "rest")
		for i, want := range map[int]error{0: errHeaderVersion, 1: errHeaderFamily} {
			bad := bytes.Clone(b)
			bad[i] = 0x50
			if _, _, err := ParseHeader(bad); !errors.Is(err, want) {
				t.Errorf("octet %d: %v", i, err)
			}
		}
		if _, _, err := ParseHeader(b[:HeaderLen-1]); !errors.Is(err, errHeaderShort) {
			t.Error(err)
		}
	}
}

func FuzzHeader(f *testing.F) {
	f.Add(Header{1, addrs[0], addrs[1]}.Append(nil))
	f.Fuzz(func(t *testing.T, in []byte) {
		h, rest, err := ParseHeader(in)
		if err != nil {
			return
		}
		again, none, err := ParseHeader(h.Append(nil))
		if err != nil {
			t.Fatalf("err is %v, want nil", err)
		}
		expect.MustEqual(t, again, h, "again")
		expect.MustEqual(t, len(none), 0, "length of none")
		expect.MustEqual(t, len(rest), len(in)-HeaderLen, "length of rest")
	})
}

// Whatever the peer asks for, a queue pair whose peer is gone ends.
func TestAckTimeoutIsBounded(t *testing.T) {
	for asked, want := range map[ib.Timeout]ib.Timeout{0: 18, 1: 1, 14: 14, 18: 18, 19: 18, 31: 18} {
		if got := ackTimeout(asked); got != want {
			t.Errorf("%d became %d, want %d", asked, got, want)
		}
	}
}
