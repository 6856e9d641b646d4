package engine

import (
	"container/heap"
	"fmt"
	"math/rand"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A link is a simulated path with one bottleneck: packets from senders wait in a
// queue of some octets, leave it at a rate and arrive after a delay.
type link struct {
	rate  float64 // octets per second
	queue int     // octets that may wait
	delay time.Duration
	frame int // octets around each packet

	lose     float64 // share of packets that are lost
	displace float64 // share of packets that arrive after three others
	mark     int     // octets that wait when packets begin to be marked; 0: none is

	freeAt time.Time // when the last packet in the queue will have left
	rnd    *rand.Rand

	waits   []time.Duration // of the packets taken
	octets  int             // of packets taken
	dropped int
}

// take puts a packet of n octets into the queue and says when it arrives.
func (l *link) take(n int, now time.Time) (at time.Time, marked, ok bool) {
	n += l.frame
	wait := max(0, l.freeAt.Sub(now))
	waiting := int(wait.Seconds() * l.rate)
	if waiting+n > l.queue {
		l.dropped++
		return at, false, false
	}
	l.freeAt = now.Add(wait + time.Duration(float64(n)/l.rate*float64(time.Second)))
	l.waits, l.octets = append(l.waits, wait), l.octets+n
	if l.rnd.Float64() < l.lose {
		return at, false, false
	}
	at = l.freeAt.Add(l.delay)
	if l.rnd.Float64() < l.displace {
		at = at.Add(time.Duration(3.5 * float64(n) / l.rate * float64(time.Second)))
	}
	return at, l.mark > 0 && waiting > l.mark, true
}

// An arrival is a packet on its way to one end of a flow.
type arrival struct {
	at     time.Time
	seq    int
	flow   *flow
	to     *end
	packet []byte
	marked bool
}

type arrivals []arrival

func (h arrivals) Len() int { return len(h) }
func (h arrivals) Less(i, j int) bool {
	return h[i].at.Before(h[j].at) || h[i].at.Equal(h[j].at) && h[i].seq < h[j].seq
}
func (h arrivals) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *arrivals) Push(x any)   { *h = append(*h, x.(arrival)) }
func (h *arrivals) Pop() any {
	x := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return x
}

// A flow is two ends of which the first sends messages for ever.
type flow struct {
	*pair
	begin    time.Time
	buf      []byte
	sent     int // messages completed
	received int
}

// A bottleneck runs flows over one link; what comes back is not delayed by others.
type bottleneck struct {
	t     testing.TB
	l     *link
	flows []*flow
	wire  arrivals
	seq   int
}

const flowMessage = 61440

func newBottleneck(t testing.TB, l *link, flows int, mtu ib.MTU, adjust func(i int, cfg *Config)) *bottleneck {
	l.rnd = rand.New(rand.NewSource(1))
	l.frame = cmpOr(l.frame, 90)
	b := &bottleneck{t: t, l: l}
	for i := range flows {
		f := &flow{buf: make([]byte, flowMessage), begin: start.Add(time.Duration(i) * 137 * time.Millisecond)}
		k := 0
		f.pair = newPair(t, ib.RC, func(cfg *Config, attr *verbs.QPAttr) {
			attr.PathMTU, attr.Timeout = mtu, 14
			cfg.WindowOctets, cfg.SendDepth, cfg.RecvDepth = 8<<20, 256, 256
			if adjust != nil {
				adjust(k, cfg)
			}
			k++
		})
		f.a.count, f.b.count = true, true
		b.flows = append(b.flows, f)
	}
	return b
}

func cmpOr(a, b int) int {
	if a != 0 {
		return a
	}
	return b
}

// fill keeps messages posted on both ends.
func (f *flow) fill() {
	for f.b.nrecv > f.received-200 && f.received < f.b.nrecv+200 {
		f.b.postRecv(0, f.buf)
		f.received++
	}
	for f.sent < f.a.nsend+128 {
		if _, err := f.a.PostSend([]verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled, SG: sg(f.buf)}}, f.now); err != nil {
			f.t.Fatal(err)
		}
		f.sent++
	}
}

// output puts what e has to send on the wire.
func (b *bottleneck) output(f *flow, e *end, now time.Time) {
	f.now = now
	for _, p := range f.pair.output(e) {
		b.seq++
		x := arrival{at: now.Add(b.l.delay), seq: b.seq, flow: f, to: f.other(e), packet: p}
		if e == f.a {
			at, marked, ok := b.l.take(len(p), now)
			if !ok {
				continue
			}
			x.at, x.marked = at, marked
		}
		heap.Push(&b.wire, x)
	}
}

// run lets the flows send for d.
func (b *bottleneck) run(from time.Time, d time.Duration) {
	for now, end := from, from.Add(d); now.Before(end); {
		next := end
		for _, f := range b.flows {
			if f.begin.After(now) {
				next = minTime(next, f.begin)
				continue
			}
			f.now = now
			f.fill()
			for _, e := range []*flowEnd{f.a, f.b} {
				if at := e.Deadline(); !at.IsZero() && !now.Before(at) {
					e.Wake(now)
				}
				b.output(f, e, now)
				if at := e.Deadline(); !at.IsZero() {
					next = minTime(next, at)
				}
			}
		}
		if len(b.wire) > 0 {
			next = minTime(next, b.wire[0].at)
		}
		if !next.After(now) {
			next = now.Add(time.Nanosecond)
		}
		now = next
		for len(b.wire) > 0 && !b.wire[0].at.After(now) {
			x := heap.Pop(&b.wire).(arrival)
			x.flow.now = now
			x.flow.input(x.to, x.packet)
		}
	}
}

type flowEnd = end // run has an end of its own

