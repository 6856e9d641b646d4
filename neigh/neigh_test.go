package neigh

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip/iptest"
	"ipoibcm/wire/nd"
)

var (
	ip1, ip2 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	ll1, ll2 = netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
	t0       = time.Unix(1, 0)
)

// newTable returns a table of host A with 10.0.0.1 and fe80::1, announced.
func newTable(o Options) *Table {
	if o.LinkAddr.IsZero() {
		o.LinkAddr = hosts["A"]
	}
	o.Rand, o.DADProbes = rand.New(rand.NewPCG(1, 1)), -1
	t := New(o)
	t.Step(nil, t0, AddrAdded{netip.PrefixFrom(ip1, 24)})
	t.Step(nil, t0, AddrAdded{netip.PrefixFrom(ll1, 64)})
	return t
}

// sent returns the SendUD actions of as.
func sent(as []Action) (out []SendUD) {
	for _, a := range as {
		if s, ok := a.(SendUD); ok {
			out = append(out, s)
		}
	}
	return out
}

func TestQueryVector(t *testing.T) {
	link := encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x123, GID: ib.GIDFromAddr(netip.MustParseAddr("192.0.2.1"))}
	tab := newTable(Options{LinkAddr: link})
	got := sent(tab.Step(nil, t0, Resolve{IP: ip2}))
	// The ARP part of an IPoIB UD packet (RFC 4391 section 9.2).
	want := "0020080014040001" + "8000012300000000000000000000ffffc0000201" + "0a000001" +
		"0000000000000000000000000000000000000000" + "0a000002"
	// 4755-3-1 (the query goes to the broadcast-GID, in UD), 4755-3.1-4, 4755-9-1
	expect.MustEqual(t, len(got), 1, "length of got")
	expect.MustEqual(t, got[0].To.Broadcast, true, "To.Broadcast")
	expect.MustEqual(t, got[0].EtherType, encap.ARP, "EtherType")
	if hex.EncodeToString(got[0].Payload) != want {
		t.Fatalf("query is %+v\nwant %s", got, want)
	}
	// A solicitation too, though its IPv6 destination is the solicited-node group.
	got = sent(tab.Step(nil, t0, Resolve{IP: ll2}))
	var ns nd.NS
	// 4755-3-1
	expect.MustEqual(t, len(got), 1, "length of got")
	expect.MustEqual(t, got[0].To.Broadcast, true, "To.Broadcast")
	expect.MustEqual(t, got[0].EtherType, encap.IPv6, "EtherType")
	expect.MustEqual(t, ns.UnmarshalBinary(got[0].Payload), nil, "UnmarshalBinary")
	expect.MustEqual(t, ns.Dst, netip.MustParseAddr("ff02::1:ff00:2"), "Dst")
	expect.MustEqual(t, ns.Link, link, "Link")
}

// TestAnswers shows that answers are unicast UD to the asker and carry our
// address, even to one that is known and in use (has a connection).
func TestAnswers(t *testing.T) {
	for _, flags := range []encap.Flags{0, encap.FlagRC, encap.FlagRC | encap.FlagUC} {
		link := hosts["A"]
		link.Flags = flags
		tab := newTable(Options{LinkAddr: link})
		b, _ := arp.NewRequest(hosts["B"], ip2, ip1).AppendBinary(nil)
		for range 2 { // the second time B is known and confirmed
			got := sent(tab.Step(nil, t0, RecvARP{From: hosts["B"].Key(), Payload: b}))
			var p arp.Packet
			// 4755-7-4, 4755-3.1-13, 4755-3.1-14, 4755-3.1-10, 4755-3.1-9 (flags zero when UD only)
			expect.MustEqual(t, len(got), 1, "flags %v: length of got", flags)
			expect.MustEqual(t, got[0].To.LinkAddr, hosts["B"], "flags %v: To.LinkAddr", flags)
			expect.MustEqual(t, p.UnmarshalBinary(got[0].Payload), nil, "flags %v: UnmarshalBinary", flags)
			expect.MustEqual(t, p.Op, arp.Reply, "flags %v: Op", flags)
			expect.MustEqual(t, p.Sender, link, "flags %v: Sender", flags)
			expect.MustEqual(t, p.SenderIP, ip1, "flags %v: SenderIP", flags)
			expect.MustEqual(t, p.Target, hosts["B"], "flags %v: Target", flags)
			expect.MustEqual(t, p.TargetIP, ip2, "flags %v: TargetIP", flags)
			tab.Step(nil, t0, ConfirmedLink{hosts["B"]})
		}
		b, _ = nd.NewNS(ll2, ll1, hosts["B"]).AppendBinary(nil)
		got := sent(tab.Step(nil, t0, RecvND{From: hosts["B"].Key(), Payload: b}))
		var na nd.NA
		// 4755-7-4, 4755-3.1-13
		expect.MustEqual(t, len(got), 1, "flags %v: length of got", flags)
		expect.MustEqual(t, got[0].To.LinkAddr, hosts["B"], "flags %v: To.LinkAddr", flags)
		expect.MustEqual(t, na.UnmarshalBinary(got[0].Payload), nil, "flags %v: UnmarshalBinary", flags)
		expect.MustEqual(t, na.Link, link, "flags %v: Link", flags)
		expect.MustEqual(t, na.Target, ll1, "flags %v: Target", flags)
		expect.MustEqual(t, na.Dst, ll2, "flags %v: Dst", flags)
		expect.MustEqual(t, na.Solicited, true, "flags %v: Solicited", flags)
		expect.MustEqual(t, na.Override, true, "flags %v: Override", flags)
	}
}

