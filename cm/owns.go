package cm

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// Owns reports whether a MAD is for this Manager: a REQ for a service ID that the Manager
// listens on, or a message about one of its connections. Several Managers may share
// a QP 1. The driver gives a MAD that no Manager owns to one of them, which answers it as
// IBA volume 1 demands, for instance with a REJ.
func (m *Manager) Owns(in *verbs.MAD) bool {
	_, msg, err := mad.Parse(in.Data[:])
	if err != nil {
		return false
	}
	if req, ok := msg.(mad.REQ); ok {
		return m.listener(req.ServiceID, m.local(in.Local)) != nil
	}
	return m.about(in, msg) != nil
}

// Peer returns the GID of the peer with which a MAD claims to have a connection; zero if it names none of ours.
// Anybody may have sent the MAD.
func (m *Manager) Peer(in *verbs.MAD) ib.GID {
	_, msg, err := mad.Parse(in.Data[:])
	if err != nil {
		return ib.GID{}
	}
	if c := m.about(in, msg); c != nil {
		return c.p.Remote
	}
	return ib.GID{}
}

// about returns the connection that in names, whose message is msg; nil for a REQ.
func (m *Manager) about(in *verbs.MAD, msg mad.Message) *conn {
	switch msg := msg.(type) {
	case mad.REQ, mad.APR: // we send no LAP
		return nil
	case mad.REJ:
		m.rx = received{mad: in}
		defer func() { m.rx = received{} }()
		return m.subject(&msg)
	}
	return m.byLocal[describe(msg, Received).LocalCommID]
}
