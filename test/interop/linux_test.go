package interop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
	"ipoibcm/test/interop/vm"
)

// Linux's own ib_ipoib, unmodified, in connected mode in a guest, is the peer of our agent on
// softroce. ib_ipoib takes InfiniBand ports only: package vm makes one of the kernel's
// Soft-RoCE, whose wire is RoCEv2 over IPv6.

// linuxIf is the interface of ib_ipoib.
const linuxIf = "ib0"

// linuxNode runs commands in a guest whose interface is the kernel's.
func linuxNode(t *testing.T, g *vm.VM, number int) *node {
	return &node{t: t, name: g.Name, number: number, start: func(argv ...string) (proc, error) { return g.Start(argv...) }}
}

// A linuxGuest is a guest with ib_ipoib.
type linuxGuest struct {
	*node
	vm *vm.VM
}

// A linuxWorld is our agent in a namespace, and guests with ib_ipoib, on one segment.
type linuxWorld struct {
	t       *testing.T // of the whole
	mtu     int        // of the segment
	seg     *vm.Segment
	host    *lab.Host
	img     *vm.Image
	capture *vm.Capture

	ours  *node
	linux []*linuxGuest
}

// linuxSettings are the underlays that the rows run on: IB MTU 4096, and 1024, where Linux's
// datagrams are of 1020 octets at most. That is less than IPv6 needs: by datagram Linux has no
// IPv6 there.
var linuxSettings = map[int]struct {
	ud    int // UD MTU of Linux
	flags []string
}{
	4200: {ud: 2044},
	1500: {ud: 1020, flags: []string{"--ud-mtu=1280"}},
}

// linuxWorlds counts them, for names.
var linuxWorlds atomic.Int32

func newLinuxWorld(t *testing.T, mtu int) *linuxWorld {
	t.Helper()
	img, dir := softIBImage(t)
	w := &linuxWorld{t: t, mtu: mtu, seg: vm.NewSegment(), img: img}
	t.Cleanup(w.seg.Close)
	var err error
	if w.host, err = lab.NewHost(fmt.Sprintf("%s%d-l%d", namePrefix, os.Getpid(), linuxWorlds.Add(1))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.host.Close() })
	if err := w.seg.AddHost(w.host, "eth0", mac(0xfe), mtu); err != nil {
		t.Fatal(err)
	}
	w.capture = (&world{seg: w.seg}).watch(t)
	w.ours = hostNode(t, w.host, dir, 9)
	return w
}

// boot starts a guest, or one in the place of a guest that is gone.
func (w *linuxWorld) boot(number int) *linuxGuest { return w.bootWith(number, "") }

