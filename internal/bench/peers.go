package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
)

const (
	// manyPeers are connected at the same time.
	manyPeers = 1000
	// somePeers are connected one after the other; the rest in two bursts.
	somePeers = 100
	// morePeers is how many peers are connected when the first burst is over: more than an
	// agent has receive buffers for UD (512), so that each buffer has been written to by then.
	morePeers = 700
	// farmGIDs is how many GIDs the peers share. They do not share one, because an agent
	// limits the answers per second that it accepts from one GID. Hosts with a GID each
	// would not come near that limit.
	farmGIDs = 64
	// dialWindow is how many peers of a burst are without a connection at most at the same time.
	dialWindow = 64

	firstPacket = "first packet to established, p50"
	firstTail   = "first packet to established, p99"
	setupRate   = "connections per second, one core"
	setupCPU    = "agent's CPU per connection"
	perConn     = "per idle connection"
	heapConn    = "live heap per idle connection"
	twoHosts    = "two hosts"
	amongMany   = "one of 1000 peers"
)

// memoryName is the variant of a [Key].
func memoryName(n int) string {
	if n == 1 {
		return "1 peer"
	}
	return fmt.Sprintf("%d peers", n)
}

// setupPlace is the underlay on which peers are connected.
var setupPlace = place{9000, family6}

func setupTargets() []target {
	at := setupPlace
	return []target{
		{name: "first packet to established, p50", num: at.key(testSetup, firstPacket, oursRC), atMost: true,
			bound: 2, unit: "ms"},
		{name: "connections per second, the whole agent on one core", num: at.key(testSetup, setupRate, oursRC),
			bound: 2000, unit: "per second"},
		{name: "idle connection beyond shared buffers", num: at.key(testMemory, perConn, oursRC), atMost: true,
			bound: 8, unit: "KiB"},
	}
}

func peerTargets() []target {
	return []target{{name: fmt.Sprintf("one of %d peers of two hosts", manyPeers),
		num: setupPlace.key(testPeers, amongMany, oursRC), den: setupPlace.key(testPeers, twoHosts, oursRC),
		bound: 0.90, rounds: 9}}
}

// farmPrefix contains the GIDs of a farm.
var farmPrefix = netip.MustParsePrefix("fd00:0:0:1::/64")

// ownGIDs are the GIDs of the agents beside a farm.
var ownGIDs = [2]string{"fd00:0:0:1::ffff", "fd00:0:0:1::fffe"}

// A crowd is a farm process, and a socket that sends to its peers.
type crowd struct {
	up   []int64 // when each connection was established, in ns of the monotonic clock; 0 before that
	news chan news
	dial *net.UDPConn
}

type news struct {
	peer int
	at   int64
}

