package ipoib

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// The tests of this file look at octets, at places counted by hand in RFC 4755 and
// in IBA volume 1, section 12.6. Nothing of ours reads or compares for them.

// Where a CM message has its private data, by attribute ID. A MAD has 256 octets.
var privateDataAt = map[uint16]int{
	0x0010: 164, // REQ: 24 of header, 140 of fields
	0x0011: 34,  // MRA: 10
	0x0012: 108, // REJ: 84
	0x0013: 60,  // REP: 36
	0x0014: 32,  // RTU: 8
}

func attribute(m []byte) uint16 { return binary.BigEndian.Uint16(m[16:]) }

// Private data of every message for connection establishment, from both sides: UD
// QPN and Receive MTU of its sender, zero in Reserved and behind.
// 4755-3.2-11, 4755-3.2-12, 4755-5.1-1, 4755-6-1, 4755-6-2, 4755-6-3, 4755-6-5
func TestPrivateDataOctets(t *testing.T) {
	w := newWorld(t, 41)
	a := w.nodeAt(1, encap.LinkAddr{QPN: 0x81f203, GID: gid(1)}, Options{})
	b := w.nodeAt(2, encap.LinkAddr{QPN: 0x000048, GID: gid(2)}, Options{ReceiveMTU: 9000})
	c := w.nodeAt(3, encap.LinkAddr{QPN: 0xfffffe, GID: gid(3)}, Options{ReceiveMTU: 0x8001})
	want := map[*node]string{a: "0081f2030000fff4", b: "0000004800002328", c: "00fffffe00008001"}
	seen := map[string]bool{}
	w.onOctets = func(from *node, m []byte) {
		at, ok := privateDataAt[attribute(m)]
		if !ok {
			return
		}
		seen[fmt.Sprintf("%s %#04x", from.name, attribute(m))] = true
		if got := hex.EncodeToString(m[at : at+8]); got != want[from] {
			w.Fatalf("%s, attribute %#04x: private data %s, want %s", from.name, attribute(m), got, want[from])
		}
		if rest := m[at+8:]; !bytes.Equal(rest, make([]byte, len(rest))) {
			w.Fatalf("%s, attribute %#04x: behind the private data %x, want zeros", from.name, attribute(m), rest)
		}
	}
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true) // REQ and RTU of a, REP of b
	b.ping("10.0.0.3", 100, true) // of b, and of c
	w.settle()
	wrong := honest(a, b)
	wrong.ServiceID++
	w.inject(b, a, wrong) // a REJ of the CM
	c.kernel(c.k.Up(false))
	w.inject(b, c, honest(c, b)) // a REJ of the interface
	a.slow = true
	again := honest(a, c)
	w.inject(c, a, again)
	w.run(10 * time.Millisecond)
	w.inject(c, a, again) // a repeat: MRA
	w.run(10 * time.Millisecond)
	for _, what := range []string{"a 0x0010", "b 0x0013", "a 0x0014", "b 0x0010", "c 0x0013", "b 0x0014",
		"a 0x0012", "c 0x0012", "a 0x0011"} {
		if !seen[what] {
			w.Fatalf("node and attribute %s were not seen", what)
		}
	}
}

// number is a link-layer address as RFC 4755 section 3.3 compares it: 20 octets
// (section 3.1: flags, QPN, GID), the flags zeroed, the first octet the most
// significant.
func number(l encap.LinkAddr) *big.Int {
	octets := append([]byte{0, byte(l.QPN >> 16), byte(l.QPN >> 8), byte(l.QPN)}, l.GID[:]...)
	return new(big.Int).SetBytes(octets)
}

// pairs returns link-layer addresses that differ in one place, for every place, and
// some that differ everywhere.
func pairs(r *rand.Rand) (out [][2]encap.LinkAddr) {
	draw := func() (l encap.LinkAddr) {
		l.QPN = ib.QPN(r.Uint32N(1<<24-16)) + 8
		for i := range l.GID {
			l.GID[i] = byte(r.Uint32())
		}
		l.GID[0] = 0xfe
		return l
	}
	for bit := range 24 { // of the QPN
		x, y := draw(), draw()
		x.QPN = x.QPN&^(1<<bit) | 0x10
		if y.QPN = x.QPN | 1<<bit; y.QPN != x.QPN {
			out = append(out, [2]encap.LinkAddr{x, y})
		}
	}
	for i := 1; i < 16; i++ { // of the GID: one octet decides, what follows it says the contrary
		x := draw()
		y := x
		x.GID[i], y.GID[i] = 0x7f, 0x80
		for j := i + 1; j < 16; j++ {
			x.GID[j], y.GID[j] = 0xff, 0
		}
		out = append(out, [2]encap.LinkAddr{x, y})
	}
	for range 20 {
		out = append(out, [2]encap.LinkAddr{draw(), draw()})
	}
	return out
}

