package datapath

import "ipoibcm/counters"

// Counts are what a Loop counts; C is uint64 or atomic.Uint64. Packets are IP packets or other
// messages; octets are without the encapsulation header.
type Counts[C any] struct {
	TxPackets C `name:"tx_packets"` // messages posted to any QP, from the TUN, Send, SendUD, SendCopies or SendConn
	TxOctets  C `name:"tx_octets"`  // octets of TxPackets
	TxUD      C `name:"tx_ud"`      // those of TxPackets on the UD QP
	TxConn    C `name:"tx_conn"`    // those of TxPackets on connections
	RxPackets C `name:"rx_packets"` // packets from any QP to the TUN
	RxOctets  C `name:"rx_octets"`
	RxUD      C `name:"rx_ud"`    // those of RxPackets from the UD QP
	RxConn    C `name:"rx_conn"`  // those of RxPackets from connections
	Up        C `name:"up"`       // packets and frames handed up, TXStale not included
	Injected  C `name:"injected"` // packets of InjectTUN

	// Drops, by reason. metrics know them by "drop_" in the name.
	TxUnreachable   C `name:"tx_drop_unreachable"`    // the path led to a Drop; in Send also to a Miss
	TxGone          C `name:"tx_drop_gone"`           // the connection was closed, or a packet could not follow its path
	TxQueueFull     C `name:"tx_drop_queue_full"`     // too much waited for a connection
	TxUDQueueFull   C `name:"tx_drop_ud_queue_full"`  // too much waited for the UD QP
	TxLate          C `name:"tx_drop_late"`           // waited for too long (CoDel)
	TxNoBuffer      C `name:"tx_drop_no_buffer"`      // send buffers used up
	TxPostError     C `name:"tx_drop_post_error"`     // the provider refused the request
	TxError         C `name:"tx_drop_error"`          // completed with an error
	TxFlushed       C `name:"tx_drop_flushed"`        // flushed from a QP in ERR; only requests that the provider reports
	TxMalformed     C `name:"tx_drop_malformed"`      // not IP
	TxMulticastConn C `name:"tx_drop_multicast_conn"` // a multicast whose path led to a connection
	TxGroupHeld     C `name:"tx_drop_group_held"`     // to a group: would have gone up, but HoldGroups is on
	UpFull          C `name:"up_drop_full"`           // no frame was free to hand it up
	RxError         C `name:"rx_drop_error"`          // completed with an error, flushes not included
	RxShort         C `name:"rx_drop_short"`          // shorter than its headers
	RxUnknownType   C `name:"rx_drop_unknown_type"`   // header type we do not carry
	RxARPConn       C `name:"rx_drop_arp_conn"`       // ARP or RARP on a connection
	RxMulticastConn C `name:"rx_drop_multicast_conn"` // multicast or broadcast on a connection
	RxOwnEcho       C `name:"rx_drop_own_echo"`       // our own multicast
	RxNotWanted     C `name:"rx_drop_not_wanted"`     // inner multicast group not in SetGroups
	RxMalformed     C `name:"rx_drop_malformed"`      // IP version differs from the type
	RxUnknownQP     C `name:"rx_drop_unknown_qp"`     // from a QP that is gone
	RxTUN           C `name:"rx_drop_tun"`            // the kernel refused the packet
	RxFlood         C `name:"rx_drop_flood"`          // ARP, ND, CM and probes on the UD QP, more than sources may send
	RxNotAllowed    C `name:"rx_drop_not_allowed"`    // on the UD QP, from a source not in SetAllow
	RxUDFlood       C `name:"rx_drop_ud_flood"`       // IP on the UD QP, more than a source may send that we do not send to by UD
	RxCongested     C `name:"rx_drop_congested"`      // not ECN-capable, in a UD or UC message with a CE mark (RFC 6040)

	// Not drops.
	RxUDOversize   C `name:"rx_ud_oversize"`  // UD frames larger than our UD MTU
	RxMarked       C `name:"rx_marked"`       // packets that got the CE mark of the message that carried them
	RxNotECT       C `name:"rx_not_ect"`      // delivered without their message's CE mark: not ECN-capable, over RC
	TxStale        C `name:"tx_stale"`        // TXStale frames handed up
	TxStaleFull    C `name:"tx_stale_full"`   // TXStale frames put off because the ring up was full
	TxMarked       C `name:"tx_marked"`       // packets that got a CE mark because they waited for too long
	TxWaited       C `name:"tx_waited"`       // packets that waited in front of their QP
	TxOtherThread  C `name:"tx_other_thread"` // packets read by one thread and posted to a queue pair of another
	TxSparse       C `name:"tx_sparse"`       // packets of sparse flows that went by UD, past those that waited for their connection
	TxMoved        C `name:"tx_moved"`        // packets that waited for one QP and followed their path to another
	FloodFilters   C `name:"flood_filters"`   // floods of UD data that the provider was asked to keep away
	RxSenders      C `name:"rx_senders"`      // RXSender frames: times that the source of many UD packets was to be looked up
	RepostFailures C `name:"repost_failures"` // times receive buffers could not be posted again at once
}

// Counters are the values of the counts at one time.
type Counters = Counts[uint64]

// Counters returns the counts of the loop.
func (l *Loop) Counters() (sum Counters) {
	counters.Add(&sum, &l.c)
	for _, th := range l.threads {
		counters.Add(&sum, &th.c)
	}
	return sum
}
