package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"ipoibcm/cmd/ipoibcmd/lab"
)

// What stress measures: the first half of a [Key].
const (
	testPing    = "ping under load"    // ms
	testPinged  = "answers under load" // share of pings that were answered
	testOverTCP = "goodput under load" // of that load, Mb/s
	testAgain   = "sent again"         // TCP segments
	testPPS     = "datagrams"          // received per second
)

// stressed are who is measured, in the order of each round.
var stressed = []string{raw, vxlan, wireguard, oursRC, oursUC, oursUD}

// A bottleneck is a narrow place on the way to the peer.
type bottleneck struct {
	name  string
	mbps  int
	queue string        // of tbf: "limit 30000" or "latency 50ms"; empty: the sender's own class
	long  time.Duration // of a transfer, at least
}

// The bottlenecks of the rows.
var (
	overload = bottleneck{name: "20 Mb/s behind the bridge", mbps: 20, queue: "latency 50ms"}
	ownClass = bottleneck{name: "20 Mb/s in the sender's own class", mbps: 20}
	slowTCP  = bottleneck{name: "20 Mb/s, 50 ms of queue", mbps: 20, queue: "latency 50ms", long: 4 * time.Second}
	midTCP   = bottleneck{name: "300 Mb/s, 10 ms of queue", mbps: 300, queue: "latency 10ms"}
	short30  = bottleneck{name: "100 Mb/s, 30 KB of queue", mbps: 100, queue: "limit 30000"}
	short60  = bottleneck{name: "100 Mb/s, 60 KB of queue", mbps: 100, queue: "limit 60000"}
)

// stressPlan returns the rows of make stress.
func (b *bench) stressPlan() (steps []step) {
	at := place{9000, family6}
	on := func(kind meshKind, who []string, name string, measure func(context.Context, *mesh) error) {
		steps = append(steps, step{name, kind.at, nil, func(ctx context.Context) error {
			return b.onMeshes(ctx, name, kind, who, measure)
		}})
	}
	add := func(name string, measure func(context.Context, *mesh) error) {
		on(meshKind{at: at, hosts: meshHosts}, stressed, name, measure)
	}
	for _, n := range []bottleneck{overload, ownClass} {
		add("bystander, "+n.name, func(ctx context.Context, m *mesh) error { return b.bystander(m, n) })
	}
	for _, n := range []bottleneck{slowTCP, midTCP, short30, short60} {
		for _, l := range []load{{streams: 1}, {streams: 8}} {
			if l.streams > 1 && n.long == 0 && n != midTCP {
				continue
			}
			name := fmt.Sprintf("%v, %s", l, n.name)
			add(name, func(ctx context.Context, m *mesh) error { return b.besideTCP(ctx, m, n, l, name) })
		}
	}
	add("fast stream "+besideSlow, b.fastBesideSlow)
	on(meshKind{at: at, hosts: meshHosts + 1}, stressed, "three senders to one host", b.threeToOne)
	for _, mtu := range []int{9000, hopMTU} {
		at := place{mtu, family6}
		on(meshKind{at: at, hosts: meshHosts, hop: hopMTU}, []string{oursRC, oursUC, oursUD},
			fmt.Sprintf("hop of %d, %v", hopMTU, at), b.overHop)
	}
	for _, p := range paths {
		add("path, "+p.name, func(ctx context.Context, m *mesh) error { return b.overPath(ctx, m, p) })
	}
	for _, mtu := range []int{9000, 1500} {
		at = place{mtu, family6}
		for _, size := range []int{64, 1400} {
			name := fmt.Sprintf("%d octets", size)
			add("datagrams of "+name+", "+at.String(),
				func(ctx context.Context, m *mesh) error { return b.datagramRate(m, size, name) })
		}
	}
	return steps
}

// stressTargets are those of the rows that were measured.
func stressTargets(r *Report) (list []target) {
	for _, p := range r.places(testPing) {
		for _, v := range r.variants(testPing, p.mtu, p.family) {
			if !strings.HasPrefix(v, "bystander") {
				list = append(list,
					target{name: fmt.Sprintf("RC's ping of raw veth's, %s, %v", v, p), num: p.key(testPing, v, oursRC),
						den: p.key(testPing, v, raw), atMost: true, bound: 1.5},
					target{name: fmt.Sprintf("RC's goodput of raw veth's, %s, %v", v, p), num: p.key(testOverTCP, v, oursRC),
						den: p.key(testOverTCP, v, raw), bound: goodputBound(v)})
				continue
			}
			for _, who := range []string{oursRC, oursUC, oursUD} {
				list = append(list, target{name: fmt.Sprintf("answers to the %s, %s, %v", v, who, p),
					num: p.key(testPinged, v, who), bound: 1})
			}
			list = append(list, target{name: fmt.Sprintf("goodput of the overloaded peer, %s, RC, %v", v, p),
				num: p.key(testOverTCP, v, oursRC), bound: 18, unit: "Mb/s"})
		}
	}
	list = slices.Concat(list, fastTargets(r), shareTargets(r), hopTargets(r), pathTargets(r))
	for _, p := range r.places(testPPS) {
		for _, v := range r.variants(testPPS, p.mtu, p.family) {
			bound := 1.0
			if v != "64 octets" {
				bound = map[bool]float64{true: 0.9, false: 0.6}[p.mtu >= 9000]
			}
			list = append(list, target{name: fmt.Sprintf("RC's datagrams of raw veth's, %s, %v", v, p),
				num: p.key(testPPS, v, oursRC), den: p.key(testPPS, v, raw), bound: bound})
		}
	}
	return list
}

func goodputBound(variant string) float64 {
	if strings.Contains(variant, "KB of queue") {
		return 0.85
	}
	return 0.9
}

