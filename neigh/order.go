package neigh

import "ipoibcm/wire/encap"

// An lru is n entries in the order of their use. Links are in the entries.
type lru struct {
	oldest, newest *entry
	n              int
}

// push adds e as the one used last.
func (l *lru) push(e *entry) {
	e.older, e.newer = l.newest, nil
	if l.newest == nil {
		l.oldest = e
	} else {
		l.newest.newer = e
	}
	l.newest = e
	l.n++
}

func (l *lru) remove(e *entry) {
	if e.older == nil {
		l.oldest = e.newer
	} else {
		e.older.newer = e.newer
	}
	if e.newer == nil {
		l.newest = e.older
	} else {
		e.newer.older = e.older
	}
	e.older, e.newer = nil, nil
	l.n--
}

// index adds e, whose link-layer address has been set, to the ring of those that
// share it, as the last.
func (t *Table) index(e *entry) {
	first := t.byLink[e.link.Key()]
	if first == nil {
		t.byLink[e.link.Key()], e.next, e.prev = e, e, e
		return
	}
	e.next, e.prev = first, first.prev
	e.prev.next, e.next.prev = e, e
}

// unindex takes e out of its ring if it is in one.
func (t *Table) unindex(e *entry) {
	if e.next == nil {
		return
	}
	if key := e.link.Key(); t.byLink[key] == e {
		if t.byLink[key] = e.next; e.next == e {
			delete(t.byLink, key)
		}
	}
	e.prev.next, e.next.prev = e.next, e.prev
	e.next, e.prev = nil, nil
}

// at returns the entries with link-layer address link, in the order they came.
func (t *Table) at(link encap.LinkAddr) (es []*entry) {
	first := t.byLink[link.Key()]
	for e := first; e != nil; e = e.next {
		if es = append(es, e); e.next == first {
			break
		}
	}
	return es
}
