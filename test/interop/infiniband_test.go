package interop

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/long"
	"ipoibcm/test/interop/vm"
)

// Our agent on an InfiniBand port: a guest's soft one, whose wire is RoCEv2 over IPv6. Its peers
// are Linux's own ib_ipoib, and another agent of ours on such a port.

// A portGuest is a guest with an InfiniBand port that our agent runs on.
type portGuest struct {
	*node
	vm    *vm.VM
	whole *testing.T // whose end is that of its agents
}

// portNode runs our agent on the InfiniBand port of a guest.
func portNode(t *testing.T, g *vm.VM, number int) *portGuest {
	n := guestNode(t, g, number)
	n.provider = append(n.provider, "--port=1")
	return &portGuest{node: n, vm: g, whole: t}
}

// bootPort starts a guest with a soft InfiniBand port. ib_cm is not loaded there: class 7 is ours.
func (w *linuxWorld) bootPort(t *testing.T, number int, params string) *portGuest {
	w.t.Helper()
	g, err := vm.Boot(context.Background(), w.img,
		vm.Config{Name: fmt.Sprintf("port%d", number), Segment: w.seg, MAC: mac(byte(number)),
			MTU: w.mtu, NoRXE: true, Modules: []string{"udp_tunnel", "ip6_udp_tunnel", "crc32_generic", "ib_uverbs",
				"ib_umad", "tun"}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(g.Kill)
	p := portNode(t, g, number)
	p.sh("set -e; insmod " + vm.SoftIBModule + " " + params + "; /usr/bin/rdma link add rxe0 type rxe netdev eth0")
	return p
}

func (p *portGuest) sh(line string) string {
	p.t.Helper()
	out, err := p.vm.Sh(patience, line)
	if err != nil {
		p.t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// answers switches the port's subnet administrator on or off.
func (p *portGuest) answers(on bool) {
	p.t.Helper()
	value := "N"
	if on {
		value = "Y"
	}
	p.sh("echo " + value + " >/sys/module/softib/parameters/sa")
}

// serve starts the agent. It goes on after the row.
func (p *portGuest) serve(mode string, args ...string) {
	row := p.t
	row.Helper()
	defer func() { p.t = row }()
	p.t = p.whole
	p.up(append([]string{"--mode=" + mode, "--address=" + p.v6() + "/64"}, args...)...)
}

// portSettings are how ports are addressed.
func portSettings() []string {
	return long.Of([]string{"hop_limit=64"}, []string{"hop_limit=64", "hop_limit=0"})
}

// TestInfiniBandPort: our agent on an InfiniBand port beside Linux's ib_ipoib, then beside
// another agent of ours in its place.
func TestInfiniBandPort(t *testing.T) {
	for _, params := range portSettings() {
		t.Run(params, func(t *testing.T) {
			w := newLinuxWorld(t, 4200)
			w.ours.t = t
			p := &portWorld{linuxWorld: w, ours: w.bootPort(t, 2, params), grh: params != "hop_limit=0"}
			p.linux = w.bootWith(1, params)
			w.ours = p.ours.node
			p.besideLinux(t, params)
			w.oursKeptOff(t)
			for _, l := range w.linux {
				l.clean(t)
			}
			p.other = p.linux.becomesOurs(t)
			p.ours.end("TERM")
			p.twoOfOurs(t)
			p.partitions(t)
			p.withCM(t)
			p.linux.clean(t)
			p.ours.clean(t)
		})
	}
}

// A portWorld is our agent on an InfiniBand port, beside a guest that is Linux's first and then
// has an agent of ours too.
type portWorld struct {
	*linuxWorld
	ours, other *portGuest
	linux       *linuxGuest
	grh         bool // ports need one
}

// row runs a part. The whole ends with the first that fails.
func (p *portWorld) row(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	p.linuxWorld.row(name, func(t *testing.T) {
		p.tellAll(t)
		f(t)
	})
	if p.tellAll(t); t.Failed() {
		t.FailNow()
	}
}

func (p *portWorld) tellAll(t *testing.T) {
	p.ours.t = t
	if p.other != nil {
		p.other.t = t
	}
}

// besideLinux are the rows beside Linux's driver.
func (p *portWorld) besideLinux(t *testing.T, params string) {
	o, l := p.ours, p.linux
	p.row(t, "an administrator that joins nobody", func(t *testing.T) { o.withoutGroups(t) })
	p.row(t, "Linux's ib_ipoib", func(*testing.T) {
		pings(o.node, l.node, 64, 1500, maxMTU)
		o.oneWay(1)
		transfers(o.node, l.node, someOctets)
		between(o.node, l.node, func(from, to *node) {
			hears(from, to, "10.9.0.255:5003", 100)
			hears(from, to, "239.1.2.3:5004", 100)
			hears(from, to, "[ff05::123]:5005", 100)
		})
	})
	p.row(t, "link of Linux down and up", func(*testing.T) {
		l.sh("/usr/bin/ip link set ib0 down; sleep 0.5; /usr/bin/ip link set ib0 up; " +
			"/usr/bin/ip addr add " + l.v6() + "/64 dev ib0 nodad")
		l.carrier()
		pings(o.node, l.node, 64, maxMTU)
	})
	if !long.Form() {
		return
	}
	for _, signal := range []string{"KILL", "TERM"} {
		p.row(t, "beside Linux, restart by SIG"+signal, func(*testing.T) {
			o.end(signal)
			o.serve("rc")
			pings(o.node, l.node, 64, maxMTU)
			transfers(o.node, l.node, someOctets)
		})
	}
	p.row(t, "two Linux and one of ours", func(t *testing.T) {
		m := p.bootWith(3, params)
		p.tell(t)
		for _, pair := range [][2]*node{{o.node, l.node}, {o.node, m.node}, {l.node, m.node}} {
			pings(pair[0], pair[1], 64, maxMTU)
			transfers(pair[0], pair[1], someOctets)
		}
		for _, g := range p.linuxWorld.linux { // whose connections to ours have become idle meanwhile
			pings(o.node, g.node, 64)
		}
		o.oneWay(2)
	})
	p.modesBesideLinux(t, params)
}

// modesBesideLinux are the rows of what takes longer beside Linux's driver, and of all modes.
func (p *portWorld) modesBesideLinux(t *testing.T, params string) {
	o, l := p.ours, p.linux
	p.row(t, "beside Linux, UDP", func(*testing.T) {
		between(o.node, l.node, func(from, to *node) {
			exchanges(from, to, to.v4(), 64, 1400, 60000)
			exchanges(from, to, to.v6(), 64, 1400, 60000)
		})
	})
	p.row(t, "beside Linux, MTU in ip route", func(*testing.T) {
		pings(o.node, l.node, maxMTU)
		for _, a := range []string{l.v4(), l.v6()} {
			o.routeMTU(a, maxMTU)
		}
	})
	p.row(t, "beside Linux, idle", func(*testing.T) {
		o.until("Linux has let go of the connections it opened", func() error {
			if r := o.conns("receive"); len(r) != 0 {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
		for _, g := range p.linuxWorld.linux {
			pings(o.node, g.node, 64, maxMTU)
		}
		o.oneWay(len(p.linuxWorld.linux))
	})
	for _, mode := range []string{"auto", "ud", "uc"} {
		p.row(t, "beside Linux, ours in mode "+mode, func(*testing.T) {
			o.end("TERM")
			o.serve(mode)
			sizes := []int{64, 1500}
			if mode == "auto" {
				sizes = append(sizes, maxMTU)
			}
			pings(o.node, l.node, sizes...)
			transfers(o.node, l.node, someOctets)
		})
	}
	p.row(t, "Linux in datagram mode", func(*testing.T) {
		o.end("TERM")
		o.serve("rc")
		l.sh("echo datagram >/sys/class/net/ib0/mode")
		l.carrier()
		pings(o.node, l.node, 64, 1500)
		transfers(o.node, l.node, someOctets)
		l.sh("echo connected >/sys/class/net/ib0/mode; /usr/bin/ip link set ib0 mtu " + fmt.Sprint(maxMTU))
		l.carrier()
		pings(o.node, l.node, maxMTU)
	})
	p.row(t, "reboot of Linux", func(t *testing.T) {
		l.clean(t)
		l.vm.Kill()
		p.bootWith(l.number, params)
		p.tell(t)
		pings(o.node, l.node, 64, maxMTU)
		transfers(o.node, l.node, someOctets)
	})
}

// twoOfOurs are the rows of two agents of ours, with QP 1.
func (p *portWorld) twoOfOurs(t *testing.T) {
	o, other := p.ours, p.other
	for _, mode := range []string{"ud", "uc", "rc"} {
		p.row(t, "two of ours, "+mode, func(t *testing.T) {
			other.serve(mode)
			o.serve(mode)
			sizes := []int{64, 1500}
			if mode != "ud" {
				sizes = append(sizes, maxMTU)
			}
			done := make(chan error, 1)
			go func() { // so that REQs may cross
				_, err := other.run(trafficProgram, "ping", o.v4(), "64")
				done <- err
			}()
			o.reach(other.v4(), 64)
			if err := <-done; err != nil {
				t.Logf("the first ping from %s: %v", other.name, err)
			}
			pings(o.node, other.node, sizes...)
			transfers(o.node, other.node, someOctets)
			between(o.node, other.node, func(from, to *node) { hears(from, to, "239.1.2.3:5004", 100) })
			if n := o.counter(t, "sa_ok_trap"); n < 2 { // ib_umad has let us have reports
				t.Errorf("%d traps are subscribed to, want 66 and 67: a packet was sent to a group", n)
			}
			if mode == "rc" {
				o.hearsReports(t)
			}
			if mode != "ud" {
				c := o.connected(strings.ToUpper(mode), "gsi")
				t.Logf("crossing REQs: %q", c.Crossing)
			}
			if mode != "rc" { // the rows that follow go on with it
				other.end("TERM")
				o.end("TERM")
			}
		})
	}
	for _, signal := range []string{"KILL", "TERM"} {
		p.row(t, "restart by SIG"+signal, func(*testing.T) {
			o.end(signal)
			o.serve("rc")
			pings(o.node, other.node, 64, maxMTU)
		})
	}
	p.row(t, "the subnet manager asks to register again", func(t *testing.T) { p.reregister(t) })
	p.row(t, "link down and up", func(*testing.T) {
		o.sh("/usr/bin/ip link set eth0 down")
		o.until("status says so", func() error { return o.is("underlay down") })
		o.sh("/usr/bin/ip link set eth0 up")
		o.until("it is up", func() error { return o.is("up") })
		pings(o.node, other.node, 64, maxMTU)
	})
	other.end("TERM")
	o.end("TERM")
}

// reregister has the port be asked to register again: groups are joined again, and the connection
// goes on.
func (p *portWorld) reregister(t *testing.T) {
	o, other := p.ours, p.other
	before, joins := o.connected("RC", "gsi"), o.counter(t, "sa_ok_group")
	o.sh("echo reregister >/sys/module/softib/parameters/event")
	start := time.Now()
	o.until("groups are joined again", func() error {
		if n := o.counter(t, "sa_ok_group"); n < joins+4 {
			return fmt.Errorf("%d joins, want %d", n, joins+4)
		}
		return nil
	})
	t.Logf("groups joined again after %v", time.Since(start).Round(10*time.Millisecond))
	pings(o.node, other.node, 64, maxMTU)
	if after := o.connected("RC", "gsi"); after.LocalQPN != before.LocalQPN {
		t.Errorf("the connection is another one: QPN %s, was %s", after.LocalQPN, before.LocalQPN)
	}
}

// counter reads a counter of the machine's.
func (p *portGuest) counter(t *testing.T, name string) uint64 {
	t.Helper()
	var all control.Stats
	if err := p.ask(&all); err != nil {
		t.Fatal(err)
	}
	for _, c := range all.Counters {
		if c.Name == name {
			return c.Value
		}
	}
	t.Fatalf("no counter %s", name)
	return 0
}

// hearsReports has the subnet administrator report a group, which arrives, and is answered.
func (p *portGuest) hearsReports(t *testing.T) {
	t.Helper()
	before := p.counter(t, "sa_reports")
	for _, trap := range []string{"66", "67"} {
		p.sh("echo " + trap + " ff12:401b:ffff::7:7 >/sys/module/softib/parameters/report")
	}
	p.until("it hears two reports", func() error {
		if n := p.counter(t, "sa_reports") - before; n != 2 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	if n := p.counter(t, "sa_stray_reports"); n != 0 {
		t.Errorf("%d reports are of what nobody subscribed to", n)
	}
}

// partitions are rows in partition 0x8001, of which the other port is a limited member.
func (p *portWorld) partitions(t *testing.T) {
	o, other := p.ours, p.other
	p.row(t, "a full and a limited member of partition 0x8001", func(*testing.T) {
		o.setKeys("0xffff,0x8001")
		other.setKeys("0xffff,0x0001")
		other.serve("rc", "--pkey=0x8001")
		o.serve("rc", "--pkey=0x8001")
		pings(o.node, other.node, 64, 1500, maxMTU)
		transfers(o.node, other.node, someOctets)
		o.connected("RC", "gsi")
	})
	p.row(t, "the P_Key goes and returns at another place", func(t *testing.T) {
		o.setKeys("0xffff")
		o.until("status says so", func() error { return o.is("underlay down") })
		if w := strings.Join(o.status().Warnings, "\n"); !strings.Contains(w, "P_Key 0x8001") {
			t.Errorf("warnings %q, want one of the P_Key", w)
		}
		o.setKeys("0xffff,0,0x8001")
		o.until("it is up", func() error { return o.is("up") })
		pings(o.node, other.node, 64, maxMTU)
	})
	p.row(t, "two interfaces in one process, of partitions 0xffff and 0x8001", func(t *testing.T) {
		o.end("TERM")
		other.end("TERM")
		mine, theirs := o.serveBoth(), other.serveBoth()
		for i := range mine {
			pings(mine[i].node, theirs[i].node, 64, maxMTU)
			transfers(mine[i].node, theirs[i].node, someOctets)
			mine[i].connected("RC", "gsi")
			between(mine[i].node, theirs[i].node, func(from, to *node) { hears(from, to, "239.1.2.3:5004", 100) })
		}
		mine[0].end("TERM")
		theirs[0].end("TERM")
	})
	o.setKeys("0xffff")
	other.setKeys("0xffff")
}

// serveBoth starts one process with an interface in 0xffff and one in 0x8001. It goes on after the row.
func (p *portGuest) serveBoth() (both [2]*portGuest) {
	row := p.t
	row.Helper()
	defer func() { p.t = row }()
	p.t = p.whole
	file := "provider: ibverbs\ndevice: rxe0\nport: 1\ninterfaces:\n"
	for i, pkey := range []string{"0xffff", "0x8001"} {
		n := *p.node
		n.link, n.ifname, n.t = i, fmt.Sprintf("ibcm%d", i), row
		n.socket = fmt.Sprintf("/run/agent%d.sock", i)
		both[i] = &portGuest{node: &n, vm: p.vm, whole: p.whole}
		file += fmt.Sprintf("- {name: %s, pkey: %s, control: %s, addresses: [%s/24, %s/64]}\n",
			n.ifname, pkey, n.socket, n.v4(), n.v6())
	}
	p.sh("cat >/run/both.yaml <<'END'\n" + file + "END\n")
	agent, err := p.start(productProgram, "run", "--config=/run/both.yaml")
	if err != nil {
		row.Fatal(err)
	}
	p.whole.Cleanup(func() {
		agent.Kill()
		if p.whole.Failed() {
			p.whole.Logf("agent on %s:\n%s", p.name, agent.Output())
		}
	})
	for _, b := range both {
		b.agent = agent
		b.until("the interface is up", func() error { return b.is("up") })
	}
	return both
}

// setKeys gives the port another P_Key table.
func (p *portGuest) setKeys(list string) {
	p.t.Helper()
	p.sh("echo " + list + " >/sys/module/softib/parameters/pkeys")
}

// withCM are the rows with ib_cm, which has QP 1 then, and with the kernel's own interface on
// both ports.
func (p *portWorld) withCM(t *testing.T) {
	o, other := p.ours, p.other
	p.row(t, "ib_cm has QP 1", func(t *testing.T) {
		o.sh("modprobe ib_cm")
		other.sh("modprobe ib_cm")
		other.serve("rc")
		o.serve("rc")
		if !p.grh { // datagrams name nobody then, and CM messages in-band need to know
			pings(o.node, other.node, 64, 1500)
			return
		}
		pings(o.node, other.node, 64, 1500, maxMTU)
		transfers(o.node, other.node, someOctets)
		o.connected("RC", "inband")
		o.saysWhoHasCM(t)
	})
	p.row(t, "beside the kernel's ib_ipoib on the same port", func(t *testing.T) {
		ks := [2]*linuxGuest{o.kernels(t), other.kernels(t)}
		o.until("status knows of the kernel's interface", func() error {
			if s := o.status().Underlay.Subnet; s == nil || !s.Shared {
				return fmt.Errorf("subnet %+v", s)
			}
			return nil
		})
		both := func() {
			t.Helper()
			pings(o.node, other.node, 64, 1500)
			pings(ks[0].node, ks[1].node, 64, maxMTU)
			hears(ks[0].node, ks[1].node, "239.1.2.3:5004", 100)
			hears(o.node, other.node, "239.1.2.3:5004", 100)
		}
		both()
		o.end("TERM")
		pings(ks[0].node, ks[1].node, 64, maxMTU)
		hears(ks[1].node, ks[0].node, "239.1.2.3:5004", 100)
		o.serve("rc")
		both()
		ks[0].sh("/usr/bin/ip link set ib0 down; rmmod ib_ipoib")
		pings(o.node, other.node, 64, 1500)
		hears(other.node, o.node, "239.1.2.3:5004", 100)
		hears(other.node, o.node, "10.9.0.255:5003", 100)
	})
}

// kernels brings the kernel's interface up on the port, as another link.
func (p *portGuest) kernels(t *testing.T) *linuxGuest {
	t.Helper()
	l := &linuxGuest{node: linuxNode(t, p.vm, p.number), vm: p.vm}
	l.link = 1
	p.sh("set -e; modprobe ib_ipoib; n=0; until [ -e /sys/class/net/ib0 ] || [ $n = 100 ]; do sleep 0.05; n=$((n+1)); done; " +
		"echo connected >/sys/class/net/ib0/mode; /usr/bin/ip link set ib0 mtu " + fmt.Sprint(maxMTU) + " up; " +
		"/usr/bin/ip addr add " + l.v4() + "/24 brd + dev ib0; /usr/bin/ip addr add " + l.v6() + "/64 dev ib0 nodad")
	l.carrier()
	return l
}

// saysWhoHasCM checks what status and doctor say of ib_cm.
func (p *portGuest) saysWhoHasCM(t *testing.T) {
	t.Helper()
	s := p.status()
	if notes := strings.Join(s.Underlay.Notes, "\n"); !strings.Contains(notes, "ib_cm") {
		t.Errorf("notes of status %q, want one of ib_cm", notes)
	}
	out, _ := p.run(append([]string{productProgram, "doctor"}, p.provider...)...) // its exit status says that something is wrong
	if !strings.Contains(out, "ib_cm") || !strings.Contains(out, "modprobe -r") {
		t.Errorf("doctor does not say what has QP 1 and how to free it:\n%s", out)
	}
}

// clean reports what the guest's kernel complained of.
func (p *portGuest) clean(t *testing.T) {
	t.Helper()
	(&linuxGuest{node: p.node, vm: p.vm}).clean(t)
}

// withoutGroups starts the agent where the administrator refuses all, which status says, and
// has it change its mind. (What an agent does where nobody answers is in ipoib's tests.)
func (p *portGuest) withoutGroups(t *testing.T) {
	t.Helper()
	p.answers(false)
	agent, err := p.start(append([]string{productProgram, "run", "--name=" + productIf, "--control=" + p.socket,
		"--address=" + p.v4() + "/24", "--address=" + p.v6() + "/64"}, p.provider...)...)
	if err != nil {
		t.Fatal(err)
	}
	p.agent = agent
	p.whole.Cleanup(func() {
		agent.Kill()
		if t.Failed() {
			p.whole.Logf("agent on %s:\n%s", p.name, agent.Output())
		}
	})
	p.until("status says that there is no link", func() error { return p.is("no link") })
	s := p.status()
	switch n := s.Underlay.Subnet; {
	case n == nil:
		t.Error("subnet: n is nil")
	case n.Joined:
		t.Error("subnet: Joined is true, want false")
	case n.SMLID == 0:
		t.Error("subnet: SMLID is 0, want more")
	}
	if w := strings.Join(s.Warnings, "\n"); !strings.Contains(w, "the subnet administrator refuses") {
		t.Errorf("warnings %q, want one of the administrator", w)
	}
	p.answers(true)
	start := time.Now()
	p.until("the link is there", func() error { return p.is("up") })
	t.Logf("up %v after the administrator answers", time.Since(start).Round(10*time.Millisecond))
	switch n := p.status().Underlay.Subnet; {
	case n == nil:
		t.Error("subnet: n is nil")
	case !n.Joined:
		t.Error("subnet: Joined is false, want true")
	case n.MLID < 0xc000:
		t.Errorf("subnet: MLID is %v, want at least 0xc000", n.MLID)
	case n.LID == 0:
		t.Error("subnet: LID is 0, want more")
	}
}

// is says whether the interface is in a state, also before the agent answers.
func (p *portGuest) is(want string) error {
	var s control.Status
	if err := p.ask(&s); err != nil {
		return err
	}
	if s.Interface.State != want {
		return fmt.Errorf("it is %s, not %s", s.Interface.State, want)
	}
	return nil
}

// becomesOurs takes ib_ipoib and ib_cm off a guest, for an agent of ours on its port.
func (l *linuxGuest) becomesOurs(t *testing.T) *portGuest {
	l.t.Helper()
	l.sh("set -e; /usr/bin/ip link set ib0 down; rmmod ib_ipoib; rmmod ib_cm; modprobe tun")
	if out, err := l.vm.Sh(patience, "test ! -e /sys/class/net/ib0"); err != nil {
		l.t.Fatal(errors.Join(errors.New("ib0 is still there"), err), out)
	}
	return portNode(t, l.vm, l.number)
}
