package nd

import (
	"encoding/binary"
	"net/netip"

	"ipoibcm/wire"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// AddLink appends to b the RS, RA or Redirect of pkt with a link-layer option that
// holds link: a source option in an RS or RA, a target option in a Redirect. It
// replaces the link-layer options of pkt. An RS from the unspecified address gets
// none (RFC 4861 section 4.1). Payload length and checksum are corrected. b and pkt
// must not overlap.
func AddLink(b, pkt []byte, link encap.LinkAddr) ([]byte, error) {
	out, _, _, err := rewrite(b, pkt, &link)
	return out, err
}

// StripLink appends to b the RS, RA or Redirect of pkt without link-layer
// options, because the kernel behind a TUN discards an RA with such an option of 24
// octets. It returns the address in the source option of an RS or RA, or in the
// target option of a Redirect. has is false if there is no such option, or if nobody
// can be reached at the address. Payload length and checksum are corrected. b and
// pkt must not overlap.
func StripLink(b, pkt []byte) (out []byte, link encap.LinkAddr, has bool, err error) {
	return rewrite(b, pkt, nil)
}

// RedirectTarget returns the target of the Redirect in pkt. The caller of [AddLink] passes the
// link-layer address of that target.
func RedirectTarget(pkt []byte) (netip.Addr, bool) {
	k, off := find(pkt)
	if k != Redirect || len(pkt) < off+fixedRedirect {
		return netip.Addr{}, false
	}
	return netip.AddrFrom16([16]byte(pkt[off+8 : off+24])), true
}

// rewrite copies the message of pkt without link-layer options, and with one
// for add if that is not nil.
func rewrite(b, pkt []byte, add *encap.LinkAddr) (out []byte, link encap.LinkAddr, has bool, err error) {
	p, m, k, err := open(pkt)
	if err != nil {
		return b, link, false, err
	}
	var typ uint8
	switch k {
	case RouterSolicitation, RouterAdvertisement:
		typ = optSourceLink
	case Redirect:
		typ = optTargetLink
	default: // NS and NA never pass between TUN and fabric
		return b, link, false, &wire.FieldError{What: "ND message to rewrite", Field: "type", Value: uint64(k)}
	}
	start, fixed := len(b), fixedLen(k)
	head := len(p) - len(m) // octets of the IPv6 header and extension headers
	out = append(b, p[:head+fixed]...)
	err = eachOption(k, m[fixed:], func(opt []byte) error {
		if opt[0] != optSourceLink && opt[0] != optTargetLink {
			out = append(out, opt...)
			return nil
		}
		if opt[0] == typ && !has {
			if a, err := readLink(k, opt); err == nil {
				link, has = a, true
			}
		}
		return nil
	})
	if err != nil {
		return b, encap.LinkAddr{}, false, err
	}
	if add != nil && !(k == RouterSolicitation && p.Src().IsUnspecified()) {
		out = appendLink(out, typ, *add)
	}
	n := len(out) - start - ip.V6HeaderLen
	if n > 0xffff {
		return b, encap.LinkAddr{}, false, &wire.FieldError{What: k.String(), Field: "length", Value: uint64(n)}
	}
	q := out[start:]
	binary.BigEndian.PutUint16(q[4:], uint16(n))
	body := q[head:]
	body[2], body[3] = 0, 0
	binary.BigEndian.PutUint16(body[2:], ip.Checksum6(p.Src(), p.Dst(), ip.ProtoICMPv6, body))
	return out, link, has, nil
}
