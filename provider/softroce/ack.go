package softroce

import (
	"slices"
	"time"
)

const (
	// ackWithin is how many packets of a queue pair wait for one ACK at most: a quarter of
	// the default window.
	ackWithin = 64
	// maxDelayed bounds the queue pairs whose ACKs wait in one receiver.
	maxDelayed = 64
)

// delayACK delays the ACK of q until settle, at the end of the turn. If the user, or the
// kernel behind the TUN, answers a message before that, the ACK may leave behind the
// answer in the same call (Output decides). If maxDelayed queue pairs wait already, the
// ACK leaves at once. The caller holds q.mu.
func (r *receiver) delayACK(q *qp, now time.Time) {
	if slices.Contains(r.delayed, q) {
		return
	}
	if len(r.delayed) == maxDelayed {
		q.eng.UrgeAck()
		q.flush(now)
		return
	}
	r.delayed = append(r.delayed, q)
}

// settle sends the ACKs that still wait. It is called once per turn, so none
// waits longer than the handling of one batch.
func (r *receiver) settle() {
	if len(r.delayed) == 0 {
		return
	}
	now := time.Now()
	for i, q := range r.delayed {
		q.mu.Lock()
		if !q.gone && q.eng.AckWaits() {
			q.eng.UrgeAck()
			q.flush(now)
		}
		q.mu.Unlock()
		r.delayed[i] = nil
	}
	r.delayed = r.delayed[:0]
}
