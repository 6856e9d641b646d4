package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"net/netip"
	"sync/atomic"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// destMaxAge is how long an answer of the kernel counts as fresh. Some changes of routes cause no
// event; without an age their old answers would stay fresh.
const destMaxAge = 30 * time.Second

// staleServes is for how long after a change of routes the old answers still serve. If they did not, the packets of
// all destinations would wait at once. If they served longer, the first packet after a pause would take a path that is
// no more.
const staleServes = time.Second

// A mark is the time, in ticks of 16.8 ms, at which an entry was made fresh or a TXStale frame
// asked for a new answer, and the generation of the cache at that time.
type mark uint64

const (
	genBits     = 26 // the lowest bits of a mark
	genMask     = 1<<genBits - 1
	tickShift   = 24
	maxAgeTicks = int64(destMaxAge >> tickShift)
	servesTicks = int64(staleServes >> tickShift)
	// Two threads may read the clock in one order and use the times in the other, so that an age is
	// below zero.
	maxSkewTicks = int64(time.Second >> tickShift)
)

// newMark returns the mark of an entry that is fresh at now, in nanoseconds.
func newMark(now int64, gen uint32) mark {
	return mark(now>>tickShift)<<genBits | mark(gen&genMask)
}

// stale reports whether the entry with mark m is stale: it is older than destMaxAge, is from more
// than a second ahead, or has another generation than gen.
func (m mark) stale(now int64, gen uint32) bool {
	if uint32(m)&genMask != gen&genMask {
		return true
	}
	age := now>>tickShift - int64(m>>genBits)
	return age > maxAgeTicks || age < -maxSkewTicks
}

// isOutdated reports whether a change made the entry with mark m stale more than staleServes before now. gen is the
// present generation.
func (c *dests) isOutdated(m mark, now int64, gen uint32) bool {
	if uint32(m)&genMask == gen&genMask {
		return false // it is only old, if stale at all
	}
	at := max(int64(m>>genBits), c.changed.Load()>>tickShift) // of StaleDest, of StaleAll
	return now>>tickShift-at > servesTicks
}

// Keys of the cache. Most packets are looked up by destination alone, so these keys are small.
type (
	key4  uint32                  // an IPv4 destination
	key6  struct{ hi, lo uint64 } // an IPv6 destination
	flow4 struct {                // an IPv4 flow
		dst, src key4
		rest     uint64
	}
	flow6 struct { // an IPv6 flow
		dst, src key6
		rest     uint64
	}
)

// restOf packs the fields of f that are no addresses.
func restOf(f rtnl.Flow) uint64 {
	return uint64(f.TOS)<<40 | uint64(f.Proto)<<32 | uint64(f.SrcPort)<<16 | uint64(f.DstPort)
}

func key4Of(b []byte) key4 { return key4(binary.BigEndian.Uint32(b)) }
func key6Of(b []byte) key6 { return key6{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])} }

func addr4(a netip.Addr) key4 { b := a.As4(); return key4Of(b[:]) }
func addr6(a netip.Addr) key6 { b := a.As16(); return key6Of(b[:]) }

// A seed makes hashes that nobody else can foresee. Whoever sends packets through us chooses their
// destinations, but must not be able to choose the chains of the hash table that they fall on.
//
// Words of 32 bits are multiplied in pairs and added, so that two keys have the same sum with a
// chance of 2^-32 at most, whichever keys they are (Thorup, "High speed hashing for integers and
// strings", arXiv:1504.06804, section 3). The sums of consecutive addresses are evenly spaced, and
// might fall on few slots; mix spreads them.
type seed [12]uint64

