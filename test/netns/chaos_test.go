package netns

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/roce"
)

var (
	chaosFor  = flag.Duration("chaos", 0, "how long TestChaos goes on for each of its seeds; without it a few faults")
	chaosSeed = flag.Uint64("chaos.seed", 0,
		"the only seed of TestChaos; 0 means two that are drawn, or in the short form 1 and 2")
)

const (
	// chaosBack is how long traffic may be away after a fault has ended.
	chaosBack = 5 * time.Second
	// chaosMemory is what an agent may have of the machine's memory at any time, in octets.
	chaosMemory = 384 << 20
)

// A chaos is one run of faults, drawn by a seed.
type chaos struct {
	*segment
	a, b *host // b may be killed, a lives from the beginning to the end
	r    *rand.Rand
	most int64    // memory of an agent at the end of a fault
	away [2]*host // where interfaces are moved to, once they were
}

// A fault does what happens, and undoes what can be undone. back is how long traffic may
// be away afterwards; zero means chaosBack.
type fault struct {
	name string
	do   func(c *chaos)
	back time.Duration
}

var faults = []fault{
	// Operators.
	{name: "second daemon", do: (*chaos).secondDaemon},
	{name: "garbage in the control socket", do: (*chaos).garbage},
	{name: "address added and removed", do: (*chaos).addresses},
	{name: "interface down and up", do: func(c *chaos) { c.downUp(c.either(), ifName) }},
	{name: "interface to another namespace and back", do: (*chaos).moves},
	// Processes.
	{name: "SIGSTOP", do: (*chaos).pause},
	{name: "SIGKILL", do: func(c *chaos) { c.b.kill(); c.b.run("--log-level", "info") }},
	{name: "SIGTERM", do: func(c *chaos) { c.b.stop(); c.b.run("--log-level", "info") }},
	{name: "few descriptors", do: (*chaos).fewDescriptors},
	{name: "little memory", do: (*chaos).littleMemory},
	// The network.
	{name: "MTU changes", do: (*chaos).mtus},
	{name: "underlay down and up", do: func(c *chaos) { c.downUp(c.either(), underlay) }},
	{name: "carrier lost", do: (*chaos).carrier},
	{name: "underlay renamed", do: (*chaos).rename},
	{name: "flood", do: (*chaos).floods},
	{name: "forgeries", do: (*chaos).forgeries},
	{name: "corrupting path", do: func(c *chaos) { c.impaired(lab.Impairment{Corrupt: 20}, 3*time.Second) }},
	{name: "losing path", do: func(c *chaos) {
		c.impaired(lab.Impairment{Lose: 30, Duplicate: 30, Reorder: 30},
			3*time.Second)
	}},
	{name: "partition", do: func(c *chaos) { c.impaired(lab.Impairment{Lose: 1000}, 4*time.Second) },
		back: 15 * time.Second},
}

// Faults of operators, processes and the network, one after the other and under load.
// After each traffic is back within a bound, and agents keep within their memory; in the
// end TCP arrives unchanged, and nothing is left over.
func TestChaos(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector's own memory and time would be measured: run without it")
	}
	seeds := []uint64{1, 2}
	switch {
	case *chaosSeed != 0:
		seeds = []uint64{*chaosSeed}
	case *chaosFor > 0:
		seeds = []uint64{rand.Uint64N(1 << 32), rand.Uint64N(1 << 32)}
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			parallel(t)
			chaosRun(t, seed)
		})
	}
}

