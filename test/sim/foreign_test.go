package sim

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// An alien is a host that is not ours: a foreign peer on the same fabric.
type alien struct {
	w     *world
	name  string
	opt   foreign.Options
	port  *simfabric.Port
	p     *foreign.Peer
	ud    *conn
	conns map[ib.QPN]*conn
	cqs   [2]verbs.CQ // of sends, of receives
	timer simfabric.Timer
	mads  []mad.Message // received
	// reserved are bits that the flags octets of its ARP messages have besides.
	reserved byte
}

// alien adds a foreign host with 10.0.0.i/24 and 2001:db8::i/64.
func (w *world) alien(i int, kind foreign.Kind, tune func(*foreign.Options)) *alien {
	gid, _ := ib.ParseGID(fmt.Sprintf("fe80::%x:%x", w.r.Uint32N(0xffff), i))
	a := &alien{w: w, name: fmt.Sprintf("%v-%d", kind, i), conns: map[ib.QPN]*conn{}}
	a.port = w.f.NewPort(simfabric.PortOptions{GID: gid})
	a.cqs = [2]verbs.CQ{newCQ(a.port, a.sendDone), newCQ(a.port, a.recvDone)}
	a.ud = a.newQP(ib.UD, udDepth, verbs.GRHLen+encap.HeaderLen+udMTU)
	ok(a.ud.qp.Modify(verbs.QPAttr{State: verbs.StateRTR}))
	ok(a.ud.qp.Modify(verbs.QPAttr{State: verbs.StateRTS}))
	a.opt = foreign.Options{Kind: kind, Link: encap.LinkAddr{QPN: a.ud.qpn, GID: gid}, GUID: a.port.Port().GUID,
		PathMTU: a.port.Port().MTU, Addrs: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", i)),
			netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i))},
		Rand: rand.New(rand.NewPCG(w.r.Uint64(), 2))}
	if tune != nil {
		tune(&a.opt)
	}
	a.p = foreign.New(a.opt, a)
	for _, g := range a.p.Groups() {
		ok(a.ud.qp.AttachMulticast(g))
	}
	a.port.Notify(a.poll)
	return a
}

func (a *alien) addr4() netip.Addr { return a.opt.Addrs[0] }
func (a *alien) addr6() netip.Addr { return a.opt.Addrs[1] }

// do lets the peer do something and looks when it wants to be woken.
func (a *alien) do(f func()) {
	f()
	a.timer.Stop()
	if d := a.p.Deadline(); !d.IsZero() {
		a.timer = a.w.f.At(d, func() { a.do(a.p.Wake) })
	}
	if a.p.Died != "" {
		a.w.fatalf("%s does not survive this: %s", a.name, a.p.Died)
	}
}

func (a *alien) poll() {
	for {
		select {
		case m := <-a.port.MADPort().MADs():
			if _, msg, err := mad.Parse(m.Data[:]); err == nil {
				a.mads = append(a.mads, msg)
			}
			a.do(func() { a.p.RecvMAD(m) })
		case ev := <-a.port.Events():
			if ev.Kind == verbs.QPFatal {
				a.w.tell("%s: QP %v broke: %v %s", a.name, ev.QPN, ev.Status, ev.Text)
				a.do(func() { a.p.QPError(ev.QPN) })
			}
		default:
			return
		}
	}
}

// What foreign.Port asks for.

func (a *alien) Now() time.Time       { return a.w.f.Now() }
func (a *alien) Tell(text string)     { a.w.tell("%s: %s", a.name, text) }
func (a *alien) SendMAD(m *verbs.MAD) { a.port.MADPort().SendMAD(m) }

func (a *alien) SendUD(to encap.LinkAddr, fr []byte) {
	if fr[0] == 8 && fr[1] == 6 {
		fr[encap.HeaderLen+8] |= a.reserved
	}
	a.post(a.ud, verbs.SendWR{AH: must(a.port.CreateAH(verbs.AHAttr{SGID: a.opt.Link.GID, DGID: to.GID})),
		RemoteQPN: to.QPN, RemoteQKey: ib.QKeyIPoIB}, fr)
}

func (a *alien) CreateQP() ib.QPN {
	c := a.newQP(rc, recvDepth, 65524)
	a.conns[c.qpn] = c
	a.w.ends[end{a.opt.Link.GID, c.qpn}] = c
	return c.qpn
}

func (a *alien) ConnectQP(qpn ib.QPN, rtr, rts verbs.QPAttr) {
	c := a.conns[qpn]
	c.rtr, c.rts = rtr, rts
	ok(c.qp.Modify(rtr))
	ok(c.qp.Modify(rts))
}

func (a *alien) SendConn(qpn ib.QPN, fr []byte) {
	c := a.conns[qpn]
	if c == nil {
		return
	}
	if a.post(c, verbs.SendWR{}, fr) {
		c.sent = append(c.sent, hash(fr))
	}
}

