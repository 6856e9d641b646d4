package netns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
	"ipoibcm/rtnl"

	"golang.org/x/sys/unix"
)

const (
	ifName   = "ibcm0" // of every agent
	underlay = "eth0"  // of every host

	// for what takes milliseconds on an idle machine, and longer on one that has much to do
	patience   = time.Minute
	pollEvery  = 5 * time.Millisecond   // how often a condition is looked at
	pingWithin = 500 * time.Millisecond // of one ping that is repeated

	maxMTU       = 65520
	udMTU        = 2044
	tcpMTU       = 61436        // IP packets of a TCP stream (ADR 0018)
	ipv4Overhead = 20 + 20 + 12 // IP, TCP, timestamps
	ipv6Overhead = 40 + 20 + 12
)

// A topology says what a segment is made of. The zero value of a field means
// what its comment names.
type topology struct {
	hosts int             // 2
	mtu   int             // of the underlay, 9000
	ipv4  bool            // underlay without IPv6
	udMTU int             // 2044
	relay *lab.Impairment // a relay between two hosts that does this; none
	wire  *lab.Way        // a wire between two hosts that does this; none
}

// A segment is a few hosts on one underlay: two are joined by a veth pair, more
// by a bridge.
type segment struct {
	*testing.T
	topology
	ctx     context.Context
	dir     string // sockets and logs
	hosts   []*host
	bridge  *lab.Host  // of more than two hosts
	daemons []*daemon  // other programs of theirs
	relay   *lab.Relay // of topology.relay
	mid     *lab.Host  // where that is
}

// A host has at most one agent at a time. Host i has 10.0.0.(i+1) and
// fd00::(i+1).
type host struct {
	*lab.Host
	seg   *segment
	i     int
	agent *lab.Agent
	v4    netip.Addr
	v6    netip.Addr
	old   string // the program that it runs, if that is not the one under test
}

var serial atomic.Int64 // of segments, for names

// parallel marks a test that may share the machine with others.
func parallel(t *testing.T) {
	needRoot(t)
	t.Parallel()
}

func needRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests of test/netns as root")
	}
}

func needNFT(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("nft is not installed: packets are not dropped on purpose")
	}
}

// newSegment makes the hosts. Everything is removed when the test ends.
func newSegment(t *testing.T, top topology) *segment {
	t.Helper()
	if top.hosts == 0 {
		top.hosts = 2
	}
	if top.mtu == 0 {
		top.mtu = 9000
	}
	if top.udMTU == 0 {
		top.udMTU = udMTU
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	t.Cleanup(cancel)
	dir, err := os.MkdirTemp("", "ipnt") // not t.TempDir: a socket's path has 107 octets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &segment{T: t, topology: top, ctx: ctx, dir: dir}
	prefix := fmt.Sprintf("%s%d-%d", namePrefix, os.Getpid(), serial.Add(1))
	make := func(suffix string) *lab.Host {
		h, err := lab.NewHost(prefix + suffix)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		if top.ipv4 {
			s.must(h.Sysctl("net/ipv6/conf/default/addr_gen_mode", "1")) // no link-local address
		}
		return h
	}
	for i := range top.hosts {
		h := &host{Host: make(string(rune('a' + i))), seg: s, i: i}
		h.v4, h.v6 = netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), netip.MustParseAddr(fmt.Sprintf("fd00::%x", i+1))
		s.hosts = append(s.hosts, h)
	}
	t.Cleanup(s.end)
	if top.relay != nil {
		s.mid = make("m")
		s.throughRelay(s.mid)
	} else if top.wire != nil {
		s.throughWire(make("m"))
	} else if top.hosts == 2 {
		s.must(lab.Connect(s.hosts[0].Host, underlay, s.hosts[1].Host, underlay, top.mtu))
	} else {
		var plain []*lab.Host
		for _, h := range s.hosts {
			plain = append(plain, h.Host)
		}
		s.bridge = make("br")
		s.must(lab.Segment(s.bridge, plain, top.mtu))
	}
	for i, h := range s.hosts {
		if top.ipv4 {
			s.must(h.AddAddr(underlay, fmt.Sprintf("192.168.7.%d/24", i+1)))
		}
	}
	return s
}

