package neigh

import (
	"net/netip"

	"ipoibcm/wire/encap"
)

// An Action is what the driver must do, or may tell the operator. The types in
// this file are all there are.
type Action interface{ action() }

// A Dest says where a UD packet goes. Exactly one of the first three is set.
type Dest struct {
	Broadcast bool           // the broadcast-GID
	Group     netip.Addr     // the MGID of this IP multicast group
	LinkAddr  encap.LinkAddr // unicast to this QPN and GID; the flags do not matter
	// Later says that nothing waits for it: detection of duplicates, announcements.
	Later bool
}

// SendUD sends Payload after an encapsulation header of EtherType, from the UD
// queue pair, always (RFC 4755 section 7: never over a connection). The driver
// owns Payload.
type SendUD struct {
	To        Dest
	EtherType encap.EtherType // ARP or IPv6
	Payload   []byte
}

// Resolved says that IP is at LinkAddr. Deliver actions for what waited follow.
type Resolved struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
}

// Changed says that a known neighbour has another link-layer address: a new UD
// QPN after a restart, or other flags.
type Changed struct {
	IP       netip.Addr
	Old, New encap.LinkAddr
}

// FlagsOnly reports whether it is the same interface that offers other modes.
func (c Changed) FlagsOnly() bool { return c.Old.Key() == c.New.Key() }

// Expired says that a known neighbour is no longer.
type Expired struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
	Reason   ExpireReason
}

// An ExpireReason says why a known neighbour went.
type ExpireReason uint8

// Reasons to expire.
const (
	ExpireUnused      ExpireReason = iota + 1 // stale and unused for StaleTime
	ExpireUnreachable                         // did not answer its probes
	ExpireForgotten                           // Forget, ForgetLink or Flush
	ExpireEvicted                             // made room for another
	ExpireOwn                                 // the address is now one of ours
)

// String prints the reason in a word.
func (r ExpireReason) String() string {
	switch r {
	case ExpireUnused:
		return "unused"
	case ExpireUnreachable:
		return "unreachable"
	case ExpireForgotten:
		return "forgotten"
	case ExpireEvicted:
		return "evicted"
	case ExpireOwn:
		return "own address"
	}
	return "none"
}

// Deliver hands back a packet that waited, or whose next hop was known already;
// send it to LinkAddr. Packets of one neighbour come in the order they were given.
type Deliver struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
	Packet   []byte
}

// Failed says that nobody answered for IP; Discard actions for what waited follow.
// An ICMP destination unreachable may be sent for those.
type Failed struct{ IP netip.Addr }

// Discard hands back a packet that will not be sent, and why. It is counted here.
type Discard struct {
	IP     netip.Addr
	Packet []byte
	Reason Drop
}

// AddrVerified says that no duplicate of an own address was found.
type AddrVerified struct{ IP netip.Addr }

// Duplicate says that somebody else has this own address. Answers for it have
// stopped; AddrVerified follows when a later detection finds it free. By is zero if
// the other one did not say who it is. Yielded says that it had been verified, and
// that another host claimed it twice in 10 s.
type Duplicate struct {
	IP      netip.Addr
	By      encap.LinkAddr
	Yielded bool
}

// Conflict says that somebody else claims an own address that had been verified.
// We keep it and defend it. It comes at most once in 10 s for one address.
type Conflict struct {
	IP netip.Addr
	By encap.LinkAddr
}

// AskOther wants to know whether the host answers for IP, which is not on the
// device ([rtnl.Conf.Answer]). The answer is OtherIs; without one nobody is told
// anything about IP.
type AskOther struct{ IP netip.Addr }

// Refused says that a claim was dropped as false, and why: DropMalformed, DropSpoofed,
// DropBadSender, DropLocked, DropStillThere, DropChallenges or DropNotOverride. It is counted here. A flood of
// claims makes a flood of these.
type Refused struct {
	IP      netip.Addr     // that the claim is about; zero if it could not be read
	Claimed encap.LinkAddr // where it is said to be; zero if that was not said
	From    encap.LinkAddr // source of the packet
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
