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
