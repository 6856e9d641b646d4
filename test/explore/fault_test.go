package explore

import (
	"encoding/binary"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// A fault breaks a rule of one machine from outside: it stands between machine
// and fabric and changes what it sees and says so that the two together behave
// as a machine that has the rule wrong. Production code knows nothing of it.
type fault struct {
	// view changes the UD QPNs that the machine sees, its own included, and
	// changes them back on the way out. A machine that compares addresses of a
	// mirrored world compares them wrongly in this one.
	view func(w *world, n *node, q ib.QPN) ib.QPN
	// in and out see each message after and before that, and may change it, or
	// swallow it by returning nil.
	in, out func(w *world, n *node, from ib.GID, msg mad.Message) mad.Message
	// deaf machines are not told of data on a queue pair.
	deaf bool
}

func (n *node) see(w *world, q ib.QPN) ib.QPN {
	if n.fault == nil || n.fault.view == nil {
		return q
	}
	return n.fault.view(w, n, q)
}

func (x *fault) receive(w *world, n *node, m *verbs.MAD) bool {
	return x.pass(m, func(msg mad.Message) mad.Message {
		if x.in != nil {
			if msg = x.in(w, n, m.Remote, msg); msg == nil {
				return nil
			}
		}
		return seen(msg, func(q ib.QPN) ib.QPN { return n.see(w, q) })
	})
}

func (x *fault) send(w *world, n *node, m *verbs.MAD) bool {
	return x.pass(m, func(msg mad.Message) mad.Message {
		msg = seen(msg, func(q ib.QPN) ib.QPN { return n.see(w, q) })
		if x.out != nil {
			return x.out(w, n, m.Local, msg)
		}
		return msg
	})
}

func (x *fault) pass(m *verbs.MAD, f func(mad.Message) mad.Message) bool {
	_, msg, err := mad.Parse(m.Data[:])
	if err != nil {
		return true
	}
	if msg = f(msg); msg == nil {
		return false
	}
	m.Data = [verbs.MADLen]byte{}
	msg.AppendBinary(m.Data[:0]) // the error is always nil
	return true
}

// seen changes the UD QPNs of a message.
func seen(msg mad.Message, f func(ib.QPN) ib.QPN) mad.Message {
	switch m := msg.(type) {
	case mad.REQ:
		form, q := serviceid.Parse(m.ServiceID)
		m.ServiceID = serviceid.New(form, f(q))
		setUDQPN(m.PrivateData[:], f)
		return m
	case mad.REP:
		setUDQPN(m.PrivateData[:], f)
		return m
	case mad.RTU:
		setUDQPN(m.PrivateData[:], f)
		return m
	case mad.REJ:
		setUDQPN(m.PrivateData[:], f)
		return m
	case mad.MRA:
		setUDQPN(m.PrivateData[:], f)
		return m
	}
	return msg
}

// setUDQPN changes the UD QPN of private data, if there is one.
func setUDQPN(pd []byte, f func(ib.QPN) ib.QPN) {
	if q := ib.QPN(binary.BigEndian.Uint32(pd) & 0xffffff); q != 0 {
		binary.BigEndian.PutUint32(pd, uint32(f(q)))
	}
}

// put sends a message in n's name.
func (w *world) put(n *node, to ib.GID, msg mad.Message) {
	m := &verbs.MAD{Remote: to, PKey: ib.DefaultPKey}
	msg.AppendBinary(m.Data[:0])
	x := n.fault
	n.fault = nil
	w.sendMAD(n, m, false)
	n.fault = x
}

// answer sends a REJ to a REQ in n's name.
func (w *world) answer(n *node, to ib.GID, req mad.REQ, why cm.Reason) {
	rej := mad.REJ{RemoteCommID: req.LocalCommID, MessageRejected: mad.KindREQ, Reason: why}
	pd, _ := encap.PrivateData{QPN: n.link.QPN, ReceiveMTU: 65524}.AppendBinary(nil)
	copy(rej.PrivateData[:], pd)
	w.put(n, to, rej)
}

// mirror swaps one's own UD QPN with that of host 0 (or, for host 0, of host
// 1): who was larger seems smaller.
func mirror(w *world, n *node, q ib.QPN) ib.QPN {
	other := w.nodes[0]
	if n.index == 0 {
		other = w.nodes[1]
	}
	switch q {
	case n.link.QPN:
		return other.link.QPN
	case other.link.QPN:
		return n.link.QPN
	}
	return q
}

// Broken rules.
var (
	// The comparison is the wrong way round.
	reversed = &fault{view: mirror}
	// Our flags are still in our address, those of the peer, which a REQ does
	// not tell, are not in its own: we are always larger.
	flagsLeft = &fault{view: func(_ *world, n *node, q ib.QPN) ib.QPN {
		if q&^viewQPN == n.link.QPN {
			q ^= viewQPN
		}
		return q
	}}
	// GIDs are compared first: as if the QPNs were in their order.
	gidFirst = &fault{view: func(w *world, n *node, q ib.QPN) ib.QPN {
		other := w.nodes[1-n.index] // made for two hosts
		if (n.link.QPN < other.link.QPN) == (n.gid < other.gid) {
			return q
		}
		return mirror(w, n, q)
	}}
	// A verdict is a failure for the one who gets it and for the one who gives
	// it, who lets go of its own REQ as well.
	rejFatal = &fault{
		in: func(_ *world, _ *node, _ ib.GID, msg mad.Message) mad.Message {
			if rej, ok := msg.(mad.REJ); ok && rej.Reason == cm.ReasonConsumer {
				rej.Reason = cm.ReasonNoResources
				return rej
			}
			return msg
		},
		out: func(w *world, n *node, to ib.GID, msg mad.Message) mad.Message {
			if rej, ok := msg.(mad.REJ); ok && rej.Reason == cm.ReasonConsumer && rej.MessageRejected == mad.KindREQ {
				if c, ok := n.outstanding(w.byGID(to)); ok {
					own := mad.REJ{RemoteCommID: mad.CommID(c.LocalComm), MessageRejected: mad.KindREQ, Reason: cm.ReasonNoResources}
					m := &verbs.MAD{Local: n.link.GID, Remote: to, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
					own.AppendBinary(m.Data[:0])
					w.step(n.index, ipoib.RecvMAD{MAD: m})
				}
			}
			return msg
		},
	}
	// A REQ that comes again is taken for a new one.
	duplicateREQ = &fault{
		in: func(_ *world, n *node, _ ib.GID, msg mad.Message) mad.Message {
			req, ok := msg.(mad.REQ)
			if !ok {
				return msg
			}
			n.seen[uint64(req.LocalCommID)]++
			if times := n.seen[uint64(req.LocalCommID)]; times > 1 {
				req.LocalCommID |= mad.CommID(times) << 28
				req.LocalQPN |= ib.QPN(times) << 21
			}
			return req
		},
		out: func(_ *world, _ *node, _ ib.GID, msg mad.Message) mad.Message {
			switch m := msg.(type) { // the peer knows the numbers that it gave
			case mad.REP:
				m.RemoteCommID &= 1<<28 - 1
				return m
			case mad.REJ:
				m.RemoteCommID &= 1<<28 - 1
				return m
			}
			return msg
		},
	}
	// An RTU is sent once only, and data does not stand for it.
	rtuOnce = &fault{deaf: true, out: func(_ *world, n *node, _ ib.GID, msg mad.Message) mad.Message {
		if rtu, ok := msg.(mad.RTU); ok {
			if n.seen[uint64(rtu.LocalCommID)]++; n.seen[uint64(rtu.LocalCommID)] > 1 {
				return nil
			}
		}
		return msg
	}}
	// A REQ for the mode other than that of ours is none of the crossing's
	// business: as if it came from another address.
	keyedByMode = &fault{in: func(w *world, n *node, from ib.GID, msg mad.Message) mad.Message {
		if req, ok := msg.(mad.REQ); ok {
			if c, ok := n.outstanding(w.byGID(from)); ok && c.Transport != req.Transport {
				setUDQPN(req.PrivateData[:], func(q ib.QPN) ib.QPN { return q | 0x10000 })
			}
			return req
		}
		return msg
	}}
	// A 0x01 REQ that meets a 0x10 REQ of ours loses the comparison, and nobody
	// gets a connection to send on.
	blackhole = &fault{in: func(w *world, n *node, from ib.GID, msg mad.Message) mad.Message {
		if req, ok := msg.(mad.REQ); ok {
			form, _ := serviceid.Parse(req.ServiceID)
			if c, ok := n.outstanding(w.byGID(from)); ok && form == serviceid.RFC && isLegacy(c.ServiceID) {
				w.answer(n, from, req, cm.ReasonConsumer)
				return nil
			}
		}
		return msg
	}}
	// REJ 8 makes a peer legacy, even if it says by its UD QPN that it is not.
	rej8Legacy = &fault{in: func(_ *world, _ *node, _ ib.GID, msg mad.Message) mad.Message {
		if rej, ok := msg.(mad.REJ); ok && rej.Reason == cm.ReasonInvalidServiceID {
			rej.PrivateData = [148]byte{}
			return rej
		}
		return msg
	}}
	// One connection per peer is enough: further REQs are refused.
	noRedial = &fault{in: func(w *world, n *node, from ib.GID, msg mad.Message) mad.Message {
		if req, ok := msg.(mad.REQ); ok {
			for _, c := range n.f.Conns() {
				if c.Peer.GID == from && c.State == "ESTABLISHED" {
					w.answer(n, from, req, cm.ReasonConsumer)
					return nil
				}
			}
		}
		return msg
	}}
)

func isLegacy(id uint64) bool {
	form, _ := serviceid.Parse(serviceid.ID(id))
	return form == serviceid.Legacy
}