// TestReservedFlags receives an answer with every reserved bit set.
func TestReservedFlags(t *testing.T) {
	tab := newTable(Options{})
	tab.Step(nil, t0, Resolve{IP: ip2, Packet: []byte("p")})
	p := arp.Packet{Op: arp.Reply, Sender: hosts["C"], SenderIP: ip2, Target: hosts["A"], TargetIP: ip1}
	b, _ := p.AppendBinary(nil)
	b[8] |= 0x3f
	as := tab.Step(nil, t0, RecvARP{From: hosts["C"].Key(), Payload: b})
	// 4755-3.1-5, 4755-3.1-7, 4755-3-2
	if len(as) != 2 || as[0] != (Resolved{ip2, hosts["C"]}) {
		t.Fatalf("got %v, want C resolved as UD only", as)
	}
}

// TestExpiry shows that an entry that expires says so: the connection may go.
func TestExpiry(t *testing.T) {
	tab := newTable(Options{})
	b, _ := arp.NewRequest(hosts["B"], ip2, ip1).AppendBinary(nil)
	tab.Step(nil, t0, RecvARP{From: hosts["B"].Key(), Payload: b})
	var got []Action
	for d := tab.Deadline(); !d.IsZero() && len(tab.Neighbors()) > 0; d = tab.Deadline() {
		got = tab.Step(nil, d, Wake{})
	}
	// 4755-3.4-3
	if len(got) != 1 || got[0] != (Expired{ip2, hosts["B"], ExpireUnused}) {
		t.Fatalf("got %v, want an expiry", got)
	}
}

// TestFlood sends many forged claims and queries: memory, answers and
// changes stay bounded, and a neighbour in use is not lost. With AcceptAlways it moves
// once a second; without, it stays where it answers.
func TestFlood(t *testing.T) {
	for _, always := range []bool{false, true} {
		t.Run(fmt.Sprintf("always=%v", always), func(t *testing.T) { testFlood(t, always) })
	}
}

