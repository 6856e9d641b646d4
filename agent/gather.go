package agent

import (
	"context"
	"iter"
	"time"
)

// Bounds of what a list costs the driver at a time: packets that nobody knows the way of yet, and
// messages of peers, wait meanwhile.
const (
	gatherFor  = 100 * time.Microsecond
	gatherLook = 8   // elements between two looks at the clock
	gatherMost = 256 // elements: they are copied on nobody's time but the asker's
)

// gather collects what seq yields. The driver runs it a little at a time, and other events have
// their turn in between, so that the list is of no single moment.
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
