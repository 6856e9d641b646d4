package tun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/wire/ip"
)

// tcp makes a TCP packet with options of so many octets, whose checksum is right.
func tcp(v6 bool, options int, seq uint32, id uint16, flags byte, payload []byte) []byte {
	var b []byte
	var src, dst netip.Addr
	n := tcpLen + options + len(payload)
	if v6 {
		src, dst = netip.MustParseAddr("fd09::2"), netip.MustParseAddr("fd09::1")
		s, d := src.As16(), dst.As16()
		b = append(append([]byte{0x60, 0x12, 0x34, 0x56, byte(n >> 8), byte(n), protoTCP, 63}, s[:]...), d[:]...)
	} else {
		src, dst = netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("10.9.0.1")
		s, d := src.As4(), dst.As4()
		b = append(append([]byte{0x45, 0x02, byte((20 + n) >> 8), byte(20 + n), byte(id >> 8), byte(id), 0x40, 0, 63,
			protoTCP, 0, 0}, s[:]...), d[:]...)
		binary.BigEndian.PutUint16(b[10:], ip.Checksum(b))
	}
	seg := make([]byte, tcpLen+options, n)
	copy(seg, []byte{0, 9, 0, 7, 0, 0, 0, 0, 0xaa, 0xbb, 0xcc, 0xdd, byte(tcpLen+options) << 2, flags, 1, 2})
	binary.BigEndian.PutUint32(seg[tcpSeq:], seq)
	for i := range options {
		seg[tcpLen+i] = 1 // no operation
	}
	seg = append(seg, payload...)
	binary.BigEndian.PutUint16(seg[tcpSum:], pseudo(src, dst, seg))
	return append(b, seg...)
}

// pseudo is the checksum of a TCP segment.
func pseudo(src, dst netip.Addr, seg []byte) uint16 {
	if src.Is6() {
		return ip.Checksum6(src, dst, protoTCP, seg)
	}
	s, d := src.As4(), dst.As4()
	return ^uint16(ip.Sum(ip.Sum(ip.Sum(protoTCP+uint32(len(seg)), s[:]), d[:]), seg))
}

// given is how the kernel gives p out in one GSO packet, to be split into packets of
// size octets of payload.
func given(p []byte, size int) (h [vnetLen]byte, gso []byte) {
	gso = bytes.Clone(p)
	s, ok := find(gso)
	if !ok {
		panic("find")
	}
	s.mark(&h, gso)
	if h[1] = vnetTCP6; p[0]>>4 == 4 {
		h[1] = vnetTCP4
	}
	binary.NativeEndian.PutUint16(h[4:], uint16(size))
	return h, gso
}

// random is octets that repeat from run to run.
func random(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	r.Read(b)
	return b
}

// split takes what the kernel gave through calls that have room for batch packets.
func split(t *testing.T, s *tso, h [vnetLen]byte, gso []byte, batch int) (out [][]byte) {
	t.Helper()
	bufs, sizes := buffers(batch)
	n := s.take(&h, copy(bufs[0], gso), bufs, sizes)
	for {
		for i := range n {
			out = append(out, bytes.Clone(bufs[i][:sizes[i]]))
			clear(bufs[i]) // they belong to somebody else now
		}
		if !s.rest.more() {
			return out
		}
		n = s.resume(bufs, sizes)
	}
}

// A GSO packet becomes the packets that its sender would have sent one by one, however
// many are asked for at once; and these become the GSO packet again.
func TestSplitMerge(t *testing.T) {
	const seq, id = 1<<32 - 3000, 0xfff0
	for _, v6 := range []bool{false, true} {
		for _, options := range []int{0, 12, 40} {
			for _, c := range []struct{ size, total int }{{1000, 1001}, {1000, 2000}, {968, 65000}, {1, 60}, {536, 5000},
				{30000, 60000}, {1448, 64 * 1448 >> 1}} {
				for _, flags := range []byte{tcpACK, tcpACK | tcpPSH, tcpACK | tcpFIN | tcpPSH, tcpACK | tcpCWR} {
					for _, batch := range []int{1, 2, 32, 100} {
						name := fmt.Sprintf("v6 %v, options %d, %d of %d, flags %#x, %d at once", v6, options, c.size, c.total,
							flags, batch)
						payload := random(c.total)
						var want [][]byte
						for at := 0; at < c.total; at += c.size {
							end, f := min(at+c.size, c.total), flags
							if end < c.total {
								f &^= tcpFIN | tcpPSH
							}
							if at > 0 {
								f &^= tcpCWR
							}
							want = append(want, tcp(v6, options, uint32(uint64(seq)+uint64(at)), uint16(id+len(want)), f, payload[at:end]))
						}
						whole := tcp(v6, options, seq, id, flags, payload)
						h, gso := given(whole, c.size)
						var s tso
						got := split(t, &s, h, gso, batch)
						if !slices.EqualFunc(got, want, bytes.Equal) {
							t.Fatalf("%s: %d packets, want %d", name, len(got), len(want))
						}
						expect.Equal(t, s.split.Load(), 1, "%s: Load", name)
						expect.Equal(t, s.made.Load(), uint64(len(want)), "%s: Load", name)
						expect.Equal(t, s.malformed.Load(), 0, "%s: Load", name)
						if flags&^tcpPSH == tcpACK && len(want) <= maxMerged {
							remerge(t, name, got, h, gso)
						}
					}
				}
			}
		}
	}
}

