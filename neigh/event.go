package neigh

import (
	"net/netip"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
)

// An Event is an input of [Table.Step]. The types in this file are all there are.
type Event interface{ step(*Table) }

// Resolve asks for the link-layer address of next hop IP. Packet, if not nil,
// waits for the answer. The Table reads only its length and, if it is an IP packet, its source
// address. The Table owns Packet until it comes back in exactly one Deliver or Discard, possibly
// of the same Step. Resolve counts as a use.
type Resolve struct {
	IP     netip.Addr
	Packet []byte
	Source netip.Addr // if Packet is nil: the source of the packets that will follow; may be zero
}

// Recall adds a neighbour that an earlier Table of this interface knew. The entry is stale, so that
// it is probed once it is used. Recall changes nothing if IP has an entry, is an own address or is
// not unicast, if LinkAddr is zero, or if the table is full.
type Recall struct {
	IP       netip.Addr
	LinkAddr encap.LinkAddr
	Router   bool
}

// Used says that packets were sent to neighbour IP without a Resolve. The driver sends it every
// second or so for neighbours with traffic: unused entries expire, and used entries are probed when
// their confirmation has aged.
type Used struct{ IP netip.Addr }

// ConfirmedLink says that this link-layer address, flags ignored, demonstrably received something
// lately: an RC acknowledgement, a REP (RFC 4861 section 7.3.1). It proves that the interface is
// there, but not that the interface has the IP address. So it counts only for two reachable times
// after the neighbour last answered itself, or its link-layer address was set.
type ConfirmedLink struct{ LinkAddr encap.LinkAddr }

// DoubtedLink says that nothing came back from this link-layer address, flags ignored: the retries
// of an RC connection were exceeded, or a REQ had no answer. The Table probes neighbours there at
// once if they were used within the last reachable time, and the others when they are used: their
// announcement of another address may have been lost. It also detects duplicates anew for each
// duplicate own address that this host was the last to claim.
type DoubtedLink struct{ LinkAddr encap.LinkAddr }

// ForgetLink drops every entry with this link-layer address, flags ignored: the address is out of
// date, because a REJ 8 named another UD QPN, or its host is not allowed any more. As after
// DoubtedLink, the Table looks again for duplicates of own addresses that this host claimed.
type ForgetLink struct{ LinkAddr encap.LinkAddr }

// SetHints replaces the hints. A hint is the link-layer address that the list of members gives for
// an IP address. The Table sends the first query for an unknown neighbour there, and all later ones
// to the broadcast group. It also sends the last probe of a known neighbour there. A hint is only
// an address to ask and never counts as an answer. The caller must not change the map afterwards.
type SetHints struct {
	Hints map[netip.Addr]encap.LinkAddr
}

// Flush drops all entries, as when the interface goes down.
type Flush struct{}

// RecvARP is an ARP packet, without the encapsulation header. From is the source
// of the UD packet (flags zero). A zero GID means that the packet had no GRH, so that its source
// is not known.
type RecvARP struct {
	From    encap.LinkAddr
	Payload []byte
}

// RecvND is an IPv6 packet that holds a Neighbor Solicitation or Advertisement
// from the fabric, from its IPv6 header on. From is as in RecvARP; for a packet that
// came over a connection it is the link-layer address of the peer.
type RecvND struct {
	From    encap.LinkAddr
	Payload []byte
}

// AddrAdded says that an address is on the device, whoever put it there. Prefix
// keeps the host bits. Adding it again changes only the prefix length.
type AddrAdded struct{ Prefix netip.Prefix }

// Insist says that this host claims an own address by other means, such as VRRP. If the address is
// not verified, the Table takes it into use and announces it, although another host may have it. It
// does so at most once in ten seconds, in which further Insists repeat the announcement.
type Insist struct{ IP netip.Addr }

// AddrRemoved says that an address is no longer on the device.
type AddrRemoved struct{ IP netip.Addr }

// SetLinkAddr changes our own link-layer address (new UD QPN, GID or flags). If it differs, the
// Table does what Reannounce does.
type SetLinkAddr struct{ LinkAddr encap.LinkAddr }

// SetFlags changes only the flags of our link-layer address, from the next message on. Nothing
// is announced: peers hear of the new flags when they ask.
type SetFlags struct{ Flags encap.Flags }

// OtherIs answers AskOther. The answer holds for five seconds.
type OtherIs struct {
	IP     netip.Addr
	Answer rtnl.Answering
}

// SetRouter sets whether this host forwards IPv6, which is the R flag of advertisements. A change
// is announced (RFC 4861 section 7.2.6).
type SetRouter struct{ On bool }

// SetStaleTime changes Options.StaleTime, for entries that become stale from now on.
type SetStaleTime struct{ After time.Duration }

// SetPolicy changes Options.AcceptAlways and Options.MaxNeighbors. Entries above a lower bound are
// evicted, except those in use, in the order in which new entries would replace them.
type SetPolicy struct {
	AcceptAlways bool
	MaxNeighbors int
}

// Reannounce says that the underlay is back. The Table announces every verified address again, and
// begins detection of duplicates anew for all other own addresses.
type Reannounce struct{}

// Wake says that Deadline has passed. Spurious ones are harmless.
type Wake struct{}

func (ev Resolve) step(t *Table)      { t.resolve(plain(ev.IP), ev.Packet, ev.Source) }
func (ev Recall) step(t *Table)       { t.recall(ev) }
func (Flush) step(t *Table)           { t.forget(t.sorted()) }
func (ev RecvARP) step(t *Table)      { t.recvARP(ev.From, ev.Payload) }
func (ev RecvND) step(t *Table)       { t.recvND(ev.From, ev.Payload) }
func (ev AddrAdded) step(t *Table)    { t.addAddr(ev.Prefix) }
func (ev AddrRemoved) step(t *Table)  { t.removeAddr(plain(ev.IP)) }
func (ev Insist) step(t *Table)       { t.insist(t.own[plain(ev.IP)]) }
func (ev SetHints) step(t *Table)     { t.hints = ev.Hints }
func (ev SetFlags) step(t *Table)     { t.link.Flags = ev.Flags }
func (ev SetStaleTime) step(t *Table) { t.o.StaleTime = ev.After }
func (ev SetRouter) step(t *Table)    { t.setRouter(ev.On) }
func (ev OtherIs) step(t *Table)      { t.otherIs(ev) }
func (Reannounce) step(t *Table)      { t.reannounce() }
func (Wake) step(t *Table)            { t.wake() }

func (ev Used) step(t *Table) {
	if e := t.entries[plain(ev.IP)]; e != nil {
		t.use(e)
	}
}

func (ev ConfirmedLink) step(t *Table) {
	for _, e := range t.at(ev.LinkAddr) {
		t.confirmLink(e)
	}
}

func (ev DoubtedLink) step(t *Table) {
	for _, e := range t.at(ev.LinkAddr) {
		t.doubt(e)
	}
	t.releasedBy(ev.LinkAddr)
}

func (ev ForgetLink) step(t *Table) {
	t.forget(t.at(ev.LinkAddr))
	t.releasedBy(ev.LinkAddr)
}

func (ev SetLinkAddr) step(t *Table) {
	if ev.LinkAddr != t.link {
		t.link = ev.LinkAddr
		t.reannounce()
	}
}

func (ev SetPolicy) step(t *Table) {
	t.o.AcceptAlways, t.o.MaxNeighbors = ev.AcceptAlways, ev.MaxNeighbors
	t.shrink()
}
