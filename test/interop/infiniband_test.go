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
	vm *vm.VM
}

// portNode runs our agent on the InfiniBand port of a guest.
func portNode(t *testing.T, g *vm.VM, number int) *portGuest {
	n := guestNode(t, g, number)
	n.provider = append(n.provider, "--port=1")
	return &portGuest{node: n, vm: g}
}

// bootPort starts a guest with a soft InfiniBand port. ib_cm is not loaded there: class 7 is ours.
func (w *linuxWorld) bootPort(number int, params string) *portGuest {
	w.t.Helper()
	g, err := vm.Boot(context.Background(), w.img, vm.Config{Name: fmt.Sprintf("port%d", number), Segment: w.seg, MAC: mac(byte(number)),
		MTU: w.mtu, NoRXE: true, Modules: []string{"udp_tunnel", "ip6_udp_tunnel", "crc32_generic", "ib_uverbs", "ib_umad", "tun"}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(g.Kill)
	p := portNode(w.t, g, number)
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

// serve starts the agent.
func (p *portGuest) serve(mode string) {
	p.t.Helper()
	p.up("--mode="+mode, "--address="+p.v6()+"/64")
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
			ours := w.bootPort(2, params)
			l := w.bootWith(1, params)
			w.ours = ours.node
			row := func(name string, f func(t *testing.T)) {
				w.row(name, func(t *testing.T) {
					ours.t = t
					f(t)
				})
				if ours.t = t; t.Failed() {
					t.FailNow()
				}
			}
			row("an administrator that joins nobody", func(t *testing.T) { ours.withoutGroups(t) })
			row("Linux's ib_ipoib", func(*testing.T) {
				pings(ours.node, l.node, 64, 1500, maxMTU)
				ours.oneWay(1)
				transfers(ours.node, l.node, 1<<20)
				between(ours.node, l.node, func(from, to *node) {
					hears(from, to, "10.9.0.255:5003", 100)
					hears(from, to, "239.1.2.3:5004", 100)
					hears(from, to, "[ff05::123]:5005", 100)
				})
			})
			l.clean(t)
			other := l.becomesOurs()
			ours.end("TERM")
			for _, mode := range []string{"rc", "ud"} {
				row("two of ours, "+mode, func(t *testing.T) {
					ours.serve(mode)
					other.t = t
					other.serve(mode)
					sizes := []int{64, 1500}
					if mode == "rc" {
						sizes = append(sizes, maxMTU)
					}
					pings(ours.node, other.node, sizes...)
					transfers(ours.node, other.node, 1<<20)
					if mode == "rc" {
						ours.connected("RC", "gsi")
					}
					other.end("TERM")
					ours.end("TERM")
				})
			}
			l.clean(t)
		})
	}
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
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("agent on %s:\n%s", p.name, agent.Output())
		}
	})
	p.until("status says that there is no link", func() error { return p.is("no link") })
	s := p.status()
	if n := s.Underlay.Subnet; n == nil || n.Joined || n.SMLID == 0 {
		t.Errorf("subnet: %+v, want one whose broadcast group is not joined", n)
	}
	if w := strings.Join(s.Warnings, "\n"); !strings.Contains(w, "the subnet administrator refuses") {
		t.Errorf("warnings %q, want one of the administrator", w)
	}
	p.answers(true)
	start := time.Now()
	p.until("the link is there", func() error { return p.is("up") })
	t.Logf("up %v after the administrator answers", time.Since(start).Round(10*time.Millisecond))
	if n := p.status().Underlay.Subnet; n == nil || !n.Joined || n.MLID < 0xc000 || n.LID == 0 {
		t.Errorf("subnet: %+v, want the broadcast group joined", n)
	}
}

// is says whether the interface is in a state, also before the agent answers.
func (p *portGuest) is(want string) error {
	var s control.Status
	if err := p.ask(&s, "status"); err != nil {
		return err
	}
	if s.Interface.State != want {
		return fmt.Errorf("it is %s, not %s", s.Interface.State, want)
	}
	return nil
}

// becomesOurs takes ib_ipoib and ib_cm off a guest, for an agent of ours on its port.
func (l *linuxGuest) becomesOurs() *portGuest {
	l.t.Helper()
	l.sh("set -e; /usr/bin/ip link set ib0 down; rmmod ib_ipoib; rmmod ib_cm; modprobe tun")
	if out, err := l.vm.Sh(patience, "test ! -e /sys/class/net/ib0"); err != nil {
		l.t.Fatal(errors.Join(errors.New("ib0 is still there"), err), out)
	}
	return portNode(l.t, l.vm, l.number)
}
