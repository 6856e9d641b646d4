package nd

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/wire"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

// Sizes in octets, and bounds.
const (
	fixedRS       = 8 // ICMPv6 header included, options not
	fixedRA       = 16
	fixedNS       = 24 // NA too
	fixedRedirect = 40

	maxOptions = 64 // options of one message that are looked at; more is an error

	optSourceLink = 1
	optTargetLink = 2
)

// Flags of a Neighbor Advertisement.
const (
	flagRouter    = 0x80
	flagSolicited = 0x40
	flagOverride  = 0x20
)

// fixedLen returns the octets of a message of kind k before its options.
func fixedLen(k Kind) int {
	switch k {
	case RouterSolicitation:
		return fixedRS
	case RouterAdvertisement:
		return fixedRA
	case Redirect:
		return fixedRedirect
	}
	return fixedNS
}

// open makes the checks that all five messages share (RFC 4861 sections 6.1, 7.1,
// 8.1) and returns the packet and its ICMPv6 part, with which the packet ends.
func open(b []byte) (p ip.V6, m []byte, k Kind, err error) {
	p, err = ip.AsV6(b)
	if err != nil {
		return nil, nil, None, err
	}
	k, off := find(p)
	if k == None {
		return nil, nil, None, &wire.FieldError{What: "ND message", Field: "next header", Value: uint64(p.NextHeader())}
	}
	m = p[off:]
	if len(m) < fixedLen(k) {
		return nil, nil, k, &wire.ShortError{What: k.String(), Need: fixedLen(k), Have: len(m)}
	}
	switch {
	case p.HopLimit() != HopLimit:
		return nil, nil, k, &wire.FieldError{What: k.String(), Field: "hop limit", Value: uint64(p.HopLimit())}
	case m[1] != 0:
		return nil, nil, k, &wire.FieldError{What: k.String(), Field: "code", Value: uint64(m[1])}
	case ip.Checksum6(p.Src(), p.Dst(), ip.ProtoICMPv6, m) != 0:
		return nil, nil, k, &wire.FieldError{What: k.String(), Field: "checksum",
			Value: uint64(binary.BigEndian.Uint16(m[2:]))}
	case p.Src().IsMulticast():
		return nil, nil, k, fmt.Errorf("%s: source %s is a group", k, p.Src())
	case p.Src().Is4In6(), p.Dst().Is4In6(): // never on a wire; it would be taken for an IPv4 neighbour
		return nil, nil, k, fmt.Errorf("%s: %s to %s are no IPv6 addresses", k, p.Src(), p.Dst())
	}
	return p, m, k, nil
}

// eachOption calls f with each option of o, header included.
func eachOption(k Kind, o []byte, f func(opt []byte) error) error {
	for range maxOptions {
		if len(o) == 0 {
			return nil
		}
		if len(o) < 8 {
			return &wire.ShortError{What: k.String() + " option", Need: 8, Have: len(o)}
		}
		n := int(o[1]) * 8
		if n == 0 {
			return &wire.FieldError{What: k.String() + " option", Field: "length", Value: 0}
		}
		if n > len(o) {
			return &wire.ShortError{What: k.String() + " option", Need: n, Have: len(o)}
		}
		if err := f(o[:n]); err != nil {
			return err
		}
		o = o[n:]
	}
	if len(o) > 0 {
		return fmt.Errorf("%s: more than %d options", k, maxOptions)
	}
	return nil
}

// appendLink appends a link-layer option.
func appendLink(b []byte, typ uint8, a encap.LinkAddr) []byte {
	b = append(b, typ, OptionLen/8, 0, 0)
	b, _ = a.AppendBinary(b)
	return b
}

// readLink returns the address of a link-layer option. The two octets of padding
// are not looked at. An address at which nobody can be reached is an error.
func readLink(k Kind, opt []byte) (a encap.LinkAddr, err error) {
	if len(opt) != OptionLen {
		return a, &wire.FieldError{What: k.String() + " link-layer option", Field: "length", Value: uint64(opt[1])}
	}
	_ = a.UnmarshalBinary(opt[4:]) // the length fits
	if a.GID.IsZero() || a.GID.IsMulticast() {
		return encap.LinkAddr{}, fmt.Errorf("%s: GID %s is no port's", k, a.GID)
	}
	if a.QPN <= ib.QPNGSI || a.QPN == ib.QPNMulticast {
		return encap.LinkAddr{}, &wire.FieldError{What: k.String() + " link-layer option", Field: "QPN", Value: uint64(a.QPN)}
	}
	return a, nil
}

