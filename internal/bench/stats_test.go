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
