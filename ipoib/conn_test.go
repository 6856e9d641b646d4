package ipoib

import (
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// The life of a peer's connection, and a script that shows each step
//
//	from      event                            to         action                                      script
//	none      first packet                     creating   CreateQP; what fits goes by UD              conn-first
//	creating  QP there                         asked      REQ                                         conn-first
//	asked     REP                              up         RTS, RTU; path, host route, queue           conn-first
//	asked     REJ 8, no private data           creating   the other service ID; after both, in-band   legacy-peer, -uc
//	asked     no answer by QP 1                creating   in-band, if it may know that                (TestCMPaths)
//	asked     REJ 8, a UD QPN                  none       forget the neighbour, resolve again         conn-moved
//	asked     REJ 10; REJ 26 once              creating   a new QP; another size                      conn-path
//	asked     REJ 28, 0x01, we are smaller     waiting    the peer's REQ is due                       crossing-rc
//	asked     other REJ, no answer             none       pause, doubled each time                    conn-refused
//	asked     0x01 REQ, we are smaller         replied    ours withdrawn, REP                         crossing-rc
//	asked     0x01 REQ, we are larger          asked      REJ 28                                      crossing-rc
//	none, up  0x01 REQ                         replied    REP                                         conn-restart
//	replied   RTU or data                      up         path moves over; DREQ for an older one      conn-rtu, -restart
//	up        DREQ, QP error                   none       the next packet starts again                conn-end
//	up        idle, neighbour gone, link down  none       DREQ                                        conn-end, -moved

// TestConnection runs testdata/conn-*.txt. A connection has one QP at each end (4755-2.3-4), and the MTU of both is
// the same.
//
//	conn-first, -first-ipv6   4755-2.3-1, 4755-2.3-2, 4755-2.3-3, 4755-3.2-3, 4755-3.2-5, 4755-3.2-6, 4755-3.1-12,
//	                          4755-3.3-10, 4755-3.5-4, 4755-5-4, 4755-5.1-5, 4755-5.1-6, 4755-7-2, 4755-7.2-1
//	conn-addresses            4755-2.3-5, 4755-5-1
//	conn-mtu                  4755-5.1-3, 4755-5.1-5, 4755-5.1-6
//	conn-refused              4755-3.2-4, 4755-5-2
//	conn-path                 what the path carries, where that is less than what the port does
//	conn-kernel-mtu           what the kernel is told of the MTU
//	conn-gateway              networks behind the peer
//	conn-rtu                  data instead of an RTU
//	conn-req                  a REQ of a peer that is not known is all that is known of it: 4755-3.2-13, 4755-3.3-2,
//	                          4755-5.1-2, 4755-6-4; an unfinished connection goes: 4755-3.2-7; a REQ of our own:
//	                          4755-3.3-11
//	conn-end                  nothing is left: 4755-3.2-7, 4755-3.4-1, 4755-3.4-2, 4755-3.4-4
//	conn-dead                 4755-3.4-3
//	conn-moved                4755-3.5-5
//	conn-restart              the peer dials again
//	conn-former-life          a late RTU makes a connection that no neighbour leads to
func TestConnection(t *testing.T) { playScripts(t, "conn-*") }

// The RTU is lost for good. The peer's first data stands for it: at once if the provider has an event, else
// when the data path next reports its counts. So it does beside so many half-open connections that no REP is
// sent again by itself.
func TestDataForLostRTU(t *testing.T) {
	for _, tt := range []struct {
		mode   Mode
		mute   bool
		forged int
		within time.Duration
	}{
		{ModeRC, false, 0, 100 * time.Millisecond},
		{ModeUC, false, 0, 100 * time.Millisecond},
		{ModeRC, true, 0, 1100 * time.Millisecond},
		{ModeUC, true, 0, 1100 * time.Millisecond},
		{ModeRC, false, 100, 100 * time.Millisecond},
		{ModeRC, true, 100, 1100 * time.Millisecond},
	} {
		w := newWorld(t, 33)
		w.mute = tt.mute
		a, b := w.node(1, Options{Mode: tt.mode}), w.node(2, Options{Mode: tt.mode})
		w.run(2 * time.Second)
		for i := range tt.forged {
			x := &node{opt: Options{Link: encap.LinkAddr{QPN: 0x500, GID: gid(0x1000 + i)}}}
			req := honest(a, x)
			req.MaxCMRetries = 15
			w.inject(x, a, req)
		}
		w.run(time.Millisecond)
		w.dropMAD = func(from *node, m mad.Message) bool { return from == b && m.Attr() == mad.AttrRTU }
		in := b.ping("10.0.0.1", 9000, true)
		w.run(tt.within)
		was := b.up()
		expect.MustEqual(w, len(was), 1, "%+v: connections of b", tt)
		expect.MustEqual(w, len(a.up()), 1, "%+v: connections of a after %v", tt, tt.within)
		w.run(4*time.Second - tt.within)
		expect.MustEqual(w, a.got(in), 1, "%+v: a's copies of b's packet", tt)
		expect.MustEqual(w, len(a.f.Conns()), 1+tt.forged, "%+v: connections of a, established or not", tt)
		now := b.up()
		expect.MustEqual(w, len(now), 1, "%+v: connections of b after 4 s", tt)
		expect.MustEqual(w, now[0].LocalQPN, was[0].LocalQPN, "%+v: LocalQPN of b's connection", tt)
		out := a.ping("10.0.0.2", 9000, true)
		w.run(time.Millisecond)
		expect.MustEqual(w, b.got(out), 1, "%+v: b's copies of a's packet", tt)
	}
}

// The capability matrix: 4755-1-2, 4755-3.1-6, 4755-3.1-15, 4755-7-1, 4755-1-1.
func TestModes(t *testing.T) {
	want := map[[2]Mode]string{}
	for _, m := range []Mode{ModeRC, ModeUC, ModeAuto, ModeUD} {
		for _, k := range []Mode{ModeRC, ModeUC, ModeAuto, ModeUD} {
			want[[2]Mode{m, k}] = "UD"
		}
	}
	want[[2]Mode{ModeRC, ModeRC}], want[[2]Mode{ModeUC, ModeUC}], want[[2]Mode{ModeAuto, ModeAuto}] = "RC", "UC", "RC"
	want[[2]Mode{ModeRC, ModeAuto}], want[[2]Mode{ModeAuto, ModeRC}] = "RC", "RC"
	want[[2]Mode{ModeUC, ModeAuto}], want[[2]Mode{ModeAuto, ModeUC}] = "UC", "UC"
	for k, mode := range want {
		w := newWorld(t, 3)
		a, b := w.node(1, Options{Mode: k[0]}), w.node(2, Options{Mode: k[1]})
		w.run(2 * time.Second)
		p := a.ping("10.0.0.2", 2044, true)
		w.settle()
		q := b.ping("10.0.0.1", 2044, true)
		large := a.ping("10.0.0.2", 9000, true)
		cut := a.ping("10.0.0.2", 9000, false)
		w.settle()
		e := a.explain(ip4("10.0.0.2"))
		expect.MustEqual(w, b.got(p), 1, "%v to %v: b's copies of p", k[0], k[1])
		expect.MustEqual(w, a.got(q), 1, "%v to %v: a's copies of q", k[0], k[1])
		expect.MustEqual(w, e.Mode, mode, "%v to %v: Mode", k[0], k[1])
		if len(e.Reasons) < 3 {
			w.Fatalf("%v to %v: Reasons has %v elements, want at least 3", k[0], k[1], len(e.Reasons))
		}
		if mode == "UD" {
			// 4755-3.1-7, 4755-3.1-8, 4755-3.1-16, 4755-2-1, 4755-2-2: never a REQ to who has no mode in common
			expect.MustEqual(w, len(a.reqs)+len(b.reqs), 0, "%v to %v: number of REQs", k[0], k[1])
			expect.MustEqual(w, len(a.qps)+len(b.qps), 0, "%v to %v: number of queue pairs", k[0], k[1])
			// 4755-7.2-1: answered (DF) or fragmented
			expect.MustEqual(w, b.got(large), 0, "%v to %v: b's copies of large", k[0], k[1])
			expect.MustEqual(w, a.counter("icmp_too_big"), 1, "%v to %v: a's icmp_too_big", k[0], k[1])
			expect.MustEqual(w, b.got(cut), 0, "%v to %v: b's copies of cut", k[0], k[1])
			expect.MustEqual(w, a.counter("fragmented"), 1, "%v to %v: a's fragmented", k[0], k[1])
			switch { // 4755-3.1-9
			case a.f.Link().Flags != k[0].Flags():
				t.Errorf("Link.Flags is %v, want %v", a.f.Link().Flags, k[0].Flags())
			case k[0] == ModeUD && a.f.Link().Flags != 0:
				t.Errorf("Link.Flags is %v, want 0", a.f.Link().Flags)
			}
			continue
		}
		expect.MustEqual(w, b.got(large), 1, "%v to %v: b's copies of large", k[0], k[1])
		expect.MustEqual(w, b.got(cut), 1, "%v to %v: b's copies of cut", k[0], k[1])
		x, _ := w.agree(a, b)
		if x.Transport.String() != mode {
			w.Fatalf("%v to %v: %v", k[0], k[1], x.Transport)
		}
	}
}

// RC acknowledgements confirm a neighbour, so traffic keeps it reachable with
// few probes, which ask for the address itself; UC has none and needs more.
func TestAcknowledgementsConfirm(t *testing.T) {
	var probes []uint64
	for _, mode := range []Mode{ModeRC, ModeUC} {
		w, a, b := meet(t, 21, mode, mode)
		for range 300 {
			a.ping("10.0.0.2", 100, true)
			w.run(time.Second)
		}
		w.agree(a, b)
		probes = append(probes, a.f.neigh.Counters().Probes)
	}
	if rc, uc := probes[0], probes[1]; rc == 0 || rc >= uc {
		t.Errorf("%d probes over RC, %d over UC; want some, and fewer over RC", rc, uc)
	}
}
