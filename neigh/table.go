package neigh

import (
	"cmp"
	"iter"
	"log/slog"
	"maps"
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

	// These are set during a Step only.
	out []Action
	now time.Time
}

// New returns a Table without neighbours and addresses.
func New(o Options) *Table {
	if o.Rand == nil {
		o.Rand = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
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
	t.out, t.now = dst, now
	ev.step(t)
	dst, t.out = t.out, nil
	return dst
}

func (t *Table) act(a Action) { t.out = append(t.out, a) }

// forget removes entries because of ForgetLink or Flush.
func (t *Table) forget(entries []*entry) {
	for _, e := range entries {
		t.remove(e, ExpireForgotten, DropForgotten)
	}
}

// wake runs the timers that are due.
func (t *Table) wake() {
	at := t.instant(t.now)
	for tm := t.timers.First(); tm != nil && at >= tm.at; tm = t.timers.First() {
		t.timers.Stop(tm)
		if tm.entry != nil {
			t.entryTimer(tm.entry)
		} else {
			t.addrTimer(tm.own)
		}
	}
}

// Deadline returns when the driver must send Wake; zero means never.
func (t *Table) Deadline() time.Time { return t.time(t.timers.first()) }

// Lookup returns the entry of ip.
func (t *Table) Lookup(ip netip.Addr) (n Neighbor, known bool) {
	e := t.entries[plain(ip)]
	if e != nil {
		n = t.snapshot(e)
	}
	return n, e != nil
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
	return slices.SortedFunc(maps.Values(t.entries), func(a, b *entry) int { return a.ip.Compare(b.ip) })
}

// plain returns a as a key: no zone (there is one interface), IPv4 unmapped.
func plain(a netip.Addr) netip.Addr { return a.WithZone("").Unmap() }

// unicast reports whether a is an address that a neighbour can have.
func unicast(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}
