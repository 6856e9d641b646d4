// Package nd reads and writes IPv6 neighbour discovery as IPoIB carries it: ICMPv6
// messages (RFC 4861) whose link-layer options are 24 octets long, with two zero
// octets in front of the 20-octet address (RFC 4391 section 9.3).
//
// Neighbor Solicitations and Advertisements are built and read whole. Router
// Solicitations, Advertisements and Redirects are the kernel's: here they only
// gain a link-layer option on their way out and lose it on their way in. SEND
// (RFC 3971) is not here, and the rewriting would break its signatures.
package nd

import (
	"net/netip"

	"ipoibcm/wire"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// OptionLen is the length of a link-layer option in octets.
const OptionLen = 24

// HopLimit is the hop limit of every neighbour discovery message. A message that
// arrives with another one has crossed a router and is not believed.
const HopLimit = 255

// A Kind is the ICMPv6 type of a neighbour discovery message.
type Kind uint8

// The five messages of RFC 4861, and None for any other packet.
const (
	None                  Kind = 0
	RouterSolicitation    Kind = 133
	RouterAdvertisement   Kind = 134
	NeighborSolicitation  Kind = 135
	NeighborAdvertisement Kind = 136
	Redirect              Kind = 137
)

var kindNames = wire.Names[Kind]{
	None: "none", RouterSolicitation: "RS", RouterAdvertisement: "RA", NeighborSolicitation: "NS",
	NeighborAdvertisement: "NA", Redirect: "Redirect",
}

// String prints RS, RA, NS, NA or Redirect.
func (k Kind) String() string { return kindNames.Of(k, "Kind(%d)") }

// KindOf returns which neighbour discovery message the IPv6 packet pkt looks like. It finds the
// ICMPv6 type and checks nothing else. A message may follow the extension headers that
// [ip.ICMPv6Offset] skips. A message in a fragment does not count: the kernel gets it and ignores
// it (RFC 6980 section 5; suppress_frag_ndisc).
func KindOf(pkt []byte) Kind {
	k, _ := find(pkt)
	return k
}

// find returns the kind of the message in pkt and where it starts.
func find(pkt []byte) (Kind, int) {
	off := ip.ICMPv6Offset(pkt)
	if off < 0 {
		return None, 0
	}
	if k := Kind(pkt[off]); k >= RouterSolicitation && k <= Redirect {
		return k, off
	}
	return None, 0
}

// An NS is a Neighbor Solicitation with its IPv6 header.
type NS struct {
	Src, Dst netip.Addr
	Target   netip.Addr
	Link     encap.LinkAddr // source link-layer option
	HasLink  bool           // never with an unspecified Src
}

// NewNS asks the solicited-node group of target for its link-layer address.
func NewNS(src, target netip.Addr, link encap.LinkAddr) NS {
	return NS{Src: src, Dst: ip.SolicitedNode(target), Target: target, Link: link, HasLink: true}
}

// NewProbe asks target itself whether it is still reachable at the address we
// hold for it (unicast, RFC 4861 section 7.3.3).
func NewProbe(src, target netip.Addr, link encap.LinkAddr) NS {
	return NS{Src: src, Dst: target, Target: target, Link: link, HasLink: true}
}

// NewDAD asks whether anybody uses target (RFC 4862 section 5.4.2).
func NewDAD(target netip.Addr) NS {
	return NS{Src: netip.IPv6Unspecified(), Dst: ip.SolicitedNode(target), Target: target}
}

// IsDAD reports whether m is a duplicate address probe.
func (m NS) IsDAD() bool { return m.Src.IsUnspecified() }

// Answer returns the advertisement that answers m: to its source, or to all
// nodes if m is a duplicate address probe. own is the link-layer address of
// m.Target's owner.
func (m NS) Answer(own encap.LinkAddr, router bool) NA {
	na := NA{Src: m.Target, Dst: m.Src, Target: m.Target, Router: router, Solicited: true, Override: true,
		Link: own, HasLink: true}
	if m.IsDAD() {
		na.Dst, na.Solicited = ip.AllNodes, false
	}
	return na
}

// An NA is a Neighbor Advertisement with its IPv6 header.
type NA struct {
	Src, Dst                    netip.Addr
	Target                      netip.Addr
	Router, Solicited, Override bool
	Link                        encap.LinkAddr // target link-layer option
	HasLink                     bool
}

// NewAnnouncement tells all nodes that a is at link (RFC 4861 section 7.2.6).
func NewAnnouncement(a netip.Addr, link encap.LinkAddr, router bool) NA {
	return NA{Src: a, Dst: ip.AllNodes, Target: a, Router: router, Override: true, Link: link, HasLink: true}
}
