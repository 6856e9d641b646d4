package datapath

// Counters are what a Loop counts. Packets are IP packets or UD frames; octets
// are those of IP packets.
type Counters struct {
	TxPackets, TxOctets uint64 // from the TUN to any QP
	TxUD, TxConn        uint64 // packets of it
	RxPackets, RxOctets uint64 // from any QP to the TUN
	RxUD, RxConn        uint64
	Up                  uint64 // frames handed up
	Injected            uint64

	// Drops, by reason.
	TxUnreachable  uint64 // target Drop
	TxGone         uint64 // target's connection was closed
	TxQueueFull    uint64 // a connection's send queue was full
	TxUDQueueFull  uint64
	TxNoBuffer     uint64 // send buffers used up (Send and SendUD only)
	TxPostError    uint64 // the provider refused the request
	TxError        uint64 // completed with an error
	TxFlushed      uint64
	TxMalformed    uint64 // not IP
	TxMulticastRC  uint64 // a multicast whose path led to a connection
	UpFull         uint64 // the ring up was full
	RxError        uint64 // completed with an error, flushes not included
	RxShort        uint64 // shorter than header and IP header
	RxUnknownType  uint64 // header type we do not carry
	RxARPConn      uint64 // ARP on a connected QP
	RxOwnEcho      uint64 // our own multicast
	RxNotWanted    uint64 // inner multicast group not joined
	RxMalformed    uint64 // IP version does not match the type
	RxUnknownQP    uint64
	RxTUN          uint64 // the kernel refused it
	RxUDOversize   uint64 // not dropped: a UD frame larger than our UD MTU
	TxWaits        uint64 // not dropped: times the reader waited for room
	TxStalls       uint64 // not dropped: times a queue stayed full without progress
	RepostFailures uint64 // receive buffers that could not be posted again at once
}