func testFlood(t *testing.T, always bool) {
	tab := newTable(Options{AcceptAlways: always})
	tab.Step(nil, t0, Resolve{IP: ip2})
	p := arp.Packet{Op: arp.Reply, Sender: hosts["B"], SenderIP: ip2, Target: hosts["A"], TargetIP: ip1}
	b, _ := p.AppendBinary(nil)
	tab.Step(nil, t0, RecvARP{Payload: b})
	r := rand.New(rand.NewPCG(7, 7))
	answers, changes, probes := 0, 0, 0
	const seconds, perSecond = 10, 20000
	for i := range seconds * perSecond {
		now := t0.Add(time.Duration(i) * time.Second / perSecond)
		link := encap.LinkAddr{Flags: encap.FlagRC, QPN: 2 + ib.QPN(r.IntN(1<<23)), GID: hosts["C"].GID}
		q := arp.NewRequest(link, netip.AddrFrom4([4]byte{10, byte(1 + r.IntN(200)), byte(r.Uint32()),
			byte(r.Uint32())}), ip1)
		if i%4 == 0 {
			q = arp.NewRequest(link, ip2, ip2) // an impostor claims B's address
		}
		b, _ = q.AppendBinary(b[:0])
		for _, a := range tab.Step(nil, now, RecvARP{Payload: b}) {
			switch a := a.(type) {
			case SendUD:
				if a.To.LinkAddr.Key() == hosts["B"].Key() { // a probe
					tab.Step(nil, now, answer(t, hosts["B"]))
					probes++
				}
				answers++
			case Changed:
				if a.IP == ip2 {
					changes++
				}
			}
		}
		tab.Step(nil, now, ConfirmedLink{hosts["B"]})
	}
	n := tab.Counters()
	// 4755-8-1
	switch {
	case answers > 4096*(seconds+1):
		t.Errorf("answers is %v, want at most %v", answers, 4096*(seconds+1))
	case len(tab.entries) > 4096:
		t.Errorf("entries has %v elements, want at most 4096", len(tab.entries))
	case tab.limit.sources.Len() > maxSources:
		t.Errorf("sources has %v elements, want at most %v", tab.limit.sources.Len(), maxSources)
	}
	if always {
		checkSome(t, "changes", changes, seconds)
	} else {
		expect.Equal(t, changes, 0, "changes")
		checkSome(t, "probes", probes, seconds)
	}
	switch _, ok := tab.Lookup(ip2); {
	case !ok:
		t.Errorf("ok is false")
	case n.Drops[DropRateSource]+n.Drops[DropRateAll] == 0:
		t.Errorf("the rate limiters dropped nothing")
	case n.Drops[DropLocked] == 0:
		t.Errorf("nothing was dropped because an entry was locked")
	}
}

// checkSome checks that something happened, and at most that often.
func checkSome(t *testing.T, what string, n, most int) {
	t.Helper()
	if n < 1 || n > most {
		t.Errorf("%d %s, want 1 to %d", n, what, most)
	}
}

// TestScan resolves more absent hosts than the table holds.
func TestScan(t *testing.T) {
	tab := newTable(Options{MaxNeighbors: 100})
	out := 0
	for i := range 1000 {
		for _, a := range tab.Step(nil, t0, Resolve{IP: netip.AddrFrom4([4]byte{10, 0, 1 + byte(i>>8), byte(i)}),
			Packet: []byte("x")}) {
			if _, ok := a.(Discard); ok {
				out++
			}
		}
	}
	expect.Equal(t, out, 900, "out")
	expect.Equal(t, len(tab.entries), 100, "length of entries")
	expect.Equal(t, tab.n.Drops[DropTableFull], 900, "Drops[DropTableFull]")
	for d := tab.Deadline(); !d.IsZero(); d = tab.Deadline() {
		tab.Step(nil, d, Wake{})
	}
	expect.Equal(t, len(tab.entries), 0, "number of entries when all timers have fired")
	expect.Equal(t, tab.queued, 0, "queued when all timers have fired")
}

// TestResolveAhead: a neighbour is asked for on behalf of packets that follow, from
// their source; those that come while it is asked for wait, and cause no second request.
func TestResolveAhead(t *testing.T) {
	tab := newTable(Options{})
	for _, p := range []string{"10.0.0.1/24", "10.0.0.7/24"} {
		tab.Step(nil, t0, AddrAdded{netip.MustParsePrefix(p)})
	}
	target, source := netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("10.0.0.7")
	out := tab.Step(nil, t0, Resolve{IP: target, Source: source})
	var asked []netip.Addr
	for _, a := range out {
		if a, ok := a.(SendUD); ok {
			var p arp.Packet
			if err := p.UnmarshalBinary(a.Payload); err != nil {
				t.Fatal(err)
			}
			asked = append(asked, p.SenderIP)
		}
	}
	if want := []netip.Addr{source}; !slices.Equal(asked, want) {
		t.Fatalf("asked from %v, want %v", asked, want)
	}
	pkt, _ := iptest.Echo{Src: source, Dst: target}.AppendBinary(nil)
	if out := tab.Step(nil, t0, Resolve{IP: target, Packet: pkt}); len(out) != 0 {
		t.Errorf("the packet that follows causes %v, want nothing", out)
	}
	if tab.queued != len(pkt) {
		t.Errorf("%d octets wait, want %d", tab.queued, len(pkt))
	}
}

