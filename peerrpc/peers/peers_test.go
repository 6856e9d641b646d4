package peers

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/ipoib"
	"ipoibcm/peerrpc"
	"ipoibcm/provider/softroce"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/rpcrdma/transport"
	"ipoibcm/verbs"
)

// A status that is too large leaves peers out and keeps its warnings; one that is
// too large without peers is an error.
func TestStatusDocument(t *testing.T) {
	v := control.Status{Peers: make([]control.Peer, 4000), Warnings: []string{"mind the gap"}}
	b, err := statusDocument(v)
	var got control.Status
	if err == nil {
		err = json.Unmarshal(b, &got)
	}
	switch {
	case err != nil:
		t.Errorf("%v", err)
	case len(b) > peerrpc.MaxDocument:
		t.Errorf("b has %v elements, want at most %v", len(b), peerrpc.MaxDocument)
	case len(got.Peers) == 0:
		t.Error("Peers has no elements, want some")
	case len(got.Peers) == len(v.Peers):
		t.Errorf("Peers has %v elements, want another than %v", len(got.Peers), len(v.Peers))
	}
	expect.MustEqual(t, len(got.Warnings), 2, "length of Warnings")
	expect.Equal(t, got.Warnings[0], v.Warnings[0], "Warnings[0]")
	expect.Equal(t, got.Warnings[1], leftOut(len(v.Peers)-len(got.Peers)), "Warnings[1]")
	v.Warnings = []string{strings.Repeat("x", peerrpc.MaxDocument)}
	if b, err := statusDocument(v); err == nil {
		t.Errorf("%d octets", len(b))
	}
}

// What a peer asks is answered as RFC 5531 and RFC 8166 say.
func TestPeerAnswers(t *testing.T) {
	var s Service
	s.events.add(control.Event{Text: "first"})
	ask := func(args []byte, results ...int) (rpcrdma.RPCReply, []byte, rpcrdma.Answer) {
		t.Helper()
		a, ok := s.answer(t.Context(), askerTrusted, &rpcrdma.Serve{Payload: args, Results: results}).(rpcrdma.Answer)
		if !ok {
			t.Fatal("no answer")
		}
		head, rest, err := rpcrdma.ParseRPCReply(a.Payload)
		if err != nil {
			t.Fatal(err)
		}
		return head, rest, a
	}
	null := (&rpcrdma.RPCCall{Prog: peerrpc.Program, Vers: peerrpc.Version}).Append(nil)
	if head, _, _ := ask(null); head.Status != rpcrdma.RPCSuccess {
		t.Errorf("NULL: %v", head.Status)
	}
	null[11] = 3 // of RPC
	switch head, _, _ := ask(null); {
	case head.Status != rpcrdma.RPCMismatch:
		t.Errorf("RPC version 3: Status is %v, want %v", head.Status, rpcrdma.RPCMismatch)
	case head.Low != 2:
		t.Errorf("RPC version 3: Low is %v, want 2", head.Low)
	case head.High != 2:
		t.Errorf("RPC version 3: High is %v, want 2", head.High)
	}
	other := (&rpcrdma.RPCCall{Prog: peerrpc.Program + 1, Vers: peerrpc.Version}).Append(nil)
	if head, _, _ := ask(other); head.Status != rpcrdma.RPCProgUnavail {
		t.Errorf("another program: %v", head.Status)
	}
	events := (&rpcrdma.RPCCall{Prog: peerrpc.Program, Vers: peerrpc.Version, Proc: peerrpc.ProcEvents}).Append(nil)
	events = peerrpc.Range{Max: 9}.Append(events)
	// A Write chunk without segments is not used; the item stays where it was.
	for _, results := range [][]int{nil, {0}, {4096}} {
		head, rest, a := ask(events, results...)
		last, lines, err := peerrpc.ParseBatch(rest, nil)
		switch {
		case head.Status != rpcrdma.RPCSuccess:
			t.Errorf("%v: Status is %v, want %v", results, head.Status, rpcrdma.RPCSuccess)
		case err != nil:
			t.Errorf("%v: %v", results, err)
		case last != 1:
			t.Errorf("%v: last is %v, want 1", results, last)
		case !strings.Contains(string(lines), "first"):
			t.Errorf("%v: %q does not say \"first\"", results, string(lines))
		}
		if reduced := len(results) == 1 && results[0] > 0; reduced != (len(a.Reduce) == 1) {
			t.Errorf("%v: moves %v", results, a.Reduce)
		}
	}
}

