package datapath

import (
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/timerheap"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A narrow is a wire that several RC senders share, in virtual time: one queue of octets that drops
// what does not fit, and a way back without one. Each sender posts as much as its limit allows.
type narrow struct {
	t       testing.TB
	rate    float64 // octets per second
	queue   int     // octets
	rtt     time.Duration
	message int
	jitter  *rand.Rand
	loss    float64       // of packets, each way
	stalls  time.Duration // the way from the sender takes up to so much longer at times

	now     time.Time
	free    time.Time // when the last packet has left the queue
	moves   time.Time // when stall changes
	stall   time.Duration
	latest  time.Time // when the last packet arrives
	backlog []leaving
	events  timerheap.Heap[arrival, *arrival]
	senders []*sharer
	seq     int
}

type leaving struct {
	at time.Time
	n  int
}

type arrival struct {
	timerheap.Slot
	at  time.Time
	seq int
	to  *sharerEnd
	b   []byte
}

// Before orders arrivals; those of one instant come as they were sent.
func (a *arrival) Before(o *arrival) bool {
	return a.at.Before(o.at) || a.at.Equal(o.at) && a.seq < o.seq
}

// A sharer is one sender with its receiver.
type sharer struct {
	w      *narrow
	a, b   *sharerEnd
	limit  sendLimit
	octets int64
	id     uint64
	begin  time.Time
	got    int64 // octets that have arrived
	buf    []byte
}

type sharerEnd struct {
	*engine.QP
	s        *sharer
	sender   bool
	src, dst ib.GID
	pkts     [32]engine.Packet
}

func (e *sharerEnd) SendDone(wc verbs.WC) {
	n := int64(e.s.message(wc.ID))
	e.s.octets -= n
	e.s.limit.completed(wc.ID, n, e.s.w.ns())
}

// message returns how many octets message id has: the first is a short one, as a SYN is.
func (s *sharer) message(id uint64) int {
	if id == 1 {
		return 84
	}
	return s.w.message
}

func (e *sharerEnd) RecvDone(wc verbs.WC) {
	e.s.got += int64(wc.ByteLen)
	if _, err := e.PostRecv([]verbs.RecvWR{{SG: []verbs.SGE{{Buf: e.s.buf}}}}); err != nil {
		e.s.w.t.Fatal(err)
	}
}
func (e *sharerEnd) Event(ev verbs.Event) { e.s.w.t.Logf("event %+v", ev) }

func (w *narrow) ns() int64 { return w.now.UnixNano() }

// add gives the wire one more sender, which begins after that time.
func (w *narrow) add(begin time.Duration) {
	s := &sharer{w: w, begin: w.now.Add(begin), buf: make([]byte, w.message)}
	for i := range 2 {
		e := &sharerEnd{s: s, sender: i == 0, src: ib.GID{15: byte(2*len(w.senders) + i + 1)}, dst: ib.GID{15: byte(2*len(w.senders) + 2 - i)}}
		e.QP = engine.New(engine.Config{QPN: ib.QPN(0xa1 + i), Transport: ib.RC, SendDepth: 128, RecvDepth: 128, MaxSendSGE: 1, MaxRecvSGE: 1, Sink: e,
			Window: 256, MaxWindowOctets: 8 << 20})
		attr := verbs.QPAttr{PKey: ib.DefaultPKey, Path: verbs.AHAttr{SGID: e.src, DGID: e.dst}, PathMTU: ib.MTU4096, DestQPN: ib.QPN(0xa2 - i),
			MinRNRTimer: 12, Timeout: 14, RetryCount: 7, RNRRetry: 7}
		for st := verbs.StateInit; st <= verbs.StateRTS; st++ {
			attr.State = st
			if err := e.Modify(&attr, w.now); err != nil {
				w.t.Fatal(err)
			}
		}
		if i == 0 {
			s.a = e
		} else {
			s.b = e
			for range 128 {
				e.PostRecv([]verbs.RecvWR{{SG: []verbs.SGE{{Buf: s.buf}}}})
			}
		}
	}
	w.senders = append(w.senders, s)
}

// flush puts what e sends on the way.
func (w *narrow) flush(e *sharerEnd) {
	for {
		n := e.Output(e.pkts[:], w.now)
		if n == 0 {
			return
		}
		for i := range e.pkts[:n] {
			b := append(e.pkts[i].Append(nil), 0, 0, 0, 0)
			if w.loss > 0 && w.jitter.Float64() < w.loss {
				continue
			}
			at := w.now.Add(w.rtt/2 + time.Duration(w.jitter.Int64N(20_000)))
			to := e.s.a
			if e.sender {
				to = e.s.b
				for len(w.backlog) > 0 && !w.backlog[0].at.After(w.now) {
					w.backlog = w.backlog[1:]
				}
				sum := 0
				for _, l := range w.backlog {
					sum += l.n
				}
				if sum+len(b) > w.queue {
					continue
				}
				if w.free.Before(w.now) {
					w.free = w.now
				}
				w.free = w.free.Add(time.Duration(float64(len(b)+60) * 1e9 / w.rate))
				w.backlog = append(w.backlog, leaving{w.free, len(b)})
				at = w.late(w.free.Add(w.rtt / 2))
			}
			w.seq++
			w.events.Set(&arrival{at: at, seq: w.seq, to: to, b: b})
		}
	}
}

// late returns when a packet arrives that would at the time at, if nothing stood still.
func (w *narrow) late(at time.Time) time.Time {
	if w.stalls == 0 {
		return at
	}
	if w.moves.Before(w.now) {
		w.moves = w.now.Add(time.Duration(w.jitter.Int64N(4 * int64(w.stalls))))
		w.stall = time.Duration(w.jitter.Int64N(int64(w.stalls)))
	}
	if at = at.Add(w.stall); at.Before(w.latest) {
		at = w.latest // order is kept
	}
	w.latest = at
	return at
}

// feed posts what the limit allows.
func (w *narrow) feed(s *sharer) {
	if w.now.Before(s.begin) {
		return
	}
	for s.limit.limit() > s.octets {
		if s.id == 1 && s.octets > 0 {
			return // the answer to the first one is waited for
		}
		s.id++
		n := s.message(s.id)
		wr := verbs.SendWR{ID: s.id, Opcode: verbs.Send, Flags: verbs.Signaled, SG: []verbs.SGE{{Buf: s.buf[:n]}}}
		if _, err := s.a.PostSend([]verbs.SendWR{wr}, w.now); err != nil {
			s.id--
			return
		}
		s.octets += int64(n)
		s.limit.posted(s.id, int64(n), s.octets, w.ns())
	}
	s.limit.full()
}

// run lets d pass.
func (w *narrow) run(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		for _, s := range w.senders {
			w.feed(s)
			w.flush(s.a)
			w.flush(s.b)
		}
		next := end
		for _, s := range w.senders {
			for _, e := range []*sharerEnd{s.a, s.b} {
				if t := e.Deadline(); !t.IsZero() && t.Before(next) {
					next = t
				}
			}
			if s.begin.After(w.now) && s.begin.Before(next) {
				next = s.begin
			}
		}
		if a := w.events.First(); a != nil && a.at.Before(next) {
			next = a.at
		}
		if next.After(w.now) {
			w.now = next
		}
		for a := w.events.First(); a != nil && !a.at.After(w.now); a = w.events.First() {
			w.events.Stop(a)
			var pkt roce.Packet
			if err := pkt.Parse(a.b); err != nil {
				w.t.Fatal(err)
			}
			src := engine.Source{Src: a.to.dst, Dst: a.to.src}
			a.to.Receive(&pkt, &src, w.now)
		}
		for _, s := range w.senders {
			s.a.Wake(w.now)
			s.b.Wake(w.now)
		}
	}
}

