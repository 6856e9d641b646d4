// Package regions keeps the memory regions of a provider that is a program: it
// gives them keys and addresses, and finds what a peer names by these.
package regions

import (
	"encoding/binary"
	"os"
	"sync"
	"unsafe"

	"ipoibcm/verbs"
)

// Max bounds the regions of a Table.
const Max = 1 << 20

// A Table holds registered regions by R_Key (an STag in iWARP). Init makes it
// ready; after that any goroutine may call any method.
//
// What Find returned is used without a lock: a provider must not let Deregister
// run at the same time.
type Table struct {
	rand func([]byte)

	mu      sync.RWMutex
	regions map[uint32]*region
	next    uint64 // address of the next region, as peers name it
}

type region struct {
	verbs.Region
	access  verbs.Access
	invalid bool // by a SEND with invalidate
}

// Init sets t up. rand fills a slice with random octets. Addresses start at a
// random place and grow: they are names for peers, and the real ones are
// nobody's business.
func (t *Table) Init(rand func([]byte)) {
	var b [8]byte
	rand(b[:])
	t.rand, t.regions = rand, make(map[uint32]*region)
	t.next = binary.LittleEndian.Uint64(b[:]) & 0x3fff_ffff_f000
}

// Alloc returns n zero octets that start at a page boundary. They live on Go's
// heap: a use after the device was closed is then harmless.
func Alloc(n int) []byte {
	page := os.Getpagesize()
	b := make([]byte, n+page)
	off := -int(uintptr(unsafe.Pointer(&b[0]))) & (page - 1)
	return b[off : off+n : off+n]
}

// Register takes buf in, with what peers may do there. It fails with
// [verbs.ErrNoResources] when there are [Max] regions.
func (t *Table) Register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.regions) >= Max {
		return nil, verbs.ErrNoResources
	}
	r := &region{access: access}
	for r.RKey == 0 || t.regions[r.RKey] != nil {
		var b [4]byte
		t.rand(b[:])
		r.RKey = binary.LittleEndian.Uint32(b[:])
	}
	r.Buf, r.LKey, r.Addr = buf, r.RKey, t.next
	t.next += (uint64(len(buf)) + 0x1fff) &^ 0xfff // a page of nothing between regions
	t.regions[r.RKey] = r
	return &r.Region, nil
}

// Deregister forgets a region that Register made; any other is
// [verbs.ErrInvalid].
func (t *Table) Deregister(r *verbs.Region) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r == nil || t.regions[r.RKey] == nil || &t.regions[r.RKey].Region != r {
		return verbs.ErrInvalid
	}
	delete(t.regions, r.RKey)
	return nil
}

// A Refusal says why Find has nothing to return.
type Refusal uint8

// The values of Refusal, in the order in which they are looked for.
const (
	Found    Refusal = iota
	NoRegion         // no such key, or invalidated
	NoAccess         // the region is not open for that
	Wraps            // the range goes past the end of all addresses
	Outside          // the range is not within the region
)

// Find returns the n octets at addr of the region that key names, if peers may
// do all of access there.
func (t *Table) Find(key uint32, addr, n uint64, access verbs.Access) ([]byte, Refusal) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	r := t.regions[key]
	switch {
	case r == nil || r.invalid:
		return nil, NoRegion
	case r.access&access != access:
		return nil, NoAccess
	case addr+n < addr:
		return nil, Wraps
	case addr < r.Addr || addr-r.Addr > uint64(len(r.Buf)) || n > uint64(len(r.Buf))-(addr-r.Addr):
		return nil, Outside
	}
	off := addr - r.Addr
	return r.Buf[off : off+n : off+n], Found
}

// Invalidate ends the use of a region by peers. It reports false where there was
// none.
func (t *Table) Invalidate(key uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.regions[key]
	if r == nil || r.invalid || r.access == 0 {
		return false
	}
	r.invalid = true
	return true
}
