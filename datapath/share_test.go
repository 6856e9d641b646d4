package datapath

import (
	pq "container/heap"
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
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

	now     time.Time
	free    time.Time // when the last packet has left the queue
	backlog []leaving
	events  arrivals
	senders []*sharer
	seq     int
}

type leaving struct {
	at time.Time
	n  int
}

type arrival struct {
	at  time.Time
	seq int
	to  *sharerEnd
	b   []byte
}

type arrivals []arrival

func (a arrivals) Len() int { return len(a) }
func (a arrivals) Less(i, j int) bool {
	if a[i].at.Equal(a[j].at) {
		return a[i].seq < a[j].seq
	}
	return a[i].at.Before(a[j].at)
}
func (a arrivals) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *arrivals) Push(x any)   { *a = append(*a, x.(arrival)) }
func (a *arrivals) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
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

func (e *sharerEnd) SendDone(wc *verbs.WC) {
	e.s.octets -= int64(e.s.w.message)
	e.s.limit.completed(wc.ID, int64(e.s.w.message), e.s.w.ns())
}

func (e *sharerEnd) RecvDone(wc *verbs.WC) {
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
				at = w.free.Add(w.rtt / 2)
			}
			w.seq++
			pq.Push(&w.events, arrival{at, w.seq, to, b})
		}
	}
}

// feed posts what the limit allows.
func (w *narrow) feed(s *sharer) {
	if w.now.Before(s.begin) {
		return
	}
	for s.limit.limit() > s.octets {
		s.id++
		if _, err := s.a.PostSend([]verbs.SendWR{{ID: s.id, Opcode: verbs.Send, Flags: verbs.Signaled, SG: []verbs.SGE{{Buf: s.buf}}}}, w.now); err != nil {
			s.id--
			return
		}
		s.octets += int64(w.message)
		s.limit.posted(s.id, s.octets, w.ns())
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
		if len(w.events) > 0 && w.events[0].at.Before(next) {
			next = w.events[0].at
		}
		if next.After(w.now) {
			w.now = next
		}
		for len(w.events) > 0 && !w.events[0].at.After(w.now) {
			a := pq.Pop(&w.events).(arrival)
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
	for seed := range uint64(4) {
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
		if rate := float64(sum) * 8 / 4e6; rate < 255 {
			t.Errorf("seed %d: %.0f Mb/s together, want 255 at least of 300", seed, rate)
		}
		for i, s := range w.senders {
			if share := float64(s.got) * 3 / float64(sum); share < 0.6 || share > 1.4 {
				t.Errorf("seed %d: sender %d has %.2f of an equal share, want 0.6 to 1.4", seed, i, share)
			}
		}
	}
}
