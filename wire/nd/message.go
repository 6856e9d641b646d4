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

// findLink returns the first link-layer option of type typ in o.
func findLink(k Kind, o []byte, typ uint8) (a encap.LinkAddr, has bool, err error) {
	err = eachOption(k, o, func(opt []byte) error {
		if opt[0] != typ || has {
			return nil
		}
		has = true
		var err error
		a, err = readLink(k, opt)
		return err
	})
	return a, has && err == nil, err
}

// appendMessage appends an NS or NA: the packet up to its options, then one
// link-layer option if there is one.
func appendMessage(b []byte, k Kind, flags byte, src, dst, target netip.Addr, opt uint8,
	link *encap.LinkAddr) ([]byte, error) {
	for _, a := range []netip.Addr{src, dst, target} {
		if !a.Is6() || a.Is4In6() {
			return b, fmt.Errorf("%s: %v is no IPv6 address", k, a)
		}
	}
	if target.IsMulticast() {
		return b, fmt.Errorf("%s: target %s is a group", k, target)
	}
	n := fixedNS
	if link != nil {
		n += OptionLen
	}
	b = ip.AppendV6Header(b, src, dst, ip.ProtoICMPv6, HopLimit, n)
	start := len(b)
	b = append(b, byte(k), 0, 0, 0, flags, 0, 0, 0)
	t := target.As16()
	b = append(b, t[:]...)
	if link != nil {
		b = appendLink(b, opt, *link)
	}
	sum := ip.Checksum6(src, dst, ip.ProtoICMPv6, b[start:])
	binary.BigEndian.PutUint16(b[start+2:], sum)
	return b, nil
}

// AppendBinary appends the IPv6 packet of m to b.
func (m NS) AppendBinary(b []byte) ([]byte, error) {
	link := &m.Link
	if !m.HasLink {
		link = nil
	}
	if link != nil && m.IsDAD() {
		return b, fmt.Errorf("NS: the unspecified address has no link-layer address")
	}
	return appendMessage(b, NeighborSolicitation, 0, m.Src, m.Dst, m.Target, optSourceLink, link)
}

// UnmarshalBinary sets m from the IPv6 packet b. It makes the checks of RFC 4861
// section 7.1.1: hop limit, checksum, lengths, addresses, options.
func (m *NS) UnmarshalBinary(b []byte) error {
	p, body, k, err := open(b)
	if err != nil {
		return err
	}
	if k != NeighborSolicitation {
		return &wire.FieldError{What: "NS", Field: "type", Value: uint64(k)}
	}
	out := NS{Src: p.Src(), Dst: p.Dst(), Target: netip.AddrFrom16([16]byte(body[8:24]))}
	if err := checkTarget(k, out.Target); err != nil {
		return err
	}
	out.Link, out.HasLink, err = findLink(k, body[fixedNS:], optSourceLink)
	if err != nil {
		return err
	}
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
	link := &m.Link
	if !m.HasLink {
		link = nil
	}
	var flags byte
	if m.Router {
		flags |= flagRouter
	}
	if m.Solicited {
		flags |= flagSolicited
	}
	if m.Override {
		flags |= flagOverride
	}
	return appendMessage(b, NeighborAdvertisement, flags, m.Src, m.Dst, m.Target, optTargetLink, link)
}

// UnmarshalBinary sets m from the IPv6 packet b. It makes the checks of RFC 4861
// section 7.1.2.
func (m *NA) UnmarshalBinary(b []byte) error {
	p, body, k, err := open(b)
	if err != nil {
		return err
	}
	if k != NeighborAdvertisement {
		return &wire.FieldError{What: "NA", Field: "type", Value: uint64(k)}
	}
	out := NA{
		Src: p.Src(), Dst: p.Dst(), Target: netip.AddrFrom16([16]byte(body[8:24])),
		Router: body[4]&flagRouter != 0, Solicited: body[4]&flagSolicited != 0, Override: body[4]&flagOverride != 0,
	}
	if err := checkTarget(k, out.Target); err != nil {
		return err
	}
	if out.Dst.IsMulticast() && out.Solicited {
		return fmt.Errorf("NA: solicited, but sent to %s", out.Dst)
	}
	out.Link, out.HasLink, err = findLink(k, body[fixedNS:], optTargetLink)
	if err != nil {
		return err
	}
	*m = out
	return nil
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

func checkTarget(k Kind, a netip.Addr) error {
	if a.IsMulticast() || a.IsUnspecified() || a.Is4In6() {
		return fmt.Errorf("%s: target %s is no host's", k, a)
	}
	return nil
}