// remerge puts packets together, which must give gso with header h.
func remerge(t *testing.T, name string, packets [][]byte, h [vnetLen]byte, gso []byte) {
	t.Helper()
	var m merger
	s, ok := find(packets[0])
	if !ok || !m.begin(packets[0], s) {
		t.Fatalf("%s: the first packet is not taken", name)
	}
	out := bytes.Clone(packets[0])
	for _, p := range packets[1:] {
		if !m.add(p) {
			t.Fatalf("%s: packet %d is not taken", name, m.n)
		}
		out = append(out, p[s.head:]...)
	}
	m.first = out[:len(packets[0])]
	var got [vnetLen]byte
	m.finish(&got)
	if got != h || !bytes.Equal(out, gso) {
		t.Errorf("%s: put together again it is another GSO packet, header %x, want %x", name, got, h)
	}
}

const seq = 77

// notMergeable are changes of a second packet for which it does not go with the first.
func notMergeable(v6 bool, start int, payload []byte) map[string]func(p []byte) []byte {
	tests := map[string]func(p []byte) []byte{
		"another source":       func(p []byte) []byte { p[start-5]++; return p },
		"another destination":  func(p []byte) []byte { p[start-1]++; return p },
		"another port":         func(p []byte) []byte { p[start+1]++; return p },
		"another ACK":          func(p []byte) []byte { p[start+8]++; return p },
		"another window":       func(p []byte) []byte { p[start+14]++; return p },
		"urgent":               func(p []byte) []byte { p[start+19]++; return p },
		"another option":       func(p []byte) []byte { p[start+25]++; return p },
		"a reserved bit":       func(p []byte) []byte { p[start+12]++; return p },
		"a gap":                func([]byte) []byte { return tcp(v6, 12, seq+1001, 6, tcpACK, payload) },
		"once more":            func([]byte) []byte { return tcp(v6, 12, seq, 6, tcpACK, payload) },
		"longer":               func([]byte) []byte { return tcp(v6, 12, seq+1000, 6, tcpACK, random(1001)) },
		"empty":                func([]byte) []byte { return tcp(v6, 12, seq+1000, 6, tcpACK, nil) },
		"FIN":                  func([]byte) []byte { return tcp(v6, 12, seq+1000, 6, tcpACK|tcpFIN, payload) },
		"RST":                  func([]byte) []byte { return tcp(v6, 12, seq+1000, 6, tcpACK|4, payload) },
		"ECE":                  func([]byte) []byte { return tcp(v6, 12, seq+1000, 6, tcpACK|0x40, payload) },
		"no ACK":               func([]byte) []byte { return tcp(v6, 12, seq+1000, 6, 0, payload) },
		"more options":         func([]byte) []byte { return tcp(v6, 16, seq+1000, 6, tcpACK, payload) },
		"another hop limit":    func(p []byte) []byte { p[map[bool]int{false: 8, true: 7}[v6]]++; return p },
		"another class or ECN": func(p []byte) []byte { p[1]++; return p },
		"the other family":     func([]byte) []byte { return tcp(!v6, 12, seq+1000, 6, tcpACK, payload) },
		"UDP":                  func([]byte) []byte { return packet(v6, 17, 1000) },
		"nothing":              func([]byte) []byte { return []byte{} },
	}
	if !v6 {
		tests["a fragment"] = func(p []byte) []byte { p[6] = 0x20; return p }
		tests["without DF"] = func(p []byte) []byte { p[6] = 0; return p }
	} else {
		tests["another flow label"] = func(p []byte) []byte { p[3]++; return p }
	}
	return tests
}

