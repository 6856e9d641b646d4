package datapath

import (
	"math/bits"
	"sync/atomic"
)

// minSlots is the size of an empty table.
const minSlots = 16

// A dest is one entry of the destination cache. Only key does not change.
type dest[K comparable] struct {
	key  K
	path atomic.Pointer[Path]
	mark atomic.Uint64 // a mark
	next atomic.Pointer[dest[K]]
}

// A hashTable finds entries by key. One goroutine changes it, any number look
// into it meanwhile, without locks: an entry is whole before a slot or another
// entry leads to it, and leads on to its successors after it was taken out.
//
// Entries with one slot are chained. Growing and shrinking copy all entries into
// new slots, because readers may still follow the old chains.
type hashTable[K comparable] struct {
	slots atomic.Pointer[slots[K]]
	n     atomic.Int64     // entries; a chain has one on average
	hash  func(k K) uint32 // of the writer; readers inline it
}

type slots[K comparable] struct {
	shift uint8 // of a hash, to leave the number of a slot
	slot  []atomic.Pointer[dest[K]]
}

func newHashTable[K comparable](hash func(K) uint32) *hashTable[K] {
	t := &hashTable[K]{hash: hash}
	t.slots.Store(newSlots[K](minSlots))
	return t
}

// newSlots returns n empty slots; n is a power of two.
func newSlots[K comparable](n int) *slots[K] {
	return &slots[K]{shift: uint8(32 - bits.TrailingZeros(uint(n))), slot: make([]atomic.Pointer[dest[K]], n)}
}

// find returns the entry of k, whose hash is h, nil if there is none.
func (t *hashTable[K]) find(h uint32, k K) *dest[K] {
	s := t.slots.Load()
	for d := s.slot[h>>s.shift].Load(); d != nil; d = d.next.Load() {
		if d.key == k {
			return d
		}
	}
	return nil
}

// get is find for the writer.
func (t *hashTable[K]) get(k K) *dest[K] { return t.find(t.hash(k), k) }

// set adds or replaces the entry of k.
func (t *hashTable[K]) set(k K, p *Path, m mark) {
	if d := t.get(k); d != nil {
		d.path.Store(p)
		d.mark.Store(uint64(m))
		return
	}
	s := t.slots.Load()
	if n := int(t.n.Add(1)); n > len(s.slot) {
		s = t.resize(2 * len(s.slot))
	}
	s.insert(new(dest[K]), t.hash(k), k, p, m)
}

// del removes the entry of k and reports whether there was one.
func (t *hashTable[K]) del(k K) bool {
	s := t.slots.Load()
	at := &s.slot[t.hash(k)>>s.shift]
	for d := at.Load(); d != nil; at, d = &d.next, d.next.Load() {
		if d.key != k {
			continue
		}
		at.Store(d.next.Load())
		if n := int(t.n.Add(-1)); n < len(s.slot)/4 && len(s.slot) > minSlots {
			t.resize(len(s.slot) / 2)
		}
		return true
	}
	return false
}

// resizeChunk is how many entries resize allocates at once. What was not replaced
// since keeps the others of its chunk in memory: at worst that doubles the table.
const resizeChunk = 64

// resize gives t n slots.
func (t *hashTable[K]) resize(n int) *slots[K] {
	s := newSlots[K](n)
	old := t.slots.Load()
	var chunk []dest[K]
	for i := range old.slot {
		for d := old.slot[i].Load(); d != nil; d = d.next.Load() {
			if len(chunk) == 0 {
				chunk = make([]dest[K], resizeChunk)
			}
			s.insert(&chunk[0], t.hash(d.key), d.key, d.path.Load(), mark(d.mark.Load()))
			chunk = chunk[1:]
		}
	}
	t.slots.Store(s)
	return s
}

// insert makes d the entry of k, first in its chain.
func (s *slots[K]) insert(d *dest[K], h uint32, k K, p *Path, m mark) {
	at := &s.slot[h>>s.shift]
	d.key = k
	d.path.Store(p)
	d.mark.Store(uint64(m))
	d.next.Store(at.Load())
	at.Store(d)
}