// startCrowd starts a farm of n peers on eth0 of the host there. Packets to the peers
// are sent on the first host, whose agent has an address of their network. The crowd ends with the mesh.
func (m *mesh) startCrowd(there *lab.Host, n int) (c *crowd, err error) {
	c = &crowd{up: make([]int64, n), news: make(chan news, n)}
	for i := range farmGIDs {
		a := farmPrefix.Addr().As16()
		a[15] = byte(1 + i)
		if err := there.AddAddr("eth0", netip.AddrFrom16(a).String()+"/64"); err != nil {
			return nil, err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, farmCommand, "-peers", strconv.Itoa(n), "-gids", farmPrefix.String())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := there.Start(cmd); err != nil {
		return nil, fmt.Errorf("start farm: %w", err)
	}
	m.onClose(func() {
		in.Close()
		cmd.Wait()
	})
	if err := untilLine(out, "ready"); err != nil {
		return nil, fmt.Errorf("farm: %w", err)
	}
	go c.listen(out)
	c.dial, err = lab.In(m.hosts[meshSender], func() (*net.UDPConn, error) { return net.ListenUDP("udp4", nil) })
	if err != nil {
		return nil, err
	}
	m.onClose(func() { c.dial.Close() })
	return c, nil
}

func (c *crowd) listen(r io.Reader) {
	for s := bufio.NewScanner(r); s.Scan(); {
		var n news
		if _, err := fmt.Sscanf(s.Text(), "up %d %d", &n.peer, &n.at); err == nil && n.peer >= 0 && n.peer < len(c.up) {
			c.news <- n
		}
	}
}

// resendAfter is when a packet is sent again if no connection was reported: the kernel's
// queue was full, or the connection is there but its RTU was lost.
const resendAfter = 50 * time.Millisecond

// connect sends one packet to each of the peers from..to-1 and waits, up to 30 s, until all
// have a connection. At most window peers at a time have been sent a packet and have no
// connection yet. started are the times of the first packet to each peer, last is when the
// last connection was established, in ns of the monotonic clock.
func (c *crowd) connect(ctx context.Context, from, to, window int) (started []int64, last int64, err error) {
	started = make([]int64, to-from)
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	packet := make([]byte, 32)
	next, open := from, 0
	done := 0
	again := time.NewTicker(resendAfter)
	defer again.Stop()
	for done < to-from {
		for next < to && open < window {
			started[next-from] = monotonic()
			if err := c.send(next, packet); err != nil {
				return nil, 0, err
			}
			next, open = next+1, open+1
		}
		select {
		case n := <-c.news:
			if c.up[n.peer] == 0 {
				c.up[n.peer] = n.at
				last = max(last, n.at)
				done, open = done+1, open-1
			}
		case <-again.C:
			old := monotonic() - int64(resendAfter)
			for i := from; i < next; i++ {
				if c.up[i] == 0 && started[i-from] < old {
					if err := c.send(i, packet); err != nil {
						return nil, 0, err
					}
				}
			}
		case <-ctx.Done():
			return nil, 0, fmt.Errorf("%d of %d connections: %w", done, to-from, ctx.Err())
		}
	}
	return started, last, nil
}

func (c *crowd) send(i int, b []byte) error {
	_, err := c.dial.WriteToUDPAddrPort(b, netip.AddrPortFrom(farmIP(i), 9))
	return err
}

// pin keeps a process on the last processor, if the machine has others too.
func pin(pid int) error {
	if runtime.NumCPU() == 1 {
		return nil
	}
	var set unix.CPUSet
	set.Set(runtime.NumCPU() - 1)
	for range 2 { // the second time for threads that were made meanwhile
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if err != nil {
			return err
		}
		for _, t := range tasks {
			id, _ := strconv.Atoi(filepath.Base(t))
			if err := unix.SchedSetaffinity(id, &set); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("pin to one processor: %w", err)
			}
		}
	}
	return nil
}

