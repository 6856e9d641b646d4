package main

import (
	"math"
	"slices"
)

// median returns the middle value of v, or the mean of the two in the middle. It is
// NaN if v is empty.
func median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// quantile returns the smallest value of v that at least the share q of v does
// not exceed. It is NaN if v is empty. quantile sorts v.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	slices.Sort(v)
	i := int(math.Ceil(q*float64(len(v)))) - 1
	return v[min(max(i, 0), len(v)-1)]
}

// ratios divides the values of two contenders in the same rounds. If one of them
// stopped early only the rounds of both count. A round with den zero is left out.
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

// beyond returns num - times*den for each round that both have.
func beyond(num, den []float64, times float64) []float64 {
	out := make([]float64, min(len(num), len(den)))
	for i := range out {
		out[i] = num[i] - times*den[i]
	}
	return out
}
