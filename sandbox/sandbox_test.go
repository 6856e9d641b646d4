package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"golang.org/x/sys/unix"
)

// inChild has a process of its own enter the sandbox, as there is no way back. It is
// told by the environment what to try there.
const inChild = "SANDBOX_TEST"

// raised has it give up what is effective, and raise itself again.
const raised = "raised"

// replaced has it read a file again that is replaced meanwhile.
const replaced = "replaced"

// whoami has it say as whom it runs, by effective user ID.
const whoami = "whoami"

func TestMain(m *testing.M) {
	switch os.Getenv(inChild) {
	case "":
		os.Exit(m.Run())
	case raised:
		fmt.Print(raiseAgain())
		os.Exit(0)
	case whoami:
		fmt.Print(os.Geteuid())
		os.Exit(0)
	case replaced:
		readReplaced()
		os.Exit(0)
	}
	var o Options
	if err := json.Unmarshal([]byte(os.Getenv(inChild)), &o); err != nil {
		panic(err)
	}
	json.NewEncoder(os.Stdout).Encode(attempt(o))
	os.Exit(0)
}

// A result is what a child found.
type result struct {
	Err    string
	Setuid string // as whom a program runs that a setuid file is
	Gap    string // why another thread could not use CAP_NET_ADMIN while the sandbox was entered
	Parts  []Part
	Failed map[string]string // of what was tried, by name, each on several threads
}

// tries are what may be forbidden. None does harm where it is not.
var tries = map[string]func() error{
	"execve":          func() error { return exec.Command("/bin/true").Run() },
	"ptrace":          func() error { return syscall.PtraceAttach(1 << 22) },
	"packet socket":   func() error { return open(unix.AF_PACKET, unix.SOCK_DGRAM) },
	"UDP socket":      func() error { return open(unix.AF_INET6, unix.SOCK_DGRAM) },
	"netlink socket":  func() error { return open(unix.AF_NETLINK, unix.SOCK_RAW) },
	"read a file":     func() error { _, err := os.ReadFile("/etc/passwd"); return err },
	"write a file":    func() error { return os.WriteFile(filepath.Join(os.TempDir(), "sandbox-test"), nil, 0o600) },
	"write kernel":    func() error { _, err := os.OpenFile("/proc/sys/kernel/core_pattern", os.O_WRONLY, 0); return err },
	"read itself":     func() error { _, err := os.ReadFile("/proc/self/status"); return err },
	"write sysctl":    writeSysctl,
	"connect by TCP":  func() error { _, err := net.DialTimeout("tcp", "127.0.0.1:9", time.Second); return err },
	"mount":           func() error { return unix.Mount("none", "/nowhere", "tmpfs", 0, "") },
	"change user":     func() error { return unix.Setresuid(0, 0, 0) },
	"new namespace":   func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
	"bpf":             func() error { _, _, e := unix.Syscall(unix.SYS_BPF, ^uintptr(0), 0, 0); return errnoOr(e) },
	"another's files": func() error { _, err := os.ReadFile("/etc/shadow"); return err },
}

// writeSysctl writes what is there, as package hostnet does: with O_TRUNC.
func writeSysctl() error {
	const path = "/proc/sys/net/ipv4/ip_forward"
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0)
}

func errnoOr(e syscall.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

func open(family, kind int) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// threadCount is how many threads there are before and after the sandbox is entered.
const threadCount = 4

// attempt enters the sandbox while other threads wait, and tries everything on each.
func attempt(o Options) (r result) {
	r.Failed = map[string]string{}
	var mu sync.Mutex
	var before, after sync.WaitGroup
	entered := make(chan struct{})
	ready := make(chan struct{}, threadCount)
	try := func() {
		runtime.LockOSThread()
		for name, f := range tries {
			if err := f(); err != nil {
				mu.Lock()
				if r.Failed[name] == "" {
					r.Failed[name] = kindOf(err)
				} else if r.Failed[name] != kindOf(err) {
					r.Failed[name] += " or " + kindOf(err)
				}
				mu.Unlock()
			}
		}
	}
	for range threadCount {
		before.Go(func() {
			runtime.LockOSThread()
			ready <- struct{}{}
			<-entered
			try()
		})
	}
	for range threadCount {
		<-ready
	}
	stop := useNetAdmin()
	parts, err := Enter(o)
	r.Gap = errorText(stop())
	if err != nil {
		r.Err = err.Error()
	}
	r.Parts = parts
	if path := os.Getenv(setuidFile); path != "" {
		c := exec.Command(path)
		c.Env = []string{inChild + "=" + whoami}
		out, err := c.Output()
		r.Setuid = strings.TrimSpace(string(out) + errorText(err))
	}
	close(entered)
	before.Wait()
	for range threadCount {
		after.Go(try)
	}
	after.Wait()
	return r
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func kindOf(err error) string {
	switch {
	case errors.Is(err, unix.EPERM):
		return "EPERM"
	case errors.Is(err, unix.EACCES):
		return "EACCES"
	}
	return err.Error()
}

func child(t *testing.T, o Options) (r result) {
	t.Helper()
	b, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), inChild+"="+string(b))
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("the child ended with %v\n%s", err, out)
	}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if r.Err != "" {
		t.Fatalf("enter: %s", r.Err)
	}
	return r
}

