package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"ipoibcm/internal/lab"
)

// What stress measures: the Test of a [Key].
const (
	testPing    = "ping under load"    // ms
	testPinged  = "answers under load" // share of these pings that were answered
	testOverTCP = "goodput under load" // of the load itself, Mb/s
	testAgain   = "sent again"         // share of the load that TCP and the QP sent again, %
	testQPAgain = "sent again by QP"   // share of the queue pair's packets, %
	testPPS     = "datagrams"          // received per second
)

// Groups of contenders. Judged ones are measured in every round, the others beside them in the first
// round only, so that all rows fit into ten minutes.
var (
	ours     = []string{oursRC, oursUC, oursUD}
	judgedRC = []string{raw, oursRC}
	besideRC = []string{vxlan, wireguard}
)

// A row is one measurement of several contenders, made in interleaved rounds.
type row struct {
	name           string
	kind           meshKind
	judged, others []string
	rounds         int        // of the judged; zero means as many as the run has
	narrow         bottleneck // on the way to a host; without a name there is none
	narrowTo       int        // that host; zero means the peer
	measure        func(context.Context, *mesh) error
}

// A bottleneck is a narrow place on the way to the peer.
type bottleneck struct {
	name  string
	mbps  int
	queue string        // argument of tbf, "limit 30000" or "latency 50ms"; empty means the sender's own class
	long  time.Duration // how long a transfer takes at least
}

// The bottlenecks of the rows.
var (
	overload = bottleneck{name: "20 Mb/s behind the bridge", mbps: 20, queue: "latency 50ms"}
	ownClass = bottleneck{name: "20 Mb/s in the sender's own class", mbps: 20}
	slowTCP  = bottleneck{name: "20 Mb/s, 50 ms of queue", mbps: 20, queue: "latency 50ms", long: 3 * time.Second}
	midTCP   = bottleneck{name: "300 Mb/s, 10 ms of queue", mbps: 300, queue: "latency 10ms"}
	short30  = bottleneck{name: "100 Mb/s, 30 KB of queue", mbps: 100, queue: "limit 30000"}
	short60  = bottleneck{name: "100 Mb/s, 60 KB of queue", mbps: 100, queue: "limit 60000"}
)

// stressPlan returns the rows of make stress as steps. Rows with the same kind of mesh follow each other.
func (b *bench) stressPlan() (steps []step) {
	for _, r := range slices.Concat(b.sharedRows(), b.datagramRows(1500), b.hopRows(), b.pathRows()) {
		steps = append(steps, step{r.name, r.kind.at, nil, func(ctx context.Context) error { return b.measureRow(ctx, r) }})
	}
	return steps
}

// sharedRows returns the rows of four hosts on an underlay with an MTU of 9000.
func (b *bench) sharedRows() (rows []row) {
	kind := meshKind{at: place{9000, family6}, size: meshHosts + 1}
	for _, n := range []bottleneck{overload, ownClass} {
		name := "bystander, " + n.name
		rows = append(rows, row{name: name, judged: slices.Concat([]string{raw}, ours),
			others: []string{vxlan, wireguard}, narrow: n,
			measure: func(_ context.Context, m *mesh) error { return b.bystander(m, m.addrs[meshPeer], name) }})
	}
	rows = append(rows, row{name: multicastVariant, judged: slices.Concat([]string{raw}, ours), others: []string{vxlan},
		narrow:  overload,
		measure: func(_ context.Context, m *mesh) error { return b.bystander(m, multicastGroup, multicastVariant) }})
	for _, n := range []bottleneck{slowTCP, midTCP, short30, short60} {
		for _, l := range []load{{streams: 1}, {streams: 8}} {
			if l.streams > 1 && n.long == 0 && n != midTCP {
				continue
			}
			name := fmt.Sprintf("%v, %s", l, n.name)
			rows = append(rows, row{name: name, judged: judgedRC, others: besideRC, narrow: n,
				measure: func(ctx context.Context, m *mesh) error { return b.besideTCP(ctx, m, n.long, l, name) }})
		}
	}
	rows = append(rows,
		row{name: "fast stream " + besideSlow, judged: judgedRC, others: besideRC, narrow: slowTCP,
			measure: b.fastBesideSlow},
		row{name: "three senders to one host", judged: judgedRC, others: besideRC, narrow: midTCP, narrowTo: meshTarget,
			measure: b.threeToOne},
		row{name: besideBusy, judged: []string{raw, wireguard, oursRC},
			rounds: busyRounds, measure: b.besideBusy})
	for i := range rows {
		rows[i].kind = kind
	}
	for _, r := range b.datagramRows(kind.at.mtu) {
		r.kind = kind
		rows = append(rows, r)
	}
	return rows
}

// datagramRows returns the rows of datagrams that are sent as fast as possible.
func (b *bench) datagramRows(mtu int) (rows []row) {
	at := place{mtu, family6}
	for _, size := range []int{64, 1400} {
		name := fmt.Sprintf("%d octets", size)
		rows = append(rows, row{name: "datagrams of " + name + ", " + at.String(), kind: meshKind{at: at, size: meshHosts},
			judged: judgedRC, others: []string{vxlan, wireguard, oursUC, oursUD},
			measure: func(_ context.Context, m *mesh) error { return b.datagramRate(m, size, name) }})
	}
	return rows
}

