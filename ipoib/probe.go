package ipoib

import (
	"fmt"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/mtu"
	"ipoibcm/pathmtu"
	"ipoibcm/wire/encap"
)

// This file probes the paths to peers over UC and UD, whose queue pairs do not notice losses
// (docs/adr/0030-probes-of-the-path.md). Datagrams are probed by datagrams, and a UC
// connection by a message that is one packet of its path MTU. Answers are short datagrams.

// plateaus are MTUs in octets that underlays have and hosts do not see (RFC 8899 section 5.3.2): of
// Ethernet, PPPoE, VXLAN, WireGuard, and IPsec.
var plateaus = [...]int{1500, 1492, 1450, 1420, 1400}

// probeSizes returns the sizes to search among for a peer that is reached over transport t, in
// octets of IP.
func (f *Interface) probeSizes(t ib.Transport) []int {
	least := mtu.MinIPv4
	if f.ipv6 {
		least = mtu.MinIPv6
	}
	most := max(f.opt.udMTU(), least)
	sizes := []int{least, most, min(mtu.DefaultUD, most)}
	for _, n := range plateaus {
		if n = mtu.LargestUD(n, f.link.GID.Is4()); n > least && n < most {
			sizes = append(sizes, n)
		}
	}
	if n := f.pathMTU.Octets() - encap.HeaderLen; t == ib.UC && n > most {
		sizes = append(sizes, n)
	}
	slices.Sort(sizes)
	return slices.Compact(sizes)
}

// probe begins to probe the path to p, which is reached over transport t. On InfiniBand nothing
// is probed: the subnet administrator knows what a path carries.
func (f *Interface) probe(p *peer, t ib.Transport) { f.probeAmong(p, f.probeSizes(t)) }

func (f *Interface) probeAmong(p *peer, sizes []int) {
	if len(sizes) < 2 || p.legacy || !f.up || f.fab != nil {
		return
	}
	if p.search == nil || !slices.Equal(p.search.Sizes(), sizes) {
		f.setSearch(p, pathmtu.New(sizes))
	}
	p.search.Limit(f.canProbe(p))
	begin := p.search.Start
	if c := p.tx; c != nil && c.unproven {
		begin = p.search.Raise
	}
	f.probes(p, begin(nil, f.now, f.opt.Rand.Uint64()))
}

// setSearch sets or ends the search for what the path to p carries.
func (f *Interface) setSearch(p *peer, s *pathmtu.Search) {
	if p.search != nil {
		f.peers.searches--
	}
	if p.search = s; s != nil {
		f.peers.searches++
	}
}

// probeAgain begins the searches anew whose sizes have changed with the underlay.
func (f *Interface) probeAgain() {
	if f.peers.searches == 0 {
		return
	}
	ud, uc := f.probeSizes(ib.UD), f.probeSizes(ib.UC) // once: there may be very many peers
	for _, p := range f.allPeers() {
		if p.search == nil {
			continue
		}
		t := f.transport(p)
		if p.tx != nil {
			t = p.tx.trans
		}
		sizes := ud
		if t == ib.UC {
			sizes = uc
		}
		if !slices.Equal(p.search.Sizes(), sizes) {
			f.setSearch(p, nil)
			f.touch(p)
			f.probeAmong(p, sizes)
		}
	}
}

// canProbe returns the largest size that can be sent to p: that of a datagram, or of a packet of
// its connection.
func (f *Interface) canProbe(p *peer) int {
	n := f.opt.udMTU()
	if c := p.tx; c != nil && c.trans == ib.UC {
		n = max(n, min(c.usedPath(f.pathMTU).Octets()-encap.HeaderLen, c.mtu))
	}
	return n
}

// probes sends the probes of p's search, and arms the timer for its next step.
func (f *Interface) probes(p *peer, out []pathmtu.Probe) {
	for _, pr := range out {
		conn := pr.Octets > f.opt.udMTU()
		if conn && (p.tx == nil || !p.search.Answered()) {
			continue // a probe goes on a connection only if the peer is known to answer probes
		}
		b, _ := encap.Probe{Octets: pr.Octets, ID: pr.ID}.AppendBinary(nil)
		fr := frameOf(encap.PathProbe, b)
		f.count(nProbes)
		if conn {
			f.do(SendConn{Conn: p.tx.id, Frame: fr})
		} else {
			f.sendTo(p.key, fr)
		}
	}
	f.arm(p, p.searchDue())
}