func (a *alien) DestroyQP(qpn ib.QPN) {
	c := a.conns[qpn]
	delete(a.conns, qpn)
	ok(c.qp.Modify(verbs.QPAttr{State: verbs.StateError}))
	ok(c.qp.Destroy())
	for _, r := range c.inflight {
		ok(a.port.Deregister(r))
	}
	ok(a.port.Deregister(c.bufs.region))
	c.qp, c.inflight, c.bufs = nil, nil, recvBufs{}
}

// Deliver checks a packet as host.delivered does.
func (a *alien) Deliver(pkt []byte) {
	p := a.w.packetIn(pkt)
	if p == nil || !bytes.Equal(pkt, p.octets()) {
		a.w.fatalf("%s: a packet arrived that nobody sent: %x", a.name, pkt[:min(len(pkt), 40)])
	}
	p.delivered++
	p.gotAt = a.w.f.Now()
}

// The queue pairs.

func (a *alien) newQP(t ib.Transport, depth, size int) *conn {
	qp := must(a.port.CreateQP(verbs.QPInit{Transport: t, SendCQ: a.cqs[0], RecvCQ: a.cqs[1], SendDepth: sendDepth,
		RecvDepth: depth, MaxSendSGE: 1, MaxRecvSGE: 1}))
	c := newConn(nil, 1, qp)
	c.receive = size
	ok(qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey, QKey: ib.QKeyIPoIB}))
	c.bufs = recvBufs{size: size, region: must(a.port.Alloc(depth * size))}
	for i := range depth {
		must(qp.PostRecv([]verbs.RecvWR{c.bufs.wr(uint64(i))}))
	}
	return c
}

func (a *alien) post(c *conn, wr verbs.SendWR, fr []byte) bool {
	r := must(a.port.Register(slices.Clone(fr), 0))
	c.lastID++
	wr.ID, wr.Opcode, wr.Flags, wr.SG = c.lastID, verbs.Send, verbs.Signaled, []verbs.SGE{{Region: r, Buf: r.Buf}}
	if _, err := c.qp.PostSend([]verbs.SendWR{wr}); err != nil {
		ok(a.port.Deregister(r))
		return false
	}
	c.inflight[c.lastID] = r
	return true
}

func (a *alien) of(qpn ib.QPN) *conn {
	if qpn == a.ud.qpn {
		return a.ud
	}
	return a.conns[qpn]
}

func (a *alien) sendDone(wc *verbs.WC) {
	if c := a.of(wc.QPN); c != nil && c.inflight[wc.ID] != nil {
		ok(a.port.Deregister(c.inflight[wc.ID]))
		delete(c.inflight, wc.ID)
	}
}

func (a *alien) recvDone(wc *verbs.WC) {
	c := a.of(wc.QPN)
	if c == nil || wc.Status != verbs.Success {
		return
	}
	msg := slices.Clone(c.bufs.buf(wc.ID)[:wc.ByteLen])
	must(c.qp.PostRecv([]verbs.RecvWR{c.bufs.wr(wc.ID)}))
	if c == a.ud {
		src, _ := verbs.GRHAddrs(msg[:verbs.GRHLen], false)
		a.do(func() { a.p.RecvUD(encap.LinkAddr{QPN: wc.SrcQPN, GID: src}, msg[verbs.GRHLen:]) })
		return
	}
	a.do(func() { a.p.RecvConn(wc.QPN, msg) })
}

// send has the alien's host send one packet.
func (a *alien) send(dst netip.Addr, size int) *packet {
	p := a.packet(dst, size)
	a.do(func() { a.p.Output(p.octets()) })
	return p
}

func (a *alien) packet(dst netip.Addr, size int) *packet {
	w := a.w
	w.lastID++
	p := &packet{id: w.lastID, src: a.addr4(), dst: dst, at: w.f.Now(), df: true, size: size}
	if dst.Is6() {
		p.src = a.addr6()
	}
	for _, o := range w.hosts {
		if o.owns(dst) {
			p.to = o
		}
	}
	w.packets[p.id] = p
	return p
}

// reaches wants p delivered, once, within d.
func (w *world) reaches(p *packet, d time.Duration, why string) {
	w.t.Helper()
	w.f.RunWhile(func() bool { return p.delivered == 0 }, d)
	w.want(p.delivered == 1, "%s: %v was delivered %d times", why, p, p.delivered)
}

// dialled lists the REQs among what a has got from h, by service ID.
func (a *alien) got(attr mad.AttrID) (out []mad.Message) {
	for _, m := range a.mads {
		if m.Attr() == attr {
			out = append(out, m)
		}
	}
	return out
}

// A party is one host of a mixed fabric.
type party struct {
	h *host
	a *alien
}

func (p party) addr() netip.Addr {
	if p.h != nil {
		return p.h.addr4()
	}
	return p.a.addr4()
}

func (p party) name() string {
	if p.h != nil {
		return p.h.name() + "-" + p.h.cfg.mode.String()
	}
	return p.a.name
}

func (p party) send(to party, size int) *packet {
	if p.h != nil {
		return p.h.send(to.addr(), size, true)
	}
	return p.a.send(to.addr(), size)
}

