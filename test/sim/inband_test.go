package sim

import (
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/ipoib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// cmConfigs are hosts of every policy for CM messages, with a QP 1 of every kind.
var cmConfigs = []config{
	{}, {cm: ipoib.CMGSI}, {cm: ipoib.CMInband}, {qp1: qp1Taken}, {qp1: qp1Silent}, {cm: ipoib.CMInband, qp1: qp1Taken},
}

// TestCMTransports lets hosts of every policy meet, several at a time: each
// pair with a path in common has one connection, the others go on by UD.
func TestCMTransports(t *testing.T) {
	seeds(t, 100, func(w *world) {
		mode := oneOf(w.r, ipoib.ModeRC, ipoib.ModeUC, ipoib.ModeAuto)
		for range 2 + w.r.IntN(3) {
			c := oneOf(w.r, cmConfigs...)
			c.mode = mode
			w.host(c)
		}
		w.run(w.upTo(2 * time.Second))
		for range 40 { // half a minute: attempts that lead nowhere have ended by then
			for _, p := range w.talk() {
				p.size = 100
			}
			w.run(700 * time.Millisecond)
		}
		for i, a := range w.hosts {
			for _, b := range w.hosts[i+1:] {
				var want int
				if common(a, b) != ib.UD {
					want = 1
					w.checkPair(a, b)
				}
				up := func(h, o *host) (cs []ipoib.ConnInfo) {
					return slices.DeleteFunc(h.with(o), func(c ipoib.ConnInfo) bool { return c.State != "ESTABLISHED" })
				}
				as := up(a, b)
				w.want(len(as) == want && len(up(b, a)) == want, "%s-%s: %d and %d connections, want %d", a.name(),
					b.name(), len(as), len(up(b, a)), want)
				if want == 1 && a.cmPath(b) == int(ipoib.ViaInband) {
					w.want(as[0].Via == ipoib.ViaInband, "%s-%s: connected by QP 1", a.name(), b.name())
				}
				for _, size := range []int{100, udMTU} {
					w.arrives(a, b.addr4(), size, common(a, b), 50*time.Millisecond)
					w.arrives(b, a.addr4(), size, common(a, b), 50*time.Millisecond)
				}
			}
		}
	})
}

// TestCrossingPaths: both ends begin at about the same time, one by QP 1 and
// one in-band. One connection comes of it, and the REQs that are seen to cross
// leave that of the larger address (4755-3.3-1, 4755-3.3-5).
func TestCrossingPaths(t *testing.T) {
	crossed := 0
	seeds(t, 300, func(w *world) {
		w.f.Delay = 100 * time.Microsecond
		// b cannot have QP 1; a is rejected there, or is not heard.
		a := w.host(config{mode: oneOf(w.r, modes[:3]...), cm: oneOf(w.r, ipoib.CMAuto, ipoib.CMInband),
			qp1: oneOf(w.r, qp1Ours, qp1Silent)})
		b := w.host(config{mode: oneOf(w.r, a.cfg.mode, ipoib.ModeAuto), qp1: oneOf(w.r, qp1Taken, qp1Silent)})
		w.run(2 * time.Second)
		var ps []*packet
		for _, size := range []int{100, 9000} {
			ps = append(ps, a.send(b.addr4(), size, false))
		}
		w.run(w.upTo(oneOf(w.r, 600*time.Microsecond, 4*time.Second)))
		for _, size := range []int{100, 9000} {
			ps = append(ps, b.send(a.addr4(), size, false))
		}
		w.run(10 * time.Second)
		as := w.settledOn(a, b, ps)
		if n := a.m.Status().Crossings; n.Seen > 0 && n.Expired == 0 && b.m.Status().Crossings.Expired == 0 {
			crossed++
			larger := a
			if a.link.Compare(b.link) < 0 {
				larger = b
			}
			w.want(as[0].Active == (larger == a), "the REQ of the smaller address won")
		}
		w.want(a.inband+b.inband > 0, "nothing went in-band")
		w.end()
	})
	t.Logf("%d crossed", crossed)
	if !raceDetector && crossed < long.Of(3, 15) {
		t.Errorf("only %d crossed", crossed)
	}
}

// TestSpoofedInband: somebody on the link sends REQs in-band in the name of
// another. Nobody is connected, nobody answers, and each is counted.
func TestSpoofedInband(t *testing.T) {
	seeds(t, 20, func(w *world) {
		a, b, evil := w.host(oneOf(w.r, config{}, config{cm: ipoib.CMInband}, config{qp1: qp1Taken})),
			w.host(config{}), w.host(config{})
		w.run(2 * time.Second)
		n := 1 + w.r.IntN(20)
		for i := range n {
			req := mad.REQ{LocalCommID: mad.CommID(i + 1), ServiceID: serviceid.New(serviceid.RFC, a.link.QPN),
				LocalCAGUID: 9, LocalQPN: 0x55, Transport: ib.RC, PathMTU: ib.MTU1024, PKey: ib.DefaultPKey,
				MaxCMRetries: 3, LocalCMResponseTimeout: 16, RemoteCMResponseTimeout: 16}
			req.Primary.LocalGID, req.Primary.RemoteGID = b.gid, a.gid
			pd, _ := encap.PrivateData{QPN: b.link.QPN, ReceiveMTU: 9000}.AppendBinary(nil)
			copy(req.PrivateData[:], pd)
			fr := make([]byte, encap.HeaderLen, encap.HeaderLen+verbs.MADLen)
			encap.Put(fr, encap.InbandCM)
			fr, _ = req.AppendBinary(fr)
			evil.postUD(a.link, ib.GID{}, fr)
		}
		w.run(time.Second)
		w.want(a.counter("drop_inband_source") == uint64(n), "%d of %d dropped", a.counter("drop_inband_source"), n)
		w.want(len(a.m.Conns()) == 0 && len(a.mads)+len(b.mads) == 0, "somebody answered: %v %v", a.mads, b.mads)
	})
}

// TestQP1Returns: QP 1 of a host falls silent under an agent that others know by
// it, and is heard again later. Traffic finds a way each time.
func TestQP1Returns(t *testing.T) {
	seeds(t, 20, func(w *world) {
		short := func(o *ipoib.Options) { o.Idle = 20 * time.Second }
		a, b := w.host(config{tune: short}), w.host(config{tune: short})
		connect := func(what string, via ipoib.CMPath) {
			for end := w.f.Now().Add(time.Minute); len(a.with(b)) != 1 || a.with(b)[0].State != "ESTABLISHED"; {
				w.want(w.f.Now().Before(end), "%s: no connection", what)
				a.send(b.addr4(), 100, true)
				w.run(200 * time.Millisecond)
			}
			w.want(a.with(b)[0].Via == via, "%s: by %v", what, a.with(b)[0].Via)
			w.run(30 * time.Second) // idle
			w.want(len(a.with(b)) == 0, "%s: not idle", what)
		}
		connect("at first", ipoib.ViaGSI)
		b.cfg.qp1 = qp1Silent
		connect("silent", ipoib.ViaInband)
		connect("remembered", ipoib.ViaInband)
		b.cfg.qp1 = qp1Ours
		w.run(11 * time.Minute)
		connect("heard again", ipoib.ViaGSI)
	})
}
