package ipoib

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/foreign"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// A cmHost is what hosts differ in, as far as CM messages go.
type cmHost struct {
	policy CMTransport
	taken  bool // QP 1 is the kernel's
	silent bool // QP 1 is deaf and mute
}

func (h cmHost) String() string {
	return fmt.Sprintf("%v%s%s", h.policy, map[bool]string{true: " taken"}[h.taken],
		map[bool]string{true: " silent"}[h.silent])
}

// cmNode adds a host that is h.
func (w *world) cmNode(i int, h cmHost, opt Options) *node {
	opt.CMTransport, opt.NoGSI = h.policy, h.taken
	n := w.node(i, opt)
	n.taken, n.silent = h.taken, h.silent
	return n
}

type cmPath struct {
	a, b cmHost // a asks
	want CMPath
	none bool
	reqs int // of a, repeats not counted
}

// cmPaths are the cases of TestCMPaths.
func cmPaths() []cmPath {
	auto, gsi, only := cmHost{}, cmHost{policy: CMGSI}, cmHost{policy: CMInband}
	taken, silent := cmHost{taken: true}, cmHost{silent: true}
	return []cmPath{
		{a: auto, b: auto, want: ViaGSI, reqs: 1},
		{a: auto, b: gsi, want: ViaGSI, reqs: 1},
		{a: auto, b: only, want: ViaInband, reqs: 2},
		{a: auto, b: taken, want: ViaInband, reqs: 3}, // both service IDs are rejected at QP 1
		{a: auto, b: silent, want: ViaInband, reqs: 2},
		{a: gsi, b: auto, want: ViaGSI, reqs: 1},
		{a: gsi, b: gsi, want: ViaGSI, reqs: 1},
		{a: gsi, b: only, none: true},
		{a: gsi, b: taken, none: true},
		{a: only, b: auto, want: ViaInband, reqs: 1},
		{a: only, b: gsi, none: true},
		{a: only, b: only, want: ViaInband, reqs: 1},
		{a: only, b: taken, want: ViaInband, reqs: 1},
		{a: taken, b: auto, want: ViaInband, reqs: 1},
		{a: taken, b: gsi, none: true},
		{a: taken, b: only, want: ViaInband, reqs: 1},
		{a: taken, b: taken, want: ViaInband, reqs: 1},
	}
}

// Hosts of every policy meet, whichever of them asks; where the two have a path
// in common there is one connection, and where they have not UD carries on.
func TestCMPaths(t *testing.T) {
	for _, tt := range cmPaths() {
		for _, mode := range []Mode{ModeRC, ModeUC} {
			w := newWorld(t, 1)
			a, b := w.cmNode(1, tt.a, Options{Mode: mode}), w.cmNode(2, tt.b, Options{Mode: mode})
			name := fmt.Sprintf("%v asks %v, %v", tt.a, tt.b, mode)
			reqs := map[mad.CommID]bool{}
			w.onMAD = func(from *node, m mad.Message) {
				if r, ok := m.(mad.REQ); ok && from == a {
					reqs[r.LocalCommID] = true
				}
			}
			w.run(2 * time.Second)
			small, large := a.ping("10.0.0.2", 500, true), a.ping("10.0.0.2", 9000, false)
			w.settle()
			if b.got(small) != 1 {
				w.Fatalf("%s: what fits UD did not arrive", name)
			}
			if tt.none {
				if len(a.up())+len(b.up()) != 0 {
					w.Fatalf("%s: connected", name)
				}
				continue
			}
			x, y := w.agree(a, b)
			expect.MustEqual(w, b.got(large), 1, "%s: b's copies of large", name)
			expect.MustEqual(w, x.Via, tt.want, "%s: x's Via", name)
			expect.MustEqual(w, y.Via, tt.want, "%s: y's Via", name)
			want := tt.reqs
			if tt.a == (cmHost{}) && tt.b == (cmHost{taken: true}) && mode == ModeUC {
				want-- // the other service ID knows no UC
			}
			if len(reqs) != want {
				w.Fatalf("%s: %d REQs, want %d", name, len(reqs), want)
			}
			checkVia(w, name, a, b, tt.want)
			// Goodbye takes the same path, and is answered.
			a.step(Shutdown{})
			w.run(100 * time.Millisecond)
			expect.MustEqual(w, len(b.up()), 0, "%s: number of b's connections after the end", name)
			expect.MustEqual(w, len(b.qps), 0, "%s: number of b's queue pairs after the end", name)
			if at := a.f.Deadline(); !at.IsZero() {
				w.Fatalf("%s: after the end a's deadline is %v, want none", name, at)
			}
		}
	}
}

