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
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"ipoibcm/internal/lab"
)

var (
	clusterFor   = flag.Duration("cluster", 0, "how long TestCluster goes on; without it a few rounds")
	clusterHosts = flag.Int("cluster.hosts", 8, "how many agents TestCluster has, at most 100")
	clusterSeed  = flag.Uint64("cluster.seed", 0,
		"the seed of TestCluster; 0 means 1 in the short form, and one that is drawn in the long one")
	clusterRounds = flag.Int("cluster.rounds", 3, "how many rounds TestCluster has in the short form")
)

const (
	clusterLease = 4 * time.Second
	// clusterBack is within what time two live hosts reach each other after the last fault.
	clusterBack = 5 * time.Second
	// clusterGone is how long a dead host may be on a list beyond its lease.
	clusterGone = 2 * time.Second
	// clusterSilence is how long a connection may carry nothing while only etcd has faults: the machine
	// may be busy.
	clusterSilence = 3 * time.Second
	etcdMembers    = 3
)

// A cluster is hosts, each behind a router that carries no multicast, and three members of etcd
// likewise.
type cluster struct {
	*segment
	r      *rand.Rand
	router *lab.Host
	live   map[*host]bool
	etcd   [etcdMembers]*etcdMember
	ctl    *clientv3.Client // for what operators do
	term   uint64           // of etcd when it was last seen to work
	mu     sync.Mutex       // guards notes
	notes  []string
}

type etcdMember struct {
	h   *host
	d   *daemon // nil while it is dead
	dir string
}

// addr is where host i of the underlay is; members of etcd follow the agents.
func clusterAddr(i int) string { return fmt.Sprintf("10.9.%d.2", i) }

// newCluster makes namespaces, routes and etcd. No agent runs.
func newCluster(t *testing.T, n int, seed uint64) *cluster {
	needEtcd(t)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	dir, err := os.MkdirTemp("", "ipcl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c := &cluster{segment: &segment{T: t, topology: topology{mtu: 9000, ipv4: true, udMTU: udMTU}, ctx: ctx, dir: dir},
		r: rand.New(rand.NewPCG(seed, 9)), live: map[*host]bool{}}
	prefix := fmt.Sprintf("%s%d-%d", namePrefix, os.Getpid(), serial.Add(1))
	namespace := func(name string) *lab.Host {
		h, err := lab.NewHost(prefix + name)
		c.must(err)
		t.Cleanup(func() { h.Close() })
		c.must(h.Sysctl("net/ipv6/conf/default/addr_gen_mode", "1"))
		return h
	}
	c.router = namespace("r")
	c.must(c.router.Sysctl("net/ipv4/ip_forward", "1"))
	t.Cleanup(c.end)
	for i := range n + etcdMembers {
		h := &host{Host: namespace(fmt.Sprint("h", i)), seg: c.segment, i: i}
		h.v4, h.v6 = netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), netip.MustParseAddr(fmt.Sprintf("fd00::%x", i+1))
		port := fmt.Sprint("p", i)
		c.must(lab.Connect(c.router, port, h.Host, underlay, c.mtu))
		c.must(c.router.AddAddr(port, fmt.Sprintf("10.9.%d.1/24", i)))
		c.must(h.AddAddr(underlay, clusterAddr(i)+"/24"))
		c.must(h.AddRoute(underlay, "10.9.0.0/16", fmt.Sprintf("10.9.%d.1", i)))
		if i < n {
			c.hosts = append(c.hosts, h)
		} else {
			c.etcd[i-n] = &etcdMember{h: h, dir: filepath.Join(dir, fmt.Sprint("etcd", i-n))}
		}
	}
	for i := range c.etcd {
		c.startEtcd(i)
	}
	c.ctl, err = clientv3.New(clientv3.Config{Endpoints: c.endpoints(), Logger: zap.NewNop(), DialTimeout: 3 * time.Second,
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(c.dial)}})
	c.must(err)
	t.Cleanup(func() { c.ctl.Close() })
	c.etcdWorks()
	return c
}

// dial connects from the router, which reaches everybody.
func (c *cluster) dial(ctx context.Context, addr string) (conn net.Conn, err error) {
	err = c.router.Do(func() error {
		var d net.Dialer
		conn, err = d.DialContext(ctx, "tcp", addr)
		return err
	})
	return conn, err
}

// control does something with etcd, with patience for one request.
func (c *cluster) control(f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(c.ctx, 3*time.Second)
	defer cancel()
	return f(ctx)
}

func (c *cluster) endpoints() (out []string) {
	for _, e := range c.etcd {
		out = append(out, clusterAddr(e.h.i)+":2379")
	}
	return out
}

