package sim

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
	"ipoibcm/neigh"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// A heard is one CM message on the wire.
type heard struct {
	from, to *simfabric.Port
	at       time.Time
	msg      mad.Message
}

// listen keeps every CM message from now on.
func (w *world) listen() *[]heard {
	var out []heard
	w.f.Filter = func(from, to *simfabric.Port, ip []byte) bool {
		if isMAD(ip) {
			if _, msg, err := mad.Parse(ip[68:][:verbs.MADLen]); err == nil {
				out = append(out, heard{from, to, w.f.Now(), msg})
			}
		}
		return true
	}
	return &out
}

// forms lists the service ID forms of the REQs that h has sent to a.
func forms(all []heard, h *host, a *alien) (out []serviceid.Form) {
	for _, m := range all {
		if req, ok := m.msg.(mad.REQ); ok && m.from == h.port && m.to == a.port {
			form, _ := serviceid.Parse(req.ServiceID)
			out = append(out, form)
		}
	}
	return out
}

// raw sends h a message that the alien would not send by itself.
func (a *alien) raw(h *host, msg mad.Message) {
	m := &verbs.MAD{Remote: h.gid, Local: a.opt.Link.GID, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
	msg.AppendBinary(m.Data[:0])
	a.port.MADPort().SendMAD(m)
}

// req is an honest REQ to h; comm tells several apart.
func (a *alien) req(h *host, form serviceid.Form, comm mad.CommID) mad.REQ {
	req := mad.REQ{LocalCommID: comm, ServiceID: serviceid.New(form, h.link.QPN), LocalCAGUID: a.opt.GUID,
		LocalQPN: 0x1000 + ib.QPN(comm), Transport: ib.RC, PathMTU: ib.MTU1024, PKey: ib.DefaultPKey,
		RemoteCMResponseTimeout: 16, LocalCMResponseTimeout: 16, MaxCMRetries: 1}
	req.Primary = mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID, LocalGID: a.opt.Link.GID,
		RemoteGID: h.gid, LocalACKTimeout: 14}
	says(req.PrivateData[:], a.opt.Link.QPN, 65524)
	return req
}

func says(field []byte, qpn ib.QPN, receive uint32) {
	pd, _ := encap.PrivateData{QPN: qpn, ReceiveMTU: receive}.AppendBinary(nil)
	copy(field, pd)
}

// answer sends msg and returns the REJ or DREP that comes back within 10 ms, nil
// if none does.
func (a *alien) answer(h *host, msg mad.Message) mad.Message {
	n := len(a.mads)
	a.raw(h, msg)
	a.w.run(10 * time.Millisecond)
	for _, m := range a.mads[n:] {
		switch m.Attr() {
		case mad.AttrREJ, mad.AttrDREP:
			return m
		}
	}
	return nil
}

// rejected wants a REJ with a reason, and our own values in it.
func (a *alien) rejected(h *host, req mad.REQ, why mad.RejectReason) {
	a.w.t.Helper()
	rej, ok := a.answer(h, req).(mad.REJ)
	a.w.want(ok && rej.Reason == why, "the answer to a REQ is %v, want a REJ of %v", rej, why)
	var pd encap.PrivateData
	a.w.want(pd.UnmarshalBinary(rej.PrivateData[:]) == nil && pd.QPN == h.link.QPN && pd.ReceiveMTU == 65524,
		"the REJ says %+v", pd)
}

