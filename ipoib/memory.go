package ipoib

import (
	"net/netip"
	"time"

	"ipoibcm/fib"
	"ipoibcm/neigh"
	"ipoibcm/wire/encap"
)

// A Memory is what an interface knows of others, for the process that takes it over.
type Memory struct {
	Neighbours []KnownNeighbour // by address
	Peers      []KnownPeer      // by link-layer address
}

// A KnownNeighbour is an IP address with its link-layer address.
type KnownNeighbour struct {
	Addr   netip.Addr
	Link   encap.LinkAddr
	Router bool
}

// A KnownPeer says which conventions a peer follows, and for how long that is remembered.
type KnownPeer struct {
	Link   encap.LinkAddr // flags zero
	Class  Class
	Legacy bool          // a connection has proven ClassLegacy
	Left   time.Duration // how long ClassLegacy is still remembered
	// Via is the path of CM messages on which the last connection came up, remembered for ViaLeft.
	// Zero ViaLeft means that none came up of late.
	Via     CMPath
	ViaLeft time.Duration
}

// HandOver ends the interface for a process that takes it over with its link-layer
// address. It sends a DREQ for every connection that is up, and forgets the destinations as
// Shutdown does. Neighbours, groups and addresses stay.
type HandOver struct{}

func (HandOver) step(f *Interface) {
	for _, c := range f.conns.byAge() {
		f.hangUp(c, "the next process takes over")
	}
	f.fibStep(fib.Stop{})
	f.shutdown = true
}

// Memory returns what the interface knows of others.
func (f *Interface) Memory() Memory {
	var m Memory
	for _, n := range f.neigh.Neighbors() {
		if n.State.Known() {
			m.Neighbours = append(m.Neighbours, KnownNeighbour{Addr: n.IP, Link: n.LinkAddr, Router: n.Router})
		}
	}
	for _, p := range f.allPeers() {
		k := KnownPeer{Link: p.key, Class: p.class, Legacy: p.legacy, Via: p.via,
			Left: max(0, p.classUntil.Sub(f.now)), ViaLeft: max(0, p.viaUntil.Sub(f.now))}
		if k.Class != ClassUnknown || k.ViaLeft > 0 {
			m.Peers = append(m.Peers, k)
		}
	}
	return m
}

// recall adds what an earlier process knew. It changes nothing that is known already.
func (f *Interface) recall(m Memory) {
	for _, k := range m.Peers {
		if !f.allows(k.Link.GID) || k.Link.Key() == f.link.Key() || len(f.peers.byLink) >= f.opt.maxPeers() {
			continue
		}
		p := f.peer(k.Link)
		if p.class == ClassUnknown {
			p.class, p.legacy = k.Class, k.Legacy
			p.classUntil = f.now.Add(min(k.Left, classMemory))
		}
		if left := min(k.ViaLeft, classMemory); left > 0 && p.viaUntil.IsZero() {
			p.via, p.viaUntil = k.Via, f.now.Add(left)
			p.inbandHeard = p.inbandHeard || k.Via == ViaInband
		}
	}
	for _, k := range m.Neighbours {
		if f.allows(k.Link.GID) && k.Link.Key() != f.link.Key() {
			f.neighStep(neigh.Recall{IP: k.Addr, LinkAddr: k.Link, Router: k.Router})
		}
	}
}
