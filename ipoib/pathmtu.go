package ipoib

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// This file finds paths that carry smaller packets than their ends do, such as one through a
// router with a smaller MTU. It detects them by the loss of connections (the black holes of
// RFC 8899 section 4.3). An ICMP message would report them sooner, but anybody can forge one.

// basePathMTU is the path MTU that we ask for when larger packets seem to be lost: its
// packets fit into the size that every path of IPv6 carries.
const basePathMTU = ib.MTU1024

// swallowed handles the failure of c's QP with status. It reports whether the path to the peer
// seems to lose large packets only: the handshake arrived, but the packets after it did not.
// The next attempt then asks for basePathMTU.
func (f *Interface) swallowed(c *conn, status verbs.Status) bool {
	p := c.peer
	if status != verbs.RetryExceeded || c.trans != ib.RC || p.tx != c || f.served(c) {
		return false
	}
	if used := c.usedPath(f.pathMTU); used > basePathMTU {
		p.pathMTU, p.blackHole, p.diagnose().lowered = basePathMTU, used, f.now
		f.count(nBlackHoles)
		f.note(Note{Kind: NoteConn, Peer: p.key, Conn: c.id, Report: MTUChanged,
			Text: fmt.Sprintf("packets of path MTU %v seem to be lost on the way: asking for %v", used, basePathMTU)})
		f.probe(p, ib.RC) // for datagrams, and to hear when more is carried again
		return true
	}
	f.forgetBlackHole(p)
	return false
}

// forgetBlackHole undoes what swallowed has set for p: the size of packets was not
// the reason, or the path may have changed.
func (f *Interface) forgetBlackHole(p *peer) {
	if p.blackHole != 0 {
		p.blackHole, p.pathMTU = 0, 0
	}
}

// acceptPath returns the largest path MTU that we accept in a REQ of the peer of c. After a black
// hole it is the one that we would ask for ourselves. The peer may not know that larger packets are
// lost, if it has only received packets so far.
func (c *conn) acceptPath(port ib.MTU) ib.MTU {
	if c.peer.blackHole != 0 && !c.oneWay() {
		return c.reqPath(port)
	}
	return c.mostPath(port)
}