// checkVia checks what a and b count, and how a explains its way to b, against the path via.
func checkVia(w *world, name string, a, b *node, via CMPath) {
	w.t.Helper()
	inband := via == ViaInband
	e := a.explain(ip4("10.0.0.2"))
	why := strings.Join(e.Reasons, "\n")
	for _, tt := range []struct {
		what      string
		got, want bool
	}{
		{"a sent messages in-band", len(a.inband) > 0, inband},
		{"a counts messages sent in-band", a.counter("inband_sent") > 0, inband},
		{"b counts messages received in-band", b.counter("inband_received") > 0, inband},
		{fmt.Sprintf("%q names in-band", why), strings.Contains(why, "in-band"), inband},
		{fmt.Sprintf("%q names QP 1", why), strings.Contains(why, "by QP 1"), via == ViaGSI},
	} {
		expect.MustEqual(w, tt.got, tt.want, "%s: that %s", name, tt.what)
	}
	expect.MustEqual(w, a.counter("inband_established"), uint64(via), "%s: a's inband_established", name)
	expect.MustEqual(w, e.Via, via, "%s: Via of the explanation", name)
}

// A REQ in-band crosses one at QP 1, whoever is larger and whichever comes
// first: one connection, that of the larger address (4755-3.3-1, 4755-3.3-5).
func TestCrossingAcrossPaths(t *testing.T) {
	for _, mode := range []Mode{ModeRC, ModeUC, ModeAuto} {
		for _, first := range []int{1, 2} {
			for _, later := range []time.Duration{0, 10 * time.Microsecond, 40 * time.Microsecond, 70 * time.Microsecond} {
				w, a, b := meet(t, 3, mode, mode)
				x, y := a, b
				if first == 2 {
					x, y = b, a
				}
				p := x.f.peer(y.link()) // x has met y in-band, y has not met x
				p.via, p.viaUntil = ViaInband, w.now.Add(time.Hour)
				q, r := x.ping(y.addrs[1].Addr().String(), 9000, true), []byte(nil)
				w.run(later)
				r = y.ping(x.addrs[1].Addr().String(), 9000, true)
				w.settle()
				ca, _ := w.agree(a, b)
				sa, sb := a.f.Status().Crossings, b.f.Status().Crossings
				expect.MustEqual(w, y.got(q), 1, "%v, host %d in-band, %v later: y's copies of q", mode, first, later)
				expect.MustEqual(w, x.got(r), 1, "%v, host %d in-band, %v later: x's copies of r", mode, first, later)
				if later < 20*time.Microsecond {
					expect.MustEqual(w, sa.Seen, 1, "%v, host %d in-band, %v later: a's crossings", mode, first, later)
					expect.MustEqual(w, sb.Seen, 1, "%v, host %d in-band, %v later: b's crossings", mode, first, later)
					expect.MustEqual(w, ca.Active, false, "%v, host %d in-band, %v later: a's Active", mode, first, later)
				}
				if len(x.inband) == 0 {
					w.Fatalf("%v, host %d in-band, %v later: x sent nothing in-band", mode, first, later)
				}
				if len(y.inband) == len(y.sent) {
					w.Fatalf("%v, host %d in-band, %v later: y sent all %d in-band", mode, first, later, len(y.sent))
				}
			}
		}
	}
}