// What is not the continuation of the packet before is not put together with it.
func TestNotMerged(t *testing.T) {
	payload := random(1000)
	for _, v6 := range []bool{false, true} {
		start, name := 20, "v4"
		if v6 {
			start, name = 40, "v6"
		}
		first := tcp(v6, 12, seq, 5, tcpACK, payload)
		next := func() []byte { return tcp(v6, 12, seq+1000, 6, tcpACK, payload) }
		tests := notMergeable(v6, start, payload)
		for what, change := range tests {
			p := change(next())
			fix(p, start)
			var m merger
			s, _ := find(first)
			if !m.begin(first, s) {
				t.Fatal("the first packet is not taken")
			}
			if m.add(p) {
				t.Errorf("%s, %s: put together", name, what)
			}
			expect.Equal(t, m.n, 1, "%s, %s: n", name, what)
			expect.Equal(t, m.total, len(first), "%s, %s: total", name, what)
			expect.Equal(t, m.add(next()), true, "%s, %s: add(next())", name, what)
		}
		p := next()
		p[len(p)-1]++
		var m merger
		s, _ := find(first)
		if m.begin(first, s); m.add(p) {
			t.Errorf("%s: a packet with a wrong checksum is taken", name)
		}
		short := tcp(v6, 12, seq+1000, 6, tcpACK, payload[:999])
		if !m.add(short) {
			t.Errorf("%s: a shorter packet is not taken", name)
		}
		if m.add(tcp(v6, 12, seq+1999, 7, tcpACK, payload)) {
			t.Errorf("%s: a packet is taken behind a shorter one", name)
		}
		if m.begin(first, s); !m.add(tcp(v6, 12, seq+1000, 6, tcpACK|tcpPSH, payload)) ||
			m.add(tcp(v6, 12, seq+2000, 7, tcpACK, payload)) {
			t.Errorf("%s: one with PSH must be the last", name)
		}
		notTheFirst(t, v6, start, first, next(), payload)
	}
	differentIdentifications(t, payload)
}

// notTheFirst: what no other packet may be put behind, or no third one.
func notTheFirst(t *testing.T, v6 bool, start int, first, next, payload []byte) {
	t.Helper()
	name := map[bool]string{false: "v4", true: "v6"}[v6]
	var m merger
	for _, marked := range [][]byte{first, next} { // packets that say congestion are counted one by one
		if v6 {
			marked[1] |= 0x30
		} else {
			marked[1] |= 3
		}
		fix(marked, start)
	}
	if s, ok := find(first); !ok || m.begin(first, s) {
		t.Errorf("%s: taken as the first, although marked", name)
	}
	half := random(30000) // two of them fit into what IPv4 can say, three do not
	first = tcp(v6, 12, seq, 5, tcpACK, half)
	switch s, _ := find(first); {
	case !m.begin(first, s):
		t.Errorf("%s: begin(first, s) is false, want true", name)
	case !m.add(tcp(v6, 12, seq+30000, 6, tcpACK, half)):
		t.Errorf("%s: add(tcp(v6, 12, seq+30000, 6, tcpACK, half)) is false, want true", name)
	case m.add(tcp(v6, 12, seq+60000, 7, tcpACK, half)):
		t.Errorf("%s: add(tcp(v6, 12, seq+60000, 7, tcpACK, half)) is true, want false", name)
	}
	for what, p := range map[string][]byte{
		"SYN": tcp(v6, 12, seq, 5, tcpSYN, payload), "PSH": tcp(v6, 12, seq, 5, tcpACK|tcpPSH, payload),
		"empty": tcp(v6, 12, seq, 5, tcpACK, nil), "UDP": packet(v6, 17, 1000),
		"long": tcp(v6, 0, seq, 5, tcpACK, random(mergeBelow)),
	} {
		if s, ok := find(p); !ok || m.begin(p, s) {
			t.Errorf("%s, %s: taken as the first", name, what)
		}
	}
}

// differentIdentifications: they count where DF is not set.
func differentIdentifications(t *testing.T, payload []byte) {
	t.Helper()
	p := tcp(false, 0, seq, 5, tcpACK, payload)
	p[6] = 0
	fix(p, 20)
	var m merger
	s, _ := find(p)
	same, up := tcp(false, 0, seq+1000, 5, tcpACK, payload), tcp(false, 0, seq+1000, 6, tcpACK, payload)
	same[6], up[6] = 0, 0
	fix(same, 20)
	fix(up, 20)
	expect.Equal(t, m.begin(p, s), true, "begin(p, s)")
	expect.Equal(t, m.add(same), false, "add(same)")
	expect.Equal(t, m.add(up), true, "add(up)")
}

