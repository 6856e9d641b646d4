package netns

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

// threadsOf reads what the kernel says of every thread of a process.
func (s *segment) threadsOf(pid int) (threads []map[string]string) {
	s.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	s.must(err)
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		t := map[string]string{}
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			t[key] = strings.Join(strings.Fields(value), " ")
		}
		threads = append(threads, t)
	}
	return threads
}

// confined checks that no thread of h's agent has been left out of what status says.
func (h *host) confined(uid string) {
	s := h.seg
	s.Helper()
	threads := s.threadsOf(h.agent.PID())
	if len(threads) < 3 {
		s.Fatalf("the agent has %d threads", len(threads))
	}
	want := map[string]string{"NoNewPrivs": "1", "Seccomp": "2"}
	if uid != "0" {
		want["Uid"] = strings.Join([]string{uid, uid, uid, uid}, " ")
		want["CapPrm"], want["CapEff"], want["CapInh"], want["CapAmb"] = "0000000000001000", "0000000000001000",
			"0000000000000000", "0000000000000000"
		want["Groups"] = "65534"
	}
	for _, t := range threads {
		for key, value := range want {
			if t[key] != value {
				s.Errorf("thread %s: %s is %q, want %q", t["Pid"], key, t[key], value)
			}
		}
	}
	on := map[string]bool{}
	for _, p := range h.status().Protections {
		on[p.Name] = p.On
		s.Logf("%s: %v, %s", p.Name, p.On, p.Detail)
	}
	for _, name := range []string{"no_new_privs", "landlock", "seccomp"} {
		if !on[name] {
			s.Errorf("status says that %s is off", name)
		}
	}
	if on["user"] != (uid != "0") {
		s.Errorf("status says that user is %v, of user %s", on["user"], uid)
	}
}

// Without root, files and most system calls everything works that works with them: the
// tests of this package run so but for the user, and this one with it.
func TestUnprivilegedUser(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	s.must(os.Chown(s.dir, 65534, 65534)) // as the service manager does with its folder
	s.must(os.Chmod(s.dir, 0o755))
	a, b := s.hosts[0], s.hosts[1]
	for _, h := range s.hosts {
		h.run("--user", "65534")
	}
	b.confined("65534")
	a.connect(b, "RC")
	a.reachFull(b, maxMTU)
	a.send(b, b.v4, 4<<20)
	// What it does with the kernel by and by.
	s.must(b.AddAddr(ifName, "10.0.7.2/24"))
	s.must(b.Sysctl("net/ipv6/conf/"+ifName+"/disable_ipv6", "1"))
	s.must(b.Sysctl("net/ipv6/conf/"+ifName+"/disable_ipv6", "0"))
	s.must(b.Down(underlay))
	b.waitState("underlay down")
	s.must(b.SetMTU(underlay, 4500))
	s.must(b.Up(underlay))
	b.waitState("up")
	a.backWithin(patience, b)
	a.connect(b, "RC")
	both(b, a.reach)
	if body, err := b.agent.Stream(s.ctx, control.PathCapture); err != nil {
		t.Errorf("capture: %v", err)
	} else {
		head := make([]byte, 4)
		if _, err := body.Read(head); err != nil || binary.LittleEndian.Uint32(head) != 0x0a0d0d0a {
			t.Errorf("capture begins with %x (%v), want a pcapng block", head, err)
		}
		body.Close()
	}
	ctx, cancel := context.WithTimeout(s.ctx, 30*time.Second)
	defer cancel()
	for _, path := range []string{control.PathStatus, control.PathStats, control.PathRuntime, control.PathNeigh,
		control.PathExplain + "?ip=10.0.0.1"} {
		var v any
		if err := b.agent.Get(ctx, path, &v); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	if body, err := b.agent.Stream(ctx, control.PathMetrics); err != nil {
		t.Errorf("metrics: %v", err)
	} else {
		body.Close()
	}
	b.confined("65534") // also the threads that came since
	for _, h := range s.hosts {
		h.stop()
		if _, err := os.Stat(h.path(".sock")); err == nil {
			t.Errorf("%s: the socket is there after the end", h.Name)
		}
		if _, err := h.Link(ifName); err == nil {
			t.Errorf("%s: the interface is there after the end", h.Name)
		}
		for _, word := range []string{"permitted", "denied"} {
			if log, err := os.ReadFile(h.path(".log")); err == nil && strings.Contains(string(log), word) {
				t.Errorf("%s: the log says %q", h.Name, word)
			}
		}
	}
}

// The switches of the configuration, and what is without one.
func TestSandboxSwitches(t *testing.T) {
	parallel(t)
	_, a, b := newPair(t)
	a.run()
	a.confined("0")
	b.run(b.config("sandbox:\n  landlock: false\n  seccomp: false\n")...)
	for _, p := range b.status().Protections {
		if p.Name == "landlock" || p.Name == "seccomp" {
			expect.Equal(t, p.On, false, "%s: On", p.Name)
			expect.Equal(t, p.Detail, "switched off", "%s: Detail", p.Name)
		}
	}
	out, code := b.command(append([]string{"run"}, b.args("--user", "no-such-user", "--control", b.path("2.sock"))...)...)
	if code != 2 || !strings.Contains(out, "there is no such user") {
		t.Errorf("a user that does not exist: exit status %d\n%s", code, out)
	}
}

// With a namespace for the interface the user keeps CAP_SYS_ADMIN, which entering it
// takes. Without, an interface that is moved away is not followed, and the log says so.
func TestUserAndNamespaces(t *testing.T) {
	parallel(t)
	t.Run("netns", func(t *testing.T) {
		parallel(t)
		needIP(t)
		_, a, b := newPair(t)
		in := a.container()
		a.run("--user", "65534", "--netns", in.Name)
		b.run()
		in.agent = a.agent
		in.sits(in.Name, ifName)
		in.talk(b, ifName)
		for _, p := range a.status().Protections {
			if p.Name == "capabilities" && p.Detail != "CAP_NET_ADMIN, CAP_SYS_ADMIN" {
				t.Errorf("capabilities %s, want CAP_NET_ADMIN and CAP_SYS_ADMIN", p.Detail)
			}
		}
	})
	t.Run("moved", func(t *testing.T) {
		parallel(t)
		needIP(t)
		s := newSegment(t, topology{})
		a := s.hosts[0]
		in := a.container()
		a.run("--user", "65534")
		a.ip("link set " + ifName + " netns " + in.Name)
		s.eventually(patience, "the log says that it cannot be followed", func() error {
			return containsAll(a.agent.LogTail(20), "cannot be followed", "operation not permitted")
		})
	})
}
