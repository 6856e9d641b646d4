package sim

import (
	"ipoibcm/ipoib"
)

// A fault is what an agent does wrong, so that the checks can be seen to fail.
type fault uint8

const (
	none           fault = iota
	sendsElsewhere       // on the connection of another peer
	ignoresMTU           // posts packets of any size
	groupsOnConn         // multicast and broadcast too
	offersMore           // its receive buffers are half of what it says
	leaksQPs
	leaksBuffers
	leaksTimers
	neverWakes
	queuesAll     // without bound
	dropsSilently // what waited for a connection
	repeats       // every packet
	changesOctets // of every frame
	forgetsPaths  // to connections
	forgetsWhy    // explains nothing
)

// wrong is the path that a broken agent takes.
func (h *host) wrong(path ipoib.Path) ipoib.Path {
	other := func() {
		for id, c := range h.conns { // the smallest: maps have no order
			if id != path.Conn && c.up() && (path.Kind != ipoib.PathConn || id < path.Conn) {
				path.Kind, path.Conn = ipoib.PathConn, id
			}
		}
	}
	switch {
	case h.cfg.fault == ignoresMTU:
		path.MTU = 1 << 16
	case h.cfg.fault == sendsElsewhere && path.Kind == ipoib.PathConn, h.cfg.fault == groupsOnConn && path.Kind == ipoib.PathGroup:
		other()
	}
	return path
}

// swallows reports whether a broken machine keeps a to itself.
func (h *host) swallows(a ipoib.Action) bool {
	_, data := a.(ipoib.SendConn)
	return data && h.cfg.fault == dropsSilently
}

// ring is how large a receive buffer is, in octets.
func (c config) ring() int {
	if c.fault == offersMore {
		return c.receiveMTU() / 2
	}
	return c.receiveMTU()
}