// fix makes the checksums of p right again, which is TCP behind start octets.
func fix(p []byte, start int) {
	if start == 0 || len(p) < start+tcpLen || p[0]>>4 == 4 && p[9] != protoTCP ||
		p[0]>>4 == 6 && p[6] != protoTCP || p[0]>>4 == 4 != (start == 20) {
		return
	}
	a, b := netip.Addr{}, netip.Addr{}
	if start == 20 {
		p[10], p[11] = 0, 0
		binary.BigEndian.PutUint16(p[10:], ip.Checksum(p[:20]))
		a, b = netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:]))
	} else {
		a, b = netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
	}
	p[start+tcpSum], p[start+tcpSum+1] = 0, 0
	binary.BigEndian.PutUint16(p[start+tcpSum:], pseudo(a, b, p[start:]))
}

// What makes no sense is dropped and counted.
func TestOddSegments(t *testing.T) {
	whole := tcp(false, 0, 1, 1, tcpACK, random(3000))
	whole6 := tcp(true, 0, 1, 1, tcpACK, random(3000))
	set := func(h [vnetLen]byte, at int, v uint16) [vnetLen]byte {
		binary.NativeEndian.PutUint16(h[at:], v)
		return h
	}
	h, gso := given(whole, 1000)
	h6, piece6 := given(whole6, 1000)
	with := func(p []byte, at int, v byte) []byte { p = bytes.Clone(p); p[at] = v; return p }
	noSum, udp, unknown := h, h, h
	noSum[0], udp[1], unknown[1] = 0, 3, 0x81
	for what, c := range map[string]struct {
		h [vnetLen]byte
		p []byte
	}{
		"no checksum to complete": {noSum, gso}, "UDP": {udp, gso}, "ECN": {unknown, gso},
		"size 0": {set(h, 4, 0), gso}, "another checksum": {set(h, 8, 6), gso},
		"TCP elsewhere": {set(h, 6, 24), gso}, "TCP at 0": {set(h, 6, 0), gso}, "TCP behind the end": {set(h, 6, 65535), gso},
		"cut off": {h, gso[:2000]}, "cut off in the header": {h, gso[:30]}, "no payload": {h, with(gso[:40], 3, 40)},
		"header behind the end": {h, with(with(gso[:50], 3, 50), 32, 0xf0)}, "header of 16": {h, with(gso, 32, 0x40)},
		"version 6": {h, with(gso, 0, 0x65)}, "a fragment": {h, with(gso, 7, 1)},
		"more fragments": {h, with(gso, 6, 0x20)}, "not TCP": {h, with(gso, 9, 17)},
		"version 4": {h6, with(piece6, 0, 0x45)}, "TCP in the IPv6 header": {set(h6, 6, 30), piece6},
		"cut off, IPv6": {h6, piece6[:3000]},
	} {
		var s tso
		bufs, sizes := buffers(4)
		switch n := s.take(&c.h, copy(bufs[0], c.p), bufs, sizes); {
		case n != 0:
			t.Errorf("%s: n is %v, want 0", what, n)
		case s.malformed.Load() != 1:
			t.Errorf("%s: Load is %v, want 1", what, s.malformed.Load())
		case s.split.Load() != 0:
			t.Errorf("%s: Load is %v, want 0", what, s.split.Load())
		case s.rest.more():
			t.Errorf("%s: more is true, want false", what)
		}
	}
	// What a buffer is too short for is lost, and counted.
	var s tso
	bufs, sizes := buffers(3)
	bufs[1] = bufs[1][:500]
	switch n := s.take(&h, copy(bufs[0], gso), bufs, sizes); {
	case n != 1:
		t.Errorf("n is %v, want 1", n)
	case s.malformed.Load() != 2:
		t.Errorf("Load is %v, want 2", s.malformed.Load())
	case sizes[0] != 1040:
		t.Errorf("sizes[0] is %v, want 1040", sizes[0])
	}
}

