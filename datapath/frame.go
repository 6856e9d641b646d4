package datapath

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire/encap"
)

// A FrameKind says why a frame went up.
type FrameKind uint8

// Kinds of frames. Those named TX come from the TUN and hold an IP packet (TXStale only its
// start); the others come from the fabric.
const (
	TXMiss    FrameKind = iota // its path is a Miss
	TXNoRoute                  // the destination cache has no entry for it, or one that a change made stale a second ago or more
	TXTooBig                   // larger than the target's MTU
	TXStale                    // the start of a packet that took a stale entry, enough for [ip.FlowOf]
	TXControl                  // IGMP, MLD, ND: never sent by the loop itself
	RXARP                      // on the UD QP
	RXND                       // ICMPv6 133 to 137, on any QP
	RXCM                       // a CM message in-band, on the UD QP
	RXProbe                    // a probe of a path's MTU, or the answer to one, on any QP
	RXSender                   // the start of an IP packet on the UD QP, enough for [ip.FlowOf]: its source sends many, and we send nothing to it
)

// String names k.
func (k FrameKind) String() string {
	return [...]string{"tx-miss", "tx-no-route", "tx-too-big", "tx-stale", "tx-control", "rx-arp", "rx-nd",
		"rx-cm", "rx-probe", "rx-sender"}[min(k, RXSender)]
}

// data reports whether k comes from a data packet. Such frames may fill only their share of the
// ring.
func (k FrameKind) data() bool { return k <= TXStale }

// A Frame is a packet on its way up. Its reader calls Release when done, and must not use Data
// after that.
type Frame struct {
	Kind FrameKind
	Type encap.EtherType // IPv4, IPv6, ARP, InbandCM or PathProbe
	Data []byte          // the IP packet, ARP packet or MAD, without the 4-octet header

	// TX: the path that it would have taken (nil for TXNoRoute and TXControl) and, for TXTooBig,
	// the MTU in octets that it exceeded.
	Path *Path
	MTU  int

	// RX: its sender. On a connection only Conn is set.
	SrcGID ib.GID // from the GRH; zero if there is none
	SrcQPN ib.QPN // of the sender's UD QP
	DstGID ib.GID // ours, or the MGID
	Conn   *Conn

	pool chan *Frame
}

// keepOctets is how large a buffer a free Frame keeps: large enough for a usual UD MTU. Larger
// packets go up seldom, but without this bound every Frame would have a large buffer in the end.
const keepOctets = 4 << 10

// Release gives f back. A Frame that is not from a Loop may be released too.
func (f *Frame) Release() {
	if f.pool == nil {
		return
	}
	f.Path, f.Conn = nil, nil
	if cap(f.Data) > keepOctets {
		f.Data = nil
	}
	f.pool <- f // never blocks: the pool has room for all its frames
}

// String prints what f is, for people.
func (f *Frame) String() string {
	return fmt.Sprintf("%v %v %d octets", f.Kind, f.Type, len(f.Data))
}

// An upRing carries frames to the control plane. Data and control have frames of their own, so
// that a flood of misses does not keep ARP out. A frame's buffer grows to what it has to hold, so
// the memory of the ring is bounded by its depth times the largest packet.
type upRing struct {
	ch            chan *Frame
	data, control chan *Frame // free frames
}

func newUpRing(depth int) upRing {
	nControl := max(depth/4, 1)
	nData := max(depth-nControl, 1)
	r := upRing{ch: make(chan *Frame, nData+nControl), data: make(chan *Frame, nData),
		control: make(chan *Frame, nControl)}
	for range nData {
		r.data <- &Frame{pool: r.data}
	}
	for range nControl {
		r.control <- &Frame{pool: r.control}
	}
	return r
}

// get copies f and its Data into a free frame and returns that, nil if no frame is free.
func (r *upRing) get(f Frame) *Frame {
	pool := r.control
	if f.Kind.data() {
		pool = r.data
	}
	select {
	case free := <-pool:
		f.Data, f.pool = append(free.Data[:0], f.Data...), pool
		*free = f
		return free
	default:
		return nil
	}
}

// handUp hands f, whose Data is not kept, to the control plane, or drops it.
func (l *Loop) handUp(f Frame) {
	if !l.offerUp(f) {
		l.c.UpFull.Add(1)
	}
}

// offerUp hands f, whose Data is not kept, to the control plane if the ring is not full, and reports whether it did.
func (l *Loop) offerUp(f Frame) bool {
	free := l.up.get(f)
	if free == nil {
		return false
	}
	l.c.Up.Add(1)
	l.up.ch <- free // never blocks: it has room for all frames
	return true
}
