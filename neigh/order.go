package neigh

import (
	"ipoibcm/lru"
	"ipoibcm/wire/encap"
)

// An order is a list of entries, the one used longest ago first.
type order = lru.List[entry, *entry]

// index adds e, whose link-layer address has been set, as the last to the ring of entries with
// that address.
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

// at returns the entries with link-layer address link, in the order of index.
func (t *Table) at(link encap.LinkAddr) (es []*entry) {
	first := t.byLink[link.Key()]
	for e := first; e != nil; e = e.next {
		if es = append(es, e); e.next == first {
			break
		}
	}
	return es
}
