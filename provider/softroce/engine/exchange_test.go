package engine

import (
	"container/heap"
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

const (
	exchangeOctets = 16<<10 + 76 // a request of 16 KiB with its headers: 17 packets of 1024
	bulkOctets     = 61440
	wireDelay      = 20 * time.Microsecond // one way
	wirePacket     = time.Microsecond      // of one packet
)

// A troubled is a pair of hosts in virtual time: each reads its socket in turns, as softroce's receiver does, may be
// away from its processor, and has a wire to the other that loses and displaces packets.
type troubled struct {
	*pair
	rnd   *rand.Rand
	hosts [2]*troubledHost
	onway packetsOnWay
	seq   int
	cfg   trouble

	bulk    int // messages of A that B has not got
	asked   time.Time
	took    []time.Duration // by each exchange
	left    int             // exchanges to begin
	loseOne int             // which of the next packets is lost; negative: none
}

// A trouble is what goes wrong.
type trouble struct {
	loss, displaced float64 // of the packets
	away            float64 // chance that a host is away after a turn
	longest         time.Duration
	socket          int // packets that a host keeps while it is away
}

type troubledHost struct {
	*end
	free   time.Time // when its last packet has left
	back   time.Time // it is away until then
	socket [][]byte
}

type onWay struct {
	at  time.Time
	seq int
	to  *troubledHost
	b   []byte
}

type packetsOnWay []onWay

func (h packetsOnWay) Len() int { return len(h) }
func (h packetsOnWay) Less(i, j int) bool {
	return h[i].at.Before(h[j].at) || h[i].at.Equal(h[j].at) && h[i].seq < h[j].seq
}
func (h packetsOnWay) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *packetsOnWay) Push(x any)   { *h = append(*h, x.(onWay)) }
func (h *packetsOnWay) Pop() any {
	last := len(*h) - 1
	w := (*h)[last]
	*h = (*h)[:last]
	return w
}

func newTroubled(t testing.TB, seed uint64) *troubled {
	w := &troubled{rnd: rand.New(rand.NewPCG(seed, 16)), loseOne: -1, cfg: trouble{socket: 1 << 20}}
	w.pair = newPair(t, ib.RC, func(c *Config, attr *verbs.QPAttr) {
		c.Window, c.WindowOctets, c.MaxWindowOctets, c.AckWithin = 256, 512<<10, 8<<20, 64
		c.SendDepth, c.RecvDepth, c.MaxSendSGE, c.MaxRecvSGE = 128, 256, 1, 1
		attr.PathMTU = ib.MTU1024
	})
	for i, e := range []*end{w.a, w.b} {
		w.hosts[i] = &troubledHost{end: e}
		buf := make([]byte, 1<<16)
		for range 256 {
			e.postRecv(0, buf)
		}
	}
	return w
}

func (w *troubled) other(h *troubledHost) *troubledHost {
	if h == w.hosts[0] {
		return w.hosts[1]
	}
	return w.hosts[0]
}

// flush puts what h sends on its way.
func (w *troubled) flush(h *troubledHost) {
	for _, b := range w.output(h.end) {
		if h.free.Before(w.now) {
			h.free = w.now
		}
		h.free = h.free.Add(wirePacket)
		lost := w.rnd.Float64() < w.cfg.loss
		if w.loseOne >= 0 {
			lost = w.loseOne == 0
			w.loseOne--
		}
		if lost {
			continue
		}
		at := h.free.Add(wireDelay)
		if w.rnd.Float64() < w.cfg.displaced {
			at = at.Add(time.Duration(w.rnd.Int64N(int64(time.Millisecond))))
		}
		w.seq++
		heap.Push(&w.onway, onWay{at, w.seq, w.other(h), b})
	}
}

// send has h send a message of n octets.
func (w *troubled) send(h *troubledHost, n int) {
	wr := verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SG: sg(make([]byte, n))}
	if _, err := h.PostSend([]verbs.SendWR{wr}, w.now); err != nil {
		w.t.Fatal(err)
	}
	w.flush(h)
}

// turn is one of the receiver's: what has come, what is answered to it, ACKs and timers.
func (w *troubled) turn(h *troubledHost) {
	for len(h.socket) > 0 {
		n := min(len(h.socket), 64)
		for _, b := range h.socket[:n] {
			w.input(h.end, b)
		}
		h.socket = h.socket[n:]
		w.flush(h)
		w.answer(h)
		h.UrgeAck()
		w.flush(h)
	}
	if d := h.Deadline(); !d.IsZero() && !w.now.Before(d) {
		h.Wake(w.now)
		w.flush(h)
	}
	if w.rnd.Float64() < w.cfg.away {
		h.back = w.now.Add(time.Duration(w.rnd.Int64N(int64(w.cfg.longest))))
	}
}

