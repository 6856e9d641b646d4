package netns

import (
	"bytes"
	"context"
	"encoding/json"
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

	"golang.org/x/sys/unix"

	"ipoibcm/internal/long"
)

const (
	unitFolder   = "../../packaging"
	unit         = "ipoibcm@ibcm0"
	debianSuite  = "bookworm"
	makeRootTime = 10 * time.Minute // mmdebstrap: a minute where nothing else runs
)

// A container is systemd as PID 1 in the network namespace of a host.
type container struct {
	h      *host
	root   string
	cmd    *exec.Cmd
	leader string // PID of its PID 1
}

// systemdRoot returns a Debian with systemd, made once and kept in the user's cache.
func systemdRoot(s *segment) string {
	s.Helper()
	cache, err := os.UserCacheDir()
	s.must(err)
	root := filepath.Join(cache, "ipoibcm", "systemd-"+debianSuite)
	if _, err := os.Stat(root); err == nil {
		return root
	}
	if !long.Form() {
		s.Skip(long.Reason) // it takes minutes to make; later runs of either form find it
	}
	tool, err := exec.LookPath("mmdebstrap")
	if err != nil {
		s.Skip("mmdebstrap is not installed: no systemd to test with")
	}
	ctx, cancel := context.WithTimeout(context.Background(), makeRootTime)
	defer cancel()
	s.must(os.MkdirAll(filepath.Dir(root), 0o755))
	tmp, err := os.MkdirTemp(filepath.Dir(root), "tmp-systemd-")
	s.must(err)
	defer os.RemoveAll(tmp)
	s.must(os.Mkdir(tmp+"/root", 0o755))
	for _, c := range []*exec.Cmd{
		exec.CommandContext(ctx, tool, "--variant=minbase", "--include=systemd,dbus,iproute2", debianSuite, tmp+"/root.tar"),
		// GNU tar 1.34 cannot make hard links with --one-top-level.
		exec.CommandContext(ctx, "tar", "-C", tmp+"/root", "-xf", tmp+"/root.tar"),
	} {
		if out, err := c.CombinedOutput(); err != nil {
			s.Fatalf("%v: %v\n%s", c.Args, err, out)
		}
	}
	s.must(os.Chmod(tmp+"/root", 0o755))
	if err := os.Rename(tmp+"/root", root); err != nil && !errors.Is(err, os.ErrExist) {
		s.Fatal(err)
	}
	return root
}

// boot starts systemd with our unit installed as docs/service.md says, and the host's
// settings, on control groups of that version.
func boot(h *host, yaml string, cgroup int) *container {
	s := h.seg
	s.Helper()
	nspawn, err := exec.LookPath("systemd-nspawn")
	if err != nil {
		s.Skip("systemd-nspawn is not installed (package systemd-container)")
	}
	lower := systemdRoot(s)
	c := &container{h: h, root: filepath.Join(s.dir, "root")}
	c.mountRoot(lower)
	c.install(program, "/usr/bin/ipoibcmd", 0o755)
	c.install(unitFolder+"/systemd/ipoibcm@.service", "/etc/systemd/system/ipoibcm@.service", 0o644)
	c.install(unitFolder+"/sysusers.d/ipoibcm.conf", "/usr/lib/sysusers.d/ipoibcm.conf", 0o644)
	c.install(unitFolder+"/tmpfiles.d/ipoibcm.conf", "/usr/lib/tmpfiles.d/ipoibcm.conf", 0o644)
	c.write("/etc/ipoibcm/ibcm0.yaml", yaml)
	c.write("/etc/systemd/system/ipoibcm@.service.d/test.conf", "[Service]\nWatchdogSec=3\nStandardOutput=journal\n")
	console, err := os.Create(filepath.Join(s.dir, "console"))
	s.must(err)
	c.cmd = exec.Command(nspawn, "--register=no", "--keep-unit", "-D", c.root, "-b", "--console=pipe",
		"--network-namespace-path=/run/netns/"+h.Name, "--machine="+h.Name, "--bind=/dev/net/tun",
		"--capability=CAP_NET_ADMIN")
	c.cmd.Env = append(os.Environ(), fmt.Sprintf("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=%d", cgroup-1))
	c.cmd.Stdout, c.cmd.Stderr = console, console
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	s.must(c.cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = c.cmd.Wait()
		close(ended)
		console.Close()
	}()
	s.Cleanup(func() {
		if s.Failed() && c.leader != "" {
			text, err := c.try("journalctl", "--no-pager", "--lines=100", "--unit="+unit)
			s.Logf("journal of %s: %v\n%s", unit, err, text)
		}
		c.end(ended)
		if s.Failed() {
			text, _ := os.ReadFile(console.Name())
			s.Logf("console:\n%s", text[max(0, len(text)-4000):])
		}
	})
	s.eventually(patience, "systemd is up", func() error {
		select {
		case <-ended:
			text, _ := os.ReadFile(console.Name())
			s.Fatalf("systemd-nspawn ended:\n%s", text)
		default:
		}
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", c.cmd.Process.Pid, c.cmd.Process.Pid))
		f := strings.Fields(string(children)) // the first makes PID 1, and goes
		if len(f) == 0 {
			return errors.New("no PID 1 yet")
		}
		c.leader = f[0]
		if out, _ := c.try("systemctl", "is-system-running"); out != "running" && out != "degraded" {
			return fmt.Errorf("it is %q", out)
		}
		return nil
	})
	return c
}

