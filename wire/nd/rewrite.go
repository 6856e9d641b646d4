package nd

import (
	"net/netip"

	"ipoibcm/wire/encap"
)

// AddLink appends to b the RS, RA or Redirect of pkt with a link-layer option
// for link: the source's in RS and RA, the target's in a Redirect. Link-layer
// options that were there are replaced. An RS from the unspecified address gets
// none (RFC 4861 section 4.1). Payload length and checksum are made right.
func AddLink(b, pkt []byte, link encap.LinkAddr) ([]byte, error) { panic("todo") }

// StripLink appends to b the RS, RA or Redirect of pkt without link-layer
// options, because a TUN kernel discards an RA that has one of 24 octets. It
// returns the address that the option gave: the source's of RS and RA, the
// target's of a Redirect. Payload length and checksum are made right.
func StripLink(b, pkt []byte) (out []byte, link encap.LinkAddr, has bool, err error) { panic("todo") }

// RedirectTarget returns the target of the Redirect in pkt, whose link-layer
// address [AddLink] wants.
func RedirectTarget(pkt []byte) (netip.Addr, bool) { panic("todo") }
