package subnet

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/agent"
	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/ibsim"
	"ipoibcm/internal/lab"
	"ipoibcm/ipoib"
	"ipoibcm/provider/softroce"
)

// Whole agents, in network namespaces of their own, on ports of a subnet: the simulated one in
// real time, and opensm on ibsim. Their packets are RoCEv2 on a veth pair; LIDs, groups, paths
// and partitions are the administrator's.

// A member is a host with its agent.
type member struct {
	t    *testing.T
	n    int
	name string // of its host in the subnet
	host *lab.Host
	port *ibPort
	opt  agent.Options
	http http.Client
	log  *logBuffer

	stop  context.CancelFunc
	ended chan error
}

// A logBuffer is a log that is shown when the test fails.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// agents runs a test of two hosts, B and another, with both administrators. start says
// whether the subnet manager runs from the beginning.
func agents(t *testing.T, conf int, other string, test func(t *testing.T, sm manager, b, o *member)) {
	if os.Geteuid() != 0 {
		t.Skip("not root: no namespaces")
	}
	run := func(t *testing.T, sm manager) {
		hosts := connect(t)
		test(t, sm, newMember(t, sm, "B", hosts[0], 1), newMember(t, sm, other, hosts[1], 2))
	}
	t.Run("simulated", func(t *testing.T) { run(t, newLiveSim(t, conf)) })
	t.Run("opensm", func(t *testing.T) {
		if err := ibsim.Missing(); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
		run(t, newLiveReal(t, conf))
	})
}

// connect makes two hosts with a wire between them.
func connect(t *testing.T) (hosts [2]*lab.Host) {
	t.Helper()
	prefix := fmt.Sprintf("ibp-%d-", os.Getpid())
	for i := range hosts {
		h, err := lab.NewHost(fmt.Sprintf("%s%d", prefix, i))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		hosts[i] = h
	}
	if err := lab.Connect(hosts[0], "eth0", hosts[1], "eth0", 4200); err != nil {
		t.Fatal(err)
	}
	return hosts
}

// newMember is a host whose agent does not run yet.
func newMember(t *testing.T, sm manager, name string, h *lab.Host, n int) *member {
	t.Helper()
	dir := t.TempDir()
	m := &member{t: t, n: n, name: name, host: h, log: new(logBuffer), opt: agent.Options{
		Name: "ib0", Netns: h.Name, Control: filepath.Join(dir, "control"), Mode: ipoib.ModeRC,
		Prefixes: []netip.Prefix{netip.MustParsePrefix(m4(n) + "/24"), netip.MustParsePrefix(m6(n) + "/64")}}}
	m.opt.Log = slog.New(slog.NewTextHandler(m.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", m.opt.Control)
	}
	m.http.Transport = &http.Transport{DisableKeepAlives: true, DialContext: dial}
	now, _, err := sm.port(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.AddAddr("eth0", now.GID.Addr().String()+"/64"); err != nil {
		t.Fatal(err)
	}
	m.open(sm, now.GID)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("agent of %s:\n%s", name, tail(m.log.b.String(), 60))
		}
	})
	return m
}

