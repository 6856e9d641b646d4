package softroce

import (
	"sync"
	"sync/atomic"

	"ipoibcm/provider/softroce/engine"
	"ipoibcm/wire/roce"
)

const (
	// earlyLen holds one packet of the largest path MTU: the longest header a peer can
	// send, payload, pad and ICRC.
	earlyLen = 64 + 4096 + roce.ICRCLen
	// maxEarly bounds the packets that all queue pairs of a device keep because others
	// are missing: 33 MiB.
	maxEarly = 8 << 10
)

// An earlyPool is the memory of packets that arrived early. What nobody uses is the
// garbage collector's.
type earlyPool struct {
	pool  sync.Pool // of *[earlyLen]byte
	inUse atomic.Int32
	full  *atomic.Uint64 // counts packets that were dropped because maxEarly were kept
}

var _ engine.Buffers = (*earlyPool)(nil)

// Get implements [engine.Buffers]. No queue pair has more than are left for all others, so that a
// few whose peers never fill a gap do not take all.
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
