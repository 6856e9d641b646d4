package ratelimit

import (
	"math/bits"
	"time"

	"ipoibcm/ib"
)

const (
	// generation is how long a source is remembered, at least; at most twice as
	// long. Repeats of ARP, ND and CM messages come sooner.
	generation = int64(2 * time.Second)
	// memoryBits is a power of two. At 50,000 sources a second about one in two
	// thousand is taken for another.
	memoryBits = 1 << 22
)

// A Memory knows which sources were there in the last 2 to 4 seconds. It keeps bits, not sources, so a
// source is now and then taken for another. The bits are allocated when they are first needed.
type Memory struct {
	keys [2]uint64
	// Bits of this generation and of the one before.
	young, old []uint64
	since      int64 // when young began
}

// NewMemory returns a Memory; keys are as in [New].
func NewMemory(keys [2]uint64) *Memory { return &Memory{keys: keys} }

// Seen reports whether this queue pair of src has been here lately, and remembers it.
func (m *Memory) Seen(now int64, src ib.GID, qpn ib.QPN) bool {
	h, _ := bits.Mul64(hash(m.keys, src)+uint64(qpn)*m.keys[0], m.keys[1]|1)
	return m.seen(now, h)
}

func (m *Memory) seen(now int64, h uint64) bool {
	if m.young == nil {
		m.young, m.old, m.since = make([]uint64, memoryBits/64), make([]uint64, memoryBits/64), now
	}
	if age := now - m.since; age >= generation || age < 0 {
		m.young, m.old = m.old, m.young
		clear(m.young)
		if age >= 2*generation || age < 0 {
			clear(m.old)
		}
		m.since = now
	}
	young, old := true, true
	for range 3 {
		i, bit := h%memoryBits/64, uint64(1)<<(h%64)
		young = young && m.young[i]&bit != 0
		old = old && m.old[i]&bit != 0
		m.young[i] |= bit
		h = bits.RotateLeft64(h, -22)
	}
	return young || old
}
