package fib_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/internal/long"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

// TestMetrics: a route on the link has the MTU of UD, for what is sent before a
// connection is up, and the MSS of connections, which TCP fixes in the SYN. The
// host route has the MTU of its connection, both ways of the same device.
func TestMetrics(t *testing.T) {
	for _, tt := range []struct {
		name    string
		opt     fib.Options
		addr    string
		hop     string
		conn    int
		dst     string
		mtu     int
		advmss  int
		ourself bool // of protocol 75
	}{
		// 4755-5-3, 4755-7.2-1, 4755-7.2-2
		{name: "on the link, IPv4", addr: "10.0.0.1/24", dst: "10.0.0.0/24", mtu: 2044, advmss: 65480},
		{name: "on the link, IPv6", addr: "fd00::1/64", dst: "fd00::/64", mtu: 2044, advmss: 65460},
		{name: "broadcast", addr: "10.0.0.1/24", dst: "10.0.0.255/32", mtu: 2044},
		{name: "multicast, IPv6", addr: "fd00::1/64", dst: "ff00::/8", mtu: 2044},
		{name: "multicast, IPv4", addr: "10.0.0.1/24", dst: "224.0.0.0/4", mtu: 2044, ourself: true},
		// 4755-7.2-1, 4755-5-4
		{name: "a connection, IPv4", addr: "10.0.0.1/24", hop: "10.0.0.2", conn: 65520, dst: "10.0.0.2/32",
			mtu: 65520, ourself: true},
		{name: "a connection, IPv6", addr: "fd00::1/64", hop: "fd00::2", conn: 65520, dst: "fd00::2/128", mtu: 65520,
			ourself: true},
		{name: "a small connection", addr: "10.0.0.1/24", hop: "10.0.0.2", conn: 2044, dst: "10.0.0.2/32", mtu: 2044,
			ourself: true},
		{name: "messages that are cheap", opt: fib.Options{BestMessage: 61440}, addr: "10.0.0.1/24",
			hop: "10.0.0.2", conn: 65520,
			dst: "10.0.0.2/32", mtu: 65520, advmss: 61396, ourself: true},
		{name: "the same, on the link", opt: fib.Options{BestMessage: 61440}, addr: "fd00::1/64", dst: "fd00::/64",
			mtu: 2044, advmss: 61376},
		{name: "another UD MTU", opt: fib.Options{UDMTU: 1444}, addr: "10.0.0.1/24", dst: "10.0.0.0/24", mtu: 1444,
			advmss: 65480},
		{name: "a peer address", addr: "10.0.0.1/32", hop: "10.0.0.1", conn: 9000, dst: "10.0.0.1/32", mtu: 9000,
			advmss: 65480},
	} {
		b := newBench()
		b.t = fib.New(tt.opt)
		b.feed(b.k.Start())
		b.feed(b.k.Up(true))
		b.feed(b.k.AddAddr(netip.MustParsePrefix(tt.addr)))
		if tt.hop != "" {
			if !tt.ourself { // a peer address is nobody's own
				b.k.Peer = true
			}
			b.feed([]fib.Event{fib.SetHop{Addr: netip.MustParseAddr(tt.hop),
				Path: nexthop.Path{Kind: nexthop.PathConn, Conn: 1, MTU: tt.conn}}})
		}
		r, ok := b.route(tt.dst, tt.ourself)
		if !ok {
			t.Errorf("%s: no route to %s", tt.name, tt.dst)
			continue
		}
		if r.MTU != tt.mtu {
			t.Errorf("%s: mtu %d, want %d", tt.name, r.MTU, tt.mtu)
		}
		if r.AdvMSS != tt.advmss {
			t.Errorf("%s: advmss %d, want %d", tt.name, r.AdvMSS, tt.advmss)
		}
	}
}

