package netns

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
	"ipoibcm/wire/roce"
)

var floodFor = flag.Duration("flood", 0,
	"how long each flood of TestFlood goes on, five of every kind; without it they are short, and in the long form "+
		"as many as it takes")

var floodOnly = flag.String("flood.only", "", "only this kind of forged packets in TestFlood")

const (
	floodRate   = 50_000 // forged packets per second
	dataRate    = 98_000 // and of data
	unreadPort  = 4792   // nobody reads it
	floodRounds = 5      // of make flood; three times as many where others disturb them or they do not agree

	// mostOthers is the part of the processors' time that others may have while a rate is
	// measured that counts.
	mostOthers = 0.1

	// keeps is the part of its rate that traffic keeps, keepsBesideData beside data, and
	// connectWithin what a peer that nobody has heard of needs to connect in the middle
	// of a flood.
	keeps           = 0.8
	keepsBesideData = 0.7
	connectWithin   = 2 * time.Second

	// The caps of an agent's default configuration.
	maxNeighbours, maxHearsay, maxConns = 4096, 2048, 1024
	// heapCap is what a flood may leave on the heap: all that the caps allow.
	heapCap = 32 << 20
)

// A flooded is what was measured of one kind of flood.
type flooded struct {
	kind      forgery
	perSecond int     // forged packets that left, on average
	arrived   float64 // part of them that the agent has counted
	rounds    []floodRound
	connected time.Duration

	before, after     control.Runtime
	neighs, conns     int // most there were at the end of a flood
	refused, overflow uint64
}

// rate is how many packets are forged per second, keeps the part of its rate that
// traffic has to keep.
func (k forgery) rate() int {
	if k == forgedData {
		return dataRate
	}
	return floodRate
}

func (k forgery) keeps() float64 {
	if k == forgedData {
		return keepsBesideData
	}
	return keeps
}

// verdict judges by the rounds during which other processes had little of the machine.
func (r *flooded) verdict() verdict { return judge(r.rounds, floodRound.counts) }

// disturbed reports whether others had much of the machine during some round.
func (r *flooded) disturbed() bool { return r.verdict().rounds < len(r.rounds) }

// TestFlood sends an agent forged ARP, ND and CM packets, 50,000 a second. A peer
// that is new connects meanwhile, existing traffic keeps its rate, and what the
// agent holds stays within its caps. The control is the same packets at the same
// rate to a port of the same host that nobody reads: they cost the machine, but
// not the agent. The long form has one flood of each kind, whose rates are not
// looked at; make flood takes longer over it; docs/floods.md has its table.
func TestFlood(t *testing.T) {
	if *floodFor == 0 {
		longOrRace(t)
	}
	needRoot(t) // and the machine: not parallel
	kinds := []forgery{forgedARP, forgedND, forgedREQ, forgedData}
	if *floodFor > 0 {
		kinds = append(kinds, inbandREQ)
	}
	if *floodOnly != "" {
		kinds = []forgery{forgery(*floodOnly)}
	}
	s := newSegment(t, topology{hosts: 3 + len(kinds)})
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience+200**floodFor)
	defer cancel()
	s.ctx = ctx
	a, b, newcomers, x := s.hosts[0], s.hosts[1], s.hosts[2:2+len(kinds)], s.hosts[2+len(kinds)]
	for _, h := range s.hosts[:2+len(kinds)] {
		h.run("--log-level", "info")
	}
	a.connect(b, "RC")
	unread(b)
	var table strings.Builder
	fmt.Fprintln(&table,
		"| forged | per second | kept | of all rounds | control, flood, control in Mb/s (most that others had) | "+
			"newcomer connected after | refused | neighbours | connections | heap before, after (KiB) |")
	fmt.Fprintln(&table, "|---|---|---|---|---|---|---|---|---|---|")
	for i, kind := range kinds {
		r := s.flood(x, kind, a, b, newcomers[i])
		all := judge(r.rounds, func(r floodRound) bool { return r.before+r.after > 0 })
		fmt.Fprintf(&table, "| %s | %d | %v | %v | %v | %v | %d | %d | %d | %d, %d |\n", kind, r.perSecond, r.verdict(),
			all, r.rounds,
			r.connected.Round(time.Millisecond), r.refused, r.neighs, r.conns, r.before.HeapOctets>>10, r.after.HeapOctets>>10)
		r.check(t)
	}
	t.Log("\n" + table.String())
}

