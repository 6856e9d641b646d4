package netns

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

func contextOf(s *segment) (context.Context, context.CancelFunc) { return context.WithCancel(s.ctx) }

// A daemon that was killed, or stopped, and started again is found again; both
// ends have one connection.
func TestDaemonRestart(t *testing.T) {
	parallel(t)
	connectedModes(t, func(t *testing.T, mode string) {
		policy := []string{"--mode", strings.ToLower(mode)}
		_, a, b := startedPair(t, policy...)
		first, _ := a.connect(b, mode)
		for _, tt := range []struct {
			how string
			end func()
		}{{"SIGKILL", b.kill}, {"SIGTERM", b.stop}} {
			tt.end()
			if tt.how == "SIGTERM" {
				a.noConns() // 4755-3.4-2 DREQ
				a.noHostRoutes()
			}
			if _, err := b.Link(ifName); err == nil {
				t.Errorf("%s: the interface outlived its agent", tt.how)
			}
			b.run(policy...)
			start := time.Now()
			a.reach(b.v4)
			t.Logf("%s: traffic back after %v", tt.how, time.Since(start).Round(time.Millisecond))
			again, _ := a.paired(b, mode)
			if again.RemoteQPN == first.RemoteQPN {
				t.Errorf("%s: the connection has the old remote QPN %s", tt.how, first.RemoteQPN)
			}
			a.reachFull(b, maxMTU)
			b.send(a, a.v6, 4<<20)
			first = again
		}
	})
}

// Taking the interface down ends its connections at both ends; taking it up
// brings everything back, routes included.
func TestInterfaceDownAndUp(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	s.must(a.Sysctl("net/ipv6/conf/default/keep_addr_on_down", "1"))
	s.start()
	a.connect(b, "RC")
	both(b, a.reach)
	for range 3 {
		s.must(a.Down(ifName))
		a.noConns() // 4755-3.4-1 4755-3.4-2
		b.noConns()
		if st := a.status().Interface.State; st != "down" {
			t.Errorf("the interface is %q", st)
		}
		b.noHostRoutes()
		s.must(a.Up(ifName))
		a.connect(b, "RC")
		a.reachFull(b, maxMTU)
		both(b, func(dst netip.Addr) { a.waitRoute(patience, neighbour(dst), udMTU) })
		b.reachRouted(a, maxMTU)
	}
	s.eventually(patience, "a has its link-local address again", func() error {
		_, err := a.LinkLocal(ifName)
		return err
	})
}

// Both ends dial at the same instant, until REQs have crossed: each time one
// connection is left.
func TestBothDialAtOnce(t *testing.T) {
	parallel(t)
	const tries = 50
	connectedModes(t, func(t *testing.T, mode string) {
		s := newSegment(t, topology{})
		for _, h := range s.hosts {
			s.must(h.Sysctl("net/ipv6/conf/default/keep_addr_on_down", "1"))
		}
		s.start("--mode", strings.ToLower(mode))
		a, b := s.hosts[0], s.hosts[1]
		a.connect(b, mode)
		crossed := func() uint64 {
			return a.counter("ipoib", "crossings_seen") + b.counter("ipoib", "crossings_seen")
		}
		for try := 1; try <= tries; try++ {
			before := crossed() // the first connection may have been a crossing too
			for _, h := range s.hosts {
				s.must(h.Down(ifName))
			}
			for _, h := range s.hosts {
				h.waitState("down") // else "up" below could be what was
				h.noConns()
			}
			for _, h := range s.hosts {
				s.must(h.Up(ifName))
			}
			for _, h := range s.hosts {
				h.waitState("up")
			}
			var wg sync.WaitGroup
			for i, h := range s.hosts {
				wg.Go(func() { h.Ping(lab.Ping{Dst: s.hosts[1-i].v4}) })
			}
			wg.Wait()
			mine, theirs := a.paired(b, mode) // 4755-3.3-1
			if mine.Role == theirs.Role {
				t.Errorf("both ends are %s", mine.Role)
			}
			if crossed() == before {
				continue
			}
			// 4755-3.3-5 4755-3.3-8 the REQ of the larger address has won
			if larger := a.link() > b.link(); larger != (mine.Role == "active") {
				t.Errorf("a is %s with address %s against %s", mine.Role, a.link(), b.link())
			}
			a.reachFull(b, maxMTU) // the kernel's routes follow the connection
			t.Logf("REQs crossed at try %d", try)
			return
		}
		t.Errorf("no REQs crossed in %d tries", tries)
	})
}