// route finds the kernel's route to dst, ours or its own.
func (b *bench) route(dst string, ours bool) (rtnl.Route, bool) {
	rs := b.k.Kernel()
	if ours {
		rs = slices.Collect(maps.Values(b.k.Own))
	}
	for _, r := range rs {
		if r.Dst == netip.MustParsePrefix(dst) {
			return r, true
		}
	}
	return rtnl.Route{}, false
}

// knows reports whether a packet to dst goes out without a question.
func (b *bench) knows(dst netip.Addr) bool {
	out, err := b.Do("packet " + dst.String())
	return err == nil && len(out) == 1 && strings.HasPrefix(out[0], "packet to")
}

// TestLeftovers: what an agent before us left is removed.
func TestLeftovers(t *testing.T) {
	b := newBench()
	b.t = fib.New(fib.Options{})
	b.k.Up(true)
	b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/24"))
	for _, dst := range []string{"10.0.0.7/32", "224.0.0.0/4"} {
		r := rtnl.Route{Dst: netip.MustParsePrefix(dst), Table: rtnl.TableMain, Type: rtnl.Unicast, Protocol: rtnl.Protocol}
		b.k.Own[r.Key()] = r
	}
	b.feed(b.k.Start())
	if _, ok := b.route("10.0.0.7/32", true); ok {
		t.Error("the host route of before is still there")
	}
	for key := range b.k.Own {
		if key.Table == rtnl.TableMain {
			t.Errorf("%v is still in table main", key.Dst)
		}
	}
}