// The path that brought a connection about is remembered for ten minutes after
// the last word in-band, and then QP 1 is tried again.
func TestPathMemory(t *testing.T) {
	w := newWorld(t, 4)
	a, b := w.cmNode(1, cmHost{}, Options{Idle: 30 * time.Second}),
		w.cmNode(2, cmHost{policy: CMInband}, Options{Idle: -1})
	w.run(2 * time.Second)
	gsi := 0
	w.onMAD = func(from *node, m mad.Message) {
		if from == a && m.Attr() == mad.AttrREQ && a.f.conns.byID != nil {
			for _, c := range a.f.conns.byAge() {
				if c.active && c.state == connAsked && c.via == ViaGSI {
					gsi++
				}
			}
		}
	}
	connect := func() (took time.Duration) {
		p, start := a.ping("10.0.0.2", 9000, true), w.now
		for b.got(p) == 0 && w.now.Sub(start) < time.Minute {
			w.run(time.Millisecond)
		}
		w.agree(a, b)
		return w.now.Sub(start)
	}
	if took := connect(); took < 2*time.Second || gsi == 0 {
		w.Fatalf("connected after %v and %d REQs at QP 1, which is silent", took, gsi)
	}
	w.run(time.Minute) // idle: closed, in-band
	gsi = 0
	if took := connect(); took > 10*time.Millisecond || gsi != 0 {
		w.Fatalf("the second time: %v, %d REQs at QP 1", took, gsi)
	}
	w.run(time.Minute)
	w.run(classMemory + time.Minute)
	if took := connect(); took < 2*time.Second || gsi == 0 {
		w.Fatalf("after long: %v, %d REQs at QP 1", took, gsi)
	}
	// It speaks in-band: being away does not count against it.
	if p := a.f.peers.byLink[b.link()]; p != nil {
		b.dead = true
		for range 30 {
			a.ping("10.0.0.2", 500, true)
			w.run(10 * time.Second)
		}
		if a.counter("inband_given_up") != 0 {
			w.Fatalf("given up on one that knows it")
		}
	}
}

// Peers of another make are not bothered for ever, by a host that has QP 1 or by
// one that has not.
func TestInbandSparesUnknown(t *testing.T) {
	for _, h := range []cmHost{{}, {taken: true}} {
		w := newWorld(t, 5)
		a, k := w.cmNode(1, h, Options{}), w.foreign(2, foreign.Options{Deaf: true})
		w.run(2 * time.Second)
		perDay := []int{}
		for range 3 {
			before := len(a.inband)
			for range 24 * 60 {
				p := a.ping("10.0.0.2", 500, true)
				w.run(time.Minute)
				if n := len(k.legacy.got); n == 0 || string(k.legacy.got[n-1]) != string(p) {
					w.Fatalf("%v: UD does not go on", h)
				}
				k.legacy.got = nil
			}
			a.notes, a.sent, a.reqs = nil, nil, nil
			perDay = append(perDay, len(a.inband)-before)
		}
		// Four times eight REQs and a REJ, then after 10 minutes, 20, 40, …
		switch {
		case perDay[0] == 0:
			w.Fatalf("%v: perDay[0] is 0, want more", h)
		case perDay[0] > 12*9:
			w.Fatalf("%v: perDay[0] is %v, want at most %v", h, perDay[0], 12*9)
		case perDay[2] > 9:
			w.Fatalf("%v: perDay[2] is %v, want at most 9", h, perDay[2])
		}
		if a.counter("inband_given_up") < 5 {
			w.Fatalf("%v: given up %d times", h, a.counter("inband_given_up"))
		}
		why := strings.Join(a.explain(ip4("10.0.0.2")).Reasons, "\n")
		if !strings.Contains(why, "never answered in-band") {
			w.Fatalf("not explained:\n%s", why)
		}
		t.Logf("%v: per day %v", h, perDay)
	}
}

