package ipoib

import (
	"fmt"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// CM messages in-band are an extension to RFC 4755 for hosts where QP 1 cannot be
// had, because the kernel's CM owns it. The whole MAD that would go to QP 1 goes
// behind an encapsulation header of type [encap.InbandCM] from UD QP to UD QP.
// The messages and their handling are the same on both paths.

// A CMTransport is the policy for the path of CM messages.
type CMTransport uint8

// Policies.
const (
	CMAuto   CMTransport = iota // QP 1 where it leads to the peer, else in-band; answers go where the question came from
	CMGSI                       // QP 1 only
	CMInband                    // in-band only; QP 1 is left alone
)

// ParseCMTransport reads what [CMTransport.String] prints.
func ParseCMTransport(s string) (CMTransport, error) {
	for t := CMAuto; t <= CMInband; t++ {
		if t.String() == s {
			return t, nil
		}
	}
	return 0, fmt.Errorf("CM transport %q is none of auto, gsi, inband", s)
}

// String prints auto, gsi or inband.
func (t CMTransport) String() string {
	return [...]string{"auto", "gsi", "inband"}[min(t, CMInband)]
}

// A CMPath is one of the two paths that a CM message can take.
type CMPath uint8

// Paths.
const (
	ViaGSI    CMPath = iota // QP 1
	ViaInband               // the UD QPs
)

// String prints gsi or inband.
func (v CMPath) String() string { return [...]string{"gsi", "inband"}[min(v, ViaInband)] }

// where prints the path for the end of a sentence.
func (v CMPath) where() string { return [...]string{"at QP 1", "in-band"}[min(v, ViaInband)] }

// viaOf returns the path of a connection whose messages go to QP q of the peer.
func viaOf(q ib.QPN) CMPath {
	if q == ib.QPNGSI || q == 0 {
		return ViaGSI
	}
	return ViaInband
}

const (
	// maxInbandSilence is how many attempts in-band a peer may leave without any
	// answer before it counts as a peer of another make, which knows no messages in-band.
	// Afterwards it is asked in-band again after classMemory, twice that, and so on.
	maxInbandSilence = 4
	// maxInbandPause bounds these pauses.
	maxInbandPause = 24 * time.Hour
)

// gsi and inband report which paths the policy and the provider leave open.
func (f *Interface) gsi() bool {
	return f.opt.CMTransport == CMGSI || f.opt.CMTransport == CMAuto && !f.opt.NoGSI
}

func (f *Interface) inband() bool { return f.opt.CMTransport != CMGSI }

// foreignREQs reports whether REQs to our QP 1 reach somebody else: on an InfiniBand port the
// kernel's ib_cm, which rejects them all. A host with Linux's driver would then drop its packets
// for us, and ask again with each packet. So we announce no mode, and such hosts send by UD.
// Our own kind asks in-band all the same (see transport).
func (f *Interface) foreignREQs() bool { return f.fab != nil && !f.gsi() }

// cmVia returns the path for a REQ to p, within what policy and provider allow: the path that
// this attempt has turned to, else the one that the last connection came up on, or QP 1 if
// that is longer ago than classMemory.
func (f *Interface) cmVia(p *peer) CMPath {
	switch {
	case !f.gsi():
		return ViaInband
	case !f.inband():
		return ViaGSI
	case p.turned:
		return p.turnedTo
	case f.now.Before(p.viaUntil):
		return p.via
	}
	return ViaGSI
}

// turn goes on over the other path with the attempt that c was part of, once in
// each attempt. It reports whether it did.
func (f *Interface) turn(c *conn, why string) bool {
	p := c.peer
	to := ViaInband
	if c.via == ViaInband {
		to = ViaGSI
	}
	switch {
	case p.turned || !f.gsi() || !f.inband():
		return false
	case to == ViaInband && p.legacy: // only our own kind knows messages in-band
		return false
	case to == ViaInband && f.now.Before(p.inbandAfter):
		f.count(nInbandSpared)
		return false
	}
	p.turned, p.turnedTo, p.diagnose().viaWhy = true, to, why
	if to == ViaInband {
		f.count(nInbandTurns)
		f.again(p, "in-band, because "+why)
	} else {
		f.again(p, "by QP 1, because "+why)
	}
	return true
}

// unanswered notes that p left an attempt in-band without an answer.
func (f *Interface) unanswered(p *peer) {
	if p.via == ViaInband {
		p.viaUntil = time.Time{}
	}
	if p.inbandHeard {
		return // the peer knows messages in-band: it is away
	}
	p.inbandSilence++
	if over := p.inbandSilence - maxInbandSilence; over >= 0 {
		pause := min(classMemory<<min(over, 16), maxInbandPause)
		p.inbandAfter = f.now.Add(pause)
		f.count(nInbandGivenUp)
		f.note(Note{Kind: NoteConn, Peer: p.key, Text: fmt.Sprintf("it has never answered in-band: not asked so again for %v", pause)})
	}
}

// heardInband notes that p knows messages in-band.
func (f *Interface) heardInband(p *peer) {
	p.inbandHeard, p.inbandSilence, p.legacy = true, 0, false
	if p.via == ViaInband && !p.viaUntil.IsZero() {
		p.viaUntil = f.now.Add(classMemory)
	}
	if !p.inbandAfter.IsZero() && p.holdUntil.Equal(p.inbandAfter) {
		p.holdUntil = f.now
		f.arm(p, f.now)
	}
	p.inbandAfter = time.Time{}
}

// remember notes the path of CM messages on which a connection with p came up.
func (f *Interface) remember(p *peer, via CMPath) {
	if via == ViaInband {
		switch {
		case !f.gsi():
			if p.diagnostics().viaWhy != "" {
				p.diagnose().viaWhy = ""
			}
		case !p.turned && (p.via != ViaInband || p.diagnostics().viaWhy == ""):
			p.diagnose().viaWhy = "the peer asked so"
		}
		f.count(nInbandEstablished)
	}
	p.via, p.viaUntil = via, f.now.Add(classMemory)
}

// sendInband sends a MAD to the UD QP that it names.
func (f *Interface) sendInband(m *verbs.MAD) {
	f.count(nInbandSent)
	f.sendTo(encap.LinkAddr{QPN: m.QPN, GID: m.Remote}, frameOf(encap.InbandCM, m.Data[:]))
}

// recvInband takes a MAD from the UD QP. It drops a message without a known sender, or a
// REQ whose packet comes from elsewhere than the REQ says, without a word: an answer would
// go to the host that the message names.
func (f *Interface) recvInband(ev RecvFrame) {
	f.count(nInbandReceived)
	from := encap.LinkAddr{QPN: ev.SrcQPN, GID: ev.SrcGID}
	in := &verbs.MAD{Remote: ev.SrcGID, Local: ev.DstGID, QPN: ev.SrcQPN, PKey: f.opt.pkey()}
	body := ev.Frame[encap.HeaderLen:]
	what := "MAD"
	if len(body) == verbs.MADLen {
		copy(in.Data[:], body)
		if h, _, err := mad.Parse(body); err == nil {
			what = h.Attr.String()
		}
	}
	if c, why := f.unfitInband(ev, in); why != "" {
		f.count(c)
		if !f.mayTell() {
			return
		}
		f.note(Note{Kind: NoteCMRecv, Peer: from, Text: fmt.Sprintf("received %s in-band dropped: %s", what, why)})
		return
	}
	if f.fab != nil { // the connection takes the path that the administrator knows
		if !f.takePath(ev.SrcGID) {
			f.wantPath(ev.SrcGID)
			f.count(dropPathQueue) // the peer repeats the message
			return
		}
		in.Path = f.pathTo(ev.SrcGID)
	}
	f.cmStep(cm.RecvInband{MAD: in})
}

// unfitInband says why the CM must not see a MAD in-band, and which counter counts it; why is
// empty if the CM may see it.
func (f *Interface) unfitInband(ev RecvFrame, in *verbs.MAD) (c counter, why string) {
	switch {
	case !f.allows(ev.SrcGID):
		return dropNotAllowed, "its sender is not allowed"
	case !f.inband():
		return dropInbandOff, "cm_transport is gsi"
	case len(ev.Frame)-encap.HeaderLen != verbs.MADLen || ev.SrcQPN <= ib.QPNGSI || ev.SrcQPN >= ib.QPNMulticast:
		return dropInbandMalformed, "no MAD, or from no UD QP"
	case ev.SrcGID.IsZero():
		return dropInbandSource, "the packet has no GRH, so its sender is not known"
	case ev.DstGID != f.link.GID:
		return dropInbandGroup, "it was not sent to our GID"
	case ev.SrcGID == f.link.GID && ev.SrcQPN == f.link.QPN:
		return dropReflected, "it is our own"
	}
	_, msg, err := mad.Parse(in.Data[:])
	if req, ok := msg.(mad.REQ); err == nil && ok {
		var pd encap.PrivateData
		_ = pd.UnmarshalBinary(req.PrivateData[:]) // it is long enough
		switch {
		case req.Primary.LocalGID != ev.SrcGID:
			return dropInbandSource, fmt.Sprintf("the REQ is from %v, the packet from %v", req.Primary.LocalGID, ev.SrcGID)
		case pd.QPN != ev.SrcQPN:
			return dropInbandSource, fmt.Sprintf("the REQ names UD QPN %v, the packet comes from %v", pd.QPN, ev.SrcQPN)
		}
	}
	return 0, ""
}

// recvMAD takes a MAD from QP 1.
func (f *Interface) recvMAD(m *verbs.MAD) {
	if !f.gsi() {
		f.count(dropGSIOff)
		if !f.mayTell() {
			return
		}
		f.note(Note{Kind: NoteCMRecv, Peer: encap.LinkAddr{GID: m.Remote}, Text: "received a MAD at QP 1 dropped: CM messages travel in-band only here"})
		return
	}
	f.nameSender(m)
	if !f.allows(m.Remote) {
		f.count(dropNotAllowed)
		return
	}
	f.cmStep(cm.RecvMAD{MAD: m})
}

// explainVia says which path CM messages to p take, and why.
func (f *Interface) explainVia(p *peer, say func(string, ...any)) {
	const how = "CM messages travel in-band, from UD QP to UD QP (an extension to RFC 4755): "
	switch {
	case f.opt.CMTransport == CMInband:
		say(how + "cm_transport is inband")
	case !f.gsi():
		say(how + "QP 1 cannot be had here")
	case f.cmVia(p) == ViaInband && p.turned:
		say(how+"%s", p.diagnostics().viaWhy)
	case f.cmVia(p) == ViaInband:
		say(how+"%s; remembered for %v", p.diagnostics().viaWhy, p.viaUntil.Sub(f.now).Round(time.Second))
	default:
		say("CM messages travel by QP 1")
	}
	if f.now.Before(p.inbandAfter) {
		say("the peer has never answered in-band; it is not asked so before %v have passed", p.inbandAfter.Sub(f.now).Round(time.Second))
	}
}
