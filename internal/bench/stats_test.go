package main

import (
	"math"
	"slices"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []float64
		want float64
	}{
		{"one", []float64{3}, 3},
		{"the middle, not the mean", []float64{100, 1, 2}, 2},
		{"two in the middle", []float64{4, 1, 9, 2}, 3},
	} {
		before := slices.Clone(tt.in)
		if got := median(tt.in); got != tt.want {
			t.Errorf("%s: median(%v) = %v, want %v", tt.name, tt.in, got, tt.want)
		}
		if !slices.Equal(tt.in, before) {
			t.Errorf("%s: the rounds were reordered to %v", tt.name, tt.in)
		}
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing = %v", got)
	}
}

func TestQuantile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i)
	}
	for _, tt := range []struct {
		q    float64
		in   []float64
		want float64
	}{
		{0.50, hundred, 50},
		{0.99, hundred, 99},
		{1, hundred, 100},
		{0, hundred, 1},
		{0.99, []float64{7, 5}, 7},
	} {
		if got := quantile(slices.Clone(tt.in), tt.q); got != tt.want {
			t.Errorf("quantile(%v) of %d values = %v, want %v", tt.q, len(tt.in), got, tt.want)
		}
	}
}

// A contender that stopped in round 3 is compared within rounds 1 and 2.
func TestRatios(t *testing.T) {
	if got := ratios([]float64{1, 6, 5}, []float64{2, 3}); !slices.Equal(got, []float64{0.5, 2}) {
		t.Errorf("ratios = %v", got)
	}
	if got := ratios([]float64{1}, []float64{0}); len(got) != 0 {
		t.Errorf("a ratio to nothing = %v", got)
	}
}

// What is beyond another's is that of each round, and what one of them has not measured is none.
func TestBeyond(t *testing.T) {
	var r Report
	at := place{9000, family6}
	num, den := at.key(testPing, "v", oursRC), at.key(testPing, "v", raw)
	fill(&r, num, 0.9, 3, 0.7, 9)
	fill(&r, den, 0.2, 1, 0.1)
	v := target{num: num, den: den, less: 2, atMost: true, bound: 0.5, unit: "ms"}.judge(&r)
	if want := 0.5; v.Measured == nil || *v.Measured != want {
		t.Errorf("measured %v, want %v", v.Measured, want)
	}
	if !v.Met {
		t.Error("not met, and it is the bound itself")
	}
}

func TestShares(t *testing.T) {
	for _, tt := range []struct {
		name             string
		before, after    []float64
		least, most, sum float64
	}{
		{"alike", []float64{1, 5}, []float64{11, 15}, 1, 1, 20},
		{"one has half", []float64{0, 0, 0}, []float64{10, 25, 25}, 0.5, 1.25, 60},
		{"a connection came later", []float64{0, 0}, []float64{10, 10, 99}, 1, 1, 20},
		{"nothing", []float64{7, 7}, []float64{7, 7}, 0, 0, 0},
		{"nobody", nil, nil, 0, 0, 0},
	} {
		least, most, sum := shares(tt.before, tt.after)
		for i, v := range [][2]float64{{least, tt.least}, {most, tt.most}, {sum, tt.sum}} {
			if v[0] != v[1] {
				t.Errorf("%s: %s is %v, want %v", tt.name, [...]string{"least", "most", "sum"}[i], v[0], v[1])
			}
		}
	}
}

// What a queue pair sends again comes on top of what TCP does.
func TestResent(t *testing.T) {
	before := resent{again: 10, sent: 1000, qpAgain: 1, qpSent: 100}
	after := resent{again: 30, sent: 2000, qpAgain: 4, qpSent: 200}
	if got, want := after.since(before), 5.0; got != want {
		t.Errorf("%v %%, want %v", got, want)
	}
	if got, want := after.qpSince(before), 3.0; got != want {
		t.Errorf("%v %% of the queue pair's, want %v", got, want)
	}
	if got := before.since(before); got != 0 {
		t.Errorf("%v %% of nothing, want 0", got)
	}
}
