package scale

import (
	"net/netip"
	"time"

	"ipoibcm/fib/fibtest"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
)

// A field is a machine with n neighbours, its tables full, and everything that
// may happen to it. Each operation leaves as many neighbours as it found.
type field struct {
	*crowd
	n      int
	turn   int  // of known
	afar   bool // every turn takes known to others
	serial int  // of what must not come twice
	lively []nexthop.Conn
	use    []ipoib.ConnUse
	ud     []ipoib.UDUse
}

// heldConns is how many connections a field has all the time.
const heldConns = 32

func newField(c *crowd, n int) *field {
	f := &field{crowd: c, n: n}
	c.flags = 0
	c.meet(0, n)
	c.run(15 * time.Minute) // all are stale, as what nobody uses is
	for i := range heldConns {
		f.serial++
		c.dials(i, f.serial)
		f.lively = append(f.lively, c.last)
		f.use = append(f.use, ipoib.ConnUse{Conn: c.last})
		f.ud = append(f.ud, ipoib.UDUse{Link: c.peerLink(heldConns + i)})
	}
	return f
}

// known returns the next neighbour in turn. The turns are as long for every n, so
// that a neighbour has as much behind it whatever n is.
func (f *field) known() int {
	f.turn++
	half := f.n / 2
	i := f.turn % turns * (half / turns)
	if f.afar {
		i += f.turn / turns * 7919 % (half / turns)
	}
	return half + i
}

// turns is how many calls of known there are before one comes again.
const turns = 40

// refresh uses every neighbour that operations count on, so that others are
// older and make room. It must come after at most maxRuns runs of an operation: in a
// field of 100 there are no more others.
func (f *field) refresh() {
	for range turns {
		f.step(f.packet(f.known(), 64))
	}
	for i := range heldConns {
		f.step(f.packet(i, 64))
	}
	f.run(2 * time.Minute) // asked whether they are still there, and stale again
}

const maxRuns = 20

// An operation is something that happens to a machine.
type operation struct {
	name string
	do   func(f *field)
}

// operations are what the figures are about: each way by which events reach the
// machine's tables.
var operations = []operation{
	{"packet to a neighbour, by UD", func(f *field) { f.step(f.packet(f.known(), 64)) }},
	{"packet for a connection", func(f *field) { f.turn++; f.step(f.packet(f.turn%heldConns, 9000)) }},
	{"ARP request of a neighbour", func(f *field) { f.asks(f.known()) }},
	{"false ARP reply", func(f *field) {
		i := f.known()
		ev := f.arpFrom(i, arp.Packet{Op: arp.Reply, Sender: f.peerLink(i), SenderIP: peerIP(i), Target: f.link,
			TargetIP: hubAddr.Addr()}).(ipoib.RecvFrame)
		ev.SrcQPN++
		f.step(ev)
	}},
	{"usage report of 64", func(f *field) {
		for i := range f.use {
			f.use[i].TxPackets += 3
			f.use[i].RxPackets += 2
			f.ud[i].TxPackets += 3
		}
		f.step(ipoib.Usage{Conns: f.use, UD: f.ud})
	}},
	{"connection made and ended by the peer", func(f *field) {
		i := f.known()
		f.serial++
		f.dials(i, f.serial)
		f.hangsUp(i, f.serial)
		f.run(2 * time.Second) // timewait
	}},
	{"connection made by us, lost", func(f *field) {
		i := f.known()
		f.flags = encap.FlagRC
		f.asks(i)
		f.step(f.packet(i, 9000))
		f.step(ipoib.QPError{Conn: f.last, Status: verbs.RetryExceeded})
		f.flags = 0
		f.run(2 * time.Second)
		f.asks(i)
	}},
	{"neighbour that takes the place of another", func(f *field) {
		f.serial++
		f.step(f.packet(f.n+f.serial, 64))
		f.run(time.Minute) // stale
	}},
	{"nobody there", func(f *field) {
		f.serial++
		f.quiet = true
		f.step(f.packet(f.n+f.serial, 64))
		f.run(10 * time.Second)
		f.quiet = false
	}},
	{"probe of a neighbour", func(f *field) {
		f.step(f.packet(f.known(), 64))
		f.run(time.Minute)
	}},
	{"route by a gateway comes, goes", func(f *field) {
		r := fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix("192.0.2.0/24"), Type: rtnl.Unicast,
			Via: peerIP(f.known())}, OIF: fibtest.Index}
		f.told(f.kernel.AddRoute(r))
		f.told(f.kernel.DelRoute(r))
	}},
	{"address comes, goes", func(f *field) {
		p := netip.MustParsePrefix("198.51.100.1/24")
		f.told(f.kernel.AddAddr(p))
		f.run(5 * time.Second)
		f.told(f.kernel.DelAddr(p))
	}},
	{"underlay changes its path MTU", func(f *field) {
		f.step(ipoib.UnderlayChanged{Link: f.link, PathMTU: ib.MTU4096, Active: true})
	}},
}
