package datapath

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/rtnl"
	"ipoibcm/tun/tuntest"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// allFields are all that packets can be looked up by.
var allFields = []rtnl.Fields{rtnl.DstOnly, rtnl.WithSource, rtnl.WithPorts}

// cacheLoop returns a loop of which only the destination cache works.
func cacheLoop(f rtnl.Fields) *Loop {
	l := &Loop{up: newUpRing(8)}
	l.ResetDests(f)
	return l
}

// path returns what l has for pkt.
func (l *Loop) pathOf(pkt []byte) *Path {
	t := ipType(pkt)
	if t == 0 {
		return nil
	}
	e := l.dests.Load().lookup(t, pkt)
	if e == nil {
		return nil
	}
	return e.path.Load()
}

// randFlow returns one of few flows with the fields that f names, so that they
// meet again.
func randFlow(r *rand.Rand, f rtnl.Fields) rtnl.Flow {
	addr := func(v4 bool, hosts int) netip.Addr {
		n := byte(r.IntN(hosts))
		if v4 {
			return netip.AddrFrom4([4]byte{10, 0, n >> 4, n & 15})
		}
		return netip.AddrFrom16([16]byte{0: 0xfd, 7: n >> 4, 15: n & 15})
	}
	v4 := r.IntN(2) == 0
	flow := rtnl.Flow{Dst: addr(v4, 200)}
	if r.IntN(8) == 0 {
		flow.Dst = netip.AddrFrom16([16]byte{0: 0xff, 1: 2, 15: byte(r.IntN(16))})
		if v4 {
			flow.Dst = netip.AddrFrom4([4]byte{239, 0, 0, byte(r.IntN(16))})
		}
		return flow
	}
	flow.Src, flow.TOS, flow.Proto = addr(v4, 2), byte(r.IntN(2))<<5, ip.ProtoUDP
	flow.SrcPort, flow.DstPort = uint16(r.IntN(2)), uint16(r.IntN(2))
	return f.Of(flow)
}

// packetOf returns a UDP packet of flow.
func packetOf(flow rtnl.Flow) []byte {
	src := flow.Src
	var b []byte
	if flow.Dst.Is4() {
		b = make([]byte, minIPv4+8)
		b[0], b[1], b[9] = 0x45, flow.TOS|1, ip.ProtoUDP
		if src.IsValid() {
			copy(b[12:], src.AsSlice())
		}
		copy(b[16:], flow.Dst.AsSlice())
	} else {
		b = make([]byte, minIP6+8)
		b[0], b[1], b[6] = 0x60|flow.TOS>>4, flow.TOS<<4|0x10, ip.ProtoUDP
		if src.IsValid() {
			copy(b[8:], src.AsSlice())
		}
		copy(b[24:], flow.Dst.AsSlice())
	}
	binary.BigEndian.PutUint16(b[len(b)-8:], flow.SrcPort)
	binary.BigEndian.PutUint16(b[len(b)-6:], flow.DstPort)
	return b
}

// The cache holds what a map would.
func TestDestsAgainstMap(t *testing.T) {
	long.OneGoroutine(t)
	for _, f := range allFields {
		r := rand.New(rand.NewPCG(1, uint64(f)))
		l, want := cacheLoop(f), map[rtnl.Flow]*Path{}
		for i := range 20_000 {
			flow := randFlow(r, f)
			_, had := want[flow]
			if r.IntN(1000) < 400+200*(i/4000%2) { // more of these, then more of those
				if got := l.DelDest(flow); got != had {
					t.Fatalf("%v, step %d: removed %v = %v, want %v", f, i, flow, got, had)
				}
				delete(want, flow)
			} else {
				want[flow] = &Path{Tag: uint64(i)}
				if !l.SetDest(flow, want[flow]) {
					t.Fatalf("%v, step %d: %v is refused", f, i, flow)
				}
			}
			if s := l.Dests(); s.IPv4+s.IPv6 != len(want) {
				t.Fatalf("%v, step %d: %d entries, want %d", f, i, s.IPv4+s.IPv6, len(want))
			}
			for range 3 {
				flow := randFlow(r, f)
				if got := l.pathOf(packetOf(flow)); got != want[flow] {
					t.Fatalf("%v, step %d: %v leads to %v, want %v", f, i, flow, got, want[flow])
				}
			}
		}
		l.ResetDests(f)
		for flow := range want {
			if got := l.pathOf(packetOf(flow)); got != nil {
				t.Errorf("%v: %v leads to %v after a reset", f, flow, got)
			}
		}
	}
}

