package softiwarp

import (
	"encoding/binary"
	"os"
	"sync"
	"unsafe"

	"ipoibcm/mpa"
	"ipoibcm/verbs"
)

// maxRegions bounds the registered regions of a device.
const maxRegions = 1 << 20

// A memory is the table of registered regions, by STag. Peers' access happens
// under the lock of a queue pair, which is what Deregister waits for.
type memory struct {
	rand func([]byte)

	mu      sync.RWMutex
	regions map[uint32]*region
	next    uint64 // offset of the next region, as peers name it
}

type region struct {
	verbs.Region
	access  verbs.Access
	invalid bool // by a peer's Send with Invalidate
}

// init sets m up. Offsets start at a random place and grow: they are names for
// peers, and the real addresses are nobody's business.
func (m *memory) init(rand func([]byte)) {
	var b [8]byte
	rand(b[:])
	m.rand, m.regions = rand, make(map[uint32]*region)
	m.next = binary.LittleEndian.Uint64(b[:]) & 0x3fff_ffff_f000
}

// alignedMake returns n zero octets that start at a page boundary.
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
		r.RKey = random32(m.rand)
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

// look returns n octets at offset to of the region stag, or what is wrong with
// that: the causes are those of DDP for Writes (RFC 5041 section 7.2), of RDMAP
// for the source of a Read (RFC 5040 section 4.8).
func (m *memory) look(stag uint32, to uint64, n int, access verbs.Access) ([]byte, *mpa.TermError) {
	cause := [...]mpa.Cause{mpa.DDPInvalidSTag, mpa.DDPBounds, mpa.DDPWrap}
	if access == verbs.RemoteRead {
		cause = [...]mpa.Cause{mpa.RDMAPInvalidSTag, mpa.RDMAPBounds, mpa.RDMAPWrap}
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	r := m.regions[stag]
	switch {
	case r == nil || r.invalid:
		return nil, terminate(cause[0], "STag %#x", stag)
	case r.access&access != access:
		return nil, terminate(mpa.RDMAPAccess, "STag %#x", stag)
	case to+uint64(n) < to:
		return nil, terminate(cause[2], "%d octets at %#x", n, to)
	case to < r.Addr || to-r.Addr > uint64(len(r.Buf)) || uint64(n) > uint64(len(r.Buf))-(to-r.Addr):
		return nil, terminate(cause[1], "%d octets at %#x", n, to)
	}
	off := to - r.Addr
	return r.Buf[off : off+uint64(n) : off+uint64(n)], nil
}

// invalidate ends the use of a region by peers.
func (m *memory) invalidate(stag uint32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.regions[stag]
	if r == nil || r.invalid || r.access == 0 {
		return false
	}
	r.invalid = true
	return true
}

func random32(rand func([]byte)) uint32 {
	var b [4]byte
	rand(b[:])
	return binary.LittleEndian.Uint32(b[:])
}