// What connections count is told while they last and after.
func TestPeerCounters(t *testing.T) {
	dev, err := softroce.Open(softroce.Options{Underlay: "lo", GID: ib.GID(netip.MustParseAddr("127.0.0.1").As16())})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	s := Service{live: map[*transport.End]struct{}{}, past: map[string]uint64{}}
	count := func() (disconnected uint64, all int) {
		s.rpcCounters(func(name string, v uint64) {
			if all++; name == rpcrdma.ReasonDisconnected.String() {
				disconnected = v
			}
		})
		return disconnected, all
	}
	for want := range uint64(2) {
		e, err := transport.New(transport.Options{Provider: dev})
		if err != nil {
			t.Fatal(err)
		}
		s.begin(e)
		if n, all := count(); n != want || all == 0 {
			t.Errorf("%d of %d counters", n, all)
		}
		if want == 1 {
			e.Close()
			if n, _ := count(); n != 2 {
				t.Errorf("%d while it is known", n)
			}
		}
		s.end(e)
		if n, _ := count(); n != want+1 {
			t.Errorf("%d after it has ended, want %d", n, want+1)
		}
	}
	if len(s.live) != 0 {
		t.Error("ended ones are kept")
	}
}

// A peerPair is a service on 127.0.0.1, and a host that may ask it.
type peerPair struct {
	t      *testing.T
	s      *Service
	client verbs.Provider
	port   *rdmacm.Port
}