// TestSource shows whose address asks.
func TestSource(t *testing.T) {
	tab := newTable(Options{})
	for _, p := range []string{"10.0.0.7/24", "172.16.0.1/16", "fd00::1/64"} {
		tab.Step(nil, t0, AddrAdded{netip.MustParsePrefix(p)})
	}
	pkt := make([]byte, 20)
	pkt[0] = 0x45
	copy(pkt[12:], []byte{10, 0, 0, 7})
	for _, tt := range []struct {
		name   string
		target string
		pkt    []byte
		want   string
	}{
		{"the packet's source", "10.0.0.9", pkt, "10.0.0.7"},
		{"the subnet's", "172.16.9.9", nil, "172.16.0.1"},
		{"any, if no subnet fits", "192.0.2.1", nil, "10.0.0.1"},
		{"link-local to link-local", "fe80::9", nil, "fe80::1"},
		{"global to global", "fd00::9", nil, "fd00::1"},
		{"global to global off-link", "fd01::9", nil, "fd00::1"},
	} {
		o := tab.source(netip.MustParseAddr(tt.target), sourceOf(tt.pkt))
		if o == nil || o.ip.String() != tt.want {
			t.Errorf("%s: for %s got %+v, want %s", tt.name, tt.target, o, tt.want)
		}
	}
}

func TestStrings(t *testing.T) {
	for d := range numDrops {
		if d.String() == "" {
			t.Errorf("drop %d has no name", d)
		}
	}
	expect.Equal(t, Drop(200).String(), "unknown", "Drop(200)")
	for s := StateIncomplete; s <= StateFailed; s++ {
		if s.String() == "NONE" {
			t.Errorf("state %d has no name", s)
		}
	}
	for r := ExpireUnused; r <= ExpireOwn; r++ {
		if r.String() == "none" {
			t.Errorf("expire reason %d has no name", r)
		}
	}
}

// Unknown sources that claim to be neighbours replace each other, half of the table at
// most, and never one that has answered or is in use (4755-8-1).
func TestHearsay(t *testing.T) {
	own, other := hosts["A"], hosts["B"]
	tab := New(Options{LinkAddr: own, DADProbes: -1, MaxNeighbors: 16, RequestRate: -1, SourceRate: -1})
	now := time.Unix(1000, 0)
	step := func(ev Event) { tab.Step(nil, now, ev) }
	step(AddrAdded{netip.MustParsePrefix("10.0.0.1/8")})
	claimAt := func(link encap.LinkAddr, i int) netip.Addr {
		a := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		b, err := arp.NewRequest(link, a, netip.MustParseAddr("10.0.0.1")).AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		step(RecvARP{From: link.Key(), Payload: b})
		return a
	}
	claim := func(i int) netip.Addr { return claimAt(other, i) }
	// prove confirms a neighbour that is alone at its link-layer address.
	prove := func(i int) netip.Addr {
		link := other
		link.QPN += ib.QPN(1 + i)
		a := claimAt(link, i)
		step(ConfirmedLink{link})
		return a
	}
	var proven []netip.Addr
	for i := range 6 {
		if i%2 == 0 {
			proven = append(proven, prove(i))
		} else {
			proven = append(proven, claim(i))
			step(Resolve{IP: proven[i], Packet: []byte{0x45}})
		}
	}
	now = now.Add(5 * time.Minute) // they are stale by now, or on the way there
	for i := range 1000 {
		a := claim(1000 + i)
		if _, ok := tab.Lookup(a); !ok {
			t.Fatalf("claim %d was not taken", i)
		}
	}
	for _, a := range proven {
		if _, ok := tab.Lookup(a); !ok {
			t.Errorf("%v had to go", a)
		}
	}
	expect.Equal(t, len(tab.Neighbors()), len(proven)+8, "number of neighbours")
	expect.Equal(t, tab.Counters().Evicted, 1000-8, "Evicted")
	// With many that are proven, unknown sources have what is left.
	for i := range 10 {
		prove(5000 + i)
	}
	if n := len(tab.Neighbors()); n != 16 {
		t.Errorf("%d neighbours of 16", n)
	}
	prove(6000) // the table is full of proven ones: the one unused for longest goes
	if n := len(tab.Neighbors()); n != 16 {
		t.Errorf("%d neighbours of 16", n)
	}
}