func TestDestsGrowAndShrink(t *testing.T) {
	l, p := cacheLoop(rtnl.DstOnly), &Path{}
	empty := l.Dests().Slots
	flow := func(i int) rtnl.Flow {
		return rtnl.Flow{Dst: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})}
	}
	const n = 10_000
	for i := range n {
		l.SetDest(flow(i), p)
	}
	if s := l.Dests(); s.IPv4 != n {
		t.Errorf("%d entries, want %d", s.IPv4, n)
	}
	if got := l.Dests().Slots; got < n {
		t.Errorf("%d slots for %d entries, want one each", got, n)
	}
	for i := range n {
		if !l.DelDest(flow(i)) {
			t.Fatalf("entry %d is not there", i)
		}
	}
	if got := l.Dests().Slots; got != empty {
		t.Errorf("%d slots when all are gone, want %d", got, empty)
	}
}

// No change copies more than a few entries, however many there are, and the table has
// its new size before it needs the next one.
func TestDestsGrowBySteps(t *testing.T) {
	long.OneGoroutine(t)
	const n = 100_000
	l, p := cacheLoop(rtnl.DstOnly), &Path{}
	h := l.dests.Load().key4
	flow := func(i int) rtnl.Flow {
		return rtnl.Flow{Dst: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})}
	}
	mostSlots, resizes := 0, 0
	step := func(what string, i int, change func(rtnl.Flow)) {
		before, copied := h.slots.Load(), h.copied
		busy := before.old.Load() != nil
		change(flow(i))
		after := h.slots.Load()
		if after == before && busy {
			mostSlots = max(mostSlots, h.copied-copied)
		}
		if after != before {
			resizes++
			if busy && len(before.slot) > 16*minSlots {
				t.Errorf("%s %d: %d slots are not enough before the entries of before have been copied", what, i, len(before.slot))
			}
			mostSlots = max(mostSlots, h.copied)
		}
	}
	for i := range n {
		step("set", i, func(f rtnl.Flow) { l.SetDest(f, p) })
	}
	for i := range n {
		step("del", i, func(f rtnl.Flow) { l.DelDest(f) })
	}
	if mostSlots > copySlots {
		t.Errorf("one change copied %d slots, want at most %d", mostSlots, copySlots)
	}
	if resizes < 20 {
		t.Errorf("%d changes of size, want 13 or so each way", resizes)
	}
}

