package simfabric

import "ipoibcm/verbs"

type region struct {
	verbs.Region
	access verbs.Access
}

// Alloc implements [verbs.Provider].
func (p *Port) Alloc(n int) (*verbs.Region, error) { return p.Register(make([]byte, n), 0) }

// Register implements [verbs.Provider].
func (p *Port) Register(buf []byte, access verbs.Access) (*verbs.Region, error) {
	if p.closed {
		return nil, verbs.ErrClosed
	}
	key := uint32(0)
	for key == 0 || p.regions[key] != nil {
		key = p.f.rnd.Uint32()
	}
	r := &region{Region: verbs.Region{Buf: buf, Addr: p.nextVA, LKey: key, RKey: key}, access: access}
	p.nextVA += (uint64(len(buf)) + 0x1fff) &^ 0xfff // a page of nothing in between
	p.regions[key] = r
	return &r.Region, nil
}

// Deregister implements [verbs.Provider].
func (p *Port) Deregister(r *verbs.Region) error {
	if r == nil || p.regions[r.LKey] == nil || &p.regions[r.LKey].Region != r {
		return verbs.ErrInvalid
	}
	delete(p.regions, r.LKey)
	return nil
}

// Regions returns how many regions are registered.
func (p *Port) Regions() int { return len(p.regions) }

// memory is a Port as [engine.Memory].
type memory Port

func (m *memory) Lookup(rkey uint32, va uint64, n int, access verbs.Access) ([]byte, bool) {
	r := m.regions[rkey]
	if r == nil || r.access&access != access || va < r.Addr {
		return nil, false
	}
	off := va - r.Addr
	if off > uint64(len(r.Buf)) || uint64(n) > uint64(len(r.Buf))-off {
		return nil, false
	}
	return r.Buf[off : off+uint64(n)], true
}

// Invalidate removes all rights of peers to a region. The owner may still use and
// deregister it. It returns false if peers have no rights.
func (m *memory) Invalidate(rkey uint32) bool {
	r := m.regions[rkey]
	if r == nil || r.access == 0 {
		return false
	}
	r.access = 0
	return true
}