// mountRoot makes c.root a writable view of lower. Without overlays the test is skipped.
func (c *container) mountRoot(lower string) {
	s := c.h.seg
	s.Helper()
	upper, work := filepath.Join(s.dir, "up"), filepath.Join(s.dir, "work")
	for _, d := range []string{c.root, upper, work} {
		s.must(os.Mkdir(d, 0o755))
	}
	s.must(unix.Mount("tmpfs", upper, "tmpfs", 0, "")) // overlay needs one file system for both, and not an overlay
	s.must(os.Mkdir(upper+"/up", 0o755))
	s.must(os.Mkdir(upper+"/work", 0o755))
	if err := unix.Mount("overlay", c.root, "overlay", 0,
		fmt.Sprintf("lowerdir=%s,upperdir=%s/up,workdir=%s/work", lower, upper, upper)); err != nil {
		unix.Unmount(upper, 0)
		s.Skipf("no overlay file system here: %v", err)
	}
	s.Cleanup(func() {
		unix.Unmount(c.root, unix.MNT_DETACH)
		unix.Unmount(upper, unix.MNT_DETACH)
	})
}

// end halts the container.
func (c *container) end(ended <-chan struct{}) {
	if pid, err := strconv.Atoi(c.leader); err == nil {
		_ = syscall.Kill(pid, syscall.Signal(34+4)) // SIGRTMIN+4: power off
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		_ = c.cmd.Process.Kill()
		<-ended
	}
}

func (c *container) install(from, to string, mode os.FileMode) {
	c.h.seg.Helper()
	b, err := os.ReadFile(from)
	c.h.seg.must(err)
	c.h.seg.must(os.MkdirAll(filepath.Dir(c.root+to), 0o755))
	c.h.seg.must(os.WriteFile(c.root+to, b, mode))
	c.h.seg.must(os.Chmod(c.root+to, mode))
}

func (c *container) write(to, text string) {
	c.h.seg.Helper()
	c.h.seg.must(os.MkdirAll(filepath.Dir(c.root+to), 0o755))
	c.h.seg.must(os.WriteFile(c.root+to, []byte(text), 0o644))
}

