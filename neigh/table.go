package neigh

import (
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"ipoibcm/ratelimit"
	"ipoibcm/wire/encap"
)

// A Table is the neighbour cache and the own addresses of one interface. It is
// not safe for concurrent use.
type Table struct {
	o      Options
	link   encap.LinkAddr // our own
	router bool

	entries    map[netip.Addr]*entry
	byLink     map[encap.LinkAddr]*entry // by Key: the first of a ring of known entries
	lru        order                     // all entries that are not in heard or failed
	heard      order                     // entries only heard of, oldest first
	failed     order                     // entries that did not answer, oldest first
	queued     int                       // octets of packets that wait for all entries
	challenges int                       // entries with a rival
	hints      map[netip.Addr]encap.LinkAddr
	base       time.Time // of instants

	own    map[netip.Addr]*ownAddr
	addrs  []*ownAddr // those of own, ordered by address
	timers timers
	limit  limiter

	asked    map[netip.Addr]*other
	askRate  ratelimit.Bucket
	askSwept time.Time

	n Counters
}

// New returns a Table without neighbours and addresses.
func New(o Options) *Table {
	if o.Rand == nil {
		o.Rand = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Table{
		o:       o,
		link:    o.LinkAddr,
		router:  o.Router,
		entries: make(map[netip.Addr]*entry),
		byLink:  make(map[encap.LinkAddr]*entry),
		own:     make(map[netip.Addr]*ownAddr),
		asked:   make(map[netip.Addr]*other),
		limit:   newLimiter(o.requestRate(), o.sourceRate()),
	}
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (t *Table) Step(dst []Action, now time.Time, ev Event) []Action {
	switch ev := ev.(type) {
	case Resolve:
		return t.resolve(dst, now, plain(ev.IP), ev.Packet, ev.Source)
	case Recall:
		return t.recall(dst, now, ev)
	case Used:
		if e := t.entries[plain(ev.IP)]; e != nil {
			t.use(now, e)
		}
		return dst
	case Confirmed:
		if e := t.entries[plain(ev.IP)]; e != nil && e.state.Known() {
			t.confirm(now, e)
		}
		return dst
	case ConfirmedLink:
		t.confirmAll(now, ev.LinkAddr)
		return dst
	case DoubtedLink:
		for _, e := range t.at(ev.LinkAddr) {
			dst = t.doubt(dst, now, e)
		}
		return t.releasedBy(dst, now, ev.LinkAddr)
	case Forget:
		if e := t.entries[plain(ev.IP)]; e != nil {
			return t.remove(dst, e, ExpireForgotten, DropForgotten)
		}
		return dst
	case ForgetLink:
		return t.releasedBy(t.forget(dst, t.at(ev.LinkAddr)), now, ev.LinkAddr)
	case Flush:
		return t.forget(dst, t.sorted())
	case RecvARP:
		return t.recvARP(dst, now, ev.From, ev.Payload)
	case RecvND:
		return t.recvND(dst, now, ev.From, ev.Payload)
	case AddrAdded:
		return t.addAddr(dst, now, ev.Prefix)
	case AddrRemoved:
		return t.removeAddr(dst, now, plain(ev.IP))
	case Insist:
		return t.insist(dst, now, t.own[plain(ev.IP)])
	case OtherIs:
		return t.otherIs(dst, now, ev)
	case Reannounce:
		return t.reannounce(dst, now)
	case Wake:
		return t.wake(dst, now)
	case SetHints, SetLinkAddr, SetFlags, SetRouter, SetStaleTime, SetPolicy:
		return t.configure(dst, now, ev)
	default:
		panic(fmt.Sprintf("neigh: unknown event %T", ev)) // our bug, not the peer's
	}
}

// configure applies an event that changes a setting.
func (t *Table) configure(dst []Action, now time.Time, ev Event) []Action {
	switch ev := ev.(type) {
	case SetHints:
		t.hints = ev.Hints
		return dst
	case SetLinkAddr:
		if ev.LinkAddr == t.link {
			return dst
		}
		t.link = ev.LinkAddr
		return t.reannounce(dst, now)
	case SetFlags:
		t.link.Flags = ev.Flags
		return dst
	case SetRouter:
		return t.setRouter(dst, now, ev.On)
	case SetStaleTime:
		t.o.StaleTime = ev.After
		return dst
	case SetPolicy:
		t.o.AcceptAlways, t.o.MaxNeighbors = ev.AcceptAlways, ev.MaxNeighbors
		return t.shrink(dst)
	}
	return dst
}

// forget removes entries because of ForgetLink or Flush.
func (t *Table) forget(dst []Action, entries []*entry) []Action {
	for _, e := range entries {
		dst = t.remove(dst, e, ExpireForgotten, DropForgotten)
	}
	return dst
}

// wake runs the timers that are due.
func (t *Table) wake(dst []Action, now time.Time) []Action {
	at := t.instant(now)
	for tm := t.timers.First(); tm != nil && at >= tm.at; tm = t.timers.First() {
		t.timers.Stop(tm)
		if tm.entry != nil {
			dst = t.entryTimer(dst, now, tm.entry)
		} else {
			dst = t.addrTimer(dst, now, tm.own)
		}
	}
	return dst
}

// Deadline returns when the driver must send Wake; zero means never.
func (t *Table) Deadline() time.Time { return t.time(t.timers.first()) }

// Lookup returns the entry of ip.
func (t *Table) Lookup(ip netip.Addr) (Neighbor, bool) {
	e := t.entries[plain(ip)]
	if e == nil {
		return Neighbor{}, false
	}
	return t.snapshot(e), true
}

// All yields the entries in no order. Steps may run between two yields. An entry that is added or
// removed meanwhile may be yielded or not, and one that is removed and added again may be yielded
// twice.
func (t *Table) All() iter.Seq[Neighbor] {
	return func(yield func(Neighbor) bool) {
		for _, e := range t.entries {
			if !yield(t.snapshot(e)) {
				return
			}
		}
	}
}

// Neighbors returns all entries, ordered by address.
func (t *Table) Neighbors() []Neighbor {
	ns := make([]Neighbor, 0, len(t.entries))
	for _, e := range t.sorted() {
		ns = append(ns, t.snapshot(e))
	}
	return ns
}

// Addrs returns our own addresses, ordered by address.
func (t *Table) Addrs() []Addr {
	as := make([]Addr, 0, len(t.addrs))
	for _, a := range t.addrs {
		as = append(as, Addr{Prefix: a.prefix, State: a.state, By: a.by, Conflicts: a.conflicts})
	}
	return as
}

// LinkAddr returns our own link-layer address.
func (t *Table) LinkAddr() encap.LinkAddr { return t.link }

// Counters returns the counters.
func (t *Table) Counters() Counters { return t.n }

// QueuedOctets returns the octets of packets that wait for all neighbours together.
func (t *Table) QueuedOctets() int { return t.queued }

func (t *Table) drop(d Drop) { t.n.Drops[d]++ }

// sorted returns the entries ordered by address: what is done to all of them must not depend on
// the order of a map.
func (t *Table) sorted() []*entry {
	es := make([]*entry, 0, len(t.entries))
	for _, e := range t.entries {
		es = append(es, e)
	}
	slices.SortFunc(es, func(a, b *entry) int { return a.ip.Compare(b.ip) })
	return es
}

// plain returns a as a key: no zone (there is one interface), IPv4 unmapped.
func plain(a netip.Addr) netip.Addr { return a.WithZone("").Unmap() }

// unicast reports whether a is an address that a neighbour can have.
func unicast(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}
