package ipoib

import (
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/encap"
)

// thousandPeers are the peers of a host on a large link.
func thousandPeers() (peers []ib.GID) {
	for i := range 1000 {
		peers = append(peers, gid(i+1))
	}
	return peers
}

// newCopying is a world of one node that sends each of a thousand peers a copy.
func newCopying(t *testing.T, seed uint64) (*world, *node, []ib.GID) {
	w, peers := newWorld(t, seed), thousandPeers()
	a := w.node(1, Options{Peers: peers, Copies: true})
	w.run(5 * time.Second)
	return w, a, peers
}

// Members come and go. Who is none any more gets no copies, and keeps its connection;
// a list of nobody is a list still, and not multicast.
func TestMembersChange(t *testing.T) {
	w := newWorld(t, 8)
	opt := Options{Copies: true}
	a, b, c := w.node(1, opt), w.node(2, opt), w.node(3, opt)
	w.run(2 * time.Second)
	g := mustEcho("10.0.0.1", "224.0.0.1", 100)
	a.output(g)
	w.run(time.Second)
	if got := b.got(g) + c.got(g) + a.onGroup; got != 0 {
		t.Errorf("%d copies while nobody is known, want none", got)
	}
	for _, n := range w.nodes {
		n.step(SetMembers{Peers: []ib.GID{gid(1), gid(2), gid(3)}, Copies: true})
	}
	a.ping("10.0.0.3", 100, true)
	w.run(2 * time.Second)
	before, _ := w.agree(a, c)
	a.step(SetMembers{Peers: []ib.GID{gid(2)}, Copies: true})
	a.output(g)
	w.run(time.Second)
	if got := b.got(g); got != 1 {
		t.Errorf("b got %d copies, want 1", got)
	}
	if got := c.got(g); got != 0 {
		t.Errorf("c is no member and got %d copies, want none", got)
	}
	p := a.ping("10.0.0.3", 9000, true)
	w.run(time.Second)
	if got := c.got(p); got != 1 {
		t.Errorf("%d packets by the connection, want 1", got)
	}
	if after, _ := w.agree(a, c); after.Conn != before.Conn {
		t.Errorf("connection %d, want the one of before, %d", after.Conn, before.Conn)
	}
	heard := a.f.Heard()
	if len(heard) != 1 {
		t.Errorf("%d members have a last word, want b alone", len(heard))
	}
}

// With hints a resolution is two packets, however many members there are; a hint that leads
// nowhere costs a quarter of a second.
func TestHintsSpareCopies(t *testing.T) {
	w := newWorld(t, 9)
	peers := thousandPeers()
	opt := Options{Peers: peers, Copies: true}
	a := w.node(1, opt)
	w.node(2, opt)
	w.run(5 * time.Second)
	a.step(SetMembers{Peers: peers, Copies: true,
		Hints: map[netip.Addr]ib.GID{ip4("10.0.0.2"): gid(2), ip4("10.0.0.3"): gid(7)}})
	count := func(dst string) (n int) {
		for _, act := range a.f.Step(nil, w.now, Packet{IP: mustEcho("10.0.0.1", dst, 64)}) {
			for more := []Action{act}; len(more) > 0; more = more[1:] {
				if f, ok := more[0].(FIBAction); ok {
					done, _ := a.k.Do(f.Action)
					for _, d := range done {
						more = append(more, a.f.Step(nil, w.now, FIBEvent{Event: d})...)
					}
				}
				switch act := more[0].(type) {
				case SendUD:
					n++
				case SendCopies:
					n += len(act.To)
				}
			}
		}
		return n
	}
	if got := count("10.0.0.2"); got != 1 {
		t.Errorf("%d packets ask for a member that is published, want 1", got)
	}
	before := a.f.n[nCopies]
	if got := count("10.0.0.9"); got != copyBurst {
		t.Errorf("%d packets at once ask for one that is not, want %d", got, copyBurst)
	}
	w.run(150 * time.Millisecond)
	if got := int(a.f.n[nCopies] - before); got != len(peers) {
		t.Errorf("%d packets ask for one that is not, want %d", got, len(peers))
	}
}

