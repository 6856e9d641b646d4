package netns

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/doctor"
)

// wrapped runs ipoibcmd in the host by way of a shell command, which sees
// mounts of its own and goes on with exec "$@". It is ended after a while.
func (h *host) wrapped(shell string, within time.Duration, args ...string) (out, errs string, code int) {
	h.seg.Helper()
	ctx, cancel := context.WithTimeout(h.seg.ctx, within)
	defer cancel()
	var stdout, stderr bytes.Buffer
	c := exec.CommandContext(ctx, program, args...)
	if shell != "" {
		c = exec.CommandContext(ctx, "sh", append([]string{"-c", shell + ` && exec "$@"`, "sh", program}, args...)...)
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	}
	c.Stdout, c.Stderr = &stdout, &stderr
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	h.Output(c)
	if c.ProcessState == nil {
		h.seg.Fatalf("ipoibcmd %v did not start", args)
	}
	return stdout.String(), stderr.String(), c.ProcessState.ExitCode()
}

// examined runs doctor with --json and returns what it says.
func (h *host) examined(shell string, args ...string) (d control.Doctor, code int) {
	h.seg.Helper()
	out, errs, code := h.wrapped(shell, patience,
		append([]string{"doctor", "--json", "--control", h.path(".sock")}, args...)...)
	switch err := json.Unmarshal([]byte(out), &d); {
	case err != nil:
		h.seg.Fatalf("doctor: %v", err)
	case d.Version != control.Version:
		h.seg.Fatalf("doctor: Version is %v, want %v", d.Version, control.Version)
	case errs != "":
		h.seg.Fatalf("doctor: errs is %v, want \"\"", errs)
	}
	seen := map[string]bool{}
	for _, c := range d.Checks {
		switch {
		case seen[c.Name]:
			h.seg.Errorf("check %+v", c)
		case c.Detail == "":
			h.seg.Error("c's Detail is empty")
		case !slices.Contains([]string{control.CheckOK, control.CheckWarn, control.CheckFail, control.CheckSkipped},
			c.Status):
			h.seg.Errorf("%v has no %v", []string{control.CheckOK, control.CheckWarn, control.CheckFail, control.CheckSkipped},
				c.Status)
		}
		seen[c.Name] = true
		if c.Status != control.CheckWarn && (c.Status != control.CheckFail || c.Name == doctor.Provider) {
			continue
		}
		if c.Remedy == "" {
			h.seg.Errorf("%s is %s (%s) and has no remedy", c.Name, c.Status, c.Detail)
		}
	}
	if d.OK != (code == 0) {
		h.seg.Errorf("ok is %v, the exit status %d", d.OK, code)
	}
	return d, code
}

func withStatus(d control.Doctor, status string) (names []string) {
	for _, c := range d.Checks {
		if c.Status == status {
			names = append(names, c.Name)
		}
	}
	return names
}

// Where nothing is wrong doctor says so, leaves nothing behind, and run works.
func TestDoctorFine(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	d, code := a.examined("", a.args()...)
	if code != 0 || len(withStatus(d, control.CheckFail)) != 0 {
		t.Fatalf("exit status %d: %+v", code, d)
	}
	for _, must := range []string{doctor.TUN, doctor.Capabilities, doctor.Settings, doctor.Control, doctor.Underlay,
		doctor.Address,
		doctor.GID, doctor.MTU, doctor.Port, doctor.Provider, doctor.Buffers, doctor.GSO, doctor.GRO, doctor.CM,
		doctor.Demo} {
		if ok := withStatus(d, control.CheckOK); !slices.Contains(ok, must) {
			t.Errorf("%s is not ok: %+v", must, d.Checks)
		}
	}
	if _, err := a.Link(ifName); err == nil {
		t.Errorf("doctor has left %s", ifName)
	}
	out, errs, code := a.wrapped("", patience, append([]string{"doctor", "--control", a.path(".sock")}, a.args()...)...)
	switch err := containsAll(out, "ok       tun", "run would work"); {
	case err != nil:
		t.Errorf("for people: %v", err)
	case code != 0:
		t.Errorf("for people: code is %v, want 0", code)
	case errs != "":
		t.Errorf("for people: errs is %v, want \"\"", errs)
	}
	s.start()
	a.connect(b, "RC")
	// While an agent runs a second one like it would not.
	d, _ = a.examined("", a.args()...)
	fails := withStatus(d, control.CheckFail)
	for _, want := range []string{doctor.TUN, doctor.Control, doctor.Port} {
		if !slices.Contains(fails, want) {
			t.Errorf("beside an agent %s does not fail: %v", want, fails)
		}
	}
	for _, c := range d.Checks {
		if c.Name == doctor.Port && !strings.Contains(c.Detail, "ipoibcmd, process") {
			t.Errorf("who has the port: %+v", c)
		}
	}
	a.paired(b, "RC") // and it did no harm
	a.ping(b.v4, maxMTU, true)
}

