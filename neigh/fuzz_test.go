package neigh

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/rtnl"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/nd"
)

// FuzzStep feeds a table events made from octets. Nothing panics, the bounds
// hold, every packet comes back exactly once, and accounts agree with each other.
func FuzzStep(f *testing.F) {
	f.Add([]byte{0, 1, 0, 2, 0, 3, 5, 1, 20, 9, 5, 2, 1, 1})
	f.Add([]byte{8, 1, 8, 2, 0, 9, 0, 9, 9, 200, 6, 1, 10, 2, 4, 9, 13, 0})
	f.Add([]byte{0, 5, 11, 0, 9, 255, 9, 255, 3, 5, 7, 5, 12, 3, 14, 1})
	f.Add([]byte("\x08\x01\x00\x04\x00\x04\x00\x04\x00\x04\x00\x05\x00\x06\x00\x07\x00\x08\x00\x09\x05\x04"))
	f.Fuzz(func(t *testing.T, in []byte) { fuzzStep(t, in) })
}

func fuzzStep(t *testing.T, in []byte) {
	o := Options{
		LinkAddr: hosts["A"], Rand: rand.New(rand.NewPCG(3, 4)),
		MaxNeighbors: 5, MaxAddrs: 3, MaxQueuedPackets: 3, MaxQueuedOctets: 40, MaxTotalOctets: 60,
		RequestRate: 20, SourceRate: 5,
	}
	tab := New(o)
	now := time.Unix(1, 0)
	waiting := map[string]bool{}
	for i := 0; i+1 < len(in); i += 2 {
		ev := fuzzEvent(i, in[i], in[i+1], in[i:])
		if ev == nil {
			now = now.Add(time.Duration(in[i+1]) * 300 * time.Millisecond)
			ev = Wake{}
		}
		if r, ok := ev.(Resolve); ok && r.Packet != nil {
			waiting[string(r.Packet)] = true
		}
		for _, a := range tab.Step(nil, now, ev) {
			switch a := a.(type) {
			case Deliver:
				back(t, waiting, a.Packet)
				checkLink(t, "deliver", a.LinkAddr)
			case Discard:
				back(t, waiting, a.Packet)
			case SendUD:
				if !a.To.Broadcast && !a.To.Group.IsValid() {
					checkLink(t, "send", a.To.LinkAddr)
				}
			}
		}
		checkTable(t, tab, len(waiting))
	}
}

// checkLink checks that what goes to l can go there.
func checkLink(t *testing.T, what string, l encap.LinkAddr) {
	t.Helper()
	if !validLink(l) {
		t.Fatalf("%s to %v, which is no valid address", what, l)
	}
}

// checkQueue checks that no more waits for addr than the options of fuzzing allow.
func checkQueue(t *testing.T, addr netip.Addr, packets, octets int) {
	t.Helper()
	if packets > 3 {
		t.Fatalf("%d packets wait for %v, want at most 3", packets, addr)
	}
	if octets > 40 {
		t.Fatalf("%d octets wait for %v, want at most 40", octets, addr)
	}
}

// checkTable checks that the table is within its bounds, that its lists and indexes agree
// with its entries, and that as many packets wait as were not given back.
func checkTable(t *testing.T, tab *Table, waiting int) {
	t.Helper()
	octets, packets, rivals := 0, 0, 0
	for _, e := range tab.entries {
		if e.rival == nil {
			continue
		}
		if rivals++; e.state != StateProbe {
			t.Fatalf("%v has a rival in %v", e.ip, e.state)
		}
	}
	if rivals != tab.challenges {
		t.Fatalf("%d rivals, %d counted", rivals, tab.challenges)
	}
	for _, n := range tab.Neighbors() {
		octets += n.QueuedOctets
		packets += n.QueuedPackets
		checkQueue(t, n.IP, n.QueuedPackets, n.QueuedOctets)
		if n.QueuedPackets > 0 && n.State != StateIncomplete {
			t.Fatalf("packets wait in %v", n.State)
		}
		if n.State.Known() != validLink(n.LinkAddr) && n.State != StateFailed {
			t.Fatalf("state and address disagree: %+v", n)
		}
		if !tab.entries[n.IP].timer.Armed() {
			t.Fatalf("%v in %v waits for nothing", n.IP, n.State)
		}
	}
	switch {
	case octets != tab.QueuedOctets():
		t.Fatalf("octets is %v, want %v", octets, tab.QueuedOctets())
	case octets > 60:
		t.Fatalf("octets is %v, want at most 60", octets)
	case packets != waiting:
		t.Fatalf("packets is %v, want %v", packets, waiting)
	}
	indexed := 0
	for key := range tab.byLink {
		for _, e := range tab.at(key) {
			indexed++
			if got := e.link.Key(); got != key {
				t.Fatalf("the index of %v holds %v, which is at %v", key, e.ip, got)
			}
			if tab.entries[e.ip] != e {
				t.Fatalf("the index of %v holds %v, which is not in the table", key, e.ip)
			}
		}
	}
	listed := 0
	for _, l := range []order{tab.lru, tab.heard, tab.failed} {
		listed -= l.Len()
		for e := l.Oldest(); e != nil; e = e.Newer() {
			listed++
		}
	}
	inLists := tab.lru.Len() + tab.heard.Len() + tab.failed.Len()
	switch {
	case len(tab.entries) > 5:
		t.Fatalf("entries has %v elements, want at most 5", len(tab.entries))
	case len(tab.addrs) > 3:
		t.Fatalf("addrs has %v elements, want at most 3", len(tab.addrs))
	case listed != 0:
		t.Fatalf("listed is %v, want 0", listed)
	case inLists != len(tab.entries):
		t.Fatalf("inLists is %v, want %v", inLists, len(tab.entries))
	case indexed > len(tab.entries):
		t.Fatalf("indexed is %v, want at most %v", indexed, len(tab.entries))
	}
}

