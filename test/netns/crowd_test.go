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

	"github.com/vishvananda/netlink"

	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
)

// crowd makes a segment of two hosts whose list names n members without multicast, b with what it
// publishes. What goes to the others comes to the other of the two, which drops it. The arguments to run a host are returned, too.
func crowd(t *testing.T, n int, published string) (s *segment, args func(h *host) []string) {
	t.Helper()
	s = newSegment(t, topology{ipv4: true})
	// Nobody has these, and neither host forwards anything. On the link they would fill the one table of neighbours
	// that the kernel has for all network namespaces, and break other tests.
	s.must(s.hosts[0].AddRoute(underlay, "10.77.0.0/16", "192.168.7.2"))
	s.must(s.hosts[1].AddRoute(underlay, "10.77.0.0/16", "192.168.7.1"))
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

// A storm is a program on a host that broadcasts, when it is told to.
type storm struct{ on atomic.Bool }

// storms starts the program of a storm that leaves by dev. It ends with the test.
func (h *host) storms(dev string, to netip.Addr) *storm {
	s, out := &storm{}, net.PacketConn(nil)
	h.seg.must(h.Do(func() (err error) {
		out, err = shouter(dev)
		return err
	}))
	ctx, cancel := context.WithCancel(h.seg.ctx)
	var ended sync.WaitGroup
	h.seg.Cleanup(func() {
		cancel()
		ended.Wait()
		out.Close()
	})
	ended.Go(func() {
		dst := &net.UDPAddr{IP: to.AsSlice(), Port: 9}
		for msg := make([]byte, 1200); ctx.Err() == nil; {
			if !s.on.Load() {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			_, _ = out.WriteTo(msg, dst)
			time.Sleep(200 * time.Microsecond) // which takes a millisecond
		}
	})
	return s
}

// A program that broadcasts a thousand packets a second, on a link of a thousand members without
// multicast, takes at most a tenth of the data rate of a TCP stream of the same host.
//
// What it takes is what the agent makes of its packets: the copies, and what it drops. The program
// itself needs a processor too, which here are few, and would on any interface; so it runs in what is compared
// as well, and broadcasts to an interface that drops everything. How much both together take of the rate of a host
// without such a program is printed beside it.
func TestStormLeavesData(t *testing.T) {
	long.Only(t)
	needRoot(t)
	s, args := crowd(t, 1000, "")
	a, b := s.hosts[0], s.hosts[1]
	const nowhere = "nowhere0"
	s.must(a.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: nowhere}, PeerName: "nowhere1"}))
	s.must(a.AddAddr(nowhere, "10.9.0.1/24"))
	for _, dev := range []string{nowhere, "nowhere1"} { // the other end drops what comes from its own host
		s.must(a.Up(dev))
	}
	for _, h := range s.hosts {
		h.run(args(h)...)
	}
	a.connect(b, "RC")
	elsewhere, here := a.storms(nowhere, netip.MustParseAddr("10.9.0.255")), a.storms(ifName, netip.MustParseAddr("10.0.0.255"))
	rate := func(by *storm) float64 {
		a.quiet() // of the storm before
		if by != nil {
			by.on.Store(true)
			defer by.on.Store(false)
		}
		tr, err := a.Send(s.ctx, b.Host, b.v4, 0, time.Second)
		s.must(err)
		return tr.Mbps()
	}
	const rounds = 15
	var none, dropped, copied []float64
	copies := uint64(0)
	programs := []int{os.Getpid(), a.agent.PID(), b.agent.PID()}
	busy, total := othersOf(t, programs)
	measure := []func(){
		func() { none = append(none, rate(nil)) },
		func() { dropped = append(dropped, rate(elsewhere)) },
		func() {
			before := a.counter("ipoib", "copies")
			copied = append(copied, rate(here))
			copies += a.counter("ipoib", "copies") - before
		},
	}
	for i := range rounds {
		for j := range measure { // in turn, because a machine becomes slower and faster
			measure[(i+j)%len(measure)]()
		}
	}
	median := func(over []float64) (low, p50, high float64) {
		ratios := make([]float64, rounds)
		for i := range ratios {
			ratios[i] = copied[i] / over[i]
		}
		slices.Sort(ratios)
		return ratios[rounds/4], ratios[rounds/2], ratios[rounds-1-rounds/4]
	}
	low, p50, high := median(dropped)
	t.Logf("with a storm %.2f of the rate with one that is dropped (quartiles %.2f and %.2f), %d copies", p50, low, high, copies)
	low, all, high := median(none)
	t.Logf("and %.2f of the rate without any (quartiles %.2f and %.2f)", all, low, high)
	if copies < rounds*2000 {
		t.Errorf("%d copies were sent in %d rounds: that is no storm", copies, rounds)
	}
	busyAfter, totalAfter := othersOf(t, programs)
	if others := float64(busyAfter-busy) / float64(totalAfter-total); others > 0.1 {
		t.Skipf("other programs had %.0f %% of the processors, which hides what a storm takes", 100*others)
	}
	if p50 < 0.9 {
		t.Errorf("with a storm %.2f of the rate with one that is dropped, want 0.9", p50)
	}
}