func (c *cluster) peers() string {
	var out []string
	for i, e := range c.etcd {
		out = append(out, fmt.Sprintf("m%d=http://%s:2380", i, clusterAddr(e.h.i)))
	}
	return strings.Join(out, ",")
}

func (c *cluster) startEtcd(i int) {
	e := c.etcd[i]
	url := "http://" + clusterAddr(e.h.i)
	e.d = e.h.daemon("etcd", "--name", fmt.Sprint("m", i), "--data-dir", e.dir, "--listen-client-urls", url+":2379",
		"--advertise-client-urls", url+":2379",
		"--listen-peer-urls", url+":2380", "--initial-advertise-peer-urls", url+":2380", "--initial-cluster", c.peers())
}

func (c *cluster) killEtcd(i int) {
	if e := c.etcd[i]; e.d != nil {
		e.d.kill()
		e.d = nil
	}
}

func id(h *host) string { return fmt.Sprintf("h%02d", h.i) }

// start starts the agent of h.
func (c *cluster) start(h *host) {
	args := h.config("state_dir: " + filepath.Join(c.dir, id(h)) + "\netcd: {lease: " + clusterLease.String() + "}\n")
	h.run(append(args, "--log-level", "info", "--link", "blue", "--membership",
		"etcd://"+strings.Join(c.endpoints(), ","), "--member-id", id(h))...)
	c.live[h] = true
}

// die ends the agent of h without a goodbye.
func (c *cluster) die(h *host) {
	h.kill()
	delete(c.live, h)
}

func (c *cluster) say(format string, args ...any) {
	text := time.Now().Format("15:04:05.0 ") + fmt.Sprintf(format, args...)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notes = append(c.notes, text)
}

// nft loads rules into the router; none means that all passes.
func (c *cluster) nft(rules string) {
	c.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader("table ip cluster\ndelete table ip cluster\n" + rules)
	if out, err := c.router.Output(cmd); err != nil {
		c.Fatalf("nft: %v\n%s", err, out)
	}
}

// apart drops what goes between member i of etcd and addresses.
func (c *cluster) apart(members []int, from string) {
	var rules strings.Builder
	for _, i := range members {
		a := clusterAddr(c.etcd[i].h.i)
		fmt.Fprintf(&rules, "ip saddr %s ip daddr %s drop\nip daddr %s ip saddr %s drop\n", a, from, a, from)
	}
	c.nft("table ip cluster {\nchain f {\ntype filter hook forward priority 0;\n" + rules.String() + "}\n}\n")
}

// An etcdFault happens to the cluster of etcd, until heal.
type etcdFault struct {
	name string
	do   func(c *cluster)
}

var etcdFaults = []etcdFault{
	{"one member is killed", func(c *cluster) { c.killEtcd(c.r.IntN(etcdMembers)) }},
	{"two members are killed",
		func(c *cluster) { i := c.r.IntN(etcdMembers); c.killEtcd(i); c.killEtcd((i + 1) % etcdMembers) }},
	{"all members are killed", func(c *cluster) {
		for i := range c.etcd {
			c.killEtcd(i)
		}
	}},
	{"one member is cut off from all", func(c *cluster) { c.apart([]int{c.r.IntN(etcdMembers)}, "10.9.0.0/16") }},
	{"one member is cut off from the others", func(c *cluster) {
		i := c.r.IntN(etcdMembers)
		c.apart([]int{i}, "{ "+clusterAddr(c.etcd[(i+1)%3].h.i)+", "+clusterAddr(c.etcd[(i+2)%3].h.i)+" }")
	}},
	{"all are cut off from the hosts", func(c *cluster) { c.apart([]int{0, 1, 2}, "10.9.0.0/16") }},
	{"a compaction", (*cluster).compact},
	{"a restore from a snapshot", (*cluster).restore},
	{"none", func(*cluster) {}},
}

// compact forgets the past, while the hosts are cut off from etcd and will want it.
func (c *cluster) compact() {
	c.apart([]int{0, 1, 2}, "10.9.0.0/16") // what the router itself sends is not forwarded
	time.Sleep(time.Second)
	err := c.control(func(ctx context.Context) error {
		r, err := c.ctl.Put(ctx, "/elsewhere", "x")
		for range 20 {
			if err == nil {
				r, err = c.ctl.Put(ctx, "/elsewhere", "x")
			}
		}
		if err == nil {
			_, err = c.ctl.Compact(ctx, r.Header.Revision)
		}
		return err
	})
	c.say("compacted: %v", err)
}

