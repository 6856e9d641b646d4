package interop

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce"
	"ipoibcm/test/interop/judge"
	"ipoibcm/test/interop/vm"
	"ipoibcm/verbs"
)

// Opcodes and syndromes that these tests look for (IBA volume 1 sections 9.2 and 9.3).
const (
	opSendMiddle, opSendOnly               = 0x01, 0x04
	opReadRequest, opReadFirst, opReadLast = 0x0c, 0x0d, 0x0f
	opAck                                  = 0x11
	nakSequence                            = 0x60
	rnrNAK                                 = 0x20 // and the timer
)

// rule sets a rule for the RoCEv2 packets of RC connections, until the test ends.
func (w *world) rule(t *testing.T, f func(fromGuest bool, h judge.BTH, frame []byte) vm.Verdict) {
	w.seg.SetRule(func(from string, frame []byte) vm.Verdict {
		if h, ok := judge.Base(frame); ok && h.Opcode>>5 == 0 {
			return f(from == w.vm.Name, h, frame)
		}
		return vm.Verdict{}
	})
	t.Cleanup(func() { w.seg.SetRule(nil) })
}

// once returns a rule that drops the first packet for which match holds.
func once(match func(fromGuest bool, h judge.BTH) bool) func(bool, judge.BTH, []byte) vm.Verdict {
	done := false
	return func(fromGuest bool, h judge.BTH, _ []byte) (v vm.Verdict) {
		if !done && match(fromGuest, h) {
			done, v.Drop = true, true
		}
		return v
	}
}

// traffic sends n messages each way, of sizes that vary, and compares them all.
func traffic(t *testing.T, a *end, b *peer, n, maxSize int) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(1, 2))
	const window = 4
	slot := maxSize
	size := make([]int, 2*n)
	for i := range size {
		size[i] = 1 + rnd.IntN(maxSize)
	}
	send := func(i int) {
		copy(a.mem.Buf[i%window*slot:], pattern(size[i], uint32(i)))
		b.do("recv %d %d %d", i, (i%window)*slot, slot)
		a.send(uint64(i), i%window*slot, size[i])
	}
	for i := range min(window, n) {
		send(i)
	}
	for i := range n {
		if wc := a.sent(); wc.ID != uint64(i) {
			t.Fatalf("send %d: %+v", i, wc)
		}
		if c := b.expect(wcRecv); c.id != uint64(i) || c.byteLen != size[i] {
			t.Fatalf("message %d of %d octets in the guest: %+v", i, size[i], c)
		}
		b.do("check %d %d %d", i%window*slot, size[i], i)
		if i+window < n {
			send(i + window)
		}
	}
	back := func(i int) {
		a.postRecv(uint64(i), i%window*slot, slot)
		b.do("fill %d %d %d", i%window*slot, size[n+i], i)
		b.do("send %d %d %d", i, i%window*slot, size[n+i])
	}
	for i := range min(window, n) {
		back(i)
	}
	for i := range n {
		wc := a.received()
		if wc.ID != uint64(i) || wc.ByteLen != size[n+i] {
			t.Fatalf("message %d of %d octets: %+v", i, size[n+i], wc)
		}
		same(t, fmt.Sprintf("message %d", i), a.mem.Buf[i%window*slot:][:wc.ByteLen], pattern(wc.ByteLen, uint32(i)))
		if c := b.expect(wcSend); c.id != uint64(i) {
			t.Fatalf("send %d in the guest: %+v", i, c)
		}
		if i+window < n {
			back(i + window)
		}
	}
}

