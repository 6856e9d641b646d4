package softiwarp

import (
	"sync"

	"ipoibcm/verbs"
)

// A recvWQE is one receive work request.
type recvWQE struct {
	id  uint64
	sg  [][]byte
	len int // octets of sg
}

// A recvQueue is a bounded queue of receive work requests. The lock of its queue pair
// guards it, or the lock of its srq.
type recvQueue struct {
	depth, maxSGE int
	wqes          []recvWQE
}

func (r *recvQueue) post(wr *verbs.RecvWR) error {
	switch {
	case len(wr.SG) > r.maxSGE:
		return verbs.ErrInvalid
	case len(r.wqes) >= r.depth:
		return verbs.ErrQueueFull
	}
	w := recvWQE{id: wr.ID, sg: make([][]byte, len(wr.SG))}
	for i := range wr.SG {
		w.sg[i] = wr.SG[i].Buf
		w.len += len(wr.SG[i].Buf)
	}
	r.wqes = append(r.wqes, w)
	return nil
}

// postEach posts wrs up to the first that cannot be posted, and returns how many it has posted.
func postEach[WR any](wrs []WR, post func(*WR) error) (int, error) {
	for i := range wrs {
		if err := post(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

func (r *recvQueue) pop() (w recvWQE, ok bool) {
	if len(r.wqes) == 0 {
		return w, false
	}
	w = r.wqes[0]
	r.wqes[0] = recvWQE{}
	if r.wqes = r.wqes[1:]; len(r.wqes) == 0 {
		r.wqes = nil
	}
	return w, true
}

// A srq is a receive queue that several queue pairs draw from.
type srq struct {
	mu      sync.Mutex
	q       recvQueue
	waiting map[*session]struct{} // sessions that PostRecv notifies
	gone    bool
}

var _ verbs.SRQ = (*srq)(nil)

// PostRecv implements [verbs.SRQ].
func (s *srq) PostRecv(wrs []verbs.RecvWR) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return 0, verbs.ErrClosed
	}
	for w := range s.waiting {
		w.posted()
	}
	return postEach(wrs, s.q.post)
}

func (s *srq) pop() (recvWQE, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.q.pop()
}

// watch makes PostRecv notify w from now on, or no longer if on is false.
func (s *srq) watch(w *session, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if on {
		s.waiting[w] = struct{}{}
	} else {
		delete(s.waiting, w)
	}
}

// Destroy implements [verbs.SRQ].
func (s *srq) Destroy() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return verbs.ErrClosed
	}
	s.gone, s.q.wqes = true, nil
	return nil
}