func tail(s string, n int) string {
	lines := strings.Split(s, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

func m4(n int) string { return fmt.Sprintf("10.9.0.%d", n) }
func m6(n int) string { return fmt.Sprintf("fd09::%d", n) }

// open opens the member's port.
func (m *member) open(sm manager, gid ib.GID) {
	m.t.Helper()
	var dev *softroce.Device
	if err := m.host.Do(func() (err error) {
		dev, err = softroce.Open(softroce.Options{Underlay: "eth0", GID: gid, PKeys: []ib.PKey{0xffff, 0x8001, 0x0001}})
		return err
	}); err != nil {
		m.t.Fatal(err)
	}
	var err error
	if m.port, err = newPort(dev, sm, m.name); err != nil {
		m.t.Fatal(err)
	}
	m.opt.Provider = m.port
}

// start runs the agent until the test ends, or stops it.
func (m *member) start() {
	m.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	m.stop, m.ended = stop, make(chan error, 1)
	ready := make(chan struct{})
	go func() { m.ended <- agent.Run(ctx, m.opt, func() { close(ready) }) }()
	m.t.Cleanup(m.end)
	select {
	case <-ready:
	case err := <-m.ended:
		m.ended <- err
		m.t.Fatalf("agent of %s: %v", m.name, err)
	case <-time.After(soon):
		m.t.Fatalf("agent of %s does not start", m.name)
	}
}

// end stops the agent.
func (m *member) end() {
	if m.stop == nil {
		return
	}
	m.stop()
	m.stop = nil
	select {
	case err := <-m.ended:
		if err != nil {
			m.t.Errorf("agent of %s: %v", m.name, err)
		}
	case <-time.After(soon):
		m.t.Errorf("agent of %s does not end", m.name)
	}
}

func (m *member) get(path string, v any) error {
	resp, err := m.http.Get("http://agent" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

func (m *member) status() (s control.Status) {
	m.t.Helper()
	if err := m.get(control.PathStatus, &s); err != nil {
		m.t.Fatal(err)
	}
	if s.Underlay.Subnet == nil {
		m.t.Fatal("status has nothing of a subnet")
	}
	return s
}

// counter reads one of the machine's.
func (m *member) counter(name string) uint64 {
	m.t.Helper()
	var d control.Stats
	if err := m.get(control.PathStats, &d); err != nil {
		m.t.Fatal(err)
	}
	for _, c := range d.Counters {
		if c.Name == name {
			return c.Value
		}
	}
	m.t.Fatalf("no counter %s", name)
	return 0
}

// within waits until cond holds, and says how long that took.
func (m *member) within(d time.Duration, what string, cond func() bool) (took time.Duration) {
	m.t.Helper()
	start := time.Now()
	for !cond() {
		if time.Since(start) > d {
			m.t.Fatalf("%s: not %s within %v; status %+v", m.name, what, d, m.status().Underlay.Subnet)
		}
		time.Sleep(5 * time.Millisecond)
	}
	took = time.Since(start).Round(time.Millisecond)
	m.t.Logf("%s: %s after %v", m.name, what, took)
	return took
}

func (m *member) state(want string) func() bool {
	return func() bool { return m.status().Interface.State == want }
}

// pings sends one packet of each size to the other, over both versions of IP. The first few
// may be lost where there is no connection yet.
func (m *member) pings(to *member, sizes ...int) {
	m.t.Helper()
	for _, dst := range []string{m4(to.n), m6(to.n)} {
		for _, size := range sizes {
			var err error
			for end := time.Now().Add(soon); time.Now().Before(end); {
				if _, err = m.host.Ping(lab.Ping{Dst: netip.MustParseAddr(dst), Size: size}); err == nil {
					break
				}
				time.Sleep(20 * time.Millisecond)
			}
			if err != nil {
				m.t.Fatalf("%s pings %s with %d octets: %v", m.name, dst, size, err)
			}
		}
	}
}

// connected returns the connection to the one peer.
func (m *member) connected() control.Conn {
	m.t.Helper()
	var all control.Conns
	if err := m.get(control.PathConns, &all); err != nil {
		m.t.Fatal(err)
	}
	for _, c := range all.Conns {
		if c.State == lab.Established {
			return c
		}
	}
	m.t.Fatalf("%s has no connection: %+v", m.name, all.Conns)
	return control.Conn{}
}

// Two agents: groups, paths, an RC connection; then the subnet manager starts anew and has
// forgotten everybody. Members are back within two seconds of its word, and the connection goes on.
func TestAgents(t *testing.T) {
	agents(t, byDefault, "C", func(t *testing.T, sm manager, b, c *member) {
		b.start()
		c.start()
		for _, m := range []*member{b, c} {
			m.within(2*time.Second, "up", m.state("up"))
			s := m.status().Underlay.Subnet
			port, _, err := sm.port(m.name)
			if err != nil {
				t.Fatal(err)
			}
			if !s.Joined || s.MLID < 0xc000 {
				t.Errorf("%s: subnet %+v, want the broadcast group joined", m.name, s)
			}
			if s.LID != int(port.LID) || s.Admin != "ready" {
				t.Errorf("%s: LID %d and administrator %q, want %d and ready", m.name, s.LID, s.Admin, port.LID)
			}
		}
		b.pings(c, 84, 9000, 65520)
		c.pings(b, 84, 9000, 65520)
		before := b.connected()
		if n := b.status().Underlay.Subnet.Paths; n != 1 {
			t.Errorf("%d paths, want that to C", n)
		}

		sm.stopSM()
		b.pings(c, 9000) // it is not needed for what there is
		joins := b.counter("sa_ok_group")
		sm.startSM(true)
		b.within(2*time.Second, "a member again", func() bool { return b.counter("sa_ok_group") >= joins+4 })
		b.pings(c, 84, 9000)
		if after := b.connected(); after.LocalQPN != before.LocalQPN {
			t.Errorf("connection with QPN %s, want that of before, %s", after.LocalQPN, before.LocalQPN)
		}

		// Groups that are made are heard of by who has sent to one.
		reports := b.counter("sa_reports")
		send(t, b, "239.1.2.3")
		b.within(2*time.Second, "subscribed", func() bool { return b.counter("sa_ok_trap") >= 2 })
		c.within(5*time.Second, "a group made", func() bool {
			send(t, c, fmt.Sprintf("239.7.%d.%d", time.Now().UnixNano()&0xff, time.Now().UnixNano()>>8&0xff))
			time.Sleep(100 * time.Millisecond)
			return b.counter("sa_reports") > reports
		})
	})
}

// send sends a packet to a group.
func send(t *testing.T, m *member, group string) {
	t.Helper()
	if err := m.host.Do(func() error {
		from, to := &net.UDPAddr{IP: net.ParseIP(m4(m.n))}, &net.UDPAddr{IP: net.ParseIP(group), Port: 5004}
		c, err := net.DialUDP("udp4", from, to)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("hello"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// Agents that start where no subnet manager answers say so, and are up within two seconds
// of its return, which nothing tells of.
func TestAgentsWithoutManager(t *testing.T) {
	agents(t, byDefault, "C", func(t *testing.T, sm manager, b, c *member) {
		sm.stopSM()
		b.start()
		c.start()
		b.within(5*time.Second, "without a link", b.state("no link"))
		// The time to the next try doubles; from the third on it is the longest.
		b.within(soon, "asking rarely", func() bool { return b.counter("sa_retry_info") >= 3 })
		s := b.status()
		if s.Underlay.Subnet.Joined {
			t.Error("the broadcast group is joined, and there is nobody who could say so")
		}
		if s.Underlay.Subnet.Why == "" || !strings.Contains(strings.Join(s.Warnings, "\n"), s.Underlay.Subnet.Why) {
			t.Errorf("why there is no link: %q; warnings: %q", s.Underlay.Subnet.Why, s.Warnings)
		}
		t.Logf("status: %s", s.Underlay.Subnet.Why)
		sm.startSM(false)
		b.within(2*time.Second, "up", b.state("up"))
		c.within(2*time.Second, "up", c.state("up"))
		b.pings(c, 84, 9000)
	})
}

// A link of the fabric goes and comes back.
func TestAgentsLink(t *testing.T) {
	agents(t, byDefault, "C", func(t *testing.T, sm manager, b, c *member) {
		b.start()
		c.start()
		b.pings(c, 84, 9000)
		const bound = 2 * time.Second
		took := soon
		for try := 0; try < 3 && took > bound; try++ { // others may have had the processors
			sm.setLink(b.name, false)
			b.within(bound, "down", b.state("underlay down"))
			sm.setLink(b.name, true)
			took = b.within(soon, "up", b.state("up"))
		}
		if took > bound {
			t.Errorf("%s was up %v after its link, want %v at most", b.name, took, bound)
		}
		b.pings(c, 84, 9000)
		c.pings(b, 84, 9000)
	})
}

// In another partition a full and a limited member speak. The P_Key of a port goes, and
// there is no link; it returns at another place of the table, and there is one.
func TestAgentsPartition(t *testing.T) {
	agents(t, partitions, "D", func(t *testing.T, _ manager, b, d *member) {
		b.opt.PKey, d.opt.PKey = 0x8001, 0x8001
		b.start()
		d.start()
		b.pings(d, 84, 9000)
		d.pings(b, 84, 9000)
		b.port.setKeys(0xffff)
		b.within(2*time.Second, "down", func() bool { return b.status().Interface.State != "up" })
		if w := strings.Join(b.status().Warnings, "\n"); !strings.Contains(w, "0x8001") {
			t.Errorf("warnings %q say nothing of the P_Key", w)
		}
		b.port.setKeys(0xffff, 0, 0x8001)
		b.within(2*time.Second, "up", b.state("up"))
		b.pings(d, 84, 9000)
		d.pings(b, 84, 9000)
	})
}
