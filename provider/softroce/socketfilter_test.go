package softroce

import (
	"math/rand/v2"
	"testing"

	"golang.org/x/net/bpf"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// udFrame makes the UDP payload of a UD packet whose payload begins with head.
func udFrame(op roce.Opcode, to, from ib.QPN, head ...byte) []byte {
	n := roce.BTHLen + roce.DETHLen
	if op == roce.UDSendOnlyImm {
		n += 4
	}
	b := make([]byte, n, n+100)
	roce.PutBTH(b, roce.BTHFields{Opcode: op, PKey: ib.DefaultPKey, DestQPN: to})
	roce.PutDETH(b[roce.BTHLen:], ib.QKeyIPoIB, from)
	b = append(b, head...)
	return b[:cap(b)]
}

// Frames that begin like these.
var (
	filter4    = []byte{8, 0, 0, 0, 0x45}
	filter6    = append([]byte{0x86, 0xdd, 0, 0, 0x60, 0, 0, 0, 0, 8, 17, 64}, make([]byte, 32)...)
	filterARP  = []byte{8, 6, 0, 0}
	filterCM   = []byte{0xff, 0x01}
	filterEcho = filterICMP(128)
	filterNS   = filterICMP(135)
)

func filterICMP(kind byte) []byte {
	return append(append([]byte{0x86, 0xdd, 0, 0, 0x60, 0, 0, 0, 0, 8, 58, 64}, make([]byte, 32)...), kind)
}

// filterCases are packets and whether they pass whoever sends them.
func filterCases(mine, peer ib.QPN) []struct {
	name   string
	packet []byte
	free   bool
} {
	return []struct {
		name   string
		packet []byte
		free   bool
	}{
		{"IPv4", udFrame(roce.UDSendOnly, mine, peer, filter4...), false},
		{"IPv4 to a group", udFrame(roce.UDSendOnly, ib.QPNMulticast, peer, filter4...), false},
		{"IPv4 with immediate data", udFrame(roce.UDSendOnlyImm, mine, peer, filter4...), false},
		{"IPv6", udFrame(roce.UDSendOnly, mine, peer, filter6...), false},
		{"IPv6 with immediate data", udFrame(roce.UDSendOnlyImm, mine, peer, filter6...), false},
		{"ICMPv6 echo", udFrame(roce.UDSendOnly, mine, peer, filterEcho...), false},
		{"neighbour solicitation", udFrame(roce.UDSendOnly, mine, peer, filterNS...), true},
		{"ARP", udFrame(roce.UDSendOnly, mine, peer, filterARP...), true},
		{"CM in-band", udFrame(roce.UDSendOnly, mine, peer, filterCM...), true},
		{"another queue pair's", udFrame(roce.UDSendOnly, mine+1, peer, filter4...), true},
		{"QP 1's", udFrame(roce.UDSendOnly, ib.QPNGSI, peer, filter4...), true},
		{"RC", udFrame(roce.RCSendOnly, mine, peer, filter4...), true},
	}
}

// On a socket of the kernel the program drops what is to be dropped: of each source that is
// not known, all but what comes in its turn, one of eight.
func TestFilterFlood(t *testing.T) {
	const mine, peer = ib.QPN(0x123456), ib.QPN(0x654321)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			_, d := pair(t, f, nil)
			send, port := foreign(t, f.a)
			d.FilterDatagrams(mine, func(ib.GID, ib.QPN, []byte) bool { return false })
			// through sends a packet and reports whether it reached the device. What is sent after
			// it, to a queue pair that nobody has, arrives after it, and always.
			marker := datagramFor(f.a, f.b, port, 8, mine+77, ib.DefaultPKey, ib.QKeyIPoIB)
			through := func(packet []byte) bool {
				before, marks := counter(d, "rx_packets"), counter(d, "rx_drop_unknown_qpn")
				send(packet, f.b)
				send(marker, f.b)
				until(t, "the marker arrives", func() bool { return counter(d, "rx_drop_unknown_qpn") == marks+1 })
				return counter(d, "rx_packets")-before == 2
			}
			dropped := uint64(0)
			for _, tt := range []struct {
				name  string
				known []verbs.DatagramSource
				want  int // of FloodSlices
			}{
				{"known", []verbs.DatagramSource{{GID: gid(f.a), QPN: peer}, {GID: gid("fe80::9"), QPN: 5}}, verbs.FloodSlices},
				{"its address with another QPN is known", []verbs.DatagramSource{{GID: gid(f.a), QPN: peer + 1}}, 1},
				{"its QPN at another address is known", []verbs.DatagramSource{{GID: gid(f.b), QPN: peer}}, 1},
				{"nobody is known", []verbs.DatagramSource{}, 1},
				{"no filter", nil, verbs.FloodSlices},
			} {
				passed := map[string]int{}
				for range verbs.FloodSlices {
					d.FilterFlood(tt.known)
					for _, c := range filterCases(mine, peer) {
						if through(c.packet) {
							passed[c.name]++
						} else {
							dropped++
						}
					}
				}
				for _, c := range filterCases(mine, peer) {
					want := tt.want
					if c.free {
						want = verbs.FloodSlices
					}
					if got := passed[c.name]; got != want {
						t.Errorf("%s: %s: %d of %d passed, want %d", tt.name, c.name, got, verbs.FloodSlices, want)
					}
				}
			}
			if got := counter(d, "rx_drop_filtered"); got != dropped {
				t.Errorf("rx_drop_filtered is %d, want %d", got, dropped)
			}
			if got := counter(d, "rx_drop_overflow"); got != 0 {
				t.Errorf("rx_drop_overflow is %d, want 0", got)
			}
			if got := counter(d, "filter_errors"); got != 0 {
				t.Errorf("the kernel has refused %d programs", got)
			}
		})
	}
}

