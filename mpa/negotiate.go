package mpa

import (
	"cmp"
	"errors"
	"time"
)

// Depths are the RDMA Read depths of the local endpoint.
type Depths struct {
	// IRD and ORD are the depths that the endpoint has and asks for. Zero
	// means that no RDMA Reads go that way; a Read RTR raises it to one.
	IRD, ORD Depth
	// MaxIRD is the IRD that can be provided if the peer needs it. Below IRD it
	// counts as IRD.
	MaxIRD Depth
	// MinORD is, for a responder, the least ORD that its ULP needs. It rejects a request
	// whose IRD is smaller; MinORD is the ORD in that reply, so that the initiator can offer more.
	MinORD Depth
}

// Limited returns d with no depth above MaxDepth, ORD at least MinORD, and MaxIRD at
// least IRD. It is exported, like the methods of [Options], for package sctp: SCTP has
// another startup, and the same negotiation.
func (d Depths) Limited() Depths {
	d.IRD, d.ORD, d.MinORD = min(d.IRD, MaxDepth), min(d.ORD, MaxDepth), min(d.MinORD, MaxDepth)
	d.ORD = max(d.ORD, d.MinORD)
	d.MaxIRD = min(max(d.MaxIRD, d.IRD), MaxDepth)
	return d
}

// Options configures an [Initiator], a [Responder] or an endpoint of package sctp. The zero
// value is a client-server connection without any negotiation of depths.
type Options struct {
	Depths

	// Negotiate makes an initiator negotiate IRD and ORD. A responder does so whenever the
	// initiator asks.
	Negotiate bool
	// ULPIRD and ULPORD make an initiator exclude IRD or ORD from the negotiation: the ULP agrees
	// on that depth, and the request has 0x3FFF in its place.
	ULPIRD, ULPORD bool
	// PeerToPeer makes an initiator ask for the peer-to-peer model: it sends an RTR indication, and
	// either side may then send first.
	PeerToPeer bool
	// RTR are the kinds of RTR indication that can be generated (initiator) or
	// taken (responder). Zero means all.
	RTR RTRTypes
	// StrictIRD makes a responder reject a request whose ORD is above MaxIRD. Otherwise it accepts
	// the request with MaxIRD.
	StrictIRD bool

	// Revision is that of the frames. 1 means revision 1 only: a frame of another revision closes
	// TCP. With 2 an initiator sends revision 2 even if the request is not enhanced. With zero it
	// sends 2 if the request is enhanced and 1 otherwise. A responder replies in the revision of
	// the request.
	Revision uint8
	// Fallback makes an initiator try again on another TCP connection, with a request that is not
	// enhanced, if the peer has closed TCP after the enhanced request or has sent an unenhanced
	// reply. Depths and RTR are then the ULP's business. Off by default.
	Fallback bool
	// Markers and CRC ask for markers in what is received, and for CRCs.
	Markers, CRC bool

	// Timeout bounds the wait for the peer's whole startup frame, however it
	// drips in. Zero means 10 s for an initiator and 5 s for a responder.
	Timeout time.Duration
	// RTRTimeout bounds a responder's wait for the RTR indication after its reply.
	// Zero means 10 s. In the client-server model there is no such bound: the
	// client may be silent as long as it likes.
	RTRTimeout time.Duration
}

func (o *Options) rtr() RTRTypes { return cmp.Or(o.RTR, RTRAll) & RTRAll }

// Enhanced reports whether an initiator's request is enhanced.
func (o *Options) Enhanced() bool { return o.Revision != 1 && (o.Negotiate || o.PeerToPeer) }

// Check refuses options that cannot work.
func (o *Options) Check(initiator bool) error {
	switch {
	case o.Revision > 2:
		return errors.New("mpa: there is no such revision")
	case o.Revision == 1 && initiator && (o.PeerToPeer || o.Negotiate) && !o.Fallback:
		return errors.New("mpa: revision 1 has no peer-to-peer model and negotiates no depths")
	case o.RTR == RTRNone && (o.PeerToPeer || !initiator) && o.Revision != 1:
		// RFC 6581 section 9.2: at least one option is to be supported.
		return errors.New("mpa: no kind of RTR indication is supported")
	}
	return nil
}

