package engine

// A DropReason says why a received packet had no effect.
type DropReason uint8

// Reasons. NoDrop means that the packet was taken.
const (
	NoDrop       DropReason = iota
	DropOpcode              // not one of this transport
	DropState               // QP neither in RTR nor in RTS
	DropPKey                // other partition
	DropQKey                // UD: other Q_Key
	DropSource              // source or destination is not the connection's
	DropSequence            // RC: ahead of the expected PSN; UC: rest of a message that has a hole
	DropStale               // acknowledgement or response that answers nothing
	DropNoRecv              // no receive posted
	DropTooLong             // larger than the receive posted
	DropLength              // opcode out of order, or payload length that does not fit
	DropAccess              // no right to that memory
	DropReadBusy            // READ while MaxDestRDAtomic are being answered
	DropMSN                 // ACK or NAK with a number of messages that the peer cannot have completed
	NumDropReasons
)

var dropNames = [NumDropReasons]string{"none", "opcode", "state", "pkey", "qkey", "source",
	"sequence", "stale", "no_recv", "too_long", "length", "access", "read_busy", "msn"}

// String names r in the form used in counter names.
func (r DropReason) String() string { return dropNames[min(r, NumDropReasons-1)] }

// DropCounts are counters by [DropReason].
type DropCounts[C any] [NumDropReasons]C

// Name returns the name of counter r; that of NoDrop is empty.
func (*DropCounts[C]) Name(r int) string {
	if r == int(NoDrop) {
		return ""
	}
	return DropReason(r).String()
}

// Counters count what a QP did. They only grow.
type Counters struct {
	PacketsOut  uint64             `name:"packets_out"` // requests and responses
	OctetsOut   uint64             `name:"octets_out"`  // octets of payload
	PacketsIn   uint64             `name:"packets_in"`  // taken, in order
	OctetsIn    uint64             `name:"octets_in"`
	Retransmits uint64             `name:"retransmits"` // packets sent again
	Timeouts    uint64             `name:"timeouts"`    // expiries of the ACK timer
	Probes      uint64             `name:"probes"`      // single packets sent again before that expiry
	ACKsOut     uint64             `name:"acks_out"`
	ACKsIn      uint64             `name:"acks_in"`
	NAKsOut     uint64             `name:"naks_out"` // sequence and fatal ones
	NAKsIn      uint64             `name:"naks_in"`
	Challenges  uint64             `name:"naks_challenged"` // fatal NAKs about which the peer was asked again
	FalseNAKs   uint64             `name:"naks_false"`      // fatal NAKs that the peer proved false
	RNROut      uint64             `name:"rnr_out"`         // RNR NAKs
	RNRIn       uint64             `name:"rnr_in"`
	Duplicates  uint64             `name:"duplicates"` // packets taken before
	Early       uint64             `name:"early"`      // packets kept because others were missing
	Ahead       uint64             `name:"ahead"`      // packets kept that the peer has sent before earlier ones, see Group
	CEIn        uint64             `name:"ce_in"`      // packets taken that had a CE mark
	CNPsOut     uint64             `name:"cnps_out"`
	CNPsIn      uint64             `name:"cnps_in"`
	CNPsIgnored uint64             `name:"cnps_ignored"`  // CNPs that came and had no effect
	Reductions  uint64             `name:"ce_reductions"` // times that marks lowered the number of packets in flight
	ECTLost     uint64             `name:"ect_lost"`      // 1 if the path clears ECN, and packets are not ECN-capable any more
	Drops       DropCounts[uint64] `name:"drop_"`
}
