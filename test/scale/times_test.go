package scale

import (
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"ipoibcm/internal/long"
)

// maxRatio is how many times as long as among 100 neighbours a Step among 100,000 may
// take. What is there besides caches that do not hold them is the depth of a heap.
const maxRatio = 4

// rounds is how many times maxRuns each operation is timed for one figure.
const rounds = 5

// A timing is what one operation costs.
type timing struct {
	Name   string
	Median time.Duration // of its Steps
	Mean   time.Duration // of all of its Steps together
}

// stopwatch times each operation at f, and all of them together.
func stopwatch(f *field) (all time.Duration, each []timing) {
	f.afar = true // where no cache has been
	defer func() { f.afar = false }()
	var total []time.Duration
	for _, op := range operations {
		var ds []time.Duration
		var sum time.Duration
		for range rounds {
			f.onStep = nil
			f.refresh()
			f.onStep = func(d time.Duration) { ds, sum = append(ds, d), sum+d }
			for range maxRuns {
				op.do(f)
			}
		}
		f.onStep = nil
		total = append(total, ds...)
		each = append(each, timing{Name: op.name, Median: median(ds), Mean: sum / (rounds * maxRuns)})
	}
	return median(total), each
}

// allocations returns how many each operation takes at f.
func allocations(f *field) (each []float64) {
	for _, op := range operations {
		f.refresh()
		each = append(each, testing.AllocsPerRun(maxRuns-1, func() { op.do(f) }))
	}
	return each
}

func median(ds []time.Duration) time.Duration {
	slices.Sort(ds)
	return ds[len(ds)/2]
}

// TestSteps compares a machine with few neighbours and one with very many: the same
// events take exactly as many allocations, and, in the long form, about as long.
func TestSteps(t *testing.T) {
	few, many, tries := 100, long.Of(20_000, 100_000), 10
	if raceDetector {
		many, tries = 2000, 1
	}
	a, b := newField(newCrowd(t, crowdOptions(few)), few), newField(newCrowd(t, crowdOptions(many)), many)
	x, y := allocations(a), allocations(b)
	if raceDetector {
		return // it allocates by itself, and is slow in its own way
	}
	for i, op := range operations {
		if x[i] != y[i] {
			t.Errorf("%s: %v allocations among %d neighbours, %v among %d", op.name, x[i], few, y[i], many)
		}
	}
	if !long.Form() {
		return // times are compared in the long form only
	}
	var quick, slow time.Duration
	for try := 1; ; try++ {
		quick, _ = stopwatch(a)
		slow, _ = stopwatch(b)
		if slow <= maxRatio*quick {
			break
		}
		if try == tries {
			t.Errorf("a Step among %d neighbours takes %v, among %d %v: more than %d times as long, %d times in a row",
				few, quick, many, slow, maxRatio, tries)
			break
		}
	}
	t.Logf("median Step %v among %d neighbours, %v among %d", quick, few, slow, many)
}

// maxSetupAllocs bounds the allocations of one set-up by one machine, the script of its peers included.
const maxSetupAllocs = 200

// cpu returns the processor time that the process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// setups returns the processor time that one machine takes to set up one of n
// connections with peers it knows, by REQs of its own or of theirs: its half of the
// exchange, the script of the peers and the collection of garbage included. It also returns how many
// allocations that takes.
func setups(tb testing.TB, n int, ours bool) (each time.Duration, allocs float64) {
	c := newCrowd(tb, crowdOptions(n))
	c.meetOnly(n)
	var m0, m1 runtime.MemStats
	runtime.ReadMemStats(&m0)
	before := cpu()
	for i := range n {
		if ours {
			c.step(c.packet(i, 64))
		} else {
			c.dials(i, i+1)
		}
	}
	d := cpu() - before
	runtime.ReadMemStats(&m1)
	if got := c.m.Status().Conns; got != n {
		tb.Fatalf("%d connections, want %d", got, n)
	}
	return d / time.Duration(n), float64(m1.Mallocs-m0.Mallocs) / float64(n)
}

// TestSetups: a set-up takes so many allocations at most, and among 10,000 others about as long as
// among 100.
func TestSetups(t *testing.T) {
	long.Only(t)
	if raceDetector {
		t.Skip("is about speed")
	}
	const few, many, tries = 100, maxConnField, 10
	for _, ours := range []bool{true, false} {
		for try := 1; ; try++ {
			quick, fewAllocs := setups(t, few, ours)
			slow, manyAllocs := setups(t, many, ours)
			if max(fewAllocs, manyAllocs) > maxSetupAllocs {
				t.Errorf("REQs of ours %v: %.0f allocations among %d, %.0f among %d, want %d at most", ours, fewAllocs, few,
					manyAllocs, many, maxSetupAllocs)
			}
			t.Logf("REQs of ours %v: %v and %.1f allocations among %d, %v and %.1f among %d", ours, quick, fewAllocs, few,
				slow, manyAllocs, many)
			if slow <= maxRatio*quick {
				break
			}
			if try == tries {
				t.Errorf("REQs of ours %v: a set-up among %d others takes %v, among %d %v: more than %d times as long, %d times "+
					"in a row", ours, few, quick, many, slow, maxRatio, tries)
				break
			}
		}
	}
}
