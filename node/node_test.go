package node

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A record is what was saved, and what else is in the directory is said, not guessed at.
func TestRecords(t *testing.T) {
	s := &Service{opt: Options{Dir: t.TempDir()}}
	p := &pod{record: record{Attachment: Attachment{Key: Key{"container", "net1"}, Netns: "/proc/self/ns/net",
		Master: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix(
			"10.0.0.1/24")}}, Ready: true, Agent: process{7, "8"}}}
	if err := p.identify(); err != nil {
		t.Fatal(err)
	}
	if err := s.save(p); err != nil {
		t.Fatal(err)
	}
	pods, err := s.load()
	if err != nil {
		t.Fatal(err)
	}
	if len(pods) != 1 {
		t.Fatalf("%d pods are loaded, want 1", len(pods))
	}
	got := pods[0]
	if got.Key != p.Key {
		t.Errorf("key is %v, want %v", got.Key, p.Key)
	}
	if got.proc != p.Agent {
		t.Errorf("agent is %v, want %v", got.proc, p.Agent)
	}
	if got.vanished() {
		t.Error("our own network namespace is taken for vanished")
	}
	got.Inode++
	if !got.vanished() {
		t.Error("another namespace at the same path is taken for the pod's")
	}
	if err := os.WriteFile(filepath.Join(s.opt.Dir, "other.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.load(); err == nil || !strings.Contains(err.Error(), "other.json") {
		t.Errorf("a file that is no record: got %v, want an error that names it", err)
	}
}

// Names of devices fit, and differ where container or interface do.
func TestUnderlayNames(t *testing.T) {
	seen := map[string]Key{}
	for _, k := range []Key{{"a", "net1"}, {"a", "net2"}, {"b", "net1"}, {"anet1", ""},
		{strings.Repeat("c", 64), "net1"}} {
		name := k.underlay()
		if len(name) > 15 {
			t.Errorf("%v: %s has %d octets, want 15 at most", k, name, len(name))
		}
		if other, ok := seen[name]; ok {
			t.Errorf("%v and %v are both %s", k, other, name)
		}
		seen[name] = k
	}
}

// A process is known by its number and its time; one that does not listen is killed.
func TestProcess(t *testing.T) {
	c := exec.Command("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	p := process{c.Process.Pid, beganAt(c.Process.Pid)}
	if !p.alive() {
		t.Error("a process that runs is not alive")
	}
	other := process{p.PID, p.Began + "0"}
	if other.alive() {
		t.Error("a process of another time is taken for it")
	}
	if err := other.end(time.Millisecond); err != nil || !p.alive() {
		t.Errorf("ending another process: %v, and this one is alive: %v", err, p.alive())
	}
	if err := p.end(200 * time.Millisecond); err != nil {
		t.Error(err)
	}
	if p.alive() {
		t.Error("it is alive after its end")
	}
	if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("it ended with %v, want killed", err)
	}
	if err := p.end(time.Second); err != nil {
		t.Errorf("ending it again: %v", err)
	}
}

// The service manager of the service is not the agents': each would tell it READY and STOPPING.
func TestAgentEnvironment(t *testing.T) {
	dir := t.TempDir()
	program, out := filepath.Join(dir, "program"), filepath.Join(dir, "out")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nenv > "+out+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "FDSTORE", "LISTEN_PID", "LISTEN_FDS",
		"LISTEN_FDNAMES", "SOMETHING_ELSE"} {
		t.Setenv(name, "1")
	}
	s := &Service{opt: Options{Dir: dir, Program: program}}
	_, ended, err := s.spawn(&pod{})
	if err != nil {
		t.Fatal(err)
	}
	<-ended
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, "=")
		if name == "NOTIFY_SOCKET" || name == "FDSTORE" || strings.HasPrefix(name, "WATCHDOG_") || strings.HasPrefix(name, "LISTEN_") {
			t.Errorf("an agent has %s", name)
		}
	}
	if !strings.Contains(string(text), "SOMETHING_ELSE=1\n") {
		t.Errorf("an agent lacks other variables of ours: %s", text)
	}
}

// Agents are found by their configuration files, for a service that does not know them.
func TestAgentsOf(t *testing.T) {
	dir := t.TempDir()
	c := exec.Command("sh", "-c", "read x", "run", "--config", filepath.Join(dir, "a.yaml"))
	in, err := c.StdinPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Wait()
	defer in.Close()
	want := process{c.Process.Pid, beganAt(c.Process.Pid)}
	if got := agentsOf(dir)[filepath.Join(dir, "a.yaml")]; got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := agentsOf(t.TempDir()); len(got) != 0 {
		t.Errorf("of another directory: got %v, want none", got)
	}
}

