package softroce

import (
	"sync"
	"sync/atomic"

	"ipoibcm/provider/softroce/engine"
	"ipoibcm/wire/roce"
)

const (
	// earlyLen holds one packet of the largest path MTU. 64 octets are more than the headers
	// that a peer can send; a payload of 4096 has no pad.
	earlyLen = 64 + 4096 + roce.ICRCLen
	// maxEarly bounds the packets that all queue pairs of a device keep because
	// earlier ones are missing: 33 MiB.
	maxEarly = 8 << 10
)

// An earlyPool lends the memory for packets that arrived early. The garbage collector may
// take what is not lent.
type earlyPool struct {
	pool  sync.Pool // of *[earlyLen]byte
	inUse atomic.Int32
	full  *atomic.Uint64 // counts packets that were dropped because maxEarly were kept
}

var _ engine.Buffers = (*earlyPool)(nil)

// Get implements [engine.Buffers]. A queue pair that holds more buffers than are left gets none,
// so that a few queue pairs whose peers never fill a gap do not take all.
func (p *earlyPool) Get(held int) []byte {
	if n := p.inUse.Add(1); held > int(maxEarly-n) {
		p.inUse.Add(-1)
		p.full.Add(1)
		return nil
	}
	if b, ok := p.pool.Get().(*[earlyLen]byte); ok {
		return b[:]
	}
	return new([earlyLen]byte)[:]
}

// Put implements [engine.Buffers].
func (p *earlyPool) Put(b []byte) {
	p.inUse.Add(-1)
	p.pool.Put((*[earlyLen]byte)(b[:earlyLen]))
}