// Three senders to one host share the way to it, whoever of them came first: what a queue on that way
// costs is not taken for one's own.
func TestShares(t *testing.T) {
	long.OneGoroutine(t)
	for seed := range uint64(8) {
		w := &narrow{t: t, rate: 300e6 / 8, queue: 375_000, rtt: 300 * time.Microsecond, message: 61444,
			now: time.Unix(1000, 0), jitter: rand.New(rand.NewPCG(seed, 1))}
		for i := range 3 {
			w.add(time.Duration(i) * 30 * time.Millisecond)
		}
		w.run(2 * time.Second)
		for _, s := range w.senders {
			s.got = 0
		}
		w.run(4 * time.Second)
		sum := int64(0)
		for _, s := range w.senders {
			sum += s.got
		}
		if rate := float64(sum) * 8 / 4e6; rate < 285 {
			t.Errorf("seed %d: %.0f Mb/s together, want 285 at least of 300", seed, rate)
		}
		for i, s := range w.senders {
			if share := float64(s.got) * 3 / float64(sum); share < 0.7 || share > 1.3 {
				t.Errorf("seed %d: sender %d has %.2f of an equal share, want 0.7 to 1.3", seed, i, share)
			}
		}
	}
}

// Where the path loses packets though nothing waits there, a sender has about two thirds of those between two losses in
// flight, and goes on sending while it repairs a gap: one gap is repaired in each round trip.
func TestLossyPath(t *testing.T) {
	long.OneGoroutine(t)
	seeds := long.Of(1, 3)
	for _, tt := range []struct {
		loss   float64
		gbps   float64
		rtt    time.Duration
		stalls time.Duration
		share  float64 // of the rate, at least
	}{
		{0.001, 3, 300 * time.Microsecond, 0, 0.96},
		{0.001, 3, time.Millisecond, 0, 0.95},
		{0.01, 3, 300 * time.Microsecond, 0, 0.84},
		{0.01, 3, time.Millisecond, 0, 0.55},
		{0.03, 3, time.Millisecond, 0, 0.19},
		{0.01, 1.6, 200 * time.Microsecond, 300 * time.Microsecond, 0.87},
		{0.01, 2.4, 200 * time.Microsecond, 500 * time.Microsecond, 0.77},
	} {
		var octets int64
		for seed := range uint64(seeds) {
			w := &narrow{t: t, rate: tt.gbps * 1e9 / 8, queue: 4_000_000, rtt: tt.rtt, message: 61444, loss: tt.loss, stalls: tt.stalls,
				now: time.Unix(1000, 0), jitter: rand.New(rand.NewPCG(seed+1, 1))}
			w.add(0)
			s := w.senders[0]
			w.run(time.Second / 4)
			before := s.got
			w.run(time.Second)
			octets += s.got - before
		}
		if share := float64(octets) / float64(seeds) * 8 / 1e9 / tt.gbps; share < tt.share {
			t.Errorf("%v of packets lost, %v, stalls of %v: %.3f of the rate, want %.2f", tt.loss, tt.rtt, tt.stalls, share, tt.share)
		}
	}
}