// raiseAgain lays all effective capabilities down on one thread, raises what may be
// raised, and returns what is effective then.
func raiseAgain() string {
	runtime.LockOSThread()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	data[0].Permitted = 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&head, &data[0]); err != nil {
		return err.Error()
	}
	if err := Raise(); err != nil {
		return err.Error()
	}
	if err := unix.Capget(&head, &data[0]); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%#x", data[0].Effective)
}

// A program that may have CAP_NET_ADMIN, and no more, makes that effective.
func TestRaise(t *testing.T) {
	needRoot(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), inChild+"="+raised)
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(out), fmt.Sprintf("%#x", 1<<unix.CAP_NET_ADMIN); got != want {
		t.Errorf("effective are %s, want %s", got, want)
	}
}

// useNetAdmin does something on a thread of its own, again and again, that needs CAP_NET_ADMIN. The
// function that it returns ends that, and returns the first error.
func useNetAdmin() (stop func() error) {
	end, done := make(chan struct{}), make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		close(begun)
		for err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<16)
			select {
			case <-end:
				done <- err
				return
			default:
			}
		}
		done <- err
	}()
	<-begun
	return func() error {
		close(end)
		return <-done
	}
}

// Routes are set while the process gives up root: CAP_NET_ADMIN is there at every moment.
func TestNetAdminWithoutGap(t *testing.T) {
	needRoot(t)
	if have, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SETPCAP, 0, 0, 0); err != nil || have == 0 {
		t.Skip("needs CAP_SETPCAP: without it there is a gap")
	}
	nobody, err := LookUp("nobody")
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		r := child(t, Options{User: nobody, NoLandlock: true, NoSeccomp: "not in this test"})
		if r.Gap != "" {
			t.Fatalf("meanwhile: %s", r.Gap)
		}
	}
}

func needRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: there are rights to lose")
	}
}

// wantFailed checks how each attempt ended. "" stands for what is allowed, or fails for
// another reason than the sandbox.
func wantFailed(t *testing.T, r result, want map[string]string) {
	t.Helper()
	for name := range tries {
		got := r.Failed[name]
		if want[name] != "" {
			if got != want[name] {
				t.Errorf("%s: got %q on some thread, want %s on all", name, got, want[name])
			}
			continue
		}
		if strings.Contains(got, "EPERM") || strings.Contains(got, "EACCES") {
			t.Errorf("%s: refused (%s), want it allowed", name, got)
		}
	}
}

func TestSeccompForbidsOnAllThreads(t *testing.T) {
	needRoot(t)
	if !seccomp.Supported() {
		t.Skip("this kernel has no seccomp filter")
	}
	r := child(t, Options{NoLandlock: true})
	want := map[string]string{"execve": "EPERM", "ptrace": "EPERM", "packet socket": "EPERM", "mount": "EPERM",
		"change user": "EPERM", "new namespace": "EPERM", "bpf": "EPERM"}
	if runtime.GOARCH == "386" {
		delete(want, "packet socket") // a call of socketcall, as any other
	}
	wantFailed(t, r, want)
}

func TestLandlockForbidsOnAllThreads(t *testing.T) {
	needRoot(t)
	r := child(t, Options{NoSeccomp: "not in this test"})
	if !on(r, "landlock") {
		t.Skip("this kernel has no Landlock")
	}
	wantFailed(t, r, map[string]string{"execve": "EACCES", "read a file": "EACCES", "write a file": "EACCES",
		"another's files": "EACCES", "connect by TCP": "EACCES"})
}

