package interop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/lab"
	"ipoibcm/test/interop/vm"
)

// The product in guests, over libibverbs: rdma_rxe below our agent, on one end or
// on both. What it must do is what test/netns has between two namespaces.

// Names of the programs in a guest.
const (
	productProgram = "ipoibcmd-ibverbs"
	trafficProgram = "traffic"
	saProgram      = "saprobe"
)

var products struct {
	sync.Mutex
	img *vm.Image
	dir string
	err error

	softIB    *vm.Image // img with a soft InfiniBand port
	softIBErr error
}

// productImage returns an image with the product and the traffic program, and the
// directory that has them on the host. It is made once.
func productImage(t *testing.T) (*vm.Image, string) {
	t.Helper()
	base := image(t)
	products.Lock()
	defer products.Unlock()
	if products.img == nil && products.err == nil {
		products.dir, products.err = os.MkdirTemp("", "ipio-")
		if products.err == nil {
			products.img, products.err = makeProductImage(base, products.dir)
		}
	}
	if products.err != nil {
		t.Fatal(products.err)
	}
	return products.img, products.dir
}

// softIBImage is productImage with the soft InfiniBand port, which is built once. It skips the test
// where that cannot be.
func softIBImage(t *testing.T) (*vm.Image, string) {
	t.Helper()
	base, dir := productImage(t)
	products.Lock()
	defer products.Unlock()
	if products.softIB == nil && products.softIBErr == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
		defer cancel()
		port := filepath.Join(dir, "softib")
		if products.softIBErr = os.Mkdir(port, 0o700); products.softIBErr == nil {
			products.softIB, products.softIBErr = vm.WithSoftIB(ctx, base, port)
		}
	}
	err := products.softIBErr
	var missing *vm.MissingError
	if errors.Is(err, vm.ErrNoSoftIB) || errors.As(err, &missing) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return products.softIB, dir
}

func makeProductImage(base *vm.Image, dir string) (*vm.Image, error) {
	product, traffic, admin := filepath.Join(dir, productProgram), filepath.Join(dir, trafficProgram),
		filepath.Join(dir, saProgram)
	for _, b := range []struct {
		cgo  string
		args []string
	}{
		{"1", []string{"-tags=ibverbs", "-o", product, "ipoibcm/cmd/ipoibcmd"}},
		{"0", []string{"-o", traffic, "ipoibcm/test/interop/guest/traffic"}},
		{"0", []string{"-o", admin, "ipoibcm/test/interop/guest/saprobe"}},
	} {
		c := exec.Command("go", append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w"}, b.args...)...)
		c.Env = append(os.Environ(), "CGO_ENABLED="+b.cgo)
		if out, err := c.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("go build %s: %w\n%s", strings.Join(b.args, " "), err, out)
		}
	}
	return vm.WithPrograms(context.Background(), base, dir, product, traffic, admin)
}

func closeProducts() {
	products.Lock()
	defer products.Unlock()
	if products.dir != "" {
		os.RemoveAll(products.dir)
	}
}

// A proc is a command that runs.
type proc interface {
	Line(timeout time.Duration) (string, error)
	Wait(timeout time.Duration) (string, error)
	Output() string
	Kill()
}

// A node is where an agent runs: a guest or a namespace.
type node struct {
	t        *testing.T
	name     string
	provider []string // arguments of run
	number   int      // of its addresses
	link     int      // that they belong to; zero for all but a second link of the same hosts
	ifname   string   // of the interface; empty: productIf
	socket   string   // control socket
	start    func(argv ...string) (proc, error)

	agent proc
	args  []string
}

// guestNode runs agents on rxe0 of a guest, which does not load ib_cm by itself.
func guestNode(t *testing.T, g *vm.VM, number int) *node {
	return &node{t: t, name: g.Name, number: number, socket: "/run/agent.sock",
		provider: []string{"--provider=ibverbs", "--device=rxe0"},
		start:    func(argv ...string) (proc, error) { return g.Start(argv...) }}
}