// One sender fills a narrow or long path, whatever the queue in front of it holds, and little of what
// it sends is lost there.
func TestFillsPath(t *testing.T) {
	long.OneGoroutine(t)
	for _, tt := range []struct {
		name   string
		mbps   float64
		queue  int
		rtt    time.Duration
		settle time.Duration
		share  float64 // of the rate, at least
		again  float64 // of the packets, at most
	}{
		{"100 Mb/s, 30 KB of queue", 100, 30_000, 200 * time.Microsecond, time.Second, 0.93, 0.02},
		{"100 Mb/s, 60 KB of queue", 100, 60_000, 200 * time.Microsecond, time.Second, 0.95, 0.01},
		{"10 Mb/s, 40 KB of queue", 10, 40_000, 200 * time.Microsecond, time.Second, 0.94, 0.01},
		{"20 Mb/s, 20 KB of queue", 20, 20_000, 200 * time.Microsecond, time.Second, 0.92, 0.03},
		{"20 Mb/s, 30 KB of queue", 20, 30_000, 200 * time.Microsecond, time.Second, 0.93, 0.02},
		{"20 Mb/s, 50 ms of queue", 20, 125_000, 200 * time.Microsecond, time.Second, 0.95, 0.01},
		{"300 Mb/s, 10 ms of queue", 300, 375_000, 200 * time.Microsecond, time.Second / 4, 0.95, 0.01},
		{"1 Gb/s, 100 KB of queue", 1000, 100_000, 200 * time.Microsecond, time.Second / 4, 0.94, 0.01},
		{"2.4 Gb/s, 100 KB of queue", 2400, 100_000, 200 * time.Microsecond, time.Second / 4, 0.92, 0.01},
		{"2.4 Gb/s, 200 KB of queue", 2400, 200_000, 200 * time.Microsecond, time.Second / 4, 0.95, 0.005},
		{"1 Gb/s, 10 ms, a queue as long", 1000, 1_250_000, 10 * time.Millisecond, time.Second, 0.95, 0.005},
		{"2.4 Gb/s, 10 ms, a queue as long", 2400, 3_000_000, 10 * time.Millisecond, time.Second, 0.95, 0.005},
		{"600 Mb/s, 40 ms, a queue as long", 600, 3_000_000, 40 * time.Millisecond, time.Second, 0.95, 0.005},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &narrow{t: t, rate: tt.mbps * 1e6 / 8, queue: tt.queue, rtt: tt.rtt, message: 61444,
				now: time.Unix(1000, 0), jitter: rand.New(rand.NewPCG(1, 1))}
			w.add(0)
			s := w.senders[0]
			w.run(tt.settle)
			got, c := s.got, *s.a.Counters()
			const long = 2 * time.Second
			w.run(long)
			after := s.a.Counters()
			if share := float64(s.got-got) * 8 / 1e6 / long.Seconds() / tt.mbps; share < tt.share {
				t.Errorf("%.2f of the rate, want %.2f", share, tt.share)
			}
			again := float64(after.Retransmits-c.Retransmits) / float64(after.PacketsOut-c.PacketsOut)
			if again > tt.again {
				t.Errorf("%.3f of the packets were sent again, want %.2f at most", again, tt.again)
			}
		})
	}
}
