// Package simfabric is a network of simulated ports on virtual time. Each
// [Port] is a [verbs.Provider] on the same engine as provider/softroce; packets
// are whole IP packets with their ICRC, and may be lost, repeated, delayed,
// reordered, damaged or cut off.
//
// Everything runs on the goroutine that calls [Fabric.Step] or [Fabric.Run],
// and one seed decides everything: the same seed gives the same packets at the
// same times. Against the letter of the verbs contract, a port may be used from
// that goroutine only, and CQ.Wait does not block.
//
// It is for tests.
package simfabric

import (
	"cmp"
	"container/heap"
	"encoding/binary"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/roce/rocetest"
)

// Options say how good the network is. The zero value is a perfect network, with 10
// microseconds from port to port. Options may be changed while the network runs.
type Options struct {
	// Delay is the least time from port to port. Zero means 10 µs.
	Delay time.Duration
	// Jitter is the most that is added to Delay, at random for each packet: packets
	// that are closer together than that may change places.
	Jitter time.Duration
	// Loss, Dup, Reorder and Flip are the shares of packets, 0 to 1, that are
	// lost, delivered twice, held back for ReorderBy, and damaged in one bit.
	Loss, Dup, Reorder, Flip float64
	// ReorderBy is how long a packet is held back. Zero means 100 µs.
	ReorderBy time.Duration
	// Rate is the rate at which a port sends, in bits per second. Zero sets no limit.
	Rate int64
}

// Stats count what the network did.
type Stats struct {
	Sent, Delivered, Lost, Duplicated, Reordered, Flipped, Cut, NoRoute uint64
}

// A Fabric is the network.
type Fabric struct {
	Options
	Stats Stats
	// Filter, if not nil, sees each packet for each receiver and drops it by
	// returning false.
	Filter func(from, to *Port, ip []byte) bool

	seed   uint64
	rnd    *rand.Rand
	luck   *rand.Rand // decides what becomes of packets
	now    time.Time
	seq    uint64
	events eventHeap
	ports  []*Port
	flying int
	byGID  map[ib.GID]*Port // the first of ports with a GID
	group  map[*Port]int    // the part of the partition that a port is in; empty without partition
	digest uint64
}

// New returns a network without ports. Virtual time starts at the same moment for every
// seed.
func New(seed uint64, opts Options) *Fabric {
	return &Fabric{Options: opts, seed: seed, rnd: rand.New(rand.NewPCG(seed, 0x5eed)),
		luck: rand.New(rand.NewPCG(seed, 0x10c)), now: time.Unix(1_700_000_000, 0).UTC(), byGID: make(map[ib.GID]*Port)}
}

var seedFlag = flag.Uint64("sim.seed", 0, "run simulations with this seed only")

// Seed returns the value of the flag -sim.seed, zero if it was not given.
func Seed() uint64 { return *seedFlag }

// Seeds runs body as a subtest for the seeds 1 to n, or only for the one that -sim.seed
// names. If one fails, Seeds stops and prints how to run it again.
func Seeds(t *testing.T, n int, body func(t *testing.T, seed uint64)) {
	t.Helper()
	first, last := uint64(1), uint64(n)
	if *seedFlag != 0 {
		first, last = *seedFlag, *seedFlag
	}
	for seed := first; seed <= last; seed++ {
		ok := t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { body(t, seed) })
		if !ok {
			t.Fatalf("replay with: -run '^%s$' -sim.seed=%d", t.Name(), seed)
		}
	}
}

// Seed returns the seed with which the network was made.
func (f *Fabric) Seed() uint64 { return f.seed }

// Rand is the source of randomness for whatever runs on the fabric. What becomes
// of packets is drawn from another source, so that draws from Rand do not change it.
func (f *Fabric) Rand() *rand.Rand { return f.rnd }

// Now returns the virtual time.
func (f *Fabric) Now() time.Time { return f.now }

// Digest is a hash over all packets delivered so far and their times. Two runs
// with the same seed have equal digests.
func (f *Fabric) Digest() uint64 { return f.digest }

// A Timer is a function call at a later time.
type Timer struct {
	f  *Fabric
	ev *event
}

// Stop prevents the call. Stopping a zero Timer, or one that has fired, has no effect.
func (t Timer) Stop() {
	if t.ev != nil && t.ev.pos >= 0 {
		heap.Remove(&t.f.events, t.ev.pos)
	}
}

// Timers returns how many timers are set.
func (f *Fabric) Timers() int { return len(f.events) - f.flying }

// Flying returns how many packets are on their way.
func (f *Fabric) Flying() int { return f.flying }

// At makes the fabric call fn at time t, or as soon as possible if t has passed. Calls
// that are due at the same time happen in the order in which At was called.
func (f *Fabric) At(t time.Time, fn func()) Timer {
	if t.Before(f.now) {
		t = f.now
	}
	f.seq++
	ev := &event{at: t, seq: f.seq, f: fn}
	heap.Push(&f.events, ev)
	return Timer{f, ev}
}

// After makes the fabric call fn after d.
func (f *Fabric) After(d time.Duration, fn func()) Timer { return f.At(f.now.Add(d), fn) }

// Next returns the time of the next event, zero if there is none.
func (f *Fabric) Next() time.Time {
	if len(f.events) == 0 {
		return time.Time{}
	}
	return f.events[0].at
}

// Step runs the next event. It returns false if there is none.
func (f *Fabric) Step() bool {
	if f.Next().IsZero() {
		return false
	}
	ev := heap.Pop(&f.events).(*event)
	f.now = ev.at
	ev.f()
	return true
}

