package neigh

import (
	"net/netip"

	"ipoibcm/wire/encap"
)

// An Action is what the driver must do, or may tell the operator. The types in
// this file are all there are.
type Action interface{ action() }

// A Dest is the destination of a UD packet. Exactly one of the first three fields is set.
type Dest struct {
	Broadcast bool           // the broadcast-GID
	Group     netip.Addr     // the MGID of this IP multicast group
	LinkAddr  encap.LinkAddr // unicast to this QPN and GID; the flags do not matter
	// Later is set if nothing waits for the packet, so that others may leave before it: it announces an
	// address, or asks whether another host has that address too.
	Later bool
}

// SendUD sends Payload after an encapsulation header of EtherType from the UD
// queue pair, never over a connection (RFC 4755 section 7). The driver owns Payload.
type SendUD struct {
	To        Dest
	EtherType encap.EtherType // ARP or IPv6
	Payload   []byte
}

// Resolved says that IP is at LinkAddr. A Deliver for each packet that waited follows.
type Resolved struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
}

// Changed says that a known neighbour has another link-layer address, such as a new UD
// QPN after a restart, or other flags.
type Changed struct {
	IP       netip.Addr
	Old, New encap.LinkAddr
}

// Expired says that a neighbour is no longer known.
type Expired struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
	Reason   ExpireReason
}

// An ExpireReason says why a neighbour is no longer known.
type ExpireReason uint8

// Reasons to expire.
const (
	ExpireUnused      ExpireReason = iota + 1 // stale and unused for StaleTime
	ExpireUnreachable                         // did not answer its probes
	ExpireForgotten                           // ForgetLink or Flush
	ExpireEvicted                             // another entry took its place, or SetPolicy lowered the bound
	ExpireOwn                                 // the address is now one of ours
)

// String prints the reason in a word.
func (r ExpireReason) String() string {
	return [...]string{"none", "unused", "unreachable", "forgotten", "evicted", "own address"}[min(r, ExpireOwn)]
}

// Deliver hands back a packet that waited, or whose next hop was known already. The driver
// sends it to LinkAddr. Packets to one neighbour come in the order of their Resolve events.
type Deliver struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
	Packet   []byte
}

// Failed says that nobody answered for IP. A Discard for each packet that waited follows. The
// driver may answer such a packet with an ICMP destination unreachable.
type Failed struct{ IP netip.Addr }

// Discard hands back a packet that will not be sent, and says why. The Table has counted it.
type Discard struct {
	IP     netip.Addr
	Packet []byte
	Reason Drop
}

// AddrVerified says that an own address is verified: detection found no duplicate, or is off, or
// Insist took the address into use.
type AddrVerified struct{ IP netip.Addr }

// Duplicate says that another host has this own address. We do not answer for it any more, until
// AddrVerified follows: a later detection found it free, or Insist took it into use. By is zero if
// the link-layer address of the other host is not known. Yielded reports whether the address had
// been verified before: then it was claimed a second time within 10 s.
type Duplicate struct {
	IP      netip.Addr
	By      encap.LinkAddr
	Yielded bool
}

// Conflict says that another host claims a verified own address. We keep and defend the address.
// While the address stays verified, there is at most one Conflict for it in 10 s.
type Conflict struct {
	IP netip.Addr
	By encap.LinkAddr
}

// AskOther asks the driver whether this host answers for IP, which is not on the device
// ([rtnl.Conf.Answer]). The driver answers with OtherIs; until then we do not answer for IP.
type AskOther struct{ IP netip.Addr }

// Refused says that a claim was dropped, and why: DropMalformed, DropSpoofed, DropBadSender,
// DropLocked, DropStillThere, DropChallenges or DropNotOverride. The Table has counted it. A
// flood of claims makes a flood of these actions.
type Refused struct {
	IP      netip.Addr     // the address claimed; zero if the packet could not be read
	Claimed encap.LinkAddr // link-layer address that the claim gives for IP; zero if it gives none
	From    encap.LinkAddr // source of the packet; Claimed for DropLocked, DropStillThere, DropChallenges
	Reason  Drop
}

func (SendUD) action()       {}
func (Resolved) action()     {}
func (Changed) action()      {}
func (Expired) action()      {}
func (Deliver) action()      {}
func (Failed) action()       {}
func (Discard) action()      {}
func (AddrVerified) action() {}
func (Duplicate) action()    {}
func (Conflict) action()     {}
func (AskOther) action()     {}
func (Refused) action()      {}
