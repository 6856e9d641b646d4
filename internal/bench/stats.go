package main

import (
	"math"
	"slices"
)

// median returns the middle of v, or the mean of the two in the middle; NaN of
// nothing.
func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// quantile returns the smallest value of v that at least the share q of v does
// not exceed; NaN of nothing. v is sorted by it.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	slices.Sort(v)
	i := int(math.Ceil(q*float64(len(v)))) - 1
	return v[min(max(i, 0), len(v)-1)]
}

// ratios divides what two contenders had in the same rounds. Where one of them
// stopped early the rounds both had remain.
func ratios(num, den []float64) []float64 {
	n := min(len(num), len(den))
	out := make([]float64, 0, n)
	for i := range n {
		if den[i] != 0 {
			out = append(out, num[i]/den[i])
		}
	}
	return out
}

// beyond returns what the rounds of one contender have beyond so many times those of another.
func beyond(num, den []float64, times float64) []float64 {
	out := make([]float64, min(len(num), len(den)))
	for i := range out {
		out[i] = num[i] - times*den[i]
	}
	return out
}