// REQs of two interfaces cross: that of the numerically larger link-layer address
// stands, and the other is rejected with 28. The expected winner comes from the 20
// octets as one number; flags differ, and do not matter.
// 4755-3.3-5, 4755-3.3-6, 4755-3.3-7, 4755-3.3-8
func TestCrossingByNumber(t *testing.T) {
	r := rand.New(rand.NewPCG(42, 1))
	for i, pair := range pairs(r) {
		if i%2 == 1 {
			pair[0], pair[1] = pair[1], pair[0]
		}
		w := newWorld(t, uint64(i))
		a := w.nodeAt(1, pair[0], Options{Mode: ModeAuto, UDMTU: ipv4Only})
		b := w.nodeAt(2, pair[1], Options{Mode: ModeRC, UDMTU: ipv4Only})
		w.run(2 * time.Second)
		a.look(b)
		b.look(a)
		w.run(time.Second)
		w.delay = 1
		p, q := a.ping("10.0.0.2", 9000, true), b.ping("10.0.0.1", 9000, true)
		w.settle()
		x, _ := w.agree(a, b)
		aWins := number(pair[0]).Cmp(number(pair[1])) > 0
		if x.Active != aWins {
			w.Fatalf("%x against %x: the REQ of the first stands = %v, want %v", number(pair[0]), number(pair[1]),
				x.Active, aWins)
		}
		winner := b
		if aWins {
			winner = a
		}
		rej, ok := lastREJ(winner)
		if !ok {
			w.Fatalf("%x against %x: the larger address sent no REJ", number(pair[0]), number(pair[1]))
		}
		if rej.Reason != 28 {
			w.Fatalf("REJ %d, want 28, Consumer Reject", rej.Reason)
		}
		if got := b.got(p) + a.got(q); got != 2 {
			w.Fatalf("%d packets arrived, want 2", got)
		}
	}
}

// A port may have two interfaces: one GID, two UD QPNs. A REQ of ours to the one is
// not outstanding to the other, whose REQ is none that crosses. 4755-3.3-2, 4755-3.3-3
func TestOutstandingToWholeAddress(t *testing.T) {
	w := newWorld(t, 43)
	a, b := w.node(5, Options{}), w.node(2, Options{})
	w.run(2 * time.Second)
	b.silent = true
	a.ping("10.0.0.2", 100, true)
	w.run(10 * time.Millisecond)
	if got := len(a.reqs); got != 1 {
		w.Fatalf("%d REQs, want 1", got)
	}
	// The address of a is larger than both: a REQ that crossed would be rejected.
	other := honest(a, b)
	says(&other, 0x101, 65524)
	w.inject(b, a, other)
	w.run(10 * time.Millisecond)
	if rej, ok := lastREJ(a); ok {
		w.Fatalf("the REQ of the other interface got REJ %d", rej.Reason)
	}
	if _, ok := last[mad.REP](a); !ok {
		w.Fatalf("the REQ of the other interface got no REP")
	}
	// That of the very one does cross.
	same := honest(a, b)
	same.LocalCommID, same.LocalQPN = 8, 0x56
	w.inject(b, a, same)
	w.run(10 * time.Millisecond)
	if rej, _ := lastREJ(a); rej.Reason != 28 {
		w.Fatalf("the REQ that crossed got REJ %d, want 28", rej.Reason)
	}
}

