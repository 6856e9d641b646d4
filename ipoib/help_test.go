package ipoib

import (
	"encoding/binary"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/ip/iptest"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

func ip4(s string) netip.Addr { return netip.MustParseAddr(s) }

func mustEcho(src, dst string, size int) []byte {
	b, err := iptest.Echo{Src: ip4(src), Dst: ip4(dst), Data: make([]byte, size)}.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	return b
}

// addr returns n's own address of the family of dst.
func (n *node) addr(dst string) string { return n.source(ip4(dst)).String() }

func (n *node) peerAddr(m *node) string { return m.addrs[0].Addr().String() }

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

// up lists n's established connections.
func (n *node) up() (cs []ConnInfo) {
	for _, c := range n.f.Conns() {
		if c.State == "ESTABLISHED" {
			cs = append(cs, c)
		}
	}
	return cs
}

// wantConnection has a send b, which has address dst, a packet that only a connection carries.
func (w *world) wantConnection(a, b *node, dst, what string, args ...any) {
	w.t.Helper()
	p := a.ping(dst, 9000, true)
	w.settle()
	w.agree(a, b)
	expect.MustEqual(w, b.got(p), 1, what+": b's copies of the packet", args...)
}

// agree fails unless a and b share exactly one connection.
func (w *world) agree(a, b *node) (ConnInfo, ConnInfo) {
	w.t.Helper()
	ca, cb := a.up(), b.up()
	// 4755-2.3-4: one QP at each end, nothing left over
	expect.MustEqual(w, len(ca), 1, "length of ca")
	expect.MustEqual(w, len(cb), 1, "length of cb")
	expect.MustEqual(w, len(a.qps), 1, "length of a's qps")
	expect.MustEqual(w, len(b.qps), 1, "length of b's qps")
	x, y := ca[0], cb[0]
	expect.MustEqual(w, x.LocalQPN, y.RemoteQPN, "x's LocalQPN")
	expect.MustEqual(w, x.RemoteQPN, y.LocalQPN, "x's RemoteQPN")
	expect.MustEqual(w, x.MTU, y.MTU, "x's MTU")
	expect.MustEqual(w, x.Active, !y.Active, "x's Active")
	expect.MustEqual(w, x.Transport, y.Transport, "x's Transport")
	return x, y
}
