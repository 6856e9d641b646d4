package interop

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"ipoibcm/internal/lab"
	"ipoibcm/test/interop/vm"
)

// TestPortChanges takes from an agent on rxe0 what it stands on, and gives it back:
// the address, the MTU, the link, and at last the device.
func TestPortChanges(t *testing.T) {
	t.Parallel()
	img, dir := productImage(t)
	seg := vm.NewSegment()
	t.Cleanup(seg.Close)
	host, err := lab.NewHost(fmt.Sprintf("%s%d-port", namePrefix, os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	if err := seg.AddHost(host, "eth0", mac(0xfe), 5000); err != nil {
		t.Fatal(err)
	}
	g := guestWith(t, seg, img, 1, 5000, "ib_umad")
	a, b := hostNode(t, host, dir, 2), guestNode(t, g, 1)
	if out, err := b.run(append([]string{productProgram, "doctor"}, b.provider...)...); err != nil {
		t.Errorf("doctor: %v\n%s", err, out)
	}
	p := &pairing{a: a, b: b, ipv6: true, path: "gsi", ud: 2044}
	a.up(p.args(a, "rc")...)
	b.up(p.args(b, "rc")...)
	p.meet("rc")

	step := func(name string, f func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			a.t, b.t = t, t
			defer p.tell(t)
			f(t)
		})
	}
	step("another GID", func(t *testing.T) { anotherGID(t, p, g) })
	step("another MTU", func(t *testing.T) { anotherMTU(t, p, g) })
	step("link down and up", func(t *testing.T) {
		sh(t, g, "/usr/bin/ip link set eth0 down")
		b.state("underlay down")
		sh(t, g, "/usr/bin/ip link set eth0 up")
		b.state("up")
		p.meet("rc")
	})
	step("a datagram without a route", func(t *testing.T) { withoutRoute(t, p, g) })
	step("the device is removed", func(t *testing.T) { removedDevice(t, p, g) })
}

// anotherGID: the underlay gets another address, and the connection comes back.
func anotherGID(t *testing.T, p *pairing, g *vm.VM) {
	t.Helper()
	b := p.b
	old := b.status().Interface.GID
	sh(t, g, "/usr/bin/ip addr add fe80::77/64 dev eth0 nodad; /usr/bin/ip addr del "+guestIPv6+"/64 dev eth0")
	b.until("the GID is the new address", func() error {
		s := b.status()
		if s.Interface.GID == old || !slices.Contains(s.Underlay.GIDs, s.Interface.GID) ||
			!strings.Contains(s.Interface.GID, "77") {
			return fmt.Errorf("it is %s of %v", s.Interface.GID, s.Underlay.GIDs)
		}
		return nil
	})
	p.meet("rc")
}

// anotherMTU: status warns while the path MTU is too small for the UD MTU.
func anotherMTU(t *testing.T, p *pairing, g *vm.VM) {
	t.Helper()
	b := p.b
	warned := func(want bool) func() error {
		return func() error {
			s := b.status()
			got := strings.Contains(strings.Join(s.Warnings, "\n"),
				"UD MTU 2044 needs an IB path MTU of 2048, the device has 1024")
			if got != want {
				return fmt.Errorf("path MTU %d, warnings %q", s.Underlay.PathMTU, s.Warnings)
			}
			return nil
		}
	}
	sh(t, g, "/usr/bin/ip link set eth0 mtu 1500")
	b.until("a warning", warned(true))
	sh(t, g, "/usr/bin/ip link set eth0 mtu 5000")
	b.until("no warning", warned(false))
	p.meet("rc")
}

// withoutRoute: a datagram without a route takes the UD QP of rdma_rxe to ERR, as one in the
// moment when a link comes up may.
func withoutRoute(t *testing.T, p *pairing, g *vm.VM) {
	t.Helper()
	a, b := p.a, p.b
	sh(t, g, "/usr/bin/ip -6 route del ff00::/8 dev eth0 table local")
	_, _ = b.run(trafficProgram, "ping", "10.9.0.99", "100") // asks everybody
	b.until("the UD QP has come back", func() error {
		for line := range strings.Lines(b.must(productProgram, "show", "stats", "--control="+b.socket)) {
			if strings.Contains(line, "ud_qp_revived") {
				return nil // counters at zero are left out
			}
		}
		return errors.New("it was not brought back")
	})
	sh(t, g, "/usr/bin/ip -6 route add multicast ff00::/8 dev eth0 table local")
	// A new address is found over the UD QPs only, by a query and an answer.
	sh(t, g, "/usr/bin/ip addr add 10.9.0.7/24 dev "+productIf)
	a.reach("10.9.0.7", 100)
	p.meet("rc")
}

// removedDevice: it takes until the agent has let go; the agent ends, for a supervisor to
// start it anew.
func removedDevice(t *testing.T, p *pairing, g *vm.VM) {
	t.Helper()
	a, b := p.a, p.b
	sh(t, g, "rdma link delete rxe0")
	if _, err := b.agent.Wait(patience); err == nil {
		t.Error("the agent ended as if it had been asked to")
	}
	if out := b.agent.Output(); !strings.Contains(out, "the device is lost: RDMA device rxe0 was removed") {
		t.Errorf("the agent said %q", out)
	}
	a.until("the peer notices", func() error {
		if _, err := a.run(trafficProgram, "ping", b.v4(), "100"); err == nil {
			return errors.New("it still answers")
		}
		return nil
	})
	sh(t, g, "rdma link add rxe0 type rxe netdev eth0")
	b.up(b.args...)
	// An attempt of the peer may have turned to the UD QPs meanwhile, because nobody
	// answered at QP 1.
	p.path = ""
	p.meet("rc")
}

// tell logs what both agents know if the test has failed.
func (p *pairing) tell(t *testing.T) {
	if !t.Failed() {
		return
	}
	for _, n := range []*node{p.a, p.b} {
		for _, what := range [][]string{{"status"}, {"show", "neigh"}, {"show", "conn"}, {"show", "stats"}} {
			out, err := n.run(append(append([]string{productProgram}, what...), "--control="+n.socket)...)
			var some []string
			for _, line := range strings.Split(out, "\n") {
				if !strings.HasSuffix(line, " 0") { // counters that count nothing
					some = append(some, line)
				}
			}
			t.Logf("%s: %s: %v\n%s", n.name, strings.Join(what, " "), err, strings.Join(some, "\n"))
		}
	}
}

// state waits until the interface has that state.
func (n *node) state(want string) {
	n.t.Helper()
	n.until("the state is "+want, func() error {
		if s := n.status().Interface.State; s != want {
			return fmt.Errorf("it is %s", s)
		}
		return nil
	})
}

// sh runs a line of shell in the guest.
func sh(t *testing.T, g *vm.VM, line string) {
	t.Helper()
	if _, err := g.Sh(patience, line); err != nil {
		t.Fatal(err)
	}
}
