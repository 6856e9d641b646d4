package softroce

import (
	"sync"

	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
)

// A srq is a receive ring that several queue pairs draw from.
type srq struct {
	mu   sync.Mutex
	ring *engine.RecvRing
	gone bool
}

var (
	_ verbs.SRQ        = (*srq)(nil)
	_ engine.RecvQueue = (*srq)(nil)
)

// PostRecv implements [verbs.SRQ].
func (s *srq) PostRecv(wrs []verbs.RecvWR) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return 0, verbs.ErrClosed
	}
	for i := range wrs {
		if err := s.ring.Post(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

// Pop implements [engine.RecvQueue].
func (s *srq) Pop(w *engine.RecvWQE) bool {
	s.mu.Lock()
	ok := !s.gone && s.ring.PopLast(w)
	s.mu.Unlock()
	return ok
}

// Return implements [engine.RecvQueue].
func (s *srq) Return(w *engine.RecvWQE) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.gone {
		s.ring.Return(w)
	}
}

// Destroy implements [verbs.SRQ].
func (s *srq) Destroy() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return verbs.ErrClosed
	}
	s.gone, s.ring = true, nil
	return nil
}
