package netns

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
	"ipoibcm/wire/roce"
)

var (
	oracleFlag = flag.Int("oracle", 30, "configurations of TestOracle")
	oracleSeed = flag.Uint64("oracle.seed", 0, "seed of the first of them; 0 draws one")
)

const (
	settleWithin = 5 * time.Second       // of a change, on a busy machine
	quietAfter   = 40 * time.Millisecond // without a packet nothing more is expected
)

// An oracle is a host with an agent beside its twin, whose interface of the same
// name is a veth: there the kernel itself chooses the neighbour. A third host sees
// where the packets of both go.
type oracle struct {
	*segment
	book   *addressBook
	agent  *side
	twin   *side
	hosts  [2]*lab.Host // of agent and twin
	seed   uint64
	config *oracleConfig
	phase  string

	compared, late int
	slowest        time.Duration
}

// Packets go to the neighbour that the kernel itself would choose, whatever
// addresses, routes, rules and next-hop objects there are, and after they change.
func TestOracle(t *testing.T) {
	parallel(t)
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("ip is not installed: no random configurations are made")
	}
	seed := *oracleSeed
	if seed == 0 {
		seed = rand.Uint64N(1 << 32)
	}
	t.Logf("%d configurations from seed %d: -oracle.seed %d repeats them", *oracleFlag, seed, seed)
	o := newOracle(t)
	for i := range *oracleFlag {
		o.seed = seed + uint64(i)
		o.run()
	}
	t.Logf("%d packets compared; %d found their neighbour only when sent again, the last %v after a change", o.compared,
		o.late, o.slowest)
}

// newOracle makes the hosts: a with the agent, b with another that is a neighbour
// like those that the third plays, and the twin.
func newOracle(t *testing.T) *oracle {
	o := &oracle{segment: newSegment(t, topology{hosts: 3}), book: newAddressBook(rand.New(rand.NewPCG(1, 0)))}
	o.ctx = t.Context()
	a, b, sink := o.segment.hosts[0], o.segment.hosts[1], o.segment.hosts[2]
	twin, err := lab.NewHost(fmt.Sprintf("%s%d-%dt", namePrefix, os.Getpid(), serial.Add(1)))
	o.must(err)
	t.Cleanup(func() { twin.Close() })
	o.hosts = [2]*lab.Host{a.Host, twin}
	for i, h := range o.hosts {
		for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/default/forwarding"} {
			o.must(h.Sysctl("net/"+name, "1"))
		}
		for _, name := range []string{"all", "default"} {
			o.must(h.Sysctl("net/ipv4/conf/"+name+"/rp_filter", "0"))
		}
		for j, dev := range append(oracleDevices[i^1:], arrival) { // the agent makes its own first one
			o.must(lab.Connect(h, dev, sink.Host, fmt.Sprintf("far%d%d", i, j), 1500))
			o.must(sink.Sysctl(fmt.Sprintf("net/ipv6/conf/far%d%d/disable_ipv6", i, j), "1"))
		}
		for dev, n := range map[string]string{"eth1": "1", "eth2": "2", arrival: "3"} {
			o.must(h.AddAddr(dev, "172.16."+n+".1/24"))
			o.must(h.AddAddr(dev, "fd16:"+n+"::1/64"))
		}
	}
	var gids []string
	for _, h := range o.segment.hosts[1:] {
		ll, err := h.LinkLocal(underlay)
		o.must(err)
		gids = append(gids, ll.String())
	}
	a.run(a.config(fmt.Sprintf("peers: [%q, %q]\nlog_level: info\n", gids[0], gids[1]))...)
	ll, err := a.LinkLocal(underlay)
	o.must(err)
	b.run(b.config(fmt.Sprintf("peers: [%q]\n", ll))...)
	o.must(twin.AddAddr(ifName, "10.0.0.1/24"))
	o.must(twin.AddAddr(ifName, "fd00::1/64"))
	for f := range 2 {
		for _, dst := range o.book.pool[f][:realSize] {
			o.must(b.AddAddr(ifName, fmt.Sprintf("%s/%d", dst, dst.BitLen())))
		}
	}
	o.neighbours()
	o.agent, o.twin = o.newSide("agent", a.Host, sink.Host, "far02"), o.newSide("twin", twin, sink.Host, "far13")
	o.observe(b.Host, sink.Host)
	a.connect(b, "RC")
	return o
}

// neighbours gives both hosts all neighbours that a configuration can name, but
// not the agent's interface.
func (o *oracle) neighbours() {
	for i, h := range o.hosts {
		for _, dev := range oracleDevices[i^1:] {
			l, err := h.Link(dev)
			o.must(err)
			for id, a := range o.book.byID {
				family := netlink.FAMILY_V4
				if a.Is6() {
					family = netlink.FAMILY_V6
				}
				o.must(h.Netlink().NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT,
					IP: a.AsSlice(), HardwareAddr: macOf(id + 1)}))
			}
		}
	}
}

