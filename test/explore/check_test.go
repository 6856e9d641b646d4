package explore

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/serviceid"
	"ipoibcm/wire/mad"
)

// recoverWithin is the longest that a connection may take once nothing is lost
// any more. A host may have to learn by an RC timeout that its peer restarted,
// wait for the REQ that won a crossing (4 s) and sit out a pause (up to 6 s);
// what is left of a peer's former life goes after 30 s of silence.
const (
	recoverWithin = 20 * time.Second
	cleanWithin   = 45 * time.Second
)

// A tally is what a machine has counted of attempts and connections that ended
// otherwise than wanted.
type tally struct{ dialFailed, acceptFailed, broken, closedByPeer uint64 }

func (n *node) tally() tally {
	v := reflect.ValueOf(n.f).Elem().FieldByName("n")
	c := func(i int) uint64 { return v.Index(tallied[i]).Uint() }
	return tally{c(0) - c(1), c(2), c(3), c(4)} // a verdict is no failure
}

// tallied are the places of these counters in the order in which the machine
// lists them.
var tallied = counters("dial_failed", "crossings_yielded", "accept_failed", "qp_errors", "closed_by_peer")

func counters(names ...string) (at []int) {
	f := ipoib.New(ipoib.Options{Rand: rand.New(&source{})})
	for _, name := range names {
		i := slices.IndexFunc(f.Counters(), func(c ipoib.Counter) bool { return c.Name == name })
		if i < 0 {
			panic("explore: no counter is named " + name)
		}
		at = append(at, i)
	}
	return at
}

// outstanding returns n's REQ to another host that nothing has answered. It may be to
// the QPN that the host had before it restarted, as may be the one that crosses it.
func (n *node) outstanding(to *node) (ipoib.ConnInfo, bool) {
	for _, c := range n.f.Conns() {
		same := c.Peer.GID == to.link.GID && (c.Peer.QPN == to.link.QPN || to.former != 0 && c.Peer.QPN == to.former)
		if same && c.Active && (c.State == cm.StateREQSent.String() || c.State == cm.StateMRAREQRcvd.String()) {
			return c, true
		}
	}
	return ipoib.ConnInfo{}, false
}

// watch looks at what n says while it says it.
func (w *world) watch(n, to *node, msg mad.Message) {
	switch m := msg.(type) {
	case mad.REQ:
		form, _ := serviceid.Parse(m.ServiceID)
		if form == serviceid.Legacy && !w.mixed() {
			w.failf("%s asks %s, which follows the RFC, with the 0x10 service ID", n.name(), to.name())
		}
	case mad.REJ:
		if m.MessageRejected != mad.KindREQ {
			return
		}
		switch m.Reason {
		case cm.ReasonConsumer:
			w.verdict(n, to, m.RemoteCommID)
		case cm.ReasonInvalidServiceID:
			if !w.restarted {
				w.failf("%s rejects a REQ of %s with %v, though nobody restarted", n.name(), to.name(), m.Reason)
			}
		case cm.ReasonStale, cm.ReasonTimeout: // a repeat of one that is over; a last try
		default:
			w.failf("%s rejects a REQ of %s with %v", n.name(), to.name(), m.Reason)
		}
	}
}

// verdict checks that a REQ is rejected with 28 only in favour of one that
// stands (4755-3.3-4, 4755-3.3-5, 4755-3.3-10).
func (w *world) verdict(n, to *node, loser mad.CommID) {
	for _, v := range w.verdicts {
		if v.loser == loser {
			return // the same again
		}
	}
	for _, v := range w.verdicts {
		if v.winner == loser {
			w.failf("%s rejects with 28 the very REQ for which %s has rejected its own", n.name(), to.name())
			return
		}
	}
	c, ok := n.outstanding(to)
	if !ok || isLegacy(c.ServiceID) {
		w.failf("%s rejects a REQ of %s with 28 without a 0x01 REQ of its own outstanding", n.name(), to.name())
		return
	}
	w.verdicts = append(w.verdicts, verdict{loser, mad.CommID(c.LocalComm)})
}

// check looks at a state.
func (w *world) check() {
	for _, n := range w.nodes {
		conns := n.f.Conns()
		if len(conns) != len(n.qps) {
			w.failf("%s has %d queue pairs for %d connections", n.name(), len(n.qps), len(conns))
		}
		if !w.restarted && n.tally() != n.ended && !w.surplus(n.index) {
			w.failf("an attempt of %s failed, though fewer messages were lost than are sent again", n.name())
		}
	}
	if w.failure != "" || len(w.items) > 0 {
		return
	}
	w.forget()
	if !w.mishaps { // 4755-3.3-1, 4755-3.3-10: both packets have gone out, no timer was needed
		for i, p := range w.pairs {
			if !w.sent[i] {
				continue
			}
			if w.nodes[p[0]].paths[p[1]].Kind != nexthop.PathConn {
				w.failf("nothing was lost or delayed, but %s has no connection to send to %s on", w.nodes[p[0]].name(),
					w.nodes[p[1]].name())
			}
			// What is under way when a 0x01 connection takes over from a 0x10 one may be lost.
			if got := w.nodes[p[1]].got[p[0]][0]; got > 1 || got < 1 && !w.mixed() {
				w.failf("nothing was lost or delayed, but the packet of %s came %d times to %s", w.nodes[p[0]].name(), got,
					w.nodes[p[1]].name())
			}
		}
	}
	if w.quiet() {
		w.agree(!w.restarted && w.silent())
	}
}