// try runs a command in the container and returns what it said.
func (c *container) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(c.h.seg.ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter",
		append([]string{"-t", c.leader, "-m", "-u", "-i", "-n", "-p", "--"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return strings.TrimSpace(out.String()), fmt.Errorf("%q: %w\n%s%s", args, err, out.String(), errs.String())
	}
	return strings.TrimSpace(out.String()), nil
}

func (c *container) run(args ...string) string {
	c.h.seg.Helper()
	out, err := c.try(args...)
	c.h.seg.must(err)
	return out
}

// property returns one of the unit.
func (c *container) property(name string) string {
	c.h.seg.Helper()
	return c.run("systemctl", "show", "--value", "-p", name, unit)
}

// is waits until a property has a value.
func (c *container) is(name, want string) {
	c.h.seg.Helper()
	c.h.seg.eventually(patience, name+" is "+want, func() error {
		if got := c.property(name); got != want {
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
}

// journal returns the unit's entries whose message contains text.
func (c *container) journal(text string) (found []map[string]any) {
	c.h.seg.Helper()
	for line := range strings.Lines(c.run("journalctl", "--no-pager", "-o", "json", "-u", unit)) {
		var e map[string]any
		c.h.seg.must(json.Unmarshal([]byte(line), &e))
		if m, ok := e["MESSAGE"].(string); ok && strings.Contains(m, text) {
			found = append(found, e)
		}
	}
	return found
}

// A real systemd starts the unit as it is shipped, reloads it, hands it over in a restart,
// starts it again after a crash and when the watchdog starves, and stops it.
func TestSystemd(t *testing.T) {
	for version, kind := range map[int]string{1: "tmpfs", 2: "cgroup2fs"} {
		t.Run(fmt.Sprintf("cgroup v%d", version), func(t *testing.T) {
			if version == 1 {
				long.Only(t)
			}
			underSystemd(t, version, kind)
		})
	}
}

// underSystemd does it on control groups of a version, whose root is a file system of a kind.
func underSystemd(t *testing.T, cgroup int, kind string) {
	s, a, b := newPair(t)
	b.run()
	yaml := fmt.Sprintf("underlay: %s\nname: %s\naddresses: [%s/24, %s/64]\n", underlay, ifName, a.v4, a.v6)
	c := boot(a, yaml, cgroup)
	t.Log(strings.SplitN(c.run("systemctl", "--version"), "\n", 2)[0])
	if got := c.run("stat", "-fc", "%T", "/sys/fs/cgroup"); got != kind {
		t.Skipf("control groups are %s here, want %s", got, kind)
	}

	c.run("systemctl", "start", unit)
	if got := c.property("ActiveState"); got != "active" {
		t.Fatalf("started: %s", got)
	}
	b.reach(a.v4) // READY=1 came when packets can pass
	if got := c.property("StatusText"); !strings.Contains(got, ifName+": up, mode rc") {
		t.Errorf("status text %q", got)
	}
	pid := c.property("MainPID")
	if got := c.run("stat", "-c", "%U", "/proc/"+pid); got != "ipoibcm" {
		t.Errorf("it runs as %q, want ipoibcm", got)
	}
	c.hasFields("interface up", map[string]string{"PRIORITY": "6", "SYSLOG_IDENTIFIER": "ipoibcmd",
		"_SYSTEMD_UNIT": unit + ".service", "_COMM": "ipoibcmd"})

	c.write("/etc/ipoibcm/ibcm0.yaml", yaml+"mode: auto\n")
	c.run("systemctl", "reload", unit)
	c.is("StatusText", ifName+": up, mode auto, 1 connections, 1 neighbours")
	if got := c.property("MainPID"); got != pid {
		t.Errorf("process %s after a reload, want %s", got, pid)
	}
	c.write("/etc/ipoibcm/ibcm0.yaml", yaml+"mood: bad\n")
	if _, err := c.try("systemctl", "reload", unit); err == nil {
		t.Error("a bad file is reloaded without an error")
	}
	c.write("/etc/ipoibcm/ibcm0.yaml", yaml)

	s.must(a.AddRoute(ifName, "10.77.0.0/16", b.v4.String()))
	index := a.index(ifName)
	before := c.linkAddr()
	ping, w := b.measureGap(a.v4), s.stopwatch()
	time.Sleep(300 * time.Millisecond)
	c.run("systemctl", "restart", unit)
	time.Sleep(500 * time.Millisecond)
	gap, lost := ping.end()
	t.Logf("systemctl restart: gap %v, %d lost", gap.Round(time.Millisecond), lost)
	if _, waited := w.read(); gap-waited > 3*time.Second {
		t.Errorf("a gap of %v, of which %v were waiting for a processor; want 3s at most", gap, waited)
	}
	if got := c.linkAddr(); got != before {
		t.Errorf("link-layer address %s after a restart, want %s", got, before)
	}
	pid = c.restarted(pid)

	c.dies(b, pid, index)

	c.run("systemctl", "stop", unit)
	if got := c.property("Result"); got != "success" {
		t.Errorf("stopped: %s", got)
	}
	s.eventually(patience, "the interface goes", func() error {
		if _, err := a.Link(ifName); err == nil {
			return fmt.Errorf("%s is there, %s descriptors kept", ifName, c.property("NFileDescriptorStore"))
		}
		return nil
	})
	c.startsAgain(yaml)
	c.goesFirst(yaml)
}

// goesFirst starts the unit with real-time priority, as docs/service.md says, where the kernel has that for a unit.
func (c *container) goesFirst(yaml string) {
	s := c.h.seg
	s.Helper()
	c.write("/etc/ipoibcm/ibcm0.yaml", yaml)
	c.write("/etc/systemd/system/ipoibcm@.service.d/first.conf", "[Service]\nCPUSchedulingPolicy=rr\n")
	c.run("systemctl", "daemon-reload")
	if _, err := c.try("systemctl", "start", unit); err != nil {
		if got := c.property("ExecMainStatus"); got != "214" { // EXIT_SETSCHEDULER
			s.Errorf("with real-time priority it ended with %s: %v", got, err)
		}
		s.Log("the kernel gives this unit no real-time priority")
		return
	}
	pid := c.property("MainPID")
	tasks := strings.Fields(c.run("ls", "/proc/"+pid+"/task"))
	for _, task := range tasks {
		stat, err := c.try("cat", "/proc/"+pid+"/task/"+task+"/stat")
		if err != nil {
			continue // the thread has ended
		}
		const policy = 41 - 3 // of the fields behind the name
		if got := strings.Fields(stat[strings.LastIndex(stat, ")")+1:])[policy]; got != "2" {
			s.Errorf("thread %s has scheduling policy %s, want 2 (SCHED_RR)", task, got)
		}
	}
	s.Logf("%d threads with real-time priority", len(tasks))
	c.run("systemctl", "stop", unit)
}

// startsAgain looks which failures of a start the manager tries again: an underlay that is not there, but no
// file that is wrong. It leaves the unit stopped.
func (c *container) startsAgain(yaml string) {
	c.h.seg.Helper()
	c.write("/etc/ipoibcm/ibcm0.yaml", strings.Replace(yaml, "underlay: ", "underlay: no-", 1))
	c.run("systemctl", "start", "--no-block", unit)
	c.h.seg.eventually(patience, "two more starts", func() error {
		if got := c.property("NRestarts"); got < "2" {
			return fmt.Errorf("%s so far", got)
		}
		return nil
	})
	if got := c.property("StartLimitIntervalUSec"); got != "0" {
		c.h.seg.Errorf("starts are counted for %s, want 0: no underlay is too late", got)
	}
	c.run("systemctl", "stop", unit)
	c.write("/etc/ipoibcm/ibcm0.yaml", yaml+"mood: bad\n")
	if _, err := c.try("systemctl", "start", unit); err == nil {
		c.h.seg.Error("it starts with a bad file")
	}
	c.is("ActiveState", "failed")
	if got := c.property("ExecMainStatus"); got != "78" {
		c.h.seg.Errorf("with a bad file it ended with %s, want 78", got)
	}
}

// dies has the process killed, and stand still, and looks whether all is there again.
func (c *container) dies(b *host, pid string, index int) {
	s, a := c.h.seg, c.h
	s.Helper()
	c.run("systemctl", "kill", "--kill-whom=main", "-s", "KILL", unit)
	c.is("NRestarts", "1")
	c.is("ActiveState", "active")
	pid = c.restarted(pid)
	b.reach(a.v4)

	c.run("systemctl", "kill", "--kill-whom=main", "-s", "STOP", unit) // no sign of life
	c.is("NRestarts", "2")
	c.is("ActiveState", "active")
	if len(c.journal("Watchdog timeout")) == 0 {
		s.Error("no word of the watchdog in the journal")
	}
	c.restarted(pid)
	b.reach(a.v4)
	if got := a.index(ifName); got != index {
		s.Errorf("interface %d, want %d: it was made anew", got, index)
	}
	if out := c.run("ip", "route", "show", "10.77.0.0/16"); !strings.Contains(out, ifName) {
		s.Errorf("the user's route: %q", out)
	}
}

// hasFields looks for fields of the journal's first entry with a text.
func (c *container) hasFields(text string, fields map[string]string) {
	c.h.seg.Helper()
	found := c.journal(text)
	if len(found) == 0 {
		c.h.seg.Errorf("no %q in the journal", text)
		return
	}
	for field, want := range fields {
		if got := found[0][field]; got != want {
			c.h.seg.Errorf("%s of %q is %v, want %s", field, text, got, want)
		}
	}
}

// linkAddr returns the link-layer address that status names, without flags.
func (c *container) linkAddr() string {
	c.h.seg.Helper()
	var st struct {
		Interface struct {
			LinkAddr string `json:"link_addr"`
		} `json:"interface"`
	}
	c.h.seg.must(json.Unmarshal([]byte(c.run("ipoibcmd", "status", "--json")), &st))
	return st.Interface.LinkAddr[2:]
}

// restarted returns the process of the unit, which must not be old.
func (c *container) restarted(old string) string {
	c.h.seg.Helper()
	pid := c.property("MainPID")
	if pid == old {
		c.h.seg.Errorf("process %s is the old one", pid)
	}
	return pid
}