// That half is no more while there are neighbours that did not answer, and these stay on record.
func TestHearsayBesideFailed(t *testing.T) {
	tab := New(Options{LinkAddr: hosts["A"], DADProbes: -1, MaxNeighbors: 16, RequestRate: -1, SourceRate: -1})
	now := time.Unix(1000, 0)
	tab.Step(nil, now, AddrAdded{netip.MustParsePrefix("10.0.0.1/8")})
	for i := range byte(4) {
		tab.Step(nil, now, Resolve{IP: netip.AddrFrom4([4]byte{10, 0, 1, i}), Packet: []byte{0x45}})
	}
	for range 10 {
		now = now.Add(time.Second)
		tab.Step(nil, now, Wake{})
	}
	for i := range byte(100) {
		b, err := arp.NewRequest(hosts["B"], netip.AddrFrom4([4]byte{10, 0, 2, i}), netip.MustParseAddr("10.0.0.1")).AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		tab.Step(nil, now, RecvARP{From: hosts["B"].Key(), Payload: b})
	}
	failed := 0
	for _, n := range tab.Neighbors() {
		if n.State == StateFailed {
			failed++
		}
	}
	expect.Equal(t, failed, 4, "neighbours that did not answer")
	expect.Equal(t, len(tab.Neighbors()), 4+8, "neighbours")
}

// A packet that has no room beside those of other neighbours takes none of its own neighbour's with it.
func TestPacketWithoutRoom(t *testing.T) {
	tab := New(Options{LinkAddr: hosts["A"], DADProbes: -1, MaxTotalOctets: 1000, MaxQueuedOctets: 2000})
	now := time.Unix(1000, 0)
	tab.Step(nil, now, AddrAdded{netip.MustParsePrefix("10.0.0.1/8")})
	for _, p := range []struct {
		ip     string
		octets int
	}{{"10.0.0.2", 800}, {"10.0.0.3", 100}, {"10.0.0.3", 300}} {
		tab.Step(nil, now, Resolve{IP: netip.MustParseAddr(p.ip), Packet: make([]byte, p.octets)})
	}
	n, _ := tab.Lookup(netip.MustParseAddr("10.0.0.3"))
	expect.Equal(t, n.QueuedOctets, 100, "octets that wait")
	expect.Equal(t, tab.Counters().Drops[DropQueueTotal], uint64(1), "dropped")
}

// answer returns an ARP reply to host A that says that 10.0.0.2 is at link.
func answer(t *testing.T, link encap.LinkAddr) RecvARP {
	t.Helper()
	p := arp.Packet{Op: arp.Reply, Sender: link, SenderIP: ip2, Target: hosts["A"], TargetIP: ip1}
	b, err := p.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	return RecvARP{From: link.Key(), Payload: b}
}

// at returns where the table has 10.0.0.2.
func at(tab *Table) encap.LinkAddr {
	n, _ := tab.Lookup(ip2)
	return n.LinkAddr
}

// For a second an address cannot change again though every announcement is believed,
// except by what a probe brings;
// a new QPN of the same GID, which a restart leads to, may come at once, and once.
func TestLock(t *testing.T) {
	b, c := hosts["B"], hosts["C"]
	restarted, again := b, b
	restarted.QPN, again.QPN = b.QPN+1, b.QPN+2

	tab := newTable(Options{AcceptAlways: true})
	tab.Step(nil, t0, Resolve{IP: ip2, Packet: []byte("p")})
	tab.Step(nil, t0, answer(t, b))
	tab.Step(nil, t0.Add(100*time.Millisecond), answer(t, c))
	if got := at(tab); got != b {
		t.Errorf("another GID within a second: %v, want %v", got, b)
	}
	tab.Step(nil, t0.Add(200*time.Millisecond), answer(t, restarted))
	if got := at(tab); got != restarted {
		t.Errorf("a new QPN within a second of the first answer: %v, want %v", got, restarted)
	}
	tab.Step(nil, t0.Add(300*time.Millisecond), answer(t, again))
	if got := at(tab); got != restarted {
		t.Errorf("another QPN within a second of that: %v, want %v", got, restarted)
	}
	tab.Step(nil, t0.Add(400*time.Millisecond), DoubtedLink{restarted.Key()})
	if n, _ := tab.Lookup(ip2); n.State != StateProbe {
		t.Fatalf("state %v, want PROBE", n.State)
	}
	tab.Step(nil, t0.Add(500*time.Millisecond), answer(t, c))
	if got := at(tab); got != c {
		t.Errorf("the answer to a probe: %v, want %v", got, c)
	}
}