// bootWith is boot with parameters of the port.
func (w *linuxWorld) bootWith(number int, params string) *linuxGuest {
	w.t.Helper()
	g, err := vm.Boot(context.Background(), w.img,
		vm.Config{Name: fmt.Sprintf("linux%d", number), Segment: w.seg, MAC: mac(byte(number)),
			MTU: w.mtu, NoRXE: true, Modules: []string{"udp_tunnel", "ip6_udp_tunnel", "crc32_generic", "ib_uverbs",
				"ib_umad", "ib_cm"}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(g.Kill)
	l := &linuxGuest{node: linuxNode(w.t, g, number), vm: g}
	l.up("connected", params)
	i := slices.IndexFunc(w.linux, func(o *linuxGuest) bool { return o.number == number })
	if i < 0 {
		w.linux = append(w.linux, l)
	} else {
		*w.linux[i], l = *l, w.linux[i]
	}
	return l
}

// up makes the port and brings the interface up.
func (l *linuxGuest) up(mode, params string) {
	l.t.Helper()
	mtu := fmt.Sprint(maxMTU)
	// Idle neighbours of ib_ipoib go after twice gc_interval, in place of twice 30 s.
	l.sh("set -e; echo 3 >/proc/sys/net/ipv4/neigh/default/gc_interval; insmod " + vm.SoftIBModule + " " + params +
		"; modprobe ib_ipoib; /usr/bin/rdma link add rxe0 type rxe netdev eth0; " +
		"n=0; until [ -e /sys/class/net/ib0 ] || [ $n = 100 ]; do sleep 0.05; n=$((n+1)); done; " +
		"echo " + mode + " >/sys/class/net/ib0/mode; /usr/bin/ip link set ib0 mtu " + mtu + " up; " +
		"/usr/bin/ip addr add " + l.v4() + "/24 brd + dev ib0; /usr/bin/ip addr add " + l.v6() + "/64 dev ib0 nodad")
	l.carrier()
}

// carrier waits until the port has joined the broadcast group.
func (l *linuxGuest) carrier() {
	l.t.Helper()
	l.until("ib0 has a carrier", func() error {
		if out := l.sh("cat /sys/class/net/ib0/carrier"); strings.TrimSpace(out) != "1" {
			return errors.New("it has not")
		}
		return nil
	})
}

// sh runs a line of shell in the guest.
func (l *linuxGuest) sh(line string) string {
	l.t.Helper()
	out, err := l.vm.Sh(patience, line)
	if err != nil {
		l.t.Fatal(err)
	}
	return out
}

// complaint is what a kernel's log must not have.
var complaint = regexp.MustCompile(
	`WARNING:|BUG:|Oops|cut here|Call Trace|general protection|refcount_t|stack-protector`)

// clean reports what a guest's kernel complained of.
func (l *linuxGuest) clean(t *testing.T) {
	t.Helper()
	log, err := l.vm.Sh(patience, "dmesg")
	if err != nil {
		t.Error(err)
	}
	for _, line := range strings.Split(log+l.vm.Console(), "\n") {
		if complaint.MatchString(line) {
			t.Errorf("%s: its kernel says: %s", l.name, line)
		}
	}
}

// row runs a part of the acceptance. What it starts goes on after it.
func (w *linuxWorld) row(name string, f func(t *testing.T)) {
	w.t.Helper()
	start := time.Now()
	ok := w.t.Run(name, func(t *testing.T) {
		w.tell(t)
		f(t)
		t.Logf("took %v", time.Since(start).Round(100*time.Millisecond))
	})
	w.tell(w.t)
	if !ok {
		for _, l := range w.linux {
			out, err := l.vm.Sh(patience, "dmesg | tail -30; /usr/bin/ip neigh show dev ib0; /usr/bin/ip -s link show ib0")
			if err != nil {
				out = l.vm.Console() // its kernel has crashed, perhaps
			}
			w.t.Logf("%s:\n%s", l.name, out)
		}
		var conns control.Conns
		_ = w.ours.ask(&conns)
		w.t.Logf("connections of ours: %+v", conns.Conns)
	}
}

// tell says which test failures are of.
func (w *linuxWorld) tell(t *testing.T) {
	w.ours.t = t
	for _, l := range w.linux {
		l.t = t
	}
}

// agent starts our agent, which ends with the world.
func (w *linuxWorld) agent(mode string) {
	w.t.Helper()
	t := w.ours.t
	w.ours.t = w.t
	w.ours.up(append([]string{"--mode=" + mode, "--address=" + w.ours.v6() + "/64"}, linuxSettings[w.mtu].flags...)...)
	w.ours.t = t
}

// between runs f for both directions between two nodes.
func between(a, b *node, f func(from, to *node)) {
	f(a, b)
	f(b, a)
}

// byDatagram shows that datagrams go both ways, where Linux can be reached by no other: full ones
// and TCP, over the versions of IP that its datagrams are long enough for.
func (w *linuxWorld) byDatagram(l *linuxGuest) {
	o, ud := w.ours, linuxSettings[w.mtu].ud
	o.t.Helper()
	if ud >= leastIPv6 {
		pings(o, l.node, 64, min(ud, o.status().Interface.UDMTU))
		transfers(o, l.node, someOctets)
		return
	}
	between(o, l.node, func(from, to *node) {
		from.reach(to.v4(), 64)
		from.reach(to.v4(), ud)
		from.transfer(to, to.v4(), someOctets)
	})
}

// leastIPv6 is the MTU that IPv6 needs at least (RFC 8200 section 5).
const leastIPv6 = 1280

// pings has both ends reach each other with packets of these sizes, over both versions of IP.
func pings(a, b *node, sizes ...int) {
	a.t.Helper()
	between(a, b, func(from, to *node) {
		from.reach(to.v4(), sizes...)
		from.reach(to.v6(), sizes...)
	})
}

// transfers has TCP go both ways, over both versions of IP, and compares hashes.
func transfers(a, b *node, octets int) {
	a.t.Helper()
	between(a, b, func(from, to *node) {
		from.transfer(to, to.v4(), octets)
		from.transfer(to, to.v6(), octets)
	})
}

// device is the name of the interface.
func (n *node) device() string {
	if n.socket == "" {
		return linuxIf
	}
	return cmp.Or(n.ifname, productIf)
}

// hears has a datagram that one end sends to many reach the other.
func hears(from, to *node, addr string, size int) {
	from.t.Helper()
	in, err := to.start(trafficProgram, "hear", addr, to.device())
	if err != nil {
		from.t.Fatal(err)
	}
	defer in.Kill()
	if line, err := in.Line(patience); err != nil || line != "ready" {
		from.t.Fatalf("%s: %q, %v", to.name, line, err)
	}
	out, err := from.start(trafficProgram, "say", addr, fmt.Sprint(size), from.device())
	if err != nil {
		from.t.Fatal(err)
	}
	defer out.Kill()
	line, err := in.Line(patience)
	if err != nil {
		from.t.Errorf("%s to %s at %s: %v\n%s", from.name, to.name, addr, err, out.Output())
	} else if line != fmt.Sprint(size) {
		from.t.Errorf("%s to %s at %s: a datagram of %s octets came, want %d", from.name, to.name, addr, line, size)
	}
}

// exchanges has UDP datagrams go there and come back.
func exchanges(from, to *node, addr string, sizes ...int) {
	from.t.Helper()
	if strings.Contains(addr, ":") {
		addr = "[" + addr + "]"
	}
	addr += ":5002"
	p, err := to.start(trafficProgram, "echo", addr)
	if err != nil {
		from.t.Fatal(err)
	}
	defer p.Kill()
	if line, err := p.Line(patience); err != nil || line != "ready" {
		from.t.Fatalf("%s: %q, %v", to.name, line, err)
	}
	for _, size := range sizes {
		from.must(trafficProgram, "exchange", addr, fmt.Sprint(size))
	}
}

// conns returns the established connections of ours with a host.
func (n *node) conns(dir string) (found []control.Conn) {
	var all control.Conns
	if err := n.ask(&all); err != nil {
		n.t.Fatal(err)
	}
	for _, c := range all.Conns {
		if c.State == lab.Established && c.Direction == dir {
			found = append(found, c)
		}
	}
	return found
}

// oneWay waits for one connection in each direction with every one of these many hosts.
func (n *node) oneWay(hosts int) {
	n.t.Helper()
	n.until("two one-way connections with each", func() error {
		if s, r := n.conns("send"), n.conns("receive"); len(s) != hosts || len(r) != hosts {
			return fmt.Errorf("%d to send on and %d to receive on", len(s), len(r))
		}
		return nil
	})
}

// knows waits until a Linux host has ours as a neighbour, by the link-layer address of ours.
func (l *linuxGuest) knows(ours *node) {
	l.t.Helper()
	want := strings.ToLower(strings.TrimPrefix(ours.status().Interface.UDQPN, "0x"))
	for _, addr := range []string{ours.v4(), ours.v6()} {
		l.until("it knows "+addr, func() error {
			out, err := l.run("/usr/bin/ip", "neigh", "show", addr, "dev", linuxIf)
			f := strings.Fields(out)
			i := slices.Index(f, "lladdr")
			if err != nil || i < 0 || i+1 >= len(f) {
				return fmt.Errorf("%q, %v", out, err)
			}
			// Flags, QPN, GID.
			if got := strings.ReplaceAll(f[i+1], ":", ""); got[2:8] != want {
				return fmt.Errorf("QPN %s, want %s", got[2:8], want)
			}
			return nil
		})
	}
}

// subnetAdministration asks the port's administrator through /dev/infiniband/umad0, beside the
// kernel's own client, with a GRH, which the port requires.
func (l *linuxGuest) subnetAdministration() {
	l.t.Helper()
	const group, other = "ff12:401b:ffff::ffff:ffff", "fe80::5054:ff:fe77:fe"
	out := l.must(saProgram, "rxe0", "grh", other)
	for _, want := range []string{
		"port ACTIVE LID 1 SM 1 GID " + guestIPv6, "state ready",
		fmt.Sprintf("joined %s MLID %d Q_Key 0x00000b1b MTU %d P_Key 0xffff", group, 0xc0ff,
			min(2048, pathMTU(l.mtu()).Octets())),
		"path " + other + " LIDs 1 254 GRH true hops 64", "left " + group,
	} {
		if !strings.Contains(out, want) {
			l.t.Errorf("no line %q:\n%s", want, out)
		}
	}
	if out, err := l.run(saProgram, "rxe0", other); err == nil || !strings.Contains(out, "invalid argument") {
		l.t.Errorf("without a GRH, which the port requires: %v\n%s", err, out)
	}
	l.carrier() // the kernel's interface goes on
}

// mtu is that of the underlay.
func (l *linuxGuest) mtu() int {
	l.t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(l.sh("cat /sys/class/net/eth0/mtu")))
	if err != nil {
		l.t.Fatal(err)
	}
	return n
}

// TestLinuxIPoIB meets Linux's own ib_ipoib. It measures, so nothing runs beside it.
func TestLinuxIPoIB(t *testing.T) {
	for _, mtu := range linuxMTUs() {
		t.Run(fmt.Sprintf("softroce at %d", mtu), func(t *testing.T) {
			w := newLinuxWorld(t, mtu)
			l := w.boot(1)
			w.agent("rc")
			w.rows(l)
			w.t = t
			for _, l := range w.linux {
				l.clean(t)
			}
			w.oursKeptOff(t)
		})
	}
}

// linuxMTUs returns those of the underlay that the test runs with.
func linuxMTUs() []int { return long.Of([]int{4200}, []int{4200, 1500}) }

// rows runs the acceptance. l stands for the guest that has been rebooted, too.
func (w *linuxWorld) rows(l *linuxGuest) {
	w.traffic(l)
	w.restarts(l)
	if !long.Form() {
		w.t.Log("links, modes, the reboot, a second Linux and small datagrams are rows of the long form: make interop-full")
		return
	}
	w.links(l)
	w.modes(l)
	w.row("reboot of the guest", func(t *testing.T) {
		l.clean(t)
		l.vm.Kill()
		l = w.boot(1)
		w.tell(t)
		pings(w.ours, l.node, 64, maxMTU)
		transfers(w.ours, l.node, someOctets)
	})
	w.row("two Linux and one of ours", func(*testing.T) { w.twoLinux(l) })
	w.row("small datagrams", func(t *testing.T) { w.smallDatagrams(t, l, w.linux[1]) })
}

// traffic are the rows of what goes where.
func (w *linuxWorld) traffic(l *linuxGuest) {
	o, ud := w.ours, linuxSettings[w.mtu].ud
	w.row("neighbours", func(t *testing.T) {
		pings(o, l.node, 64)
		l.knows(o)
		var all control.Neighbours
		if err := o.ask(&all); err != nil {
			t.Fatal(err)
		}
		for _, a := range []string{l.v4(), l.v6()} {
			if !slices.ContainsFunc(all.Neighbours, func(n control.Neighbour) bool { return n.IP == a }) {
				t.Errorf("no neighbour %s: %+v", a, all.Neighbours)
			}
		}
	})
	w.row("asked by Linux first", func(t *testing.T) {
		l.must("/usr/bin/ip", "neigh", "flush", "dev", linuxIf)
		l.reach(o.v4(), 64)
		l.reach(o.v6(), 64)
	})
	w.row("broadcast and multicast", func(t *testing.T) {
		for _, size := range []int{100, min(ud, 1280) - 48} {
			between(o, l.node, func(from, to *node) {
				hears(from, to, "10.9.0.255:5003", size)
				hears(from, to, "239.1.2.3:5004", size)
				hears(from, to, "[ff05::123]:5005", size)
			})
		}
	})
	w.row("ping", func(t *testing.T) {
		pings(o, l.node, 64, 1500, maxMTU)
		o.oneWay(1)
	})
	w.row("MTU in ip route", func(t *testing.T) {
		for _, a := range []string{l.v4(), l.v6()} {
			o.routeMTU(a, maxMTU)
		}
	})
	w.row("subnet administration through umad", func(t *testing.T) { l.subnetAdministration() })
	w.row("TCP", func(t *testing.T) { transfers(o, l.node, 1<<20) })
	w.row("UDP", func(t *testing.T) {
		between(o, l.node, func(from, to *node) {
			exchanges(from, to, to.v4(), 64, 1400, 60000)
			exchanges(from, to, to.v6(), 64, 1400, 60000)
		})
	})
	w.row("idle", func(t *testing.T) {
		o.until("Linux has let go of the connection it opened", func() error {
			if r := o.conns("receive"); len(r) != 0 {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
		pings(o, l.node, 64, maxMTU)
		o.oneWay(1)
	})
}

// restarts are the rows in which our agent ends.
func (w *linuxWorld) restarts(l *linuxGuest) {
	o := w.ours
	for _, signal := range []string{"KILL", "TERM"} {
		w.row("restart by SIG"+signal, func(t *testing.T) {
			o.end(signal)
			w.agent("rc")
			pings(o, l.node, 64, maxMTU)
			transfers(o, l.node, someOctets)
			l.knows(o)
		})
	}
}

// links are the rows in which a link goes and comes.
func (w *linuxWorld) links(l *linuxGuest) {
	o := w.ours
	w.row("link of Linux down and up", func(t *testing.T) {
		l.sh("/usr/bin/ip link set ib0 down; sleep 0.5; /usr/bin/ip link set ib0 up; /usr/bin/ip addr add " + l.v6() +
			"/64 dev ib0 nodad")
		l.carrier()
		pings(o, l.node, 64, maxMTU)
		transfers(o, l.node, someOctets)
	})
	w.row("link below ours down and up", func(t *testing.T) {
		if err := w.host.Down("eth0"); err != nil {
			t.Fatal(err)
		}
		o.until("the interface is down", func() error { return stateIs(o, "underlay down") })
		if err := w.host.Up("eth0"); err != nil {
			t.Fatal(err)
		}
		o.until("the interface is up", func() error { return stateIs(o, "up") })
		pings(o, l.node, 64, maxMTU)
		transfers(o, l.node, someOctets)
	})
	w.row("link below Linux down and up", func(t *testing.T) {
		l.sh("/usr/bin/ip link set eth0 down; sleep 1; /usr/bin/ip link set eth0 up")
		l.carrier()
		pings(o, l.node, 64, maxMTU)
		transfers(o, l.node, someOctets)
	})
}

// modes are the rows of all modes that either has.
func (w *linuxWorld) modes(l *linuxGuest) {
	o := w.ours
	for _, mode := range []string{"uc", "ud", "auto"} {
		w.row("ours in mode "+mode, func(t *testing.T) {
			o.end("TERM")
			w.agent(mode)
			if mode != "auto" { // Linux has no UC
				w.byDatagram(l)
				return
			}
			pings(o, l.node, 64, maxMTU)
			transfers(o, l.node, someOctets)
		})
	}
	w.row("Linux in datagram mode", func(t *testing.T) {
		o.end("TERM")
		w.agent("rc")
		l.sh("echo datagram >/sys/class/net/ib0/mode")
		l.carrier()
		w.byDatagram(l)
		l.sh("echo connected >/sys/class/net/ib0/mode; /usr/bin/ip link set ib0 mtu " + strconv.Itoa(maxMTU) + "; " +
			"/usr/bin/ip addr replace " + l.v6() + "/64 dev ib0 nodad") // which a smaller MTU than IPv6's has taken away
		l.carrier()
		pings(o, l.node, 64, maxMTU)
	})
}

// twoLinux has a second guest, and every pair of hosts talk.
func (w *linuxWorld) twoLinux(l *linuxGuest) {
	o, t := w.ours, w.ours.t
	m := w.boot(2)
	w.tell(t)
	for _, pair := range [][2]*node{{o, l.node}, {o, m.node}, {l.node, m.node}} {
		pings(pair[0], pair[1], 64, maxMTU)
		transfers(pair[0], pair[1], someOctets)
	}
	for _, g := range w.linux { // whose connections to ours have become idle meanwhile
		pings(o, g.node, 64)
	}
	o.oneWay(2)
	hears(o, m.node, "10.9.0.255:5003", 100)
	hears(m.node, l.node, "10.9.0.255:5003", 100)
}

// Small datagrams: what the sender offers, and how often.
const (
	datagramSize   = 1400
	datagramRate   = 80 // Mb/s
	datagramRounds = 5
)

// flood sends datagrams for a while and returns how many Mb/s of them arrive.
func flood(from, to *node) float64 {
	from.t.Helper()
	addr := to.v4() + ":5006"
	in, err := to.start(trafficProgram, "sink", addr)
	if err != nil {
		from.t.Fatal(err)
	}
	defer in.Kill()
	if line, err := in.Line(patience); err != nil || line != "ready" {
		from.t.Fatalf("%s: %q, %v", to.name, line, err)
	}
	from.must(trafficProgram, "flood", addr, fmt.Sprint(datagramSize), fmt.Sprint(datagramRate))
	line, err := in.Line(patience)
	if err != nil {
		from.t.Fatal(err)
	}
	octets, err := strconv.Atoi(line)
	if err != nil {
		from.t.Fatal(err)
	}
	return float64(octets) * 8 / 1e6 / floodTime.Seconds()
}

// floodTime is how long traffic's flood goes on.
const floodTime = 3 * time.Second

// smallDatagrams compares what Linux gets from ours with what it gets from Linux: the medians of
// some rounds, in turn. Rates of guests that are emulated vary by more than what is looked for, so
// that a second series decides where the first says no.
func (w *linuxWorld) smallDatagrams(t *testing.T, from, to *linuxGuest) {
	t.Helper()
	var got, want float64
	for range 2 {
		var ours, theirs []float64
		for range datagramRounds {
			theirs = append(theirs, flood(from.node, to.node))
			ours = append(ours, flood(w.ours, to.node))
		}
		t.Logf("UDP of %d octets at %d Mb/s arrives in Linux, from Linux: %.1f; from ours: %.1f Mb/s", datagramSize,
			datagramRate, theirs, ours)
		slices.Sort(ours)
		slices.Sort(theirs)
		if got, want = ours[datagramRounds/2], leastOfLinux*theirs[datagramRounds/2]; got >= want {
			return
		}
	}
	t.Errorf("the median of ours is %.1f Mb/s, want %.1f: %.1f of Linux's", got, want, leastOfLinux)
}

// leastOfLinux is the part of Linux's own rate that ours is to reach at least.
const leastOfLinux = 0.8

func stateIs(n *node, want string) error {
	if s := n.status().Interface.State; s != want {
		return fmt.Errorf("it is %s, not %s", s, want)
	}
	return nil
}

// oursKeptOff checks that we sent no data on a connection that Linux opened: it does not
// survive that.
func (w *linuxWorld) oursKeptOff(t *testing.T) {
	t.Helper()
	packets := w.capture.Packets()
	watch := newOneWayWatch()
	for _, p := range packets {
		watch.see(p.From, p.Frame)
	}
	t.Logf("Linux opened %d connections; our hosts sent %d messages on others", watch.opened, watch.sent)
	if watch.opened == 0 {
		t.Error("Linux opened no connection: nothing was checked")
	}
	for _, s := range watch.wrong[:min(len(watch.wrong), 5)] {
		t.Error(s)
	}
	// The check notices when one is seen.
	for _, p := range packets {
		if f, ok := watch.redirected(p.From, p.Frame); ok {
			before := len(watch.wrong)
			if watch.see(p.From, f); len(watch.wrong) != before+1 {
				t.Error("a packet of ours on a connection that Linux opened was not noticed")
			}
			return
		}
	}
	t.Error("no packet of ours could be sent to a connection that Linux opened")
}