func newSeed() (s seed) {
	var b [8 * len(s)]byte
	rand.Read(b[:]) // it never fails
	for i := range s {
		s[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return s
}

// pair returns what x, two words of 32 bits, adds to a hash. It uses s[i] and s[i+1].
func (s *seed) pair(i int, x uint64) uint64 { return (s[i] + x>>32) * (s[i+1] + x&0xffffffff) }

// mix makes a hash from a sum.
func (s *seed) mix(h uint64) uint32 {
	h += s[10]
	h = (h ^ h>>32) * (s[11] | 1)
	h = (h ^ h>>29) * 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio
	return uint32(h >> 32)
}

func (s *seed) key4(k key4) uint32 { return s.mix((s[0] | 1) * uint64(k)) }
func (s *seed) key6(k key6) uint32 { return s.mix(s.pair(0, k.hi) + s.pair(2, k.lo)) }
func (s *seed) flow4(k flow4) uint32 {
	return s.mix(s.pair(0, uint64(k.dst)<<32|uint64(k.src)) + s.pair(2, k.rest))
}
func (s *seed) flow6(k flow6) uint32 {
	h := s.pair(0, k.dst.hi) + s.pair(2, k.dst.lo) + s.pair(4, k.src.hi) + s.pair(6, k.src.lo)
	return s.mix(h + s.pair(8, k.rest))
}

// dests is the destination cache: it gives the path of a packet by exactly those fields that
// decide the next hop. Packets to multicast groups and the limited broadcast are always looked up
// by destination alone.
type dests struct {
	fields  rtnl.Fields
	seed    seed
	gen     atomic.Uint32
	changed atomic.Int64 // when gen advanced last, in nanoseconds

	key4  *hashTable[key4]
	key6  *hashTable[key6]
	flow4 *hashTable[flow4]
	flow6 *hashTable[flow6]
}

func newDests(f rtnl.Fields) *dests {
	c := &dests{fields: f, seed: newSeed()}
	c.key4 = newHashTable(c.seed.key4)
	c.key6 = newHashTable(c.seed.key6)
	c.flow4 = newHashTable(c.seed.flow4)
	c.flow6 = newHashTable(c.seed.flow6)
	return c
}

// lookup returns the entry for pkt, nil if there is none. pkt has type t and holds at least a whole
// IP header.
func (c *dests) lookup(t encap.EtherType, pkt []byte) *entry {
	switch {
	case t == encap.IPv4 && (c.fields == rtnl.DstOnly || isMulticast4(pkt[16:20])):
		k := key4Of(pkt[16:20])
		return c.key4.find(c.seed.key4(k), k)
	case t == encap.IPv6 && (c.fields == rtnl.DstOnly || pkt[24] == 0xff):
		k := key6Of(pkt[24:40])
		return c.key6.find(c.seed.key6(k), k)
	}
	return c.lookupFlow(t, pkt)
}

// lookupFlow is lookup by more fields than the destination.
func (c *dests) lookupFlow(t encap.EtherType, pkt []byte) *entry {
	f, _ := ip.FlowOf(pkt, c.fields)
	if t == encap.IPv4 {
		k := flow4{key4Of(pkt[16:20]), key4Of(pkt[12:16]), restOf(f)}
		return c.flow4.find(c.seed.flow4(k), k)
	}
	k := flow6{key6Of(pkt[24:40]), key6Of(pkt[8:24]), restOf(f)}
	return c.flow6.find(c.seed.flow6(k), k)
}

// isGroup reports whether lookup treats the address as a multicast group or the limited broadcast.
// An IPv4-mapped IPv6 address is no group.
func isGroup(a netip.Addr) bool {
	if a.Is4() {
		b := a.As4()
		return isMulticast4(b[:])
	}
	return a.As16()[0] == 0xff
}

// A change is an operation of dests.change on an entry.
type change uint8

const (
	destSet change = iota
	destDel
	destStale
)

// change applies op to the entry of f and reports whether it did anything. f must have exactly the
// fields that its packets are looked up by.
func (c *dests) change(op change, f rtnl.Flow, p *Path, m mark) bool {
	if !f.Dst.IsValid() {
		return false
	}
	slim := c.fields == rtnl.DstOnly || isGroup(f.Dst)
	switch is4 := f.Dst.Is4(); {
	case slim && f != rtnl.DstOnly.Of(f), !slim && f != c.fields.Of(f), !slim && f.Src.BitLen() != f.Dst.BitLen():
		return false
	case slim && is4:
		return apply(c.key4, op, addr4(f.Dst), p, m)
	case slim:
		return apply(c.key6, op, addr6(f.Dst), p, m)
	case is4:
		return apply(c.flow4, op, flow4{addr4(f.Dst), addr4(f.Src), restOf(f)}, p, m)
	default:
		return apply(c.flow6, op, flow6{addr6(f.Dst), addr6(f.Src), restOf(f)}, p, m)
	}
}

func apply[K comparable](t *hashTable[K], op change, k K, p *Path, m mark) bool {
	switch op {
	case destSet:
		t.set(k, p, m)
		return true
	case destDel:
		return t.del(k)
	}
	d := t.get(k)
	if d == nil {
		return false
	}
	d.mark.Store(uint64(m))
	return true
}

// Only one goroutine at a time may call the functions below that change the cache; TUN readers look
// up meanwhile. A flow must have exactly the fields that [Loop.ResetDests] set, or only Dst if that
// is a group. The functions refuse any other flow, because no lookup would find it.

// SetDest makes packets of flow take p from now on and counts the entry as fresh. It reports
// whether it accepted flow. 30 s later, or after StaleDest or StaleAll, the entry is stale: packets
// still take p, but the next of them makes the loop send a TXStale frame up. That repeats every
// 30 s until SetDest is called again. If no packet comes within a second of StaleDest or StaleAll,
// those that come later go up as TXNoRoute until SetDest is called.
func (l *Loop) SetDest(flow rtnl.Flow, p *Path) bool {
	if p == nil {
		panic("datapath: destination without path")
	}
	c := l.dests.Load()
	return c.change(destSet, flow, p, newMark(nanotime(), c.gen.Load()))
}

// DelDest removes the entry of flow, and reports whether there was one. Its packets go up as
// TXNoRoute then.
func (l *Loop) DelDest(flow rtnl.Flow) bool {
	return l.dests.Load().change(destDel, flow, nil, 0)
}

// StaleDest makes the entry of flow stale, and reports whether there is one.
func (l *Loop) StaleDest(flow rtnl.Flow) bool {
	c := l.dests.Load()
	return c.change(destStale, flow, nil, newMark(nanotime(), c.gen.Load()-1))
}

// StaleAll makes all entries stale. It only advances the generation of the cache, so it costs no
// more than StaleDest.
func (l *Loop) StaleAll() {
	c := l.dests.Load()
	c.changed.Store(nanotime())
	c.gen.Add(1)
}

// ResetDests removes all entries and has packets looked up by f from now on. A new Loop looks them
// up by [rtnl.DstOnly].
func (l *Loop) ResetDests(f rtnl.Fields) { l.dests.Store(newDests(f)) }

// DestStats says how full the destination cache is.
type DestStats struct {
	Fields     rtnl.Fields // what packets are looked up by
	IPv4, IPv6 int         // entries
	Slots      int         // slots of the hash tables
}

// Dests returns how full the destination cache is. Any goroutine may call it.
func (l *Loop) Dests() DestStats {
	c := l.dests.Load()
	return DestStats{
		Fields: c.fields,
		IPv4:   int(c.key4.n.Load() + c.flow4.n.Load()),
		IPv6:   int(c.key6.n.Load() + c.flow6.n.Load()),
		Slots: len(c.key4.slots.Load().slot) + len(c.key6.slots.Load().slot) +
			len(c.flow4.slots.Load().slot) + len(c.flow6.slots.Load().slot),
	}
}

// askAgain sends a TXStale frame up for the stale entry that pkt takes. at points to the entry's
// mark, and m is the stale mark that the caller found there. If several threads find the entry
// stale, only one sends the frame.
func (l *Loop) askAgain(at *atomic.Uint64, m mark, t encap.EtherType, pkt []byte, p *Path, now int64, gen uint32) {
	asked := newMark(now, gen)
	if !at.CompareAndSwap(uint64(m), uint64(asked)) {
		return
	}
	f := l.up.get(Frame{Kind: TXStale, Type: t, Data: pkt[:ip.FlowLen(pkt)], Path: p})
	if f == nil {
		at.CompareAndSwap(uint64(asked), uint64(m)) // the next packet asks
		l.c.TxStaleFull.Add(1)
		return
	}
	l.c.TxStale.Add(1)
	l.up.ch <- f
}