func chaosRun(t *testing.T, seed uint64) {
	s := newSegment(t, topology{relay: &lab.Impairment{}})
	ctx, cancel := context.WithTimeout(context.Background(), *chaosFor+20*patience)
	defer cancel()
	s.ctx = ctx
	c := &chaos{segment: s, a: s.hosts[0], b: s.hosts[1], r: rand.New(rand.NewPCG(seed, 0))}
	for _, h := range s.hosts {
		h.run("--log-level", "info")
	}
	c.a.connect(c.b, "RC")
	// what it costs once is no leak
	c.round(fault{name: "SIGKILL once", do: func(c *chaos) { c.b.kill(); c.b.run("--log-level", "info") }})
	before := s.atRest()
	few, begin, n := long.Of(5, len(faults)), time.Now(), 0
	for order := c.r.Perm(len(faults)); n < few && *chaosFor == 0 || time.Since(begin) < *chaosFor; n++ {
		if n%len(faults) == 0 && n > 0 {
			order = c.r.Perm(len(faults))
		}
		c.round(faults[order[n%len(faults)]])
		if t.Failed() {
			t.Fatalf("seed %d, fault %d", seed, n+1)
		}
	}
	c.a.send(c.b, c.b.v4, 16<<20) // compares hashes
	c.b.send(c.a, c.a.v6, 16<<20)
	c.onlyOwnRoutes()
	after := s.atRest()
	t.Logf("%d faults in %v; memory %d MiB at most; goroutines %d and %d, descriptors %d and %d, heap %d and %d KiB", n,
		time.Since(begin).Round(time.Second), c.most>>20, before.Goroutines, after.Goroutines, before.Descriptors,
		after.Descriptors,
		before.HeapOctets>>10, after.HeapOctets>>10)
	if after.Goroutines > before.Goroutines {
		t.Errorf("%d goroutines in the end, %d before", after.Goroutines, before.Goroutines)
	}
	if after.Descriptors > before.Descriptors {
		t.Errorf("%d descriptors in the end, %d before", after.Descriptors, before.Descriptors)
	}
	if limit := before.HeapOctets + before.HeapOctets/5 + 4<<20; after.HeapOctets > limit {
		t.Errorf("a heap of %d octets in the end, want %d at most", after.HeapOctets, limit)
	}
	for _, h := range s.hosts {
		h.stop()
		if _, err := os.Stat(h.path(".sock")); err == nil {
			t.Errorf("%s: the socket is left over", h.Name)
		}
	}
}

// round has one fault happen under load.
func (c *chaos) round(f fault) {
	c.Helper()
	begin := time.Now()
	stop := c.load(c.a, c.b)
	f.do(c)
	back := f.back
	if back == 0 {
		back = chaosBack
	}
	ended := time.Now()
	c.a.backWithin(back, c.b)
	away := time.Since(ended)
	octets := stop()
	c.a.connect(c.b, "RC")
	both(c.b, c.a.reach)
	for _, h := range c.hosts {
		m := h.resident()
		c.most = max(c.most, m)
		if m > chaosMemory {
			c.Errorf("%s: %s has %d MiB, want %d at most", f.name, h.Name, m>>20, chaosMemory>>20)
		}
	}
	c.Logf("%-30s %6.2f s, traffic back after %v, %d MB carried", f.name, time.Since(begin).Seconds(),
		away.Round(time.Millisecond), octets/1e6)
}

// resident returns what the agent has of the machine's memory.
func (h *host) resident() int64 {
	h.seg.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", h.agent.PID()))
	h.seg.must(err)
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	h.seg.must(err)
	return pages * int64(os.Getpagesize())
}

func (c *chaos) either() *host { return c.hosts[c.r.IntN(2)] }

// secondDaemon starts an agent where one is. It must be refused.
func (c *chaos) secondDaemon() {
	h := c.either()
	for _, args := range [][]string{{"--control", h.path(".sock")}, {"--control", h.path("2.sock")}} {
		if out, code := h.command(append([]string{"run"}, h.args(args...)...)...); code != 1 {
			c.Errorf("a second agent: exit status %d\n%s", code, out)
		}
	}
}

// garbage writes to the control socket what is no HTTP, and leaves connections open.
func (c *chaos) garbage() {
	h := c.either()
	for range 30 {
		conn, err := net.Dial("unix", h.path(".sock"))
		c.must(err)
		defer conn.Close()
		junk := make([]byte, c.r.IntN(64<<10))
		for i := range junk {
			junk[i] = byte(c.r.Uint32())
		}
		conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = conn.Write(junk) // it may be hung up on
	}
	if st := h.status().Interface.State; st != "up" {
		c.Errorf("beside garbage the interface is %s", st)
	}
}