// end stops the agents, and shows what they logged if the test has failed.
func (s *segment) end() {
	for _, h := range s.hosts {
		b, err := os.ReadFile(h.path(".log"))
		if i := strings.Index(string(b), "WARNING: DATA RACE"); i >= 0 {
			s.Errorf("%s:\n%s", h.Name, b[i:min(len(b), i+6000)])
		}
		if i := strings.Index(string(b), "panic: "); i >= 0 {
			s.Errorf("%s:\n%s", h.Name, b[i:min(len(b), i+6000)])
		}
		if err == nil && s.Failed() {
			lines := strings.Split(strings.TrimSpace(string(b)), "\n")
			s.Logf("end of the log of %s:\n%s", h.Name, strings.Join(lines[max(0, len(lines)-600/len(s.hosts)):], "\n"))
		}
		if h.agent != nil {
			if s.Failed() {
				s.Log(h.tables())
			}
			h.agent.Kill()
		}
	}
}

// tables prints what the kernel of h and its agent say of where packets to the others go.
func (h *host) tables() string {
	var out strings.Builder
	for _, line := range []string{"route show table all", "-6 route show table all"} {
		text, err := h.tryIP(line)
		fmt.Fprintf(&out, "%s: ip %s: %v\n%s", h.Name, line, err, text)
	}
	for _, p := range h.seg.hosts {
		both(p, func(dst netip.Addr) {
			text, _ := h.command("explain", dst.String(), "--control", h.path(".sock"))
			fmt.Fprintf(&out, "%s: explain %v:\n%s", h.Name, dst, text)
		})
	}
	return out.String()
}

func (s *segment) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// start starts the agents of all hosts with the same further arguments, at the
// same time.
func (s *segment) start(args ...string) {
	s.Helper()
	errs := make([]error, len(s.hosts))
	var wg sync.WaitGroup
	for i, h := range s.hosts {
		wg.Go(func() { errs[i] = h.tryRun(args...) })
	}
	wg.Wait()
	s.must(errors.Join(errs...))
}

// newPair is a segment with two hosts.
func newPair(t *testing.T) (s *segment, a, b *host) {
	t.Helper()
	s = newSegment(t, topology{})
	return s, s.hosts[0], s.hosts[1]
}

// newTrio is a segment with three hosts.
func newTrio(t *testing.T) (s *segment, a, b, c *host) {
	t.Helper()
	s = newSegment(t, topology{hosts: 3})
	return s, s.hosts[0], s.hosts[1], s.hosts[2]
}

// startedPair is a segment with two hosts that run an agent each.
func startedPair(t *testing.T, args ...string) (s *segment, a, b *host) {
	t.Helper()
	s, a, b = newPair(t)
	s.start(args...)
	return s, a, b
}

// connectedPair is a segment with two hosts that have an RC connection.
func connectedPair(t *testing.T) (s *segment, a, b *host) {
	t.Helper()
	s, a, b = startedPair(t)
	a.connect(b, "RC")
	return s, a, b
}

// connectedModes runs f beside other tests for each mode that has connections.
func connectedModes(t *testing.T, f func(t *testing.T, mode string)) {
	for _, mode := range []string{"RC", "UC"} {
		t.Run(mode, func(t *testing.T) {
			parallel(t)
			f(t, mode)
		})
	}
}

// eventually waits until f returns nil.
func (s *segment) eventually(timeout time.Duration, what string, f func() error) {
	s.Helper()
	s.eventuallyBy(&stopwatch{}, timeout, what, f)
}

// eventuallyBy is eventually, and w knows how late it was to look.
func (s *segment) eventuallyBy(w *stopwatch, timeout time.Duration, what string, f func() error) {
	s.Helper()
	end := time.Now().Add(timeout)
	for {
		last := time.Now().After(end) // before the look: whoever was kept from looking looks once more
		err := f()
		if err == nil {
			return
		}
		if last || s.ctx.Err() != nil {
			s.Fatalf("%s: not within %v: %v", what, timeout, err)
		}
		w.sleep(pollEvery)
	}
}

func (h *host) path(suffix string) string {
	return filepath.Join(h.seg.dir, string(rune('a'+h.i))+suffix)
}

func (h *host) args(more ...string) []string {
	args := []string{"--underlay", underlay, "--name", ifName, "--log-level", "debug", "--ud-mtu", fmt.Sprint(h.seg.udMTU),
		"--address", h.v4.String() + "/24", "--address", h.v6.String() + "/64"}
	if *dataThreads > 0 {
		args = append(args, "--threads", fmt.Sprint(*dataThreads))
	}
	return append(args, more...)
}

