package ip

import (
	"errors"
	"fmt"
	"net/netip"
)

// A ChangeKind says what a group record of a report means for its sender.
type ChangeKind uint8

// Kinds of change. The state-change records of IGMPv3 and MLDv2 that add or
// remove sources keep their names; the others come down to the first four.
const (
	Join    ChangeKind = 1 + iota // IGMPv1, IGMPv2, MLDv1 report
	Leave                         // IGMPv2 leave, MLDv1 done
	Include                       // only from the listed sources; with none it is a leave
	Exclude                       // from all but the listed sources
	Allow                         // these sources too
	Block                         // these sources no more
)

// String prints the name of k in lower case.
func (k ChangeKind) String() string {
	switch k {
	case Join:
		return "join"
	case Leave:
		return "leave"
	case Include:
		return "include"
	case Exclude:
		return "exclude"
	case Allow:
		return "allow"
	case Block:
		return "block"
	}
	return fmt.Sprintf("ChangeKind(%d)", uint8(k))
}

// A Change is one group record of a membership report.
type Change struct {
	Group   netip.Addr // always multicast
	Kind    ChangeKind
	Sources int // how many source addresses the record lists
}

// Wanted says what c means for who keeps no sources: whether the sender now
// wants the group. known is false if c alone does not tell (Block).
func (c Change) Wanted() (want, known bool) {
	switch c.Kind {
	case Join, Exclude, Allow:
		return true, true
	case Include:
		return c.Sources > 0, true
	case Leave:
		return false, true
	}
	return false, false
}

// ErrNotReport says that a packet is no membership report at all.
var ErrNotReport = errors.New("ip: not a membership report")

// IsReport reports whether pkt looks like an IGMP or MLD message, at the cost of
// a few octets: what it holds goes to [AppendChanges] as well as on its way.
func IsReport(pkt []byte) bool { panic("todo") }

// AppendChanges appends to dst the group records of the IGMPv1, v2, v3, MLDv1 or
// MLDv2 report in the IP packet pkt, in their order. A packet that is no report
// gives [ErrNotReport] (queries included), a broken one another error and
// nothing appended.
func AppendChanges(dst []Change, pkt []byte) ([]Change, error) { panic("todo") }
