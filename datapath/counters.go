package datapath

import (
	"reflect"
	"sync/atomic"
)

// Counters are what a Loop counts. Packets are IP packets or UD frames; octets
// are those of IP packets.
type Counters struct {
	TxPackets uint64 // IP packets from the TUN or Send, UD frames from SendUD, to any QP
	TxOctets  uint64 // of those, header not counted
	TxUD      uint64 // packets of it
	TxConn    uint64 // and of it
	RxPackets uint64 // from any QP to the TUN
	RxOctets  uint64
	RxUD      uint64 // packets of it
	RxConn    uint64 // and of it
	Up        uint64 // packets and frames handed up, TXStale not included
	Injected  uint64 // packets of InjectTUN

	// Drops, by reason.
	TxUnreachable   uint64 // the target is a Drop
	TxGone          uint64 // the target's connection was closed
	TxQueueFull     uint64 // too much waited for a connection
	TxUDQueueFull   uint64 // or for the UD QP
	TxLate          uint64 // waited for too long (CoDel)
	TxNoBuffer      uint64 // send buffers used up
	TxPostError     uint64 // the provider refused the request
	TxError         uint64 // completed with an error
	TxFlushed       uint64 // of a QP that went to ERR; only requests that the provider reports
	TxMalformed     uint64 // not IP
	TxMulticastConn uint64 // a multicast whose path led to a connection
	TxGroupHeld     uint64 // to a group, while HoldGroups is on
	UpFull          uint64 // the ring up was full
	RxError         uint64 // completed with an error, flushes not included
	RxShort         uint64 // shorter than its headers
	RxUnknownType   uint64 // header type we do not carry
	RxARPConn       uint64 // ARP or RARP on a connection
	RxMulticastConn uint64 // multicast or broadcast on a connection
	RxOwnEcho       uint64 // our own multicast
	RxNotWanted     uint64 // inner multicast group not in SetGroups
	RxMalformed     uint64 // IP version differs from the type
	RxUnknownQP     uint64 // of a QP that is gone
	RxTUN           uint64 // the kernel refused it
	RxFlood         uint64 // ARP, ND and CM on the UD QP, more than unknown sources may send
	RxNotAllowed    uint64 // on the UD QP, of a source not in SetAllow
	RxUDFlood       uint64 // IP packets of it, more than sources may that we send nothing to by UD
	RxCongested     uint64 // what carried them has met congestion, and they are not ECN-capable (RFC 6040)

	// Not drops.
	RxUDOversize   uint64 // UD frames larger than our UD MTU
	RxMarked       uint64 // got the CE mark of what carried them
	RxNotECT       uint64 // delivered without: not ECN-capable, and came over RC
	TxStale        uint64 // TXStale frames handed up
	TxStaleFull    uint64 // TXStale frames put off because the ring up was full
	TxMarked       uint64 // got a CE mark because they waited for too long
	TxWaited       uint64 // waited in front of their QP
	TxOtherThread  uint64 // read by one thread, and posted to a queue pair of another
	TxMoved        uint64 // waited for one QP and went to another, because their path did
	FloodFilters   uint64 // floods of UD data that the provider was asked to keep away
	RepostFailures uint64 // times receive buffers could not be posted again at once
}

// counters are the same, counting.
type counters struct {
	TxPackets, TxOctets, TxUD, TxConn, RxPackets, RxOctets, RxUD, RxConn, Up,
	Injected atomic.Uint64
	TxUnreachable, TxGone, TxQueueFull, TxUDQueueFull, TxLate, TxNoBuffer, TxPostError, TxError, TxFlushed,
	TxMalformed, TxMulticastConn, TxGroupHeld, UpFull, RxError, RxShort, RxUnknownType, RxARPConn, RxMulticastConn,
	RxOwnEcho, RxNotWanted, RxMalformed, RxUnknownQP, RxTUN, RxFlood, RxNotAllowed, RxUDFlood, RxCongested atomic.Uint64
	RxUDOversize, RxMarked, RxNotECT, TxStale, TxStaleFull, TxMarked, TxWaited, TxOtherThread, TxMoved, FloodFilters,
	RepostFailures atomic.Uint64
}

// Counters returns the counts of the loop.
func (l *Loop) Counters() Counters {
	sum := l.c.load()
	for _, th := range l.threads {
		sum.add(th.c.load())
	}
	return sum
}

// add adds other to c.
func (c *Counters) add(other Counters) {
	to, from := reflect.ValueOf(c).Elem(), reflect.ValueOf(other)
	for i := range to.NumField() {
		to.Field(i).SetUint(to.Field(i).Uint() + from.Field(i).Uint())
	}
}

// load returns the counts as they are.
func (c *counters) load() Counters {
	return Counters{
		TxPackets:       c.TxPackets.Load(),
		TxOctets:        c.TxOctets.Load(),
		TxUD:            c.TxUD.Load(),
		TxConn:          c.TxConn.Load(),
		RxPackets:       c.RxPackets.Load(),
		RxOctets:        c.RxOctets.Load(),
		RxUD:            c.RxUD.Load(),
		RxConn:          c.RxConn.Load(),
		Up:              c.Up.Load(),
		Injected:        c.Injected.Load(),
		TxUnreachable:   c.TxUnreachable.Load(),
		TxGone:          c.TxGone.Load(),
		TxQueueFull:     c.TxQueueFull.Load(),
		TxUDQueueFull:   c.TxUDQueueFull.Load(),
		TxLate:          c.TxLate.Load(),
		TxNoBuffer:      c.TxNoBuffer.Load(),
		TxPostError:     c.TxPostError.Load(),
		TxError:         c.TxError.Load(),
		TxFlushed:       c.TxFlushed.Load(),
		TxMalformed:     c.TxMalformed.Load(),
		TxMulticastConn: c.TxMulticastConn.Load(),
		TxGroupHeld:     c.TxGroupHeld.Load(),
		UpFull:          c.UpFull.Load(),
		RxError:         c.RxError.Load(),
		RxShort:         c.RxShort.Load(),
		RxUnknownType:   c.RxUnknownType.Load(),
		RxARPConn:       c.RxARPConn.Load(),
		RxMulticastConn: c.RxMulticastConn.Load(),
		RxOwnEcho:       c.RxOwnEcho.Load(),
		RxNotWanted:     c.RxNotWanted.Load(),
		RxMalformed:     c.RxMalformed.Load(),
		RxUnknownQP:     c.RxUnknownQP.Load(),
		RxTUN:           c.RxTUN.Load(),
		RxFlood:         c.RxFlood.Load(),
		RxNotAllowed:    c.RxNotAllowed.Load(),
		RxUDFlood:       c.RxUDFlood.Load(),
		RxCongested:     c.RxCongested.Load(),
		RxUDOversize:    c.RxUDOversize.Load(),
		RxMarked:        c.RxMarked.Load(),
		RxNotECT:        c.RxNotECT.Load(),
		TxStale:         c.TxStale.Load(),
		TxStaleFull:     c.TxStaleFull.Load(),
		TxMarked:        c.TxMarked.Load(),
		TxWaited:        c.TxWaited.Load(),
		TxOtherThread:   c.TxOtherThread.Load(),
		TxMoved:         c.TxMoved.Load(),
		FloodFilters:    c.FloodFilters.Load(),
		RepostFailures:  c.RepostFailures.Load(),
	}
}
