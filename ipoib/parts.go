package ipoib

import (
	"fmt"
	"net/netip"
	"slices"

	"ipoibcm/cm"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/neigh"
	"ipoibcm/wire/encap"
)

// This file feeds the parts and turns their actions into ours. A part's action
// may lead to another Step of the same part; by then its first Step is over.

// confirmed says that the peer at key has received what we sent.
func confirmed(key encap.LinkAddr) neigh.Event { return neigh.ConfirmedLink{LinkAddr: key} }

// doubted says that something sent to the peer at key had no answer.
func doubted(key encap.LinkAddr) neigh.Event { return neigh.DoubtedLink{LinkAddr: key} }

func (f *Interface) cmStep(ev cm.Event) {
	for _, a := range f.cm.Step(nil, f.now, ev) {
		f.onCM(a)
	}
}

func (f *Interface) onCM(a cm.Action) {
	switch a := a.(type) {
	case cm.SendMAD:
		if viaOf(a.MAD.QPN) == ViaInband {
			f.sendInband(a.MAD)
			return
		}
		if p := f.pathTo(a.MAD.Remote); p.DLID != 0 && a.MAD.Path.DLID == 0 {
			a.MAD.Path = p
		}
		f.do(SendMAD{MAD: a.MAD})
	case cm.RequestReceived:
		f.requested(a)
	case cm.ReplyReceived:
		f.replied(a)
	case cm.Established:
		c := f.conns.byHandle[a.Handle]
		if c == nil {
			f.count(dropStaleHandle)
			return
		}
		c.params = a.Params
		c.params.PrivateData = nil // read already
		how := "the peer's request"
		if a.Active {
			how = "our request"
		} else if a.ByData {
			how = "the peer's request, by data before its RTU"
		}
		f.proveByRTU(c, a.RTUPrivateData)
		f.established(c, how)
	case cm.LateRTU:
		if c := f.conns.byHandle[a.Handle]; c != nil {
			f.proveByRTU(c, a.PrivateData)
		}
	case cm.Failed:
		f.cmFailed(a)
	case cm.Disconnected:
		c := f.conns.byHandle[a.Handle]
		if c == nil {
			return // we hung up
		}
		why := fmt.Sprintf("ended by %v", a.By)
		if a.Reason != 0 {
			why += ", " + a.Reason.String()
			c.peer.diagnose().lastREJ = a.Reason.String() + " on a connection"
		}
		if a.By != cm.ByUser {
			f.count(nDREQByPeer)
		}
		if c.state == connUp {
			f.lost(c, why)
		} else {
			f.acceptFailed(c, why)
		}
	case cm.Released:
	case cm.Note:
		f.cmNote(a)
	default:
		panic(fmt.Sprintf("ipoib: unknown action %T of cm", a))
	}
}

// proveByRTU takes private data with the peer's UD QPN in an RTU as proof that the peer follows
// RFC 4755: Linux sends none.
func (f *Interface) proveByRTU(c *conn, b []byte) {
	var pd encap.PrivateData
	if pd.UnmarshalBinary(b) == nil && pd.QPN != 0 && pd.QPN == c.peer.key.QPN {
		f.setClass(c.peer, ClassRFC, "its RTU has private data")
	}
}

func (f *Interface) cmFailed(a cm.Failed) {
	c := f.conns.byHandle[a.Handle]
	if c == nil {
		return // we gave it up
	}
	if c.active {
		f.dialFailed(c, a)
		return
	}
	why := a.Cause.String()
	if a.Cause == cm.Rejected {
		f.count(nREJReceived)
		why += ", " + a.Reason.String()
		c.peer.diagnose().lastREJ = a.Reason.String() + " to our REP"
	}
	f.acceptFailed(c, why)
}

// cmNote passes a note of the CM on, with our names of connection and peer.
func (f *Interface) cmNote(a cm.Note) {
	if a.Drop != cm.NotDropped && !f.mayTell() {
		return
	}
	n := Note{Kind: NoteConn, Peer: encap.LinkAddr{GID: a.Remote}}
	switch a.Dir {
	case cm.Sent:
		n.Kind = NoteCMSent
	case cm.Received:
		n.Kind = NoteCMRecv
	}
	if c := f.conns.byHandle[a.Handle]; c != nil {
		n.Conn, n.Peer = c.id, c.peer.key
		if a.Dir == cm.Received && a.Inband && a.Drop == cm.NotDropped {
			f.heardInband(c.peer) // only a message about a connection on record proves that the peer sent it
		}
	}
	n.Text = a.String()
	f.do(n)
}

func (f *Interface) neighStep(ev neigh.Event) {
	for _, a := range f.neigh.Step(nil, f.now, ev) {
		f.onNeigh(a)
	}
}