// run starts the host's agent; later arguments win over the usual ones.
func (h *host) run(args ...string) {
	h.seg.Helper()
	h.seg.must(h.tryRun(args...))
}

func (h *host) tryRun(args ...string) error {
	a, err := lab.StartAgent(h.seg.ctx, h.Host, lab.AgentConfig{Program: cmp.Or(h.old, program),
		Control: h.path(".sock"), Log: h.path(".log"), Args: h.args(args...)})
	if err != nil {
		return err
	}
	h.agent = a
	return nil
}

// config writes a configuration file with one more setting and returns the
// arguments that use it.
func (h *host) config(yaml string) []string {
	h.seg.Helper()
	h.seg.must(os.WriteFile(h.path(".yaml"), []byte(yaml), 0o600))
	return []string{"--config", h.path(".yaml")}
}

// stop ends the agent with SIGTERM, kill with SIGKILL.
func (h *host) stop() {
	h.seg.Helper()
	a := h.agent
	h.agent = nil
	if err := a.Stop(patience); err != nil {
		h.seg.Fatalf("%v\n%s", err, a.LogTail(30))
	}
}

func (h *host) kill() {
	h.agent.Kill()
	h.agent = nil
}

func (h *host) status() control.Status {
	h.seg.Helper()
	s, err := h.agent.Status(h.seg.ctx)
	h.seg.must(err)
	return s
}

// link returns the agent's link-layer address without its flags.
func (h *host) link() string {
	h.seg.Helper()
	return h.status().Interface.LinkAddr[2:]
}

func (h *host) counter(part, name string) uint64 {
	h.seg.Helper()
	n, err := h.agent.Counter(h.seg.ctx, part, name)
	h.seg.must(err)
	return n
}

// conns returns the established connections to one peer.
func (h *host) conns(peer *host) []control.Conn {
	h.seg.Helper()
	all, err := h.agent.Conns(h.seg.ctx)
	h.seg.must(err)
	link := peer.link()
	return slices.DeleteFunc(all, func(c control.Conn) bool { return c.Peer[2:] != link })
}

// noConns waits until the record is empty.
func (h *host) noConns() {
	h.seg.Helper()
	h.seg.eventually(patience, h.Name+" has no connection", func() error {
		var d control.Conns
		if err := h.agent.Get(h.seg.ctx, control.PathConns, &d); err != nil {
			return err
		}
		if len(d.Conns) != 0 {
			return fmt.Errorf("%d connections, the first %s %s", len(d.Conns), d.Conns[0].Mode, d.Conns[0].State)
		}
		return nil
	})
}

// reach pings dst until it answers.
func (h *host) reach(dst netip.Addr) {
	h.seg.Helper()
	h.seg.eventually(patience, fmt.Sprintf("%s reaches %s", h.Name, dst), func() error {
		_, err := h.Ping(lab.Ping{Dst: dst, Timeout: pingWithin})
		return err
	})
}

// ping sends one echo request of that many octets, which must be answered. The route
// that lets so many through comes a moment after the connection.
//
// The kernel has one queue for what all namespaces receive on a processor, and drops what a flood of
// another test leaves no room for: who asks once may wait in vain. So it is asked three times.
func (h *host) ping(dst netip.Addr, size int, df bool) {
	h.seg.Helper()
	const tries = 3
	var err error
	for range tries {
		_, err = h.Ping(lab.Ping{Dst: dst, Size: size, DF: df, Timeout: patience / tries})
		for end := time.Now().Add(patience / tries); errors.Is(err, unix.EMSGSIZE) && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
			_, err = h.Ping(lab.Ping{Dst: dst, Size: size, DF: df, Timeout: patience / tries})
		}
		if err == nil {
			return
		}
		h.seg.Log(err)
	}
	h.seg.Error(err)
}

// connect makes the two hosts talk and waits until both have exactly one
// connection to the other, of that mode. It returns h's end and p's.
func (h *host) connect(p *host, mode string) (mine, theirs control.Conn) {
	h.seg.Helper()
	h.reach(p.v4)
	return h.pairedBy(p, mode, func() { h.Ping(lab.Ping{Dst: p.v4, Timeout: 100 * time.Millisecond}) })
}