// restore takes a snapshot, lets the list change, and starts the cluster again with that of before.
func (c *cluster) restore() {
	if _, err := exec.LookPath("etcdctl"); err != nil {
		c.say("no etcdctl: nothing is restored")
		return
	}
	file := filepath.Join(c.dir, "snapshot.db")
	err := c.control(func(ctx context.Context) error {
		in, err := c.ctl.Snapshot(ctx)
		if err != nil {
			return err
		}
		defer in.Close()
		b, err := io.ReadAll(in)
		if err == nil {
			err = os.WriteFile(file, b, 0o600)
		}
		return err
	})
	if err != nil {
		c.say("no snapshot: %v", err)
		return
	}
	_ = c.control(func(ctx context.Context) (err error) {
		for range 30 { // the revision of the snapshot will be far behind
			_, err = c.ctl.Put(ctx, "/elsewhere", "x")
		}
		return err
	})
	for i := range c.etcd {
		c.killEtcd(i)
	}
	for i, e := range c.etcd {
		c.must(os.RemoveAll(e.dir))
		cmd := exec.Command("etcdctl", "snapshot", "restore", file, "--name", fmt.Sprint("m", i),
			"--initial-cluster", c.peers(),
			"--initial-advertise-peer-urls", "http://"+clusterAddr(e.h.i)+":2380", "--data-dir", e.dir)
		cmd.Env = append(os.Environ(), "ETCDCTL_API=3")
		if out, err := cmd.CombinedOutput(); err != nil {
			c.Fatalf("restore: %v\n%s", err, out)
		}
	}
	c.say("restored")
}

// heal ends all faults of etcd and waits until it has a leader.
func (c *cluster) heal() {
	c.nft("")
	for i, e := range c.etcd {
		if e.d == nil {
			c.startEtcd(i)
		}
	}
	c.etcdWorks()
}

// etcdWorks waits until etcd has a leader and takes writes: elections are its own, and a fault like others.
func (c *cluster) etcdWorks() {
	c.Helper()
	c.eventually(patience, "etcd has a leader", func() error {
		return c.control(func(ctx context.Context) error {
			r, err := c.ctl.Put(ctx, "/elsewhere", "x")
			if err == nil {
				c.term = r.Header.RaftTerm
			}
			return err
		})
	})
}

// A lastFault is the stopwatch since the last fault. When etcd changes its leader again, it begins anew.
type lastFault struct {
	mu    sync.Mutex
	watch *stopwatch
	stop  func()
}

