package cm

import (
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
	switch msg := msg.(type) {
	case mad.REQ:
		return m.listener(msg.ServiceID, m.local(in.Local)) != nil
	case mad.REJ:
		m.rx = received{mad: in}
		defer func() { m.rx = received{} }()
		return m.subject(&msg) != nil
	case mad.APR:
		return false // we send no LAP
	}
	return m.byLocal[describe(msg, Received).LocalCommID] != nil
}