// A flow that no packet would be looked up by is refused.
func TestDestsRefuse(t *testing.T) {
	dst, src := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1")
	for _, tt := range []struct {
		name   string
		fields rtnl.Fields
		flow   rtnl.Flow
		want   bool
	}{
		{"destination", rtnl.DstOnly, rtnl.Flow{Dst: dst}, true},
		{"nothing", rtnl.DstOnly, rtnl.Flow{}, false},
		{"a source too many", rtnl.DstOnly, rtnl.Flow{Dst: dst, Src: src}, false},
		{"source", rtnl.WithSource, rtnl.Flow{Dst: dst, Src: src}, true},
		{"no source", rtnl.WithSource, rtnl.Flow{Dst: dst}, false},
		{"source of the other family", rtnl.WithSource, rtnl.Flow{Dst: dst, Src: netip.IPv6Loopback()}, false},
		{"a port too many", rtnl.WithSource, rtnl.Flow{Dst: dst, Src: src, DstPort: 1}, false},
		{"group", rtnl.WithPorts, rtnl.Flow{Dst: netip.MustParseAddr("ff02::1")}, true},
		{"limited broadcast", rtnl.WithPorts, rtnl.Flow{Dst: ip.LimitedBroadcast}, true},
		{"group and source", rtnl.WithPorts, rtnl.Flow{Dst: netip.MustParseAddr("224.0.0.1"), Src: src}, false},
	} {
		l := cacheLoop(tt.fields)
		if got := l.SetDest(tt.flow, &Path{}); got != tt.want {
			t.Errorf("%s: set is %v, want %v", tt.name, got, tt.want)
		}
		if got := l.StaleDest(tt.flow); got != tt.want {
			t.Errorf("%s: made stale is %v, want %v", tt.name, got, tt.want)
		}
		if got := l.DelDest(tt.flow); got != tt.want {
			t.Errorf("%s: removed is %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestMark(t *testing.T) {
	const now = int64(1_800_000_000_000_000_000)
	for _, tt := range []struct {
		name  string
		later time.Duration
		gen   uint32
		want  bool
	}{
		{"at once", 0, 5, false},
		{"almost old", destMaxAge - 50*time.Millisecond, 5, false},
		{"old", destMaxAge + 50*time.Millisecond, 5, true},
		{"seen by a batch that began before", -100 * time.Millisecond, 5, false},
		{"clock set back", -time.Hour, 5, true},
		{"all made stale", 0, 6, true},
	} {
		if got := newMark(now, 5).stale(now+int64(tt.later), tt.gen); got != tt.want {
			t.Errorf("%s: stale is %v, want %v", tt.name, got, tt.want)
		}
	}
}

// stillHost is a host whose loop does not run.
func stillHost(t *testing.T, w *world, last byte) *host {
	t.Helper()
	h := &host{tun: tuntest.New("ibcm0", 64), fab: &fabric{w: w, gid: ib.GID{0: 0xfe, 1: 0x80, 15: last}}}
	h.tun.Discard()
	l, err := New(Config{Provider: h.fab, TUN: h.tun, SendBuffers: 128, UpDepth: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	h.Loop = l
	return h
}

// stales returns how many TXStale frames wait in the ring up, and releases all.
func stales(t *testing.T, h *host, pkt []byte, p *Path) (n int) {
	t.Helper()
	for len(h.up.ch) > 0 {
		f := <-h.up.ch
		if f.Kind != TXStale {
			t.Errorf("%v went up, want TXStale", f)
		}
		if got, _ := ip.FlowOf(f.Data, rtnl.WithPorts); got != mustFlow(pkt) {
			t.Errorf("the frame has flow %v, want %v", got, mustFlow(pkt))
		}
		if f.Path != p {
			t.Errorf("the frame has path %v, want %v", f.Path, p)
		}
		if len(f.Data) > 64 {
			t.Errorf("the frame has %d octets, want at most 64", len(f.Data))
		}
		f.Release()
		n++
	}
	return n
}

func mustFlow(pkt []byte) rtnl.Flow {
	f, ok := ip.FlowOf(pkt, rtnl.WithPorts)
	if !ok {
		panic("no flow")
	}
	return f
}

// A stale entry serves, and is asked about once.
func TestStaleDests(t *testing.T) {
	w := newWorld()
	a, b := stillHost(t, w, 1), stillHost(t, w, 2)
	p := NewPath(1, Target{Kind: ToUD, UD: a.udTo(b)})
	pkt := ip4("10.9.0.2", 1000, ip.ProtoUDP)
	flow := rtnl.Flow{Dst: netip.MustParseAddr("10.9.0.2")}
	s := newSender(a.threads[0], a.threads[0].tun.Read)
	now, sent := nanotime(), uint64(0)
	send := func(what string, later time.Duration, want int) {
		t.Helper()
		for range 3 {
			a.tun.Send(pkt)
		}
		if n, err := a.tun.Read(s.fill(), s.sizes); err != nil || n != 3 {
			t.Fatalf("%s: read %d, %v", what, n, err)
		}
		s.batch(3, now+int64(later))
		a.threads[0].sendWC.drain()
		b.ud.drain()
		sent += 3
		if got := a.Counters().TxUD; got != sent {
			t.Errorf("%s: %d packets sent, want %d", what, got, sent)
		}
		if got := stales(t, a, pkt, p); got != want {
			t.Errorf("%s: %d TXStale frames, want %d", what, got, want)
		}
	}
	a.SetDest(flow, p)
	send("fresh", 0, 0)
	send("29 s", 29*time.Second, 0)
	send("31 s", 31*time.Second, 1)
	send("32 s, not renewed", 32*time.Second, 0)
	send("62 s, never renewed", 62*time.Second, 1)
	a.SetDest(flow, p)
	send("renewed", 0, 0)
	a.StaleDest(flow)
	send("StaleDest", 0, 1)
	a.StaleAll()
	send("StaleAll while it is asked about", 0, 1)

	// A full ring puts it off.
	for a.up.get(Frame{Kind: TXMiss, Type: encap.IPv4, Data: pkt}) != nil { // all frames are in other hands
	}
	a.SetDest(flow, p)
	send("full ring", 31*time.Second, 0)
	if got := a.c.TxStaleFull.Load(); got != 3 {
		t.Errorf("put off %d times, want 3", got)
	}
	a.up = newUpRing(8)
	send("room in the ring", 31*time.Second, 1)
}

// fill gets buffers for what the TUN has, and returns them.
func (s *sender) fill() [][]byte {
	have := len(s.slots)
	s.slots = s.l.pool.take(s.slots, batchLen-have)
	for i := have; i < len(s.slots); i++ {
		s.bufs[i] = s.l.pool.packet(s.slots[i])
	}
	return s.bufs[:len(s.slots)]
}

// Readers find what stays, whatever the writer does meanwhile, and of what it
// changes either the old or the new path.
func TestDestsConcurrently(t *testing.T) {
	const stay = 500
	l := cacheLoop(rtnl.DstOnly)
	addr := func(i int) rtnl.Flow {
		return rtnl.Flow{Dst: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})}
	}
	paths := make([]*Path, stay)
	packets := make([][]byte, stay)
	for i := range stay {
		paths[i], packets[i] = &Path{Tag: uint64(i)}, packetOf(addr(i))
		l.SetDest(addr(i), paths[i])
	}
	stop, asked := make(chan struct{}), make([]int, 2)
	var readers sync.WaitGroup
	for r := range 2 {
		readers.Go(func() {
			for i := r; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				i %= stay
				c := l.dests.Load()
				e := c.lookup(encap.IPv4, packets[i])
				if e == nil {
					t.Errorf("%v leads nowhere", addr(i))
					return
				}
				if p := e.path.Load(); p.Tag != uint64(i) {
					t.Errorf("%v leads to %v", addr(i), p)
					return
				}
				now := nanotime()
				if m, gen := mark(e.mark.Load()), c.gen.Load(); m.stale(now, gen) &&
					e.mark.CompareAndSwap(uint64(m), uint64(newMark(now, gen))) {
					asked[r]++
				}
			}
		})
	}
	for round := range 20 {
		for i := range 3000 {
			l.SetDest(addr(1<<16+i), &Path{})
			if i%7 == 0 {
				l.SetDest(addr(i%stay), &Path{Tag: uint64(i % stay)})
			}
			if i%11 == 0 {
				l.StaleDest(addr(i % stay))
			}
		}
		for i := range 3000 {
			l.DelDest(addr(1<<16 + i))
		}
		if round%5 == 0 {
			l.StaleAll()
		}
		runtime.Gosched()
	}
	close(stop)
	readers.Wait()
	if asked[0]+asked[1] == 0 {
		t.Error("no reader found a stale entry")
	}
}

// What anybody can choose does not make chains long.
func TestDestsOfUnknownSources(t *testing.T) {
	long.OneGoroutine(t)
	const n = 1 << 14
	for name, addr := range map[string]func(i int) netip.Addr{
		"one after the other": func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) },
		"every 256th":         func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 1}) },
		"high bits only":      func(i int) netip.Addr { return netip.AddrFrom4([4]byte{byte(i >> 8), byte(i), 0, 0}) },
		"one IPv6 subnet": func(i int) netip.Addr {
			return netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})
		},
		"IPv6 subnets": func(i int) netip.Addr {
			return netip.AddrFrom16([16]byte{0: 0xfd, 6: byte(i >> 8), 7: byte(i), 15: 1})
		},
	} {
		l := cacheLoop(rtnl.DstOnly)
		for i := range n {
			l.SetDest(rtnl.Flow{Dst: addr(i)}, &Path{})
		}
		c := l.dests.Load()
		steps := chainSteps(c.key4) + chainSteps(c.key6)
		if mean := float64(steps) / n; mean > 3 {
			t.Errorf("%s: %.1f entries visited by a lookup, want about 1.5", name, mean)
		}
	}
}