// hostNode runs agents on eth0 of a namespace of the host.
func hostNode(t *testing.T, h *lab.Host, dir string, number int) *node {
	return &node{t: t, name: "host", number: number, socket: filepath.Join(dir, h.Name+".sock"),
		provider: []string{"--provider=softroce", "--underlay=eth0"},
		start:    func(argv ...string) (proc, error) { return startHere(h, dir, argv) }}
}

// A hostProc is a command in a namespace.
type hostProc struct {
	cmd  *exec.Cmd
	stop io.Closer // ends what was told to end with its standard input
	done chan struct{}
	err  error

	mu   sync.Mutex
	out  bytes.Buffer
	read int // octets that Line has returned
}

func startHere(h *lab.Host, dir string, argv []string) (*hostProc, error) {
	path := argv[0]
	if _, err := os.Stat(filepath.Join(dir, path)); err == nil {
		path = filepath.Join(dir, path)
	}
	p := &hostProc{cmd: exec.Command(path, argv[1:]...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.WaitDelay = time.Second
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.stop = in
	if err := h.Start(p.cmd); err != nil {
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Write takes in what the command prints.
func (p *hostProc) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *hostProc) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

func (p *hostProc) Line(timeout time.Duration) (string, error) {
	for end := time.Now().Add(timeout); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		rest := p.Output()[p.read:]
		if line, _, ok := strings.Cut(rest, "\n"); ok {
			p.read += len(line) + 1
			return line, nil
		}
		select {
		case <-p.done:
			return "", fmt.Errorf("%v has ended: %w\n%s", p.cmd.Args, p.err, p.Output())
		default:
		}
	}
	return "", fmt.Errorf("%v: %w\n%s", p.cmd.Args, vm.ErrTimeout, p.Output())
}

func (p *hostProc) Wait(timeout time.Duration) (string, error) {
	select {
	case <-p.done:
	case <-time.After(timeout):
		p.Kill()
		return p.Output(), fmt.Errorf("%v: %w after %v\n%s", p.cmd.Args, vm.ErrTimeout, timeout, p.Output())
	}
	if p.err != nil {
		return p.Output(), fmt.Errorf("%v: %w\n%s", p.cmd.Args, p.err, p.Output())
	}
	return p.Output(), nil
}

func (p *hostProc) Kill() {
	p.cmd.Process.Kill()
	<-p.done
}

// run runs a command to its end.
func (n *node) run(argv ...string) (string, error) {
	p, err := n.start(argv...)
	if err != nil {
		return "", err
	}
	return p.Wait(2 * patience)
}

func (n *node) must(argv ...string) string {
	n.t.Helper()
	out, err := n.run(argv...)
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

const productIf = "ibcm0"

func (n *node) v4() string { return fmt.Sprintf("10.9.%d.%d", n.link, n.number) }
func (n *node) v6() string {
	return netip.MustParseAddr(fmt.Sprintf("fd09:%d::%d", n.link, n.number)).String()
}

// up starts the agent and waits until its interface is up.
func (n *node) up(args ...string) {
	n.t.Helper()
	n.args = args
	argv := append([]string{productProgram, "run", "--name=" + productIf, "--control=" + n.socket,
		"--address=" + n.v4() + "/24"}, n.provider...)
	var err error
	if n.agent, err = n.start(append(argv, args...)...); err != nil {
		n.t.Fatal(err)
	}
	t, agent := n.t, n.agent
	t.Cleanup(func() {
		agent.Kill()
		if t.Failed() {
			t.Logf("agent on %s:\n%s", n.name, agent.Output())
		}
	})
	n.until("the interface is up", func() error {
		var s control.Status
		if err := n.ask(&s); err != nil {
			return err
		}
		if s.Interface.State != "up" {
			return fmt.Errorf("it is %s", s.Interface.State)
		}
		return nil
	})
}

// end ends the agent with a signal: TERM or KILL.
func (n *node) end(signal string) {
	n.t.Helper()
	n.must("kill", "-"+signal, fmt.Sprint(n.status().Interface.PID))
	if _, err := n.agent.Wait(patience); err != nil && signal == "TERM" {
		n.t.Errorf("ended by SIGTERM: %v", err)
	}
}

// ask reads one document of the agent. A guest starts the program for that in a third of the time that
// ours takes.
func (n *node) ask(v any) error {
	path := ""
	switch v.(type) {
	case *control.Status:
		path = control.PathStatus
	case *control.Conns:
		path = control.PathConns
	case *control.Neighbours:
		path = control.PathNeigh
	case *control.Stats:
		path = control.PathStats
	default:
		panic(fmt.Sprintf("no document %T", v))
	}
	return n.askAt(v, path)
}

// askAt reads the document at a path of the control API.
func (n *node) askAt(v any, path string) error {
	out, err := n.run(trafficProgram, "get", n.socket, path)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), v)
}

func (n *node) status() (s control.Status) {
	n.t.Helper()
	if err := n.ask(&s); err != nil {
		n.t.Fatal(err)
	}
	return s
}

// until waits until ok has no error.
func (n *node) until(what string, ok func() error) {
	n.t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = ok(); err == nil {
			return
		}
	}
	n.t.Fatalf("%s: %s: not in %v: %v", n.name, what, patience, err)
}

