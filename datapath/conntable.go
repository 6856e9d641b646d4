package datapath

import (
	"iter"
	"maps"
	"sync/atomic"

	"ipoibcm/ib"
)

// connParts is how many parts a connTable has.
const connParts = 64

// A connTable finds connections by QPN. Completion handlers read it without a lock, so a change
// copies the map that it changes. The table has parts so that a change copies one part only.
type connTable [connParts]atomic.Pointer[map[ib.QPN]*Conn]

func (t *connTable) get(q ib.QPN) *Conn {
	if m := t[q%connParts].Load(); m != nil {
		return (*m)[q]
	}
	return nil
}

// set makes c the connection of q, or removes q's connection if c is nil. Only one goroutine may
// call it at a time.
func (t *connTable) set(q ib.QPN, c *Conn) {
	m := map[ib.QPN]*Conn{}
	if old := t[q%connParts].Load(); old != nil {
		m = maps.Clone(*old)
	}
	if m[q] = c; c == nil {
		delete(m, q)
	}
	t[q%connParts].Store(&m)
}

// all yields the connections in no order.
func (t *connTable) all() iter.Seq[*Conn] {
	return func(yield func(*Conn) bool) {
		for i := range t {
			if m := t[i].Load(); m != nil {
				for _, c := range *m {
					if !yield(c) {
						return
					}
				}
			}
		}
	}
}