// newSide opens the sockets that probes are sent by.
func (o *oracle) newSide(name string, h, sink *lab.Host, far string) *side {
	s := &side{name: name}
	o.must(h.Do(func() (err error) {
		for f, family := range []int{unix.AF_INET, unix.AF_INET6} {
			if s.fd[f], err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
		}
		return errors.Join(unix.Bind(s.fd[0], &unix.SockaddrInet4{Port: probePort}),
			unix.SetsockoptInt(s.fd[1], unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1),
			unix.Bind(s.fd[1], &unix.SockaddrInet6{Port: probePort}))
	}))
	here, err := h.Link(arrival)
	o.must(err)
	there, err := sink.Link(far)
	o.must(err)
	s.mac = [2]net.HardwareAddr{here.Attrs().HardwareAddr, there.Attrs().HardwareAddr}
	s.to = unix.SockaddrLinklayer{Ifindex: there.Attrs().Index, Protocol: htons(unix.ETH_P_IP)}
	o.must(sink.Do(func() (err error) {
		s.inject, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	o.Cleanup(func() { unix.Close(s.fd[0]); unix.Close(s.fd[1]); unix.Close(s.inject) })
	return s
}

// observe watches what leaves both hosts, and what reaches the host with an agent.
func (o *oracle) observe(b, sink *lab.Host) {
	done := make(chan struct{})
	far := map[int]func([]byte){}
	for i, s := range []*side{o.agent, o.twin} {
		for j, dev := range oracleDevices[i^1:] {
			l, err := sink.Link(fmt.Sprintf("far%d%d", i, j))
			o.must(err)
			far[l.Attrs().Index] = func(frame []byte) {
				if a, ok := o.book.find(idOf(frame)); ok {
					s.saw(frame[etherLen:], hopAt{dev, a})
				}
			}
		}
	}
	l, err := b.Link(ifName)
	o.must(err)
	real := map[int]func([]byte){
		l.Attrs().Index: func(packet []byte) { o.agent.saw(packet, hopAt{ifName, realNeighbour}) }}
	for h, devices := range map[*lab.Host]map[int]func([]byte){sink: far, b: real} {
		var wait func()
		o.must(h.Do(func() (err error) { wait, err = watch(devices, done); return err }))
		o.Cleanup(wait)
	}
	gid, err := o.segment.hosts[2].LinkLocal(underlay)
	o.must(err)
	f := &fabric{gid: gid, book: o.book, side: o.agent}
	o.must(sink.Do(func() (err error) { f.conn, err = net.ListenUDP("udp6", &net.UDPAddr{Port: roce.Port}); return err }))
	_ = f.conn.SetReadBuffer(16 << 20)
	var wg sync.WaitGroup
	wg.Go(f.serve)
	o.Cleanup(wg.Wait)
	o.Cleanup(func() { close(done); f.conn.Close() })
}

// realNeighbour stands for the host with an agent, which has many addresses.
var realNeighbour = netip.MustParseAddr("10.0.0.2")

// run compares with one configuration, and with what changes make of it.
func (o *oracle) run() {
	o.config, o.phase = newOracleConfig(o.seed, o.book), "as made"
	o.batch(o.config.text())
	o.compare(o.probes())
	probes := o.probes()
	stop := o.traffic(probes)
	change := o.config.change()
	o.config.refused(o.batch(change)) // such as a next hop that cannot be reached any more
	stop()
	o.phase = "after\n" + change
	o.compare(o.probes())
	o.batch(o.config.undo())
}

// batch gives ip the same commands on both hosts. What one kernel refuses the
// other must refuse too; it is returned.
func (o *oracle) batch(text string) (refused []string) {
	o.Helper()
	var out [2]string
	var wg sync.WaitGroup
	for i, h := range o.hosts {
		wg.Go(func() {
			c := exec.Command("ip", "-force", "-batch", "-")
			c.Stdin = strings.NewReader(text)
			b, _ := h.Output(c) // it fails if any command did
			out[i] = string(b)
		})
	}
	wg.Wait()
	if out[0] != out[1] {
		o.Fatalf("seed %d, %s: ip says on the host with the agent\n%son its twin\n%sto\n%s", o.seed, o.phase, out[0],
			out[1], text)
	}
	lines := strings.Split(text, "\n")
	for said := range strings.SplitSeq(out[0], "\n") {
		var n int
		if _, err := fmt.Sscanf(said, "Command failed -:%d", &n); err == nil && n >= 1 && n <= len(lines) {
			refused = append(refused, lines[n-1])
		}
	}
	return refused
}

// probes draws one packet of the host's own and one to be forwarded for each
// destination.
func (o *oracle) probes() (out []probe) {
	c := o.config
	for f := range 2 {
		for _, dst := range o.book.pool[f] {
			for _, forward := range []bool{false, true} {
				p := probe{dst: dst, tos: pick(c.r, []byte{0, 0, 0x10, 0xb8}), port: pick(c.r, []uint16{9, 9, 10}),
					forward: forward}
				switch {
				case forward:
					p.src = pick(c.r, oracleForeign[f])
				case c.sourced[f] || c.r.IntN(2) == 0: // what the kernel chooses is chosen after the route
					p.src = pick(c.r, c.sources[f])
				}
				out = append(out, p)
			}
		}
	}
	return out
}

// traffic makes the host with the agent send until stop is called. Nobody looks.
func (o *oracle) traffic(probes []probe) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
				_ = o.agent.send(probes[i%len(probes)], 0, i)
			}
			if i%32 == 31 {
				time.Sleep(time.Millisecond)
			}
		}
	})
	return func() { close(done); wg.Wait() }
}

