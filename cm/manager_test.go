package cm

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// find returns the first action of type T.
func find[T Action](t *testing.T, actions []Action) T {
	t.Helper()
	for _, a := range actions {
		if a, ok := a.(T); ok {
			return a
		}
	}
	t.Fatalf("no %T in %v", *new(T), actions)
	panic("unreachable")
}

// findMAD returns the first message of type M that was sent.
func findMAD[M mad.Message](t *testing.T, actions []Action) M {
	t.Helper()
	for _, a := range actions {
		if a, ok := a.(SendMAD); ok {
			if _, msg, _ := mad.Parse(a.MAD.Data[:]); msg != nil {
				if msg, ok := msg.(M); ok {
					return msg
				}
			}
		}
	}
	t.Fatalf("no %T in %v", *new(M), actions)
	panic("unreachable")
}

func newManager(opt Options) *Manager {
	opt.GID, opt.CAGUID = gidA, guidA
	if opt.Rand == nil {
		opt.Rand = &counting{}
	}
	m := New(opt)
	m.Step(nil, time.Time{}, Listen{ServiceID: serviceid.New(serviceid.RFC, 0x0a), PrivateData: private(0x0a)})
	return m
}

// TestREJOwner: a REJ 8 carries the values of the one interface that owns the
// addressed GID, and none if there are several (RFC 4755 section 3.2).
func TestREJOwner(t *testing.T) {
	m := newManager(Options{})
	reject := func() mad.REJ {
		return findMAD[mad.REJ](t, m.Step(nil, time.Time{}, RecvMAD{message("REQ", args{"service": "b"})}))
	}
	if got := reject().PrivateData; !bytes.Equal(got[:8], private(0x0a)) { // 4755-3.2-12
		t.Errorf("one interface: %x", got)
	}
	other := serviceid.New(serviceid.RFC, 0x1a)
	m.Step(nil, time.Time{}, Listen{ServiceID: other, PrivateData: private(0x1a)})
	if got := reject().PrivateData; got != [mad.REJPrivateLen]byte{} {
		t.Errorf("two interfaces: %x", got)
	}
	m.Step(nil, time.Time{}, Unlisten{ServiceID: other})
	m.Step(nil, time.Time{}, Listen{ServiceID: other, GID: gidC, PrivateData: private(0x1a)})
	if got := reject().PrivateData; !bytes.Equal(got[:8], private(0x0a)) {
		t.Errorf("the other on another GID: %x", got)
	}
}