// The service says what it lacks, and a client which service it lacks.
func TestClient(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	c := NewClient(socket)
	if _, err := c.Status(t.Context(), ""); !errors.Is(err, ErrUnavailable) {
		t.Errorf("without a service: got %v, want %v", err, ErrUnavailable)
	}
	l, err := listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the socket is %v (%v), want 0600", st.Mode(), err)
	}
	if _, err := listen(socket); err == nil {
		t.Error("a second service takes the socket of the first")
	}
	s := &Service{opt: Options{Dir: t.TempDir()}, pods: map[Key]*pod{}, starting: make(chan struct{}, 1)}
	done := make(chan error)
	go func() { done <- s.serve(t.Context(), l) }()
	t.Cleanup(func() { <-done })
	if err := c.Check(t.Context(), Key{"x", "net1"}); err == nil || !strings.Contains(err.Error(), "no interface net1") {
		t.Errorf("CHECK of what is not attached: %v", err)
	}
	if err := c.Delete(t.Context(), Key{"x", "net1"}); err != nil {
		t.Errorf("DEL of what is not attached: %v", err)
	}
	if err := c.Add(t.Context(), Attachment{Key: Key{"x", "net1"}, Netns: "/nowhere", Master: "eth0"}); err == nil {
		t.Error("a namespace that is not there is attached")
	}
	if err := c.Add(t.Context(), Attachment{}); err == nil || !strings.Contains(err.Error(), "lacks") {
		t.Errorf("an empty request: %v", err)
	}
	if _, err := c.Status(t.Context(), "no-such-device"); err == nil {
		t.Error("a master that is not there is good")
	}
}

// Settings of IPv6 are made, and where there are none nothing fails.
func TestQuieten(t *testing.T) {
	dir := t.TempDir()
	for _, key := range []string{"accept_ra", "accept_dad"} {
		if err := os.WriteFile(filepath.Join(dir, key), []byte("1"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{dir, filepath.Join(dir, "none")} {
		if note, err := quieten(d); note != "" || err != nil {
			t.Errorf("%s: got %q, %v", d, note, err)
		}
	}
	for _, key := range []string{"accept_ra", "accept_dad"} {
		if got := setting(dir, key); got != "0" {
			t.Errorf("%s is %q, want 0", key, got)
		}
	}
	for _, tt := range []struct {
		acceptRA, forwarding string
		want                 bool
	}{{"0", "0", false}, {"1", "0", true}, {"1", "1", false}, {"2", "1", true}, {"0", "1", false}, {"1", "2", false}} {
		if got := takesRoutes(tt.acceptRA, tt.forwarding); got != tt.want {
			t.Errorf("accept_ra %s, forwarding %s: got %v, want %v", tt.acceptRA, tt.forwarding, got, tt.want)
		}
	}
}

// A service goes on with what was attached, and undoes what was interrupted.
func TestAdopt(t *testing.T) {
	s := &Service{opt: Options{Dir: t.TempDir()}, log: slog.New(slog.DiscardHandler), pods: map[Key]*pod{}}
	whole, half := &pod{}, &pod{}
	whole.Key, whole.Ready, half.Key = Key{"whole", "net1"}, true, Key{"half", "net1"}
	for _, p := range []*pod{whole, half} {
		if err := s.save(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.adopt(); err != nil {
		t.Fatal(err)
	}
	if s.pods[whole.Key] == nil {
		t.Error("what was attached is forgotten")
	}
	if s.pods[half.Key] != nil {
		t.Error("what was interrupted is taken for attached")
	}
	if _, err := os.Stat(s.recordPath(half.Key)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the record of what was interrupted is left: %v", err)
	}
}

// A process that only looks like an agent by its arguments is not taken for one: any user, and
// whoever is in a container, can call itself what it likes.
func TestAgentsAreOurs(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct {
		name string
		as   *syscall.SysProcAttr
		want bool
	}{
		{"ours", &syscall.SysProcAttr{}, true},
		{"another user's", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}, false},
		{"a container's", &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}, false},
	} {
		if os.Geteuid() != 0 && !tt.want {
			continue // it cannot be made
		}
		config := filepath.Join(dir, strings.Fields(tt.name)[0]+".yaml")
		c := exec.Command("/bin/sh", "-c", "read x; :", "sh", "--config", config)
		c.SysProcAttr = tt.as
		in, err := c.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		switch p, got := agentsOf(dir)[config]; {
		case got != tt.want:
			t.Errorf("%s is taken for an agent: got is %v, want %v", tt.name, got, tt.want)
		case got && p.PID != c.Process.Pid:
			t.Errorf("%s is taken for an agent: PID is %v, want %v", tt.name, p.PID, c.Process.Pid)
		}
		in.Close()
		c.Wait()
	}
}
