package ipoib

import (
	"encoding/binary"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

func ip4(s string) netip.Addr { return netip.MustParseAddr(s) }

func ipPrefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func mustEcho(src, dst string, size int) []byte {
	b, err := ip.Echo{Src: ip4(src), Dst: ip4(dst), Data: make([]byte, size)}.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	return b
}

// addr returns n's own address of the family of dst.
func (n *node) addr(dst string) string { return n.source(ip4(dst)).String() }

// lastREJ returns the last REJ that n sent.
func lastREJ(n *node) (rej mad.REJ, ok bool) { return last[mad.REJ](n) }

// last returns the last message of type M that n sent.
func last[M mad.Message](n *node) (msg M, ok bool) {
	for _, m := range n.sent {
		if x, is := m.(M); is {
			msg, ok = x, true
		}
	}
	return msg, ok
}

// inject sends a MAD to `to` as if `from` had.
func (w *world) inject(from, to *node, m mad.Message) {
	b, _ := m.AppendBinary(nil)
	in := mad256(from.opt.Link.GID, to.opt.Link.GID, b)
	w.send(func() { to.step(RecvMAD{in}) }, to, false)
}

// icmp6 puts an IPv6 header before an ICMPv6 message and its checksum into it.
func icmp6(src, dst string, msg []byte) []byte {
	b := make([]byte, 40, 40+len(msg))
	b[0], b[6], b[7] = 0x60, ip.ProtoICMPv6, nd.HopLimit
	binary.BigEndian.PutUint16(b[4:], uint16(len(msg)))
	s, d := ip4(src).As16(), ip4(dst).As16()
	copy(b[8:], s[:])
	copy(b[24:], d[:])
	return fix6(append(b, msg...))
}

// fix6 makes the ICMPv6 checksum of pkt right.
func fix6(pkt []byte) []byte {
	pkt[42], pkt[43] = 0, 0
	v := ip.V6(pkt)
	binary.BigEndian.PutUint16(pkt[42:], ip.Checksum6(v.Src(), v.Dst(), ip.ProtoICMPv6, pkt[40:]))
	return pkt
}

func neighborSolicitation(src, target string, link encap.LinkAddr) []byte {
	b, err := nd.NewProbe(ip4(src), ip4(target), link).AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	return b
}

// mad256 is a MAD on its way.
func mad256(from, to ib.GID, b []byte) *verbs.MAD {
	return &verbs.MAD{Remote: from, Local: to, QPN: ib.QPNGSI, Data: [256]byte(b)}
}
