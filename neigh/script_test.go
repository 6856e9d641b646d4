package neigh

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/script"
	"ipoibcm/rtnl"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// The states of a neighbour (RFC 4861 section 7.3.2 and appendix C). "known" is
// any of the four states with a link-layer address.
//
//	from         cause                            to          actions
//	-            Resolve                          Incomplete  query to the broadcast-GID
//	-            query by it, for us              Stale       Resolved, answer
//	Incomplete   wait over, queries left          Incomplete  query
//	Incomplete   wait over, none left             Failed      Failed, Discard...
//	Incomplete   answer for us                    Reachable   Resolved, Deliver...
//	Incomplete   any other claim, packets wait    Delay       Resolved, Deliver...
//	Reachable    reachable time over              Stale
//	known        ConfirmedLink, answer for us     Reachable   (Changed)
//	known        claim with another address       Probe       unicast query to the old one
//	known        the same with AcceptAlways       Stale       Changed
//	Probe *      answer or word of the old one    Delay       Refused
//	Probe *      two waits over, or it asks       Stale       Changed
//	Stale        Resolve, Used                    Delay       Deliver
//	Stale        unused for the stale time        -           Expired
//	Delay        delay over                       Probe       unicast query
//	Probe        interval over, probes left       Probe       unicast query, the last to all
//	Probe        interval over, none left         Failed      Expired
//	Failed       Resolve within the hold-down     Failed      Discard
//	Failed       Resolve later, or after Probe    Incomplete  query
//	Failed       any claim                        as from Incomplete
//	Failed       failed time over                 -
//	any          ForgetLink, Flush                -           Expired if known, Discard...
//
// A star stands for a Probe that a claim has led to.
//
// Of an own address:
//
//   - AddrAdded                        Optimistic  probe
//     Optimistic   interval over, probes left       Optimistic  probe
//     Optimistic   interval over, none left         Ready       AddrVerified, announcement (2)
//     Optimistic   claim or probe by another        Duplicate   Duplicate
//     Ready        claim by another                 Ready       Conflict, announcement
//     Ready        another claim within 10 s        Duplicate   Duplicate
//     Ready        AddrRemoved, contested of late   -           query
//     Duplicate    pause over, or its owner asks    Duplicate   probe
//     Duplicate    interval over, probes left       Duplicate   probe
//     Duplicate    interval over, none left         Ready       AddrVerified, announcement (2)
//     Duplicate    claim or probe while we probe    Duplicate   the next pause, twice as long
//     not Ready    Insist, once in 10 s             Ready       AddrVerified, announcement (2)
//     Ready        SetLinkAddr, Reannounce          Ready       announcement (2)
//     other        SetLinkAddr, Reannounce          Optimistic  probe
//
// 4391-9.4-1: reachability.txt
func TestScripts(t *testing.T) {
	script.Run(t, "testdata/*.txt", func(t *testing.T) script.Machine {
		return &scene{t: t, now: time.Unix(1_000_000, 0),
			o: Options{LinkAddr: hosts["A"], Rand: rand.New(rand.NewPCG(1, 2)), DADProbes: -1}}
	})
}