// answer is what the programs at both ends do.
func (w *troubled) answer(h *troubledHost) {
	got := h.recv
	h.recv, h.send = nil, nil
	for _, wc := range got {
		h.postRecv(0, make([]byte, 1<<16))
		switch {
		case wc.ByteLen == bulkOctets:
			if w.bulk--; w.bulk%2 == 0 {
				w.send(h, 76)
			}
		case wc.ByteLen == exchangeOctets && h == w.hosts[1]:
			w.send(h, exchangeOctets)
		case wc.ByteLen == exchangeOctets:
			w.took = append(w.took, w.now.Sub(w.asked))
			w.ask()
		}
	}
}

// ask begins the next exchange.
func (w *troubled) ask() {
	if w.left > 0 {
		w.left--
		w.asked = w.now
		w.send(w.hosts[0], exchangeOctets)
	}
}

// run lets time pass until done, or for d.
func (w *troubled) run(d time.Duration, done func() bool) {
	for end := w.now.Add(d); w.now.Before(end) && !done(); {
		next := end
		earlier := func(t time.Time) {
			if t.Before(next) {
				next = t
			}
		}
		if len(w.onway) > 0 {
			earlier(w.onway[0].at)
		}
		for _, h := range w.hosts {
			if at := h.Deadline(); !at.IsZero() {
				if at.Before(h.back) {
					at = h.back
				}
				earlier(at)
			}
			if len(h.socket) > 0 {
				earlier(h.back)
			}
		}
		if next.After(w.now) {
			w.now = next
		}
		for len(w.onway) > 0 && !w.onway[0].at.After(w.now) {
			p := heap.Pop(&w.onway).(onWay)
			if len(p.to.socket) < w.cfg.socket {
				p.to.socket = append(p.to.socket, p.b)
			}
		}
		for _, h := range w.hosts {
			if !w.now.Before(h.back) {
				w.turn(h)
			}
		}
	}
}

// exchange has n exchanges made, one after the other, and returns what the longest took.
func (w *troubled) exchange(n int) (longest time.Duration) {
	w.took, w.left = w.took[:0], n
	w.ask()
	w.run(10*time.Second, func() bool { return len(w.took) == n })
	if len(w.took) < n {
		w.t.Fatalf("%d of %d exchanges within 10 s: A %+v\nB %+v", len(w.took), n, w.a.req, w.b.req)
	}
	for _, d := range w.took {
		longest = max(longest, d)
	}
	return longest
}

// transfer sends n messages of a stream.
func (w *troubled) transfer(n int) {
	posted := 0
	for w.bulk = n; w.bulk > 0; {
		for ; posted < n && w.a.sq.len() < 32; posted++ {
			w.send(w.hosts[0], bulkOctets)
		}
		left := w.bulk
		w.run(10*time.Second, func() bool { return w.bulk < left || w.bulk == 0 })
		if w.bulk == left {
			w.t.Fatalf("no message of a stream within 10 s: A %+v\nB %+v", w.a.req, w.b.rsp)
		}
	}
}

// After trouble of all kinds a request of 16 KiB has its answer after few MinProbe, whichever one packet of it, or of
// what acknowledges it, is lost: the loss of the last packets too, which nobody tells of but a probe.
func TestExchangesAfterTrouble(t *testing.T) {
	for seed := range uint64(100) {
		w := newTroubled(t, seed)
		w.exchange(20)
		pick := func(from ...float64) float64 { return from[w.rnd.IntN(len(from))] }
		w.cfg = trouble{
			loss: pick(0, 1e-4, 1e-3, 1e-2, 5e-2), displaced: pick(0, 1e-3, 1e-2),
			away: pick(0, 1e-3, 1e-2, 1e-1), longest: time.Duration(pick(1, 10, 200) * 1e6),
			socket: int(pick(1<<20, 2000, 300, 100)),
		}
		had := w.cfg
		w.transfer(30)
		if w.rnd.IntN(2) == 0 {
			w.exchange(20)
		}
		w.cfg = trouble{socket: 1 << 20}
		w.hosts[0].back, w.hosts[1].back = w.now, w.now
		w.exchange(1)
		for i := range 20 {
			w.loseOne = w.rnd.IntN(42)
			lost := w.loseOne
			most := 4 * MinProbe
			if i < 4 && had.away > 0 && had.longest > 10*time.Millisecond {
				most = 50 * time.Millisecond // a path that takes long is probed late
			}
			if took := w.exchange(1); took > most {
				t.Errorf("seed %d, %+v: exchange %d took %v, want %v at most; packet %d was lost", seed, had, i, took, most, lost)
			}
		}
	}
}
