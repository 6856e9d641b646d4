package fib_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/fib/fibtest"
	"ipoibcm/internal/script"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/ip/iptest"
)

// TestScripts runs testdata/*.txt against a model of the kernel, which answers at
// once unless it is told to wait. Input is, with X an address and P a prefix:
//
//	up, down, mtu N, addr P, unaddr P       the device
//	moved                                   it went into another namespace, where nothing is
//	route P [via X] [dev other] [metric N] [table N] [mtu N], unroute …, rule from|to P table N, norules
//	packet X [from X]                       a packet that the data path could not send
//	stale X                                 the data path used an old answer
//	hop X conn N|ud MTU, gone X             how a neighbour is reached
//	toobig                                  ICMP told the kernel of a smaller MTU
//	ud N                                    datagrams have N octets from now on
//	wait, answer                            the kernel is slow; it answers
//	refuse, accept                          the kernel refuses changes; it takes them
//	theirs P [mtu N]                        somebody else adds a host route by the device
//
// The life of a host route, and the script that shows each line:
//
//	from     cause               to        SetRoute             script
//	-        hop conn            busy      ask, add             host
//	busy     a guest             there                          host
//	busy     no guest            refused                        guest
//	busy     foreign change      doubted   once Done            stale
//	there    another MTU         busy      its metrics          host
//	there    no conn             busy      remove               host
//	there    foreign change      busy      remove, ask, add     guest
//	there    removed by others   busy      ask, add             host
//	refused  foreign change      busy      ask, add             guest
//	any      device down         -         (the kernel's)       down
func TestScripts(t *testing.T) {
	script.Run(t, "testdata/*.txt", func(*testing.T) script.Machine { return newBench() })
}

// A bench is the machine with a kernel.
type bench struct {
	t    *fib.Table
	k    *fibtest.Kernel
	now  time.Time
	slow bool
	held []fib.Event
	out  []string
	seen func(fib.Action) // told of each action
}

func newBench() *bench {
	b := &bench{t: fib.New(fib.Options{}), k: fibtest.New(), now: time.Unix(1000, 0)}
	b.feed(b.k.Start())
	b.out = nil
	return b
}

func (b *bench) Pass(d time.Duration) []string {
	b.out = nil
	end := b.now.Add(d)
	for at := b.t.Deadline(); !at.IsZero() && !at.After(end); at = b.t.Deadline() {
		b.now = at
		b.feed([]fib.Event{fib.Wake{}})
	}
	b.now = end
	return b.out
}

// feed steps the machine with events, and with what its actions lead to.
func (b *bench) feed(evs []fib.Event) {
	for n := 0; len(evs) > 0; n++ {
		if n > 10_000 {
			panic(fmt.Sprintf("the machine has no rest: %T %+v", evs[0], evs[0]))
		}
		ev := evs[0]
		evs = evs[1:]
		for _, a := range b.t.Step(nil, b.now, ev) {
			if b.seen != nil {
				b.seen(a)
			}
			if s := show(a); s != "" {
				b.out = append(b.out, s)
			}
			b.k.Told = func(s string) { b.out = append(b.out, s) }
			done, _ := b.k.Do(a)
			if b.slow {
				b.held = append(b.held, done...)
			} else {
				evs = append(evs, done...)
			}
		}
	}
}

func show(a fib.Action) string {
	switch a := a.(type) {
	case fib.Forward:
		dst, _ := ip.Dst(a.Packet)
		return fmt.Sprintf("packet to %v goes to %v", dst, a.Hop)
	case fib.Lookup:
		if a.Src.IsValid() {
			return fmt.Sprintf("? %s, expected to be the next hop from %v", flow(a.Flow), a.Src)
		}
		return "? " + flow(a.Flow)
	case fib.SetPath:
		if a.Path == (nexthop.Path{}) {
			return fmt.Sprintf("nopath %v", a.Hop)
		}
		return fmt.Sprintf("path %v %v mtu %d", a.Hop, a.Path.Kind, a.Path.MTU)
	case fib.SetDest:
		if !a.Hop.IsValid() {
			return "nodest " + flow(a.Flow)
		}
		return fmt.Sprintf("dest %s by %v", flow(a.Flow), a.Hop)
	case fib.StaleDest:
		if !a.Flow.Dst.IsValid() {
			return "stale all"
		}
		return "stale " + flow(a.Flow)
	case fib.ResetDests:
		return fmt.Sprintf("reset, by %v", a.Fields)
	case fib.SetRoute:
		return "" // told by the kernel
	case fib.SetRule:
		if a.New == (rtnl.Rule{}) {
			return "norule " + rule(a.Old)
		}
		return "rule " + rule(a.New)
	case fib.FlushExceptions:
		return "flush"
	case fib.Note:
		return "note " + a.Text
	case fib.Device:
		switch a.Kind {
		case rtnl.AddrSet:
			return fmt.Sprintf("address %v", a.Addr.Prefix)
		case rtnl.AddrGone:
			return fmt.Sprintf("no address %v", a.Addr.Prefix)
		}
		return fmt.Sprintf("device up %v mtu %d", a.Link.Up, a.Link.MTU)
	}
	return strings.TrimPrefix(fmt.Sprintf("%T", a), "fib.")
}