// A TUN that somebody made before is for run, and doctor changes nothing of it.
func TestDoctorLeavesTUN(t *testing.T) {
	parallel(t)
	_, a, _ := newPair(t)
	a.ip("tuntap add dev " + ifName + " mode tun")
	was, err := a.Link(ifName)
	if err != nil {
		t.Fatal(err)
	}
	d, code := a.examined("", a.args()...)
	if code != 0 || !slices.Contains(withStatus(d, control.CheckOK), doctor.TUN) {
		t.Errorf("exit status %d: %+v", code, d.Checks)
	}
	is, err := a.Link(ifName)
	if err != nil {
		t.Fatal(err)
	}
	if is.Attrs().MTU != was.Attrs().MTU {
		t.Errorf("MTU %d, want %d as before", is.Attrs().MTU, was.Attrs().MTU)
	}
	if out := a.ip("addr show dev " + ifName); strings.Contains(out, a.v4.String()) {
		t.Errorf("doctor has left addresses: %s", out)
	}
}

// doctorFindings are hosts on which one thing is missing.
var doctorFindings = []struct {
	name    string
	top     topology
	shell   string // before the command
	prepare func(t *testing.T, h *host)
	args    []string
	fails   []string // all of them
	says    string
}{
	{name: "no TUN node", shell: "mount -t tmpfs none /dev/net", fails: []string{doctor.TUN}, says: "modprobe tun"},
	{name: "no privilege", shell: "setpriv --bounding-set=-net_admin --inh-caps=-net_admin true",
		fails: []string{doctor.TUN, doctor.Capabilities}, says: "CAP_NET_ADMIN"},
	{name: "port taken", prepare: func(t *testing.T, h *host) {
		var c net.PacketConn
		if err := h.Do(func() (err error) {
			c, err = net.ListenPacket("udp6", "[::]:4791")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}, fails: []string{doctor.Port}, says: ownName() + ", process"},
	{name: "no underlay", args: []string{"--underlay", "nosuch0"}, fails: []string{doctor.Underlay},
		says: "ipoibcmd devices"},
	{name: "underlay down", prepare: func(t *testing.T, h *host) { h.seg.must(h.Down(underlay)) },
		fails: []string{doctor.Underlay}, says: "ip link set " + underlay + " up"},
	{name: "no underlay address", top: topology{ipv4: true},
		prepare: func(t *testing.T, h *host) { h.seg.must(h.DelAddr(underlay, "192.168.7.1/24")) },
		fails:   []string{doctor.Address}, says: "ip addr add"},
	{name: "GID of another", args: []string{"--gid", "fe80::1:2:3"}, fails: []string{doctor.GID},
		says: "leave gid empty"},
	{name: "MTU too small", top: topology{ipv4: true, mtu: 1500}, fails: []string{doctor.MTU}, says: "--ud-mtu 1444"},
	{name: "provider of the other binary", prepare: func(t *testing.T, h *host) { h.usable() },
		args: []string{"--provider", "ibverbs"}, fails: []string{doctor.Provider, doctor.RDMADevices},
		says: "ipoibcmd-ibverbs"},
	{name: "name taken", args: []string{"--name", underlay}, fails: []string{doctor.TUN}, says: "choose another --name"},
	{name: "no directory for the socket", args: []string{"--control", "/dev/null/ibcm0.sock"},
		fails: []string{doctor.Control}, says: "choose another --control"},
	{name: "IPv6 address without IPv6", prepare: func(t *testing.T, h *host) {
		h.seg.must(h.Sysctl("net/ipv6/conf/default/disable_ipv6", "1"))
	}, fails: []string{doctor.Settings}, says: "disable_ipv6"},
}

// For each thing that is missing the check that names it fails, and run refuses.
func TestDoctorFindings(t *testing.T) {
	parallel(t)
	for _, tt := range doctorFindings {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			if strings.HasPrefix(tt.shell, "setpriv") {
				if _, err := exec.LookPath("setpriv"); err != nil {
					t.Skip("setpriv is not installed")
				}
			}
			s := newSegment(t, tt.top)
			h := s.hosts[0]
			if tt.prepare != nil {
				tt.prepare(t, h)
			}
			shell := tt.shell
			if strings.HasPrefix(shell, "setpriv") { // a command of its own, before ours
				shell = `set -- ` + strings.TrimSuffix(shell, " true") + ` "$@"`
			}
			args := h.args(tt.args...)
			d, code := h.examined(shell, args...)
			if fails := withStatus(d, control.CheckFail); code == 0 || !slices.Equal(fails, tt.fails) {
				t.Errorf("exit status %d, failed %v, want %v\n%+v", code, fails, tt.fails, d.Checks)
			}
			said := false
			for _, c := range d.Checks {
				said = said || c.Status == control.CheckFail && strings.Contains(c.Detail+" "+c.Remedy, tt.says)
			}
			if !said {
				t.Errorf("%q is not said: %+v", tt.says, d.Checks)
			}
			out, errs, code := h.wrapped(shell, patience, append([]string{"run", "--control", h.path(".sock")}, args...)...)
			if code == 0 || code == -1 {
				t.Errorf("run did not refuse: exit status %d\n%s%s", code, out, errs)
			}
		})
	}
}