func (f *Interface) onNeigh(a neigh.Action) {
	switch a := a.(type) {
	case neigh.SendUD:
		fr := frameOf(a.EtherType, a.Payload)
		switch {
		case a.To.Broadcast:
			f.copies.class = classOf(a.To)
			f.sendMGID(f.group.Table().Broadcast(), fr)
		case a.To.Group.IsValid():
			f.copies.class = classOf(a.To)
			f.sendGroup(a.To.Group, fr)
		default:
			f.sendTo(a.To.LinkAddr, fr)
		}
		f.copies.class = copyOther
	case neigh.Resolved:
		f.learn(a.IP, a.LinkAddr)
		f.note(Note{Kind: NoteNeigh, Addr: a.IP, Peer: a.LinkAddr.Key(), Text: fmt.Sprintf("%v is at %v", a.IP, a.LinkAddr)})
	case neigh.Changed:
		f.learn(a.IP, a.New)
		f.note(Note{Kind: NoteNeigh, Addr: a.IP, Peer: a.New.Key(), Report: PeerMoved, Text: fmt.Sprintf("%v moved from %v to %v", a.IP, a.Old, a.New)})
	case neigh.Expired:
		f.unlearn(a.IP, a.Reason)
		f.note(Note{Kind: NoteNeigh, Addr: a.IP, Peer: a.LinkAddr.Key(), Text: fmt.Sprintf("%v is no longer known: %v", a.IP, a.Reason)})
	case neigh.Deliver:
		f.deliver(a.IP, a.LinkAddr, a.Packet)
	case neigh.Failed:
		f.noAnswerFor(a.IP)
		f.note(Note{Kind: NoteNeigh, Addr: a.IP, Text: fmt.Sprintf("nobody answers for %v", a.IP)})
	case neigh.Discard: // counted by neigh
		f.unreached(a)
	case neigh.AddrVerified:
		f.note(Note{Kind: NoteAddr, Addr: a.IP, Text: fmt.Sprintf("%v has no duplicate", a.IP)})
	case neigh.Duplicate:
		f.note(Note{Kind: NoteAddr, Addr: a.IP, Peer: a.By.Key(), Report: DuplicateAddress, Text: fmt.Sprintf("%v is a duplicate, also used by %v", a.IP, a.By)})
		if f.addrs.own.IsValid() && a.IP == f.addrs.own.Addr() && !a.Yielded {
			f.do(RemoveAddr{Prefix: f.addrs.own})
			f.addrs.own = netip.Prefix{}
		}
	case neigh.Conflict:
		f.note(Note{Kind: NoteAddr, Addr: a.IP, Peer: a.By.Key(), Text: fmt.Sprintf("%v is claimed by %v as well", a.IP, a.By)})
	case neigh.AskOther:
		f.do(AskOther{Addr: a.IP})
	case neigh.Refused: // counted by neigh
		if f.mayTell() {
			f.note(Note{Kind: NoteNeigh, Addr: a.IP, Peer: a.From.Key(), Text: refusal(a)})
		}
	default:
		panic(fmt.Sprintf("ipoib: unknown action %T of neigh", a))
	}
}

func (f *Interface) groupStep(ev group.Event) {
	for _, a := range f.group.Step(nil, f.now, ev) {
		switch a := a.(type) {
		case group.Join:
			f.note(Note{Kind: NoteGroup, Text: fmt.Sprintf("joining %v", a.MGID)})
			f.joinGroup(a.MGID)
		case group.Leave:
			f.note(Note{Kind: NoteGroup, Text: fmt.Sprintf("leaving %v", a.MGID)})
			f.leaveGroup(a.MGID)
		case group.Publish:
			f.do(PublishGroups{Table: a.Table})
			f.settleGroups()
		default:
			panic(fmt.Sprintf("ipoib: unknown action %T of group", a))
		}
	}
}

// used notes that packets have gone to p.
func (f *Interface) used(p *peer) {
	for _, a := range slices.Clone(p.addrs) {
		f.neighStep(neigh.Used{IP: a})
	}
	f.usedPath(p)
}

// usage takes the counts of the data path: they show which connections and neighbours are in
// use, and RC acknowledgements prove that a neighbour is reachable (RFC 4861 section 7.3.1).
func (f *Interface) usage(ev Usage) {
	for _, u := range ev.Conns {
		c := f.conns.byID[u.Conn]
		if c == nil {
			continue
		}
		old := c.use
		c.use = u
		if u.TxPackets != old.TxPackets || u.RxPackets != old.RxPackets {
			c.used = f.now
			if c.state == connUp {
				f.conns.inUse.Remove(c)
				f.conns.inUse.Push(c)
			}
		}
		if u.RxPackets != old.RxPackets {
			f.heardFrom(c.peer.key.GID)
			CommEst{u.Conn}.step(f) // the provider's event may be missing
		}
		if u.TxPackets != old.TxPackets {
			f.used(c.peer)
		}
		if c.trans == ib.RC && u.TxPackets-u.TxUnacked > old.TxPackets-old.TxUnacked {
			f.neighStep(confirmed(c.peer.key))
		}
	}
	for _, u := range ev.UD {
		p := f.peers.byLink[u.Link.Key()]
		if p == nil || p.udPackets == u.TxPackets {
			continue
		}
		p.udPackets = u.TxPackets
		f.used(p)
	}
	f.counted = f.now
	for f.atCapacity && len(f.conns.byID) >= f.leaveAt() && f.letIdleGo() { // each call ends one connection
	}
	for _, c := range f.conns.byID { // in any order: only wake closes connections
		f.arm(c.peer, f.idleEnd(c))
	}
}