// Run runs all events up to the time until, and sets the clock to it.
func (f *Fabric) Run(until time.Time) {
	for next := f.Next(); !next.IsZero() && !next.After(until); next = f.Next() {
		f.Step()
	}
	if f.now.Before(until) {
		f.now = until
	}
}

// RunFor runs for d.
func (f *Fabric) RunFor(d time.Duration) { f.Run(f.now.Add(d)) }

// RunWhile runs as long as cond holds, at most for d; it reports whether cond became
// false.
func (f *Fabric) RunWhile(cond func() bool, d time.Duration) bool {
	end := f.now.Add(d)
	for cond() {
		if next := f.Next(); next.IsZero() || next.After(end) {
			return false
		}
		f.Step()
	}
	return true
}

// Partition cuts the network into parts that do not reach each other; ports that are in
// none of them form one more. Without arguments all ports reach each other again.
func (f *Fabric) Partition(parts ...[]*Port) {
	f.group = make(map[*Port]int)
	for i, part := range parts {
		for _, p := range part {
			f.group[p] = i + 1
		}
	}
}

// transmit carries an IP packet to the port that has the GID dst, or to all ports that have joined it.
func (f *Fabric) transmit(from *Port, dst ib.GID, ip []byte) {
	f.Stats.Sent++
	leave := f.now
	if f.Rate > 0 {
		if leave.Before(from.busyUntil) {
			leave = from.busyUntil
		}
		leave = leave.Add(time.Duration(int64(len(ip)) * 8 * int64(time.Second) / f.Rate))
		from.busyUntil = leave
	}
	found := false
	if dst.IsMulticast() {
		for _, to := range f.ports {
			if !to.closed && to != from && to.attached(dst) {
				found = true
				f.carry(from, to, ip, leave)
			}
		}
	} else if to := f.port(dst); to != nil {
		found = true
		f.carry(from, to, ip, leave)
	}
	if !found {
		f.Stats.NoRoute++
	}
}

// Inject carries an IP packet that no port has sent to the port with its
// destination, whatever the packet's source is. Of the Options only Delay applies to it.
func (f *Fabric) Inject(ip []byte) error {
	h, _, err := rocetest.ParseIP(ip)
	if err != nil {
		return err
	}
	to := f.port(ib.GIDFromAddr(h.Dst))
	if to == nil {
		f.Stats.NoRoute++
		return nil
	}
	f.flying++
	f.After(f.delay(), func() { f.deliver(to, ip) })
	return nil
}

// port returns the port with a GID, nil if there is none.
func (f *Fabric) port(gid ib.GID) *Port {
	if p := f.byGID[gid]; p != nil && !p.closed {
		return p
	}
	delete(f.byGID, gid)
	for _, p := range f.ports {
		if !p.closed && p.opts.GID == gid {
			f.byGID[gid] = p
			return p
		}
	}
	return nil
}

// carry drops one packet for one receiver, or schedules its delivery.
func (f *Fabric) carry(from, to *Port, ip []byte, leave time.Time) {
	switch {
	case f.group[from] != f.group[to], from.down, to.down, f.Filter != nil && !f.Filter(from, to, ip):
		f.Stats.Cut++
		return
	case f.chance(f.Loss):
		f.Stats.Lost++
		return
	}
	copies := 1
	if f.chance(f.Dup) {
		f.Stats.Duplicated++
		copies = 2
	}
	for range copies {
		at := leave.Add(f.delay())
		if f.Jitter > 0 {
			at = at.Add(time.Duration(f.luck.Int64N(int64(f.Jitter))))
		}
		if f.chance(f.Reorder) {
			f.Stats.Reordered++
			at = at.Add(cmp.Or(f.ReorderBy, 100*time.Microsecond))
		}
		b := ip
		if f.chance(f.Flip) {
			f.Stats.Flipped++
			b = slices.Clone(ip)
			bit := f.luck.IntN(len(b) * 8)
			b[bit/8] ^= 1 << (bit % 8)
		}
		f.flying++
		f.At(at, func() { f.deliver(to, b) })
	}
}

func (f *Fabric) deliver(to *Port, ip []byte) {
	f.flying--
	if to.closed || to.down {
		f.Stats.Cut++
		return
	}
	f.Stats.Delivered++
	h := fnv.New64a()
	b := binary.LittleEndian.AppendUint64(nil, f.digest)
	h.Write(binary.LittleEndian.AppendUint64(b, uint64(f.now.UnixNano())))
	h.Write(ip)
	f.digest = h.Sum64()
	to.input(ip)
}

func (f *Fabric) chance(p float64) bool { return p > 0 && f.luck.Float64() < p }

func (f *Fabric) delay() time.Duration { return cmp.Or(f.Delay, 10*time.Microsecond) }

type event struct {
	at  time.Time
	seq uint64
	pos int // in the heap, -1 if not there
	f   func()
}

type eventHeap []*event

func (h eventHeap) Len() int { return len(h) }
func (h eventHeap) Less(i, j int) bool {
	return cmp.Or(h[i].at.Compare(h[j].at), cmp.Compare(h[i].seq, h[j].seq)) < 0
}
func (h eventHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i, j
}
func (h *eventHeap) Push(x any) {
	ev := x.(*event)
	ev.pos = len(*h)
	*h = append(*h, ev)
}
func (h *eventHeap) Pop() any {
	old := *h
	ev := old[len(old)-1]
	ev.pos = -1
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return ev
}