// A peer that follows both conventions has opened a connection with the 0x10
// service ID, on which it alone sends. Then REQs in the 0x01 form cross: one more
// connection is left, whoever is larger. 4755-3.3-9, 4755-3.2-8, 4755-3.2-10
func TestCrossingBesideLegacyConnection(t *testing.T) {
	for _, larger := range []bool{false, true} {
		w := newWorld(t, 44)
		i := 1
		if larger {
			i = 5
		}
		a, b := w.node(i, Options{}), w.node(2, Options{})
		w.run(2 * time.Second)
		a.ping("10.0.0.2", 100, true) // so a knows that b follows RFC 4755
		w.settle()
		w.agree(a, b)
		b.kernel(b.k.Up(false))
		w.run(3 * time.Second)
		b.silent = true // from here on what b says is written here
		legacy := honest(a, b)
		legacy.ServiceID = serviceid.ID(0x10<<56 | uint64(a.opt.Link.QPN))
		legacy.LocalCommID, legacy.LocalQPN = 0x71, 0x61
		w.inject(b, a, legacy)
		w.run(time.Millisecond)
		w.inject(b, a, mad.RTU{LocalCommID: 0x71, RemoteCommID: repOf(w, a).LocalCommID})
		w.run(time.Millisecond)
		if got := len(a.up()); got != 1 {
			w.Fatalf("%d connections of the peer's, want 1", got)
		}
		asked := len(a.reqs)
		a.ping("10.0.0.2", 100, true)
		w.run(time.Millisecond)
		if got := len(a.reqs) - asked; got != 1 {
			w.Fatalf("%d REQs outstanding, want 1", got)
		}
		ours := a.reqs[asked]
		crossing := honest(a, b)
		crossing.LocalCommID, crossing.LocalQPN = 0x72, 0x62
		w.inject(b, a, crossing)
		w.run(time.Millisecond)
		if larger {
			if rej, _ := lastREJ(a); rej.Reason != 28 {
				w.Fatalf("the REQ that crossed got REJ %d, want 28", rej.Reason)
			}
			rep := mad.REP{LocalCommID: 0x73, RemoteCommID: ours.LocalCommID, LocalQPN: 0x63, LocalCAGUID: 9, RNRRetryCount: 7}
			copy(rep.PrivateData[:], vector.Hex("000001020000fff4"))
			w.inject(b, a, rep)
		} else {
			w.inject(b, a, mad.RTU{LocalCommID: 0x72, RemoteCommID: repOf(w, a).LocalCommID})
		}
		w.run(time.Millisecond)
		if got := len(a.up()); got != 2 {
			w.Fatalf("larger %v: %d connections up, want one more than before", larger, got)
		}
		if got := len(a.qps); got != 2 {
			w.Fatalf("larger %v: %d QPs, want 2", larger, got)
		}
	}
}

// repOf returns the last REP of n.
func repOf(w *world, n *node) mad.REP {
	w.t.Helper()
	rep, ok := last[mad.REP](n)
	if !ok {
		w.Fatalf("%s has sent no REP", n.name)
	}
	return rep
}

// An interface answers to the service IDs made of its own UD QPN and to no other.
// 4755-3.5-1, 4755-3.5-2, 4755-3.5-3, 4755-3.5-4, 4755-3.5-5
func TestServiceIDOctets(t *testing.T) {
	for _, tt := range []struct {
		id   uint64
		want bool
	}{
		{0x01_00_000000_81f203, true},  // RFC 4755 section 3.5
		{0x10_00_000000_81f203, true},  // what Linux uses instead
		{0x01_00_000000_81f202, false}, // another UD QPN
		{0x01_00_000000_01f203, false},
		{0x01_00_000000_000000, false},
		{0x01_01_000000_81f203, false}, // another Type
		{0x01_00_000001_81f203, false}, // Reserved is not zero
		{0x01_00_800000_81f203, false},
		{0x00_00_000000_81f203, false}, // not the block of the IETF
		{0x02_00_000000_81f203, false},
	} {
		w := newWorld(t, 45)
		a := w.nodeAt(1, encap.LinkAddr{QPN: 0x81f203, GID: gid(1)}, Options{})
		b := w.node(2, Options{})
		w.run(2 * time.Second)
		req := honest(a, b)
		req.ServiceID = serviceid.ID(tt.id)
		w.inject(b, a, req)
		w.run(10 * time.Millisecond)
		if _, got := last[mad.REP](a); got != tt.want {
			w.Fatalf("%#016x: a REP = %v, want %v", tt.id, got, tt.want)
		}
		rej, got := lastREJ(a)
		if got == tt.want {
			w.Fatalf("%#016x: a REJ = %v, want %v", tt.id, got, !tt.want)
		}
		if !tt.want && rej.Reason != 8 {
			w.Fatalf("%#016x: REJ %d, want 8", tt.id, rej.Reason)
		}
	}
}

