package counters

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
)

type byColour[C any] [3]C

func (*byColour[C]) Name(i int) string { return [...]string{"", "red", "blue"}[i] }

type counts[C any] struct {
	in   C           `name:"in"`
	Out  C           `name:"packets_out"`
	drop byColour[C] `name:"drop_"`
	last C
}

func told[C any](c *counts[C]) string {
	var l []string
	Each(c, func(name string, v uint64) { l = append(l, fmt.Sprint(name, "=", v)) })
	return strings.Join(l, " ")
}

func TestEach(t *testing.T) {
	plain := counts[uint64]{1, 2, byColour[uint64]{3, 4, 5}, 6}
	var counting counts[atomic.Uint64]
	counting.in.Store(1)
	counting.Out.Store(2)
	counting.drop[0].Store(3)
	counting.drop[1].Store(4)
	counting.drop[2].Store(5)
	counting.last.Store(6)
	const want = "in=1 packets_out=2 drop_red=4 drop_blue=5"
	if got := told(&plain); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := told(&counting); got != want {
		t.Errorf("atomic: %s, want %s", got, want)
	}
	sum := counts[uint64]{last: 100}
	Add(&sum, &plain)
	Add(&sum, &counting)
	if want := (counts[uint64]{2, 4, byColour[uint64]{6, 8, 10}, 112}); sum != want {
		t.Errorf("the sum is %v, want %v", sum, want)
	}
}

func TestAddAllocatesNothing(t *testing.T) {
	var sum, one counts[uint64]
	if n := testing.AllocsPerRun(100, func() { Add(&sum, &one) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