// chainSteps returns how many entries are visited if each one is looked up once.
func chainSteps[K comparable](h *hashTable[K]) (steps int) {
	s := h.slots.Load()
	for i := range s.slot {
		n := 0
		for d := s.slot[i].Load(); d != nil; d = d.next.Load() {
			n++
			steps += n
		}
	}
	return steps
}

// 200,000 entries take at most 120 octets each, slots included.
func TestDestsMemory(t *testing.T) {
	long.OneGoroutine(t)
	const n, limit = 200_000, 120
	for _, f := range []rtnl.Fields{rtnl.DstOnly, rtnl.WithPorts} {
		for _, v4 := range []bool{true, false} {
			src := netip.MustParseAddr("10.0.0.1")
			if !v4 {
				src = netip.MustParseAddr("fd00::1")
			}
			p := &Path{}
			before := heap()
			l := cacheLoop(f)
			for i := range n {
				l.SetDest(f.Of(rtnl.Flow{Dst: benchAddr(v4, i), Src: src, Proto: 6, SrcPort: 1, DstPort: uint16(i)}), p)
			}
			each := float64(heap()-before) / n
			t.Logf("%v, IPv4 %v: %.1f octets per entry", f, v4, each)
			if each > limit {
				t.Errorf("%v, IPv4 %v: %.1f octets per entry, want at most %d", f, v4, each, limit)
			}
			if s := l.Dests(); s.IPv4+s.IPv6 != n {
				t.Errorf("%v, IPv4 %v: %d entries, want %d", f, v4, s.IPv4+s.IPv6, n)
			}
		}
	}
}