// connects reports whether packets from p to q go by a connection in the end.
func (p party) connects(q party) bool {
	switch {
	case p.h != nil && q.h != nil:
		return common(p.h, q.h) != ib.UD
	case p.h != nil:
		return p.h.cfg.mode.Flags()&encap.FlagRC != 0
	case q.h == nil:
		return true
	case p.a.opt.Kind == foreign.WinOFED && q.h.cfg.mode == ipoib.ModeAuto:
		return true // it does not dial flags of 0xC0, but it is dialled, and dials back
	}
	return q.h.cfg.mode.Flags()&encap.FlagRC != 0
}

// mixed is a fabric with a host of every policy of ours and of every kind that
// is not, some twice.
func (w *world) mixed() (all []party) {
	for _, m := range modes {
		all = append(all, party{h: w.host(config{mode: m, srq: w.chance(0.5)})})
	}
	all[1].h.cfg.lag, all[2].h.cfg.lag = 200*time.Microsecond, 2*time.Millisecond
	for i, k := range []foreign.Kind{foreign.Linux, foreign.Linux, foreign.Illumos, foreign.WinOFED, foreign.WinOFED} {
		all = append(all, party{a: w.alien(100+i, k, nil)})
	}
	w.run(2 * time.Second)
	w.r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// each has every party send a packet to every other, in any order.
func (w *world) each(all []party, do func(from, to party)) {
	for _, i := range w.r.Perm(len(all) * len(all)) {
		if from, to := all[i/len(all)], all[i%len(all)]; from != to {
			do(from, to)
		}
	}
}

// small is a size that goes by UD too.
func (w *world) small() int { return 100 + w.r.IntN(1900) }

// wantAll wants a packet of every pair delivered; those too large for UD show that
// there is a connection in that direction.
func (w *world) wantAll(all []party, size func(from, to party) int) {
	w.t.Helper()
	w.each(all, func(from, to party) {
		p := from.send(to, size(from, to))
		w.f.RunWhile(func() bool { return p.delivered == 0 }, 100*time.Millisecond)
		w.want(p.delivered == 1, "%s to %s: %v was delivered %d times", from.name(), to.name(), p, p.delivered)
	})
}

// TestMixedFabric: hosts of every kind, each with each. Traffic flows both ways
// between every pair, by a connection where both ends can have one, and foreign
// hosts survive us. Nothing is lost on the way here: what never retries would not
// survive that, nor two packets that change places.
func TestMixedFabric(t *testing.T) {
	seeds(t, 12, func(w *world) {
		all := w.mixed()
		small := func(party, party) int { return w.small() }
		dial := func(from, to party) { // everybody dials everybody
			from.send(to, w.small())
			w.run(w.upTo(3 * time.Millisecond))
		}
		w.each(all, dial)
		w.run(5 * time.Second)
		w.wantAll(all, small)
		w.wantAll(all, func(from, to party) int {
			if from.connects(to) {
				return 2045 + w.r.IntN(63000)
			}
			return w.small()
		})
		for _, p := range all {
			if p.a != nil {
				// One REQ to each, and twice two more: for another kind, and where they met.
				w.want(p.a.p.Count["sent REQ"] <= 3*len(all), "%s was not content: %v", p.name(), p.a.p.Count)
			}
		}
		w.run(40 * time.Minute) // all connections end, all neighbours are forgotten
		w.each(all, dial)
		w.run(5 * time.Second)
		w.wantAll(all, small)
		for _, p := range all {
			if p.h != nil {
				for _, c := range p.h.m.Conns() {
					w.want(c.Tx || !c.Active, "%s: %+v", p.name(), c)
				}
			}
		}
	})
}

// TestMixedFabricRecovers: on a bad network those that never retry lose their
// connections all the time. When it is good again, everybody reaches everybody.
func TestMixedFabricRecovers(t *testing.T) {
	broken := 0
	seeds(t, 40, func(w *world) {
		all := w.mixed()
		w.f.Options = simfabric.Options{Loss: 0.09, Dup: 0.01, Reorder: 0.02, Flip: 0.005, Jitter: 50 * time.Microsecond}
		w.dups = true
		for range 30 {
			w.each(all, func(from, to party) {
				from.send(to, w.small())
				w.run(w.upTo(20 * time.Millisecond))
			})
		}
		for _, p := range all {
			if p.a != nil {
				broken += p.a.p.Count["queue pairs broken"]
			}
		}
		w.heal()
		w.run(2 * time.Minute) // of REQs that nobody answered, and pauses
		for range 3 {
			w.each(all, func(from, to party) { from.send(to, w.small()) })
			w.run(10 * time.Second)
		}
		w.wantAll(all, func(from, to party) int {
			if from.connects(to) && (from.a == nil || from.a.opt.Kind != foreign.WinOFED) {
				return 9000
			}
			return w.small() // WinOFED connects when it hears an answer to a query, and not before
		})
	})
	t.Logf("%d queue pairs of foreign hosts broke", broken)
	if broken == 0 {
		t.Error("the network was not bad enough")
	}
}
