package netns

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/doctor"
	"ipoibcm/internal/lab"
)

// container returns a network namespace without devices, in the place of h's: what is
// asked of the interface is asked there.
func (h *host) container() *host {
	h.seg.Helper()
	in, err := lab.NewHost(fmt.Sprintf("%s%d-%di", namePrefix, os.Getpid(), serial.Add(1)))
	h.seg.must(err)
	h.seg.Cleanup(func() { in.Close() })
	return &host{Host: in, seg: h.seg, i: h.i, agent: h.agent, v4: h.v4, v6: h.v6}
}

// sits waits until the agent says that its interface is called name in the namespace
// that people call netns.
func (h *host) sits(netns, name string) {
	h.seg.Helper()
	h.seg.eventually(patience, fmt.Sprintf("%s is in %q", name, netns), func() error {
		switch i := h.status().Interface; {
		case i.Netns != netns:
			return fmt.Errorf("status says it is in %q", i.Netns)
		case i.Name != name:
			return fmt.Errorf("status calls it %s", i.Name)
		}
		return nil
	})
}

// noRules reports rules of ours that are left in h.
func (h *host) noRules() {
	h.seg.Helper()
	h.seg.eventually(patience, "no rule of ours in "+h.Name, func() error {
		rules, err := h.tryIP("rule show")
		if err == nil && strings.Contains(rules, "224.0.0.0/4") {
			err = fmt.Errorf("there are %q", rules)
		}
		return err
	})
}

// talk sees that host a, wherever its interface is, and b reach each other with the
// full MTU, which a's routes show, and that groups joined there are heard.
func (h *host) talk(b *host, dev string) {
	h.seg.Helper()
	h.connect(b, "RC")
	h.reachFull(b, maxMTU)
	both(b, func(dst netip.Addr) { h.waitRoute(patience, neighbour(dst), udMTU) })
	both(h, b.reach)
	for _, g := range []string{"239.9.9.9", "ff05::99"} {
		if err := b.Multicast(ifName, h.Host, dev, netip.MustParseAddr(g), 1200, patience); err != nil {
			h.seg.Error(err)
		}
	}
}

// run --netns makes the interface in another namespace. The underlay stays here.
func TestNetns(t *testing.T) {
	parallel(t)
	for _, by := range []string{"name", "path"} {
		t.Run("by "+by, func(t *testing.T) {
			parallel(t)
			needIP(t)
			_, a, b := newPair(t)
			in := a.container()
			where := in.Name
			if by == "path" {
				where = "/run/netns/" + in.Name
			}
			a.run("--netns", where)
			b.run()
			in.agent = a.agent
			in.sits(in.Name, ifName)
			if _, err := a.Link(ifName); err == nil {
				t.Error("there is an interface beside the underlay")
			}
			in.talk(b, ifName)
			a.stop()
			if _, err := in.Link(ifName); err == nil {
				t.Error("the interface outlived its agent")
			}
			in.noRules()
		})
	}
	t.Run("that is not there", func(t *testing.T) {
		parallel(t)
		s := newSegment(t, topology{})
		a := s.hosts[0]
		for _, where := range []string{"no-such-namespace", "/proc/self/ns/mnt", "/etc/hostname"} {
			err := a.tryRun("--netns", where)
			if err == nil {
				t.Fatalf("the agent started in %s", where)
			}
			if err := containsAll(err.Error(), where, "ip netns list"); err != nil {
				t.Error(err)
			}
		}
		d, code := a.examined("", "--underlay", underlay, "--netns", "no-such-namespace")
		if code == 0 {
			t.Error("doctor finds nothing wrong with a namespace that is not there")
		}
		if c := checkOf(d, doctor.TUN); c.Status != control.CheckFail {
			t.Errorf("doctor says of it %+v", c)
		}
	})
}

func checkOf(d control.Doctor, name string) (c control.Check) {
	for _, c := range d.Checks {
		if c.Name == name {
			return c
		}
	}
	return c
}