// The Receive MTU that a REQ and a REP announce is what the buffers behind them
// take, in octets with the encapsulation header. 4755-5.1-1, 4755-5.1-2
func TestReceiveMTUOctets(t *testing.T) {
	for _, mode := range []Mode{ModeRC, ModeUC} {
		for _, receive := range []int{1284, 2048, 9000, 65524} {
			w := newWorld(t, 46)
			a, b := w.node(1, Options{Mode: mode, ReceiveMTU: receive}), w.node(2, Options{Mode: mode, ReceiveMTU: 4096})
			said := map[*node]uint32{}
			w.onOctets = func(from *node, m []byte) {
				if at, ok := privateDataAt[attribute(m)]; ok && attribute(m) != 0x0012 {
					said[from] = binary.BigEndian.Uint32(m[at+4:])
				}
			}
			w.run(2 * time.Second)
			a.ping("10.0.0.2", 100, true)
			w.settle()
			for n, want := range map[*node]int{a: receive, b: 4096} {
				if got := int(said[n]); got != want {
					w.Fatalf("%v, %s announces %d, want %d", mode, n.name, got, want)
				}
				for _, q := range n.qps {
					if q.receive < want {
						w.Fatalf("%v, %s has buffers of %d, want %d", mode, n.name, q.receive, want)
					}
				}
			}
			// Both use the smaller one, less the 4 octets of the header.
			most := min(receive, 4096) - 4
			for _, size := range []int{most, most - 1, 1000} {
				p := a.ping("10.0.0.2", size, true)
				w.run(10 * time.Millisecond)
				if got := b.got(p); got != 1 {
					w.Fatalf("%v: %d octets arrived %d times, want once", mode, size, got)
				}
			}
			before := len(a.tun)
			a.ping("10.0.0.2", most+1, true)
			w.run(10 * time.Millisecond)
			if got := len(a.tun) - before; got != 1 {
				w.Fatalf("%v: %d answers to %d octets, want an ICMP error", mode, got, most+1)
			}
			if got := int(binary.BigEndian.Uint16(a.tun[before][26:])); got != most {
				w.Fatalf("%v: the ICMP error says MTU %d, want %d", mode, got, most)
			}
		}
	}
}

// The default MTU of the link is 2044: 2048 less the 4 octets of the header. What
// is larger is answered with that number, by UD and before any connection. 4755-2-3, 4755-5-3
func TestDefaultLinkMTUOctets(t *testing.T) {
	for _, tt := range []struct {
		dst        string
		kind, code byte
		at         int // of the ICMP header
		mtu        int // its place behind that
	}{
		{"10.0.0.2", 3, 4, 20, 6}, // destination unreachable, fragmentation needed: RFC 1191
		{"fd00::2", 2, 0, 40, 6},  // packet too big: RFC 4443, 32 bits from octet 4
	} {
		w := newWorld(t, 47)
		a, b := w.node(1, Options{Mode: ModeUD}), w.node(2, Options{Mode: ModeUD})
		w.run(2 * time.Second)
		p := a.ping(tt.dst, 2044, true)
		w.settle()
		if got := b.got(p); got != 1 {
			w.Fatalf("%s: 2044 octets arrived %d times, want once", tt.dst, got)
		}
		before := len(a.tun)
		p = a.ping(tt.dst, 2045, true)
		w.settle()
		if got := b.got(p); got != 0 {
			w.Fatalf("%s: 2045 octets arrived", tt.dst)
		}
		if got := len(a.tun) - before; got != 1 {
			w.Fatalf("%s: %d answers to 2045 octets, want 1", tt.dst, got)
		}
		icmp := a.tun[before][tt.at:]
		expect.MustEqual(w, icmp[0], tt.kind, "%s: ICMP type", tt.dst)
		expect.MustEqual(w, icmp[1], tt.code, "%s: ICMP code", tt.dst)
		if got := binary.BigEndian.Uint16(icmp[tt.mtu:]); got != 2044 {
			w.Fatalf("%s: ICMP says MTU %d, want 2044", tt.dst, got)
		}
	}
}

// RC gives up before the first timeout of TCP, 1 s (RFC 6298 section 2): by the
// local ACK timeout (4.096 us times a power of two, IBA 9.7.6.1.3) and the retry
// count that stand in the REQ. 4755-7.1-1
func TestTimersOfREQOctets(t *testing.T) {
	w := newWorld(t, 48)
	a, _ := w.node(1, Options{}), w.node(2, Options{})
	var req []byte
	w.onOctets = func(_ *node, m []byte) {
		if attribute(m) == 0x0010 {
			req = bytes.Clone(m)
		}
	}
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	if req == nil {
		w.Fatalf("no REQ")
	}
	exponent, retries := req[24+95]>>3, req[24+47]&7
	timeout := time.Duration(4096<<exponent) * time.Nanosecond
	if exponent == 0 {
		w.Fatalf("ACK timeout 0, which is none at all")
	}
	if got := timeout * time.Duration(retries+1); got >= time.Second {
		w.Fatalf("%d tries of %v are given up after %v, want less than 1 s", retries+1, timeout, got)
	}
	// One timeout is short, too: below the 200 ms that Linux's TCP waits at least.
	if timeout >= 200*time.Millisecond {
		w.Fatalf("ACK timeout %v, want less than 200 ms", timeout)
	}
}