// setups measures how fast connections are set up, and the memory and processor time of each.
func (b *bench) setups(ctx context.Context) error {
	names := []string{oursRC}
	if b.against != "" {
		names = append(names, before(oursRC))
	}
	for round := range b.rounds {
		for _, name := range names {
			b.say("round %d of %d: connecting %d peers, %s", round+1, b.rounds, manyPeers, name)
			if err := b.setupRound(ctx, name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) setupRound(ctx context.Context, contender string) error {
	m := &mesh{meshKind: meshKind{at: setupPlace, size: 2, veth: true, traffic: family4}, contender: contender}
	defer m.close()
	if err := m.makeHosts(b); err != nil {
		return err
	}
	if err := m.hosts[meshSender].AddAddr("eth0", ownGIDs[0]+"/64"); err != nil {
		return err
	}
	c, err := m.startCrowd(m.hosts[meshPeer], manyPeers)
	if err != nil {
		return err
	}
	if err := m.startAgent(ctx, b, meshSender, "--gid", ownGIDs[0], "--address", m.inner(meshSender)); err != nil {
		return err
	}
	if err := pin(m.agents[meshSender].PID()); err != nil {
		return err
	}
	if err := b.firstPackets(ctx, m, c); err != nil {
		return err
	}
	return b.bursts(ctx, m, c)
}

// firstPackets measures how long the first packet to a peer takes, one peer after the other.
func (b *bench) firstPackets(ctx context.Context, m *mesh, c *crowd) error {
	var each []float64
	for i := range somePeers {
		time.Sleep(2 * time.Millisecond) // the connection before this one is finished by then
		started, last, err := c.connect(ctx, i, i+1, 1)
		if err != nil {
			return err
		}
		each = append(each, float64(last-started[0])/1e6)
		if n := i + 1; n == 1 || n == somePeers {
			used, err := readMemory(ctx, m.agents[meshSender])
			if err != nil {
				return err
			}
			b.r.add(m.key(testMemory, memoryName(n)), "KiB", used.resident/1024)
		}
	}
	b.r.add(m.key(testSetup, firstPacket), "ms", quantile(each, 0.50))
	b.r.add(m.key(testSetup, firstTail), "ms", quantile(each, 0.99))
	return nil
}

// bursts measures the connections to all other peers, made in two bursts.
func (b *bench) bursts(ctx context.Context, m *mesh, c *crowd) (err error) {
	a := m.agents[meshSender]
	var took, cpu time.Duration
	var half memory
	for i, to := range []int{morePeers, manyPeers} {
		from := somePeers
		if i > 0 {
			from = morePeers
			if half, err = readMemory(ctx, a); err != nil {
				return err
			}
		}
		d, used, err := c.burst(ctx, from, to, a.PID())
		if err != nil {
			return err
		}
		took, cpu = took+d, cpu+used
	}
	const burst = manyPeers - somePeers
	b.r.add(m.key(testSetup, setupRate), "/s", burst/took.Seconds())
	b.r.add(m.key(testSetup, setupCPU), "µs", float64(cpu.Microseconds())/burst)
	after, err := readMemory(ctx, a)
	if err != nil {
		return err
	}
	b.r.add(m.key(testMemory, memoryName(manyPeers)), "KiB", after.resident/1024)
	b.r.add(m.key(testMemory, perConn), "KiB", (after.resident-half.resident)/(manyPeers-morePeers)/1024)
	b.r.add(m.key(testMemory, heapConn), "KiB", (after.heap-half.heap)/(manyPeers-morePeers)/1024)
	return nil
}

// burst connects the peers from..to-1 and returns how long that took, and how much
// processor time of the agent with this process ID.
func (c *crowd) burst(ctx context.Context, from, to, agent int) (took, cpu time.Duration, err error) {
	before, err := processCPU(agent)
	if err != nil {
		return 0, 0, err
	}
	started, last, err := c.connect(ctx, from, to, dialWindow)
	if err != nil {
		return 0, 0, err
	}
	after, err := processCPU(agent)
	return time.Duration(last - started[0]), after - before, err
}

// A memory is the memory that an agent uses, in octets.
type memory struct{ resident, heap float64 }

// readMemory returns the memory of the agent. The request for [control.Runtime] makes the agent collect
// garbage and give free memory back first.
func readMemory(ctx context.Context, a *lab.Agent) (m memory, err error) {
	var r control.Runtime
	if err := a.Get(ctx, control.PathRuntime, &r); err != nil {
		return m, err
	}
	n, err := resident(a.PID())
	return memory{float64(n), float64(r.HeapOctets)}, err
}

// many measures goodput to one of many connected peers, and between two hosts alone,
// both over a bridge.
func (b *bench) many(ctx context.Context) error {
	alone, err := b.bridged(ctx, 0)
	if err != nil {
		return err
	}
	defer alone.close()
	b.say("connecting %d peers", manyPeers)
	among, err := b.bridged(ctx, manyPeers-1)
	if err != nil {
		return err
	}
	defer among.close()
	rounds := max(9, b.rounds)
	if b.rounds < 5 {
		rounds = b.rounds // a quick run, to see that it works
	}
	for round := range rounds {
		for _, hosts := range []struct {
			name string
			m    *mesh
		}{{twoHosts, alone}, {amongMany, among}} {
			b.say("round %d of %d: goodput, %s", round+1, rounds, hosts.name)
			t, err := b.runLoad(ctx, hosts.m, load{streams: 1})
			if err != nil {
				return err
			}
			b.r.add(hosts.m.key(testPeers, hosts.name), "Mb/s", t.mbps())
		}
	}
	return nil
}

// bridged makes two hosts with agents on a bridge. If others is not zero, it also connects
// the first host to that many peers of a farm, which is the third host.
func (b *bench) bridged(ctx context.Context, others int) (m *mesh, err error) {
	// The farm's peers have IPv4 addresses.
	m = &mesh{meshKind: meshKind{at: setupPlace, size: 3, traffic: family4}, contender: oursRC}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	if err := m.makeHosts(b); err != nil {
		return nil, err
	}
	for i, gid := range ownGIDs {
		if err := m.hosts[i].AddAddr("eth0", gid+"/64"); err != nil {
			return nil, err
		}
	}
	var c *crowd
	if others > 0 {
		if c, err = m.startCrowd(m.hosts[2], others); err != nil {
			return nil, err
		}
	}
	m.addrs = nil // the farm has none
	for i, gid := range ownGIDs {
		m.addrs = append(m.addrs, addr(m.inner(i)))
		if err := m.startAgent(ctx, b, i, "--gid", gid, "--address", m.inner(i)); err != nil {
			return nil, err
		}
	}
	if err := m.wait(ctx); err != nil {
		return nil, err
	}
	if c != nil {
		_, _, err = c.connect(ctx, 0, others, dialWindow)
	}
	return m, err
}

// processCPU returns the processor time that one process has used.
func processCPU(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	p, ok := parseProcStat(string(b))
	if !ok {
		return 0, fmt.Errorf("/proc/%d/stat cannot be read", pid)
	}
	return p.used, nil
}

// resident returns the resident memory of a process in octets.
func resident(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(v), " kB"))
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no VmRSS", pid)
}