// readMessage reads an NS or NA, whichever k says: the fields that both have, and the first
// link-layer option of type typ.
func readMessage(b []byte, k Kind, typ uint8) (m NA, err error) {
	p, body, kind, err := open(b)
	if err != nil {
		return m, err
	}
	if kind != k {
		return m, &wire.FieldError{What: k.String(), Field: "type", Value: uint64(kind)}
	}
	m = NA{Src: p.Src(), Dst: p.Dst(), Target: netip.AddrFrom16([16]byte(body[8:24]))}
	if m.Target.IsMulticast() || m.Target.IsUnspecified() || m.Target.Is4In6() {
		return m, fmt.Errorf("%s: target %s is no host's", k, m.Target)
	}
	if k == NeighborAdvertisement {
		m.Router, m.Solicited, m.Override = body[4]&flagRouter != 0, body[4]&flagSolicited != 0, body[4]&flagOverride != 0
	}
	if m.Dst.IsMulticast() && m.Solicited {
		return m, fmt.Errorf("%s: solicited, but sent to %s", k, m.Dst)
	}
	err = eachOption(k, body[fixedNS:], func(opt []byte) (err error) {
		if opt[0] == typ && !m.HasLink {
			m.HasLink = true
			m.Link, err = readLink(k, opt)
		}
		return err
	})
	return m, err
}

// appendMessage appends m, which is an NA, or an NS with no flags: the packet up to its
// options, then one link-layer option of type opt if there is one.
func appendMessage(b []byte, k Kind, opt uint8, m NA) ([]byte, error) {
	for _, a := range []netip.Addr{m.Src, m.Dst, m.Target} {
		if !a.Is6() || a.Is4In6() {
			return b, fmt.Errorf("%s: %v is no IPv6 address", k, a)
		}
	}
	if m.Target.IsMulticast() {
		return b, fmt.Errorf("%s: target %s is a group", k, m.Target)
	}
	n := fixedNS
	if m.HasLink {
		n += OptionLen
	}
	b = ip.AppendV6Header(b, m.Src, m.Dst, ip.ProtoICMPv6, HopLimit, n)
	start := len(b)
	flags := wire.Bit(m.Router, flagRouter) | wire.Bit(m.Solicited, flagSolicited) | wire.Bit(m.Override, flagOverride)
	b = append(b, byte(k), 0, 0, 0, flags, 0, 0, 0)
	t := m.Target.As16()
	b = append(b, t[:]...)
	if m.HasLink {
		b = appendLink(b, opt, m.Link)
	}
	sum := ip.Checksum6(m.Src, m.Dst, ip.ProtoICMPv6, b[start:])
	binary.BigEndian.PutUint16(b[start+2:], sum)
	return b, nil
}

// AppendBinary appends the IPv6 packet of m to b.
func (m NS) AppendBinary(b []byte) ([]byte, error) {
	if m.HasLink && m.IsDAD() {
		return b, fmt.Errorf("NS: the unspecified address has no link-layer address")
	}
	return appendMessage(b, NeighborSolicitation, optSourceLink,
		NA{Src: m.Src, Dst: m.Dst, Target: m.Target, Link: m.Link, HasLink: m.HasLink})
}

// UnmarshalBinary sets m from the IPv6 packet b. It makes the checks of RFC 4861
// section 7.1.1: hop limit, checksum, lengths, addresses, options.
func (m *NS) UnmarshalBinary(b []byte) error {
	r, err := readMessage(b, NeighborSolicitation, optSourceLink)
	if err != nil {
		return err
	}
	out := NS{Src: r.Src, Dst: r.Dst, Target: r.Target, Link: r.Link, HasLink: r.HasLink}
	if out.IsDAD() && (out.HasLink || out.Dst != ip.SolicitedNode(out.Target)) {
		return fmt.Errorf("NS: unspecified source with a link-layer option or to %s", out.Dst)
	}
	*m = out
	return nil
}

// String prints m as tcpdump would.
func (m NS) String() string {
	s := fmt.Sprintf("NS %s > %s who-has %s", m.Src, m.Dst, m.Target)
	if m.HasLink {
		s += fmt.Sprintf(" (%s)", m.Link)
	}
	return s
}

// AppendBinary appends the IPv6 packet of m to b.
func (m NA) AppendBinary(b []byte) ([]byte, error) {
	return appendMessage(b, NeighborAdvertisement, optTargetLink, m)
}

// UnmarshalBinary sets m from the IPv6 packet b. It makes the checks of RFC 4861
// section 7.1.2.
func (m *NA) UnmarshalBinary(b []byte) error {
	out, err := readMessage(b, NeighborAdvertisement, optTargetLink)
	if err == nil {
		*m = out
	}
	return err
}

// String prints m as tcpdump would.
func (m NA) String() string {
	s := fmt.Sprintf("NA %s > %s %s", m.Src, m.Dst, m.Target)
	if m.HasLink {
		s += fmt.Sprintf(" is-at %s", m.Link)
	}
	for _, f := range []struct {
		on   bool
		name string
	}{{m.Router, "router"}, {m.Solicited, "solicited"}, {m.Override, "override"}} {
		if f.on {
			s += " " + f.name
		}
	}
	return s
}