// servePeers starts a service that answers those in allow.
func servePeers(t *testing.T, allow string) *peerPair {
	open := func(addr string) (verbs.Provider, *rdmacm.Port) {
		dev, err := softroce.Open(softroce.Options{Underlay: "lo", GID: ib.GIDFromAddr(netip.MustParseAddr(addr))})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { dev.Close() })
		p, err := rdmacm.Open(rdmacm.Options{Provider: dev, CM: cm.Options{GID: dev.Port().GIDs[0], MaxConns: 8}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		return dev, p
	}
	server, sp := open("127.0.0.1")
	client, cp := open("127.0.0.2")
	s := New(Options{Provider: server, Allow: []netip.Prefix{netip.MustParsePrefix(allow)},
		Log: slog.New(slog.DiscardHandler), Publish: func(string, string, *bool) {},
		Neighbour: func(context.Context, netip.Addr) (g ib.GID, class ipoib.Class, err error) { return g, class, nil }})
	s.port = sp
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	t.Cleanup(func() { stop(); <-served })
	return &peerPair{t, s, client, cp}
}

// dial asks for a connection once.
func (p *peerPair) dial() (*transport.End, error) {
	return transport.DialRoCE(p.t.Context(), p.port, netip.MustParseAddr("127.0.0.1"), peerrpc.Port,
		transport.Options{Provider: p.client})
}

// connect asks for a connection until the service listens.
func (p *peerPair) connect() *transport.End {
	for range 100 {
		if e, err := p.dial(); err == nil {
			p.t.Cleanup(func() { e.Close() })
			return e
		}
		time.Sleep(20 * time.Millisecond)
	}
	p.t.Fatal("no connection")
	return nil
}

// Who is not in peer_allow is refused, and has no place.
func TestPeerNotAllowed(t *testing.T) {
	p := servePeers(t, "10.0.0.0/8")
	for range 100 { // until it listens
		e, err := p.dial()
		if err == nil {
			e.Close()
			t.Fatal("connected")
		}
		if p.s.n.refused.Load() > 0 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if n := p.s.n.refused.Load(); n == 0 {
		t.Error("none was counted as refused")
	}
	if n := p.s.ends; n != 0 {
		t.Errorf("%d places taken, want none", n)
	}
}

// A call is answered by the rights of its moment, on a connection that was there before. The connection ends
// when its peer may ask nothing any more.
func TestAskersOfOpenConnection(t *testing.T) {
	p := servePeers(t, "127.0.0.0/8")
	e := p.connect()
	events := peerrpc.Range{Max: 1}.Append((&rpcrdma.RPCCall{Prog: peerrpc.Program, Vers: peerrpc.Version,
		Proc: peerrpc.ProcEvents}).Append(nil))
	ask := func() rpcrdma.RPCStatus {
		t.Helper()
		r, err := e.Call(t.Context(), rpcrdma.Submit{Payload: events, MaxReply: 64})
		if err != nil {
			t.Fatal(err)
		}
		head, _, err := rpcrdma.ParseRPCReply(r.Payload)
		if err != nil {
			t.Fatal(err)
		}
		return head.Status
	}
	all := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	expect.Equal(t, ask(), rpcrdma.RPCAuthError, "status of EVENTS, when allowed")
	p.s.SetAskers(all, all)
	expect.Equal(t, ask(), rpcrdma.RPCSuccess, "status of EVENTS, when trusted")
	p.s.SetAskers(all, nil)
	expect.Equal(t, ask(), rpcrdma.RPCAuthError, "status of EVENTS, when allowed again")
	p.s.SetAskers(nil, all)
	expect.Equal(t, ask(), rpcrdma.RPCSuccess, "status of EVENTS, when trusted again")
	p.s.SetAskers(nil, nil)
	select {
	case <-e.Done():
	case <-time.After(peerIdle / 2): // well before it would end because it asks nothing
		t.Error("the connection is kept for a peer that may ask nothing")
	}
}

// Who connects and asks nothing, as a REQ from a forged address does, keeps its
// place for a short while only; who has asked keeps it.
func TestSilentPeer(t *testing.T) {
	p := servePeers(t, "127.0.0.0/8")
	s := p.s
	places := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.ends
	}
	asks := p.connect()
	call := (&rpcrdma.RPCCall{XID: 1, Prog: peerrpc.Program, Vers: peerrpc.Version}).Append(nil)
	if _, err := asks.Call(t.Context(), rpcrdma.Submit{Payload: call}); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	p.connect()
	for places() < 2 && time.Since(start) < peerFirst { // the RTU is on its way
		time.Sleep(time.Millisecond)
	}
	// More than two where a connection was not made in time, and another attempt made.
	if n := places(); n < 2 && time.Since(start) < peerFirst {
		t.Fatalf("%d places taken, want 2", n)
	}
	for places() > 1 && time.Since(start) < peerFirst+time.Minute { // over real sockets, so by the real clock
		time.Sleep(20 * time.Millisecond)
	}
	d := time.Since(start)
	if n := places(); n != 1 {
		t.Errorf("%d places taken after %v, want 1", n, d)
	}
	if d < peerFirst-100*time.Millisecond {
		t.Errorf("the place was given back after %v, want %v", d, peerFirst)
	}
}

// REQs whose senders have not shown that they are where they say take no place. They
// displace each other, the oldest first, and of one GID its own.
func TestPeerArrivals(t *testing.T) {
	s := Service{from: map[ib.GID]int{}}
	gone := func(a *arrival) bool {
		select {
		case <-a.displaced:
			return true
		default:
			return false
		}
	}
	honest := s.arrive(ib.GID{15: 1})
	mine := []*arrival{s.arrive(ib.GID{15: 2})}
	for range maxEndsEach {
		mine = append(mine, s.arrive(ib.GID{15: 2}))
	}
	if !gone(mine[0]) {
		t.Error("a GID with one too many still has its oldest")
	}
	expect.Equal(t, gone(mine[1]), false, "another of the same GID was displaced")
	expect.Equal(t, gone(honest), false, "that of another GID was displaced")
	for i := range maxArrivals - maxEndsEach - 1 {
		s.arrive(ib.GID{14: byte(1 + i>>8), 15: byte(i)})
	}
	if gone(honest) {
		t.Error("it was displaced although there was room")
	}
	s.arrive(ib.GID{13: 1})
	if !gone(honest) {
		t.Error("the oldest has not given way")
	}
	if n := len(s.arrivals); n != maxArrivals {
		t.Errorf("%d arrivals, want %d", n, maxArrivals)
	}
	s.depart(mine[1])
	s.depart(honest)
	if n := len(s.arrivals); n != maxArrivals-1 {
		t.Errorf("%d arrivals after one has gone, want %d", n, maxArrivals-1)
	}
	if s.ends != 0 {
		t.Errorf("%d places taken, want none", s.ends)
	}
	if n := s.n.displaced.Load(); n != 2 {
		t.Errorf("%d counted as displaced, want 2", n)
	}
}

// Those who ask at a time are bounded, and no peer keeps the others out.
func TestPeerPlaces(t *testing.T) {
	s := Service{from: map[ib.GID]int{}}
	taken := 0
	for g := range byte(8) {
		for n := range maxEndsEach + 1 {
			if s.enter(ib.GID{g}) {
				taken++
			} else if n < maxEndsEach && taken < maxPeerEnds {
				t.Errorf("GID %d is refused its place %d", g, n)
			}
		}
	}
	expect.Equal(t, taken, maxPeerEnds, "how many ask")
	expect.Equal(t, s.from[ib.GID{0}], maxEndsEach, "how many ask of one GID")
	for range maxEndsEach {
		s.leave(ib.GID{0})
	}
	expect.Equal(t, s.enter(ib.GID{9}), true, "after leaving: a place for another")
	expect.Equal(t, len(s.from), maxPeerEnds/maxEndsEach, "after leaving: number of GIDs")
}

// Peers that ask often do not make the driver answer as often, and one that has
// gone spoils nothing for the others.
func TestRecent(t *testing.T) {
	var r recent[int]
	made := 0
	anew := func() (int, error) {
		made++
		return made, nil
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if v, _ := r.get(gone, anew); v != 1 {
		t.Errorf("got %d", v)
	}
	for range 100 {
		if v, err := r.get(t.Context(), anew); v < 2 || err != nil {
			t.Fatalf("got %d, %v", v, err)
		}
	}
	if made > 50 {
		t.Errorf("made %d times", made)
	}
	n := made
	r.at = r.at.Add(-peerStatusOf)
	if v, _ := r.get(t.Context(), anew); v != n+1 {
		t.Errorf("got %d after its time, %d were made", v, n)
	}
}

// Who was refused is told why, and does not look for a fault of the underlay.
func TestPeerHints(t *testing.T) {
	s := New(Options{})
	for _, c := range []struct {
		reason cm.Reason
		text   string
		class  ipoib.Class
		want   string
	}{
		{cm.ReasonConsumer, "peer_allow", ipoib.ClassRFC, "peer_allow"},
		{cm.ReasonConsumer, "busy", ipoib.ClassRFC, "try again"},
		{cm.ReasonInvalidServiceID, "", ipoib.ClassRFC, "answers nobody"},
		{cm.ReasonInvalidServiceID, "", ipoib.ClassLegacy, "of another make"},
		{cm.ReasonInvalidMTU, "", ipoib.ClassUnknown, "MTU"},
		{cm.ReasonNoQP, "", ipoib.ClassUnknown, "is the underlay up"},
	} {
		private := make([]byte, rdmacm.MaxRejectData)
		copy(private, c.text)
		if got := s.DialHint(&rdmacm.FailedError{Cause: cm.Rejected, Reason: c.reason, Private: private},
			control.PeerPath{Class: c.class.String()}); !strings.Contains(got, c.want) {
			t.Errorf("%v %q: %q", c.reason, c.text, got)
		}
	}
}

// A futureProvider is a provider of a server of version one, which says by it that it speaks version nine alone.
type futureProvider struct {
	verbs.Provider
	refusals atomic.Int32 // messages that were refused
}

func (p *futureProvider) CreateQP(init verbs.QPInit) (verbs.QP, error) {
	qp, err := p.Provider.CreateQP(init)
	return futureQP{qp, p}, err
}

type futureQP struct {
	verbs.QP
	p *futureProvider
}

func (q futureQP) PostSend(wrs []verbs.SendWR) (int, error) {
	for _, wr := range wrs {
		h, _, err := rpcrdma.ParseHeader(wr.SG[0].Buf)
		if err != nil || h.Error.Code != rpcrdma.ErrVers {
			continue
		}
		h.Error.Low, h.Error.High = 9, 9
		if b, err := h.AppendBinary(nil); err == nil {
			copy(wr.SG[0].Buf, b)
			q.p.refusals.Add(1)
		}
	}
	return q.QP.PostSend(wrs)
}

// Who asks an agent with no version in common is told so at the first try. Who asks again is not answered from
// memory: the agent may have been upgraded.
func TestNoVersionInCommon(t *testing.T) {
	p := servePeers(t, "127.0.0.0/8")
	l, err := p.port.Listen(peerrpc.Port)
	if err != nil {
		t.Fatal(err)
	}
	future := &futureProvider{Provider: p.client}
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			r, err := l.Next(context.Background())
			if err != nil {
				return // closed
			}
			e, err := transport.AcceptRoCE(r, transport.Options{Provider: future, RPC: rpcrdma.Options{MaxVersion: 1}})
			if err != nil {
				t.Error(err)
				return
			}
			defer e.Close()
		}
	}()
	defer func() { l.Close(); <-accepted }()
	for try := range int32(2) {
		c, about, err := p.s.Dial(t.Context(), netip.MustParseAddr("127.0.0.2"))
		if err == nil {
			c.Close()
			t.Fatalf("try %d: connected", try)
		}
		if got := p.s.DialHint(err, about); !strings.Contains(got, "older") {
			t.Errorf("try %d: the hint for %q is %q, want that an agent is older", try, err, got)
		}
		expect.Equal(t, future.refusals.Load(), try+1, "try %d: number of refusals", try)
	}
}

// Whoever waits for the lists to change is woken, however many wait: one that has nothing to do any more takes
// nothing from another.
func TestAskersWakeAll(t *testing.T) {
	for range 100 {
		s := New(Options{})
		ended := make(chan struct{})
		for range 3 {
			go func() {
				s.await(t.Context(), true)
				ended <- struct{}{}
			}()
		}
		s.SetAskers(nil, nil)
		s.SetAskers(nil, []netip.Prefix{netip.MustParsePrefix("fe80::/10")})
		for n := range 3 {
			select {
			case <-ended:
			case <-time.After(10 * time.Second):
				t.Fatalf("%d of 3 were woken", n)
			}
		}
	}
}