// TestForeignEdit: metrics that somebody changes are put right, once for each edit.
func TestForeignEdit(t *testing.T) {
	b := newBench()
	b.feed(b.k.Up(true))
	b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/24")))
	r, _ := b.route("10.0.0.0/24", false)
	r.MTU = 1500
	b.out = nil
	b.feed(b.k.Edit(r))
	if got, want := b.out, []string{"set 10.0.0.0/24 proto 2 mtu 2044 advmss 65480"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestRefusals: what the kernel refuses is counted each time and told once, and is
// not tried again until something changes.
func TestRefusals(t *testing.T) {
	b := newBench()
	refuse := errors.New("no buffer space")
	notes := func() int {
		n := 0
		for _, o := range b.out {
			if strings.Contains(o, "no buffer space") {
				n++
			}
		}
		return n
	}
	b.feed(b.k.Up(true))
	b.k.Refuse = refuse
	b.out = nil
	b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/24")))
	if n := notes(); n != 3 {
		t.Errorf("%d notes, want one for each of 3 routes: %q", n, b.out)
	}
	b.feed(b.k.MTU(65000))
	if n := notes(); n != 3 {
		t.Errorf("%d notes after the same again, want 3: %q", n, b.out)
	}
	if n := b.t.Counters().RoutesRefused; n != 6 {
		t.Errorf("%d refusals counted, want 6", n)
	}
	b.k.Refuse = nil
	b.feed(b.k.MTU(65520))
	if r, _ := b.route("10.0.0.0/24", false); r.MTU != 2044 {
		t.Errorf("mtu %d once the kernel takes it, want 2044", r.MTU)
	}
}

// TestNoAnswer: a kernel that cannot be asked costs packets their destination, but
// not the one that is known already.
func TestNoAnswer(t *testing.T) {
	b := newBench()
	b.feed(b.k.Up(true))
	b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/24")))
	b.slow = true
	if _, err := b.Do("packet 10.0.0.2"); err != nil {
		t.Fatal(err)
	}
	flow := rtnl.Flow{Dst: netip.MustParseAddr("10.0.0.2")}
	b.feed([]fib.Event{fib.Answered{Lookup: fib.Lookup{Flow: flow}, Err: errors.New("timed out")}})
	if n := b.t.Counters().DropNoAnswer; n != 1 {
		t.Errorf("%d packets dropped, want 1", n)
	}
	if n := b.t.Dests(); n != 0 {
		t.Errorf("%d destinations, want 0", n)
	}
	b.slow = false
	b.Do("packet 10.0.0.2")
	b.slow = true
	b.Do("stale 10.0.0.2")
	b.feed([]fib.Event{fib.Answered{Lookup: fib.Lookup{Flow: flow}, Err: errors.New("timed out")}})
	if !b.knows(flow.Dst) {
		t.Error("the next hop that was known is forgotten")
	}
}

// TestBounds: destinations, questions and what waits are bounded, and what the
// bounds refuse is counted.
func TestBounds(t *testing.T) {
	b := newBench()
	b.t = fib.New(fib.Options{MaxDests: 8, MaxLookups: 4, MaxWaiting: 1000})
	b.feed(b.k.Start())
	b.feed(b.k.Up(true))
	b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/16")))
	packet := func(i int) { b.Do(fmt.Sprintf("packet 10.0.%d.%d", i>>8, i&255)) }
	for i := range 20 {
		packet(i + 2)
	}
	if n := b.t.Dests(); n != 8 {
		t.Errorf("%d destinations, want 8", n)
	}
	if n := b.t.Counters().Evicted; n != 12 {
		t.Errorf("%d gave way, want 12", n)
	}
	if !b.knows(netip.MustParseAddr("10.0.0.21")) {
		t.Error("the newest destination is not there")
	}
	b.slow = true
	for i := range 6 {
		packet(i + 100)
	}
	if n := b.t.Counters().DropBusy; n != 2 {
		t.Errorf("%d packets dropped for too many questions, want 2", n)
	}
	for range 70 {
		packet(100)
	}
	waiting := 0
	b.slow = false
	for _, ev := range b.held {
		b.out = nil
		b.feed([]fib.Event{ev})
		for _, o := range b.out {
			if strings.HasPrefix(o, "packet to") {
				waiting++
			}
		}
	}
	switch {
	case waiting+int(b.t.Counters().DropWaiting) != 74:
		t.Errorf("waiting+Counters.DropWaiting is %v, want 74", waiting+int(b.t.Counters().DropWaiting))
	case waiting == 0:
		t.Errorf("no packet waits, want some")
	case waiting > 1000/28:
		t.Errorf("waiting is %v, want at most %v", waiting, 1000/28)
	}
}

// TestPutOff: a question that was put off, because too many were under way, is asked by a later packet. The data path
// hands that up, and each one after it, until there is an answer.
func TestPutOff(t *testing.T) {
	b := newBench()
	b.t = fib.New(fib.Options{MaxLookups: 1})
	b.feed(b.k.Start())
	b.feed(b.k.Up(true))
	b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/16")))
	b.Do("packet 10.0.0.2")
	b.Pass(31 * time.Second)
	b.slow = true
	b.Do("packet 10.0.0.3")
	do := func(what string, want ...string) {
		t.Helper()
		if got, err := b.Do(what); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v, want %q", what, got, err, want)
		}
	}
	do("stale 10.0.0.2", "stale 10.0.0.2")
	do("packet 10.0.0.2", "packet to 10.0.0.2 goes to 10.0.0.2") // the old way
	b.feed(b.held)
	b.held = nil
	b.Pass(2 * time.Second)
	do("packet 10.0.0.2", "? 10.0.0.2")
	do("packet 10.0.0.2")
	b.out = nil
	b.feed(b.held)
	if want := []string{"dest 10.0.0.2 by 10.0.0.2", "packet to 10.0.0.2 goes to 10.0.0.2",
		"packet to 10.0.0.2 goes to 10.0.0.2"}; !slices.Equal(b.out, want) {
		t.Errorf("answered: %q, want %q", b.out, want)
	}
}

// TestPathAlone: who asks for a path without a packet neither waits as a packet nor is a packet dropped.
func TestPathAlone(t *testing.T) {
	m, now := fib.New(fib.Options{MaxLookups: 2}), time.Now()
	ask := func(dst string) []fib.Action {
		return m.Step(nil, now, fib.Resolve{Flow: rtnl.Flow{Dst: netip.MustParseAddr(dst)}})
	}
	asked := ask("10.0.0.2")
	ask("10.0.0.3")
	ask("10.0.0.4") // too many questions
	for range 70 {
		ask("10.0.0.3") // more than may wait
	}
	if n := m.Waiting(); n != 0 {
		t.Errorf("%d packets wait, want none", n)
	}
	m.Step(nil, now, fib.Answered{Lookup: asked[0].(fib.Lookup), Err: errors.New("no kernel")})
	m.Step(nil, now, fib.Stop{})
	if n := m.Counters(); n.DropBusy+n.DropWaiting+n.DropNoAnswer+n.DropDown != 0 {
		t.Errorf("counted as dropped: %+v", n)
	}
}

// TestFlushInTime: a rising MTU empties the kernel's cache of path MTUs only while
// there can be one in it that the kernel heard of from us.
func TestFlushInTime(t *testing.T) {
	for _, tt := range []struct {
		later time.Duration
		want  int
	}{{9 * time.Minute, 1}, {11 * time.Minute, 0}} {
		b := newBench()
		b.feed(b.k.Up(true))
		b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/24")))
		b.Do("packet 10.0.0.2")
		b.Do("hop 10.0.0.2 ud 2044")
		b.Do("toobig")
		for range tt.later / (30 * time.Second) {
			b.Pass(30 * time.Second)
			b.Do("stale 10.0.0.2") // in use
		}
		b.Do("hop 10.0.0.2 conn 1 65520")
		if b.k.Flushed != tt.want {
			t.Errorf("after %v: %d flushes, want %d", tt.later, b.k.Flushed, tt.want)
		}
	}
}

// TestLearnsWhatIsUsed: the destination that is used stays, however many others come.
func TestLearnsWhatIsUsed(t *testing.T) {
	b := newBench()
	b.t = fib.New(fib.Options{MaxDests: 16})
	b.feed(b.k.Start())
	b.feed(b.k.Up(true))
	b.feed(b.k.AddAddr(netip.MustParsePrefix("10.0.0.1/16")))
	b.Do("packet 10.0.0.2")
	for i := range 100 {
		b.now = b.now.Add(time.Second)
		b.Do(fmt.Sprintf("packet 10.0.1.%d", i))
		if i%8 == 0 {
			b.Do("stale 10.0.0.2") // as the data path says of what is used
		}
	}
	if !b.knows(netip.MustParseAddr("10.0.0.2")) {
		t.Error("the destination in use was forgotten")
	}
}

// TestMachine drives the machine with random events, beside a kernel that answers
// at once or late, and checks after each what must hold.
func TestMachine(t *testing.T) {
	for seed := range uint64(long.Of(40, 600)) {
		machine(t, seed, rand.New(rand.NewPCG(seed, 1)), 300)
		machine(t, seed, rand.New(rand.NewPCG(seed, 2)), 30) // short: few refusals, after which all is asked again
	}
}

func FuzzTable(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) { machine(t, a, rand.New(rand.NewPCG(a, b)), 100) })
}

