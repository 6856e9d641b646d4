package logqueue

import (
	"cmp"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// maxKinds bounds the kinds that have a limit each. Messages are constants, so there are fewer kinds; any
// further ones share a limit.
const maxKinds = 256

// otherKinds is the name of the kinds that share a limit.
const otherKinds = "others"

// A limiter lets some lines of each kind through: a burst, then one per interval.
type limiter struct {
	mu    sync.Mutex
	burst int
	every time.Duration
	kinds map[kind]*bucket
}

type kind struct {
	message string
	level   slog.Level
}

// A bucket holds tokens, burst at most. Each line of its kind takes one.
type bucket struct {
	tokens int
	filled time.Time // when the last token came
	left   uint64    // lines left out and not reported yet
	since  time.Time // when the first of these was left out
}

func (l *limiter) init(burst int, every time.Duration) {
	l.burst, l.every = cmp.Or(burst, defBurst), cmp.Or(every, defEvery)
	l.kinds = map[kind]*bucket{}
}

// allow reports whether a line is let through. If so, left is how many lines of its kind were left out since
// the last one that was let through or reported.
func (l *limiter) allow(message string, level slog.Level, now time.Time) (left uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.bucket(kind{message, level}, now)
	if n := now.Sub(b.filled) / l.every; n > 0 {
		b.tokens = min(l.burst, b.tokens+int(min(n, time.Duration(l.burst))))
		b.filled = b.filled.Add(n * l.every)
	}
	if b.tokens == 0 {
		if b.left == 0 {
			b.since = now
		}
		b.left++
		return 0, false
	}
	if b.tokens == l.burst {
		b.filled = now // the interval begins with the first line
	}
	b.tokens--
	left, b.left = b.left, 0
	return left, true
}

func (l *limiter) bucket(k kind, now time.Time) *bucket {
	b := l.kinds[k]
	if b == nil && len(l.kinds) >= maxKinds {
		k = kind{message: otherKinds}
		b = l.kinds[k]
	}
	if b == nil {
		b = &bucket{tokens: l.burst, filled: now}
		l.kinds[k] = b
	}
	return b
}

// A leftOut says how many lines of a kind were left out and are not reported yet.
type leftOut struct {
	kind  string
	count uint64
}

// overdue returns the kinds that have unreported lines of which the first was left out at least tellEvery
// ago. If all is set, it returns all kinds that have unreported lines. It counts the lines as reported.
func (l *limiter) overdue(now time.Time, all bool) (out []leftOut) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, b := range l.kinds {
		if b.left > 0 && (all || now.Sub(b.since) >= tellEvery) {
			out = append(out, leftOut{k.message, b.left})
			b.left = 0
		}
	}
	slices.SortFunc(out, func(x, y leftOut) int { return cmp.Compare(x.kind, y.kind) })
	return out
}
