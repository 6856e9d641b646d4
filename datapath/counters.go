package datapath

import "ipoibcm/counters"

// Counts are what a Loop counts; C is uint64 or atomic. Packets are IP packets or UD frames; octets
// are those of IP packets.
type Counts[C any] struct {
	TxPackets C `name:"tx_packets"` // IP packets from the TUN or Send, UD frames from SendUD, to any QP
	TxOctets  C `name:"tx_octets"`  // of those, header not counted
	TxUD      C `name:"tx_ud"`      // packets of it
	TxConn    C `name:"tx_conn"`    // and of it
	RxPackets C `name:"rx_packets"` // from any QP to the TUN
	RxOctets  C `name:"rx_octets"`
	RxUD      C `name:"rx_ud"`    // packets of it
	RxConn    C `name:"rx_conn"`  // and of it
	Up        C `name:"up"`       // packets and frames handed up, TXStale not included
	Injected  C `name:"injected"` // packets of InjectTUN

	// Drops, by reason.
	TxUnreachable   C `name:"tx_unreachable"`    // the target is a Drop
	TxGone          C `name:"tx_gone"`           // the target's connection was closed
	TxQueueFull     C `name:"tx_queue_full"`     // too much waited for a connection
	TxUDQueueFull   C `name:"tx_ud_queue_full"`  // or for the UD QP
	TxLate          C `name:"tx_late"`           // waited for too long (CoDel)
	TxNoBuffer      C `name:"tx_no_buffer"`      // send buffers used up
	TxPostError     C `name:"tx_post_error"`     // the provider refused the request
	TxError         C `name:"tx_error"`          // completed with an error
	TxFlushed       C `name:"tx_flushed"`        // of a QP that went to ERR; only requests that the provider reports
	TxMalformed     C `name:"tx_malformed"`      // not IP
	TxMulticastConn C `name:"tx_multicast_conn"` // a multicast whose path led to a connection
	TxGroupHeld     C `name:"tx_group_held"`     // to a group, while HoldGroups is on
	UpFull          C `name:"up_full"`           // the ring up was full
	RxError         C `name:"rx_error"`          // completed with an error, flushes not included
	RxShort         C `name:"rx_short"`          // shorter than its headers
	RxUnknownType   C `name:"rx_unknown_type"`   // header type we do not carry
	RxARPConn       C `name:"rx_arp_conn"`       // ARP or RARP on a connection
	RxMulticastConn C `name:"rx_multicast_conn"` // multicast or broadcast on a connection
	RxOwnEcho       C `name:"rx_own_echo"`       // our own multicast
	RxNotWanted     C `name:"rx_not_wanted"`     // inner multicast group not in SetGroups
	RxMalformed     C `name:"rx_malformed"`      // IP version differs from the type
	RxUnknownQP     C `name:"rx_unknown_qp"`     // of a QP that is gone
	RxTUN           C `name:"rx_tun"`            // the kernel refused it
	RxFlood         C `name:"rx_flood"`          // ARP, ND and CM on the UD QP, more than unknown sources may send
	RxNotAllowed    C `name:"rx_not_allowed"`    // on the UD QP, of a source not in SetAllow
	RxUDFlood       C `name:"rx_ud_flood"`       // IP packets of it, more than sources may that we send nothing to by UD
	RxCongested     C `name:"rx_congested"`      // what carried them has a CE mark, and they are not ECN-capable (RFC 6040)

	// Not drops.
	RxUDOversize   C `name:"rx_ud_oversize"`  // UD frames larger than our UD MTU
	RxMarked       C `name:"rx_marked"`       // got the CE mark of what carried them
	RxNotECT       C `name:"rx_not_ect"`      // delivered without: not ECN-capable, and came over RC
	TxStale        C `name:"tx_stale"`        // TXStale frames handed up
	TxStaleFull    C `name:"tx_stale_full"`   // TXStale frames put off because the ring up was full
	TxMarked       C `name:"tx_marked"`       // got a CE mark because they waited for too long
	TxWaited       C `name:"tx_waited"`       // waited in front of their QP
	TxOtherThread  C `name:"tx_other_thread"` // read by one thread, and posted to a queue pair of another
	TxMoved        C `name:"tx_moved"`        // waited for one QP and went to another, because their path did
	FloodFilters   C `name:"flood_filters"`   // floods of UD data that the provider was asked to keep away
	RepostFailures C `name:"repost_failures"` // times receive buffers could not be posted again at once
}

// Counters are the counts at a time.
type Counters = Counts[uint64]

// Counters returns the counts of the loop.
func (l *Loop) Counters() (sum Counters) {
	counters.Add(&sum, &l.c)
	for _, th := range l.threads {
		counters.Add(&sum, &th.c)
	}
	return sum
}
