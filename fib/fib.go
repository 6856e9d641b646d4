// Package fib is the forwarding information base of one interface, as a pure state machine. It knows the next hops
// of packets from the TUN, which of them the data path has, and which routes of ours the kernel should have.
//
// The machine has the driver ask the kernel for each next hop ([nexthop.Ask]), and keeps the answer as a
// destination. When the kernel reports a change, the machine forgets the answer or asks again. An old answer serves
// until the new one is there, but no packet that comes more than a second after the change.
//
// Routes of ours are guests in the kernel's tables. A host route shows the MTU of a connection. The machine makes it
// only where the kernel by itself sends the peer's packets on the link, and never in the place of somebody else's
// route. Of the kernel's own routes of the device it changes only the metrics.
//
// The package keeps no copy of other routes, and no mark, user or incoming device of a packet: a TUN shows none.
package fib

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

// Options configures a Table. Every zero value means the default that its comment names.
type Options struct {
	UDMTU int // octets of IP over UD; zero means 2044

	// BestMessage is the cheapest message size for the provider in octets, encapsulation header included. Our routes
	// ask the peers' TCP for no larger messages. Zero means 65524, which is no limit.
	BestMessage int

	MaxDests   int // destinations; zero means 262144
	MaxLookups int // questions without an answer yet; zero means 1024
	MaxWaiting int // octets of packets that wait for answers; zero means 8 MiB
}

// A Table is the machine. It is not safe for concurrent use.
type Table struct {
	opt    Options
	dests  dests
	hops   map[netip.Addr]*hop
	hosts  index[*host]
	routes routes    // the kernel's routes of the device, and its state
	tooBig time.Time // last TooBig; zero if none came since the last FlushExceptions
	n      Counters

	now time.Time // time of the Step under way
	out []Action
}

// New returns a machine that knows nothing of the device yet.
func New(opt Options) *Table {
	opt.UDMTU, opt.MaxDests = cmp.Or(opt.UDMTU, mtu.DefaultUD), cmp.Or(opt.MaxDests, 1<<18)
	opt.BestMessage = cmp.Or(opt.BestMessage, mtu.DefaultReceive)
	opt.MaxLookups, opt.MaxWaiting = cmp.Or(opt.MaxLookups, 1024), cmp.Or(opt.MaxWaiting, 8<<20)
	return &Table{opt: opt, hops: map[netip.Addr]*hop{}, dests: dests{index: newIndex(&dest{})}, hosts: newIndex(&host{}),
		routes: routes{addrs: map[netip.Prefix]bool{}, own: map[rtnl.Key]ownRoute{}}}
}

// Step applies ev at time now and appends to dst what the driver must do, in order. Nothing else changes the state.
func (t *Table) Step(dst []Action, now time.Time, ev Event) []Action {
	t.now, t.out = now, dst
	ev.step(t)
	t.reconcile()
	dst, t.out = t.out, nil
	return dst
}

func (TooBig) step(t *Table) { t.tooBig = t.now }
func (Stop) step(t *Table)   { t.n.DropDown += uint64(len(t.resetDests(t.dests.fields))) }

func (t *Table) do(a Action) { t.out = append(t.out, a) }

func (t *Table) note(a netip.Addr, format string, args ...any) {
	t.do(Note{Addr: a, Text: fmt.Sprintf(format, args...)})
}

// Fields returns the fields of packets that decide their next hops now.
func (t *Table) Fields() rtnl.Fields { return t.dests.fields }

// Link returns the device as the kernel last reported it. Its index is zero before the first Resync.
func (t *Table) Link() rtnl.Link { return t.routes.link }

// Dests returns how many destinations there are.
func (t *Table) Dests() int { return t.dests.index.Len() }

// Waiting returns how many packets wait for the kernel's answer.
func (t *Table) Waiting() int { return t.dests.packets }

// Counters returns what the machine has counted since it was made.
func (t *Table) Counters() Counters { return t.n }
