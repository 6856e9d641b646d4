package netns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ipoibcm/cmd/ipoibcmd/lab"
	"ipoibcm/internal/long"
)

// crowd makes a segment of two hosts whose list names n members without multicast, b with what it
// publishes. The others' packets come to b, which drops them. The arguments to run a host are returned, too.
func crowd(t *testing.T, n int, published string) (s *segment, args func(h *host) []string) {
	t.Helper()
	s = newSegment(t, topology{ipv4: true})
	s.must(s.hosts[0].AddRoute(underlay, "10.77.0.0/16", "192.168.7.2")) // nobody has these, and b forwards nothing
	var list strings.Builder
	fmt.Fprintf(&list, "a 192.168.7.1\nb 192.168.7.2%s\n", published)
	for i := range n - 2 {
		fmt.Fprintf(&list, "c%04d 10.77.%d.%d\n", i, i/250, i%250+1)
	}
	file := filepath.Join(s.dir, "members")
	s.must(os.WriteFile(file, []byte(list.String()), 0o644))
	return s, func(h *host) []string {
		return append(h.config("state_dir: \"\"\n"), "--log-level", "info", "--membership", "file://"+file)
	}
}

// quiet waits until a host sends no copies any more.
func (h *host) quiet() {
	h.seg.Helper()
	last := h.counter("ipoib", "copies")
	h.seg.eventually(2*patience, "copies have an end", func() error {
		time.Sleep(300 * time.Millisecond)
		before := last
		if last = h.counter("ipoib", "copies"); last != before {
			return fmt.Errorf("%d copies more", last-before)
		}
		return nil
	})
}

// A program that sends to groups as fast as it can, on a link of a thousand members without multicast,
// takes at most a tenth of the data rate of a TCP stream of the same host.
func TestStormLeavesData(t *testing.T) {
	long.Only(t)
	needRoot(t)
	s, args := crowd(t, 1000, "")
	a, b := s.hosts[0], s.hosts[1]
	for _, h := range s.hosts {
		h.run(args(h)...)
	}
	a.connect(b, "RC")
	var storming atomic.Bool
	var out net.PacketConn
	s.must(a.Do(func() (err error) {
		out, err = shouter()
		return err
	}))
	defer out.Close()
	ctx, cancel := context.WithCancel(s.ctx)
	var ended sync.WaitGroup
	ended.Go(func() {
		for msg := make([]byte, 1200); ctx.Err() == nil; time.Sleep(200 * time.Microsecond) {
			if storming.Load() {
				_, _ = out.WriteTo(msg, &net.UDPAddr{IP: net.IPv4(10, 0, 0, 255), Port: 9})
			}
		}
	})
	defer ended.Wait()
	defer cancel()
	rate := func(storm bool) float64 {
		storming.Store(storm)
		defer storming.Store(false)
		tr, err := a.Send(s.ctx, b.Host, b.v4, 0, time.Second)
		s.must(err)
		return tr.Mbps()
	}
	var ratios []float64
	copies := uint64(0)
	for range 5 {
		a.quiet()
		without := rate(false)
		before := a.counter("ipoib", "copies")
		ratios = append(ratios, rate(true)/without)
		copies += a.counter("ipoib", "copies") - before
	}
	slices.Sort(ratios)
	t.Logf("with a storm %.2f of the rate without (%.2f to %.2f), %d copies", ratios[len(ratios)/2], ratios[0],
		ratios[len(ratios)-1], copies)
	if copies < 10_000 {
		t.Errorf("%d copies were sent: that is no storm", copies)
	}
	if p50 := ratios[len(ratios)/2]; p50 < 0.9 {
		t.Errorf("with a storm %.2f of the rate without, want 0.9", p50)
	}
}

// Address resolution on a link of many members without multicast: how many packets it costs, and how
// long it takes, where the list says who has which address and where it does not. Of the
// members two are there; the others cost what absent ones do.
func TestResolutionAmongMany(t *testing.T) {
	parallel(t)
	sizes := long.Of([]int{1000}, []int{10, 100, 1000, 4000})
	t.Logf("%8s %6s %10s %10s %10s", "members", "hints", "packets", "p50", "slowest")
	for _, n := range sizes {
		for _, hints := range []bool{false, true} {
			packets, times := resolutions(t, n, hints)
			slices.Sort(times)
			p25, p50 := times[len(times)/4], times[len(times)/2]
			t.Logf("%8d %6v %10.1f %10v %10v", n, hints, packets, p50.Round(10*time.Microsecond),
				times[len(times)-1].Round(10*time.Microsecond))
			if hints && packets > 3 {
				t.Errorf("%d members: %.1f packets for a resolution, want 3 at most", n, packets)
			}
			// What a busy machine makes slow is some of them; what asks everybody is slow each time.
			if hints && n <= 1000 && p25 > 5*time.Millisecond {
				t.Errorf("%d members: three quarters of the resolutions took %v or more, want 5ms at most for a quarter", n, p25)
			}
		}
	}
}