// onMeshes makes one mesh for each contender, and measures them in interleaved rounds.
func (b *bench) onMeshes(ctx context.Context, name string, kind meshKind, who []string,
	measure func(context.Context, *mesh) error) error {
	var list []*mesh
	defer func() {
		for _, m := range list {
			m.close()
		}
	}()
	for _, who := range who {
		if who == wireguard && b.wireguard == "" || b.contender != "" && who != raw && who != b.contender {
			continue
		}
		b.say("%s: setting up %s", name, who)
		m, err := b.newMesh(ctx, who, kind)
		if err != nil {
			b.r.skip(fmt.Sprintf("%s, %s", who, name), "%v", err)
			continue
		}
		list = append(list, m)
	}
	for round := range b.rounds {
		for _, m := range list {
			b.say("%s, round %d of %d: %s", name, round+1, b.rounds, m.contender)
			if err := measure(ctx, m); err != nil {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				b.r.skip(fmt.Sprintf("%s, %s, one measurement", m.contender, name), "%v", err)
			}
		}
	}
	return ctx.Err()
}

// tc runs the program of that name in a host.
func tc(h *lab.Host, format string, args ...any) error {
	c := exec.Command("tc", strings.Fields(fmt.Sprintf(format, args...))...)
	if out, err := h.Output(c); err != nil {
		return fmt.Errorf("tc %s: %w: %s", strings.Join(c.Args[1:], " "), err, out)
	}
	return nil
}

// narrow puts the bottleneck on the way to the peer. The returned function removes it.
func (m *mesh) narrow(n bottleneck) (widen func() error, err error) { return m.narrowTo(meshPeer, n) }

// narrowTo puts it on the way to another host; the sender's own class is to the peer always.
func (m *mesh) narrowTo(host int, n bottleneck) (widen func() error, err error) {
	if n.queue != "" {
		port := fmt.Sprintf("port%d", host)
		// A bucket of two full frames: what is longer tbf cuts into packets.
		err := tc(m.bridge, "qdisc replace dev %s root tbf rate %dmbit burst %d %s", port, n.mbps, 2*(m.at.mtu+100), n.queue)
		return func() error { return tc(m.bridge, "qdisc del dev %s root", port) }, err
	}
	h := m.hosts[meshSender]
	for _, line := range []string{
		"qdisc replace dev eth0 root handle 1: htb default 2",
		fmt.Sprintf("class add dev eth0 parent 1: classid 1:1 htb rate %dmbit quantum 10000", n.mbps),
		"class add dev eth0 parent 1: classid 1:2 htb rate 40gbit quantum 60000",
		fmt.Sprintf("filter add dev eth0 parent 1: protocol ipv6 u32 match ip6 dst %s flowid 1:1",
			addr(meshAddr(m.at, meshPeer, false))),
	} {
		if err := tc(h, "%s", line); err != nil {
			return nil, errors.Join(err, tc(h, "qdisc del dev eth0 root"))
		}
	}
	return func() error { return tc(h, "qdisc del dev eth0 root") }, nil
}

// settle is how long a load runs before it is measured.
const settle = 500 * time.Millisecond

func (b *bench) transferTime(least time.Duration) time.Duration {
	return max(time.Duration(b.seconds)*time.Second, least*time.Duration(b.seconds)/2)
}

// bystander measures what a ping to an idle host meets while the peer is sent ten
// times what the way to it carries.
func (b *bench) bystander(m *mesh, n bottleneck) error {
	variant := "bystander, " + n.name
	widen, err := m.narrow(n)
	if err != nil {
		return err
	}
	defer widen()
	const size = 1400
	l, err := datagrams(m.hosts[meshSender], m.hosts[meshPeer], m.addrs[meshPeer], size, 200_000_000/8/size)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(settle)
	return b.pingUnder(m, l, meshBystander, variant, b.transferTime(0))
}

// pingUnder pings while a load runs, and takes down what became of both.
func (b *bench) pingUnder(m *mesh, l *background, to int, variant string, d time.Duration) error {
	var p pings
	again := 0
	if l.retrans != nil {
		again = l.retrans()
	}
	mbps, _, err := l.during(func() (err error) {
		p, err = runPings(m.hosts[meshSender], m.addrs[to], d)
		return err
	})
	if err != nil {
		return err
	}
	b.r.add(m.at.key(testPing, variant, m.contender), "ms", p.p50())
	b.r.add(m.at.key(testPinged, variant, m.contender), "of all", 1-p.lost())
	b.r.add(m.at.key(testOverTCP, variant, m.contender), "Mb/s", mbps)
	if l.retrans != nil {
		b.r.add(m.at.key(testAgain, variant, m.contender), "segments", float64(l.retrans()-again))
	}
	return nil
}

// besideTCP measures a ping to the peer beside TCP to it.
func (b *bench) besideTCP(ctx context.Context, m *mesh, n bottleneck, what load, variant string) error {
	widen, err := m.narrow(n)
	if err != nil {
		return err
	}
	defer widen()
	l, err := streams(ctx, m.hosts[meshSender], m.hosts[meshPeer], m.addrs[meshPeer], what.streams)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(2 * settle)
	return b.pingUnder(m, l, meshPeer, variant, b.transferTime(n.long))
}

// datagramRate measures how many datagrams arrive that are sent as fast as it goes.
func (b *bench) datagramRate(m *mesh, size int, variant string) error {
	l, err := datagrams(m.hosts[meshSender], m.hosts[meshPeer], m.addrs[meshPeer], size, 0)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(settle)
	_, pps, err := l.during(func() error { time.Sleep(b.transferTime(0)); return nil })
	b.r.add(m.at.key(testPPS, variant, m.contender), "per second", pps)
	return err
}