// stressTargets returns the targets of the rows that were measured.
func stressTargets(r *Report) (list []target) {
	for _, p := range r.places(testPing) {
		for _, v := range r.variants(testPing, p.mtu, p.family) {
			if !strings.HasPrefix(v, "bystander") {
				list = append(list,
					target{name: fmt.Sprintf("RC's ping of raw veth's, %s, %v", v, p), num: p.key(testPing, v, oursRC),
						den: p.key(testPing, v, raw), atMost: true, bound: 1.5},
					target{name: fmt.Sprintf("RC's goodput of raw veth's, %s, %v", v, p), num: p.key(testOverTCP, v, oursRC),
						den: p.key(testOverTCP, v, raw), bound: goodputBound(v)})
				if strings.Contains(v, shortQueue) {
					list = append(list, target{name: fmt.Sprintf("of RC's packets sent again, %s, %v", v, p),
						num: p.key(testAgain, v, oursRC), atMost: true, bound: 3, unit: "%"})
				}
				continue
			}
			list = append(list, bystanderTargets(p, v)...)
		}
	}
	list = slices.Concat(list, fastTargets(r), shareTargets(r), busyTargets(r), hopTargets(r), pathTargets(r))
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

// bystanderTargets returns the targets of one row with a bystander. For RC, UC and UD, none of the pings to
// the bystander is lost, and their median is at most twice raw veth's plus 0.5 ms. Unless the load is
// multicast, RC's goodput to the overloaded peer is at least 18 Mb/s.
func bystanderTargets(p place, v string) (list []target) {
	for _, who := range ours {
		list = append(list,
			target{name: fmt.Sprintf("answers to the %s, %s, %v", v, who, p), num: p.key(testPinged, v, who), bound: 1},
			target{name: fmt.Sprintf("ping beyond twice raw veth's, %s, %s, %v", v, who, p), num: p.key(testPing, v, who),
				den: p.key(testPing, v, raw), less: 2, atMost: true, bound: 0.5, unit: "ms"})
	}
	if v != multicastVariant {
		list = append(list, target{name: fmt.Sprintf("goodput of the overloaded peer, %s, RC, %v", v, p),
			num: p.key(testOverTCP, v, oursRC), bound: 18, unit: "Mb/s"})
	}
	return list
}

// shortQueue is part of the name of a bottleneck whose queue holds few octets.
const shortQueue = "KB of queue"

func goodputBound(variant string) float64 {
	if strings.Contains(variant, shortQueue) {
		return 0.85
	}
	return 0.9
}

// meshesOf returns a mesh for each of a row's contenders, in the order of [contenders]. It keeps the
// meshes for the next rows, until a row has another kind of mesh.
func (b *bench) meshesOf(ctx context.Context, r row) (list []*mesh) {
	if b.meshKind != r.kind {
		b.closeMeshes()
		b.meshKind, b.meshes = r.kind, map[string]*mesh{}
	}
	for _, who := range contenders {
		if !slices.Contains(r.judged, who) && !slices.Contains(r.others, who) || who == wireguard && b.wireguard == "" ||
			b.contender != "" && who != raw && who != b.contender {
			continue
		}
		m, tried := b.meshes[who]
		if !tried {
			b.say("%s: setting up %s", r.name, who)
			var err error
			if m, err = b.newMesh(ctx, who, r.kind); err != nil {
				b.r.skip(fmt.Sprintf("%s, from %q on, for as long as hosts are the same", who, r.name), "%v", err)
				m = nil
			}
			b.meshes[who] = m
		}
		if m != nil {
			list = append(list, m)
		}
	}
	return list
}

// closeMeshes closes the meshes that [bench.meshesOf] has kept.
func (b *bench) closeMeshes() {
	for _, who := range contenders {
		if m := b.meshes[who]; m != nil {
			m.close()
		}
	}
	b.meshes = nil
}

// measureRow measures the contenders of a row in interleaved rounds.
func (b *bench) measureRow(ctx context.Context, r row) error {
	list := b.meshesOf(ctx, r)
	rounds := cmp.Or(r.rounds, b.rounds)
	for round := range rounds {
		for _, m := range list {
			if round > 0 && !slices.Contains(r.judged, m.contender) {
				continue
			}
			b.say("%s, round %d of %d: %s", r.name, round+1, rounds, m.contender)
			if err := r.once(ctx, m); err != nil {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				b.r.skip(fmt.Sprintf("%s, %s, one measurement", m.contender, r.name), "%v", err)
			}
		}
	}
	return ctx.Err()
}

// once makes one measurement, through the bottleneck of the row.
func (r row) once(ctx context.Context, m *mesh) error {
	if r.narrow.name != "" {
		widen, err := m.narrow(cmp.Or(r.narrowTo, meshPeer), r.narrow)
		if err != nil {
			return err
		}
		defer widen()
	}
	return r.measure(ctx, m)
}

// tc runs the program tc in a host.
func tc(h *lab.Host, format string, args ...any) error {
	c := exec.Command("tc", strings.Fields(fmt.Sprintf(format, args...))...)
	if out, err := h.Output(c); err != nil {
		return fmt.Errorf("tc %s: %w: %s", strings.Join(c.Args[1:], " "), err, out)
	}
	return nil
}

// narrow puts the bottleneck on the way to a host. The returned function removes it. A bottleneck in
// the sender's own class is always on the way to the peer.
func (m *mesh) narrow(host int, n bottleneck) (widen func() error, err error) {
	if n.queue != "" {
		port := fmt.Sprintf("port%d", host)
		// The bucket has two full frames: tbf cuts a longer batch into packets.
		err := tc(m.bridge, "qdisc replace dev %s root tbf rate %dmbit burst %d %s", port, n.mbps, 2*(m.at.mtu+100), n.queue)
		return func() error { return tc(m.bridge, "qdisc del dev %s root", port) }, err
	}
	h := m.hosts[meshSender]
	for _, line := range []string{
		"qdisc replace dev eth0 root handle 1: htb default 2",
		fmt.Sprintf("class add dev eth0 parent 1: classid 1:1 htb rate %dmbit quantum 10000", n.mbps),
		"class add dev eth0 parent 1: classid 1:2 htb rate 40gbit quantum 60000",
		fmt.Sprintf("filter add dev eth0 parent 1: protocol ipv6 u32 match ip6 dst %s flowid 1:1",
			addr(m.underlay(meshPeer))),
	} {
		if err := tc(h, "%s", line); err != nil {
			return nil, errors.Join(err, tc(h, "qdisc del dev eth0 root"))
		}
	}
	return func() error { return tc(h, "qdisc del dev eth0 root") }, nil
}

// settle is how long most loads run before they are measured.
const settle = 500 * time.Millisecond

func (b *bench) transferTime(least time.Duration) time.Duration {
	return max(time.Duration(b.seconds)*time.Second, least)
}

// multicastGroup is the group to which multicast is sent. Its scope is the link, so that the zone names
// the device.
var multicastGroup = netip.MustParseAddr("ff12::4791")

// multicastVariant names the row whose load is multicast.
var multicastVariant = "bystander, multicast to " + overload.name

// bystander measures pings to an idle host while the sender sends to dst ten times as
// much as the way to the peer carries. dst is the peer's address, or a group that the
// peer has joined.
func (b *bench) bystander(m *mesh, dst netip.Addr, variant string) error {
	const size = 1400
	l, err := datagrams(m.hosts[meshSender], m.hosts[meshPeer], m.device(), dst, size,
		200_000_000/8/size)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(settle)
	return b.pingUnder(m, l, meshBystander, variant, b.transferTime(0))
}

// pingUnder pings a host while a load runs, and adds the results of both to the report.
func (b *bench) pingUnder(m *mesh, l *background, to int, variant string, d time.Duration) error {
	var p pings
	before := m.resent(l)
	mbps, _, err := l.during(func() (err error) {
		p, err = runPings(m.hosts[meshSender], m.addrs[to], d)
		return err
	})
	if err != nil {
		return err
	}
	b.r.add(m.key(testPing, variant), "ms", p.p50())
	b.r.add(m.key(testPinged, variant), "of all", 1-p.lost())
	b.r.add(m.key(testOverTCP, variant), "Mb/s", mbps)
	if l.resent != nil {
		after := m.resent(l)
		b.r.add(m.key(testAgain, variant), "%", after.since(before))
		if after.qpSent > before.qpSent {
			b.r.add(m.key(testQPAgain, variant), "%", after.qpSince(before))
		}
	}
	return nil
}

// besideTCP measures a ping to the peer beside TCP to it, for the time long at least.
func (b *bench) besideTCP(ctx context.Context, m *mesh, long time.Duration, what load, variant string) error {
	l, err := m.streams(ctx, meshSender, meshPeer, what.streams)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(2 * settle)
	return b.pingUnder(m, l, meshPeer, variant, b.transferTime(long))
}

// lateGoodput measures one TCP stream to the peer, which began at the time late before.
func (b *bench) lateGoodput(ctx context.Context, m *mesh, test, variant string, late time.Duration) error {
	l, err := m.streams(ctx, meshSender, meshPeer, 1)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(late)
	mbps, _, err := l.during(func() error { time.Sleep(b.transferTime(0)); return nil })
	if err != nil {
		return err
	}
	b.r.add(m.key(test, variant), "Mb/s", mbps)
	return nil
}

// datagramRate sends datagrams as fast as possible and measures how many arrive.
func (b *bench) datagramRate(m *mesh, size int, variant string) error {
	l, err := datagrams(m.hosts[meshSender], m.hosts[meshPeer], m.device(), m.addrs[meshPeer], size, 0)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(settle)
	_, pps, err := l.during(func() error { time.Sleep(b.transferTime(0)); return nil })
	b.r.add(m.key(testPPS, variant), "per second", pps)
	return err
}
