package fqcodel

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

const ms = int64(time.Millisecond)

// hashOf makes the hash of flow i of n, all of which differ.
func hashOf(i, n int) uint32 { return uint32((uint64(i)<<32 + uint64(n) - 1) / uint64(n)) }

// A world is a scheduler whose packets a test numbers itself.
type world struct {
	*Scheduler
	t    *testing.T
	free []int32
	flow map[int32]int // of packets that wait
	rate int64         // of each destination; 0: not known
}

func newWorld(t *testing.T, o Options, n int) *world {
	w := &world{Scheduler: New(o, n), t: t, flow: map[int32]int{}}
	for i := range n {
		w.free = append(w.free, int32(n-1-i))
	}
	return w
}

func (w *world) put(q *Queue, flow, octets int, ecn bool, now int64) int32 {
	id := w.free[len(w.free)-1]
	w.free = w.free[:len(w.free)-1]
	w.flow[id] = flow
	w.Enqueue(q, id, octets, hashOf(flow, len(w.flows)), ecn, now)
	return id
}

// at returns flow i of q.
func (w *world) at(q *Queue, i int) *flow { return w.flowOf(q, hashOf(i, len(w.flows))) }

// makeOld gives q 15 packets of a flow that has had its first turn.
func (w *world) makeOld(q *Queue, flow int) {
	w.t.Helper()
	for range 20 {
		w.put(q, flow, 500, false, 0)
	}
	for range 5 {
		w.take(q, 0)
	}
}

// take dequeues one packet, and returns its flow, -1 if nothing was left.
func (w *world) take(q *Queue, now int64) (flow int, mark bool, drops []int) {
	w.t.Helper()
	id, mark, ok, dropped := w.Dequeue(q, w.rate, now, nil)
	for _, d := range dropped {
		drops = append(drops, w.gone(d))
	}
	if !ok {
		return -1, false, drops
	}
	return w.gone(id), mark, drops
}

// gone notes that a packet came out, which must have been in.
func (w *world) gone(id int32) int {
	w.t.Helper()
	flow, ok := w.flow[id]
	if !ok {
		w.t.Fatalf("packet %d came out and was not waiting", id)
	}
	delete(w.flow, id)
	w.free = append(w.free, id)
	return flow
}

// order dequeues until nothing is left.
func (w *world) order(q *Queue, now int64) (flows []int) {
	w.t.Helper()
	for {
		f, _, _ := w.take(q, now)
		if f < 0 {
			return flows
		}
		flows = append(flows, f)
	}
}