// Hosts of the scripts. A is ours; B' is B after a restart; BX is B with both
// connected modes; Z is an address nobody can have.
var hosts = map[string]encap.LinkAddr{
	"A":  {Flags: encap.FlagRC, QPN: 0x123, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::a"))},
	"A'": {Flags: encap.FlagRC, QPN: 0x124, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::a"))},
	"B":  {Flags: encap.FlagRC, QPN: 0x456, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::b"))},
	"B'": {Flags: encap.FlagRC, QPN: 0x457, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::b"))},
	"BX": {Flags: encap.FlagRC | encap.FlagUC, QPN: 0x456, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::b"))},
	"C":  {QPN: 0x789, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::c"))},
	"Z":  {QPN: ib.QPNMulticast, GID: ib.GIDFromAddr(netip.MustParseAddr("ff02::1"))},
	"-":  {},
}

func hostName(l encap.LinkAddr) string {
	for n, h := range hosts {
		if h == l {
			return n
		}
	}
	for n, h := range hosts { // destinations made from a packet's source have no flags
		if h.Key() == l.Key() && n != "BX" {
			return n + "(no flags)"
		}
	}
	return l.String()
}

// A scene is a script in progress. Lines "options" come before all others.
type scene struct {
	t   *testing.T
	o   Options
	tab *Table
	now time.Time
}

// Do carries out one line.
func (s *scene) Do(line string) ([]string, error) {
	f := strings.Fields(line)
	if f[0] == "options" {
		for _, kv := range f[1:] {
			option(s.t, &s.o, kv)
		}
		return nil, nil
	}
	s.open()
	return s.do(f), nil
}

// Pass lets time pass, with a Wake at each deadline.
func (s *scene) Pass(d time.Duration) []string {
	s.open()
	return s.advance(s.now.Add(d))
}

func (s *scene) open() {
	if s.tab == nil {
		s.tab = New(s.o)
	}
}

func option(t *testing.T, o *Options, kv string) {
	k, v, _ := strings.Cut(kv, "=")
	n := 0
	fmt.Sscan(v, &n)
	numbers := map[string]*int{"dad": &o.DADProbes, "packets": &o.MaxQueuedPackets, "octets": &o.MaxQueuedOctets,
		"total": &o.MaxTotalOctets, "neighbors": &o.MaxNeighbors, "addrs": &o.MaxAddrs, "rate": &o.RequestRate,
		"sourcerate": &o.SourceRate}
	if number, ok := numbers[k]; ok {
		*number = n
		return
	}
	switch k {
	case "failed":
		o.FailedTime = time.Duration(n) * time.Second
	case "ask":
		o.AskOthers = n != 0
	case "always":
		o.AcceptAlways = n != 0
	case "link":
		o.LinkAddr = hosts[v]
	default:
		t.Fatalf("unknown option %s", kv)
	}
}

// do carries out one line and returns what came out.
func (s *scene) do(f []string) (lines []string) {
	addr := func(i int) netip.Addr { return netip.MustParseAddr(f[i]) }
	var ev Event
	switch f[0] {
	case "addr":
		ev = AddrAdded{netip.MustParsePrefix(f[1])}
	case "unaddr":
		ev = AddrRemoved{addr(1)}
	case "resolve":
		r := Resolve{IP: addr(1)}
		if len(f) > 2 {
			r.Packet = []byte(f[2])
		}
		ev = r
	case "otheris":
		ev = OtherIs{addr(1), map[string]rtnl.Answering{"local": rtnl.AnswerLocal, "proxy": rtnl.AnswerProxy}[f[2]]}
	case "insist":
		ev = Insist{addr(1)}
	case "used":
		ev = Used{addr(1)}
	case "confirmlink":
		ev = ConfirmedLink{hosts[f[1]]}
	case "doubtlink":
		ev = DoubtedLink{hosts[f[1]]}
	case "hint": // nothing but these
		h := map[netip.Addr]encap.LinkAddr{}
		for i := 1; i+1 < len(f); i += 2 {
			h[addr(i)] = hosts[f[i+1]]
		}
		ev = SetHints{h}
	case "forgetlink":
		ev = ForgetLink{hosts[f[1]]}
	case "flush":
		ev = Flush{}
	case "setlink":
		ev = SetLinkAddr{hosts[f[1]]}
	case "setflags":
		ev = SetFlags{map[string]encap.Flags{"RC": encap.FlagRC, "none": 0}[f[1]]}
	case "router":
		ev = SetRouter{f[1] == "on"}
	case "reannounce":
		ev = Reannounce{}
	case "wake":
		ev = Wake{}
	case "show":
		return s.show()
	case "drops":
		n := s.tab.Counters()
		for d := range numDrops {
			if n.Drops[d] > 0 {
				lines = append(lines, fmt.Sprintf("%s %d", d, n.Drops[d]))
			}
		}
		return lines
	case "<":
		ev = s.frame(f[1:])
	default:
		s.t.Fatalf("unknown line %q", f)
	}
	return s.print(s.tab.Step(nil, s.now, ev))
}

func (s *scene) advance(to time.Time) (lines []string) {
	for {
		d := s.tab.Deadline()
		if d.IsZero() || d.After(to) {
			break
		}
		at := d.Sub(s.now)
		for _, l := range s.print(s.tab.Step(nil, d, Wake{})) {
			lines = append(lines, fmt.Sprintf("+%v %s", at.Round(time.Millisecond), l))
		}
	}
	s.now = to
	return lines
}

// frame builds what another host sends: "arp request B 10.0.0.2 10.0.0.1",
// "arp reply B 10.0.0.2 10.0.0.1 A", "ns B fe80::2 fe80::1", "dad B fe80::1",
// "na B fe80::2 fe80::1 SO". "nolink" leaves the option out, "from=X" changes the
// source of the UD packet, "hex" is an ARP packet as it is.
func (s *scene) frame(f []string) Event {
	opts := map[string]bool{}
	from := encap.LinkAddr{}
	if len(f) > 1 {
		from = hosts[strings.TrimSuffix(f[1], "(no flags)")].Key()
	}
	for _, o := range f {
		opts[o] = true
		if n, ok := strings.CutPrefix(o, "from="); ok {
			from = hosts[n].Key()
		}
	}
	addr := func(i int) netip.Addr { return netip.MustParseAddr(f[i]) }
	var b []byte
	var err error
	switch f[0] {
	case "arp":
		from = hosts[f[2]].Key()
		for _, o := range f {
			if n, ok := strings.CutPrefix(o, "from="); ok {
				from = hosts[n].Key()
			}
		}
		p := arp.Packet{Op: arp.Request, Sender: hosts[f[2]], SenderIP: addr(3), TargetIP: addr(4)}
		if f[1] == "reply" {
			p.Op, p.Target = arp.Reply, hosts[f[5]]
		}
		b, err = p.AppendBinary(nil)
		if err != nil {
			s.t.Fatal(err)
		}
		return RecvARP{From: from, Payload: b}
	case "hex":
		b, err = hex.DecodeString(f[1])
		if err != nil {
			s.t.Fatal(err)
		}
		return RecvARP{Payload: b}
	case "ns":
		m := nd.NewNS(addr(2), addr(3), hosts[f[1]])
		if opts["unicast"] {
			m = nd.NewProbe(addr(2), addr(3), hosts[f[1]])
		}
		if opts["nolink"] {
			m.Link, m.HasLink = encap.LinkAddr{}, false
		}
		b, err = m.AppendBinary(nil)
	case "dad":
		b, err = nd.NewDAD(addr(2)).AppendBinary(nil)
	case "na":
		m := nd.NA{Src: addr(2), Dst: addr(3), Target: addr(2), Link: hosts[f[1]], HasLink: !opts["nolink"]}
		if len(f) > 4 {
			m.Solicited, m.Override, m.Router = strings.Contains(f[4], "S"), strings.Contains(f[4], "O"),
				strings.Contains(f[4], "R")
		}
		if !m.HasLink {
			m.Link = encap.LinkAddr{}
		}
		b, err = m.AppendBinary(nil)
	default:
		s.t.Fatalf("unknown frame %q", f)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return RecvND{From: from, Payload: b}
}

func (s *scene) print(as []Action) (lines []string) {
	for _, a := range as {
		var l string
		switch a := a.(type) {
		case SendUD:
			l = fmt.Sprintf("> %s %s", dest(a.To), payload(s.t, a))
		case Resolved:
			l = fmt.Sprintf("resolved %s %s", a.IP, hostName(a.LinkAddr))
		case Changed:
			l = fmt.Sprintf("changed %s %s to %s", a.IP, hostName(a.Old), hostName(a.New))
			if a.Old.Key() == a.New.Key() {
				l += " flags only"
			}
		case Expired:
			l = fmt.Sprintf("expired %s %s: %s", a.IP, hostName(a.LinkAddr), a.Reason)
		case Deliver:
			l = fmt.Sprintf("deliver %s %s %s", a.IP, hostName(a.LinkAddr), a.Packet)
		case Failed:
			l = fmt.Sprintf("failed %s", a.IP)
		case Discard:
			l = fmt.Sprintf("discard %s %s: %s", a.IP, a.Packet, a.Reason)
		case AddrVerified:
			l = fmt.Sprintf("verified %s", a.IP)
		case Duplicate:
			l = fmt.Sprintf("duplicate %s %s", a.IP, hostName(a.By))
			if a.Yielded {
				l += " yielded"
			}
		case Conflict:
			l = fmt.Sprintf("conflict %s %s", a.IP, hostName(a.By))
		case AskOther:
			l = fmt.Sprintf("ask %s", a.IP)
		case Refused:
			l = fmt.Sprintf("refused %s: %s at %s", a.Reason, a.IP, hostName(a.Claimed))
		default:
			s.t.Fatalf("unknown action %T", a)
		}
		lines = append(lines, l)
	}
	return lines
}

func dest(d Dest) string {
	switch {
	case d.Broadcast:
		return "broadcast"
	case d.Group.IsValid():
		return "group " + d.Group.String()
	}
	return hostName(d.LinkAddr)
}

func payload(t *testing.T, a SendUD) string {
	if a.EtherType == encap.ARP {
		var p arp.Packet
		if err := p.UnmarshalBinary(a.Payload); err != nil {
			t.Fatalf("we sent ARP we cannot read: %v", err)
		}
		return fmt.Sprintf("ARP %s %s %s to %s %s", p.Op, hostName(p.Sender), p.SenderIP, hostName(p.Target), p.TargetIP)
	}
	v6, err := ip.AsV6(a.Payload)
	if err != nil {
		t.Fatalf("we sent no ND: err is %v, want nil", err)
	}
	expect.MustEqual(t, v6.HopLimit(), 255, "we sent no ND: HopLimit")
	expect.MustEqual(t, a.EtherType, encap.IPv6, "we sent no ND: EtherType")
	if nd.KindOf(a.Payload) == nd.NeighborSolicitation {
		var m nd.NS
		if err := m.UnmarshalBinary(a.Payload); err != nil {
			t.Fatalf("we sent an NS we cannot read: %v", err)
		}
		return fmt.Sprintf("NS %s > %s for %s link %s", m.Src, m.Dst, m.Target, hostName(m.Link))
	}
	var m nd.NA
	if err := m.UnmarshalBinary(a.Payload); err != nil {
		t.Fatalf("we sent an NA we cannot read: %v", err)
	}
	flags := ""
	for _, x := range []struct {
		on bool
		s  string
	}{{m.Router, "R"}, {m.Solicited, "S"}, {m.Override, "O"}} {
		if x.on {
			flags += x.s
		}
	}
	return fmt.Sprintf("NA %s > %s for %s link %s %s", m.Src, m.Dst, m.Target, hostName(m.Link), flags)
}

func (s *scene) show() (lines []string) {
	for _, a := range s.tab.Addrs() {
		lines = append(lines, fmt.Sprintf("own %s %s by %s conflicts %d", a.Prefix, a.State, hostName(a.By), a.Conflicts))
	}
	for _, n := range s.tab.Neighbors() {
		l := fmt.Sprintf("%s %s %s", n.IP, hostName(n.LinkAddr), n.State)
		if n.Router {
			l += " router"
		}
		if n.QueuedPackets > 0 {
			l += fmt.Sprintf(" waiting %d/%d", n.QueuedPackets, n.QueuedOctets)
		}
		if !n.Lost.IsZero() {
			l += fmt.Sprintf(" lost for %v", s.now.Sub(n.Lost).Round(time.Millisecond))
		}
		lines = append(lines, l)
	}
	return lines
}