// surplus reports whether what ended at node i was one more connection beside
// those that are up: a REQ that crossed ours and came so late that ours was
// answered already is no longer a crossing (RFC 4755 section 3.2). It is accepted as a
// redial, and comes to nothing because its sender has abandoned it. And a 0x10
// connection, or the REQ for it, is given up for a 0x01 one.
func (w *world) surplus(i int) bool {
	n := w.nodes[i]
	now := n.tally()
	if !w.mixed() {
		if !slices.ContainsFunc(n.f.Conns(), func(c ipoib.ConnInfo) bool { return c.State == cm.StateEstablished.String() }) {
			return false
		}
		if now.closedByPeer != n.ended.closedByPeer {
			return false
		}
	}
	if now.dialFailed != n.ended.dialFailed || now.broken != n.ended.broken {
		return false
	}
	w.node(i).ended = now
	return true
}

// mixed reports whether somebody dials with the 0x10 service ID first.
func (w *world) mixed() bool {
	return slices.ContainsFunc(w.hosts, func(h host) bool { return h.legacyFirst })
}

// forget drops verdicts on REQs that nobody repeats and that are not in flight.
func (w *world) forget() {
	w.verdicts = slices.DeleteFunc(w.verdicts, func(v verdict) bool {
		for _, n := range w.nodes {
			for _, c := range n.f.Conns() {
				if id := mad.CommID(c.LocalComm); c.State == cm.StateREQSent.String() && (id == v.loser || id == v.winner) {
					return false
				}
			}
		}
		return !slices.ContainsFunc(w.items, func(it item) bool {
			req, ok := it.msg.(mad.REQ)
			return ok && (req.LocalCommID == v.loser || req.LocalCommID == v.winner)
		})
	})
}

// quiet reports whether every connection is up or gone.
func (w *world) quiet() bool {
	if len(w.items) > 0 {
		return false
	}
	for _, n := range w.nodes {
		for _, c := range n.f.Conns() {
			if c.State != cm.StateEstablished.String() {
				return false
			}
		}
	}
	return true
}

// silent reports whether no machine holds a communication ID beside those of
// its connections: no DREQ is out, nothing is in timewait.
func (w *world) silent() bool {
	for _, n := range w.nodes {
		if n.f.CommIDs() != len(n.f.Conns()) {
			return false
		}
	}
	return true
}

// agree checks that no pair has two RFC connections, and, if both must know,
// that both ends hold the same ones and see them alike.
func (w *world) agree(both bool) {
	for i, n := range w.nodes {
		for _, m := range w.nodes[i+1:] {
			a, b := n.between(m), m.between(n)
			if rfc(a) > 1 || rfc(b) > 1 {
				w.failf("%s and %s have %d and %d RFC connections up", n.name(), m.name(), rfc(a), rfc(b)) // 4755-3.3-1
			}
			if both && len(a) != len(b) {
				w.failf("%s has %d connections to %s, which has %d", n.name(), len(a), m.name(), len(b))
			}
			if both && w.failure == "" {
				for _, c := range a {
					w.alike(n, m, c, b)
				}
			}
		}
	}
}

// between returns n's connections to m that are up. Those to m's former life
// are to another link-layer address.
func (n *node) between(m *node) (cs []ipoib.ConnInfo) {
	for _, c := range n.f.Conns() {
		if c.Peer.GID == m.link.GID && c.State == cm.StateEstablished.String() && (m.former == 0 || c.Peer.QPN != m.former) {
			cs = append(cs, c)
		}
	}
	return cs
}

func rfc(cs []ipoib.ConnInfo) (n int) {
	for _, c := range cs {
		if !isLegacy(c.ServiceID) {
			n++
		}
	}
	return n
}

// equal is a failure of w unless got is want.
func equal[T comparable](w *world, got, want T, what string) {
	if got != want {
		w.failf("%s is %v, want %v", what, got, want)
	}
}

