package cm

import (
	"cmp"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/mad"
)

// challengeEvery is how often a peer is asked about one connection. challengeFor is
// how long its answer is waited for.
const (
	challengeEvery = time.Second
	challengeFor   = maxWait
)

// noQPN in a DREQ is the QPN of no connection.
const noQPN ib.QPN = 0

// challenge asks the peer whether it has lost c, as why says: its QP has turned up in
// another connection, say. IBA volume 1 section 12.9.8.3.1 has a DREQ for c follow at
// once; but whoever forges a packet and guesses 24 bits could then end a connection
// whose communication IDs it does not know. So we ask with a DREQ that names no QP:
// a peer that has the connection drops it, because the QPN is wrong, and one that has
// lost it answers every DREQ with a DREP, which has both communication IDs. As with a
// SYN in the window of TCP (RFC 5961 section 4.2) the second answer is believed.
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

// challenged reports whether the peer may answer a challenge now.
func (m *Manager) challenged(c *conn) bool {
	return !c.doubted.IsZero() && m.now.Sub(c.doubted) < challengeFor
}

// lostByPeer ends c, which the peer says that it does not have. A node that has lost one
// connection may have started anew, and have lost them all: it is asked about each, so
// that no other REQ of its runs into a connection of before.
func (m *Manager) lostByPeer(c *conn) {
	m.took(c, "the peer has lost the connection")
	m.end(c, Disconnected{Handle: c.handle, By: ByStale})
	m.timewait(c)
	var others []*conn
	for _, o := range m.byHandle {
		if o.state == StateEstablished && o.p.Remote == c.p.Remote && o.p.RemoteCAGUID == c.p.RemoteCAGUID {
			others = append(others, o)
		}
	}
	slices.SortFunc(others, func(a, b *conn) int { return cmp.Compare(a.handle, b.handle) })
	for _, o := range others {
		m.challenge(o, "the peer has lost another connection")
	}
}