// paired waits for what connect does, and sends nothing.
func (h *host) paired(p *host, mode string) (mine, theirs control.Conn) {
	h.seg.Helper()
	return h.pairedBy(p, mode, func() {})
}

// pairedBy has talk make traffic for as long as there is no connection: after
// a failure the next packet once the delay is over makes the next attempt.
func (h *host) pairedBy(p *host, mode string, talk func()) (mine, theirs control.Conn) {
	h.seg.Helper()
	h.seg.eventually(patience, fmt.Sprintf("%s and %s have one %s connection", h.Name, p.Name, mode), func() error {
		a, b := h.conns(p), p.conns(h)
		if len(a) != 1 || len(b) != 1 {
			talk()
			return fmt.Errorf("they have %d and %d", len(a), len(b))
		}
		mine, theirs = a[0], b[0]
		if mine.Mode != mode || theirs.Mode != mode || mine.LocalQPN != theirs.RemoteQPN ||
			mine.RemoteQPN != theirs.LocalQPN || mine.MTU != theirs.MTU {
			return fmt.Errorf("the ends disagree: %+v and %+v", mine, theirs)
		}
		return nil
	})
	return mine, theirs
}

// routeMTU returns what ip route get says, 0 for no metric.
func (h *host) routeMTU(dst netip.Addr) int {
	h.seg.Helper()
	mtu, _, err := h.RouteTo(dst)
	h.seg.must(err)
	return mtu
}

// waitRoute waits until the kernel's route to dst has that MTU.
func (h *host) waitRoute(timeout time.Duration, dst netip.Addr, want int) {
	h.seg.Helper()
	h.seg.eventually(timeout, fmt.Sprintf("%s routes to %s with MTU %d", h.Name, dst, want), func() error {
		mtu, text, err := h.RouteTo(dst)
		if err == nil && mtu != want {
			err = fmt.Errorf("ip route says %q", text)
		}
		return err
	})
}

// hostRoutes returns our per-destination routes, as "10.0.0.2 mtu 65520".
func (h *host) hostRoutes() []string {
	h.seg.Helper()
	r, err := h.HostRoutes(ifName, rtnl.Protocol)
	h.seg.must(err)
	slices.Sort(r)
	return r
}

// noHostRoutes waits until there are no such routes: the kernel is told of their removal some time
// after status shows that nothing needs them.
func (h *host) noHostRoutes() {
	h.seg.Helper()
	h.seg.eventually(patience, h.Name+" has no host routes", func() error {
		if r := h.hostRoutes(); len(r) != 0 {
			return fmt.Errorf("%q", r)
		}
		return nil
	})
}

// send transfers octets by TCP (a tenth under the race detector), compares
// SHA-256 and returns what was measured.
func (h *host) send(to *host, dst netip.Addr, octets int64) lab.Transfer {
	h.seg.Helper()
	ctx, cancel := context.WithTimeout(h.seg.ctx, 5*patience)
	defer cancel()
	if raceDetector {
		octets /= 10
	}
	t, err := h.Send(ctx, to.Host, dst, octets, 0)
	if err != nil {
		h.seg.Fatalf("TCP from %s to %s: %v", h.Name, dst, err)
	}
	return t
}

// reachRouted sees that both addresses of p answer, and that h's routes to them have that MTU.
func (h *host) reachRouted(p *host, mtu int) {
	h.seg.Helper()
	both(p, func(dst netip.Addr) {
		h.reach(dst)
		h.waitRoute(patience, dst, mtu)
	})
}

// reachFull sees that h reaches p, by routes with that MTU, with packets as large.
func (h *host) reachFull(p *host, mtu int) {
	h.seg.Helper()
	h.reachRouted(p, mtu)
	both(p, func(dst netip.Addr) { h.ping(dst, mtu, true) })
}

// both calls f with the IPv4 and the IPv6 address of a host.
func both(h *host, f func(addr netip.Addr)) {
	f(h.v4)
	f(h.v6)
}

// containsAll reports the first of want that is missing from s.
func containsAll(s string, want ...string) error {
	for _, w := range want {
		if !strings.Contains(s, w) {
			return fmt.Errorf("%q is not in:\n%s", w, s)
		}
	}
	return nil
}
