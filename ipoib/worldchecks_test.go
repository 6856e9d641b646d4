package ipoib

import (
	"net/netip"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/nexthop"
)

// checkPeers looks at what is kept of peers besides the peers themselves.
func (n *node) checkPeers() {
	f, w := n.f, n.w
	extra := 0
	for p := f.peers.unused.Oldest(); p != nil; p = p.Newer() {
		extra++
		if f.peers.byLink[p.key] != p {
			w.Fatalf("%s: among the unused is a %v that is not in byLink", n.name, p.key)
		}
		if !p.unused() {
			w.Fatalf("%s: %v is in use, but among the unused", n.name, p.key)
		}
		if next := p.Newer(); next != nil && next.touched.Before(p.touched) {
			w.Fatalf("%s: among the unused %v of %v is before %v of %v", n.name, p.key, p.touched, next.key, next.touched)
		}
	}
	for key, p := range f.peers.byLink {
		if t := f.peerDue(p); !f.shutdown && !t.IsZero() {
			if !p.Armed() {
				w.Fatalf("%s: a timer of %v is due at %v, and not armed", n.name, key, t)
			}
			if t.Before(p.at) {
				w.Fatalf("%s: a timer of %v is due at %v, armed is %v", n.name, key, t, p.at)
			}
		}
		if p.unused() {
			extra--
		}
		if !p.waitUntil.IsZero() {
			n.checkWait(p)
		}
	}
	up := 0
	for _, c := range f.conns.byID {
		if c.state == connUp {
			up++
		}
	}
	expect.MustEqual(w, extra, 0, "%s: extra", n.name)
	expect.MustEqual(w, up, f.conns.up, "%s: up", n.name)
	if f.peers.timers.Len() > len(f.peers.byLink) {
		w.Fatalf("%s: Len is %v, want at most %v", n.name, f.peers.timers.Len(), len(f.peers.byLink))
	}
}

// checkWait checks that p, for which n waits, has no connection, and that the link is up.
func (n *node) checkWait(p *peer) {
	if p.tx != nil {
		n.w.Fatalf("%s: %v is waited for beside a connection", n.name, p.key)
	}
	if p.dial != nil {
		n.w.Fatalf("%s: %v is waited for beside a REQ to it", n.name, p.key)
	}
	if p.accept != nil {
		n.w.Fatalf("%s: %v is waited for beside a REQ from it", n.name, p.key)
	}
	if !n.f.up {
		n.w.Fatalf("%s: %v is waited for while the link is down", n.name, p.key)
	}
}

// checkRetries checks that retries do not outlast a TCP timeout.
// 4755-7.1-1: retries exhausted within one second, ACK timeout at most 67 ms
func (n *node) checkRetries(timeout time.Duration, retries int) {
	if timeout == 0 {
		n.w.Fatalf("%s: no ACK timeout, so no end", n.name)
	}
	if timeout > 68*time.Millisecond {
		n.w.Fatalf("%s: an ACK timeout of %v, want at most 68ms", n.name, timeout)
	}
	if all := time.Duration(retries+1) * timeout; all > time.Second {
		n.w.Fatalf("%s: %d retries of %v take %v, want at most 1s", n.name, retries, timeout, all)
	}
}

// checkConnPath checks that hop may be reached by the connection id, and that this one is up.
func (n *node) checkConnPath(hop netip.Addr, id nexthop.Conn) {
	// 4755-2.1-1: no connected path for a group
	if hop.IsMulticast() {
		n.w.Fatalf("%s: group %v on a connection", n.name, hop)
	}
	q := n.qps[id]
	if q == nil {
		n.w.Fatalf("%s: path %v to connection %d, which has no queue pair", n.name, hop, id)
	}
	if !q.rts {
		n.w.Fatalf("%s: path %v to connection %d, which is not in RTS", n.name, hop, id)
	}
}