func machine(t *testing.T, seed uint64, r *rand.Rand, steps int) {
	t.Helper()
	b := newBench()
	b.t = fib.New(fib.Options{MaxDests: 24, MaxLookups: 8})
	v := &view{t: t, seed: seed, paths: map[netip.Addr]nexthop.Path{}, dests: map[rtnl.Flow]netip.Addr{},
		conns: map[netip.Addr]int{}}
	b.seen = v.action
	b.feed(b.k.Start())
	w, refused := walk{Rand: r}, false
	for range steps {
		l := w.line()
		refused = refused || l == "refuse"
		if r.IntN(6) == 0 {
			b.Pass(time.Duration(r.IntN(40)) * time.Second)
		}
		v.lines = append(v.lines, l)
		if f := strings.Fields(l); f[0] == "hop" || f[0] == "gone" {
			if v.conns[netip.MustParseAddr(f[1])] = 0; len(f) == 5 {
				v.conns[netip.MustParseAddr(f[1])], _ = strconv.Atoi(f[4])
			}
		}
		if _, err := b.Do(l); err != nil && !strings.HasPrefix(l, "lose") {
			v.failf("%v", err)
		}
		v.check(b)
	}
	b.Do("accept")
	for range 20 {
		b.Do("answer")
	}
	if refused { // what was is tried again with the next change
		b.feed(b.k.SetRules(b.k.Rules...))
	}
	v.settled(b)
}