// reach pings until there is an answer: resolving takes a moment, and the first
// packets may have been lost.
func (n *node) reach(dst string, sizes ...int) {
	n.t.Helper()
	argv := []string{trafficProgram, "ping", dst}
	for _, size := range sizes {
		argv = append(argv, fmt.Sprint(size))
	}
	n.until(fmt.Sprintf("ping %s with %d octets", dst, sizes), func() error {
		_, err := n.run(argv...)
		return err
	})
}

// connected waits for one established connection of that mode, whose CM messages went by
// path, any if that is empty, and returns it.
func (n *node) connected(mode, path string) (c control.Conn) {
	n.t.Helper()
	n.until("one "+mode+" connection", func() (err error) {
		c, err = n.connection(mode, path)
		return err
	})
	return c
}

// connection returns what connected waits for, if it is there.
func (n *node) connection(mode, path string) (c control.Conn, err error) {
	var all control.Conns
	if err := n.ask(&all); err != nil {
		return c, err
	}
	up := 0
	for _, x := range all.Conns {
		if x.State == lab.Established {
			c, up = x, up+1
		}
	}
	if up != 1 || c.Mode != mode || path != "" && c.CMPath != path {
		return c, fmt.Errorf("%d: %+v", up, all.Conns)
	}
	return c, nil
}

// routeMTU waits until ip route shows dst with that MTU.
func (n *node) routeMTU(dst string, mtu int) {
	n.t.Helper()
	n.until(fmt.Sprintf("ip route to %s with MTU %d", dst, mtu), func() error {
		out, err := n.run("/usr/bin/ip", "route", "get", dst)
		if err == nil && !strings.Contains(out, fmt.Sprintf(" mtu %d", mtu)) {
			err = fmt.Errorf("it shows %s", out)
		}
		return err
	})
}

// someOctets are more than one packet of a connection, and no more than shows that the next ones arrive.
const someOctets = 256 << 10

// transfer sends octets by TCP and compares the hashes of both ends. It returns how long
// that took.
func (n *node) transfer(to *node, addr string, octets int) (took time.Duration) {
	n.t.Helper()
	return n.transferWithin(to, addr, octets, 2*patience)
}

// transferWithin is transfer for one that may take so long.
func (n *node) transferWithin(to *node, addr string, octets int, within time.Duration) (took time.Duration) {
	n.t.Helper()
	if strings.Contains(addr, ":") {
		addr = "[" + addr + "]"
	}
	addr += ":5001"
	l, err := to.start(trafficProgram, "listen", addr)
	if err != nil {
		n.t.Fatal(err)
	}
	defer l.Kill()
	if line, err := l.Line(patience); err != nil || line != "ready" {
		n.t.Fatalf("listen: %q, %v", line, err)
	}
	start := time.Now()
	p, err := n.start(trafficProgram, "send", addr, fmt.Sprint(octets))
	if err != nil {
		n.t.Fatal(err)
	}
	out, err := p.Wait(within)
	if err != nil {
		n.t.Fatal(err)
	}
	sent, after, _ := strings.Cut(out, "\n")
	got, err := l.Line(patience)
	if err != nil || got != sent {
		n.t.Errorf("%s to %s: sent %q, received %q (%v)", n.name, to.name, sent, got, err)
	}
	if took, err = time.ParseDuration(strings.TrimSpace(after)); err != nil {
		n.t.Fatal(err)
	}
	n.t.Logf("%s to %s %s: %d octets in %v", n.name, to.name, addr, octets, time.Since(start).Round(time.Millisecond))
	return took
}