// rules are the interoperation rules of docs/rfc4755.md, each as something that
// goes well with it and not without.
var rules = []struct {
	name string
	do   func(w *world)
}{
	{"both-service-ids", func(w *world) { // listen on both service IDs, and remember which one a peer uses
		a, b, l := w.host(config{}), w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		all := w.listen()
		w.reaches(b.send(a.addr4(), 9000, true), 100*time.Millisecond, "a peer with 0x01")
		w.reaches(l.send(a.addr4(), 9000), 100*time.Millisecond, "a peer with 0x10")
		w.reaches(a.send(l.addr4(), 9000, true), 100*time.Millisecond, "to the peer with 0x10")
		w.want(slices.Equal(forms(*all, a, l), []serviceid.Form{serviceid.Legacy}),
			"the peer's class was not remembered: %v", forms(*all, a, l))
	}},
	{"0x01-then-0x10", func(w *world) { // 0x01 first, then 0x10 at once, and remember; the order is configurable
		tune := func(o *ipoib.Options) { o.Idle = time.Minute }
		a, l := w.host(config{tune: tune}), w.alien(100, foreign.Linux, nil)
		b := w.host(config{tune: func(o *ipoib.Options) { o.LinuxFirst = true }})
		w.run(2 * time.Second)
		all := w.listen()
		w.reaches(a.send(l.addr4(), 9000, true), 5*time.Millisecond, "with two REQs and no pause")
		w.run(70 * time.Second)
		own, _ := l.p.Up()
		w.want(len(own) == 0 && len(a.with2(l)) == 0, "the connection is still there")
		w.reaches(a.send(l.addr4(), 9000, true), 5*time.Millisecond, "with one REQ")
		want := []serviceid.Form{serviceid.RFC, serviceid.Legacy, serviceid.Legacy}
		w.want(slices.Equal(forms(*all, a, l), want), "forms %v, want %v", forms(*all, a, l), want)
		w.reaches(b.send(l.addr4(), 9000, true), 5*time.Millisecond, "with one REQ")
		w.want(slices.Equal(forms(*all, b, l), want[1:2]), "forms %v, want %v", forms(*all, b, l), want[1:2])
	}},
	{"0x10-REQ-receives", func(w *world) { // a 0x10 REQ is accepted always, used to receive only, and crosses nothing
		w.f.Delay = time.Millisecond
		a, l, m := w.host(config{}), w.alien(100, foreign.Linux, nil), w.alien(101, foreign.Linux, nil)
		w.run(2 * time.Second)
		// With l the REQs meet; m asks alone.
		p, q := a.send(l.addr4(), 9000, true), l.send(a.addr4(), 9000)
		w.reaches(p, 20*time.Millisecond, "our own connection")
		w.reaches(q, 20*time.Millisecond, "the peer's connection")
		w.reaches(m.send(a.addr4(), 9000), 20*time.Millisecond, "the peer's connection")
		for range 20 { // a peer that gets one of these on its own connection dies
			w.reaches(a.send(l.addr4(), 9000, true), 20*time.Millisecond, "our own connection")
			w.reaches(l.send(a.addr4(), 9000), 20*time.Millisecond, "the peer's connection")
			w.reaches(a.send(m.addr4(), 9000, true), 50*time.Millisecond, "our own connection")
		}
		w.want(a.m.Status().Crossings.Seen == 0 && len(a.with2(l)) == 2, "%+v, crossings %+v", a.with2(l),
			a.m.Status().Crossings)
	}},
	{"0x01-both-ways", func(w *world) { // a 0x01 connection is for both directions, whatever the mode, and the only one
		w.f.Delay = time.Millisecond
		a, b := w.host(config{mode: ipoib.ModeRC}), w.host(config{mode: ipoib.ModeAuto})
		w.run(2 * time.Second)
		p, q := a.send(b.addr4(), 9000, true), b.send(a.addr4(), 9000, true)
		w.reaches(p, 50*time.Millisecond, "crossing")
		w.reaches(q, 50*time.Millisecond, "crossing")
		w.run(time.Second)
		w.arrives(a, b.addr4(), 9000, rc, 50*time.Millisecond)
		w.arrives(b, a.addr4(), 9000, rc, 50*time.Millisecond)
		w.want(len(a.with(b)) == 1 && a.mads[mad.AttrREQ]+b.mads[mad.AttrREQ] == 2, "%d connections, %d and %d REQs",
			len(a.with(b)), a.mads[mad.AttrREQ], b.mads[mad.AttrREQ])
		w.checkQuiet()
	}},
	{"what-comes-is-taken", func(w *world) { // what comes on a connection that we opened with 0x10 is taken
		a, l := w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		w.reaches(a.send(l.addr4(), 9000, true), 100*time.Millisecond, "to the peer")
		w.run(10 * time.Millisecond)
		p := l.packet(a.addr4(), 9000)
		l.do(func() { l.p.SendBack(a.gid, p.octets()) })
		w.reaches(p, 10*time.Millisecond, "back on our connection")
		w.reaches(a.send(l.addr4(), 9000, true), 10*time.Millisecond, "to the peer again")
	}},
	{"flags", func(w *world) { // announce 0x80 and nothing else unless told to, and read with a mask
		a, b, d := w.host(config{}), w.host(config{mode: ipoib.ModeAuto}), w.host(config{mode: ipoib.ModeUD})
		win := w.alien(100, foreign.WinOFED, nil)
		l := w.alien(101, foreign.Linux, nil)
		l.reserved = 0x21
		w.run(2 * time.Second)
		win.send(a.addr4(), 100)
		w.run(10 * time.Millisecond)
		w.reaches(win.send(a.addr4(), 9000), 10*time.Millisecond, "from a peer that compares for equality")
		w.reaches(a.send(b.addr4(), 9000, true), 100*time.Millisecond, "to flags of 0xC0")
		w.reaches(a.send(l.addr4(), 9000, true), 100*time.Millisecond, "to flags with reserved bits")
		w.reaches(l.send(d.addr4(), 100), 10*time.Millisecond, "to flags of zero")
		w.want(d.mads[mad.AttrREP]+d.mads[mad.AttrREJ] == 0, "a peer was invited to connect in vain")
	}},
	{"private-data", func(w *world) { // private data in REQ, REP, RTU and REJ; a REQ without is a legacy peer's
		a, b, l := w.host(config{}), w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		all := w.listen()
		w.reaches(a.send(b.addr4(), 9000, true), 100*time.Millisecond, "to our own")
		w.reaches(l.send(a.addr4(), 9000), 100*time.Millisecond, "from a peer that fills nothing into its RTU")
		uc := l.req(a, serviceid.RFC, 1)
		uc.Transport = ib.UC
		l.answer(a, uc)
		seen := map[mad.AttrID]bool{}
		for _, m := range *all {
			h := a
			if m.from == b.port {
				h = b
			}
			if m.from != h.port {
				continue
			}
			var field []byte
			switch m := m.msg.(type) {
			case mad.REQ:
				field = m.PrivateData[:]
			case mad.REP:
				field = m.PrivateData[:]
			case mad.RTU:
				field = m.PrivateData[:]
			case mad.REJ:
				field = m.PrivateData[:]
			default:
				continue
			}
			var pd encap.PrivateData
			w.want(pd.UnmarshalBinary(field) == nil && pd.QPN == h.link.QPN && pd.ReceiveMTU == 65524, "%v says %+v",
				m.msg.Attr(), pd)
			seen[m.msg.Attr()] = true
		}
		w.want(len(seen) == 4, "not every message was seen: %v", seen)
		bare := l.req(b, serviceid.RFC, 2)
		bare.PrivateData = [mad.REQPrivateLen]byte{}
		l.answer(b, bare)
		cs := b.with2(l)
		w.want(len(cs) == 1 && cs[0].Rx && !cs[0].Tx, "a REQ without private data: %+v", cs)
	}},
	{"receive-mtu", func(w *world) { // the smaller Receive MTU less 4, REJ 26 for too little, one retry after a REJ 26
		a := w.host(config{})
		win := w.alien(100, foreign.WinOFED, func(o *foreign.Options) { o.ReceiveMTU = 9000 })
		l := w.alien(101, foreign.Linux, func(o *foreign.Options) { o.ReceiveMTU = 4000 })
		tiny := w.alien(102, foreign.Linux, func(o *foreign.Options) { o.ReceiveMTU = 1000 })
		w.run(2 * time.Second)
		w.reaches(a.send(win.addr4(), 8996, true), 100*time.Millisecond, "to a peer that rejects more than its own")
		w.reaches(a.send(l.addr4(), 3996, true), 100*time.Millisecond, "to a peer with less")
		p := a.send(l.addr4(), 3997, true) // a peer that gets this dies
		w.run(10 * time.Millisecond)
		w.want(p.delivered == 0 && p.refused, "too large a packet was not refused")
		w.reaches(a.send(tiny.addr4(), 500, true), 100*time.Millisecond, "to a peer with too little")
		w.run(10 * time.Millisecond)
		rej := tiny.got(mad.AttrREJ)
		w.want(len(rej) == 1 && rej[0].(mad.REJ).Reason == mad.RejInvalidPathMTU && len(a.with2(tiny)) == 0,
			"%v, %+v", rej, a.with2(tiny))
		req := l.req(a, serviceid.RFC, 1)
		says(req.PrivateData[:], l.opt.Link.QPN, 1283)
		l.rejected(a, req, mad.RejInvalidPathMTU)
	}},
	{"nd-on-a-connection", func(w *world) { // ND on a connection is taken and answered by UD; ARP there is nothing
		a, l := w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		w.reaches(l.send(a.addr6(), 9000), 100*time.Millisecond, "to the host")
		w.reaches(a.send(l.addr6(), 9000, true), 100*time.Millisecond, "and back")
		w.run(10 * time.Millisecond)
		before := l.p.Count["advertisements"]
		l.do(func() { l.p.Probe(a.addr6()) })
		w.run(10 * time.Millisecond)
		w.want(a.counter("nd_on_connection") > 0, "the NS did not come by the connection")
		w.want(l.p.Count["advertisements"] == before+1 && l.p.Count["nd by connection"] == 0, "ND: %v", l.p.Count)
		l.send(a.addr4(), 100)
		w.run(10 * time.Millisecond)
		answers := a.counter("neigh_answers")
		l.do(func() { l.p.ProbeARP(a.addr4()) })
		w.run(10 * time.Millisecond)
		w.want(a.counter("neigh_answers") == answers && a.counter("drop_arp_on_connection") == 1,
			"ARP on a connection was answered")
	}},
	{"dreq", func(w *world) { // DREQs: unknown IDs are answered, a wrong QPN is dropped, ours has the peer's
		a, l := w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		w.reaches(a.send(l.addr4(), 9000, true), 100*time.Millisecond, "to the peer")
		_, ok := l.answer(a, mad.DREQ{LocalCommID: 77, RemoteCommID: 78, RemoteQPN: 79}).(mad.DREP)
		w.want(ok, "a DREQ of an unknown connection was not answered")
		c := a.with2(l)[0]
		dreq := mad.DREQ{LocalCommID: mad.CommID(c.RemoteComm), RemoteCommID: mad.CommID(c.LocalComm),
			RemoteQPN: c.LocalQPN ^ 1}
		w.want(l.answer(a, dreq) == nil && len(a.with2(l)) == 1, "a DREQ of another queue pair was taken")
		a.stop()
		w.run(10 * time.Millisecond)
		_, peers := l.p.Up()
		w.want(len(peers) == 0 && l.p.Count["DREQ of another QPN"] == 0, "our DREQ was not taken: %v", l.p.Count)
	}},
	{"slow-receiver", func(w *world) { // a slow receiver costs time and no connection; no room for more is not announced
		a, l := w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		w.reaches(l.send(a.addr4(), 9000), 100*time.Millisecond, "to the host")
		a.stalled = true
		var ps []*packet
		for range recvDepth + 8 {
			ps = append(ps, l.send(a.addr4(), 500))
		}
		w.run(50 * time.Millisecond)
		a.stalled = false
		for _, f := range a.delayed {
			f()
		}
		for _, p := range ps {
			w.reaches(p, time.Second, "to a host that was slow")
		}
		full := w.host(config{tune: func(o *ipoib.Options) { o.MaxConns = 2 }})
		for i := range 4 {
			m := w.alien(110+i, foreign.Linux, nil)
			w.run(2 * time.Second)
			w.reaches(m.send(full.addr4(), 500), 100*time.Millisecond, "to a host without room")
		}
	}},
	// a peer that closes or loses a connection is dialled again with the next packet
	{"closed-by-the-peer", func(w *world) {
		a := w.host(config{tune: func(o *ipoib.Options) { o.Idle, o.Neigh = -1, neigh.Options{StaleTime: time.Hour} }})
		l := w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		w.reaches(a.send(l.addr4(), 9000, true), 100*time.Millisecond, "at first")
		w.run(511 * time.Second)
		w.want(len(a.with2(l)) == 1, "the peer has closed the connection too soon")
		w.f.RunWhile(func() bool { return len(a.with2(l)) > 0 }, 2*time.Second)
		w.want(len(a.with2(l)) == 0, "the peer has not closed the connection")
		w.reaches(a.send(l.addr4(), 9000, true), 10*time.Millisecond, "after 512 s of silence")
		w.run(10 * time.Second)
		l.do(l.p.Vanish)
		a.send(l.addr4(), 9000, true)
		w.run(time.Second)
		w.reaches(a.send(l.addr4(), 9000, true), 10*time.Millisecond, "after the peer had vanished")
	}},
	{"ca-guid", func(w *world) { // a CA GUID of one's own: peers know connections by it, not by GID
		tune := func(o *ipoib.Options) { o.Rand = rand.New(rand.NewPCG(1, 1)) } // equal communication IDs
		a, b, l := w.host(config{tune: tune}), w.host(config{tune: tune}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		w.reaches(a.send(l.addr4(), 9000, true), 100*time.Millisecond, "from the first")
		w.reaches(b.send(l.addr4(), 9000, true), 100*time.Millisecond, "from the second")
		a.kill()
		a.boot()
		w.run(5 * time.Second)
		w.reaches(a.send(l.addr4(), 9000, true), 100*time.Millisecond, "from the first in its second life")
	}},
	{"no-silence", func(w *world) { // a REQ is never met with silence, be it a lie, but a flood is
		a, l := w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		req := l.req(a, serviceid.RFC, 1)
		req.ServiceID++
		l.rejected(a, req, mad.RejInvalidServiceID)
		req = l.req(a, serviceid.RFC, 2)
		req.Transport = ib.UC
		l.rejected(a, req, mad.RejInvalidTransport)
		req = l.req(a, serviceid.Legacy, 3)
		a.linkDown()
		l.rejected(a, req, mad.RejNoResources)
		a.linkUp()
		w.run(2 * time.Second)
		lie := l.req(a, serviceid.RFC, 4)
		lie.Primary.LocalGID[15] ^= 1
		l.rejected(a, lie, mad.RejInvalidPrimaryGID) // 4755-3.2-12
		w.run(5 * time.Second)
		before := len(l.got(mad.AttrREJ))
		for i := range 2000 {
			req := l.req(a, serviceid.RFC, mad.CommID(1000+i))
			req.ServiceID++
			l.raw(a, req)
			w.run(500 * time.Microsecond)
		}
		n := len(l.got(mad.AttrREJ)) - before
		w.want(n > 0 && n < 400, "%d REJs to a flood of 2000 REQs in a second", n)
	}},
}

// with2 returns h's connections to an alien.
func (h *host) with2(a *alien) (cs []ipoib.ConnInfo) {
	for _, c := range h.m.Conns() {
		if c.Peer.GID == a.opt.Link.GID {
			cs = append(cs, c)
		}
	}
	return cs
}

// TestRules shows that each rule does what it is for, for some orders of
// addresses and times.
func TestRules(t *testing.T) {
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) { seeds(t, 4, r.do) })
	}
}