// A walk draws what happens next.
type walk struct {
	*rand.Rand
	next []string // lines that are drawn already
}

func (w *walk) pick(s ...string) string { return s[w.IntN(len(s))] }

func (w *walk) host() string {
	if w.IntN(4) == 0 {
		return fmt.Sprintf("fd00::%x", 2+w.IntN(6))
	}
	return fmt.Sprintf("10.0.%d.%d", w.IntN(3), 2+w.IntN(12))
}

func (w *walk) prefix() string {
	return w.pick("10.0.0.0/16", "10.0.0.0/24", "10.0.0.0/28", "10.0.1.0/30", "0.0.0.0/0", "10.0.0.4/32", "fd00::/120")
}

func (w *walk) line() string {
	if len(w.next) > 0 {
		l := w.next[0]
		w.next = w.next[1:]
		return l
	}
	switch w.IntN(22) {
	case 0:
		return w.pick("up", "up", "down")
	case 1:
		return fmt.Sprintf("mtu %d", 1500+w.IntN(64000))
	case 2:
		return w.pick("addr", "unaddr") + " " + w.pick("10.0.0.1/24", "10.0.0.1/16", "10.0.1.1/24", "fd00::1/64")
	case 3, 4:
		return w.pick("route", "unroute") + " " + w.prefix() + w.pick("", " via "+w.host(), " dev other", " table 100")
	case 5:
		return w.pick("rule from 10.0.0.1/32 table 100", "rule to 10.0.0.0/28 table 100", "norules")
	case 6, 7:
		return w.conn(w.host())
	case 8:
		return "hop " + w.host() + " ud 2044"
	case 9:
		return "gone " + w.host()
	case 10:
		return w.pick("wait", "answer", "answer", "toobig", "refuse", "accept", "accept")
	case 11, 12:
		return "stale " + w.host()
	case 13:
		return "theirs " + host4(w.host()) + w.pick("", " mtu 1400")
	case 14:
		return "lose " + w.host()
	case 15: // a connection is lost and made anew before the kernel has changed its route
		h := w.host()
		conn := w.conn(h)
		w.next = []string{"wait", w.pick("gone "+h, "hop "+h+" ud 2044"), conn, "answer", "answer"}
		return conn
	}
	return "packet " + w.host() + w.pick("", " from 10.0.1.1")
}

func (w *walk) conn(host string) string {
	return fmt.Sprintf("hop %s conn %d %d", host, 1+w.IntN(9), 2044+w.IntN(60000))
}

// host4 is a host prefix, of IPv4 only.
func host4(a string) string {
	if strings.Contains(a, ":") {
		return "10.0.2.2/32"
	}
	return a + "/32"
}

// A view is the data path, and what must hold for it.
type view struct {
	t     *testing.T
	seed  uint64
	paths map[netip.Addr]nexthop.Path
	dests map[rtnl.Flow]netip.Addr
	conns map[netip.Addr]int // the MTU of neighbours' connections; zero: none
	lines []string
}

func (v *view) failf(format string, args ...any) {
	v.t.Helper()
	v.t.Fatalf("seed %d: %s\nafter\n%s", v.seed, fmt.Sprintf(format, args...),
		strings.Join(v.lines[max(0, len(v.lines)-30):], "\n"))
}

