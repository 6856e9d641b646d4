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
	DropNoRecv              // UC, UD: no receive posted
	DropTooLong             // UC, UD: larger than the receive posted
	DropLength              // payload length against the path MTU or the request
	DropAccess              // UC: no right to that memory
	DropReadBusy            // repeated READ while MaxDestRDAtomic are being answered
	DropMSN                 // ACK or NAK with a number of messages that the peer cannot have completed
	NumDropReasons
)

var dropNames = [NumDropReasons]string{"none", "opcode", "state", "pkey", "qkey", "source",
	"sequence", "stale", "no_recv", "too_long", "length", "access", "read_busy", "msn"}

// String names r in the form used in counter names.
func (r DropReason) String() string { return dropNames[min(r, NumDropReasons-1)] }

// Counters count what a QP did. They only grow.
type Counters struct {
	PacketsOut, OctetsOut uint64 // requests and responses; octets of payload
	PacketsIn, OctetsIn   uint64 // taken, in order
	Retransmits           uint64 // packets sent again
	Timeouts              uint64 // expiries of the ACK timer
	Probes                uint64 // single packets sent again before it expired
	ACKsOut, ACKsIn       uint64
	NAKsOut, NAKsIn       uint64 // sequence and fatal ones
	Challenges            uint64 // fatal NAKs about which the peer was asked again
	FalseNAKs             uint64 // of these, what the peer proved false
	RNROut, RNRIn         uint64 // RNR NAKs
	Duplicates            uint64 // packets taken before
	Early                 uint64 // packets kept because others were missing
	CEIn                  uint64 // packets taken that had a CE mark
	CNPsOut, CNPsIn       uint64
	CNPsIgnored           uint64 // of those that came, without an effect
	Reductions            uint64 // times fewer packets were let be in flight because of marks
	ECTLost               uint64 // 1 if packets are not ECN-capable any more because the path clears that
	Drops                 [NumDropReasons]uint64
}

// Each calls f for every counter in a fixed order.
func (c *Counters) Each(f func(name string, value uint64)) {
	f("packets_out", c.PacketsOut)
	f("octets_out", c.OctetsOut)
	f("packets_in", c.PacketsIn)
	f("octets_in", c.OctetsIn)
	f("retransmits", c.Retransmits)
	f("timeouts", c.Timeouts)
	f("probes", c.Probes)
	f("acks_out", c.ACKsOut)
	f("acks_in", c.ACKsIn)
	f("naks_out", c.NAKsOut)
	f("naks_in", c.NAKsIn)
	f("naks_challenged", c.Challenges)
	f("naks_false", c.FalseNAKs)
	f("rnr_out", c.RNROut)
	f("rnr_in", c.RNRIn)
	f("duplicates", c.Duplicates)
	f("early", c.Early)
	f("ce_in", c.CEIn)
	f("cnps_out", c.CNPsOut)
	f("cnps_in", c.CNPsIn)
	f("cnps_ignored", c.CNPsIgnored)
	f("ce_reductions", c.Reductions)
	f("ect_lost", c.ECTLost)
	for r := DropOpcode; r < NumDropReasons; r++ {
		f("drop_"+r.String(), c.Drops[r])
	}
}

// Add adds o to c.
func (c *Counters) Add(o *Counters) {
	c.PacketsOut += o.PacketsOut
	c.OctetsOut += o.OctetsOut
	c.PacketsIn += o.PacketsIn
	c.OctetsIn += o.OctetsIn
	c.Retransmits += o.Retransmits
	c.Timeouts += o.Timeouts
	c.Probes += o.Probes
	c.ACKsOut += o.ACKsOut
	c.ACKsIn += o.ACKsIn
	c.NAKsOut += o.NAKsOut
	c.NAKsIn += o.NAKsIn
	c.Challenges += o.Challenges
	c.FalseNAKs += o.FalseNAKs
	c.RNROut += o.RNROut
	c.RNRIn += o.RNRIn
	c.Duplicates += o.Duplicates
	c.Early += o.Early
	c.CEIn += o.CEIn
	c.CNPsOut += o.CNPsOut
	c.CNPsIn += o.CNPsIn
	c.CNPsIgnored += o.CNPsIgnored
	c.Reductions += o.Reductions
	c.ECTLost += o.ECTLost
	for i, n := range o.Drops {
		c.Drops[i] += n
	}
}
