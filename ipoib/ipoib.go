// Package ipoib is one IPoIB connected-mode interface as a pure state machine.
//
// An [Interface] composes the neighbour cache, the multicast groups, the
// connection manager and the MTU rules into one answer per next hop: which
// queue pair, which MTU. Its driver feeds it events (a packet without a path, a
// MAD, an address added) and carries out its actions (send, create a queue
// pair, change a route). It reads no clock and starts nothing; packets that
// have a path never come here.
//
// Sources: RFC 4755, RFC 4391, design D2 to D12, wire-facts sections 1.2 and 6.
package ipoib

import (
	"net/netip"
	"time"
)

// An Interface is the machine. It is not safe for concurrent use.
type Interface struct {
	opt Options
}

// New returns the machine of one interface. It panics if opt.Rand is nil.
func New(opt Options) *Interface { return &Interface{opt: opt} }

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (f *Interface) Step(dst []Action, now time.Time, ev Event) []Action { return dst }

// Deadline returns when the driver must send Wake; zero means never.
func (f *Interface) Deadline() time.Time { return time.Time{} }

// Status returns the interface as it is now.
func (f *Interface) Status() Status { return Status{} }

// Conns lists the connections in the record, oldest first.
func (f *Interface) Conns() []ConnInfo { return nil }

// Neighbours lists the neighbour cache by address.
func (f *Interface) Neighbours() []NeighbourInfo { return nil }

// Routes lists the data path's table as the machine last set it, by prefix.
func (f *Interface) Routes() []RouteInfo { return nil }

// Groups lists the multicast groups by MGID.
func (f *Interface) Groups() []GroupInfo { return nil }

// Counters lists every counter in a fixed order.
func (f *Interface) Counters() []Counter { return nil }

// Explain says why packets to addr go where they go.
func (f *Interface) Explain(addr netip.Addr) Explanation { return Explanation{} }
