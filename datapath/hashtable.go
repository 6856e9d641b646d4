package datapath

import (
	"math"
	"math/bits"
	"sync/atomic"
)

// minSlots is the number of slots of an empty table.
const minSlots = 16

// An entry is what the destination cache has of a destination. Both may change.
type entry struct {
	path atomic.Pointer[Path]
	mark atomic.Uint64 // holds a mark
}

func (e *entry) set(p *Path, m mark) {
	e.path.Store(p)
	e.mark.Store(uint64(m))
}

// A dest is an entry with its key, which never changes.
type dest[K comparable] struct {
	key K
	entry
	next atomic.Pointer[dest[K]]
}

// A hashTable finds entries by key. One goroutine changes it; any number may look into it
// meanwhile, without locks. An entry is whole before a slot or another entry leads to it, and
// still leads on to its successors after it was taken out.
//
// Entries with one slot are chained. To grow and to shrink, entries are copied into new slots,
// because readers may still follow the old chains. Each change copies a few, so that none takes
// long. Until all are copied, a reader that finds no entry in the new slots looks into the old
// ones.
type hashTable[K comparable] struct {
	slots atomic.Pointer[slots[K]]
	n     atomic.Int64     // entries
	hash  func(k K) uint32 // for the writer; readers inline it

	copied int       // slots of the old ones that have been copied; for the writer
	chunk  []dest[K] // allocated entries for copies to come
}

type slots[K comparable] struct {
	shift uint8 // how far to shift a hash right to get the number of a slot
	slot  []atomic.Pointer[dest[K]]
	old   atomic.Pointer[slots[K]] // the slots before these, until all their entries are here too
}

// How many entries and slots one change copies at most; the last chain is copied whole even beyond
// copyEntries. A growing table has one entry per slot on average, and all are copied long before it
// grows again. A shrinking one has one entry per four slots.
const (
	copyEntries = 8
	copySlots   = 32
)

func newHashTable[K comparable](hash func(K) uint32) *hashTable[K] {
	t := &hashTable[K]{hash: hash}
	t.slots.Store(newSlots[K](minSlots))
	return t
}

// newSlots returns n empty slots; n is a power of two.
func newSlots[K comparable](n int) *slots[K] {
	return &slots[K]{shift: uint8(32 - bits.TrailingZeros(uint(n))), slot: make([]atomic.Pointer[dest[K]], n)}
}

// find returns the entry of k, whose hash is h, nil if there is none. It loads the pointer to the
// old slots before it looks into the new ones: once the last entry is copied, nothing leads to the
// old slots any more.
func (t *hashTable[K]) find(h uint32, k K) *entry {
	s := t.slots.Load()
	old := s.old.Load()
	for d := s.slot[h>>s.shift].Load(); d != nil; d = d.next.Load() {
		if d.key == k {
			return &d.entry
		}
	}
	if old == nil {
		return nil
	}
	for d := old.slot[h>>old.shift].Load(); d != nil; d = d.next.Load() {
		if d.key == k {
			return &d.entry
		}
	}
	return nil
}

// get is find for the writer.
func (t *hashTable[K]) get(k K) *entry { return t.find(t.hash(k), k) }

// set adds or replaces the entry of k.
func (t *hashTable[K]) set(k K, p *Path, m mark) {
	if e := t.get(k); e != nil {
		e.set(p, m)
		return
	}
	if n := int(t.n.Add(1)); n > len(t.slots.Load().slot) {
		t.resize(2 * len(t.slots.Load().slot))
	}
	t.slots.Load().insert(new(dest[K]), t.hash(k), k, p, m)
	t.copy(copyEntries, copySlots)
}

// del removes the entry of k and reports whether there was one.
func (t *hashTable[K]) del(k K) bool {
	s, h := t.slots.Load(), t.hash(k)
	found := s.del(h, k)
	if old := s.old.Load(); old != nil {
		found = old.del(h, k) || found
	}
	if !found {
		return false
	}
	if n := int(t.n.Add(-1)); n < len(s.slot)/4 && len(s.slot) > minSlots {
		t.resize(len(s.slot) / 2)
	}
	t.copy(copyEntries, copySlots)
	return true
}

// del takes the entry of k, whose hash is h, out of its chain.
func (s *slots[K]) del(h uint32, k K) bool {
	at := &s.slot[h>>s.shift]
	for d := at.Load(); d != nil; at, d = &d.next, d.next.Load() {
		if d.key == k {
			at.Store(d.next.Load())
			return true
		}
	}
	return false
}

// copyChunk is how many entries copy allocates at once. A copied entry that is still in use keeps
// the whole chunk in memory: at worst that doubles the table.
const copyChunk = 64

// resize begins to give t n slots.
func (t *hashTable[K]) resize(n int) {
	t.copy(math.MaxInt, math.MaxInt) // ends the resize before, which is usually done already
	s := newSlots[K](n)
	s.old.Store(t.slots.Load())
	t.copied = 0
	t.slots.Store(s)
}

// copy copies some entries of the old slots into the new ones.
func (t *hashTable[K]) copy(entries, slots int) {
	s := t.slots.Load()
	old := s.old.Load()
	if old == nil {
		return
	}
	for ; entries > 0 && slots > 0 && t.copied < len(old.slot); slots-- {
		for d := old.slot[t.copied].Load(); d != nil; d = d.next.Load() {
			if len(t.chunk) == 0 {
				t.chunk = make([]dest[K], copyChunk)
			}
			s.insert(&t.chunk[0], t.hash(d.key), d.key, d.path.Load(), mark(d.mark.Load()))
			t.chunk = t.chunk[1:]
			entries--
		}
		t.copied++
	}
	if t.copied == len(old.slot) {
		s.old.Store(nil)
		t.chunk = nil
	}
}

// insert makes d the entry of k, first in its chain.
func (s *slots[K]) insert(d *dest[K], h uint32, k K, p *Path, m mark) {
	at := &s.slot[h>>s.shift]
	d.key = k
	d.set(p, m)
	d.next.Store(at.Load())
	at.Store(d)
}