// A pairing is what a test of the product runs between.
type pairing struct {
	a, b *node
	ipv6 bool
	path string // of CM messages: "gsi" or "inband"
	ud   int    // UD MTU
}

// maxMTU is the MTU of a connection where nobody asked for less.
const maxMTU = 65520

// args are the arguments of run for n.
func (p *pairing) args(n *node, mode string) []string {
	args := []string{"--mode=" + mode, fmt.Sprintf("--ud-mtu=%d", p.ud)}
	if p.ipv6 {
		args = append(args, "--address="+n.v6()+"/64")
	}
	return args
}

// addrs are the addresses of n.
func (p *pairing) addrs(n *node) []string {
	if p.ipv6 {
		return []string{n.v4(), n.v6()}
	}
	return []string{n.v4()}
}

// accept runs the acceptance in one mode: neighbour, connection, ping of every
// size, TCP both ways, the MTU in the routing table, and a restart.
func (p *pairing) accept(mode string, restart bool) {
	a, b := p.a, p.b
	a.t.Helper()
	a.up(p.args(a, mode)...)
	b.up(p.args(b, mode)...)
	for _, n := range []*node{a, b} {
		u := n.status().Underlay
		expect.Equal(n.t, "--provider="+u.Provider, n.provider[0], "what %s runs on", n.name)
		if u.Provider == "ibverbs" {
			expect.Equal(n.t, u.Device, "rxe0", "device of %s", n.name)
		}
	}
	p.work(mode)
	if !restart {
		return
	}
	for _, signal := range []string{"KILL", "TERM"} {
		b.end(signal)
		b.up(b.args...)
		start := time.Now()
		a.reach(b.v4(), 100)
		a.t.Logf("SIG%s: traffic back after %v", signal, time.Since(start).Round(time.Millisecond))
		p.meet(mode)
		a.transfer(b, b.v4(), someOctets)
	}
}

// work shows that both ends reach each other with all there is.
func (p *pairing) work(mode string) {
	a, b := p.a, p.b
	a.t.Helper()
	for _, dst := range p.addrs(b) {
		a.reach(dst, 100)
	}
	mtu := p.ud
	if mode != "ud" {
		x, y := a.connected(strings.ToUpper(mode), p.path), b.connected(strings.ToUpper(mode), p.path)
		expect.Equal(a.t, x.LocalQPN, y.RemoteQPN, "x's LocalQPN")
		expect.Equal(a.t, y.LocalQPN, x.RemoteQPN, "y's LocalQPN")
		expect.Equal(a.t, x.MTU, maxMTU, "x's MTU")
		expect.Equal(a.t, y.MTU, maxMTU, "y's MTU")
		mtu = maxMTU
	}
	for i, dst := range p.addrs(b) {
		a.routeMTU(dst, mtu)
		b.routeMTU(p.addrs(a)[i], mtu)
		a.reach(dst, mtu)
		b.reach(p.addrs(a)[i], mtu)
		a.transfer(b, dst, someOctets)
		b.transfer(a, p.addrs(a)[i], someOctets)
	}
}

// meet shows that the two ends are connected and a full packet goes both ways. Packets go to
// the peer meanwhile: an attempt that has failed is made again when there is something to send.
func (p *pairing) meet(mode string) {
	p.a.t.Helper()
	for i, dst := range p.addrs(p.b) {
		p.a.until(mode+" connection to "+dst, func() error {
			if _, err := p.a.run(trafficProgram, "ping", dst, "100"); err != nil {
				return err
			}
			_, err := p.a.connection(strings.ToUpper(mode), p.path)
			return err
		})
		p.a.reach(dst, maxMTU)
		p.b.reach(p.addrs(p.a)[i], maxMTU)
	}
}