// searchDue is when wakeSearch has something to do; zero means never.
func (p *peer) searchDue() time.Time {
	if p.search == nil {
		return time.Time{}
	}
	return earliest(p.search.Deadline(), p.search.IdleAt())
}

// wakeSearch goes on with the search of p, whose timer is due, or ends a search of no more use.
func (f *Interface) wakeSearch(p *peer) {
	s := p.search
	at := s.IdleAt()
	if p.unused() && (!s.Lowered() || s.State() == pathmtu.Searching) || !at.IsZero() && !f.now.Before(at) {
		f.setSearch(p, nil)
		return
	}
	out, lowered := s.Wake(nil, f.now)
	f.probes(p, out)
	if c := p.tx; lowered || c != nil && c.unproven && s.State() != pathmtu.Searching {
		f.probesFound(p)
	}
}

// recvProbe takes a probe, or the answer to one of ours.
func (f *Interface) recvProbe(from encap.LinkAddr, conn bool, b []byte) {
	var pr encap.Probe
	switch err := pr.UnmarshalBinary(b); {
	case err != nil:
		f.count(dropProbe)
	case !pr.Answer:
		f.count(nProbesAnswered)
		pr.Answer = true
		out, _ := pr.AppendBinary(nil)
		f.sendTo(from.Key(), frameOf(encap.PathProbe, out))
	default:
		p := f.peers.byLink[from.Key()]
		if p == nil || p.search == nil || conn {
			f.count(dropProbe)
			return
		}
		ours, raised := p.search.Answer(f.now, pathmtu.Probe{Octets: pr.Octets, ID: pr.ID})
		if !ours {
			f.count(dropProbe)
			return
		}
		f.count(nProbesHeard)
		f.arm(p, p.searchDue())
		if raised {
			if p.search.Octets() >= f.opt.udMTU() {
				f.forgetBlackHole(p) // the next connection probes larger ones
			}
			f.probesFound(p)
		}
	}
}

// probedPath returns the path MTU that probes have found on the way to p; zero if they have not
// found that larger packets are lost.
func (p *peer) probedPath() ib.MTU {
	switch {
	case p.search == nil || !p.search.Lowered():
		return 0
	case p.search.Octets() >= mtu.DefaultUD: // a datagram of that size has longer headers than such a packet
		return ib.MTU2048
	}
	return basePathMTU
}

// udMTUTo returns the largest datagram to p, in octets of IP.
func (f *Interface) udMTUTo(p *peer) int {
	if p.search != nil {
		return min(f.udMTU(), p.search.Octets())
	}
	return f.udMTU()
}

// probesFound puts in force what probes have found of the path to p: for datagrams at once, for a
// connection by replacing it if its path MTU does not fit.
func (f *Interface) probesFound(p *peer) {
	f.note(Note{Kind: NoteConn, Peer: p.key, Report: MTUChanged,
		Text: fmt.Sprintf("probes have found that datagrams of up to %d octets reach it", f.udMTUTo(p))})
	f.touch(p)
	c := p.tx
	if c == nil {
		return
	}
	c.larger = false // its own probes have been judged
	used, now := c.usedPath(f.pathMTU), c.reqPath(f.pathMTU)
	if c.unproven && used <= now {
		f.proven(c)
		return
	}
	if used == now || c.trans == ib.RC && now < used { // RC notices its losses by itself
		return
	}
	if now < used {
		f.count(nBlackHoles)
	}
	f.hangUp(c, fmt.Sprintf("packets of path MTU %v are used, and the path carries those of %v", used, now))
	if len(p.addrs) > 0 && !p.connecting() && f.transport(p) != ib.UD {
		f.dial(p)
	}
}

// usedPath tells the search of p that packets have gone to p, so that it probes again when due. An
// RC connection notices losses by itself, and needs that only if the search has lowered the size.
func (f *Interface) usedPath(p *peer) {
	if s := p.search; s != nil && (p.tx == nil || p.tx.trans != ib.RC || s.Lowered()) {
		f.probes(p, s.Used(nil, f.now, f.opt.Rand.Uint64()))
	}
}

// proven lets packets go on c: a probe of their size has been answered.
func (f *Interface) proven(c *conn) {
	c.unproven = false
	f.sendQueue(c.peer)
}