func back(t *testing.T, waiting map[string]bool, pkt []byte) {
	if !waiting[string(pkt)] {
		t.Fatalf("packet %q came back twice or never went in", pkt)
	}
	delete(waiting, string(pkt))
}

// fuzzEvent makes an event of kind k about host x; nil means time passes.
func fuzzEvent(i int, k, x byte, rest []byte) Event {
	ip4 := netip.AddrFrom4([4]byte{10, 0, 0, x % 12})
	ip6 := netip.AddrFrom16([16]byte{0: 0xfd, 15: x % 12})
	ip := ip4
	if x&0x80 != 0 {
		ip = ip6
	}
	link := encap.LinkAddr{Flags: encap.Flags(x), QPN: ib.QPN(x % 7), GID: ib.GIDFromAddr(ip6)}
	if x%5 == 0 {
		link = hosts["A"]
	}
	switch k % 17 {
	case 0:
		return Resolve{IP: ip, Packet: fmt.Appendf(nil, "%d%*s", i, x%20, "")}
	case 1:
		return Used{ip}
	case 2:
		return ConfirmedLink{link}
	case 3, 4:
		return ForgetLink{link}
	case 8:
		return AddrAdded{netip.PrefixFrom(ip, 24)}
	case 9:
		return nil
	case 10:
		if x&0x40 != 0 {
			return Insist{ip}
		}
		return AddrRemoved{ip}
	case 11:
		if x&2 != 0 {
			return SetFlags{encap.Flags(x) & encap.FlagRC}
		}
		return SetLinkAddr{encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x123 + ib.QPN(x&1), GID: hosts["A"].GID}}
	case 12:
		switch {
		case x&4 != 0:
			return OtherIs{ip, rtnl.Answering(x & 3 % 3)}
		case x&8 != 0:
			return SetRouter{x&1 != 0}
		}
		return Reannounce{}
	case 13:
		return Flush{}
	case 5, 6, 7, 14, 15:
		return fuzzMessage(k, x, ip4, ip6, link, rest)
	default:
		if x&8 != 0 {
			return DoubtedLink{link}
		}
		return ConfirmedLink{link}
	}
}

// fuzzMessage is an ARP or ND message from link, or what claims to be one.
func fuzzMessage(k, x byte, ip4, ip6 netip.Addr, link encap.LinkAddr, rest []byte) Event {
	switch k % 17 {
	case 5, 6:
		p := arp.Packet{Op: arp.Op(1 + k&1), Sender: link, SenderIP: ip4,
			TargetIP: netip.AddrFrom4([4]byte{10, 0, 0, x >> 4})}
		if k&0x40 != 0 {
			p.Target = hosts["A"]
		}
		b, _ := p.AppendBinary(nil)
		return RecvARP{From: encap.LinkAddr{}, Payload: b}
	case 7:
		b, err := nd.NewNS(ip6, netip.AddrFrom16([16]byte{0: 0xfd, 15: x >> 4}), link).AppendBinary(nil)
		if err != nil {
			return RecvND{Payload: rest}
		}
		return RecvND{From: link.Key(), Payload: b}
	case 14:
		m := nd.NA{Src: ip6, Dst: netip.AddrFrom16([16]byte{0: 0xfd, 15: x >> 4}), Target: ip6, Link: link, HasLink: x&1 == 0,
			Solicited: x&2 != 0, Override: x&4 != 0, Router: x&8 != 0}
		b, err := m.AppendBinary(nil)
		if err != nil {
			return RecvND{Payload: rest}
		}
		return RecvND{Payload: b}
	default:
		return RecvARP{Payload: rest}
	}
}

// TestRandomEvents is FuzzStep with many random sequences, for every test run.
func TestRandomEvents(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 9))
		in := make([]byte, 400)
		for i := range in {
			in[i] = byte(r.Uint32())
		}
		fuzzStep(t, in)
	}
}

// FuzzFrames reads arbitrary octets as ARP and ND.
func FuzzFrames(f *testing.F) {
	b, _ := arp.NewRequest(hosts["B"], netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1")).AppendBinary(nil)
	f.Add(b)
	b, _ = nd.NewNS(netip.MustParseAddr("fe80::2"), netip.MustParseAddr("fe80::1"), hosts["B"]).AppendBinary(nil)
	f.Add(b)
	b, _ = nd.NewAnnouncement(netip.MustParseAddr("fe80::2"), hosts["B"], true).AppendBinary(nil)
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		tab := New(Options{LinkAddr: hosts["A"], Rand: rand.New(rand.NewPCG(1, 1))})
		now := time.Unix(1, 0)
		tab.Step(nil, now, AddrAdded{netip.MustParsePrefix("10.0.0.1/24")})
		tab.Step(nil, now, AddrAdded{netip.MustParsePrefix("fe80::1/64")})
		tab.Step(nil, now, RecvARP{Payload: in})
		tab.Step(nil, now, RecvND{Payload: in})
		for _, n := range tab.Neighbors() {
			if !unicast(n.IP) || !validLink(n.LinkAddr) {
				t.Fatalf("learnt %+v from %x", n, in)
			}
		}
	})
}
