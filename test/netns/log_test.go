package netns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
)

// runLoggingTo starts the host's agent with its log going to f.
func (h *host) runLoggingTo(f *os.File, args ...string) {
	h.seg.Helper()
	a, err := lab.StartAgent(h.seg.ctx, h.Host, lab.AgentConfig{Program: program, Control: h.path(".sock"),
		Log:    h.path(".log"),
		Stderr: f, Args: h.args(args...)})
	h.seg.must(err)
	h.agent = a
}

// chatter makes the agent of b log something, by traffic that it has to deal with.
func (s *segment) chatter(b *host) {
	s.Helper()
	for n := range 40 {
		prefix := fmt.Sprintf("10.0.9.%d/32", n+1)
		s.must(b.AddAddr(ifName, prefix))
		s.must(b.DelAddr(ifName, prefix))
	}
}

// An agent whose log nobody reads any more goes on, counts what it could not write,
// and ends as it is told to.
func TestLogReaderLeaves(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	r, w, err := os.Pipe()
	s.must(err)
	a.run()
	b.runLoggingTo(w)
	w.Close()
	r.Close()
	s.chatter(b)
	a.connect(b, "RC")
	select {
	case <-b.agent.Done():
		t.Fatalf("the agent has ended")
	default:
	}
	s.eventually(patience, "b counts what it could not write", func() error {
		if n := b.counter("log", "lines_lost"); n == 0 {
			return fmt.Errorf("lines_lost is %d", n)
		}
		return nil
	})
	if err := containsAll(strings.Join(b.status().Warnings, "\n"), "lines of the log were lost"); err != nil {
		t.Error(err)
	}
	b.stop()
	if _, err := os.Stat(b.path(".sock")); err == nil {
		t.Errorf("the socket is there after the end")
	}
	a.noConns()
}

// An agent whose log is not read, though somebody holds it open, goes on: addresses
// are answered for, connections made, clients answered, and SIGTERM ends it.
func TestLogReaderStalls(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	r, w, err := os.Pipe()
	s.must(err)
	defer r.Close()
	_, err = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 4096)
	s.must(err)
	a.run()
	b.runLoggingTo(w)
	w.Close()
	s.chatter(b)
	a.connect(b, "RC")
	a.send(b, b.v4, 1<<20)
	sw := s.stopwatch()
	b.stop()
	if err := sw.over(10 * time.Second); err != nil {
		t.Errorf("its end after SIGTERM: %v", err)
	}
	if _, err := os.Stat(b.path(".sock")); err == nil {
		t.Errorf("the socket is there after the end")
	}
	a.noConns()
}

// TestFloodedLog sends forged ARP at a rate that no administrator would notice. The
// log grows by a line now and then, which says how many were left out.
func TestFloodedLog(t *testing.T) {
	longOrRace(t)
	parallel(t)
	const (
		rate         = 1000
		first, lasts = 5 * time.Second, 15 * time.Second
		// The first lines of a kind are written at once. This is those of one kind that
		// begins late, and what comes of four kinds from then on.
		octetsAllowed = (20 + 4*3) * 200
	)
	s := newSegment(t, topology{hosts: 3})
	a, b, x := s.hosts[0], s.hosts[1], s.hosts[2]
	for _, h := range []*host{a, b} {
		h.run("--log-level", "info")
	}
	a.connect(b, "RC")
	s.forged(x, b, rate, first)
	time.Sleep(3 * time.Second) // neighbours that are looked for in vain are told of later
	before := s.logged(b)
	sent := s.forged(x, b, rate, lasts)
	wrote, left := s.logged(b)-before, b.counter("log", "lines_left_out")
	t.Logf("%d forged packets, %d octets of log, %.1f MB a day; %d lines left out", sent, wrote,
		float64(wrote)*float64(24*time.Hour/lasts)/1e6, left)
	if left == 0 {
		t.Errorf("no line was left out")
	}
	if wrote > octetsAllowed {
		t.Errorf("%d octets of log in %v, want %d at most", wrote, lasts, octetsAllowed)
	}
}

// A sweep of a subnet that nobody else is in, as a monitoring system makes one, is
// some lines of the log, and not one for each address.
func TestSweepInTheLog(t *testing.T) {
	parallel(t)
	const swept, searched, allowed = 252, 200, 40 // a busy machine loses some of the packets
	s := newSegment(t, topology{})
	a := s.hosts[0]
	a.run("--log-level", "info")
	before := s.logged(a)
	sink := netip.AddrPortFrom(a.v4, 9) // of the discard service
	s.must(a.Do(func() error {
		c, err := net.ListenUDP("udp4", nil)
		if err != nil {
			return err
		}
		defer c.Close()
		for i := range swept {
			b := sink.Addr().As4()
			b[3] = byte(i + 3)
			_, _ = c.WriteToUDPAddrPort([]byte{0}, netip.AddrPortFrom(netip.AddrFrom4(b), sink.Port())) // the error of one before
			time.Sleep(time.Millisecond)
		}
		return nil
	}))
	s.eventually(patience, "an end of the search for all", func() error {
		if n := a.counter("ipoib", "neigh_drop_unresolved"); n < searched {
			return fmt.Errorf("%d searches failed, want %d at least", n, searched)
		}
		return nil
	})
	text, err := os.ReadFile(a.path(".log"))
	s.must(err)
	lines := strings.Count(string(text[before:]), "\n")
	t.Logf("%d lines of log, %d left out", lines, a.counter("log", "lines_left_out"))
	if lines > allowed {
		t.Errorf("%d lines of log after a sweep of %d addresses, want %d at most:\n%s", lines, swept, allowed, text[before:])
	}
}

// forged sends rate forged packets a second for d, and returns how many left.
func (s *segment) forged(from, victim *host, rate int, d time.Duration) int {
	s.Helper()
	f := s.forge(from, victim, forgedARP, rate*int(d/time.Second))
	ctx, stop := context.WithTimeout(s.ctx, 2*d)
	defer stop()
	sent, err := f.send(ctx, 4791, rate)
	s.must(err)
	return sent
}

func (s *segment) logged(h *host) int64 {
	s.Helper()
	st, err := os.Stat(h.path(".log"))
	s.must(err)
	return st.Size()
}