// One asker has one share, whatever flags it gives itself (4755-8-1).
func TestFlagsMakeNoOtherAsker(t *testing.T) {
	l := newLimiter(0, 1)
	link := hosts["B"]
	if _, ok := l.allow(t0, link); !ok {
		t.Error("the first was refused")
	}
	link.Flags ^= encap.FlagUC
	if why, ok := l.allow(t0, link); ok {
		t.Error("the second passed with other flags")
	} else if why != DropRateSource {
		t.Errorf("refused as %v, want %v", why, DropRateSource)
	}
}

// Where all that waits is too much, the neighbour that wants more gives up its oldest.
func TestTotalQueue(t *testing.T) {
	tab := newTable(Options{MaxQueuedOctets: 10, MaxTotalOctets: 16})
	ip3 := netip.MustParseAddr("10.0.0.3")
	tab.Step(nil, t0, Resolve{IP: ip2, Packet: make([]byte, 9)})
	tab.Step(nil, t0, Resolve{IP: ip3, Packet: []byte("oldest")})
	var gone []string
	for _, a := range tab.Step(nil, t0, Resolve{IP: ip3, Packet: []byte("new")}) {
		if d, ok := a.(Discard); ok {
			gone = append(gone, string(d.Packet))
		}
	}
	if len(gone) != 1 || gone[0] != "oldest" {
		t.Errorf("discarded %q, want the oldest", gone)
	}
	if got := tab.QueuedOctets(); got != 12 {
		t.Errorf("%d octets wait, want 12", got)
	}
}

// The policy changes while the table is in use: a smaller bound evicts as new entries would, what is
// in use stays, and an announcement is believed from then on.
func TestSetPolicy(t *testing.T) {
	own, other := hosts["A"], hosts["B"]
	tab := New(Options{LinkAddr: own, DADProbes: -1, MaxNeighbors: 64, RequestRate: -1, SourceRate: -1})
	now := time.Unix(1000, 0)
	step := func(ev Event) (moved []netip.Addr) {
		for _, a := range tab.Step(nil, now, ev) {
			if c, ok := a.(Changed); ok {
				moved = append(moved, c.IP)
			}
		}
		return moved
	}
	step(AddrAdded{netip.MustParsePrefix("10.0.0.1/8")})
	claim := func(link encap.LinkAddr, i int) []netip.Addr {
		b, err := arp.NewRequest(link, netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), netip.MustParseAddr("10.0.0.1")).
			AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		return step(RecvARP{From: link.Key(), Payload: b})
	}
	used := netip.AddrFrom4([4]byte{10, 1, 0, 0})
	claim(hosts["B'"], 0) // the only one there
	for i := 1; i < 30; i++ {
		claim(other, i)
	}
	step(ConfirmedLink{hosts["B'"]})
	step(SetPolicy{MaxNeighbors: 16})
	if got, want := len(tab.Neighbors()), 9; got != want { // half of 16 are hearsay
		t.Errorf("%d neighbours after the bound went down, want %d", got, want)
	}
	if _, ok := tab.Lookup(used); !ok {
		t.Error("the one in use had to go")
	}
	if got, want := tab.Counters().Evicted, uint64(21); got != want {
		t.Errorf("%d were evicted, want %d", got, want)
	}
	now = now.Add(2 * time.Second) // it may not move at once
	if moved := claim(hosts["C"], 0); len(moved) != 0 {
		t.Errorf("%v moved as soon as somebody said so, want none", moved)
	}
	now = now.Add(10 * time.Second)
	step(ConfirmedLink{hosts["B'"]})
	now = now.Add(2 * time.Second)
	step(SetPolicy{MaxNeighbors: 16, AcceptAlways: true})
	if moved := claim(hosts["C"], 0); !slices.Equal(moved, []netip.Addr{used}) {
		t.Errorf("%v moved, want %v", moved, used)
	}
}