// Whatever the kernel, or a peer, gives: nothing is read or written outside of it,
// and what comes out can be put together again.
func FuzzSegments(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		p := tcp(v6, 12, 7, 9, tcpACK, random(600))
		h, gso := given(p, 40)
		f.Add(h[:], gso, p)
		f.Add(h[:], p, tcp(v6, 12, 607, 10, tcpACK, random(600)))
		f.Add(h[:], gso[:70], tcp(v6, 12, 607, 10, tcpACK|tcpPSH, random(50)))
	}
	f.Fuzz(func(t *testing.T, header, p, q []byte) {
		if len(header) < vnetLen || len(p) == 0 || len(p) > maxTotal || len(q) > maxTotal {
			return
		}
		h := [vnetLen]byte(header)
		var s tso
		total, n := 0, 0
		for _, b := range split(t, &s, h, p, 3) {
			l, ok := find(b)
			if !ok { // of IPv6 with extension headers
				if b[0]>>4 != 6 || b[6] == protoTCP {
					t.Fatalf("no packet: %x", b)
				}
				continue
			}
			total += len(b) - l.head
			n++
		}
		if s.malformed.Load() == 0 && n > 0 {
			expect.Equal(t, uint64(n), s.made.Load(), "number of packets")
			if total == 0 || total > len(p) {
				t.Errorf("%d packets have %d octets of payload, want 1 to %d", n, total, len(p))
			}
		}
		for _, b := range [][]byte{p, q} { // else hardly any gets past its checksum
			if len(b) > 0 {
				fix(b, map[byte]int{4: 20, 6: 40}[b[0]>>4])
			}
		}
		var m merger
		if first, right := (&csums{}).look(p); right && m.begin(p, first) && m.add(q) {
			whole := append(bytes.Clone(p), q[first.head:]...)
			m.first = whole[:len(p)]
			m.finish(&h)
			var c csums
			if !c.complete(&h, whole) {
				t.Error("cannot be completed")
			}
			valid, ok := verify(whole)
			expect.Equal(t, ok, true, "put together: whether it was looked at")
			expect.Equal(t, valid, true, "put together: whether the checksum is right")
		}
	})
}

// Nothing is allocated for a GSO packet, in either direction.
func TestSegmentsNoAllocs(t *testing.T) {
	f := open(t, Options{trial: says(nil, nil)})
	h, gso := given(tcp(false, 12, 1, 1, tcpACK, random(60000)), 968)
	bufs, sizes := buffers(32)
	n := testing.AllocsPerRun(100, func() {
		n := f.tso.take(&h, copy(bufs[0], gso), bufs, sizes)
		for f.tso.rest.more() {
			n += f.tso.resume(bufs, sizes)
		}
		if n != 62 {
			t.Fatalf("%d packets", n)
		}
	})
	if n > 0 {
		t.Errorf("%v allocations per GSO packet from the kernel, want 0", n)
	}
	in := row(32, 968)
	out := make([][]byte, len(in))
	for i := range out {
		out[i] = make([]byte, len(in[i]))
	}
	n = testing.AllocsPerRun(100, func() {
		for i := range out {
			copy(out[i], in[i])
		}
		if n, err := f.Write(out); n != len(out) || err != nil {
			t.Fatal(n, err)
		}
	})
	switch s := f.Segments(); {
	case n > 0:
		t.Errorf("n is %v, want 0", n)
	case s.Merged != 32*s.Written:
		t.Errorf("Merged is %v, want %v", s.Merged, 32*s.Written)
	case s.Written == 0:
		t.Errorf("0 GSO packets were written, want some")
	}
}

// row is n packets in a row of one stream.
func row(n, size int) (packets [][]byte) {
	payload := random(size)
	for i := range n {
		packets = append(packets, tcp(false, 12, uint32(1+i*size), uint16(i), tcpACK, payload))
	}
	return packets
}

// BenchmarkSplit is the cost of a GSO packet of 62 packets from the kernel, without the
// system call.
func BenchmarkSplit(b *testing.B) {
	h, gso := given(tcp(false, 12, 1, 1, tcpACK, random(60000)), 968)
	var s tso
	bufs, sizes := buffers(32)
	b.SetBytes(int64(len(gso)))
	b.ReportAllocs()
	for b.Loop() {
		s.take(&h, copy(bufs[0], gso), bufs, sizes)
		for s.rest.more() {
			s.resume(bufs, sizes)
		}
	}
}

// BenchmarkMerge is the cost of 32 packets that become a GSO packet for the kernel, with
// the system call, and of the same one by one.
func BenchmarkMerge(b *testing.B) {
	for _, off := range []bool{false, true} {
		b.Run(map[bool]string{false: "merged", true: "single"}[off], func(b *testing.B) {
			f := open(b, Options{NoSegments: off, trial: says(nil, nil)})
			in := row(32, 968)
			out := make([][]byte, len(in))
			for i := range out {
				out[i] = make([]byte, len(in[i]))
			}
			b.SetBytes(32 * 968)
			b.ReportAllocs()
			for b.Loop() {
				for i := range out {
					copy(out[i], in[i])
				}
				if n, err := f.Write(out); n != len(out) {
					b.Fatal(n, err)
				}
			}
		})
	}
}