func (c *chaos) addresses() {
	h := c.either()
	for n := range 10 {
		prefix := fmt.Sprintf("10.0.9.%d/24", 10*h.i+n+1)
		c.must(h.AddAddr(ifName, prefix))
		time.Sleep(time.Duration(c.r.IntN(50)) * time.Millisecond)
		c.must(h.DelAddr(ifName, prefix))
	}
}

// downUp takes a device down for a while. The interface loses its IPv6 address with
// that, unless it is kept.
func (c *chaos) downUp(h *host, dev string) {
	c.must(h.Sysctl("net/ipv6/conf/"+dev+"/keep_addr_on_down", "1"))
	c.must(h.Down(dev))
	time.Sleep(time.Duration(c.r.IntN(3000)) * time.Millisecond)
	c.must(h.Up(dev))
	h.waitState("up")
}

// moves has an interface in another namespace for a while.
func (c *chaos) moves() {
	h := c.either()
	if c.away[h.i] == nil {
		c.away[h.i] = h.container()
	}
	in := c.away[h.i]
	in.agent = h.agent
	h.ip("link set " + ifName + " netns " + in.Name)
	in.sits(in.Name, ifName)
	c.must(in.Up(ifName))
	time.Sleep(time.Duration(c.r.IntN(1500)) * time.Millisecond)
	in.ip("link set " + ifName + " netns " + h.Name)
	h.sits("", ifName)
	c.must(h.Up(ifName))
	h.waitState("up")
}

// carrier takes the other end of a host's wire down for a while.
func (c *chaos) carrier() {
	side := []string{"left", "right"}[c.r.IntN(2)]
	c.must(c.mid.Down(side))
	time.Sleep(time.Duration(c.r.IntN(3000)) * time.Millisecond)
	c.must(c.mid.Up(side))
	for _, h := range c.hosts {
		h.waitState("up")
	}
}

// forgeries sends b what a might have sent: NAKs, data and goodbyes with numbers that
// are drawn, and ICMP about the path. The connection stays.
func (c *chaos) forgeries() {
	c.a.connect(c.b, "RC")
	was := c.b.conns(c.a)[0]
	qpn, err := parseQPN(was.LocalQPN)
	c.must(err)
	from := netip.MustParseAddr(c.a.status().Interface.GID)
	f := c.forger(c.a, c.b)
	f.r = c.r
	var packets [][]byte
	for range 1000 {
		nak := make([]byte, roce.BTHLen+roce.AETHLen)
		roce.PutBTH(nak, roce.BTHFields{Opcode: roce.RCAck, PKey: ib.DefaultPKey, DestQPN: qpn,
			PSN: ib.PSN(c.r.Uint32N(1 << 24))})
		roce.PutAETH(nak[roce.BTHLen:], roce.Syndrome(0x60|c.r.Uint32N(5)), c.r.Uint32N(1<<24))
		data := make([]byte, roce.BTHLen+64)
		roce.PutBTH(data, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey,
			DestQPN: ib.QPN(c.r.Uint32N(1 << 24)), PSN: ib.PSN(c.r.Uint32N(1 << 24))})
		bye, _ := mad.DREQ{LocalCommID: mad.CommID(c.r.Uint32()), RemoteCommID: mad.CommID(c.r.Uint32()),
			RemoteQPN: qpn}.AppendBinary(nil)
		packets = append(packets, sealed(c.r, from, f.gid, nak), sealed(c.r, from, f.gid, data),
			forgedUD(c.r, from, f.gid, ib.QPNGSI, ib.QPNGSI, ib.QKeyGSI, bye))
	}
	f.load(packets)
	ctx, cancel := context.WithTimeout(c.ctx, 3*time.Second)
	defer cancel()
	_, err = f.send(ctx, roce.Port, 2000)
	c.must(err)
	ports := []uint16{rocePort}
	for range 500 {
		ports = append(ports, uint16(0xc000|c.r.Uint32N(1<<14)))
	}
	c.lie(c.a, c.b, from, f.gid, f.gid, from, ports...)
	now := c.b.conns(c.a)
	if len(now) != 1 || now[0].LocalCommID != was.LocalCommID {
		c.Errorf("after forgeries b has connections %+v, before %+v", now, was)
	}
}

