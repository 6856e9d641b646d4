package sim

import (
	"slices"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/foreign"
	"ipoibcm/ipoib"
	"ipoibcm/serviceid"
)

// TestBlindForm: before two hosts have met, the attacker asks one of them in the name of the
// other, with Linux's service ID and all else as the other would. They meet as RFC 4755 has
// it nevertheless: the first REQ has its service ID, and there is one connection for both ways.
func TestBlindForm(t *testing.T) {
	seeds(t, 20, func(w *world) {
		a, b := w.host(config{}), w.host(config{})
		x := w.blind(a, b)
		for range 32 {
			req := x.req(ib.QPN(2+x.r.Uint32N(1<<24-3)), b.port.Port().GUID)
			req.ServiceID = serviceid.New(serviceid.Legacy, a.link.QPN)
			x.mad(req)
			w.run(17 * time.Millisecond) // 64 a second pass
		}
		a.send(b.addr4(), 100, true)
		w.run(500 * time.Millisecond)
		for _, c := range a.with(b) {
			form, _ := serviceid.Parse(serviceid.ID(c.ServiceID))
			w.want(!c.Tx || form == serviceid.RFC,
				"sends on a connection of service ID %#016x, want the form of RFC 4755", c.ServiceID)
			w.want(!c.Tx || c.Class == ipoib.ClassRFC, "the peer is taken for %v, want rfc", c.Class)
		}
		w.arrives(b, a.addr4(), 100, ib.RC, time.Second)
		w.settle()
		w.end()
	})
}

// TestBlindOtherForm: a host of Linux's kind has rejected the 0x01 service ID and accepted the other. The
// attacker asks in its name with 0x01, 58 times a second and once more while our own REQ is out. Each REQ
// of ours has the form that the host uses, the packet that waits for the connection arrives at once, and the
// connection lives as long as it is used. A queue pair is left, until no RTU has come for it.
func TestBlindOtherForm(t *testing.T) {
	const rounds = 10
	seeds(t, 20, func(w *world) {
		a, l := w.host(config{tune: func(o *ipoib.Options) { o.Idle = time.Second }}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		all := w.listen()
		w.reaches(a.send(l.addr4(), 9000, true), 5*time.Millisecond, "before any forged REQ")
		want := []serviceid.Form{serviceid.RFC, serviceid.Legacy}
		x := w.blindAs(a, l.opt.Link)
		forge := func() { x.mad(x.req(ib.QPN(2+x.r.Uint32N(1<<24-3)), ib.GUID(x.r.Uint64()))) }
		for range rounds {
			w.run(5 * time.Second) // the connection ends, and what was forged before is given up
			for i := x.r.IntN(100); i >= 0; i-- {
				forge()
				w.run(17 * time.Millisecond) // 64 a second pass
			}
			w.want(len(a.sendsOn(l)) == 0, "the connection has not ended: %+v", a.sendsOn(l))
			p := a.send(l.addr4(), 9000, true)
			w.run(w.upTo(50 * time.Microsecond))
			forge()
			w.reaches(p, time.Millisecond, "beside forged REQs")
			want = append(want, serviceid.Legacy)
			w.want(slices.Equal(forms(*all, a, l), want), "forms %v, want %v", forms(*all, a, l), want)
		}
		was := a.sendsOn(l)
		w.want(len(was) == 1, "%d connections to send on, want 1", len(was))
		for range 100 {
			forge()
			w.reaches(a.send(l.addr4(), 9000, true), time.Millisecond, "on a connection that is there")
			w.run(17 * time.Millisecond)
		}
		w.reaches(l.send(a.addr4(), 9000), 5*time.Millisecond, "on the peer's own")
		now := a.sendsOn(l)
		w.want(len(now) == 1, "%d connections to send on, want 1", len(now))
		w.want(now[0].Conn == was[0].Conn, "sends on connection %d, want %d", now[0].Conn, was[0].Conn)
		w.want(now[0].Class == ipoib.ClassLegacy, "the peer is taken for %v, want legacy", now[0].Class)
		w.want(len(a.with2(l)) <= 3, "%d connections, want at most 3: ours, the peer's and a forged one", len(a.with2(l)))
		w.run(10 * time.Minute)
		w.want(len(a.with2(l)) == 0, "left over: %+v", a.with2(l))
	})
}

// TestBlindFormBesideLegacy: a host of Linux's kind has a connection to ours, and ours one to it. The attacker asks in its
// name with its service ID, 58 times a second. Both connections live, and every packet arrives on them at once; what is
// forged has the other places of such a host, until no RTU has come.
func TestBlindFormBesideLegacy(t *testing.T) {
	const reqs, places = 300, 4
	total, runs := 0, 0
	seeds(t, 20, func(w *world) {
		a, l := w.host(config{}), w.alien(100, foreign.Linux, nil)
		w.run(2 * time.Second)
		w.reaches(a.send(l.addr4(), 9000, true), 5*time.Millisecond, "before any forged REQ")
		w.reaches(l.send(a.addr4(), 9000), 5*time.Millisecond, "the other way, before any forged REQ")
		was := a.with2(l)
		w.want(len(was) == 2, "%d connections, want 2: %+v", len(was), was)
		x := w.blindAs(a, l.opt.Link)
		most := 0
		for range reqs {
			req := x.req(ib.QPN(2+x.r.Uint32N(1<<24-3)), ib.GUID(x.r.Uint64()))
			req.ServiceID = serviceid.New(serviceid.Legacy, a.link.QPN)
			x.mad(req)
			w.run(17 * time.Millisecond) // 64 a second pass
			w.reaches(a.send(l.addr4(), 9000, true), time.Millisecond, "on our connection")
			w.reaches(l.send(a.addr4(), 9000), time.Millisecond, "on the peer's")
			most = max(most, len(a.with2(l)))
		}
		w.want(most == 1+places, "up to %d connections, want %d: ours, the peer's and forged ones", most, 1+places)
		now := a.with2(l)
		for _, c := range was {
			w.want(slices.ContainsFunc(now, func(n ipoib.ConnInfo) bool { return n.Conn == c.Conn && n.State == c.State }),
				"the connection %+v has ended", c)
		}
		total, runs = total+reqs, runs+1
		w.run(10 * time.Minute)
		w.want(len(a.with2(l)) == 0, "left over: %+v", a.with2(l))
	})
	t.Logf("%d forged REQs in %d runs", total, runs)
}

// sendsOn returns the established connections that h sends to an alien on.
func (h *host) sendsOn(a *alien) []ipoib.ConnInfo {
	return slices.DeleteFunc(h.with2(a), func(c ipoib.ConnInfo) bool {
		return !c.Tx || c.State != cm.StateEstablished.String()
	})
}
