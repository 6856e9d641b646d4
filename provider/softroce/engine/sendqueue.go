package engine

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A sendWQE is one posted send work request.
type sendWQE struct {
	id    uint64
	raddr uint64
	rkey  uint32
	imm   uint32 // immediate data, or the R_Key to invalidate
	len   uint32 // octets
	npkt  uint32 // packets, at least 1; for READ those of the response
	psn   ib.PSN // of the first packet
	op    verbs.Opcode
	flags verbs.SendFlags
	nsg   uint8
}

// end returns the PSN after the last packet of w.
func (w *sendWQE) end() ib.PSN { return w.psn.Add(int(w.npkt)) }

// A udDest is the destination of a UD work request.
type udDest struct {
	ah   verbs.AH
	qpn  ib.QPN
	qkey ib.QKey
}

// A sendQueue is a bounded ring of sendWQEs that grows when it is used.
// Positions count up for ever.
type sendQueue struct {
	depth, maxSGE int
	ud            bool
	head, tail    uint32 // oldest not completed; next to be posted
	slots         []sendWQE
	sgs           [][]byte // maxSGE per slot
	dests         []udDest // UD only
}

func (s *sendQueue) len() int { return int(s.tail - s.head) }

func (s *sendQueue) at(i uint32) *sendWQE { return &s.slots[int(i)&(len(s.slots)-1)] }

func (s *sendQueue) dest(i uint32) *udDest { return &s.dests[int(i)&(len(s.slots)-1)] }

// sg returns the buffers of the work request at position i.
func (s *sendQueue) sg(i uint32) [][]byte {
	k := int(i) & (len(s.slots) - 1)
	return s.sgs[k*s.maxSGE : k*s.maxSGE+int(s.slots[k].nsg)]
}

// push appends w and the buffers and destination of wr. There must be room.
func (s *sendQueue) push(w *sendWQE, wr *verbs.SendWR) {
	if s.len() == len(s.slots) {
		s.grow()
	}
	k := int(s.tail) & (len(s.slots) - 1)
	s.slots[k] = *w
	for j := range wr.SG {
		s.sgs[k*s.maxSGE+j] = wr.SG[j].Buf
	}
	if s.ud {
		s.dests[k] = udDest{wr.AH, wr.RemoteQPN, wr.RemoteQKey}
	}
	s.tail++
}

// pop removes the oldest work request and the references to its buffers.
func (s *sendQueue) pop() {
	clear(s.sg(s.head))
	if s.ud {
		*s.dest(s.head) = udDest{}
	}
	s.head++
}

func (s *sendQueue) grow() {
	n := max(ringStart, 2*len(s.slots))
	next := sendQueue{slots: make([]sendWQE, n), sgs: make([][]byte, n*s.maxSGE)}
	if s.ud {
		next.dests = make([]udDest, n)
	}
	for i := s.head; i != s.tail; i++ {
		from, to := int(i)&(len(s.slots)-1), int(i)&(n-1)
		next.slots[to] = s.slots[from]
		copy(next.sgs[to*s.maxSGE:(to+1)*s.maxSGE], s.sgs[from*s.maxSGE:])
		if s.ud {
			next.dests[to] = s.dests[from]
		}
	}
	s.slots, s.sgs, s.dests = next.slots, next.sgs, next.dests
}

// reset forgets everything and gives the memory back.
func (s *sendQueue) reset() {
	*s = sendQueue{depth: s.depth, maxSGE: s.maxSGE, ud: s.ud}
}

// slice sets dst to slices of the n octets of sg that start at octet off, without a copy.
// It returns how many slices these are.
func slice(dst *[MaxSGE][]byte, sg [][]byte, off, n int) (k uint8) {
	for _, b := range sg {
		if n == 0 {
			break
		}
		if off >= len(b) {
			off -= len(b)
			continue
		}
		b = b[off:min(len(b), off+n)]
		off, n = 0, n-len(b)
		dst[k] = b
		k++
	}
	return k
}

// scatter copies p into sg from octet off on; it stops where sg ends.
func scatter(sg [][]byte, off int, p []byte) {
	for _, b := range sg {
		if off >= len(b) {
			off -= len(b)
			continue
		}
		n := copy(b[off:], p)
		off, p = 0, p[n:]
		if len(p) == 0 {
			return
		}
	}
}

// size returns the number of octets in sg.
func size(sg [][]byte) (n int) {
	for _, b := range sg {
		n += len(b)
	}
	return n
}