func (c *chaos) pause() {
	h := c.either()
	c.must(syscall.Kill(h.agent.PID(), syscall.SIGSTOP))
	time.Sleep(time.Duration(500+c.r.IntN(2500)) * time.Millisecond)
	c.must(syscall.Kill(h.agent.PID(), syscall.SIGCONT))
}

// fewDescriptors leaves the agent next to none for a while, and follows its events as
// often as that goes.
func (c *chaos) fewDescriptors() {
	h := c.either()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", h.agent.PID()))
	c.must(err)
	var was unix.Rlimit
	few := unix.Rlimit{Cur: uint64(len(fds) + 3), Max: 1 << 16}
	c.must(unix.Prlimit(h.agent.PID(), unix.RLIMIT_NOFILE, nil, &was))
	few.Max = was.Max
	c.must(unix.Prlimit(h.agent.PID(), unix.RLIMIT_NOFILE, &few, nil))
	defer func() { c.must(unix.Prlimit(h.agent.PID(), unix.RLIMIT_NOFILE, &was, nil)) }()
	ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
	defer cancel()
	for range 10 {
		if body, err := h.agent.Stream(ctx, control.PathEvents); err == nil {
			defer body.Close()
			go io.Copy(io.Discard, body)
		}
	}
	h.AddAddr(ifName, fmt.Sprintf("10.0.8.%d/24", h.i+1))
	time.Sleep(time.Second)
	h.DelAddr(ifName, fmt.Sprintf("10.0.8.%d/24", h.i+1))
}

// littleMemory lets b have next to no more address space. It may go on, or end: then it
// is started again, as a service manager does.
func (c *chaos) littleMemory() {
	pid := c.b.agent.PID()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	c.must(err)
	pages, err := strconv.ParseUint(strings.Fields(string(b))[0], 10, 64)
	c.must(err)
	size := pages*uint64(os.Getpagesize()) + 1<<20
	c.must(unix.Prlimit(pid, unix.RLIMIT_AS, &unix.Rlimit{Cur: size, Max: unix.RLIM_INFINITY}, nil))
	select {
	case <-c.b.agent.Done():
		c.b.kill()
		c.b.run("--log-level", "info")
	case <-time.After(2 * time.Second):
		c.must(unix.Prlimit(pid, unix.RLIMIT_AS, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil))
	}
}

// mtus changes the MTU of both underlays, and puts it back.
func (c *chaos) mtus() {
	for _, mtu := range []int{4500, 1500, c.mtu} {
		for _, h := range c.hosts {
			c.must(h.SetMTU(underlay, mtu))
		}
		time.Sleep(time.Duration(200+c.r.IntN(800)) * time.Millisecond)
	}
}

// rename gives the underlay another name for a while; that can be done while it is down.
func (c *chaos) rename() {
	h := c.either()
	l, err := h.Link(underlay)
	c.must(err)
	c.must(h.Sysctl("net/ipv6/conf/"+underlay+"/keep_addr_on_down", "1"))
	c.must(h.Down(underlay))
	for _, name := range []string{"other0", underlay} {
		c.must(h.Netlink().LinkSetName(l, name))
		c.must(h.Netlink().LinkSetUp(l))
		time.Sleep(time.Duration(200+c.r.IntN(1500)) * time.Millisecond)
		if name != underlay {
			c.must(h.Netlink().LinkSetDown(l))
		}
	}
	h.waitState("up")
}

// floods sends forged packets, from a's side of the wire.
func (c *chaos) floods() {
	kinds := []forgery{forgedARP, forgedND, forgedREQ, forgedData}
	f := c.forge(c.a, c.b, kinds[c.r.IntN(len(kinds))], 40_000)
	ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
	defer cancel()
	_, err := f.send(ctx, 4791, 20_000)
	c.must(err)
}

// impaired has the path between the hosts do this for d.
func (c *chaos) impaired(imp lab.Impairment, d time.Duration) {
	c.relay.Impair(imp)
	time.Sleep(d)
	c.relay.Impair(lab.Impairment{})
}