// A peer that has been seen to use the 0x10 form is of another make: nothing in-band goes
// to it, also when QP 1 is silent or rejects both forms later.
func TestNothingInbandToLinux(t *testing.T) {
	for _, tt := range []struct {
		name string
		meet func(a, k *node) // how they got to know each other
		then func(k *node)
	}{
		{"we dialled, silence", func(a, _ *node) { a.ping("10.0.0.2", 9000, true) }, func(k *node) { k.silent = true }},
		{"we dialled, REJ 8", func(a, _ *node) { a.ping("10.0.0.2", 9000, true) }, func(k *node) { k.taken = true }},
		{"it dialled, silence", func(a, k *node) { k.legacy.connect(a) }, func(k *node) { k.silent = true }},
	} {
		w := newWorld(t, 9)
		a, k := w.node(1, Options{Idle: 30 * time.Second}), w.linux(2)
		w.run(2 * time.Second)
		tt.meet(a, k)
		w.run(time.Minute) // ours is idle and ends
		before := len(a.reqs)
		tt.then(k)
		for range 3 {
			a.ping("10.0.0.2", 9000, true)
			w.run(time.Minute)
		}
		if len(a.reqs) == before {
			w.Fatalf("%s: no attempt was made, so nothing is shown", tt.name)
		}
		if n := len(a.inband); n != 0 {
			w.Fatalf("%s: %d messages in-band, want none", tt.name, n)
		}
	}
}

// inbandDrops are the cases of TestInbandDrops.
var inbandDrops = []struct {
	name    string
	policy  CMTransport
	change  func(ev *RecvFrame, req *mad.REQ)
	counter string
	note    string
}{
	{"an honest one", CMAuto, nil, "", ""},
	{"the packet is from another GID", CMAuto, func(ev *RecvFrame, _ *mad.REQ) { ev.SrcGID = gid(9) },
		"drop_inband_source", "the packet from fe80::9"},
	{"the REQ is from another GID", CMAuto, func(_ *RecvFrame, r *mad.REQ) { r.Primary.LocalGID = gid(9) },
		"drop_inband_source", "the REQ is from fe80::9"},
	{"the packet is from another QP", CMAuto, func(ev *RecvFrame, _ *mad.REQ) { ev.SrcQPN = 0x99 },
		"drop_inband_source", "names UD QPN"},
	{"no UD QPN in the private data", CMAuto, func(_ *RecvFrame, r *mad.REQ) {
		r.PrivateData = [mad.REQPrivateLen]byte{}
	}, "drop_inband_source", "names UD QPN"},
	{"no GRH", CMAuto, func(ev *RecvFrame, _ *mad.REQ) { ev.SrcGID, ev.DstGID = ib.GID{}, ib.GID{} },
		"drop_inband_source", "no GRH"},
	{"to a group", CMAuto, func(ev *RecvFrame, _ *mad.REQ) { ev.DstGID[0] = 0xff }, "drop_inband_to_group",
		"not sent to our GID"},
	{"from QP 1", CMAuto, func(ev *RecvFrame, _ *mad.REQ) { ev.SrcQPN = ib.QPNGSI }, "drop_inband_malformed", "no MAD"},
	{"from the multicast QPN", CMAuto, func(ev *RecvFrame, _ *mad.REQ) { ev.SrcQPN = ib.QPNMulticast },
		"drop_inband_malformed", "no MAD"},
	{"our own", CMAuto, func(ev *RecvFrame, r *mad.REQ) { ev.SrcGID, ev.SrcQPN = gid(1), 0x101 },
		"drop_reflected", "our own"},
	{"short", CMAuto, func(ev *RecvFrame, _ *mad.REQ) {
		ev.Conn = 0
		ev.Frame = ev.Frame[:100]
	}, "drop_inband_malformed", "no MAD"},
	{"policy gsi", CMGSI, nil, "drop_inband_off", "cm_transport is gsi"},
}

