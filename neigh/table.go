package neigh

import (
	"net/netip"
	"time"
)

// A Table is the neighbour cache and the own addresses of one interface. It is
// not safe for concurrent use.
type Table struct {
	o Options
	n Counters
}

// New returns a Table without neighbours and addresses.
func New(o Options) *Table { return &Table{o: o} }

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (t *Table) Step(dst []Action, now time.Time, ev Event) []Action { return dst }

// Deadline says when the driver must send Wake; zero means never.
func (t *Table) Deadline() time.Time { return time.Time{} }

// Lookup returns the entry of ip.
func (t *Table) Lookup(ip netip.Addr) (Neighbor, bool) { return Neighbor{}, false }

// Neighbors returns all entries, ordered by address.
func (t *Table) Neighbors() []Neighbor { return nil }

// Addrs returns our own addresses, ordered by address.
func (t *Table) Addrs() []Addr { return nil }

// Counters returns the counters.
func (t *Table) Counters() Counters { return t.n }

// QueuedOctets returns what waits for all neighbours together.
func (t *Table) QueuedOctets() int { return 0 }
