package neigh

import (
	"net/netip"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
)

// An Event is what a Table is told. The types in this file are all there are.
type Event interface{ event() }

// Resolve asks for the link-layer address of next hop IP. Packet, if not nil,
// waits for it; it is opaque here but for its length and, where it is an IP
// packet, its source address. The Table owns it until it comes back in exactly
// one Deliver or Discard, possibly of the same Step. Resolve counts as a use.
type Resolve struct {
	IP     netip.Addr
	Packet []byte
	Source netip.Addr // without Packet: of the packets that will follow; may be zero
}

// Recall puts a neighbour into the table that an earlier Table of this interface knew,
// as if it had not been used since: it is probed once it is. An entry that is there, and
// our own addresses, stay as they are, and a full table takes no more.
type Recall struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
	Router   bool
}

// Used says that packets went to neighbour IP without asking the Table. Tell it
// every second or so for neighbours with traffic: unused entries expire, used
// ones are probed when their confirmation has aged.
type Used struct{ IP netip.Addr }

// Confirmed says that neighbour IP demonstrably received something lately: an RC
// acknowledgement, a REP, forward progress of TCP (RFC 4861 section 7.3.1).
type Confirmed struct{ IP netip.Addr }

// ConfirmedLink is Confirmed for every neighbour with this link-layer address;
// the flags do not count. It proves the interface, not the IP address, and so
// stands for an answer only for two reachable times after the last one.
type ConfirmedLink struct{ LinkAddr encap.LinkAddr }

// DoubtedLink says that something which went to this link-layer address, its flags
// not counted, had no answer at all: an RC connection whose retries are exceeded, a
// REQ. Neighbours there that are in use are probed at once, as if they had been
// stale: their announcement of another GID may have been lost.
type DoubtedLink struct{ LinkAddr encap.LinkAddr }

// Forget drops the entry of IP, known or failed; packets that wait for it come
// back in Discard. The next Resolve asks again.
type Forget struct{ IP netip.Addr }

// ForgetLink drops every entry with this link-layer address, flags not counted:
// a REJ 8 with another UD QPN said that it is out of date.
type ForgetLink struct{ LinkAddr encap.LinkAddr }

// SetHints replaces what is said elsewhere of where neighbours are. A first query goes
// there, and to everybody when it has no answer. A hint is where to ask; it is never
// believed. The map must not change afterwards.
type SetHints struct {
	Hints map[netip.Addr]encap.LinkAddr
}

// Flush drops all entries, as when the interface goes down.
type Flush struct{}

// RecvARP is an ARP packet, without the encapsulation header. From is the source
// of the UD packet (flags zero); a zero GID means that it had no GRH and is not
// known.
type RecvARP struct {
	From    encap.LinkAddr
	Payload []byte
}

// RecvND is an IPv6 packet that holds a Neighbor Solicitation or Advertisement
// from the fabric, from its IPv6 header on. From is as in RecvARP; for one that
// came over a connection it is that neighbour's address.
type RecvND struct {
	From    encap.LinkAddr
	Payload []byte
}

// AddrAdded says that an address is on the device, whoever put it there. Prefix
// keeps the host bits. Adding it again changes only the prefix length.
type AddrAdded struct{ Prefix netip.Prefix }

// Insist says that this host claims an own address by other means, such as VRRP,
// so that it is taken into use and announced though another host has it.
type Insist struct{ IP netip.Addr }

// AddrRemoved says that it no longer is.
type AddrRemoved struct{ IP netip.Addr }

// SetLinkAddr changes our own link-layer address (new UD QPN, GID or flags) and
// announces every address again if it differs.
type SetLinkAddr struct{ LinkAddr encap.LinkAddr }

// SetFlags changes only the flags of what we say our link-layer address is, from
// the next message on. Nothing is announced: peers hear of it when they ask.
type SetFlags struct{ Flags encap.Flags }

// OtherIs answers AskOther. It holds for five seconds.
type OtherIs struct {
	IP     netip.Addr
	Answer rtnl.Answering
}

// SetRouter says whether this host forwards IPv6: the R flag of advertisements. A
// change is announced (RFC 4861 section 7.2.6).
type SetRouter struct{ On bool }

// SetStaleTime changes Options.StaleTime, for entries that become stale from now on.
type SetStaleTime struct{ After time.Duration }

// SetPolicy changes Options.AcceptAlways and Options.MaxNeighbors. Entries above a lower bound are
// evicted as far as they may be, in the order in which new ones would take their place.
type SetPolicy struct {
	AcceptAlways bool
	MaxNeighbors int
}

// Reannounce announces every address again and looks again whether those found
// duplicate still are: the underlay is back.
type Reannounce struct{}

// Wake says that Deadline has passed. Spurious ones are harmless.
type Wake struct{}

func (Resolve) event()       {}
func (Recall) event()        {}
func (Used) event()          {}
func (Confirmed) event()     {}
func (ConfirmedLink) event() {}
func (DoubtedLink) event()   {}
func (Forget) event()        {}
func (ForgetLink) event()    {}
func (SetHints) event()      {}
func (Flush) event()         {}
func (RecvARP) event()       {}
func (RecvND) event()        {}
func (AddrAdded) event()     {}
func (AddrRemoved) event()   {}
func (Insist) event()        {}
func (SetLinkAddr) event()   {}
func (SetStaleTime) event()  {}
func (SetPolicy) event()     {}
func (SetFlags) event()      {}
func (SetRouter) event()     {}
func (OtherIs) event()       {}
func (Reannounce) event()    {}
func (Wake) event()          {}