// ownName is the name of this process as the kernel shows it.
func ownName() string {
	b, _ := os.ReadFile("/proc/self/comm")
	return strings.TrimSpace(string(b))
}

// What run refuses as wrongly used, doctor does too.
func TestDoctorUsage(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	h := s.hosts[0]
	for _, args := range [][]string{{"doctor"}, {"doctor", "--underlay", underlay, "--mode", "fast"},
		{"doctor", "--underlay", underlay, "extra"}} {
		if out, code := h.command(args...); code != 2 {
			t.Errorf("%v: exit status %d\n%s", args, code, out)
		}
	}
	// Below what IPv6 needs is worth a warning, no more, unless the interface has
	// IPv6 addresses.
	if out, code := h.command(append([]string{"doctor"}, h.args("--ud-mtu", "1000")...)...); code != 2 ||
		!strings.Contains(out, "ud_mtu, 1000 here") {
		t.Errorf("UD MTU 1000 and an IPv6 address: exit status %d\n%s", code, out)
	}
	d, code := h.examined("", "--underlay", underlay, "--name", ifName, "--ud-mtu", "1000", "--address",
		h.v4.String()+"/24")
	if code != 0 || !slices.Contains(withStatus(d, control.CheckWarn), doctor.MTU) {
		t.Errorf("UD MTU 1000: exit status %d, %+v", code, d.Checks)
	}
	// The same prefix on underlay and interface too.
	s.must(h.AddAddr(underlay, "10.0.0.200/24"))
	if d, code = h.examined("", h.args()...); code != 0 ||
		!slices.Contains(withStatus(d, control.CheckWarn), doctor.Settings) {
		t.Errorf("overlapping prefixes: exit status %d, %+v", code, d.Checks)
	}
}

// usable waits until the underlay's link-local address is not tentative any more.
func (h *host) usable() {
	h.seg.Helper()
	h.seg.eventually(patience, "the underlay has a usable address", func() error {
		l, err := h.Link(underlay)
		if err != nil {
			return err
		}
		addrs, err := h.Netlink().AddrList(l, netlink.FAMILY_V6)
		for _, a := range addrs {
			if a.IP.IsLinkLocalUnicast() && a.Flags&unix.IFA_F_TENTATIVE == 0 {
				return nil
			}
		}
		return fmt.Errorf("%v, %v", addrs, err)
	})
}