// check compares what was measured with what must be.
func (r *flooded) check(t *testing.T) {
	t.Helper()
	if r.connected >= newcomerWaits() {
		t.Errorf("%s: a newcomer was not connected within %v", r.kind, newcomerWaits())
	}
	v := r.verdict()
	if v.rounds > 0 && !r.disturbed() {
		if r.connected > connectWithin {
			t.Errorf("%s: a newcomer was connected after %v, want %v", r.kind, r.connected, connectWithin)
		}
		if r.arrived < 0.9 {
			t.Errorf("%s: only %.0f %% of the forged packets reached the agent, and %d overflowed: this shows nothing", r.kind,
				100*r.arrived, r.overflow)
		}
	}
	switch {
	case raceDetector || !rates():
	case *floodFor > 0 && v.rounds < floodRounds || v.rounds == 0:
		t.Logf("%s: the machine was busy with something else: rates are not judged; %v", r.kind, r.rounds)
	case r.perSecond < r.kind.rate()*9/10 && r.disturbed():
		t.Logf("%s: the machine was busy with something else at times, and sent %d forged packets a second, too few: "+
			"rates are not judged; %v", r.kind, r.perSecond, r.rounds)
	case r.perSecond < r.kind.rate()*9/10:
		t.Errorf("%s: the machine sent %d forged packets a second, too few", r.kind, r.perSecond)
	case v.median < r.kind.keeps():
		t.Errorf("%s: traffic kept %v of its rate, want %.2f; rounds %v", r.kind, v, r.kind.keeps(), r.rounds)
	default:
		t.Logf("%s: traffic kept %v of its rate, at least %.2f is wanted", r.kind, v, r.kind.keeps())
	}
	if r.refused == 0 {
		t.Errorf("%s: nothing was refused", r.kind)
	}
	switch {
	case r.neighs > maxNeighbours:
		t.Errorf("%s: neighs is %v, want at most %v", r.kind, r.neighs, maxNeighbours)
	case r.neighs > maxHearsay+16:
		t.Errorf("%s: neighs is %v, want at most %v", r.kind, r.neighs, maxHearsay+16)
	case r.conns > maxConns:
		t.Errorf("%s: conns is %v, want at most %v", r.kind, r.conns, maxConns)
	}
	if grown := int64(r.after.HeapOctets) - int64(r.before.HeapOctets); grown > heapCap {
		t.Errorf("%s: the heap has grown by %d octets", r.kind, grown)
	}
	if most := r.before.Descriptors + 2; r.after.Descriptors > most {
		t.Errorf("%s: %d descriptors, want %d at most", r.kind, r.after.Descriptors, most)
	}
	if most := r.before.Goroutines + 4; r.after.Goroutines > most {
		t.Errorf("%s: %d goroutines, want %d at most", r.kind, r.after.Goroutines, most)
	}
}

// rates reports whether the rates of traffic are compared.
func rates() bool { return long.Form() || *floodFor > 0 }

// newcomerWaits is how long a newcomer tries to connect.
func newcomerWaits() time.Duration {
	if rates() && !raceDetector {
		return 10 * connectWithin
	}
	return patience
}

// unread binds a port of the victim for packets as an agent's socket takes them.
func unread(h *host) {
	s := h.seg
	s.Helper()
	s.must(h.Do(func() error {
		c, err := net.ListenUDP("udp6", &net.UDPAddr{Port: unreadPort})
		if err != nil {
			return err
		}
		s.Cleanup(func() { c.Close() })
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		const noCheck6RX = 102 // UDP_NO_CHECK6_RX
		var set error
		if err := raw.Control(func(fd uintptr) {
			set = unix.SetsockoptInt(int(fd), syscall.IPPROTO_UDP, noCheck6RX,
				1)
		}); err != nil {
			return err
		}
		return set
	}))
}

