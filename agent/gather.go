package agent

import (
	"context"
	"iter"
	"slices"
	"time"
)

// Bounds of the time that a list takes from the driver at once. Packets whose path is not known yet, and
// messages of peers, wait meanwhile.
const (
	gatherFor  = 100 * time.Microsecond
	gatherLook = 8   // elements between two looks at the clock
	gatherMost = 256 // elements at once; the goroutine that asks copies them, not the driver
)

// gather collects what seq yields. The driver runs seq a little at a time, with other events in between, so
// the list is not of one moment.
func gather[T any](ctx context.Context, a *Agent, seq iter.Seq[T]) (all []T, err error) {
	next, stop := iter.Pull(seq)
	defer stop()
	part := make([]T, 0, gatherMost) // here, so that the driver has nothing to allocate
	for more := true; more; all = append(all, part...) {
		_, err := ask(ctx, a, func() struct{} {
			part = part[:0]
			began := time.Now()
			for len(part) < gatherMost {
				var v T
				if v, more = next(); !more {
					break
				}
				part = append(part, v)
				if len(part)%gatherLook == 0 && time.Since(began) >= gatherFor {
					break
				}
			}
			return struct{}{}
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// viewList gathers what seq yields, in the order of compare, and makes an element of a document of each.
func viewList[T, D any](ctx context.Context, a *Agent, seq iter.Seq[T], compare func(x, y T) int,
	view func(x T, now time.Time) D) ([]D, error) {
	all, err := gatherSorted(ctx, a, seq, compare)
	now := time.Now()
	out := make([]D, 0, len(all))
	for _, x := range all {
		out = append(out, view(x, now))
	}
	return out, err
}

// gatherSorted is gather in the order of compare. An element that came twice, because the list changed
// meanwhile, is there once.
func gatherSorted[T any](ctx context.Context, a *Agent, seq iter.Seq[T], compare func(x, y T) int) ([]T, error) {
	all, err := gather(ctx, a, seq)
	slices.SortFunc(all, compare)
	return slices.CompactFunc(all, func(x, y T) bool { return compare(x, y) == 0 }), err
}