// guestWith starts a guest for the product.
func guestWith(t *testing.T, seg *vm.Segment, img *vm.Image, number byte, mtu int, modules ...string) *vm.VM {
	t.Helper()
	g, err := vm.Boot(context.Background(), img, vm.Config{Name: fmt.Sprintf("guest%d", number), Segment: seg,
		MAC: mac(number), MTU: mtu,
		IPv4: fmt.Sprintf("10.77.0.%d/24", number), Modules: append([]string{"rdma_rxe", "tun"}, modules...)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Kill)
	return g
}

// TestGuestMeetsHost has an agent on libibverbs in a guest meet one on softroce,
// over an IPv6 underlay and an IPv4 one.
func TestGuestMeetsHost(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		mtu, ud int
		ipv6    bool
		gids    []string // of host and guest; nil: the link-local addresses
		modes   []string
	}{
		{5000, 2044, true, nil, []string{"rc", "uc", "ud"}},
		{1500, 1020, false, []string{hostIPv4, guestIPv4}, []string{"rc", "uc", "ud"}},
	} {
		t.Run(mtuName(tt.mtu), func(t *testing.T) {
			img, dir := productImage(t)
			seg := vm.NewSegment()
			t.Cleanup(seg.Close)
			host, err := lab.NewHost(fmt.Sprintf("%s%d-p%d", namePrefix, os.Getpid(), tt.mtu))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { host.Close() })
			if err := seg.AddHost(host, "eth0", mac(0xfe), tt.mtu); err != nil {
				t.Fatal(err)
			}
			if err := host.AddAddr("eth0", hostIPv4+"/24"); err != nil {
				t.Fatal(err)
			}
			g := guestWith(t, seg, img, 1, tt.mtu, "ib_umad")
			for i, mode := range tt.modes {
				t.Run(mode, func(t *testing.T) {
					(&world{seg: seg}).watch(t)
					p := &pairing{a: hostNode(t, host, dir, 2), b: guestNode(t, g, 1), ipv6: tt.ipv6, path: "gsi", ud: tt.ud}
					for i, gid := range tt.gids {
						n := []*node{p.a, p.b}[i]
						n.provider = append(n.provider, "--gid="+gid)
					}
					p.accept(mode, i == 0)
				})
			}
		})
	}
}

// TestGuestMeetsGuest has two agents on libibverbs meet, with CM on QP 1, and
// in-band where ib_cm owns that. All of it is on the same two guests.
func TestGuestMeetsGuest(t *testing.T) {
	t.Parallel()
	img, _ := productImage(t)
	seg := vm.NewSegment()
	t.Cleanup(seg.Close)
	a, b := guestWith(t, seg, img, 1, 5000, "ib_umad"), guestWith(t, seg, img, 2, 5000, "ib_umad")
	for _, cm := range []struct{ name, path, prepare string }{
		{"without ib_cm", "gsi", "test ! -e /sys/module/ib_cm"},
		{"with ib_cm", "inband", "modprobe rdma_ucm"},
	} {
		for _, tt := range []struct {
			mtu, ud int
			ipv6    bool
		}{
			{5000, 2044, true},
			{1500, 1020, false},
		} {
			t.Run(cm.name+"/"+mtuName(tt.mtu), func(t *testing.T) {
				for _, g := range []*vm.VM{a, b} {
					sh(t, g, cm.prepare+" && /usr/bin/ip link set eth0 mtu "+fmt.Sprint(tt.mtu))
				}
				for i, mode := range []string{"rc", "uc", "ud"} {
					t.Run(mode, func(t *testing.T) {
						(&world{seg: seg}).watch(t)
						p := &pairing{a: guestNode(t, a, 1), b: guestNode(t, b, 2), ipv6: tt.ipv6, path: cm.path, ud: tt.ud}
						p.accept(mode, i == 0)
					})
				}
			})
		}
	}
}