func TestUserLosesRoot(t *testing.T) {
	needRoot(t)
	nobody, err := LookUp("nobody")
	if err != nil {
		t.Skip(err)
	}
	r := child(t, Options{User: nobody, NoLandlock: true, NoSeccomp: "not in this test"})
	for name, want := range map[string]string{"another's files": "EACCES", "write kernel": "EACCES",
		"change user":   "EPERM",
		"packet socket": "EPERM"} {
		if got := r.Failed[name]; got != want {
			t.Errorf("%s: got %q, want %s on all threads", name, got, want)
		}
	}
	for _, name := range []string{"write sysctl", "netlink socket", "UDP socket", "read itself"} {
		if got := r.Failed[name]; got != "" {
			t.Errorf("%s: got %q, want it allowed with CAP_NET_ADMIN", name, got)
		}
	}
	for _, p := range r.Parts {
		if p.Name == "capabilities" && p.Detail != "CAP_NET_ADMIN" {
			t.Errorf("capabilities %s, want CAP_NET_ADMIN", p.Detail)
		}
		if p.Name == "user" && p.Detail != fmt.Sprint("user ", nobody.UID) {
			t.Errorf("it is %s, want %d", p.Detail, nobody.UID)
		}
	}
}

func on(r result, name string) bool {
	for _, p := range r.Parts {
		if p.Name == name {
			return p.On
		}
	}
	return false
}

// setuidFile is the variable that names a program of root's with the setuid bit.
const setuidFile = "SANDBOX_TEST_SETUID"

// A program that would make its caller root does not any more: no_new_privs, which
// has no switch, beside none of the others.
func TestNoNewPrivs(t *testing.T) {
	needRoot(t)
	nobody, err := LookUp("nobody")
	if err != nil {
		t.Skip(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "sandbox-test-") // of a path that nobody may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "setuid")
	for _, err := range []error{os.Chmod(dir, 0o755), os.WriteFile(path, b, 0o755), os.Chmod(path, 0o755|os.ModeSetuid)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	without := exec.Command(path)
	without.Env = []string{inChild + "=" + whoami}
	without.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(nobody.UID),
		Gid: uint32(nobody.GID)}}
	if out, err := without.Output(); err != nil || string(out) != "0" {
		t.Skipf("the setuid bit means nothing here: user %q, %v", out, err)
	}
	t.Setenv(setuidFile, path)
	r := child(t, Options{User: nobody, NoLandlock: true, NoSeccomp: "not in this test"})
	if want := fmt.Sprint(nobody.UID); r.Setuid != want {
		t.Errorf("a setuid program of root's runs as user %q, want %s", r.Setuid, want)
	}
}

// Switched off, a part forbids nothing and says that it is off.
func TestSwitches(t *testing.T) {
	needRoot(t)
	r := child(t, Options{NoLandlock: true, NoSeccomp: "switched off"})
	for _, name := range []string{"landlock", "seccomp", "user"} {
		if on(r, name) {
			t.Errorf("%s is on", name)
		}
	}
	if !on(r, "no_new_privs") {
		t.Error("no_new_privs is off")
	}
	for _, name := range []string{"execve", "packet socket", "read a file", "write a file"} {
		if got := r.Failed[name]; got != "" {
			t.Errorf("%s: got %q, want it allowed", name, got)
		}
	}
}

func TestLookUp(t *testing.T) {
	switch u, err := LookUp("65533"); {
	case err != nil:
		t.Errorf("a number without a name: err is %v, want nil", err)
	case u.UID != 65533:
		t.Errorf("a number without a name: UID is %v, want 65533", u.UID)
	case u.GID != 65533:
		t.Errorf("a number without a name: GID is %v, want 65533", u.GID)
	}
	for _, name := range []string{"root", "0", "no-such-user-here", "", "-1", "99999999999"} {
		if u, err := LookUp(name); err == nil {
			t.Errorf("user %q: got %+v, want an error", name, u)
		}
	}
}

func TestThreadsAreParsed(t *testing.T) {
	got := parseThread("7", "Name:\tx\nUid:\t1\t65534\t3\t4\nCapPrm:\t0000000000001000\nNoNewPrivs:\t1\nSeccomp:\t2\n")
	want := thread{id: "7", uid: 65534, caps: 1 << unix.CAP_NET_ADMIN, noNewPrivs: 1, seccomp: 2}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	o := Options{User: &User{UID: 65534}, became: true}
	if err := o.verify([]thread{got}, true); err != nil {
		t.Errorf("a thread with all of it: %v", err)
	}
	for name, spoil := range map[string]func(*thread){
		"user": func(t *thread) { t.uid = 0 }, "capabilities": func(t *thread) { t.caps |= 1 },
		"no_new_privs": func(t *thread) { t.noNewPrivs = 0 }, "filter": func(t *thread) { t.seccomp = 0 },
	} {
		left := got
		spoil(&left)
		if err := o.verify([]thread{got, left}, true); err == nil {
			t.Errorf("a thread whose %s was left out: no error", name)
		}
	}
}
