// Package eventqueue keeps the events of a machine in order while one is carried out
// and causes others.
package eventqueue

// A Queue is events that wait for their turn. The zero value is empty. It is not safe
// for concurrent use.
type Queue[E any] struct {
	events  []E
	running bool
}

// Add lets ev wait behind the others.
func (q *Queue[E]) Add(ev E) { q.events = append(q.events, ev) }

// Run gives step the events in order, those too that step adds, until none waits. If Run
// is running further up, that one gives them, and this one returns false at once.
func (q *Queue[E]) Run(step func(E)) bool {
	if q.running {
		return false
	}
	q.running = true
	for len(q.events) > 0 {
		ev := q.events[0]
		q.events = q.events[1:]
		step(ev)
	}
	q.events, q.running = nil, false
	return true
}
