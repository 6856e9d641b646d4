package cm

import (
	"maps"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/mad"
)

// challengeEvery is the least time between two challenges of one connection. challengeFor is
// how long an answer to a challenge is accepted.
const (
	challengeEvery = time.Second
	challengeFor   = maxWait
)

// noQPN in a DREQ names no connection's QP.
const noQPN ib.QPN = 0

// challenge asks the peer whether it has lost c. why is the reason for the suspicion, such as the
// peer's QP in another connection. IBA volume 1 section 12.9.8.3.1 ends c at once in that case,
// with a DREQ. But then anybody who forges a packet and guesses 24 bits could end a connection
// without knowing its communication IDs. So we ask with a DREQ that names no QP. A peer that still
// has the connection drops this DREQ, because the QPN is wrong. A peer that has lost it answers any
// DREQ with a DREP, which has both communication IDs. As with a SYN in the window of TCP (RFC 5961
// section 4.2) we believe only the answer to our question.
func (m *Manager) challenge(c *conn, why string) {
	if m.challenged(c) && m.now.Sub(c.doubted) < challengeEvery {
		return
	}
	m.decide(c, why+": it is asked whether this one is lost")
	c.doubted = m.now
	m.counts.challenges++
	dreq := mad.DREQ{TransactionID: m.opt.Rand.Uint64(), LocalCommID: c.p.LocalCommID,
		RemoteCommID: c.p.RemoteCommID, RemoteQPN: noQPN}
	m.transmitOnce(c, dreq)
}

// challenged reports whether an answer to a challenge of c is accepted now.
func (m *Manager) challenged(c *conn) bool {
	return !c.doubted.IsZero() && m.now.Sub(c.doubted) < challengeFor
}

// lostByPeer ends c, because the peer has answered a challenge: it does not have c any more. The
// peer's node may have restarted and lost all its connections. So we also challenge its other
// established connections, lest further REQs of that node meet an old connection.
func (m *Manager) lostByPeer(c *conn) {
	m.took(c, "the peer has lost the connection")
	m.over(c, Disconnected{Handle: c.handle, By: ByStale})
	for _, h := range slices.Sorted(maps.Keys(m.byHandle)) {
		o := m.byHandle[h]
		if o.state == StateEstablished && o.p.Remote == c.p.Remote && o.p.RemoteCAGUID == c.p.RemoteCAGUID {
			m.challenge(o, "the peer has lost another connection")
		}
	}
}
