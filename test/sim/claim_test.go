package sim

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/ipoib"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/nd"
	"ipoibcm/wire/roce"
)

// nowhere returns a link-layer address that no host has.
func (x *blind) nowhere() encap.LinkAddr {
	gid, _ := ib.ParseGID(fmt.Sprintf("fe80::dead:%x", x.r.Uint32N(0xffff)))
	return encap.LinkAddr{Flags: encap.FlagRC, QPN: 2 + ib.QPN(x.r.Uint32N(1<<24-3)), GID: gid}
}

// A claim is an ARP or ND message that says where an address is.
type claim struct {
	name string
	of   func(*host) netip.Addr
	make func(of netip.Addr, at encap.LinkAddr, to *host) []byte
}

func arpFrame(p arp.Packet) []byte {
	b, _ := p.AppendBinary([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0}) // all addresses are IPv4
	return b
}

func ndFrame(m interface{ AppendBinary([]byte) ([]byte, error) }) []byte {
	b, _ := m.AppendBinary([]byte{byte(encap.IPv6 >> 8), byte(encap.IPv6 & 0xff), 0, 0}) // all addresses are IPv6
	return b
}

// questions and answers are to one host, announcements to all.
var (
	questions = []claim{
		{"ARP request", (*host).addr4, func(of netip.Addr, at encap.LinkAddr, to *host) []byte {
			return arpFrame(arp.NewRequest(at, of, to.addr4()))
		}},
		{"NS", (*host).addr6, func(of netip.Addr, at encap.LinkAddr, to *host) []byte {
			return ndFrame(nd.NewNS(of, to.addr6(), at))
		}},
	}
	answers = []claim{
		{"ARP reply", (*host).addr4, func(of netip.Addr, at encap.LinkAddr, to *host) []byte {
			return arpFrame(arp.NewRequest(to.link, to.addr4(), of).ReplyFrom(at))
		}},
		{"NA", (*host).addr6, func(of netip.Addr, at encap.LinkAddr, to *host) []byte {
			return ndFrame(nd.NewNS(to.addr6(), of, to.link).Answer(at, false))
		}},
	}
	announcements = []claim{
		{"ARP announcement", (*host).addr4, func(of netip.Addr, at encap.LinkAddr, _ *host) []byte {
			return arpFrame(arp.NewAnnouncement(at, of))
		}},
		{"NA to all", (*host).addr6, func(of netip.Addr, at encap.LinkAddr, _ *host) []byte {
			return ndFrame(nd.NewAnnouncement(of, at, false))
		}},
	}
)

// claims sends the victim a claim that the peer's address is at another place.
func (x *blind) claims(c claim, at encap.LinkAddr) { x.claimsTo(x.victim, c, at) }

// claimsTo sends that claim to another host.
func (x *blind) claimsTo(to *host, c claim, at encap.LinkAddr) {
	b := make([]byte, roce.BTHLen+roce.DETHLen)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.UDSendOnly, PKey: ib.DefaultPKey, DestQPN: to.link.QPN,
		PSN: ib.PSN(x.r.Uint32N(1 << 24))})
	roce.PutDETH(b[roce.BTHLen:], ib.QKeyIPoIB, at.QPN)
	y := *x
	y.victim, y.as.GID = to, at.GID
	y.send(append(b, c.make(c.of(x.peer), at, to)...))
}

// TestBlindUnknown: the attacker says where the peer is before the victim has asked, or answers it first. That is
// believed: the peer is found when nobody answers at that place. Claims of other places every two seconds keep it so.
// Once it is found it is a neighbour that answers, and no claim is believed.
func TestBlindUnknown(t *testing.T) {
	const every = 100 * time.Millisecond // between packets to the peer
	for _, tt := range []struct {
		name   string
		claims []claim
		mode   ipoib.Mode
		first  bool // before the victim asks
		again  bool
		within time.Duration // it is over, from the first packet or the last claim
	}{
		{"asks first", questions, ipoib.ModeAuto, true, false, 5 * time.Second},
		{"answers first", answers, ipoib.ModeAuto, false, false, 5 * time.Second},
		{"asks first, UD only", questions, ipoib.ModeUD, true, false, 8 * time.Second},
		{"answers first, UD only", answers, ipoib.ModeUD, false, false, 8 * time.Second},
		{"asks again and again", questions, ipoib.ModeAuto, true, true, 8 * time.Second},
	} {
		for _, c := range tt.claims {
			t.Run(tt.name+", "+c.name, func(t *testing.T) {
				var took []time.Duration
				seeds(t, 20, func(w *world) {
					a, b := w.host(config{mode: tt.mode}), w.host(config{mode: tt.mode})
					x, dst := w.blind(a, b), c.of(b)
					w.run(5 * time.Second) // addresses are checked for duplicates
					if tt.first {
						x.claims(c, x.nowhere())
						w.run(time.Millisecond + w.upTo(time.Second))
					}
					begin := w.f.Now()
					p := a.send(dst, 100, true)
					if !tt.first {
						x.claims(c, x.nowhere())
					}
					for i := 1; tt.again && i <= 600; i++ {
						w.run(every)
						w.want(p.delivered == 0, "%v was delivered, beside claims", p)
						if i%20 == 0 {
							x.claims(c, x.nowhere())
						}
						p = a.send(dst, 100, true)
					}
					if tt.again {
						begin = w.f.Now()
					}
					w.run(every)
					w.want(p.delivered == 0, "%v was delivered: the claim is not believed", p)
					for p.delivered == 0 {
						p = a.send(dst, 100, true)
						w.run(every)
						w.want(w.f.Now().Sub(begin) <= tt.within, "%v was not delivered, after %v", p, w.f.Now().Sub(begin))
					}
					took = append(took, w.f.Now().Sub(begin))
					for i := range 600 {
						if i%20 == 0 {
							x.claims(c, x.nowhere())
						}
						p := a.send(dst, 100, true)
						w.run(every)
						w.want(p.delivered == 1, "%v was not delivered, beside claims about a neighbour that answers", p)
					}
					w.settle()
					w.end()
				})
				slices.Sort(took)
				t.Logf("packets arrive after %v to %v in %d runs", took[0], took[len(took)-1], len(took))
			})
		}
	}
}

