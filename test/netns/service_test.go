package netns

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

// A manager hears what agents tell a service manager (sd_notify(3)).
type manager struct {
	conn *net.UnixConn
	mu   sync.Mutex
	said []string
}

func newManager(s *segment, path string) *manager {
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	s.must(err)
	m := &manager{conn: conn}
	done := make(chan struct{})
	s.Cleanup(func() { conn.Close(); <-done })
	go func() {
		defer close(done)
		b := make([]byte, 4096)
		for {
			n, err := conn.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			m.mu.Lock()
			m.said = append(m.said, string(b[:n]))
			m.mu.Unlock()
		}
	}()
	return m
}

// heard returns what was said from message number from on.
func (m *manager) heard(from int) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.said[min(from, len(m.said)):])
}

// manage starts the host's agent under a manager that wants a sign of life so often.
func (h *host) manage(watchdog time.Duration, args ...string) *manager {
	h.seg.Helper()
	m := newManager(h.seg, h.path(".notify"))
	a, err := lab.StartAgent(h.seg.ctx, h.Host, lab.AgentConfig{Program: program, Control: h.path(".sock"),
		Log: h.path(".log"), Args: h.args(args...),
		Env: []string{"NOTIFY_SOCKET=" + h.path(".notify"), fmt.Sprintf("WATCHDOG_USEC=%d", watchdog.Microseconds())}})
	h.seg.must(err)
	h.agent = a
	return m
}

// The service manager is told when packets can pass, how things are, that the agent
// lives, and that it ends.
func TestNotify(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	b.run()
	m := a.manage(900 * time.Millisecond)
	expect := func(what string, ok func(said []string) bool) {
		t.Helper()
		s.eventually(patience, what, func() error {
			if said := m.heard(0); !ok(said) {
				return fmt.Errorf("it said %q", said)
			}
			return nil
		})
	}
	says := func(text string) func([]string) bool {
		return func(said []string) bool {
			return slices.ContainsFunc(said, func(m string) bool { return strings.Contains(m, text) })
		}
	}
	expect("the agent is ready", says("READY=1"))
	a.reach(b.v4) // at once, or a moment later: the peer answers when it will
	a.connect(b, "RC")
	expect("a connection in the status", says("STATUS="+ifName+": up, mode rc, 1 connections"))
	before := 0
	for _, text := range m.heard(0) {
		if text == "WATCHDOG=1" {
			before++
		}
	}
	expect("three more signs of life", func(said []string) bool {
		n := 0
		for _, text := range said {
			if text == "WATCHDOG=1" {
				n++
			}
		}
		return n >= before+3
	})
	s.must(a.Down(underlay))
	expect("the underlay's end in the status", says("STATUS="+ifName+": the underlay is down"))
	a.stop()
	expect("the end", says("STOPPING=1"))
	if n := strings.Count(strings.Join(m.heard(0), "\n"), "READY=1"); n != 1 {
		t.Errorf("READY=1 came %d times, want once", n)
	}
}

// A process that stands still gives no sign of life, so that a manager ends it.
func TestWatchdogStarves(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	a := s.hosts[0]
	m := a.manage(300 * time.Millisecond)
	s.eventually(patience, "a sign of life", func() error {
		if !slices.Contains(m.heard(0), "WATCHDOG=1") {
			return errors.New("none yet")
		}
		return nil
	})
	p, err := os.FindProcess(a.agent.PID())
	s.must(err)
	s.must(p.Signal(syscall.SIGSTOP))
	time.Sleep(200 * time.Millisecond) // what was under way has come
	n := len(m.heard(0))
	time.Sleep(600 * time.Millisecond)
	if more := m.heard(n); len(more) != 0 {
		t.Errorf("a stopped process said %q", more)
	}
	s.must(p.Signal(syscall.SIGCONT))
	s.eventually(patience, "a sign of life again", func() error {
		if !slices.Contains(m.heard(n), "WATCHDOG=1") {
			return errors.New("none yet")
		}
		return nil
	})
}