// alike checks that m sees n's connection c as n does.
func (w *world) alike(n, m *node, c ipoib.ConnInfo, others []ipoib.ConnInfo) {
	i := slices.IndexFunc(others, func(d ipoib.ConnInfo) bool { return d.LocalComm == c.RemoteComm })
	if i < 0 {
		w.failf("%s and %s are not on the same connection", n.name(), m.name())
		return
	}
	d := others[i]
	p, q := n.qp(c.Conn), m.qp(d.Conn)
	// 4755-5.1-3
	switch {
	case p == nil:
		w.failf("p is nil")
		return
	case q == nil:
		w.failf("q is nil")
		return
	}
	equal(w, c.LocalComm, d.RemoteComm, "c's LocalComm")
	equal(w, c.LocalQPN, d.RemoteQPN, "c's LocalQPN")
	equal(w, c.RemoteQPN, d.LocalQPN, "c's RemoteQPN")
	equal(w, c.Active, !d.Active, "c's Active")
	equal(w, c.Transport, d.Transport, "c's Transport")
	equal(w, p.dest, q.qpn, "p's dest")
	equal(w, q.dest, p.qpn, "q's dest")
	equal(w, p.rqPSN, q.sqPSN, "p's rqPSN")
	equal(w, q.rqPSN, p.sqPSN, "q's rqPSN")
	equal(w, p.pathMTU, q.pathMTU, "pathMTU")
	if !isLegacy(c.ServiceID) && (p.receive != int(d.ReceiveMTU) || q.receive != int(c.ReceiveMTU) || c.MTU != d.MTU) {
		w.failf("%s and %s see their connection differently:\n%+v %+v\n%+v %+v", n.name(), m.name(), c, p, d, q)
	}
}

// recover goes on without a mishap, with every pair sending twice a second,
// until there is one connection per pair and nothing else. It returns how long
// it took until all could send; known remembers what states lead to.
func (w *world) recover(known *memory) time.Duration {
	w.left = budget{}
	begin, pulse := w.now, w.now
	var up, clean time.Time // when all could send; when nothing was left over either
	var path []print
	var times []time.Time
	for clean.IsZero() {
		if w.failure != "" {
			return 0
		}
		if i := w.first(); i >= 0 {
			w.arrive(i, false)
			continue
		}
		if !w.now.Before(pulse) {
			if w.settled() {
				if up.IsZero() {
					up = w.now
				}
				if !w.ghosts() {
					clean = w.now
					break
				}
			}
			if d := w.now.Sub(begin); d > recoverWithin && up.IsZero() || d > cleanWithin {
				w.failf("%v after the last mishap there is not one connection that both use, and nothing else: %s", d, w.describe())
				return 0
			}
			w.pulse()
			pulse = w.now.Add(500 * time.Millisecond)
			h := w.print().core
			if rest, ok := known.rest(h); ok {
				clean = w.now.Add(rest.clean)
				if up.IsZero() {
					up = w.now.Add(rest.up)
				}
				break
			}
			path, times = append(path, h), append(times, w.now)
			continue
		}
		next, who := w.nextTimer()
		for _, it := range w.items { // what cannot be yet
			if who < 0 || it.notYet.Before(next) {
				next, who = it.notYet, len(w.nodes)
			}
		}
		if who < 0 || pulse.Before(next) {
			next, who = pulse, len(w.nodes)
		}
		w.now = latest(w.now, next)
		if who < len(w.nodes) {
			w.step(who, ipoib.Wake{})
		}
	}
	if up.Sub(begin) > recoverWithin || clean.Sub(begin) > cleanWithin {
		w.failf("it takes %v until hosts can send, and %v until nothing else is left", up.Sub(begin), clean.Sub(begin))
	}
	known.add(path, times, up, clean)
	return up.Sub(begin)
}

// pulse sends a packet between each two hosts that should reach each other, both ways.
func (w *world) pulse() {
	for _, n := range w.nodes {
		for j := range n.got {
			w.node(n.index).got[j][1] = 0
		}
	}
	for _, p := range w.pairs {
		w.send(p[0], p[1], 2)
		if back := [2]int{p[1], p[0]}; !slices.Contains(w.pairs, back) {
			w.send(p[1], p[0], 2)
		}
	}
}

// ghosts reports whether somebody has a connection to a peer's former life.
func (w *world) ghosts() bool {
	for _, n := range w.nodes {
		for _, c := range n.f.Conns() {
			if to := w.byGID(c.Peer.GID); to.former != 0 && c.Peer.QPN == to.former {
				return true
			}
		}
	}
	return false
}

// first returns the item that has waited longest of those that can be now.
func (w *world) first() int {
	for i, it := range w.items {
		if !w.now.Before(it.notYet) {
			return i
		}
	}
	return -1
}

// settled reports whether the last packet of every pair arrived, both ways, on
// connections that both ends agree on, and nothing else is left.
func (w *world) settled() bool {
	if len(w.items) > 0 || !w.quiet() {
		return false
	}
	if !w.silent() {
		return false
	}
	for _, p := range w.pairs {
		a, b := w.nodes[p[0]], w.nodes[p[1]]
		if a.got[p[1]][1] != 1 || b.got[p[0]][1] != 1 || rfc(a.between(b)) == 0 && !a.legacyFirst && !b.legacyFirst {
			return false
		}
	}
	w.agree(true)
	return w.failure == ""
}