// Offer returns the enhanced data of an initiator's request, and the IRD and ORD that it
// keeps itself. If it offers an RDMA Read as its RTR, its ORD is at least one.
func (o *Options) Offer() (Enhanced, Depths) {
	d := o.Depths.Limited()
	var e Enhanced
	if o.PeerToPeer {
		e.PeerToPeer, e.RTR = true, o.rtr()
		if e.RTR&RTRRead != 0 && d.ORD == 0 {
			d.ORD = 1
		}
	}
	e.IRD, e.ORD = d.IRD, d.ORD
	if o.ULPIRD || !o.Negotiate {
		e.IRD = DepthULP
	}
	if o.ULPORD || !o.Negotiate {
		e.ORD = DepthULP
	}
	return e, d
}

// Answer returns the enhanced data of a responder's reply to req, and the responder's depths after
// that reply (RFC 6581 sections 9.1 and 9.2). own are its depths before. If why is not ReasonNone,
// the reply must reject.
func (o *Options) Answer(req Enhanced, own Depths) (rep Enhanced, d Depths, why Reason) {
	d = own.Limited()
	if req.PeerToPeer {
		rep.PeerToPeer = true
		if rep.RTR = req.RTR & o.rtr(); rep.RTR == 0 {
			rep.RTR = o.rtr() // tells the initiator which kinds we take
		}
	}
	switch {
	case req.IRD == DepthULP:
		rep.ORD = DepthULP
	case req.IRD < d.MinORD:
		rep.ORD, why = d.MinORD, ReasonNeedORD // only a rejection may ask for more
	default:
		d.ORD = min(d.ORD, req.IRD)
		rep.ORD = d.ORD
	}
	if req.ORD == DepthULP {
		rep.IRD = DepthULP
		return rep, d, why
	}
	if o.StrictIRD && req.ORD > d.MaxIRD && why == ReasonNone {
		why = ReasonStrictIRD
	}
	d.IRD = max(d.IRD, min(req.ORD, d.MaxIRD))
	if rep.RTR&RTRRead != 0 && d.IRD == 0 {
		d.IRD = 1
	}
	rep.IRD = d.IRD
	return rep, d, why
}

// Settle reads an accepting enhanced reply for an initiator. It returns the initiator's
// depths, and the RTR indication to send, of one kind or none.
func (o *Options) Settle(asked, rep Enhanced, d Depths) (Depths, RTRTypes, *Error) {
	if rep.ORD != DepthULP && rep.ORD > d.IRD {
		if rep.ORD > d.MaxIRD {
			return d, 0, fault(ReasonIRD, "the responder needs IRD %v, %v is there", rep.ORD, d.MaxIRD)
		}
		d.IRD = rep.ORD
	}
	if rep.IRD != DepthULP {
		d.ORD = min(d.ORD, rep.IRD)
	}
	if rep.PeerToPeer != asked.PeerToPeer {
		return d, 0, fault(ReasonModel, "flag A asked %v, answered %v", asked.PeerToPeer, rep.PeerToPeer)
	}
	if !asked.PeerToPeer {
		return d, 0, nil
	}
	common := rep.RTR & asked.RTR
	if d.ORD == 0 {
		common &^= RTRRead // not even one Read may be outstanding
	}
	// The cheapest first: a Write takes no buffer, no MSN and no answer.
	for _, t := range [...]RTRTypes{RTRWrite, RTRRead, RTRSend} {
		if common&t != 0 {
			return d, t, nil
		}
	}
	return d, 0, fault(ReasonNoRTR, "we generate %v, the responder takes %v with IRD %v", asked.RTR, rep.RTR, rep.IRD)
}