// sinceFault begins with w, and goes on until stop is called.
func (c *cluster) sinceFault(w *stopwatch) *lastFault {
	l := &lastFault{watch: w}
	ctx, cancel := context.WithCancel(c.ctx)
	var wg sync.WaitGroup
	l.stop = func() { cancel(); wg.Wait() }
	wg.Go(func() {
		for term := c.term; ctx.Err() == nil; {
			if r, err := c.ctl.Get(ctx, "x"); err == nil && r.Header.RaftTerm != term {
				l.mu.Lock()
				l.watch = c.stopwatch()
				l.mu.Unlock()
				c.say("etcd has elected again: term %d after %d", r.Header.RaftTerm, term)
				term = r.Header.RaftTerm
			}
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	return l
}

func (l *lastFault) read() *stopwatch {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.watch
}

// A pulse pings over a connection all the time, and knows the longest silence.
type pulse struct {
	longest, last atomic.Int64
	stop          chan struct{}
	done          sync.WaitGroup
}

func (c *cluster) pulse(a, b *host) *pulse {
	p := &pulse{stop: make(chan struct{})}
	p.last.Store(time.Now().UnixNano())
	p.done.Go(func() {
		for {
			select {
			case <-p.stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
			if _, err := a.Ping(lab.Ping{Dst: b.v4, Timeout: pingWithin}); err == nil {
				now := time.Now().UnixNano()
				p.longest.Store(max(p.longest.Load(), now-p.last.Swap(now)))
			}
		}
	})
	return p
}

// end returns the longest silence.
func (p *pulse) end() time.Duration {
	close(p.stop)
	p.done.Wait()
	return max(time.Duration(p.longest.Load()), time.Duration(time.Now().UnixNano()-p.last.Load()))
}

// Agents on a routed underlay without multicast, and etcd of three members: hosts come and go, members of
// etcd die, are cut off, lose their quorum, are compacted and restored. Whatever happens, a connection
// does not stop for a fault of etcd, two live hosts reach each other within 5 s of the last fault, and a
// dead host is on no list after its lease and 2 s.
func TestCluster(t *testing.T) {
	if *clusterFor == 0 {
		longOrRace(t)
	}
	needRoot(t)
	needNFT(t)
	seed := *clusterSeed
	if seed == 0 {
		seed = 1
		if *clusterFor > 0 {
			seed = uint64(time.Now().UnixNano())
		}
	}
	n := min(*clusterHosts, 100)
	t.Logf("seed %d, %d hosts", seed, n)
	c := newCluster(t, n, seed)
	defer func() {
		if t.Failed() {
			t.Logf("seed %d:\n%s", seed, strings.Join(c.notes[max(0, len(c.notes)-60):], "\n"))
		}
	}()
	for _, h := range c.hosts[:max(4, n*3/4)] {
		c.start(h)
	}
	c.settled(c.stopwatch())
	end := time.Now().Add(*clusterFor)
	rounds := 0
	for ; rounds < *clusterRounds && *clusterFor == 0 || time.Now().Before(end); rounds++ {
		c.round(rounds)
		if t.Failed() {
			return
		}
	}
	t.Logf("%d rounds", rounds)
}

// round has one fault of etcd, hosts that come and go meanwhile, and a look at what must hold.
func (c *cluster) round(n int) {
	a, b := c.hosts[0], c.hosts[1] // these two live from the beginning to the end
	p, w := c.pulse(a, b), c.stopwatch()
	f := etcdFaults[c.r.IntN(len(etcdFaults))]
	if *clusterFor == 0 {
		f = etcdFaults[[]int{2, 7, 5, 1, 6, 3, 4, 0}[n%8]]
	}
	c.say("round %d: %s", n, f.name)
	f.do(c)
	for range 1 + c.r.IntN(3) {
		c.churn()
		time.Sleep(time.Duration(c.r.IntN(1500)) * time.Millisecond)
	}
	time.Sleep(time.Duration(c.r.Int64N(int64(2 * clusterLease))))
	c.heal()
	healed := c.stopwatch()
	c.say("healed")
	_, waited := w.read()
	if silence := p.end(); silence-waited > clusterSilence {
		c.Errorf("round %d, %s: a connection was silent for %v, of which %v were waiting for a processor; want none",
			n, f.name, silence, waited)
	}
	c.settled(healed)
}

// churn has one host come or go, but the first two.
func (c *cluster) churn() {
	h := c.hosts[2+c.r.IntN(len(c.hosts)-2)]
	switch {
	case !c.live[h]:
		c.say("%s starts", id(h))
		c.start(h)
	case len(c.live) <= 4:
	case c.r.IntN(3) == 0:
		c.say("%s stops", id(h))
		h.stop()
		delete(c.live, h)
	default:
		c.say("%s dies", id(h))
		c.die(h)
	}
}

// settled looks at what must hold after the last fault, since which the stopwatch runs.
func (c *cluster) settled(fault *stopwatch) {
	c.Helper()
	var live []*host
	for _, h := range c.hosts {
		if c.live[h] {
			live = append(live, h)
		}
	}
	since := c.sinceFault(fault)
	defer since.stop()
	c.reach(live, since)
	c.listsAreRight(live, since)
}

// reach waits until pairs of hosts reach each other: all of few hosts, some of many.
func (c *cluster) reach(live []*host, fault *lastFault) {
	c.Helper()
	type pair struct{ a, b *host }
	var pairs []pair
	for i, x := range live {
		for _, y := range live[i+1:] {
			pairs = append(pairs, pair{x, y})
		}
	}
	c.r.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
	pairs = pairs[:min(len(pairs), 40)]
	var wg sync.WaitGroup
	limit := make(chan struct{}, 8)
	for _, p := range pairs {
		wg.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			for {
				_, err := p.a.Ping(lab.Ping{Dst: p.b.v4, Timeout: pingWithin})
				if err == nil {
					return
				}
				if time.Since(fault.read().began) > patience {
					c.Errorf("%s does not reach %s %v after the last fault: %v", id(p.a), id(p.b), patience, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := fault.read().over(clusterBack); err != nil {
		c.Errorf("all reach each other after the last fault: %v", err)
	}
	c.say("reached each other: %d pairs, %v after the last fault", len(pairs),
		time.Since(fault.read().began).Round(time.Millisecond))
}

// listsAreRight waits until every host knows those that live, and no other.
func (c *cluster) listsAreRight(live []*host, fault *lastFault) {
	c.Helper()
	var want []string
	for _, h := range live {
		want = append(want, id(h))
	}
	for _, h := range live {
		c.eventuallyBy(fault.read(), patience, id(h)+" knows those that live", func() error {
			var got []string
			d := h.members()
			for _, m := range d.Members {
				got = append(got, m.ID)
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("it knows %v, want %v (%s; held %v)", got, want, d.Error, d.Held)
			}
			return nil
		})
	}
	if err := fault.read().over(clusterLease + clusterGone); err != nil { // nobody dies after the last fault
		c.Errorf("the lists are right after the last fault: %v", err)
	}
	c.say("lists are right %v after the last fault", time.Since(fault.read().began).Round(time.Millisecond))
}