// A host that floods a group of a thousand members sends no more copies than the bound, and its
// questions of address resolution go first all the same.
func TestCopiesAreSpread(t *testing.T) {
	w, a, peers := newCopying(t, 10)
	sent := func() (n uint64) { return a.f.n[nCopies] }
	before := sent()
	g := mustEcho("10.0.0.1", "224.0.0.1", 100)
	const rounds = 200
	for i := range rounds {
		a.output(g)
		if i == rounds/2 {
			a.ping("10.0.0.77", 64, true)
		}
		if i == rounds/2+15 { // 150 ms later
			if got := len(a.f.copies.waiting[copyAsk]); got != 0 {
				t.Errorf("%d questions wait, want none: they go first", got)
			}
			if got := len(a.f.copies.waiting[copyOther]); got == 0 {
				t.Error("nothing else waits, so this shows nothing")
			}
		}
		w.run(10 * time.Millisecond)
	}
	// What the three questions take of the rate is not taken twice.
	got, most := sent()-before, uint64(copyBurst+copyRate*rounds/100/kernelCost+3*len(peers)/kernelCost)
	if got > most {
		t.Errorf("%d copies in %v, want %d at most", got, rounds*10*time.Millisecond, most)
	}
	if got < most/2 {
		t.Errorf("%d copies, want about %d: they are sent too slowly", got, most)
	}
	if a.f.n[dropCopies] == 0 {
		t.Error("no packet was dropped, and more came than can be sent")
	}
	late := 0
	for i, j := range a.f.copies.waiting[copyOther] {
		if i > 0 && len(j.to) < len(peers) {
			t.Errorf("packet %d of those that wait has left to some before the one in front of it has left to all", i)
		}
		late += len(j.to)
	}
	if late > maxKernelCopies {
		t.Errorf("%d copies wait, want %d at most", late, maxKernelCopies)
	}
	if !a.held {
		t.Error("the data path is not told that there is no room for more")
	}
	// What waits is sent when there is time, and then nothing wakes the machine any more.
	w.run(40 * time.Second)
	if got := a.f.copies.len(); got != 0 {
		t.Errorf("%d packets wait for ever", got)
	}
	if a.held {
		t.Error("nothing waits, and the data path still drops packets to groups")
	}
}

// Where a copy costs much of a processor there are fewer of them: in the long run they take no more than their
// share, those of the kernel half of it. A single question takes no longer for that.
func TestCopiesTakeTheirShare(t *testing.T) {
	peers := thousandPeers()
	for _, tt := range []struct {
		name  string
		flood func(a *node, i int)
		share float64
	}{
		{"packets of programs", func(a *node, _ int) { a.output(mustEcho("10.0.0.1", "224.0.0.1", 100)) }, copyShare / kernelCost},
		{"questions", func(a *node, i int) {
			a.ping(netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}).String(), 64, true)
		}, copyShare},
	} {
		w := newWorld(t, 12)
		a := w.node(1, Options{Peers: peers, Copies: true})
		a.copy = 100 * time.Microsecond
		a.addAddr("10.0.1.250/16")
		w.run(20 * time.Second)
		const d = 20 * time.Second
		before := a.f.n[nCopies]
		for i := range 200 {
			tt.flood(a, i)
			w.run(d / 200)
		}
		took := time.Duration(a.f.n[nCopies]-before) * a.copy
		// The burst was there before; a look takes what copyBurst brings before it knows what that cost.
		most := time.Duration(tt.share*float64(d+time.Second)) + copyBurst*a.copy
		if took > most {
			t.Errorf("%s: %v of %v went to copies, want %v at most", tt.name, took, d, most)
		}
		if took < most*3/4 {
			t.Errorf("%s: %v of %v went to copies, want about %v: they are sent too slowly", tt.name, took, d, most)
		}
	}
	w := newWorld(t, 13)
	a := w.node(1, Options{Peers: peers, Copies: true})
	a.copy = 40 * time.Microsecond
	w.run(20 * time.Second)
	before := a.f.n[nCopies]
	a.ping("10.0.0.77", 64, true)
	w.run(110 * time.Millisecond)
	if got := int(a.f.n[nCopies] - before); got != len(peers) {
		t.Errorf("%d copies of a question within 110ms, want all %d", got, len(peers))
	}
}

// While the link is down the data path holds nothing back for what waited before.
func TestNothingHeldWhileDown(t *testing.T) {
	_, a, _ := newCopying(t, 14)
	for range 100 {
		a.output(mustEcho("10.0.0.1", "224.0.0.1", 100))
	}
	if !a.held {
		t.Fatal("a hundred packets to a thousand members are not held, so this shows nothing")
	}
	a.step(UnderlayChanged{Link: encap.LinkAddr{QPN: a.link().QPN, GID: gid(1001)}})
	if a.held {
		t.Error("the link is down, and the data path still drops packets to groups")
	}
}

// A question does not wait until all copies of the one before have left.
func TestQuestionsTakeTurns(t *testing.T) {
	w := newWorld(t, 11)
	peers := thousandPeers()
	a := w.node(1, Options{Peers: peers, Copies: true})
	b := w.node(2, Options{Copies: true})
	b.addAddr("10.0.0.200/24")
	w.run(5 * time.Second)
	a.ping("10.0.0.77", 64, true) // who is not there
	p := a.ping("10.0.0.200", 64, true)
	w.run(20 * time.Millisecond)
	if got := b.got(p); got != 1 {
		t.Errorf("%d packets came within 20ms, want 1", got)
	}
}
