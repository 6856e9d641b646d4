// Package regions keeps the memory regions of a software provider: it gives them keys and
// addresses, and finds the octets that a peer names by key and address.
package regions

import (
	"encoding/binary"
	"os"
	"sync"
	"unsafe"

	"ipoibcm/verbs"
)

// Max is how many regions a Table holds at most.
const Max = 1 << 20

// A Table holds registered regions by R_Key (an STag in iWARP). Init makes it ready; after that any
// goroutine may call any method.
//
// The caller of Find uses the octets that it returned without a lock: a provider must not let
// Deregister run at the same time.
type Table struct {
	rand func([]byte)

	mu      sync.RWMutex
	regions map[uint32]*region
	next    uint64 // address of the next region, as peers name it
}

type region struct {
	verbs.Region
	access  verbs.Access
	invalid bool // by Invalidate, for a SEND with invalidate
}

// Init sets t up. rand fills a slice with random octets. Addresses start at a random place and
// grow. They are only names for peers, which so learn no real address.
func (t *Table) Init(rand func([]byte)) {
	var b [8]byte
	rand(b[:])
	t.rand, t.regions = rand, make(map[uint32]*region)
	t.next = binary.LittleEndian.Uint64(b[:]) & 0x3fff_ffff_f000
}

// Alloc returns n zero octets that start at a page boundary. They live on Go's heap, so their use
// after the device was closed is harmless.
func Alloc(n int) []byte {
	page := os.Getpagesize()
	b := make([]byte, n+page)
	off := -int(uintptr(unsafe.Pointer(&b[0]))) & (page - 1)
	return b[off : off+n : off+n]
}

// Register adds buf as a region in which peers may do what access says. It fails with
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
	t.next += (uint64(len(buf)) + 0x1fff) &^ 0xfff // at least a page of unused addresses between regions
	t.regions[r.RKey] = r
	return &r.Region, nil
}

// Deregister removes a region that Register made. For any other region it returns
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

// A Refusal says why Find returns no octets.
type Refusal uint8

// The values of Refusal. Find checks for them in this order.
const (
	Found    Refusal = iota
	NoRegion         // no region has the key, or it was invalidated
	NoAccess         // peers do not have all of that access to the region
	Wraps            // the range wraps: it goes past the largest 64-bit address
	Outside          // the range is not within the region
)

// Find returns the n octets at addr in the region that key names, if peers have all of access to
// that region.
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

// Invalidate ends the use of a region by peers. It returns false if key names no region that peers
// could use.
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
