package packaging

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// release is the release of Debian that machines have.
const release = "bookworm"

// inMachines are the packages of Debian that a machine has besides the smallest set.
const inMachines = "dbus,iproute2,iputils-ping,systemd,systemd-sysv,udev"

// base returns a tree of Debian, made once and kept in .cache.
func base(t *testing.T) string {
	t.Helper()
	tree, err := filepath.Abs(filepath.Join(root, ".cache", "debian-"+release))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(tree); err == nil {
		return tree
	}
	need(t, "mmdebstrap")
	part := fmt.Sprintf("%s.%d", tree, os.Getpid())
	t.Cleanup(func() { os.RemoveAll(part) })
	if err := os.MkdirAll(filepath.Dir(part), 0o755); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), "mmdebstrap", "--variant=minbase", "--include="+inMachines, release, part)
	// It mounts /proc, /sys and more below part. Of a test that is killed nothing stays mounted.
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := c.CombinedOutput()
	if err != nil {
		missing(t, "mmdebstrap could not make a system: %v\n%s", err, out)
	}
	if err := os.Rename(part, tree); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	return tree
}

// A machine is a system of its own under systemd: namespaces, and a copy of the base.
type machine struct {
	*testing.T
	name   string
	netns  string
	leader int // process ID of its init
	dir    string
}

// machines starts two systems whose eth0 are the ends of one cable.
func machines(t *testing.T) [2]*machine {
	t.Helper()
	needRoot(t, "systemd-nspawn", "nsenter", "ip")
	lower := base(t)
	var ms [2]*machine
	for i, end := range []string{"a", "b"} {
		m := &machine{T: t, name: "ippk-" + strconv.Itoa(os.Getpid()) + end, dir: t.TempDir()}
		m.netns = m.name
		ms[i] = m
		m.ip("netns", "add", m.netns)
		t.Cleanup(func() { exec.Command("ip", "netns", "delete", m.netns).Run() })
		m.mount(lower)
	}
	a, b := ms[0], ms[1]
	a.ip("link", "add", "eth0", "netns", a.netns, "type", "veth", "peer", "name", "eth0", "netns", b.netns)
	for _, m := range ms {
		m.ip("-n", m.netns, "link", "set", "lo", "up")
		m.ip("-n", m.netns, "link", "set", "eth0", "up")
		m.boot()
	}
	return ms
}

func (m *machine) ip(args ...string) {
	m.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		m.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// mount gives the machine a root of its own, over the base.
func (m *machine) mount(lower string) {
	m.Helper()
	// Of a file system of its own: that of the directory may be an overlay itself.
	if err := syscall.Mount("tmpfs", m.dir, "tmpfs", 0, "mode=755"); err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { syscall.Unmount(m.dir, syscall.MNT_DETACH) })
	for _, d := range []string{"upper", "work", "root"} {
		if err := os.Mkdir(filepath.Join(m.dir, d), 0o755); err != nil {
			m.Fatal(err)
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", lower, m.dir, m.dir)
	if err := syscall.Mount("overlay", m.root(), "overlay", 0, options); err != nil {
		m.Skipf("the kernel has no overlay file system: %v", err)
	}
	m.Cleanup(func() { syscall.Unmount(m.root(), syscall.MNT_DETACH) })
}

func (m *machine) root() string { return filepath.Join(m.dir, "root") }

// bootWithin is how long a machine has to start.
const bootWithin = 2 * time.Minute

// boot starts the machine's init, and waits until it is done.
func (m *machine) boot() {
	m.Helper()
	log, err := os.Create(filepath.Join(m.dir, "console"))
	if err != nil {
		m.Fatal(err)
	}
	c := exec.Command("systemd-nspawn", "--quiet", "--boot", "--directory="+m.root(), "--machine="+m.name,
		"--register=no", "--keep-unit",
		"--console=pipe", "--network-namespace-path=/run/netns/"+m.netns, "--bind=/dev/net/tun",
		"--capability=CAP_NET_ADMIN", "--resolv-conf=off")
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() {
		if m.leader != 0 {
			syscall.Kill(m.leader, syscall.SIGKILL) // the rest of its PID namespace goes with it
		}
		time.AfterFunc(5*time.Second, func() { c.Process.Kill() })
		c.Wait()
		log.Close()
		if m.Failed() {
			text, _ := os.ReadFile(log.Name())
			m.Logf("console of %s:\n%s", m.name, text)
		}
	})
	state := ""
	for end := time.Now().Add(bootWithin); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if m.leader == 0 {
			m.leader = initOf(c.Process.Pid)
			continue
		}
		out, _ := m.try("systemctl is-system-running")
		if state = strings.TrimSpace(out); state == "running" || state == "degraded" {
			return
		}
	}
	m.Fatalf("%s is %q after %v", m.name, state, bootWithin)
}

// initOf returns the child of systemd-nspawn that is init in a namespace of its own, or 0.
// There is another one while it starts.
func initOf(pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0
	}
	for _, c := range strings.Fields(string(text)) {
		status, _ := os.ReadFile("/proc/" + c + "/status")
		_, ids, _ := strings.Cut(string(status), "\nNSpid:")
		ids, _, _ = strings.Cut(ids, "\n")
		if f := strings.Fields(ids); len(f) > 1 && f[len(f)-1] == "1" {
			n, _ := strconv.Atoi(c)
			return n
		}
	}
	return 0
}

// try has the machine's shell run a script.
func (m *machine) try(script string) (string, error) {
	ctx, cancel := context.WithTimeout(m.Context(), 2*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "nsenter", "--target", strconv.Itoa(m.leader), "--mount", "--pid", "--net", "--uts",
		"--ipc", "--cgroup",
		"--root", "--wd", "sh", "-c", "cd /root && { "+script+"\n}")
	c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "DEBIAN_FRONTEND=noninteractive"}
	out, err := c.CombinedOutput()
	return string(out), err
}

// run is try that must do what it is asked.
func (m *machine) run(script string) string {
	m.Helper()
	out, err := m.try(script)
	if err != nil {
		m.Fatalf("%s: %s: %v\n%s", m.name, script, err, out)
	}
	return out
}

// refuses is run of what must fail.
func (m *machine) refuses(script string) {
	m.Helper()
	if out, err := m.try(script); err == nil {
		m.Errorf("%s: %s did not fail:\n%s", m.name, script, out)
	}
}

// give copies a file to the machine's /root.
func (m *machine) give(path string) {
	m.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(filepath.Join(m.root(), "root", filepath.Base(path)), text, 0o644)
	}
	if err != nil {
		m.Fatal(err)
	}
}
