package softroce

import (
	"encoding/binary"
	"os"
	"sync"
	"unsafe"

	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
)

// maxRegions bounds the registered regions of a device.
const maxRegions = 1 << 20

// A memory is the table of registered regions. Access by peers happens under
// the lock of a queue pair, which is what Deregister waits for.
type memory struct {
	opts *Options

	mu      sync.RWMutex
	regions map[uint32]*region // by key
	next    uint64             // virtual address of the next region
}

type region struct {
	verbs.Region
	access  verbs.Access
	invalid bool // by a peer's SEND with invalidate, or ours
}

var _ engine.Memory = (*memory)(nil)

// init sets m up. Virtual addresses start at a random place and grow: they are
// names for peers, and the real ones are nobody's business.
func (m *memory) init(opts *Options) {
	var b [8]byte
	opts.random(b[:])
	m.opts, m.regions = opts, make(map[uint32]*region)
	m.next = binary.LittleEndian.Uint64(b[:]) & 0x3fff_ffff_f000
}

// alignedMake returns n zero octets that start at a page boundary. They live on
// Go's heap: a use after the device was closed is then harmless.
func alignedMake(n int) []byte {
	page := os.Getpagesize()
	b := make([]byte, n+page)
	off := -int(uintptr(unsafe.Pointer(&b[0]))) & (page - 1)
	return b[off : off+n : off+n]
}

func (m *memory) register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.regions) >= maxRegions {
		return nil, verbs.ErrNoResources
	}
	r := &region{access: access}
	for r.RKey == 0 || m.regions[r.RKey] != nil {
		var b [4]byte
		m.opts.random(b[:])
		r.RKey = binary.LittleEndian.Uint32(b[:])
	}
	r.Buf, r.LKey, r.Addr = buf, r.RKey, m.next
	m.next += (uint64(len(buf)) + 0x1fff) &^ 0xfff // a page of nothing between regions
	m.regions[r.RKey] = r
	return &r.Region, nil
}

func (m *memory) deregister(r *verbs.Region) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r == nil || m.regions[r.RKey] == nil || &m.regions[r.RKey].Region != r {
		return verbs.ErrInvalid
	}
	delete(m.regions, r.RKey)
	return nil
}

// Lookup implements [engine.Memory].
func (m *memory) Lookup(rkey uint32, va uint64, n int, access verbs.Access) ([]byte, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	r := m.regions[rkey]
	if r == nil || r.invalid || r.access&access != access || n < 0 || va < r.Addr {
		return nil, false
	}
	off := va - r.Addr
	if off > uint64(len(r.Buf)) || uint64(n) > uint64(len(r.Buf))-off {
		return nil, false
	}
	return r.Buf[off : off+uint64(n) : off+uint64(n)], true
}

// Invalidate implements [engine.Memory].
func (m *memory) Invalidate(rkey uint32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.regions[rkey]
	if r == nil || r.invalid || r.access == 0 {
		return false
	}
	r.invalid = true
	return true
}