func heap() int64 {
	var m runtime.MemStats
	for range 2 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func benchAddr(v4 bool, i int) netip.Addr {
	i = int(uint32(i) * 0x9e3779b1 & 0xffffff) // all different, in no order
	if v4 {
		return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 3: byte(i), 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
}

// What FlowOf says of a packet finds the entry that the packet finds, whole or
// as a TXStale frame has it; and ND is the same to all who look.
func FuzzDests(f *testing.F) {
	f.Add(ip4("10.9.0.2", 60, ip.ProtoTCP))
	f.Add(ip4("224.0.0.22", 40, ip.ProtoIGMP))
	f.Add(ip6("fd00::2", ip.ProtoUDP, 1, 2, 3, 4, 5, 6, 7, 8))
	f.Add(ip6("ff02::16", 0, 58, 0, 5, 2, 0, 0, 1, 0, 143, 0))
	f.Add(ip6("fe80::1", 44, 58, 0, 0, 0, 0, 0, 0, 1, 136))
	f.Fuzz(func(t *testing.T, pkt []byte) {
		typ := ipType(pkt)
		for _, fields := range allFields {
			l, p := cacheLoop(fields), &Path{}
			flow, ok := ip.FlowOf(pkt, fields)
			if ok != (typ != 0) {
				t.Fatalf("%v: flow %v, type %v", fields, ok, typ)
			}
			if !ok {
				return
			}
			if !l.SetDest(flow, p) {
				t.Fatalf("%v: %+v is refused", fields, flow)
			}
			if got := l.pathOf(pkt); got != p {
				t.Fatalf("%v: %+v is not found by its packet", fields, flow)
			}
			if got := l.pathOf(pkt[:ip.FlowLen(pkt)]); got != p {
				t.Fatalf("%v: %+v is not found by the start of its packet", fields, flow)
			}
			if l.DelDest(flow); l.pathOf(pkt) != nil {
				t.Fatalf("%v: %+v was not removed", fields, flow)
			}
		}
		isControl(pkt, typ)
	})
}

// BenchmarkDests looks up packets to n destinations in turn.
func BenchmarkDests(b *testing.B) {
	for _, f := range []rtnl.Fields{rtnl.DstOnly, rtnl.WithPorts} {
		for _, v4 := range []bool{true, false} {
			for _, n := range []int{1, 1000, 200_000} {
				b.Run(fmt.Sprintf("%v/v4=%v/%d", f, v4, n), func(b *testing.B) { benchDests(b, f, v4, n) })
			}
		}
	}
}

func benchDests(b *testing.B, f rtnl.Fields, v4 bool, n int) {
	l, p, typ := cacheLoop(f), &Path{}, encap.IPv4
	src := netip.MustParseAddr("10.0.0.1")
	if !v4 {
		src, typ = netip.MustParseAddr("fd00::1"), encap.IPv6
	}
	packets := make([][]byte, n)
	for i := range n {
		flow := rtnl.Flow{Dst: benchAddr(v4, i), Src: src, Proto: ip.ProtoUDP, SrcPort: 1, DstPort: 2}
		packets[i] = packetOf(flow)
		l.SetDest(f.Of(flow), p)
	}
	now, i := nanotime(), 0
	b.ReportAllocs()
	for b.Loop() {
		c := l.dests.Load()
		e := c.lookup(typ, packets[i])
		if e == nil {
			b.Fatalf("packet %d has no path", i)
		}
		if e.path.Load() != p {
			b.Fatalf("packet %d has another path", i)
		}
		if mark(e.mark.Load()).stale(now, c.gen.Load()) {
			b.Fatalf("the path of packet %d is stale", i)
		}
		if i++; i == n {
			i = 0
		}
	}
}

// BenchmarkDestsInsert inserts 200,000 entries again and again, and says how much of a
// processor the longest insertion took: the one that made the slots grow for the last
// time, or one that the garbage collector had its help of.
func BenchmarkDestsInsert(b *testing.B) {
	for _, v4 := range []bool{true, false} {
		b.Run(fmt.Sprintf("v4=%v", v4), func(b *testing.B) {
			l, p, i := cacheLoop(rtnl.DstOnly), &Path{}, 0
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			spent := func() time.Duration {
				var t unix.Timespec
				if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
					b.Fatal(err)
				}
				return time.Duration(t.Nano())
			}
			var longest time.Duration
			for b.Loop() {
				start := spent()
				l.SetDest(rtnl.Flow{Dst: benchAddr(v4, i)}, p)
				longest = max(longest, spent()-start)
				if i++; i == 200_000 {
					l.ResetDests(rtnl.DstOnly)
					i = 0
				}
			}
			b.ReportMetric(float64(longest.Microseconds())/1000, "longest-ms")
		})
	}
}
