package neigh

import "time"

// An instant is a time in nanoseconds since the base of the Table. It has a third of the size of a
// time.Time. Zero means never.
type instant int64

// before is how long the base lies before the first Step, so that instants stay positive if a
// clock goes back.
const before = 50 * 365 * 24 * time.Hour

func (t *Table) instant(at time.Time) instant {
	if t.base.IsZero() {
		t.base = at.Add(-before)
	}
	return instant(max(1, at.Sub(t.base)))
}

// time returns the time of i; the zero time if i is never.
func (t *Table) time(i instant) time.Time {
	if i == 0 {
		return time.Time{}
	}
	return t.base.Add(time.Duration(i))
}

// since returns how long ago i was.
func (t *Table) since(i instant) time.Duration { return time.Duration(t.instant(t.now) - i) }

// set sets tm to fire at time at.
func (t *Table) set(tm *timer, at time.Time) { t.timers.set(tm, t.instant(at)) }