// RFC 8290 section 4.1: queues take turns, by octets; section 4.2: what is new goes
// first, once.
func TestOrder(t *testing.T) {
	type put struct{ flow, octets, times int }
	for _, tt := range []struct {
		name string
		puts []put
		want []int
	}{
		{"one flow keeps its order", []put{{1, 1000, 3}}, []int{1, 1, 1}},
		{"two flows of full packets take turns", []put{{1, 1514, 3}, {2, 1514, 3}}, []int{1, 2, 1, 2, 1, 2}},
		{"small packets go several at a turn", []put{{1, 1514, 2}, {2, 500, 6}}, []int{1, 2, 2, 2, 2, 1, 2, 2}},
		{"GSO packets count as their octets", []put{{1, 4 * 1514, 2}, {2, 1514, 6}}, []int{1, 2, 2, 2, 2, 1, 2, 2}},
	} {
		w := newWorld(t, Options{}, 64)
		var q Queue
		for _, p := range tt.puts {
			for range p.times {
				w.put(&q, p.flow, p.octets, false, 0)
			}
		}
		if got := w.order(&q, 0); !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

// A ping beside a flow with much waiting goes first, even if the other's turn is not
// over (RFC 8290 section 4.2).
func TestSparseFlowFirst(t *testing.T) {
	w := newWorld(t, Options{}, 64)
	var q Queue
	for range 20 {
		w.put(&q, 1, 500, false, 0)
	}
	for i := range 5 { // four use up the first quantum, one the next in part
		if f, _, _ := w.take(&q, int64(i)); f != 1 {
			t.Fatalf("got flow %d, want 1", f)
		}
	}
	w.put(&q, 2, 64, false, 6)
	if f, _, _ := w.take(&q, 7); f != 2 {
		t.Errorf("got flow %d, want the sparse one, 2", f)
	}
}

// Among a hundred flows that have much waiting a packet of another one goes first, whatever their hashes are.
func TestFlowsHardlyMeet(t *testing.T) {
	const flows, tries = 100, 500
	rnd := rand.New(rand.NewPCG(1, 2))
	behind := 0
	for range tries {
		s := New(Options{}, 4*flows+1)
		var q Queue
		id := int32(0)
		for range flows {
			hash := rnd.Uint32()
			for range 4 {
				s.Enqueue(&q, id, 1514, hash, false, 0)
				id++
			}
		}
		for range flows { // their first turn
			s.Dequeue(&q, 0, 0, nil)
		}
		s.Enqueue(&q, id, 64, rnd.Uint32(), false, 0)
		if got, _, _, _ := s.Dequeue(&q, 0, 0, nil); got != id {
			behind++
		}
	}
	if behind > tries/100 {
		t.Errorf("%d of %d packets waited behind another flow's, want %d at most", behind, tries, tries/100)
	}
}

// A flow that empties and comes back at once is not new again: it is moved behind
// the old ones when its turn finds it empty (RFC 8290 section 4.2).
func TestEmptyFlowBecomesOld(t *testing.T) {
	w := newWorld(t, Options{}, 64)
	var q Queue
	w.makeOld(&q, 1)
	w.put(&q, 2, 64, false, 0)
	w.take(&q, 0) // that one
	w.take(&q, 0) // finds flow 2 empty
	w.put(&q, 2, 64, false, 0)
	if f, _, _ := w.take(&q, 0); f != 1 {
		t.Errorf("got flow %d, want 1, whose turn it is", f)
	}
}

// Destinations do not share turns; a flow of another destination with the same
// hash waits apart.
func TestDestinationsAreApart(t *testing.T) {
	w := newWorld(t, Options{Flows: 1}, 16)
	var a, b Queue
	w.put(&a, 0, 100, false, 0)
	w.put(&b, 0, 200, false, 0)
	w.put(&a, 0, 100, false, 0)
	expect.Equal(t, a.Len(), 2, "Len of a")
	expect.Equal(t, b.Len(), 1, "Len of b")
	if b.Octets() != 200 {
		t.Errorf("%d octets in b, want 200", b.Octets())
	}
	if n := len(w.order(&b, 0)); n != 1 {
		t.Errorf("%d packets out of b, want 1", n)
	}
	if n := len(w.order(&a, 0)); n != 2 {
		t.Errorf("%d packets out of a, want 2", n)
	}
	// What b used is free again, for anyone.
	w.put(&b, 0, 1, false, 0)
	w.put(&a, 0, 1, false, 0)
	if n := len(w.Purge(&a, nil)) + len(w.Purge(&b, nil)); n != 2 {
		t.Errorf("%d packets purged, want 2", n)
	}
}

// drain sends one packet each so many milliseconds to a queue that has always some
// waiting, and returns how many were dropped and marked in the time.
func drain(w *world, q *Queue, from, until, every int64, depth, octets int, ecn bool) (drops, marks int) {
	for now := from; now < until; now += every {
		for q.Len() < depth {
			w.put(q, 1, octets, ecn, now)
		}
		_, mark, d := w.take(q, now)
		drops += len(d)
		if mark {
			marks++
		}
	}
	return drops, marks
}

// RFC 8289 section 4: waits below the target do nothing however long; above it the
// first packet goes after an interval, and more and more after it.
func TestControlLaw(t *testing.T) {
	for _, tt := range []struct {
		name        string
		every       int64 // between two departures: 10 packets wait 10 times as long
		ecn         bool
		until       int64
		drops, mark int
	}{
		{"4 ms of waiting for ten seconds", ms * 4 / 10, false, 10000 * ms, 0, 0},
		{"10 ms of waiting for less than an interval", ms, false, 100 * ms, 0, 0},
		{"a little more: the first drop", ms, false, 115 * ms, 1, 0},
		{"the second comes an interval later", ms, false, 215 * ms, 2, 0},
		{"the third sooner, by the square root of two", ms, false, 285 * ms, 3, 0},
		{"what can be marked is not dropped", ms, true, 285 * ms, 0, 3},
	} {
		w := newWorld(t, Options{}, 64)
		var q Queue
		drops, marks := drain(w, &q, 0, tt.until, tt.every, 10, 1000, tt.ecn)
		if drops != tt.drops {
			t.Errorf("%s: %d drops, want %d", tt.name, drops, tt.drops)
		}
		if marks != tt.mark {
			t.Errorf("%s: %d marks, want %d", tt.name, marks, tt.mark)
		}
	}
	w := newWorld(t, Options{NoECN: true}, 64)
	var q Queue
	drops, marks := drain(w, &q, 0, 115*ms, ms, 10, 1000, true)
	expect.Equal(t, drops, 1, "without ECN: drops")
	expect.Equal(t, marks, 0, "without ECN: marks")
}

// One packet waits for as long as the one before it takes. That is a slow link, and
// no queue (RFC 8289 section 4.4).
func TestOnePacketIsNoQueue(t *testing.T) {
	w := newWorld(t, Options{}, 64)
	var q Queue
	if drops, _ := drain(w, &q, 0, 5000*ms, 26*ms, 2, 65520, false); drops != 0 {
		t.Errorf("%d drops with one packet behind each, want none", drops)
	}
	if drops, _ := drain(w, &q, 5000*ms, 10000*ms, 26*ms, 4, 65520, false); drops == 0 {
		t.Error("no drop with three packets behind each")
	}
}

// A flow with one packet at a time waits for the turns of others, on a slow link for longer than the
// target each time. None of it is dropped or marked: that would make nobody's wait shorter.
func TestLonePacketsAreNoQueue(t *testing.T) {
	for _, ecn := range []bool{false, true} {
		w := newWorld(t, Options{}, 64)
		var q Queue
		const every = 26 * ms // a message of 64 KB through 20 Mb/s
		sent, came := 0, 0
		for now := int64(0); now < 10_000*ms; now += every {
			for i := range 2 {
				for w.at(&q, i).octets < 3*61440 {
					w.put(&q, i, 61440, false, now-every/2)
				}
			}
			if w.at(&q, 2).packets == 0 {
				w.put(&q, 2, 88, ecn, now-every/2)
				sent++
			}
			for q.octets > 4*61440 { // what the small one leaves of a turn is taken by the next
				flow, mark, drops := w.take(&q, now)
				if slices.Contains(drops, 2) || mark {
					t.Fatalf("ECN %v: after %d ms the packet of the flow that has no other was dropped or marked", ecn, now/ms)
				}
				if flow == 2 {
					came++
				}
			}
		}
		if came < sent-1 || came < 100 {
			t.Errorf("ECN %v: %d of %d came", ecn, came, sent)
		}
	}
}

// What TestRandom puts into queues.
const modelPackets, modelQueues = 128, 5

// A model knows which packets wait in which queue, and in which order those of a flow came.
type model struct {
	*testing.T
	seed  uint64
	s     *Scheduler
	q     [modelQueues]Queue
	waits [modelQueues]map[int32]int // octets
	of    [modelPackets]struct {
		flow uint32
		seq  int
	}
	last map[[2]uint32]int // sequence number of a queue's flow that came out last
	free []int32
	seq  int
}

func newModel(t *testing.T, seed uint64, s *Scheduler) *model {
	m := &model{T: t, seed: seed, s: s, last: map[[2]uint32]int{}, free: make([]int32, modelPackets)}
	for i := range m.free {
		m.free[i] = int32(i)
	}
	for i := range m.waits {
		m.waits[i] = map[int32]int{}
	}
	return m
}

// enter puts a packet of n octets into queue k.
func (m *model) enter(k, n int, flow uint32, ect bool, now int64) {
	id := m.free[len(m.free)-1]
	m.free = m.free[:len(m.free)-1]
	m.seq++
	m.of[id].flow, m.of[id].seq = flow, m.seq
	m.waits[k][id] = n
	m.s.Enqueue(&m.q[k], id, n, flow, ect, now)
}

// leave notes that packet id came out of queue k, sent or dropped.
func (m *model) leave(k int, id int32) {
	m.Helper()
	if _, ok := m.waits[k][id]; !ok {
		m.Fatalf("seed %d: packet %d came out of queue %d and is not in it", m.seed, id, k)
	}
	delete(m.waits[k], id)
	m.free = append(m.free, id)
	key := [2]uint32{uint32(k), m.of[id].flow}
	if m.of[id].seq <= m.last[key] {
		m.Fatalf("seed %d: packet %d of flow %d overtook another", m.seed, id, m.of[id].flow)
	}
	m.last[key] = m.of[id].seq
}

// dequeue takes a packet out of queue k, which has one if any waits.
func (m *model) dequeue(k int, now int64) {
	m.Helper()
	id, _, ok, dropped := m.s.Dequeue(&m.q[k], int64(k)*12_500_000, now, nil)
	for _, d := range dropped {
		m.leave(k, d)
	}
	if ok {
		m.leave(k, id)
	} else if len(m.waits[k]) > 0 {
		m.Fatalf("seed %d: %d packets wait and none comes out", m.seed, len(m.waits[k]))
	}
}

// check compares what queue k says of itself.
func (m *model) check(k int) {
	m.Helper()
	octets := 0
	for _, n := range m.waits[k] {
		octets += n
	}
	if got, want := m.q[k].Len(), len(m.waits[k]); got != want {
		m.Fatalf("seed %d: Len %d, want %d", m.seed, got, want)
	}
	if got := m.q[k].Octets(); got != octets {
		m.Fatalf("seed %d: Octets %d, want %d", m.seed, got, octets)
	}
}

// searchFattest compares the fattest flow of queue k with all others.
func (m *model) searchFattest(k int) {
	m.Helper()
	q := &m.q[k]
	got, most := q.fattest(), 0
	for _, list := range []*flow{q.fresh.head, q.old.head} {
		for f := list; f != nil; f = f.next {
			most = max(most, f.octets)
		}
	}
	if got == nil && most > 0 || got != nil && got.octets != most {
		m.Fatalf("seed %d: %+v is the fattest flow, want one of %d octets", m.seed, got, most)
	}
}

// TestRandom checks what always holds: every packet comes out once, of its own
// queue, flows keep their order, and counts are right.
func TestRandom(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		m := newModel(t, seed, New(Options{Flows: 1 + r.IntN(8), Quantum: 300 + r.IntN(3000)}, modelPackets))
		now := int64(1)
		for range 5000 {
			k := r.IntN(modelQueues)
			now += int64(r.IntN(int(3 * ms)))
			switch op := r.IntN(100); {
			case op < 55 && len(m.free) > 0:
				n := 1 + r.IntN(9000)
				m.enter(k, n, uint32(r.IntN(6))<<29, r.IntN(2) == 0, now)
			case op < 95:
				m.dequeue(k, now)
			case op < 99:
				m.searchFattest(k)
				for _, d := range m.s.DropFattest(&m.q[k], r.IntN(20000), nil) {
					m.leave(k, d)
				}
			default:
				for _, d := range m.s.Purge(&m.q[k], nil) {
					m.leave(k, d)
				}
			}
			m.check(k)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	s := New(Options{}, 64)
	var q Queue
	dropped := make([]int32, 0, 64)
	now := int64(0)
	step := func() {
		for i := range int32(32) {
			s.Enqueue(&q, i, 1500, uint32(i)<<27, false, now)
		}
		for ok := true; ok; now += ms {
			_, _, ok, dropped = s.Dequeue(&q, 12_500_000, now, dropped[:0])
		}
	}
	if n := testing.AllocsPerRun(100, step); n > 0 {
		t.Errorf("%v allocations for 32 packets, want 0", n)
	}
}

func BenchmarkPacket(b *testing.B) {
	s := New(Options{}, 64)
	var q Queue
	for i := range int32(32) {
		s.Enqueue(&q, i, 1500, uint32(i)<<27, false, 0)
	}
	var dropped []int32
	now := int64(0)
	for b.Loop() {
		now += 1000
		id, _, _, d := s.Dequeue(&q, 12_500_000, now, dropped[:0])
		dropped = d
		s.Enqueue(&q, id, 1500, uint32(id)<<27, false, now)
	}
}

// A tcp is one TCP connection whose packets wait in a Queue, with SACK, in packets: CUBIC where it
// grows as Reno would (RFC 9438 section 4.3).
type tcp struct {
	octets, flow   int
	window, slow   float64 // congestion window; where slow start ends
	flight         int
	lost           int   // dropped, and not told of yet
	recover        int   // sent when the window was cut last
	sent, again    int   // packets
	acked          int64 // octets
	silentSince    int64 // no packet is in flight since
	acks           []int64
	retransmission int // packets that are to be sent again
}

// narrowTCP has n connections with packets of that size send through a Queue whose destination takes rate octets
// per second, for that time. One packet at a time is on its way, as sendLimit of datapath has it. It returns the
// share of the packets that were sent again, and that of the rate which arrived.
func narrowTCP(w *world, n, octets int, rate int64, told bool, end int64) (again, got float64) {
	const trip = ms / 2
	q := &Queue{}
	if told {
		w.rate = rate
	}
	conns := make([]*tcp, n)
	for i := range conns {
		conns[i] = &tcp{octets: octets, flow: i, window: 2, slow: 1e9}
	}
	took := int64(float64(octets) * 1e9 / float64(rate))
	busy, onWay := int64(0), -1
	for now := int64(0); now < end; now += ms / 10 {
		if onWay >= 0 && now >= busy {
			conns[onWay].acks = append(conns[onWay].acks, now+trip)
			onWay = -1
		}
		for _, c := range conns {
			c.step(w, q, now)
		}
		if onWay >= 0 {
			continue
		}
		f, _, drops := w.take(q, now)
		for _, d := range drops {
			conns[d].lost++
		}
		if onWay = f; f >= 0 {
			busy = max(busy, now-ms/10) + took
		}
	}
	var sent, repeated, acked float64
	for _, c := range conns {
		sent, repeated, acked = sent+float64(c.sent), repeated+float64(c.again), acked+float64(c.acked)
	}
	return repeated / sent, acked * 1e9 / float64(end) / float64(rate)
}

// step takes in ACKs and sends what the window allows.
func (c *tcp) step(w *world, q *Queue, now int64) {
	for len(c.acks) > 0 && c.acks[0] <= now {
		c.acks = c.acks[1:]
		c.flight--
		c.acked += int64(c.octets)
		c.learn()
		if c.window < c.slow {
			c.window++
		} else {
			c.window += 0.53 / c.window // 3 * (1 - 0.7) / (1 + 0.7)
		}
	}
	switch {
	case c.lost == 0 || c.flight > c.lost || len(c.acks) > 0:
		c.silentSince = now
	case now-c.silentSince > 200*ms: // only lost ones are in flight
		c.learn()
		c.window = 1
	}
	for float64(c.flight) < c.window && c.flight < 30 {
		if c.retransmission > 0 {
			c.retransmission--
			c.again++
		}
		w.put(q, c.flow, c.octets, false, now)
		c.flight++
		c.sent++
	}
}

// learn takes in which packets were lost.
func (c *tcp) learn() {
	if c.lost == 0 {
		return
	}
	c.flight -= c.lost
	c.retransmission += c.lost
	c.lost = 0
	if c.sent >= c.recover {
		c.window = max(2, c.window*0.7)
		c.slow, c.recover = c.window, c.sent+c.flight
	}
}

// TCP whose packets have 61 KB learns of a queue by few losses: CoDel lets them wait for packets of their own,
// if it knows how long one takes.
func TestLongPacketsOnASlowPath(t *testing.T) {
	for _, tt := range []struct {
		mbps, conns int
		most        float64 // of the packets, sent again
	}{
		{20, 1, 0.08}, {50, 1, 0.04}, {100, 1, 0.03}, {300, 1, 0.015}, {1000, 1, 0.006}, {100, 4, 0.2}, {300, 8, 0.3},
	} {
		var again, got [2]float64
		for i := range again {
			w := newWorld(t, Options{}, 512)
			again[i], got[i] = narrowTCP(w, tt.conns, 61444, int64(tt.mbps)*1e6/8, i == 1, 20e9)
		}
		if again[1] > tt.most {
			t.Errorf("%d Mb/s, %d streams: %.3f of the packets were sent again, want %.3f at most", tt.mbps,
				tt.conns, again[1], tt.most)
		}
		if again[1] > again[0]*3/4 {
			t.Errorf("%d Mb/s, %d streams: %.3f of the packets were sent again, want less than three quarters "+
				"of the %.3f without a rate", tt.mbps, tt.conns, again[1], again[0])
		}
		if got[1] < 0.98 {
			t.Errorf("%d Mb/s, %d streams: %.2f of the rate, want 0.98", tt.mbps, tt.conns, got[1])
		}
	}
}

// A flow is sparse as long as it has neither a packet that waits nor a turn to come, and no packet waits of which
// nobody knows the flow.
func TestSparse(t *testing.T) {
	s := New(Options{Flows: 8}, 32)
	var q, other Queue
	wants := func(hash uint32, want bool, when string) {
		t.Helper()
		if got := s.Sparse(&q, hash); got != want {
			t.Errorf("%s: Sparse is %v, want %v", when, got, want)
		}
	}
	wants(1, true, "nothing waits")
	s.Enqueue(&q, 0, 100, 1, false, 0)
	s.Enqueue(&other, 1, 100, 2, false, 0)
	wants(1, false, "a packet of it waits")
	wants(2, true, "one of the same hash waits in another queue")
	if _, _, ok, _ := s.Dequeue(&q, 0, 0, nil); !ok {
		t.Fatal("nothing is left")
	}
	wants(1, false, "it has a turn to come")
	if _, _, ok, _ := s.Dequeue(&q, 0, 0, nil); ok {
		t.Fatal("something is left")
	}
	wants(1, true, "its turn is over")
	for i := range int32(8) { // the other queue has one of the eight flows, so the last of these has none of its own
		s.Enqueue(&q, 2+i, 100, uint32(10+i), false, 0)
	}
	wants(99, false, "a packet waits that has no flow of its own")
}