// The program finds in its instructions what is in the set, however full that is.
func TestSocketFilterProgram(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const mine, outer = ib.QPN(0x1234), 200 // where the test has the IP header
	for _, v6 := range []bool{true, false} {
		for _, members := range []int{0, 1, 100, 1000, 5000} {
			s := &sourceSet{v6: v6, qpn: mine}
			for i := range s.keys {
				s.keys[i] = r.Uint32() | 1
			}
			sources := make([]verbs.DatagramSource, members+2000)
			for i := range sources {
				var g ib.GID
				if v6 {
					g = gid("fe80::")
					for j := 8; j < 16; j++ {
						g[j] = byte(r.Uint32())
					}
				} else {
					g = gid("10.0.0.0")
					g[14], g[15] = byte(r.Uint32()), byte(r.Uint32())
				}
				sources[i] = verbs.DatagramSource{GID: g, QPN: ib.QPN(r.Uint32()) & ib.QPNMask}
				if i < members {
					s.add(sources[i])
				}
			}
			slice := r.Uint32N(verbs.FloodSlices)
			program := s.program(slice)
			for i, in := range program {
				if l, ok := in.(bpf.LoadAbsolute); ok && l.Off >= atIPHeader {
					l.Off = l.Off - atIPHeader + outer
					program[i] = l
				}
			}
			vm, err := bpf.NewVM(program)
			must(t, err)
			others, packet := 0, make([]byte, outer+40)
			for i, src := range sources {
				copy(packet[atBTH:], udFrame(roce.UDSendOnly, mine, src.QPN, filter4...))
				if v6 {
					copy(packet[outer+8:], src.GID[:])
				} else {
					copy(packet[outer+12:], src.GID[12:])
				}
				n, err := vm.Run(packet)
				must(t, err)
				inTurn := s.hash(src)%verbs.FloodSlices == slice
				switch {
				case i < members || inTurn:
					if n == 0 {
						t.Fatalf("IPv6 %v, %d members: source %d is dropped, member %v, in turn %v", v6, members, i, i < members, inTurn)
					}
				case n != 0:
					others++
				}
			}
			// Of 7/8 of 2000, as many look like members as bits are set.
			if most := 2000*members/(32*setWords)*11/10 + 10; others > most {
				t.Errorf("IPv6 %v, %d members: %d of 2000 others pass out of turn, want at most %d", v6, members, others, most)
			}
		}
	}
}
