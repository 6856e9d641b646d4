// Package eventqueue keeps the events of a machine in order while one is carried out
// and causes others.
package eventqueue

// A Queue holds events that wait for their turn. The zero value is empty. It is not safe for concurrent
// use.
type Queue[E any] struct {
	events  []E
	running bool
}

// Add puts ev behind the other events.
func (q *Queue[E]) Add(ev E) { q.events = append(q.events, ev) }

// Run calls step with each event in order, also with those that step adds, until none waits. If Run is
// called from within step, it returns false at once, and the outer Run takes the events.
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