// TestLoss loses, repeats, reorders and damages packets in both directions:
// everything arrives, once and in order.
func TestLoss(t *testing.T) {
	w := open(t, 1500)
	for _, fam := range w.families(t) {
		for _, tt := range []struct {
			name                   string
			drop, dup, delay, flip int // one in so many
		}{
			{"drop", 25, 0, 0, 0},
			{"duplicate", 0, 3, 0, 0},
			{"reorder", 0, 0, 30, 0},
			{"flip", 0, 0, 0, 25},
			{"all", 60, 20, 60, 60},
		} {
			t.Run(fam.name+"/"+tt.name, func(t *testing.T) {
				d := w.device(t, softroce.Options{})
				a, b := connected(t, w, d, fam, ib.RC, 64<<10)
				w.watch(t)
				rnd := rand.New(rand.NewPCG(3, 4))
				one := func(in int) bool { return in > 0 && rnd.IntN(in) == 0 }
				var flipped atomic.Uint64
				var sent [2]int // packets by direction; the rule runs for one packet at a time
				w.rule(t, func(fromGuest bool, _ judge.BTH, frame []byte) (v vm.Verdict) {
					v.Drop = one(tt.drop)
					if one(tt.dup) {
						v.Copies = 1
					}
					if one(tt.delay) {
						v.Behind = 1 + rnd.IntN(4)
					}
					// One in so many of either side's, not by chance: so that the guest's are
					// among them, however the two sides' packets alternate.
					from := 0
					if fromGuest {
						from = 1
					}
					if !v.Drop {
						sent[from]++
					}
					if tt.flip > 0 && !v.Drop && sent[from]%tt.flip == 1 {
						_, headers, _ := judge.RoCE(frame)
						at := 14 + headers + rnd.IntN(len(frame)-14-headers)
						if at == 14+headers+4 {
							at++ // FECN and BECN are not covered
						}
						frame[at] ^= 1 << rnd.IntN(8)
						if fromGuest {
							flipped.Add(uint64(1 + v.Copies))
						}
					}
					return v
				})
				traffic(t, a, b, 40, 12000)
				w.seg.SetRule(nil)
				// A flip may make an opcode that there is not, or a length that does not fit.
				if got := counter(t, d, "rx_drop_icrc") + counter(t, d, "rx_drop_malformed"); got != flipped.Load() {
					t.Errorf("%d packets dropped for their ICRC, %d were damaged", got, flipped.Load())
				}
				if tt.flip > 0 && counter(t, d, "rx_drop_icrc") == 0 {
					t.Error("no wrong ICRC was counted")
				}
			})
		}
	}
}

// find returns the packets for which match holds, as indices.
func find(w *world, packets []vm.Packet, match func(fromGuest bool, h judge.BTH, p vm.Packet) bool) (at []int) {
	for i, p := range packets {
		if h, ok := judge.Base(p.Frame); ok && match(p.From == w.vm.Name, h, p) {
			at = append(at, i)
		}
	}
	return at
}

// TestNAK loses one packet out of the middle of a message, each way: one NAK
// with the PSN that is missing, and everything from there on again.
func TestNAK(t *testing.T) {
	w := open(t, 1500)
	fam := w.families(t)[0]
	for _, theyLose := range []bool{false, true} {
		t.Run(map[bool]string{false: "ByThem", true: "ByUs"}[theyLose], func(t *testing.T) {
			d := w.device(t, softroce.Options{})
			a, b := connected(t, w, d, fam, ib.RC, 64<<10)
			c := w.watch(t)
			lost := ib.PSN(0)
			w.rule(t, once(func(fromGuest bool, h judge.BTH) bool {
				if fromGuest == theyLose && h.Opcode == opSendMiddle {
					lost = ib.PSN(h.PSN)
					return true
				}
				return false
			}))
			message(t, a, b, !theyLose, 5000)
			packets := c.Packets()
			naks := find(w, packets, func(fromGuest bool, h judge.BTH, _ vm.Packet) bool {
				return fromGuest != theyLose && h.Opcode == opAck && h.Syndrome == nakSequence
			})
			if len(naks) != 1 {
				t.Fatalf("%d NAKs, want 1", len(naks))
			}
			if h, _ := judge.Base(packets[naks[0]].Frame); ib.PSN(h.PSN) != lost {
				t.Errorf("NAK with PSN %06x, %v was lost", h.PSN, lost)
			}
			again := find(w, packets[naks[0]:], func(fromGuest bool, h judge.BTH, _ vm.Packet) bool {
				return fromGuest == theyLose && h.Opcode == opSendMiddle && ib.PSN(h.PSN) == lost
			})
			if len(again) != 1 {
				t.Errorf("the lost packet was sent %d times after the NAK, want 1", len(again))
			}
		})
	}
}

// message sends one message, by us or by the guest, and compares it.
func message(t *testing.T, a *end, b *peer, byUs bool, n int) {
	t.Helper()
	if byUs {
		b.do("recv 1 0 %d", n)
		copy(a.mem.Buf, pattern(n, 7))
		a.send(1, 0, n)
		a.sent()
		b.expect(wcRecv)
		b.do("check 0 %d 7", n)
	} else {
		a.postRecv(1, 0, n)
		b.do("fill 0 %d 7", n)
		b.do("send 1 0 %d", n)
		a.received()
		b.expect(wcSend)
		same(t, "what the guest sent", a.mem.Buf[:n], pattern(n, 7))
	}
}

