package engine

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/roce"
)

const (
	// challengeWait is the least time that the peer has to answer when it is asked again
	// after a fatal NAK; each wait in a row is twice as long. challengeTries is how many
	// waits there are: a peer that is silent in all of them is taken to be in ERR.
	challengeWait  = 16 * time.Millisecond
	challengeTries = 3
)

// A challenge is a fatal NAK in doubt. Whoever knows both GIDs and guesses QPN and
// PSN can forge a NAK, so the NAK alone ends nothing: as with a RST of TCP (RFC 5961
// section 3.2) the peer is asked again. A peer that sent the NAK is in ERR: it
// answers with the NAK, or with silence (IBA volume 1 section 10.3.1.7). A peer that
// did not send it acknowledges the request. An ACK counts more than any number of
// NAKs before it, since a forger does not see the request and cannot hold the ACK
// back.
type challenge struct {
	on       bool
	psn      ib.PSN
	syndrome roce.Syndrome
	again    bool // the NAK came once more
	left     uint8
	wait     time.Duration
	deadline time.Time
}

// isFatal reports whether s ends a queue pair.
func isFatal(s roce.Syndrome) bool {
	return s == roce.NAKInvalidReq || s == roce.NAKRemoteAccess || s == roce.NAKRemoteOp
}

// receiveFatal takes a fatal NAK for a packet that is outstanding.
func (q *QP) receiveFatal(psn ib.PSN, s roce.Syndrome, now time.Time) DropReason {
	q.count.NAKsIn++
	c := &q.req.challenge
	if c.on {
		c.again = c.again || c.psn == psn && c.syndrome == s
		return NoDrop
	}
	q.count.Challenges++
	*c = challenge{on: true, psn: psn, syndrome: s}
	c.restart(&q.req.rtt)
	q.ask(now)
	return NoDrop
}

// restart resets the number and the length of the waits, so that the peer has all of its
// time again, and forgets that the NAK came once more. A wait that has begun goes on.
func (c *challenge) restart(t *roundTrip) {
	c.again, c.left, c.wait = false, challengeTries, challengeWait
	if t.known {
		c.wait = max(c.wait, 2*(t.mean+4*t.spread))
	}
}

// ask sends the oldest packet again; its ACK says how far the peer has got.
func (q *QP) ask(now time.Time) {
	r := &q.req
	r.challenge.deadline = now.Add(r.challenge.wait)
	r.rnrDeadline, r.limit = time.Time{}, 1
	r.missing.forget()
	q.goBack()
}

// challengeDue asks again, or believes the NAK.
func (q *QP) challengeDue(now time.Time) {
	c := &q.req.challenge
	if now.Before(c.deadline) {
		return
	}
	if c.left--; c.left > 0 && !c.again {
		c.wait *= 2
		q.ask(now)
		return
	}
	psn, status := c.psn, nakStatus(c.syndrome)
	*c = challenge{}
	q.ackTo(psn, now)
	q.failAt(psn, status)
}

// answered notes that the peer is alive: una is the oldest packet that it has not
// acknowledged. If una is past the PSN of the NAK, the NAK was false. Otherwise
// answered resets the waits.
func (q *QP) answered(una ib.PSN) {
	c := &q.req.challenge
	switch {
	case !c.on:
	case c.psn.Before(una):
		q.count.FalseNAKs++
		*c = challenge{}
	default:
		c.restart(&q.req.rtt)
	}
}

// msnTrust is how many ACKs in a row must have had exactly the right MSN. From then on ACKs and
// NAKs whose MSN cannot be right are dropped.
const msnTrust = 16

const msnMask = 1<<24 - 1

// counted reports whether the peer can have completed msn messages (IBA volume 1 section 9.7.7.1):
// no fewer than it has acknowledged and no more than were posted. As long as the MSN is not trusted
// it returns true. Whoever guesses QPN and PSN can forge an ACK or NAK, which acknowledges all packets
// before it; a packet that was lost would then never be sent again. With the check the forger has to
// guess the MSN as well. rxe has not always counted WRITEs: once a request other than a SEND is posted,
// the MSN is never trusted again. Nor is that of a peer that counts in another way.
func (q *QP) counted(msn uint32) bool {
	r := &q.req
	return r.msnRight < msnTrust || (msn-(q.sq.head-r.first))&msnMask <= q.sq.tail-q.sq.head
}

// learnMSN notes whether the MSN of an ACK that was taken is right.
func (q *QP) learnMSN(msn uint32) {
	switch r := &q.req; {
	case r.msnRight == msnTrust || r.msnSaysNothing:
	case msn == (q.sq.head-r.first)&msnMask:
		r.msnRight++
	default:
		r.msnRight = 0
	}
}
