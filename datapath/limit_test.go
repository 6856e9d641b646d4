package datapath

import (
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

// A flood of one kind of request keeps out neither other kinds nor answers.
func TestGates(t *testing.T) {
	arpRequest, arpReply := []byte{0, 32, 8, 0, 20, 4, 0, 1}, []byte{0, 32, 8, 0, 20, 4, 0, 2}
	icmp := func(typ byte) []byte {
		b := make([]byte, minIP6+8)
		b[0], b[6], b[minIP6] = 0x60, ip.ProtoICMPv6, typ
		return b
	}
	message := func(m mad.Message) []byte {
		b, _ := m.AppendBinary(nil)
		return b
	}
	probe := func(answer bool) []byte {
		b, _ := encap.Probe{Octets: encap.ProbeLen, Answer: answer}.AppendBinary(nil)
		return b
	}
	unknown := func(i int) ib.GID { return ib.GID{0xfe, 0x80, 14: byte(i >> 8), 15: byte(i)} }
	for _, tt := range []struct {
		name         string
		kind         FrameKind
		flood        []byte
		others       FrameKind
		shut, passes []byte // of kind others
	}{
		{"ARP requests", RXARP, arpRequest, RXND, icmp(byte(nd.NeighborSolicitation)), icmp(136)},
		{"NS", RXND, icmp(byte(nd.NeighborSolicitation)), RXARP, arpRequest, arpReply},
		{"REQs", RXCM, message(mad.REQ{}), RXCM, message(mad.DREQ{}), message(mad.REP{})},
		{"REPs", RXCM, message(mad.REP{}), RXCM, message(mad.RTU{}), message(mad.REQ{})},
		{"probes of the path's MTU", RXProbe, probe(false), RXProbe, []byte{1}, probe(true)},
		{"too short for a MAD", RXCM, []byte{1}, RXCM, message(mad.REQ{}), message(mad.REJ{})},
	} {
		g := newLimiters()
		passed := 0
		for i := range 10_000 {
			if g.allow(1, tt.kind, tt.flood, unknown(i), 7) {
				passed++
			}
		}
		if passed == 0 || passed > 2*answerRate.Unknown {
			t.Errorf("%s: %d of a flood passed", tt.name, passed)
		}
		if g.allow(1, tt.others, tt.shut, unknown(60_000), 7) {
			t.Errorf("%s: an unknown source passed by the same limiter in the middle of the flood", tt.name)
		}
		if !g.allow(1, tt.kind, tt.flood, unknown(9_999), 7) {
			t.Errorf("%s: one who came twice was turned away", tt.name)
		}
		if !g.allow(1, tt.others, tt.passes, unknown(60_001), 7) {
			t.Errorf("%s: it kept out what goes by another limiter", tt.name)
		}
		if tt.kind != RXCM && !g.allow(1, RXCM, message(mad.REQ{}), unknown(60_002), 7) {
			t.Errorf("%s: it kept out CM messages", tt.name)
		}
	}
	// Without a GRH senders are told apart by QPN.
	g := newLimiters()
	for range 1000 {
		g.allow(1, RXARP, arpRequest, ib.GID{}, 7)
	}
	if g.allow(1, RXARP, arpRequest, ib.GID{}, 7) || !g.allow(1, RXARP, arpRequest, ib.GID{}, 8) {
		t.Error("QPNs 7 and 8 without a GRH are the same source, or 7 has no bound")
	}
}

// anyFrame is an IPv4 packet in a frame.
var anyFrame = append([]byte{8, 0, 0, 0, 0x45}, make([]byte, 19)...)

// UD data: of a flood from forged sources few packets pass, of one from a single source
// its share. Beside it all pass of those that we send to, and of a host whose multicast
// comes in a steady stream.
func TestDataLimits(t *testing.T) {
	long.OneGoroutine(t)
	l := &Loop{data: newDataLimits()}
	peer, stream, one := ib.GID{0xfe, 0x80, 15: 1}, ib.GID{0xfe, 0x80, 15: 2}, ib.GID{0xfe, 0x80, 15: 3}
	l.KnowUD(peer, 7, 1)
	l.KnowUD(peer, 7, 1)
	l.KnowUD(peer, 7, -1)
	const seconds = 4
	counts := map[string]int{}
	for i := range seconds * 100_000 {
		now := int64(i) * 10_000
		random := ib.GID{0xfe, 0x80, 12: byte(i >> 24), 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}
		random[8] = 1
		for name, src := range map[string]ib.GID{"forged": random, "peer": peer, "one": one} {
			if l.allowData(now, src, 7, anyFrame) {
				counts[name]++
			}
		}
		if i%20 == 0 && l.allowData(now, stream, 9, anyFrame) {
			counts["stream"]++
		}
	}
	for _, tt := range []struct {
		name        string
		least, most int
	}{
		{"forged", 1, 3 * seconds * dataRate.Unknown},
		{"peer", seconds * 100_000, seconds * 100_000},
		{"one", seconds * dataShare / 2, seconds * dataShare},
		{"stream", seconds*5_000 - 100, seconds * 5_000},
	} {
		if n := counts[tt.name]; n < tt.least || n > tt.most {
			t.Errorf("%s: %d packets passed, want %d to %d", tt.name, n, tt.least, tt.most)
		}
	}
	// The two that send many are handed up twice a second, and of the others the few that are counted together
	// with both: the hash of some 400,000 is drawn, and four in a million do that.
	if n := l.c.RxSenders.Load(); n < 4*seconds-1 || n > 4*seconds+16 {
		t.Errorf("sources were handed up %d times, want %d and a few more", n, 4*seconds)
	}
	l.KnowUD(peer, 7, -1)
	if n := len(l.udPeers.n); n != 0 {
		t.Errorf("%d peers are known after the last path to one has gone", n)
	}
	passed := 0
	for range 100_000 {
		if l.allowData(int64(seconds)*1e9, peer, 7, anyFrame) || l.allowData(int64(seconds)*1e9, peer, 8, anyFrame) {
			passed++
		}
	}
	if passed > dataShare {
		t.Errorf("%d packets of a former peer passed at once, want %d at most", passed, dataShare)
	}
	if n := testing.AllocsPerRun(1000, func() { l.allowData(1, stream, 9, anyFrame); l.allowData(1, peer, 7, anyFrame) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

// Of the UD QP's datagrams, IP and control, those of sources in the list pass, ahead of the
// provider's receive and behind it.
func TestAllowedSources(t *testing.T) { inBubble(t, testAllowedSources) }

func testAllowedSources(t *testing.T) {
	w := newWorld()
	a, b, c := start(t, w, 1, nil), start(t, w, 2, nil), start(t, w, 3, nil)
	a.SetAllow(ib.NewGIDSet([]netip.Prefix{netip.PrefixFrom(b.fab.gid.Addr(), 128)}))
	arp := make([]byte, 28)
	for _, from := range []*host{b, c} {
		for _, frame := range []struct {
			t   encap.EtherType
			pkt []byte
		}{{encap.ARP, arp}, {encap.IPv4, ip4("10.0.0.1", 40, 17)}} {
			if err := from.SendUD(from.udTo(a), frame.t, frame.pkt); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "four datagrams", func() bool {
		n := a.Counters()
		return n.RxNotAllowed == 2 && n.RxUD == 1 && n.Up == 1
	})
	frame := append([]byte{8, 0, 0, 0}, ip4("10.0.0.1", 40, 17)...)
	if !a.passDatagram(b.fab.gid, 7, frame) {
		t.Error("a datagram of a source in the list is refused")
	}
	if a.passDatagram(c.fab.gid, 7, frame) {
		t.Error("a datagram of another source passes")
	}
	a.SetAllow(ib.GIDSet{})
	if !a.passDatagram(c.fab.gid, 7, frame) {
		t.Error("an empty list refuses a datagram")
	}
}