// connectedTo is connected, and the victim knows the address that c claims.
func connectedTo(w *world, c claim) (x *blind, was ipoib.ConnInfo, dst netip.Addr) {
	x, was = connected(w)
	dst = c.of(x.peer)
	w.run(5 * time.Second) // addresses are checked for duplicates
	x.victim.send(dst, 100, true)
	w.run(time.Second)
	return x, was, dst
}

// TestBlindTakeover: the attacker says five times a second that a neighbour of the victim is elsewhere. The
// neighbour is asked, twice a second at most, and answers: every packet goes to it, over the connection of before.
func TestBlindTakeover(t *testing.T) {
	const every = 100 * time.Millisecond
	packets := long.Of(1000, 6000)
	for _, c := range slices.Concat(questions, answers, announcements) {
		for _, place := range []string{"another", "the same GID"} {
			t.Run(c.name+", "+place, func(t *testing.T) {
				challenges, refused, n := uint64(0), uint64(0), 0
				seeds(t, 5, func(w *world) {
					x, was, dst := connectedTo(w, c)
					a, b := x.victim, x.peer
					for i := range packets {
						if i%2 == 0 {
							at := x.nowhere()
							if place != "another" {
								at.GID = b.gid
							}
							x.claims(c, at)
						}
						w.run(w.upTo(every / 2))
						p := a.send(dst, 100, true)
						w.run(every / 2)
						w.want(p.delivered == 1, "%v was delivered %d times", p, p.delivered)
						w.want(p.mode() == ib.RC, "%v went by %v, want RC", p, p.mode())
					}
					w.want(a.counter("neigh_changed") == 0, "the neighbour has moved %d times", a.counter("neigh_changed"))
					asked := a.counter("neigh_challenges")
					w.want(asked > uint64(packets/40) && asked <= uint64(packets/10), "the neighbour was asked about %d claims in %d s", asked, packets/10)
					challenges, refused, n = challenges+asked, refused+a.counter("neigh_drop_still_there"), n+1
					x.lives(was, c.name)
					w.settle()
					w.end()
				})
				t.Logf("%d claims in each of %d runs: of %d the neighbour was asked, %d were refused for its answer", packets/2, n,
					challenges, refused)
			})
		}
	}
}

// TestBlindTakeoverOfBoth: two claims that reach the neighbour as well as the victim. The neighbour takes the first for a
// mistake, and gives its address up at the second; asked by the victim, it is silent. It looks for the
// other host, finds none, and says so: then packets reach it again.
func TestBlindTakeoverOfBoth(t *testing.T) {
	const every, within = 10 * time.Millisecond, 5 * time.Second
	for _, c := range announcements {
		t.Run(c.name, func(t *testing.T) {
			var took []time.Duration
			seeds(t, 20, func(w *world) {
				x, _, dst := connectedTo(w, c)
				a, b := x.victim, x.peer
				at := x.nowhere()
				claim := func() {
					x.claims(c, at)
					x.claimsTo(b, c, at)
				}
				claim()
				w.run(1100 * time.Millisecond) // the neighbour is asked once a second
				claim()
				lost := time.Duration(0)
				for range 2 * within / every {
					p := a.send(dst, 100, true)
					if w.run(every); p.delivered == 0 {
						lost += every
					}
				}
				w.want(lost > 0, "no packet was lost: the address was not taken")
				w.want(lost <= within, "packets were lost for %v", lost)
				took = append(took, lost)
				w.settle()
				w.end()
			})
			slices.Sort(took)
			t.Logf("packets were lost for %v to %v in %d runs", took[0], took[len(took)-1], len(took))
		})
	}
}