// TestRNR sends before there is a receive, each way: RNR NAK with the timer of
// the receiver's QP, and the message once there is one.
func TestRNR(t *testing.T) {
	w := open(t, 1500)
	for _, fam := range w.families(t) {
		t.Run(fam.name, func(t *testing.T) {
			d := w.device(t, softroce.Options{})
			a, b := connected(t, w, d, fam, ib.RC, 64<<10)
			c := w.watch(t)
			isRNR := func(guest bool) func(bool, judge.BTH, vm.Packet) bool {
				return func(fromGuest bool, h judge.BTH, _ vm.Packet) bool {
					return fromGuest == guest && h.Opcode == opAck && h.Syndrome == rnrNAK|12 // 0.64 ms
				}
			}
			wait := func(guest bool) {
				t.Helper()
				eventually(t, "an RNR NAK", func() bool { return len(find(w, c.Packets(), isRNR(guest))) >= 2 })
			}
			copy(a.mem.Buf, pattern(3000, 5))
			a.send(1, 0, 3000)
			wait(true)
			b.do("recv 1 100 3000")
			a.sent()
			b.expect(wcRecv)
			b.do("check 100 3000 5")

			b.do("fill 0 3000 6")
			b.do("send 2 0 3000")
			wait(false)
			a.postRecv(2, 100, 3000)
			a.received()
			b.expect(wcSend)
			same(t, "what the guest sent", a.mem.Buf[100:3100], pattern(3000, 6))
		})
	}
}

// TestDuplicates loses the only acknowledgement, or the answer to a READ, each
// way: the request comes again, is answered again and has no further effect.
func TestDuplicates(t *testing.T) {
	w := open(t, 1500)
	fam := w.families(t)[0]
	const n = 3000
	for _, byUs := range []bool{true, false} {
		who := map[bool]string{true: "ByUs", false: "ByThem"}[byUs]
		t.Run("Send"+who, func(t *testing.T) {
			d := w.device(t, softroce.Options{})
			a, b := connected(t, w, d, fam, ib.RC, 64<<10)
			c := w.watch(t)
			w.rule(t, once(func(fromGuest bool, h judge.BTH) bool { return fromGuest == byUs && h.Opcode == opAck }))
			message(t, a, b, byUs, n)
			psns, again := map[uint32]bool{}, 0
			find(w, c.Packets(), func(fromGuest bool, h judge.BTH, _ vm.Packet) bool {
				if fromGuest != byUs && h.Opcode <= opSendOnly {
					if psns[h.PSN] {
						again++ // all of it, or one packet to ask for the state
					}
					psns[h.PSN] = true
				}
				return false
			})
			acks := find(w, c.Packets(), func(fromGuest bool, h judge.BTH, _ vm.Packet) bool {
				return fromGuest == byUs && h.Opcode == opAck && h.Syndrome < 0x20
			})
			if again == 0 || len(acks) < 2 {
				t.Errorf("%d packets sent again, %d acknowledgements; want 1 and 2 at least", again, len(acks))
			}
			// Nothing was delivered twice: the next message is the next completion.
			message(t, a, b, byUs, n+1)
		})
		for _, lose := range []byte{opReadFirst, opReadLast} {
			t.Run(fmt.Sprintf("Read%s/%#02x", who, lose), func(t *testing.T) {
				d := w.device(t, softroce.Options{})
				a, b := connected(t, w, d, fam, ib.RC, 64<<10)
				c := w.watch(t)
				w.rule(t, once(func(fromGuest bool, h judge.BTH) bool { return fromGuest == byUs && h.Opcode == lose }))
				if byUs {
					b.do("fill 0 %d 8", n)
					a.postSend(b.to(verbs.Read, 1, a.sg(0, n), 0))
					a.sent()
					same(t, "what was read", a.mem.Buf[:n], pattern(n, 8))
				} else {
					copy(a.mem.Buf, pattern(n, 8))
					b.do("read 1 0 %d 0x%x 0x%x", n, a.mem.Addr, a.mem.RKey)
					b.expect(wcRead)
					b.do("check 0 %d 8", n)
				}
				requests := find(w, c.Packets(), func(fromGuest bool, h judge.BTH, _ vm.Packet) bool {
					return fromGuest != byUs && h.Opcode == opReadRequest
				})
				if len(requests) < 2 {
					t.Errorf("%d READ requests, want a second one after the loss", len(requests))
				}
				message(t, a, b, byUs, n)
			})
		}
	}
}
