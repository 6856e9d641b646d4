package ratelimit

import (
	"testing"
	"time"
)

func TestBucket(t *testing.T) {
	const rate, burst = 10, 4
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var b Bucket
	for _, tt := range []struct {
		name string
		at   time.Duration
		want int // of ten that are asked for
	}{
		{"at first it is full", 0, 4},
		{"it is empty then", 0, 0},
		{"one comes each tenth of a second", 100 * time.Millisecond, 1},
		{"what is too little for one is not lost", 250 * time.Millisecond, 1},
		{"but adds up", 300 * time.Millisecond, 1},
		{"a clock that steps back brings nothing", -time.Hour, 0},
		{"and costs nothing for long", -time.Hour + 200*time.Millisecond, 2},
		{"there are no more than the burst", time.Hour, 4},
	} {
		got := 0
		for range 10 {
			if b.Take(start.Add(tt.at), rate, burst) {
				got++
			}
		}
		if got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
	b.Spend(10)
	if b.Full(start.Add(time.Hour+time.Second), rate) {
		t.Error("after a second it is full, want four missing")
	}
	if got := b.Left(start.Add(time.Hour+time.Second), rate, burst); got != 0 {
		t.Errorf("%v are left of a debt that is paid, want 0", got)
	}
	if !b.Full(start.Add(2*time.Hour), rate) {
		t.Error("after an hour it is not full")
	}
}

// At the bound a key gets a bucket only if others are full, which is looked for once a second.
func TestBuckets(t *testing.T) {
	const rate, most = 1, 2
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var all Buckets[string]
	for _, tt := range []struct {
		name, key string
		at        time.Duration
		want      bool
		n         int
	}{
		{"the first", "a", 0, true, 1},
		{"the second", "b", 0, true, 2},
		{"one that is there", "a", 0, true, 2},
		{"no room", "c", 0, false, 2},
		{"not looked for again yet", "c", 999 * time.Millisecond, false, 2},
		{"only a is not full", "c", 1500 * time.Millisecond, true, 2},
		{"b is gone", "b", 1500 * time.Millisecond, false, 2},
	} {
		b := all.Get(start.Add(tt.at), tt.key, rate, most)
		if got := b != nil; got != tt.want {
			t.Errorf("%s: a bucket: %v, want %v", tt.name, got, tt.want)
		}
		if b != nil {
			b.Take(start.Add(tt.at), rate, most)
		}
		if got := all.Len(); got != tt.n {
			t.Errorf("%s: %d buckets, want %d", tt.name, got, tt.n)
		}
	}
}