// flood measures one kind of flood from x, in turn with the control.
func (s *segment) flood(x *host, kind forgery, a, b, newcomer *host) *flooded {
	s.Helper()
	r := &flooded{kind: kind}
	s.must(b.agent.Get(s.ctx, control.PathRuntime, &r.before))
	rate := kind.rate()
	first := connectWithin + 500*time.Millisecond // it has to last until the newcomer is there
	switch {
	case *floodFor > 0:
		first = max(first, *floodFor)
	case !rates():
		first = time.Second
	}
	if raceDetector { // everything takes ten times as long
		rate /= 20
	}
	begin := s.floodCounts(b)
	f := s.forge(x, b, kind, int(first.Seconds()*float64(rate))+forgerBatch)
	connects := func() { r.connected = s.connects(newcomer, b) }
	total, took := 0, time.Duration(0)
	if rates() {
		total, took = s.floodRounds(f, rate, first, a, b, r, connects)
	} else {
		// Where others have the processors fewer packets leave, and none is one too many.
		for end := time.Now().Add(patience); ; connects = func() {} {
			_, n := s.beside(f, roce.Port, rate, first, a, b, connects)
			total, took = total+n, took+first
			s.held(b, r)
			if s.floodCounts(b).refused > begin.refused || time.Now().After(end) {
				break
			}
			f.renew()
		}
	}
	r.perSecond = int(float64(total) / took.Seconds())
	end := s.floodCounts(b)
	r.arrived = float64(end.arrived-begin.arrived) / float64(total)
	r.refused, r.overflow = end.refused-begin.refused, end.overflow-begin.overflow
	s.eventually(patience, b.Name+" has let go of what was half-open", func() error {
		if n := len(s.connsOf(b)); n > len(s.hosts) {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	s.must(b.agent.Get(s.ctx, control.PathRuntime, &r.after))
	return r
}

// floodRounds measures rounds until they say whether traffic keeps what it has to, and returns how many
// forged packets have left in what time. connects is called beside the first flood.
func (s *segment) floodRounds(f *forger, rate int, first time.Duration, a, b *host, r *flooded,
	connects func()) (total int, took time.Duration) {
	s.Helper()
	window, most := time.Second, 7
	if *floodFor > 0 {
		window, most = *floodFor, 3*floodRounds
	}
	if raceDetector {
		most = 1
	}
	enough := func() bool {
		v := r.verdict()
		if *floodFor > 0 {
			return v.decided(r.kind.keeps())
		}
		return v.rounds > 0 && v.median >= r.kind.keeps() || v.rounds == 0 && len(r.rounds) == 2
	}
	measure := func(port int, d time.Duration, meanwhile func()) (mbps, others float64, sent int) {
		ended := s.others()
		mbps, sent = s.beside(f, port, rate, d, a, b, meanwhile)
		return mbps, ended(), sent
	}
	before, hadBefore, _ := measure(unreadPort, window, func() {})
	for i, d := 0, first; i < most && !enough(); i, d, connects = i+1, window, func() {} {
		f.renew()
		mbps, had, sent := measure(roce.Port, d, connects)
		total, took = total+sent, took+d
		s.held(b, r)
		after, hadAfter, _ := measure(unreadPort, window, func() {})
		r.rounds = append(r.rounds, floodRound{before, mbps, after, max(hadBefore, had, hadAfter)})
		before, hadBefore = after, hadAfter
	}
	return total, took
}

// floodCounts are what an agent has counted of a flood.
type floodCounts struct{ arrived, refused, overflow uint64 }

func (s *segment) floodCounts(h *host) (c floodCounts) {
	s.Helper()
	var st control.Stats
	s.must(h.agent.Get(s.ctx, control.PathStats, &st))
	for _, n := range st.Counters {
		switch n.Part + " " + n.Name {
		case "softroce ud_packets_in", "softroce mads_in", "softroce mads_dropped":
			c.arrived += n.Value
		case "softroce mads_drop_flood":
			c.arrived += n.Value
			c.refused += n.Value
		case "datapath rx_drop_ud_flood", "softroce rx_drop_filtered": // before a queue pair could count it
			c.arrived += n.Value
			c.refused += n.Value
		case "datapath rx_drop_flood":
			c.refused += n.Value
		case "softroce rx_drop_overflow":
			c.overflow += n.Value
		}
	}
	return c
}

func (s *segment) connsOf(h *host) []control.Conn {
	s.Helper()
	var c control.Conns
	s.must(h.agent.Get(s.ctx, control.PathConns, &c))
	return c.Conns
}

// held notes how much the victim holds.
func (s *segment) held(b *host, r *flooded) {
	s.Helper()
	var n control.Neighbours
	s.must(b.agent.Get(s.ctx, control.PathNeigh, &n))
	r.neighs, r.conns = max(r.neighs, len(n.Neighbours)), max(r.conns, len(s.connsOf(b)))
}

// beside returns the rate of TCP from a to b for d beside forged packets to a
// port, of which sent left. meanwhile is called when they have begun.
func (s *segment) beside(f *forger, port, rate int, d time.Duration, a, b *host,
	meanwhile func()) (mbps float64, sent int) {
	s.Helper()
	ctx, stop := context.WithTimeout(s.ctx, d)
	defer stop()
	var wg sync.WaitGroup
	var sendErr error
	wg.Go(func() { sent, sendErr = f.send(ctx, port, rate) })
	wg.Go(func() {
		time.Sleep(d / 10)
		meanwhile()
	})
	limit, end := context.WithTimeout(s.ctx, d+patience)
	defer end()
	t, err := a.Send(limit, b.Host, b.v4, 0, d)
	wg.Wait()
	s.must(sendErr)
	s.must(err)
	return t.Mbps(), sent
}

// connects returns how long it takes c to connect to b, of whom it has never
// heard.
func (s *segment) connects(c, b *host) time.Duration {
	begin := time.Now()
	limit := newcomerWaits()
	ctx, stop := context.WithTimeout(s.ctx, limit)
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for ctx.Err() == nil {
			if _, err := c.Ping(lab.Ping{Dst: b.v4, Timeout: 50 * time.Millisecond}); err == nil {
				time.Sleep(20 * time.Millisecond)
			}
		}
	})
	for ctx.Err() == nil {
		conns, err := c.agent.Conns(ctx)
		if err == nil && slices.ContainsFunc(conns, func(n control.Conn) bool { return n.State == "ESTABLISHED" }) {
			d := time.Since(begin)
			stop()
			return d
		}
		time.Sleep(5 * time.Millisecond)
	}
	return limit
}

// TestUDIsNoFlood: what two hosts without connections send each other by UD is no flood to
// either, however much it is.
func TestUDIsNoFlood(t *testing.T) {
	parallel(t)
	s, a, b := startedPair(t, "--mode", "ud", "--log-level", "info")
	a.reach(b.v4)
	both(b, func(addr netip.Addr) {
		if got := a.send(b, addr, 64<<20); got.Octets == 0 {
			t.Errorf("nothing was sent to %v", addr)
		}
	})
	for _, h := range s.hosts {
		if n := h.counter("datapath", "rx_drop_ud_flood"); n != 0 {
			t.Errorf("%s has taken %d datagrams for a flood", h.Name, n)
		}
	}
	if n := b.counter("datapath", "rx_ud"); n < 10_000/raceShare() {
		t.Errorf("%s has received %d datagrams: this shows nothing", b.Name, n)
	}
}

// TestOneWayUDIsNoFlood: nor is what a host sends by UD to one that sends nothing back. It is looked up, and
// answers.
func TestOneWayUDIsNoFlood(t *testing.T) {
	parallel(t)
	const lasts = 3 * time.Second
	s, a, b := startedPair(t, "--mode", "ud", "--log-level", "info")
	for i, addr := range []netip.Addr{b.v4, b.v6} {
		in, err := lab.In(b.Host, func() (net.PacketConn, error) { return net.ListenPacket("udp", netip.AddrPortFrom(addr, 7).String()) })
		s.must(err)
		defer in.Close() // without it the kernel would answer by ICMP
		out, err := lab.In(a.Host, func() (net.Conn, error) { return net.Dial("udp", netip.AddrPortFrom(addr, 7).String()) })
		s.must(err)
		defer out.Close()
		sent := 0
		for end := time.Now().Add(lasts); time.Now().Before(end); sent++ {
			_, _ = out.Write(make([]byte, 200))
		}
		t.Logf("%d datagrams to %v", sent, addr)
		if sent < 3000 {
			t.Errorf("only %d datagrams were sent to %v: this shows nothing", sent, addr)
		}
		if got := b.counter("datapath", "rx_senders"); got == 0 || i > 0 && got > 4 {
			t.Errorf("%s was looked up %d times", a.Name, got) // known by one address it is known
		}
	}
	// What came before the answer may have been too much.
	if n := b.counter("datapath", "rx_drop_ud_flood"); n > 10_000 {
		t.Errorf("%s has taken %d datagrams for a flood", b.Name, n)
	}
	if n := b.counter("datapath", "tx_ud"); n > 100 {
		t.Errorf("%s has sent %d datagrams itself: this shows nothing", b.Name, n)
	}
}

// raceShare is by how much less is sent under the race detector.
func raceShare() uint64 {
	if raceDetector {
		return 10
	}
	return 1
}