// resolutions has a host resolve addresses of another, one by one, and returns how many packets of address
// resolution it sent for each, and how long each first ping took.
func resolutions(t *testing.T, n int, hints bool) (packets float64, times []time.Duration) {
	const tries = 8
	target := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(100 + i)}) }
	published := ""
	for i := range tries {
		if hints {
			published += fmt.Sprintf(" ip=%v", target(i))
		}
	}
	s, args := crowd(t, n, published)
	a, b := s.hosts[0], s.hosts[1]
	for _, h := range s.hosts {
		h.run(args(h)...)
	}
	a.connect(b, "RC")
	s.eventually(patience, "a knows all members", func() error {
		if got := len(a.members().Members); got != n {
			return fmt.Errorf("%d members", got)
		}
		return nil
	})
	for i := range tries {
		s.must(b.AddAddr(ifName, target(i).String()+"/24"))
	}
	counter := func(h *host, name string) uint64 {
		v, err := h.agent.Counter(s.ctx, "ipoib", name)
		s.must(err)
		return v
	}
	time.Sleep(3 * time.Second)
	for _, h := range s.hosts { // announcements are over
		h.quiet()
	}
	// A question that goes where a hint says is one packet; any other one for each member.
	count := func() uint64 {
		hinted := counter(a, "neigh_hinted")
		return hinted + (counter(a, "neigh_queries")-min(hinted, counter(a, "neigh_queries")))*uint64(n-1)
	}
	before := count()
	for i := range tries {
		w := s.stopwatch().withTest()
		s.eventually(patience, target(i).String()+" answers", func() error { // an echo that is lost takes a second
			_, err := a.Ping(lab.Ping{Dst: target(i), Timeout: time.Second})
			return err
		})
		took, waited := w.read()
		times = append(times, took-waited)
	}
	sent := count() - before
	for _, h := range s.hosts {
		h.stop()
	}
	return float64(sent)/tries + 1, times // and the answer
}

// joins starts h's agent and returns how long it takes until a first ping to p is answered, less what
// the agents waited for a processor.
func (h *host) joins(p *host, args ...string) time.Duration {
	h.seg.Helper()
	w := h.seg.stopwatch()
	h.run(args...)
	for time.Since(w.began) < patience {
		if _, err := h.Ping(lab.Ping{Dst: p.v4, Timeout: 20 * time.Millisecond}); err == nil {
			took, waited := w.read()
			return took - waited
		}
	}
	h.seg.Fatalf("%s does not reach %s", h.Name, p.Name)
	return 0
}

// An agent among a thousand members that says nothing to anybody: memory and processor time, and how soon
// after its start it reaches a member.
func TestIdleAmongMany(t *testing.T) {
	parallel(t)
	s, args := crowd(t, 1000, " ip=10.0.0.2")
	a, b := s.hosts[0], s.hosts[1]
	b.run(args(b)...)
	joined := a.joins(b, args(a)...)
	for i := 0; i < 4 && joined > time.Second; i++ { // others may have had the processors
		a.stop()
		joined = min(joined, a.joins(b, args(a)...))
	}
	time.Sleep(5 * time.Second) // its announcements are over
	const look = 5 * time.Second
	before := ticks(t, a.agent.PID())
	time.Sleep(look)
	busy := float64(ticks(t, a.agent.PID())-before) / 100 / look.Seconds() * 100 // of USER_HZ, in percent
	rss := residentOf(t, a.agent.PID())
	t.Logf("first ping %v after the start; %.1f %% of a processor, %d MiB", joined.Round(time.Millisecond), busy, rss>>20)
	if joined > time.Second {
		t.Errorf("the first ping came %v after the start, want 1s at most", joined)
	}
	if rss > 80<<20 {
		t.Errorf("%d MiB of memory, want 80 at most", rss>>20)
	}
	if busy > 1 {
		t.Errorf("%.1f %% of a processor, want 1 at most", busy)
	}
}

// ticks returns the processor time of a process, in hundredths of a second.
func ticks(t *testing.T, pid int) (sum int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	for _, w := range strings.Fields(rest)[11:13] {
		n := 0
		fmt.Sscan(w, &n)
		sum += n
	}
	return sum
}

// residentOf returns the memory of a process, in octets.
func residentOf(t *testing.T, pid int) (octets int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Sscan(strings.Fields(string(b))[1], &octets)
	return octets * os.Getpagesize()
}
