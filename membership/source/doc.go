// Package source finds the members of a link in files and in DNS, and keeps the last good
// list on disk.
//
// Nothing here decides which list is used: package membership does. A source reads again
// when it sees a change, and at intervals without one. It runs until its context ends.
package source

import (
	"context"
	"math/rand/v2"
	"time"
)

// jittered spreads what many hosts do at the same interval: 3/4 to 5/4 of d.
func jittered(d time.Duration) time.Duration {
	return d*3/4 + rand.N(d/2+1)
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
