package eventqueue

import (
	"slices"
	"testing"
)

// What a step adds comes after what waited before, and Run within a step does nothing.
func TestOrder(t *testing.T) {
	var q Queue[int]
	var got []int
	var step func(n int)
	step = func(n int) {
		got = append(got, n)
		if n < 100 {
			q.Add(100 + n)
			if q.Run(step) {
				t.Error("Run within a step ran")
			}
		}
	}
	q.Add(1)
	q.Add(2)
	if !q.Run(step) {
		t.Error("Run did not run")
	}
	if want := []int{1, 2, 101, 102}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