// TestREQVector compares our REQ with V7 of the packet vectors: RFC service ID, UC.
func TestREQVector(t *testing.T) {
	want := vector.Hex("0107020300000000000000050000000300100000000000001122335500000000" +
		"01000000000004560002c9030000111100000000000000000000a2" +
		"0000000000000000a2000010a0ffff30f0ffffffff00000000000000000000ffffc000020100000000000000000000ff" +
		"ffc000020200000003004050900000" + strings.Repeat("00", 42) + "000001230000fff4")
	want = append(want, make([]byte, verbs.MADLen-len(want))...)
	gid := func(s string) ib.GID {
		g, err := ib.ParseGID(s)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	// The first number is the transaction ID, the second the communication ID.
	m := New(Options{GID: gid("192.0.2.1"), CAGUID: 0x0002c90300001111, Rand: &fixed{0x0000000500000003, 0x11223355}})
	out := m.Step(nil, time.Time{}, Connect{Handle: 1, Remote: gid("192.0.2.2"),
		ServiceID: serviceid.New(serviceid.RFC, 0x456), Transport: ib.UC, QPN: 0xa2, StartingPSN: 0x10,
		PathMTU: ib.MTU1024, AckTimeout: 18, ResponseTimeout: 20, MaxRetries: 15, SL: 5,
		PrivateData: []byte{0, 0, 1, 0x23, 0, 0, 0xff, 0xf4}})
	got := find[SendMAD](t, out).MAD
	if !bytes.Equal(got.Data[:], want) { // 4755-3.2-2 4755-3.2-5 4755-3.2-6
		t.Errorf("got  %x\nwant %x", got.Data, want)
	}
	expect.Equal(t, got.QPN, ib.QPNGSI, "QPN")
	expect.Equal(t, got.Remote, gid("192.0.2.2"), "Remote")
	expect.Equal(t, got.Local, gid("192.0.2.1"), "Local")
	expect.Equal(t, got.PKey, ib.DefaultPKey, "PKey")
}

// fixed is randomness that is known.
type fixed []uint64

func (f *fixed) Uint64() uint64 {
	v := (*f)[0]
	*f = (*f)[1:]
	return v
}

// TestPrivateData: what the user hands in stands at the start of the field, with
// zeros behind, and what the peer sends is handed out unread.
func TestPrivateData(t *testing.T) {
	now := time.Time{}
	ours := private(0x0a)
	padded := func(b []byte) bool { return bytes.Equal(b[:8], ours) && len(bytes.Trim(b[8:], "\x00")) == 0 }
	m := newManager(Options{})
	out := m.Step(nil, now, Connect{Handle: 1, Remote: gidB, ServiceID: serviceid.New(serviceid.RFC, 0x0b),
		QPN: 0xa1, PathMTU: ib.MTU4096, PrivateData: ours})
	req := findMAD[mad.REQ](t, out)
	if !padded(req.PrivateData[:]) { // 4755-3.2-11 4755-6-5
		t.Errorf("REQ: %x", req.PrivateData)
	}
	// 4755-3.2-5
	expect.Equal(t, req.ServiceID, serviceid.New(serviceid.RFC, 0x0b), "REQ: ServiceID")
	expect.Equal(t, req.LocalQPN, 0xa1, "REQ: LocalQPN")
	expect.Equal(t, req.PathMTU, ib.MTU4096, "REQ: PathMTU")
	reply := find[ReplyReceived](t, m.Step(nil, now, RecvMAD{message("REP", args{"remote": "2"})}))
	if !bytes.Equal(reply.PrivateData[:8], private(0x0b)) || reply.RemoteQPN != 0xb2 { // 4755-3.2-3
		t.Errorf("REP: %x of %v", reply.PrivateData, reply.RemoteQPN)
	}
	rtu := findMAD[mad.RTU](t, m.Step(nil, now, Ready{1, ours}))
	if !padded(rtu.PrivateData[:]) { // 4755-3.2-4 4755-3.2-11
		t.Errorf("RTU: %x", rtu.PrivateData)
	}

	request := find[RequestReceived](t, m.Step(nil, now, RecvMAD{message("REQ", args{"comm": "b3", "qpn": "b4"})}))
	if request.Remote != gidB || !bytes.Equal(request.PrivateData[:8], private(0x0b)) { // 4755-3.2-13
		t.Errorf("the REQ's link-layer address does not reach the user: %v %x", request.Remote, request.PrivateData)
	}
	mra := findMAD[mad.MRA](t, m.Step(nil, now, Defer{request.Handle, 18, ours}))
	if !padded(mra.PrivateData[:]) || mra.ServiceTimeout != 18 { // 4755-3.2-11
		t.Errorf("MRA: %v %x", mra, mra.PrivateData)
	}
	rep := findMAD[mad.REP](t, m.Step(nil, now,
		Accept{Handle: request.Handle, QPN: 0xa2, StartingPSN: 5, RNRRetry: 7, PrivateData: ours}))
	// 4755-3.2-3 4755-3.2-11
	expect.Equal(t, padded(rep.PrivateData[:]), true, "REP: padded(rep.PrivateData[:])")
	expect.Equal(t, rep.LocalQPN, 0xa2, "REP: LocalQPN")
	expect.Equal(t, rep.RNRRetryCount, 7, "REP: RNRRetryCount")
	expect.Equal(t, rep.StartingPSN, 5, "REP: StartingPSN")
	dreq := findMAD[mad.DREQ](t, m.Step(nil, now, Disconnect{Handle: 1}))
	if dreq.PrivateData != [mad.DREQPrivateLen]byte{} || dreq.RemoteQPN != 0xb2 { // 4755-3.4-2
		t.Errorf("DREQ: %v %x", dreq, dreq.PrivateData)
	}

	request = find[RequestReceived](t, m.Step(nil, now, RecvMAD{message("REQ", args{"comm": "b9", "qpn": "ba"})}))
	rej := findMAD[mad.REJ](t, m.Step(nil, now, Disconnect{Handle: request.Handle, PrivateData: private(0x3a)}))
	if rej.PrivateData[3] != 0x3a { // 4755-3.2-12
		t.Errorf("REJ of a Disconnect: %x", rej.PrivateData)
	}
	request = find[RequestReceived](t, m.Step(nil, now, RecvMAD{message("REQ", args{"comm": "b5", "qpn": "b6"})}))
	rej = findMAD[mad.REJ](t, m.Step(nil, now,
		Reject{Handle: request.Handle, Reason: ReasonConsumer, ARI: []byte{1, 2}, PrivateData: ours}))
	// 4755-3.2-12
	expect.Equal(t, padded(rej.PrivateData[:]), true, "REJ: padded(rej.PrivateData[:])")
	expect.Equal(t, rej.ARILength, 2, "REJ: ARILength")
	expect.Equal(t, rej.ARI[1], 2, "REJ: ARI[1]")
}

// TestNoteString shows what people read.
func TestNoteString(t *testing.T) {
	m := newManager(Options{})
	var got []string
	tell := func(ev Event) {
		for _, a := range m.Step(nil, time.Time{}, ev) {
			if n, ok := a.(Note); ok {
				got = append(got, n.String())
			}
		}
	}
	tell(Connect{Handle: 1, Remote: gidB, ServiceID: serviceid.New(serviceid.RFC, 0x0b), QPN: 0xa1, PathMTU: ib.MTU1024})
	tell(RecvMAD{message("REJ", args{"remote": "2", "reason": "8", "src": "C"})})
	tell(RecvMAD{message("REJ", args{"remote": "2", "reason": "8"})})
	tell(Connect{Handle: 2, Remote: gidB, QPN: 0xa1})
	tell(Ready{Handle: 1})
	want := []string{
		"sent REQ comm=00000002 qpn=0x0000a1 service=0x010000000000000b in REQ_SENT",
		"received REJ comm=00000002 reason=8 (invalid service ID) dropped: source in REQ_SENT: it comes from " +
			"another GID than the connection's",
		"received REJ comm=00000002 reason=8 (invalid service ID) in REQ_SENT",
		"no path MTU (qpn=0x0000a1)",
		"Ready: the connection cannot take it any more (dropped: stale_handle)",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestParams: each side hears what the other one said, from its own end.
func TestParams(t *testing.T) {
	now := time.Time{}
	m := newManager(Options{})
	got := find[RequestReceived](t, m.Step(nil, now, RecvMAD{message("REQ", args{})}))
	expect.Equal(t, got.SendPSN, 0xc8, "REQ: SendPSN")
	expect.Equal(t, got.RNRRetry, 6, "REQ: RNRRetry")
	expect.Equal(t, got.RetryCount, 7, "REQ: RetryCount")
	expect.Equal(t, got.AckTimeout, 14, "REQ: AckTimeout")
	expect.Equal(t, got.PathMTU, ib.MTU1024, "REQ: PathMTU")
	expect.Equal(t, got.RemoteSRQ, true, "REQ: RemoteSRQ")
	m.Step(nil, now, Connect{Handle: 1, Remote: gidB, QPN: 0xa1, StartingPSN: 0x64, PathMTU: ib.MTU1024,
		AckTimeout: 12, RetryCount: 5, RNRRetry: 7})
	reply := find[ReplyReceived](t, m.Step(nil, now,
		RecvMAD{message("REP", args{"comm": "b7", "qpn": "b8", "remote": "3"})}))
	expect.Equal(t, reply.SendPSN, 0xc9, "REP: SendPSN")
	expect.Equal(t, reply.RecvPSN, 0x64, "REP: RecvPSN")
	expect.Equal(t, reply.RNRRetry, 5, "REP: RNRRetry")
	expect.Equal(t, reply.RetryCount, 5, "REP: RetryCount")
	expect.Equal(t, reply.AckTimeout, 12, "REP: AckTimeout")
}

// TestAckTimeout has the arithmetic of Linux's cm_ack_timeout, where life = timeout-1.
func TestAckTimeout(t *testing.T) {
	for _, tt := range []struct{ delay, timeout, want ib.Timeout }{
		{0, 14, 14}, {12, 14, 14}, {13, 14, 15}, {14, 14, 15}, {15, 14, 16}, {16, 14, 16}, {31, 31, 31}, {31, 4, 31},
	} {
		if got := ackTimeout(tt.delay, tt.timeout); got != tt.want {
			t.Errorf("ackTimeout(%d, %d) = %d, want %d", tt.delay, tt.timeout, got, tt.want)
		}
	}
}

// TestBoundedTables: rejected REQs and rate-limited sources do not pile up.
func TestBoundedTables(t *testing.T) {
	m := newManager(Options{REQsPerSecond: -1, MaxConns: 2000})
	for i := range 1500 {
		in := message("REQ", args{})
		in.Data[mad.HeaderLen+2], in.Data[mad.HeaderLen+3] = byte(i>>8), byte(i)
		r := find[RequestReceived](t, m.Step(nil, time.Time{}, RecvMAD{in}))
		m.Step(nil, time.Time{}, Reject{Handle: r.Handle, Reason: ReasonConsumer})
	}
	if n := len(m.Conns()); n != maxRejected {
		t.Errorf("%d rejected REQs are kept, want %d", n, maxRejected)
	}

	l := newLimiter(1)
	now := time.Unix(0, 0)
	for i := range 5000 {
		if !l.allow(now, ib.GID{0: byte(i >> 8), 1: byte(i)}) {
			t.Fatalf("source %d is refused its first", i)
		}
	}
	if len(l.sources) != maxSources {
		t.Errorf("%d sources are known, want %d", len(l.sources), maxSources)
	}
	old, fresh := ib.GID{15: 1}, ib.GID{0: byte(4999 >> 8), 1: byte(4999 & 255)}
	for i, want := range []bool{true, false, false} {
		if got := l.allow(now, fresh); got != want {
			t.Errorf("take %d of 2 a second burst: %v", i+2, got)
		}
	}
	if !l.allow(now.Add(time.Second), fresh) {
		t.Error("after a second there is no token for a fresh one")
	}
	if !l.allow(now, old) {
		t.Error("a second gives no token back to an old one")
	}
}

// Whoever is rejected keeps nobody out, neither peers nor us.
func TestRejectedMakeRoom(t *testing.T) {
	m := newManager(Options{REQsPerSecond: -1, MaxConns: 4})
	for i := range 40 {
		in := message("REQ", args{})
		in.Data[mad.HeaderLen+2], in.Data[mad.HeaderLen+3] = byte(i>>8), byte(i)
		r := find[RequestReceived](t, m.Step(nil, time.Time{}, RecvMAD{in}))
		m.Step(nil, time.Time{}, Reject{Handle: r.Handle, Reason: ReasonConsumer})
		if n := m.Len(); n > 4 {
			t.Fatalf("%d connections", n)
		}
	}
	for i := range 5 {
		failed := false
		for _, a := range m.Step(nil, time.Time{}, Connect{Handle: Handle(i + 1), Remote: ib.GID{1}, Transport: ib.RC,
			QPN: ib.QPN(100 + i), PathMTU: ib.MTU1024}) {
			if f, ok := a.(Failed); ok {
				failed = f.Cause == NoRoom
			}
		}
		if want := i == 4; failed != want {
			t.Errorf("Connect %d of 4: no room is %v", i+1, failed)
		}
	}
}

// FuzzStep drives a Manager with any events and MADs. Whatever comes, the
// tables stay bounded and agree with each other, every handle ends once, and
// all is forgotten in time.
func FuzzStep(f *testing.F) {
	for seed := range 8 {
		b := make([]byte, 600)
		r := rand.NewChaCha8([32]byte{byte(seed)})
		r.Read(b)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		u := &fuzzUser{t: t, in: script, now: time.Unix(1000, 0), open: map[Handle]bool{}, qpn: map[Handle]bool{}}
		u.m = newManager(Options{MaxConns: 12, MaxHalfOpen: 6, MaxRetries: 2})
		for len(u.in) > 0 {
			u.step(u.event())
			u.check()
		}
		for h := range u.open {
			u.step(Disconnect{Handle: h})
		}
		for range 1000 {
			if next := u.m.Deadline(); !next.IsZero() {
				u.now = next
				u.step(Wake{})
				u.check()
			}
		}
		m := u.m
		if len(m.byHandle)+len(m.byLocal)+len(m.byRemote)+len(m.byRemoteQP)+len(m.byQPN)+m.timers.Len()+
			len(m.rejected)+len(m.halfOpen) != 0 {
			t.Errorf("left behind: %+v", m.Conns()) // 4755-3.2-7
		}
		if len(u.open)+len(u.qpn) != 0 {
			t.Errorf("never ended: %v, never released: %v", u.open, u.qpn)
		}
	})
}

// fuzzUser turns octets into events and keeps the books that a user keeps.
type fuzzUser struct {
	t    *testing.T
	m    *Manager
	in   []byte
	now  time.Time
	last Handle
	open map[Handle]bool // not yet ended
	qpn  map[Handle]bool // a QPN was given and not released
}

func (u *fuzzUser) byte() byte {
	if len(u.in) == 0 {
		return 0
	}
	b := u.in[0]
	u.in = u.in[1:]
	return b
}

func (u *fuzzUser) handle() Handle {
	if b := u.byte(); b&1 == 0 {
		return Handle(b>>1)%8 + max(u.last, 6) - 6
	} else {
		return incoming | Handle(b>>1)%8 + max(u.m.lastIncoming, 6) - 6
	}
}

func (u *fuzzUser) event() Event {
	switch u.byte() % 16 {
	case 0, 1:
		u.last++
		u.open[u.last], u.qpn[u.last] = true, true
		return Connect{Handle: u.last, Remote: gidB, QPN: ib.QPN(u.byte()%32) + 2, PathMTU: ib.MTU1024,
			Transport: ib.Transport(u.byte() % 2), MaxRetries: u.byte() % 4, PrivateData: private(0x0a)}
	case 2, 3:
		return Ready{Handle: u.handle()}
	case 4, 5:
		return Accept{Handle: u.handle(), QPN: ib.QPN(u.byte()) + 0x100}
	case 6:
		return Reject{Handle: u.handle(), Reason: Reason(u.byte())}
	case 7:
		return Defer{Handle: u.handle(), Timeout: ib.Timeout(u.byte() % 32)}
	case 8:
		return Cancel{Handle: u.handle()}
	case 9:
		return Disconnect{Handle: u.handle()}
	case 10:
		return DataOnQP{QPN: ib.QPN(u.byte()) + 0x100}
	case 11:
		u.now = u.now.Add(time.Duration(u.byte()) * 10 * time.Millisecond)
		return Wake{}
	case 12:
		if next := u.m.Deadline(); !next.IsZero() && next.After(u.now) {
			u.now = next
		}
		return Wake{}
	}
	return RecvMAD{u.mad()}
}

// mad makes a MAD that has a chance of meaning something.
func (u *fuzzUser) mad() *verbs.MAD {
	kinds := []string{"REQ", "REQ", "REP", "REP", "RTU", "MRA", "REJ", "DREQ", "DREP", "LAP", "SIDR_REQ",
		"SIDR_REP", "APR"}
	in := message(kinds[int(u.byte())%len(kinds)], args{})
	d := in.Data[mad.HeaderLen:]
	d[3] = u.byte() % 16
	var local mad.CommID
	qpn := ib.QPN(u.byte())
	if all := u.m.Conns(); len(all) > 0 {
		c := all[int(u.byte())%len(all)]
		if u.byte()%4 != 0 && c.RemoteQPN != 0 {
			d[3] = byte(c.RemoteCommID)
		}
		local = c.LocalCommID
		if u.byte()%4 != 0 {
			qpn = c.LocalQPN
		}
	}
	switch in.Data[17] {
	case 0x10: // REQ
		d[32], d[33], d[34] = 0, 0, u.byte()%32
	case 0x13: // REP
		d[14] = u.byte() % 32
		fallthrough
	default:
		d[4], d[5], d[6], d[7] = byte(local>>24), byte(local>>16), byte(local>>8), byte(local)
	}
	switch in.Data[17] {
	case 0x15: // DREQ
		d[8], d[9], d[10] = byte(qpn>>16), byte(qpn>>8), byte(qpn)
	case 0x11, 0x12: // MRA, REJ
		d[8] = u.byte()
		d[9], d[11], d[19] = u.byte(), u.byte()%32, byte(guidB)
	}
	if u.byte()%8 == 0 {
		in.Data[u.byte()] ^= u.byte()
	}
	if u.byte()%16 == 0 {
		in.Remote = gidC
	}
	return in
}

// step keeps the books.
func (u *fuzzUser) step(ev Event) {
	received := 0
	for _, a := range u.m.Step(nil, u.now, ev) {
		var ended Handle
		switch a := a.(type) {
		case RequestReceived:
			u.open[a.Handle] = true
		case Failed:
			ended = a.Handle
		case Disconnected:
			ended = a.Handle
		case Released:
			if !u.qpn[a.Handle] || u.open[a.Handle] {
				u.t.Errorf("%v released, but open %v, QPN %v", a.Handle, u.open[a.Handle], u.qpn[a.Handle])
			}
			delete(u.qpn, a.Handle)
		case ReplyReceived, Established, LateRTU:
		case SendMAD:
			_, msg, err := mad.Parse(a.MAD.Data[:])
			if err != nil {
				u.t.Errorf("we sent what we cannot read: %v", err)
			}
			if rep, ok := msg.(mad.REP); ok {
				u.qpn[u.m.byLocal[rep.LocalCommID].handle] = true
			}
			if rej, ok := msg.(mad.REJ); ok {
				if ev, ok := ev.(Reject); ok && rej.MessageRejected == mad.KindREQ {
					delete(u.open, ev.Handle) // the end of a REQ
				}
			}
		case Note:
			if a.Dir == Received {
				received++
			}
		}
		if ended != 0 {
			if !u.open[ended] {
				u.t.Errorf("%v ended twice: %+v", ended, a)
			}
			delete(u.open, ended)
		}
	}
	if _, ok := ev.(RecvMAD); ok && received != 1 {
		u.t.Errorf("a MAD has %d notes", received)
	}
}

// check compares the tables.
func (u *fuzzUser) check() {
	m := u.m
	switch {
	case len(m.byHandle) > 12:
		u.t.Fatalf("tables: byHandle has %v elements, want at most 12", len(m.byHandle))
	case len(m.byHandle) != len(m.byLocal):
		u.t.Fatalf("tables: byHandle has %v elements, want %v", len(m.byHandle), len(m.byLocal))
	case len(m.byRemote) > len(m.byHandle):
		u.t.Fatalf("tables: byRemote has %v elements, want at most %v", len(m.byRemote), len(m.byHandle))
	case len(m.byRemoteQP) > len(m.byHandle):
		u.t.Fatalf("tables: byRemoteQP has %v elements, want at most %v", len(m.byRemoteQP), len(m.byHandle))
	case len(m.byQPN) > len(m.byHandle):
		u.t.Fatalf("tables: byQPN has %v elements, want at most %v", len(m.byQPN), len(m.byHandle))
	case m.timers.Len() > len(m.byHandle):
		u.t.Fatalf("tables: Len is %v, want at most %v", m.timers.Len(), len(m.byHandle))
	}
	halfOpen := 0
	for h, c := range m.byHandle {
		if c.isHalfOpen() {
			halfOpen++
		}
		expect.MustEqual(u.t, c.handle, h, "handle of a connection in byHandle")
		if m.byLocal[c.p.LocalCommID] != c {
			u.t.Fatalf("%v is not in byLocal", h)
		}
		if c.Armed() == (c.state == StateEstablished) {
			u.t.Fatalf("%v has no deadline in %v", h, c.state)
		}
	}
	if halfOpen != len(m.halfOpen) {
		u.t.Fatalf("%d half-open, counted %d", halfOpen, len(m.halfOpen))
	}
}

// The bound on connections changes while there are some: more than a smaller one allows stay.
func TestSetMaxConns(t *testing.T) {
	m := newManager(Options{REQsPerSecond: -1, MaxConns: 4})
	next := Handle(0)
	connect := func() bool {
		next++
		for _, a := range m.Step(nil, time.Time{}, Connect{Handle: next, Remote: ib.GID{1}, Transport: ib.RC,
			QPN: ib.QPN(100 + next), PathMTU: ib.MTU1024}) {
			if f, ok := a.(Failed); ok && f.Cause == NoRoom {
				return false
			}
		}
		return true
	}
	for _, tt := range []struct{ most, fit int }{{4, 4}, {6, 2}, {3, 0}, {7, 1}} {
		m.Step(nil, time.Time{}, SetMaxConns{MaxConns: tt.most})
		fit := 0
		for connect() {
			fit++
		}
		if fit != tt.fit {
			t.Errorf("with a bound of %d: %d more, want %d", tt.most, fit, tt.fit)
		}
	}
	if got := m.Len(); got != 7 {
		t.Errorf("%d connections, want 7", got)
	}
}
