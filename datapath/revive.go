package datapath

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// ReviveUD brings the UD QP back after it went to ERR. With rdma_rxe, one datagram without a route,
// at the moment when a link comes up, is enough to put it there. QPN, groups and address handles
// stay; posted requests are lost. The error is [ErrClosed] or the provider's; after an error of the
// provider ReviveUD may be called again.
func (l *Loop) ReviveUD() error {
	if err := l.reviveUD(); err != nil {
		return err
	}
	th := l.udq.th
	th.hand.RLock()
	defer th.hand.RUnlock()
	th.one.Lock()
	defer th.one.Unlock()
	th.pump(l.udq, th.oneWork, nanotime())
	return nil
}

// SetQKey gives the UD QP another Q_Key. Posted requests are lost, as with ReviveUD.
func (l *Loop) SetQKey(k ib.QKey) error {
	l.udq.mu.Lock()
	l.cfg.QKey = k
	l.udq.mu.Unlock()
	return l.ReviveUD()
}

func (l *Loop) reviveUD() error {
	q, rx := l.udq, l.ud
	rx.mu.Lock()
	defer rx.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || l.done() {
		return ErrClosed
	}
	// In RESET the provider forgets what is posted. Receives that completed before would be posted
	// twice, so their completions are dropped too.
	if err := q.qp.Modify(verbs.QPAttr{State: verbs.StateReset}); err != nil {
		return fmt.Errorf("UD QP to RESET: %w", err)
	}
	for n := rx.cq.Poll(rx.wcs[:]); n > 0; n = rx.cq.Poll(rx.wcs[:]) {
		l.c.RxError.Add(uint64(n))
	}
	rx.shared.wrs = rx.shared.wrs[:0]
	q.takeBack()
	return l.startUD()
}

// startUD takes the UD QP from RESET to RTS with its receives posted.
func (l *Loop) startUD() error {
	qp := l.udq.qp
	if err := qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: l.cfg.pkey(), QKey: l.cfg.qkey()}); err != nil {
		return fmt.Errorf("UD QP to INIT: %w", err)
	}
	if _, err := qp.PostRecv(l.ud.pool.wrs); err != nil {
		return fmt.Errorf("fill UD receive queue: %w", err)
	}
	for _, st := range []verbs.QPState{verbs.StateRTR, verbs.StateRTS} {
		if err := qp.Modify(verbs.QPAttr{State: st}); err != nil {
			return fmt.Errorf("UD QP to %v: %w", st, err)
		}
	}
	return nil
}