// What is dropped before the CM sees it: nothing is answered, a reason is
// counted, and monitors are told.
func TestInbandDrops(t *testing.T) {
	for _, tt := range inbandDrops {
		w := newWorld(t, 6)
		a := w.node(1, Options{CMTransport: tt.policy})
		w.run(2 * time.Second)
		a.notes = nil
		req := mad.REQ{LocalCommID: 7, ServiceID: serviceid.New(serviceid.RFC, 0x101), LocalCAGUID: 9, LocalQPN: 0x55,
			Transport: ib.RC, PathMTU: ib.MTU1024, PKey: ib.DefaultPKey, MaxCMRetries: 3, LocalCMResponseTimeout: 16,
			RemoteCMResponseTimeout: 16}
		req.Primary.LocalGID, req.Primary.RemoteGID = gid(2), gid(1)
		pd, _ := encap.PrivateData{QPN: 0x102, ReceiveMTU: 9000}.AppendBinary(nil)
		copy(req.PrivateData[:], pd)
		ev := RecvFrame{SrcGID: gid(2), DstGID: gid(1), SrcQPN: 0x102, Frame: make([]byte, encap.HeaderLen+verbs.MADLen)}
		if tt.change != nil {
			tt.change(&ev, &req)
		}
		if len(ev.Frame) > 200 {
			b, _ := req.AppendBinary(nil)
			copy(ev.Frame[encap.HeaderLen:], b)
		}
		encap.Put(ev.Frame, encap.InbandCM)
		a.step(ev)
		if tt.counter == "" {
			if len(a.f.Conns()) != 1 || len(a.inband) != 1 {
				w.Fatalf("%s: %+v, %d sent", tt.name, a.f.Conns(), len(a.inband))
			}
			continue
		}
		switch {
		case len(a.f.Conns()) != 0:
			w.Fatalf("%s: a's Conns has %v elements, want 0", tt.name, len(a.f.Conns()))
		case len(a.sent) != 0:
			w.Fatalf("%s: a's sent has %v elements, want 0", tt.name, len(a.sent))
		case a.counter(tt.counter) != 1:
			w.Fatalf("%s: %+v, %d sent, %s=%d, %d peers", tt.name, a.f.Conns(), len(a.sent), tt.counter,
				a.counter(tt.counter), len(a.f.peers.byLink))
		case len(a.f.peers.byLink) != 0:
			w.Fatalf("%s: a's byLink has %v elements, want 0", tt.name, len(a.f.peers.byLink))
		}
		told := ""
		for _, n := range a.notes {
			if n.Kind == NoteCMRecv {
				told += n.Text
			}
		}
		if !strings.Contains(told, tt.note) || !strings.Contains(told, "dropped") {
			w.Fatalf("%s: monitors were told %q", tt.name, told)
		}
	}
}

// Where messages travel in-band only, QP 1 is deaf; and one in-band on a
// connection is no frame of ours.
func TestInbandOnlyElsewhereDropped(t *testing.T) {
	w := newWorld(t, 7)
	a := w.node(1, Options{CMTransport: CMInband})
	b := w.node(2, Options{CMTransport: CMGSI})
	w.run(2 * time.Second)
	b.ping("10.0.0.1", 9000, false)
	w.settle()
	if n := a.counter("drop_gsi_off"); n < 8 || len(a.sent) != 0 {
		w.Fatalf("%d dropped, %d answered", n, len(a.sent))
	}
	w = newWorld(t, 8)
	a = w.node(1, Options{})
	w.node(2, Options{})
	w.run(2 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	before := a.counter("drop_malformed_frame")
	fr := make([]byte, encap.HeaderLen+verbs.MADLen)
	encap.Put(fr, encap.InbandCM)
	a.step(RecvFrame{Conn: a.up()[0].Conn, Frame: fr})
	expect.MustEqual(w, a.counter("drop_malformed_frame"), before+1, "drop_malformed_frame")
	expect.MustEqual(w, a.counter("inband_received"), 0, "inband_received")
}

// A handshake in-band outlives loss and repeats as one at QP 1 does.
func TestInbandLoss(t *testing.T) {
	for seed := range uint64(60) {
		w := newWorld(t, seed)
		h := []cmHost{{}, {policy: CMInband}, {taken: true}, {silent: true}}
		a, b := w.cmNode(1, h[seed%4], Options{}), w.cmNode(2, h[1+seed/4%3], Options{})
		w.run(2 * time.Second)
		w.loss, w.dup = 0.25, 0.25
		for range 60 {
			a.ping("10.0.0.2", 2000, true)
			b.ping("10.0.0.1", 2000, true)
			w.run(time.Second)
		}
		w.loss, w.dup = 0, 0
		a.ping("10.0.0.2", 2000, true)
		w.run(2 * time.Minute)
		w.wantConnection(a, b, "10.0.0.2", "%v and %v", h[seed%4], h[1+seed/4%3])
	}
}