func rule(r rtnl.Rule) string { return fmt.Sprintf("%v oif %s table %d", r.To, r.OIF, r.Table) }

func flow(f rtnl.Flow) string {
	if f.Src.IsValid() {
		return fmt.Sprintf("%v from %v", f.Dst, f.Src)
	}
	return f.Dst.String()
}

func (b *bench) Do(line string) ([]string, error) {
	b.out = nil
	evs, err := b.events(strings.Fields(line))
	b.feed(evs)
	return b.out, err
}

func (b *bench) events(w []string) (evs []fib.Event, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	switch w[0] {
	case "packet":
		return b.packet(w)
	case "stale":
		return []fib.Event{fib.Stale{Flow: rtnl.Flow{Dst: netip.MustParseAddr(w[1])}}}, nil
	case "hop":
		p := nexthop.Path{Kind: nexthop.PathUD, MTU: number(w[len(w)-1])}
		if w[2] == "conn" {
			p.Kind, p.Conn = nexthop.PathConn, nexthop.Conn(number(w[3]))
		}
		return []fib.Event{fib.SetHop{Addr: netip.MustParseAddr(w[1]), Path: p}}, nil
	case "gone":
		return []fib.Event{fib.SetHop{Addr: netip.MustParseAddr(w[1])}}, nil
	case "toobig":
		return []fib.Event{fib.TooBig{}}, nil
	case "ud":
		return []fib.Event{fib.SetUDMTU{MTU: number(w[1])}}, nil
	case "wait":
		b.slow = true
		return nil, nil
	case "answer":
		b.slow = false
		evs, b.held = b.held, nil
		return evs, nil
	case "refuse":
		b.k.Refuse = errors.New("no buffer space")
		return nil, nil
	case "accept":
		b.k.Refuse = nil
		return nil, nil
	}
	return b.kernelEvents(w)
}

func number(s string) int { n, _ := strconv.Atoi(s); return n }

// argument returns the word after name, if it is there.
func argument(w []string, name string) string {
	for i := 1; i+1 < len(w); i++ {
		if w[i] == name {
			return w[i+1]
		}
	}
	return ""
}

// packet is a packet from the TUN.
func (b *bench) packet(w []string) ([]fib.Event, error) {
	src := "10.0.0.1"
	if from := argument(w, "from"); from != "" {
		src = from
	}
	dst := netip.MustParseAddr(w[1])
	if dst.Is6() {
		src = "fd00::1"
	}
	pkt, err := iptest.Echo{Src: netip.MustParseAddr(src), Dst: dst}.AppendBinary(nil)
	if err != nil {
		return nil, err
	}
	f, _ := ip.FlowOf(pkt, b.t.Fields())
	return []fib.Event{fib.Resolve{Flow: f, Packet: pkt}}, nil
}

// kernelEvents changes the kernel as w says, and returns what it tells of that.
func (b *bench) kernelEvents(w []string) (evs []fib.Event, err error) {
	arg := func(name string) string { return argument(w, name) }
	switch w[0] {
	case "up", "down":
		return b.k.Up(w[0] == "up"), nil
	case "moved":
		evs = b.k.Up(false)
		gone := b.k.Link
		gone.Gone = true
		evs = append(evs, fib.Host{Event: rtnl.Event{Kind: rtnl.LinkChange, Link: gone}})
		b.k = fibtest.New()
		return append(evs, b.k.Start()...), nil
	case "mtu":
		return b.k.MTU(number(w[1])), nil
	case "addr":
		return b.k.AddAddr(netip.MustParsePrefix(w[1])), nil
	case "unaddr":
		return b.k.DelAddr(netip.MustParsePrefix(w[1])), nil
	case "route", "unroute", "theirs":
		r := fibtest.Route{Route: rtnl.Route{Dst: netip.MustParsePrefix(w[1]), Type: rtnl.Unicast, Protocol: rtnl.ProtoBoot,
			Metric: uint32(number(arg("metric"))), Table: number(arg("table")), MTU: number(arg("mtu"))}, OIF: fibtest.Index}
		if arg("dev") != "" {
			r.OIF = 3
		}
		if via := arg("via"); via != "" {
			r.Via = netip.MustParseAddr(via)
		}
		if w[0] == "unroute" {
			return b.k.DelRoute(r), nil
		}
		return b.k.AddRoute(r), nil
	case "rule":
		r := fibtest.Rule{Table: number(arg("table"))}
		if from := arg("from"); from != "" {
			r.From = netip.MustParsePrefix(from)
		}
		if to := arg("to"); to != "" {
			r.To = netip.MustParsePrefix(to)
		}
		return b.k.SetRules(r), nil
	case "norules":
		return b.k.SetRules(), nil
	case "lose": // somebody removes a host route of ours
		for key, r := range b.k.Own {
			if r.Dst.Addr() == netip.MustParseAddr(w[1]) {
				delete(b.k.Own, key)
				return []fib.Event{fib.Host{Event: rtnl.Event{Kind: rtnl.RouteGone, Route: r}}}, nil
			}
		}
	}
	return nil, fmt.Errorf("unknown input %q", w)
}
