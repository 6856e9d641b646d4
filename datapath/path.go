package datapath

import (
	"fmt"
	"sync/atomic"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A Kind says what happens to a packet that takes a path.
type Kind uint8

// Kinds of targets.
const (
	Miss   Kind = iota // on-link and unresolved: the packet goes up
	ToUD               // the interface's UD QP
	ToConn             // a connection
	Drop               // unreachable: counted
)

// String names k.
func (k Kind) String() string {
	return [...]string{"miss", "ud", "conn", "drop"}[min(k, Drop)]
}

// A UDDest is the destination of a UD message.
type UDDest struct {
	AH   verbs.AH
	QPN  ib.QPN  // QPNMulticast for a group
	QKey ib.QKey // the broadcast group's
}

// A Target is what a path leads to at the moment.
type Target struct {
	Kind Kind
	MTU  int    // largest IP packet in octets; larger ones go up. Zero sets no limit
	UD   UDDest // ToUD
	Conn *Conn  // ToConn; never for multicast or broadcast (RFC 4755 section 2.1)
	// ToConn: while packets wait for Conn, those of sparse flows go to UD if they have at most UDMTU octets.
	// Zero: none do. Then UD is not used.
	UDMTU int
}

// A Path is one next hop: a neighbour, a multicast group, or the one that all on-link destinations
// share while they are not resolved. Many destinations may share a Path. A neighbour keeps its Path
// when its mode changes, so its counters go on and the destination cache stays as it is.
type Path struct {
	// Tag belongs to the owner, who finds it in Frames. It is set before use and not changed.
	Tag uint64

	target atomic.Pointer[Target]
	c      pathCounters
}

type pathCounters struct {
	packets, octets, dropped, queueFull atomic.Uint64
	used                                atomic.Int64 // time of nanotime; zero means never
}

// NewPath returns a path that leads to t.
func NewPath(tag uint64, t Target) *Path {
	p := &Path{Tag: tag}
	p.Set(t)
	return p
}

// Set makes p lead to t from the next batch on. The AH of the target that t replaces may be
// destroyed after [Loop.Barrier].
func (p *Path) Set(t Target) {
	if t.Kind == ToConn && (t.Conn == nil || t.UDMTU > 0 && t.UD.AH == nil) || t.Kind == ToUD && t.UD.AH == nil {
		panic(fmt.Sprintf("datapath: target %v leads nowhere", t.Kind))
	}
	p.target.Store(&t)
}

// Target returns what p leads to.
func (p *Path) Target() Target { return *p.target.Load() }

// PathCounters are the counts of one path since it was made.
type PathCounters struct {
	Packets, Octets uint64 // IP packets handed to the provider, and their octets
	Dropped         uint64 // packets dropped for any reason but QueueFull
	QueueFull       uint64 // packets dropped because too much waited for their QP
	// Used is when a packet last took the path, even if it was dropped or went up; exact to a
	// batch. The zero Time means never.
	Used time.Time
}

// Counters returns p's counts.
func (p *Path) Counters() PathCounters {
	return PathCounters{
		Packets: p.c.packets.Load(), Octets: p.c.octets.Load(),
		Dropped: p.c.dropped.Load(), QueueFull: p.c.queueFull.Load(), Used: timeOf(p.c.used.Load()),
	}
}