func minTime(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// goodput returns what f has delivered, in octets.
func (f *flow) goodput() int { return f.a.nsend * flowMessage }

// quantile returns the q-th of waits.
func quantile(waits []time.Duration, q float64) time.Duration {
	if len(waits) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(waits))
	return s[int(q*float64(len(s)-1))]
}

// A flow fills its bottleneck and lets nothing wait long in front of it, whatever
// rate, delay and queue it has.
func TestBottleneck(t *testing.T) {
	const mbit = 1e6 / 8
	for _, tt := range []struct {
		name    string
		l       link
		mtu     ib.MTU
		fill    float64       // share of the rate that the flow must use
		waiting time.Duration // that half of the packets may wait at most
		time    time.Duration // measured, after as much that is not
	}{
		{"20 Mb/s with 50 ms of queue", link{rate: 20 * mbit, queue: 125000, delay: 50 * time.Microsecond}, ib.MTU1024, 0.9, 4 * time.Millisecond, 2 * time.Second},
		{"the same with large packets", link{rate: 20 * mbit, queue: 125000, delay: 50 * time.Microsecond}, ib.MTU4096, 0.9, 6 * time.Millisecond, 2 * time.Second},
		{"300 Mb/s with 10 ms of queue", link{rate: 300 * mbit, queue: 375000, delay: 50 * time.Microsecond}, ib.MTU1024, 0.9, 3 * time.Millisecond, 2 * time.Second},
		{"300 Mb/s with large packets", link{rate: 300 * mbit, queue: 375000, delay: 50 * time.Microsecond}, ib.MTU4096, 0.9, 3 * time.Millisecond, 2 * time.Second},
		{"100 Mb/s with 30 KB of queue", link{rate: 100 * mbit, queue: 30000, delay: 50 * time.Microsecond}, ib.MTU1024, 0.85, 2500 * time.Microsecond, 2 * time.Second},
		{"100 Mb/s with 30 KB, large packets", link{rate: 100 * mbit, queue: 30000, delay: 50 * time.Microsecond}, ib.MTU4096, 0.85, 2500 * time.Microsecond, 2 * time.Second},
		{"100 Mb/s with 60 KB of queue", link{rate: 100 * mbit, queue: 60000, delay: 50 * time.Microsecond}, ib.MTU1024, 0.85, 2500 * time.Microsecond, 2 * time.Second},
		{"1 Gb/s, round trip 10 ms", link{rate: 1000 * mbit, queue: 4 << 20, delay: 5 * time.Millisecond}, ib.MTU1024, 0.85, 4 * time.Millisecond, 2 * time.Second},
		{"250 Mb/s, round trip 40 ms", link{rate: 250 * mbit, queue: 4 << 20, delay: 20 * time.Millisecond}, ib.MTU1024, 0.85, 8 * time.Millisecond, 2 * time.Second},
		{"8 Gb/s, idle and short", link{rate: 8000 * mbit, queue: 4 << 20, delay: 30 * time.Microsecond}, ib.MTU4096, 0.9, 3 * time.Millisecond, 300 * time.Millisecond},
	} {
		l := tt.l
		b := newBottleneck(t, &l, 1, tt.mtu, nil)
		b.run(start, tt.time)
		f := b.flows[0]
		before, warm := f.goodput(), len(l.waits)
		b.run(start.Add(tt.time), tt.time)
		octets := float64(tt.mtu.Octets())
		share := float64(f.goodput()-before) / tt.time.Seconds() / (l.rate * octets / (octets + 106))
		half, most := quantile(l.waits[warm:], 0.5), quantile(l.waits[warm:], 0.99)
		c := f.a.Counters()
		again := float64(c.Retransmits) / float64(c.PacketsOut)
		t.Logf("%-36s %.3f of the rate, waiting %v (p99 %v), %d dropped, %.4f sent again, window %d, %d timeouts", tt.name, share,
			half, most, l.dropped, again, f.a.req.cc.window, c.Timeouts)
		if share < tt.fill {
			t.Errorf("%s: %.3f of the rate, want %.2f", tt.name, share, tt.fill)
		}
		if half > tt.waiting {
			t.Errorf("%s: half of the packets wait %v, want at most %v", tt.name, half, tt.waiting)
		}
		if again > 0.03 {
			t.Errorf("%s: %.3f of the packets were sent again, want at most 0.03", tt.name, again)
		}
	}
}

// Flows that share a bottleneck share it about equally, those that come later too.
func TestShares(t *testing.T) {
	const mbit = 1e6 / 8
	for _, flows := range []int{2, 3} {
		l := link{rate: 300 * mbit, queue: 375000, delay: 50 * time.Microsecond}
		b := newBottleneck(t, &l, flows, ib.MTU1024, nil)
		const warm, d = 8 * time.Second, 8 * time.Second
		b.run(start, warm)
		var before []int
		for _, f := range b.flows {
			before = append(before, f.goodput())
		}
		at := len(l.waits)
		b.run(start.Add(warm), d)
		sum := 0
		for i, f := range b.flows {
			before[i] = f.goodput() - before[i]
			sum += before[i]
		}
		if share := float64(sum) / d.Seconds() / (l.rate * 1024 / (1024 + 106)); share < 0.9 {
			t.Errorf("%d flows: %.3f of the rate, want 0.9", flows, share)
		}
		var shares []string
		for _, n := range before {
			share := float64(n) * float64(flows) / float64(sum)
			shares = append(shares, fmt.Sprintf("%.2f", share))
			if share < 0.7 || share > 1.3 {
				t.Errorf("%d flows: one has %.2f of an equal share, want 0.7 to 1.3", flows, share)
			}
		}
		t.Logf("%d flows: %v, waiting %v", flows, shares, quantile(l.waits[at:], 0.5))
	}
}