func (v *view) action(a fib.Action) {
	switch a := a.(type) {
	case fib.SetPath:
		if a.Path != (nexthop.Path{}) {
			v.paths[a.Hop] = a.Path
			return
		}
		for flow, hop := range v.dests {
			if hop == a.Hop {
				v.failf("the path of %v goes, which %v leads to", a.Hop, flow.Dst)
			}
		}
		if _, ok := v.paths[a.Hop]; !ok {
			v.failf("the path of %v goes, which was not there", a.Hop)
		}
		delete(v.paths, a.Hop)
	case fib.SetDest:
		_, there := v.dests[a.Flow]
		_, path := v.paths[a.Hop]
		switch {
		case a.Hop.IsValid() && !path:
			v.failf("%v leads to %v, which has no path", a.Flow.Dst, a.Hop)
		case a.Hop.IsValid():
			v.dests[a.Flow] = a.Hop
		case !there:
			v.failf("%v goes, which was not there", a.Flow.Dst)
		}
		if !a.Hop.IsValid() {
			delete(v.dests, a.Flow)
		}
	case fib.ResetDests:
		clear(v.dests)
	case fib.Forward:
		if _, ok := ip.Dst(a.Packet); !ok || !a.Hop.IsValid() {
			v.failf("a packet goes to %v", a.Hop)
		}
	}
}

func (v *view) check(b *bench) {
	hops := map[netip.Addr]int{}
	for _, hop := range v.dests {
		hops[hop]++
	}
	for h := range b.t.Hops() {
		if h.Dests != hops[h.Addr] {
			v.failf("%d destinations lead to %v, the machine says %d", hops[h.Addr], h.Addr, h.Dests)
		}
		if p, ok := v.paths[h.Addr]; ok != (h.Dests > 0) || ok && p != h.Path {
			v.failf("the path of %v is %+v (%v), the machine says %+v", h.Addr, p, ok, h.Path)
		}
	}
	if n := b.t.Dests(); n > 24 {
		v.failf("%d destinations", n)
	}
	for n := 0; b.t.Deadline() != (time.Time{}) && !b.t.Deadline().After(b.now); n++ {
		if n == 100 {
			v.failf("the deadline %v is not over after %d times Wake at %v", b.t.Deadline(), n, b.now)
		}
		b.feed([]fib.Event{fib.Wake{}})
	}
}

// settled checks, when the kernel has answered everything, that each destination
// that would be asked for again has the kernel's answer, that host routes of ours are
// guests, and that no neighbour with a connection lacks one which may have it.
func (v *view) settled(b *bench) {
	for _, flow := range slices.Collect(maps.Keys(v.dests)) {
		b.feed([]fib.Event{fib.Stale{Flow: flow}})
	}
	for flow, hop := range v.dests {
		if want, err := nexthop.Ask(b.k, b.k.Link, flow); err != nil || want.Addr != hop {
			v.failf("%v leads to %v, the kernel says %v", flow, hop, want.Addr)
		}
	}
	for a, mtu := range v.conns {
		if !b.k.Link.Up || mtu == 0 {
			continue
		}
		have := b.k.HostMTU(a)
		if h, _ := nexthop.AskHost(b.k, b.k.Link, a, false); have == 0 {
			if h.NotGuest(b.k.Link) == "" {
				v.failf("%v has no host route, though it may", a)
			}
		} else if want := min(mtu, b.k.Link.MTU); have != want {
			v.failf("the host route to %v has MTU %d, want %d", a, have, want)
		}
	}
	for key, r := range b.k.Own {
		if r.Type != rtnl.Unicast {
			continue
		}
		delete(b.k.Own, key)
		h, err := nexthop.AskHost(b.k, b.k.Link, r.Dst.Addr(), false)
		b.k.Own[key] = r
		if why := h.NotGuest(b.k.Link); err != nil || why != "" {
			v.failf("the host route %v is there although %s (%v)", r, why, err)
		}
	}
}