// An interface that is moved into another namespace while it serves goes on there: its
// configured addresses come back, others can be added, and once it is set up again
// routes, groups and answers are those of the new place. It may be renamed, and move
// on, and come home.
func TestMovedToAnotherNamespace(t *testing.T) {
	parallel(t)
	needIP(t)
	s, a, b := connectedPair(t)
	first, second := a.container(), a.container()
	for n, move := range []struct {
		from, to  *host
		old, name string
		netns     string
	}{
		{a, first, ifName, ifName, first.Name},
		{first, second, ifName, "eth7", second.Name},
		{second, a, "eth7", ifName, ""},
	} {
		args := fmt.Sprintf("link set %s netns %s name %s", move.old, move.to.Name, move.name)
		if move.old == move.name {
			args = fmt.Sprintf("link set %s netns %s", move.old, move.to.Name)
		}
		move.from.ip(args)
		move.to.sits(move.netns, move.name)
		if st := move.to.status().Interface.State; st != "down" {
			t.Errorf("move %d: the interface is %q before anybody has set it up", n, st)
		}
		b.noConns()
		more := fmt.Sprintf("10.0.0.%d", 70+n)
		s.must(move.to.AddAddr(move.name, more+"/24"))
		s.must(move.to.Up(move.name))
		move.to.talk(b, move.name)
		b.reach(netip.MustParseAddr(more))
		// What the agent answers for beside that is of the new place too.
		lo := fmt.Sprintf("10.1.1.%d", 70+n)
		s.must(move.to.AddAddr("lo", lo+"/32"))
		b.ip(fmt.Sprintf("route add %s/32 dev %s", lo, ifName))
		b.reach(netip.MustParseAddr(lo))
		if w := move.to.status().Warnings; len(w) != 0 {
			t.Errorf("move %d: warnings %q", n, w)
		}
		move.from.noRules()
	}
	log, err := os.ReadFile(a.path(".log"))
	s.must(err)
	if err := containsAll(string(log), "netns="+first.Name, "netns="+second.Name, `netns="the agent's own"`); err != nil {
		t.Errorf("the log: %v", err)
	}
	a.stop()
	a.noRules()
}

// An interface that is moved and removed there ends the agent, which says so.
func TestRemovedInAnotherNamespace(t *testing.T) {
	parallel(t)
	needIP(t)
	s := newSegment(t, topology{})
	a := s.hosts[0]
	s.start()
	in := a.container()
	a.ip(fmt.Sprintf("link set %s netns %s", ifName, in.Name))
	in.sits(in.Name, ifName)
	in.ip("link del " + ifName)
	if err := a.agent.Wait(patience); err == nil {
		t.Error("the agent ended as if nothing were wrong")
	}
	if tail := a.agent.LogTail(5); !strings.Contains(tail, "was removed") {
		t.Errorf("its last words were %s", tail)
	}
}

// readOnlySys makes /proc/sys read-only in a mount namespace, as container runtimes and
// systemd's ProtectKernelTunables do.
const readOnlySys = "mount --make-rprivate / && mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"

// runReadOnly starts the agent where /proc/sys is read-only.
func (h *host) runReadOnly(args ...string) {
	h.seg.Helper()
	shell := h.file("read-only", "#!/bin/sh\n"+readOnlySys+` && exec "`+program+`" "$@"`+"\n")
	h.seg.must(os.Chmod(shell, 0o755))
	wrapper := h.file("unshared", "#!/bin/sh\nexec unshare --mount "+shell+` "$@"`+"\n")
	h.seg.must(os.Chmod(wrapper, 0o755))
	a, err := lab.StartAgent(h.seg.ctx, h.Host, lab.AgentConfig{Program: wrapper, Control: h.path(".sock"),
		Log: h.path(".log"), Args: h.args(args...)})
	h.seg.must(err)
	h.agent = a
}

// Where /proc/sys is read-only the agent starts, says what it goes without, and carries
// traffic; doctor says so before. Nothing is said where the kernel's defaults are right.
func TestReadOnlySysctls(t *testing.T) {
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip("unshare (util-linux) is not installed: /proc/sys cannot be made read-only")
	}
	parallel(t)
	s, a, b := newPair(t)
	remedy := []string{"/proc/sys", "net.ipv6.conf.default.accept_ra_mtu=0"}
	d, code := a.examined(readOnlySys, "--underlay", underlay)
	if code != 0 {
		t.Errorf("doctor ends with status %d, want 0", code)
	}
	c := checkOf(d, doctor.Settings)
	if c.Status != control.CheckWarn {
		t.Errorf("doctor says %+v, want a warning", c)
	}
	if err := containsAll(c.Detail+c.Remedy, remedy...); err != nil {
		t.Errorf("doctor: %v", err)
	}
	b.run()
	a.runReadOnly()
	if err := containsAll(strings.Join(a.status().Warnings, "\n"), remedy...); err != nil {
		t.Errorf("status: %v", err)
	}
	log, err := os.ReadFile(a.path(".log"))
	s.must(err)
	if err := containsAll(string(log), remedy...); err != nil {
		t.Errorf("the log: %v", err)
	}
	a.talk(b, ifName)
	a.stop()

	s.must(a.Sysctl("net/ipv6/conf/default/accept_ra_mtu", "0"))
	a.runReadOnly()
	if w := a.status().Warnings; len(w) != 0 {
		t.Errorf("warnings %q, though the interface has inherited its settings", w)
	}
	if d, _ := a.examined(readOnlySys, "--underlay", underlay, "--name", "ibcm1", "--control",
		a.path(".other")); checkOf(d, doctor.Settings).Status != control.CheckOK {
		t.Errorf("doctor says %+v", checkOf(d, doctor.Settings))
	}
}