// othersOf returns how long other programs than these had a processor since the machine was started, and
// how long there was one, in hundredths of a second. Interrupts are nobody's.
func othersOf(t *testing.T, pids []int) (busy, total int) {
	t.Helper()
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	for i, w := range strings.Fields(line)[1:9] { // user, nice, system, idle, iowait, irq, softirq, steal
		n := 0
		fmt.Sscan(w, &n)
		if total += n; i < 3 || i == 7 {
			busy += n
		}
	}
	for _, pid := range pids {
		busy -= ticks(t, pid)
	}
	return busy, total
}

// Address resolution on a link of many members without multicast: how many packets it costs, and how
// long it takes, where the list says who has which address and where it does not. Of the
// members two are there; the others cost what absent ones do.
//
// The times are what a clock shows, waits for a processor included: of the first ping to an
// address, and of the next one, which resolves nothing.
func TestResolutionAmongMany(t *testing.T) {
	long.Only(t)
	parallel(t)
	sizes := []int{10, 100, 1000, 4000}
	t.Logf("%8s %6s %8s %10s %10s %10s %10s", "members", "hints", "packets", "fastest", "p50", "slowest", "next p50")
	for _, n := range sizes {
		for _, hints := range []bool{false, true} {
			packets, first, next := resolutions(t, n, hints)
			slices.Sort(packets)
			slices.Sort(first)
			slices.Sort(next)
			us := func(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }
			t.Logf("%8d %6v %8d %10v %10v %10v %10v", n, hints, packets[len(packets)/2], us(first[0]), us(first[len(first)/2]),
				us(first[len(first)-1]), us(next[len(next)/2]))
			if !hints {
				continue
			}
			// A question that is not answered at once goes to all members.
			if got := packets[len(packets)/2]; got > 3 {
				t.Errorf("%d members: %d packets for a resolution, want 3 at most: %v", n, got, packets)
			}
			// What a busy machine makes slow is some of them, even most, and pings that resolve nothing too; what asks
			// everybody is slow each time.
			limit := 5*time.Millisecond + 2*next[len(next)/2]
			if n <= 1000 && first[0] > limit {
				t.Errorf("%d members: the fastest resolution took %v, want %v at most: 5ms and two pings", n, first[0], limit)
			}
		}
	}
}

// resolutions has a host resolve addresses of another, one by one, and returns how many packets of address
// resolution it sent for each, and how long the first ping to each took, and the next one.
func resolutions(t *testing.T, n int, hints bool) (packets []uint64, first, next []time.Duration) {
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
	ping := func(dst netip.Addr) (took time.Duration) {
		began := time.Now()
		s.eventually(patience, dst.String()+" answers", func() error { // an echo that is lost takes a second
			_, err := a.Ping(lab.Ping{Dst: dst, Timeout: time.Second})
			took = time.Since(began)
			return err
		})
		return took
	}
	for i := range tries {
		before := count()
		first = append(first, ping(target(i)))
		next = append(next, ping(target(i)))
		packets = append(packets, count()-before+1) // and the answer
	}
	for _, h := range s.hosts {
		h.stop()
	}
	return packets, first, next
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
	longOrRace(t)
	parallel(t)
	s, args := crowd(t, 1000, " ip=10.0.0.2")
	a, b := s.hosts[0], s.hosts[1]
	b.run(args(b)...)
	joined := a.joins(b, args(a)...)
	for i := 0; i < 4 && joined > time.Second; i++ { // others may have had the processors
		a.stop()
		joined = min(joined, a.joins(b, args(a)...))
	}
	time.Sleep(5 * time.Second)
	a.quiet() // its announcements are over
	const look = 5 * time.Second
	before := ticks(t, a.agent.PID())
	time.Sleep(look)
	busy := float64(ticks(t, a.agent.PID())-before) / 100 / look.Seconds() * 100 // of USER_HZ, in percent
	rss := residentOf(t, a.agent.PID())
	t.Logf("first ping %v after the start; %.1f %% of a processor, %d MiB", joined.Round(time.Millisecond), busy, rss>>20)
	if joined > time.Second {
		t.Errorf("the first ping came %v after the start, want 1s at most", joined)
	}
	if rss > 80<<20 && !raceDetector {
		t.Errorf("%d MiB of memory, want 80 at most", rss>>20)
	}
	if busy > 1 && !raceDetector {
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