func (h *host) waitState(want string) {
	h.seg.Helper()
	h.seg.eventually(patience, h.Name+" is "+want, func() error {
		if got := h.status().Interface.State; got != want {
			return fmt.Errorf("it is %s", got)
		}
		return nil
	})
}

// A second daemon of the same name or control path is refused in words, and the
// first goes on.
func TestSecondDaemon(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	s.must(lab.Connect(a.Host, "eth1", b.Host, "eth1", 9000))
	for _, tt := range []struct {
		name string
		args []string
		want []string
	}{
		{"same control path", []string{"--underlay", "eth1", "--name", "other0", "--control", a.path(".sock")},
			[]string{a.path(".sock"), "an agent answers there already", "--control"}},
		{"same name", []string{"--underlay", "eth1", "--control", a.path("2.sock")}, []string{ifName, "already", "--name"}},
		{"same underlay", []string{"--name", "other0", "--control", a.path("2.sock")},
			[]string{underlay, "taken", "another agent"}},
	} {
		out, code := a.command(append([]string{"run"}, a.args(tt.args...)...)...)
		if code != 1 {
			t.Errorf("%s: exit status %d\n%s", tt.name, code, out)
		}
		if err := containsAll(out, tt.want...); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	a.ping(b.v4, maxMTU, true)
	a.paired(b, "RC")
}

// command runs ipoibcmd in the host and returns what it printed and its exit
// status, -1 if it did not end in time.
func (h *host) command(args ...string) (string, int) {
	h.seg.Helper()
	ctx, cancel := context.WithTimeout(h.seg.ctx, patience)
	defer cancel()
	c := exec.CommandContext(ctx, program, args...)
	out, _ := h.Output(c)
	if c.ProcessState == nil {
		h.seg.Fatalf("ipoibcmd %s did not start", strings.Join(args, " "))
	}
	return string(out), c.ProcessState.ExitCode()
}

// commandInto runs ipoibcmd in the host with its output going to a file, and returns
// what it said on standard error and its exit status.
func (h *host) commandInto(path string, args ...string) (string, int) {
	h.seg.Helper()
	ctx, cancel := context.WithTimeout(h.seg.ctx, patience)
	defer cancel()
	out, err := os.OpenFile(path, os.O_WRONLY, 0)
	h.seg.must(err)
	defer out.Close()
	var said bytes.Buffer
	c := exec.CommandContext(ctx, program, args...)
	c.Stdout, c.Stderr = out, &said
	h.seg.must(h.Start(c))
	_ = c.Wait()
	return said.String(), c.ProcessState.ExitCode()
}

// Ctrl-C is a clean end too, and so is the terminal's: the peer is told, the
// device and the socket go.
func TestInterrupt(t *testing.T) {
	parallel(t)
	s, a, b := startedPair(t)
	closed := uint64(0)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP} {
		if signal.Ignored(sig) {
			t.Logf("%v is ignored here, and then by agents too", sig)
			continue
		}
		a.connect(b, "RC")
		s.must(syscall.Kill(b.agent.PID(), sig))
		a.noConns() // 4755-3.4-2
		s.eventually(patience, "b's interface goes", func() error {
			if _, err := b.Link(ifName); err == nil {
				return fmt.Errorf("%s is there", ifName)
			}
			return nil
		})
		closed++
		if got := a.counter("ipoib", "closed_by_peer"); got != closed {
			t.Errorf("a counted %d connections closed by the peer, want %d", got, closed)
		}
		b.stop() // ended already, and well
		if _, err := os.Stat(b.path(".sock")); err == nil {
			t.Errorf("after %v the socket is there", sig)
		}
		b.run()
	}
}

// An interface that is taken away ends its agent, with a word.
func TestInterfaceTakenAway(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	l, err := b.Link(ifName)
	s.must(err)
	s.must(b.Netlink().LinkDel(l))
	a.noConns() // the peer is told all the same
	err = b.agent.Wait(patience)
	if err == nil || !strings.Contains(b.agent.LogTail(3), "interface "+ifName+" was removed, and not by us") {
		t.Errorf("the agent ended with %v:\n%s", err, b.agent.LogTail(3))
	}
	b.agent = nil
	b.run()
	a.connect(b, "RC")
	out, code := b.command("run", "--underlay", underlay, "--gid", b.status().Interface.GID, "--name", underlay,
		"--control", b.path("2.sock"))
	if code != 1 {
		t.Errorf("an interface of the underlay's name: exit status %d\n%s", code, out)
	}
}
