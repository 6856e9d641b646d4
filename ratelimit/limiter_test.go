package ratelimit

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
)

const second = int64(time.Second)

var options = Options{Unknown: 100, Returning: 1000, Source: 50}

func source(n uint64) (g ib.GID) {
	g[0], g[1] = 0xfe, 0x80
	binary.BigEndian.PutUint64(g[8:], n)
	return g
}

func newLimiter() *Limiter { return New(options, [2]uint64{0x1234567890abcdef, 0xfedcba0987654321}) }

// While there is little to do everybody passes, and nothing is remembered.
func TestCalm(t *testing.T) {
	l := newLimiter()
	for i := range 2000 {
		if now := int64(i) * second / 90; !l.Allow(now, source(uint64(i))) {
			t.Fatalf("unknown source %d was turned away at 90 a second", i)
		}
	}
	if l.met.young != nil {
		t.Error("it remembers, though there was no need")
	}
}

// In a flood from sources that come once, few of them pass, and one that comes
// again after 250 ms does, whenever that is.
func TestFlood(t *testing.T) {
	const rate, seconds = 50_000, 10
	l := newLimiter()
	r := rand.New(rand.NewPCG(1, 2))
	passed := 0
	honest := map[int]ib.GID{} // by when they come again
	tries, second1 := 0, 0
	for i := range rate * seconds {
		now := int64(i) * second / rate
		if l.Allow(now, source(r.Uint64())) {
			passed++
		}
		if i > rate/2 && i%997 == 0 { // 50 a second
			who := source(r.Uint64())
			tries++
			if l.Allow(now, who) {
				second1++
			} else {
				honest[i+rate/4] = who
			}
		}
		if who, ok := honest[i]; ok {
			if l.Allow(now, who) {
				second1++
			} else {
				t.Errorf("%v came twice and was turned away twice", who)
			}
		}
	}
	if most := options.Unknown*(seconds+2) + rate*seconds/1000; passed > most {
		t.Errorf("%d forged packets passed, at most %d should", passed, most)
	}
	t.Logf("%d of %d forged packets passed, %d of %d honest sources", passed, rate*seconds, second1, tries)
}

// One source that floods gets its share, and others are none the worse for it.
func TestOneSource(t *testing.T) {
	l := newLimiter()
	passed, others := 0, 0
	for i := range 100_000 {
		now := int64(i) * second / 50_000
		if l.Allow(now, source(7)) {
			passed++
		}
		if i%1000 == 0 && l.Allow(now, source(uint64(1000+i))) {
			others++
		}
	}
	if passed > 3*2*options.Source || others != 100 {
		t.Errorf("it passed %d times, others %d of 100 times", passed, others)
	}
}

// What was turned away is forgotten after two generations at the latest, and the
// clock may stand still or jump.
func TestForgets(t *testing.T) {
	l := newLimiter()
	now := second
	for i := range 2*options.Unknown + 1 {
		l.Allow(now, source(uint64(i)))
	}
	who := source(1 << 40)
	if l.Allow(now, who) {
		t.Fatal("there was no room left for an unknown source")
	}
	if !l.met.seen(now+generation, hash(l.keys, who)) {
		t.Error("forgotten after one generation")
	}
	if l.met.seen(now+5*generation, hash(l.keys, who)) {
		t.Error("remembered after five")
	}
	if l.met.seen(now-100*generation, hash(l.keys, source(1<<41))) {
		t.Error("a clock that went back makes it remember what never was")
	}
}

func TestNoAllocation(t *testing.T) {
	l := newLimiter()
	i := uint64(0)
	if n := testing.AllocsPerRun(10_000, func() { i++; l.Allow(int64(i)*1000, source(i)) }); n > 0.01 {
		t.Errorf("%v allocations per packet", n)
	}
}

func BenchmarkFlood(b *testing.B) {
	l := newLimiter()
	r := rand.New(rand.NewPCG(1, 2))
	i := int64(0)
	for b.Loop() {
		i++
		l.Allow(i*20_000, source(r.Uint64()))
	}
}

// A source has its share of a second beside a flood of others, and no more.
func TestShares(t *testing.T) {
	const most, flood = 1000, 200_000
	s := NewShares([2]uint64{1, 2})
	for sec := range int64(3) {
		passed, late := 0, 0
		for i := range flood {
			now := sec*second + int64(i)*5000
			s.Take(now, ib.GID{1, 12: byte(i >> 16), 13: byte(i >> 8), 14: byte(i)}, most)
			if i%100 == 0 && s.Take(now, ib.GID{15: 7}, most) {
				passed++
			}
			if i%1000 == 0 && s.Take(now, ib.GID{15: 8}, most) {
				late++
			}
		}
		if passed > most || passed < most*7/10 {
			t.Errorf("second %d: %d packets of a source with 2000 passed, want about %d", sec, passed, most)
		}
		if late != flood/1000 {
			t.Errorf("second %d: %d packets of one with few passed, want all %d", sec, late, flood/1000)
		}
	}
}