// round sends the probes of which is in todo, and returns what became of them.
func (o *oracle) round(s *side, probes []probe, todo []int, enough func([]outcome) bool) []outcome {
	s.begin(len(probes))
	for _, i := range todo {
		err := s.send(probes[i], s.seq, i)
		var no unix.Errno
		if errors.As(err, &no) {
			s.set(i, outcome{err: no})
		}
	}
	// Where a millisecond takes this goroutine long, others wait for a processor, too.
	for late := time.Duration(0); ; {
		got, quiet := s.outcomes()
		if enough(got) || quiet > quietAfter+10*late {
			return got
		}
		before := time.Now()
		time.Sleep(time.Millisecond)
		late = max(late, time.Since(before)-2*time.Millisecond)
	}
}

// compare sends the probes on both hosts until all agree, and once more.
func (o *oracle) compare(probes []probe) {
	o.Helper()
	all := make([]int, len(probes))
	for i := range all {
		all[i] = i
	}
	want := make([]outcome, len(probes))
	spoken := func(i int) bool { return want[i] != (outcome{}) }
	askTwin := func(todo []int) {
		got := o.round(o.twin, probes, todo, func(got []outcome) bool {
			return len(different(todo, func(i int) bool { return got[i] != (outcome{}) })) == 0
		})
		for _, i := range todo {
			want[i] = got[i]
		}
	}
	for todo, tries := all, 0; len(todo) > 0 && tries < 10; tries++ { // what is dropped stays in todo
		askTwin(todo)
		todo = different(todo, func(i int) bool { return spoken(i) || probes[i].forward && tries > 0 })
	}
	same := func(got []outcome) func(i int) bool { return func(i int) bool { return o.same(got[i], want[i]) } }
	todo, begin := all, time.Now()
	for {
		todo = different(todo, same(o.round(o.agent, probes, todo,
			func(got []outcome) bool { return len(different(todo, same(got))) == 0 })))
		if len(todo) == 0 || time.Since(begin) > settleWithin {
			break
		}
		o.late += len(todo)
		o.slowest = max(o.slowest, time.Since(begin))
		if silent := different(todo, spoken); len(silent) > 0 {
			askTwin(silent) // where the machine is busy a packet that was late was taken for none
		}
	}
	for i, p := range probes {
		if !p.forward && want[i] == (outcome{}) {
			o.Fatalf("seed %d, %s: the twin sent nothing %v:\n%s", o.seed, o.phase, p, o.config.text())
		}
	}
	// Now all agree, and none may change its mind. What is dropped is sent again.
	got, wrong := make([]outcome, len(probes)), []int(nil)
	for todo, begin := all, time.Now(); len(todo) > 0 && len(wrong) == 0; {
		seen := o.round(o.agent, probes, todo, func(got []outcome) bool { return len(different(todo, same(got))) == 0 })
		for _, i := range todo {
			got[i] = seen[i]
		}
		todo = different(todo, same(got))
		wrong = different(todo, func(i int) bool { return got[i] == (outcome{}) })
		if time.Since(begin) > settleWithin {
			wrong = todo
		}
	}
	for _, i := range wrong[:min(len(wrong), 10)] {
		o.Errorf("seed %d: %v: got %v, want %v", o.seed, probes[i], got[i], want[i])
	}
	if len(wrong) > 0 {
		o.Fatalf("seed %d, %s: %d of %d packets differ. The configuration:\n%s", o.seed, o.phase, len(wrong), len(probes),
			o.config.text())
	}
	o.compared += len(probes)
}

// different returns those of todo that are not as they should be.
func different(todo []int, good func(i int) bool) (out []int) {
	for _, i := range todo {
		if !good(i) {
			out = append(out, i)
		}
	}
	return out
}

// same reports whether the agent's packet went where the twin's did, with the same source, or to another hop of the
// same multipath route.
func (o *oracle) same(got, want outcome) bool {
	switch {
	case got.dev == ifName && got.addr == realNeighbour && want.dev == ifName:
		return o.book.own[want.addr] && got.src == want.src
	case got.hopAt == want.hopAt:
		return got == want
	}
	return got.err == 0 && want.err == 0 && o.config.alike(got.hopAt, want.hopAt)
}
