package cm

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// udB is the UD QP of host B, where it takes messages in-band.
const udB ib.QPN = 0x0b

// inband makes a MAD of B as it comes in-band.
func inband(what string, a args) RecvInband {
	m := message(what, a)
	m.QPN = udB
	return RecvInband{m}
}

// sentTo returns the QPs that the messages of out go to.
func sentTo(out []Action) (to []ib.QPN) {
	for _, a := range out {
		if s, ok := a.(SendMAD); ok {
			to = append(to, s.MAD.QPN)
		}
	}
	return to
}

// What is answered is answered where it came from, with a connection or
// without one, and the notes tell which way a message took.
func TestAnswersWhereItCame(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before []Event
		ev     Event
		want   ib.QPN
		none   bool
	}{
		{name: "REQ, nobody listens, in-band", ev: inband("REQ", args{"service": "b"}), want: udB},
		{name: "REQ, nobody listens, QP 1", ev: RecvMAD{message("REQ", args{"service": "b"})}, want: ib.QPNGSI},
		{name: "DREQ of an unknown connection", ev: inband("DREQ", args{"remote": "7"}), want: udB},
		{name: "LAP", ev: inband("LAP", args{"remote": "7"}), want: udB},
		{name: "SIDR_REQ", ev: inband("SIDR_REQ", args{}), want: udB},
		{name: "REQ in-band, repeated at QP 1", before: []Event{inband("REQ", args{}),
			Accept{Handle: incoming | 1, QPN: 0xa2}}, ev: RecvMAD{message("REQ", args{})}, want: ib.QPNGSI},
		{name: "REQ at QP 1, repeated in-band", before: []Event{RecvMAD{message("REQ", args{})},
			Accept{Handle: incoming | 1, QPN: 0xa2}}, ev: inband("REQ", args{}), want: udB},
		{name: "REQ in-band, accepted", before: []Event{inband("REQ", args{})},
			ev: Accept{Handle: incoming | 1, QPN: 0xa2}, want: udB},
		{name: "REQ in-band, rejected", before: []Event{inband("REQ", args{})},
			ev: Reject{Handle: incoming | 1, Reason: 28}, want: udB},
		{name: "from another GID", before: []Event{inband("REQ", args{}), Accept{Handle: incoming | 1, QPN: 0xa2}},
			ev: inband("DREQ", args{"remote": "1", "src": "C", "qpn": "a2"}), none: true},
	} {
		m := newManager(Options{})
		for _, ev := range tt.before {
			m.Step(nil, time.Time{}, ev)
		}
		out := m.Step(nil, time.Time{}, tt.ev)
		to := sentTo(out)
		if tt.none && len(to) == 0 {
			continue
		}
		if want := []ib.QPN{tt.want}; !slices.Equal(to, want) {
			t.Errorf("%s: sent to %v, want %v: %v", tt.name, to, want, out)
		}
		for _, a := range out {
			if n, ok := a.(Note); ok && n.Dir == Sent {
				expect.Equal(t, n.Inband, tt.want == udB, "%s: Inband of the note %v", tt.name, n)
			}
		}
	}
}

// A connection of ours is asked for in-band if the user says so, repeats too,
// and goes on where the peer's answer came from.
func TestConnectInband(t *testing.T) {
	m := newManager(Options{})
	now := time.Unix(1000, 0)
	connect := func(h Handle, qpn, inband ib.QPN) []Action {
		return m.Step(nil, now, Connect{Handle: h, Remote: gidB, Inband: inband,
			ServiceID: serviceid.New(serviceid.RFC, udB), QPN: qpn, PathMTU: ib.MTU1024})
	}
	comm := func(out []Action) mad.CommID { return findMAD[mad.REQ](t, out).LocalCommID }
	out := connect(1, 0xa1, udB)
	if to := sentTo(out); len(to) != 1 || to[0] != udB {
		t.Fatalf("REQ sent to %v", to)
	}
	id := comm(out)
	now = m.Deadline()
	if to := sentTo(m.Step(nil, now, Wake{})); len(to) != 1 || to[0] != udB {
		t.Errorf("the repeat went to %v", to)
	}
	rep := message("REP", args{})
	body := mad.REP{LocalCommID: 0xb1, RemoteCommID: id, LocalQPN: 0xb2, LocalCAGUID: guidB}
	body.AppendBinary(rep.Data[:0])
	m.Step(nil, now, RecvMAD{rep}) // by QP 1 all the same
	if to := sentTo(m.Step(nil, now, Ready{Handle: 1})); len(to) != 1 || to[0] != ib.QPNGSI {
		t.Errorf("RTU sent to %v", to)
	}
	if to := sentTo(connect(2, 0xa3, 0)); len(to) != 1 || to[0] != ib.QPNGSI {
		t.Errorf("a REQ without a word about it went to %v", to)
	}
}

// TestPathsMixed: the machine is the same whichever way a message takes. Two
// hosts connect while what they send goes by QP 1 and in-band as it happens,
// with losses and repeats; both ends agree and nothing is left.
func TestPathsMixed(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 9))
		m := [2]*Manager{}
		gids := [2]ib.GID{gidA, gidB}
		for i := range m {
			m[i] = New(Options{GID: gids[i], CAGUID: ib.GUID(i + 1), Rand: rand.NewPCG(seed, uint64(i)+2)})
			m[i].Step(nil, time.Time{}, Listen{ServiceID: service(i)})
		}
		now := time.Unix(1000, 0)
		up, qpn := [2]int{}, ib.QPN(0x100)
		type flight struct {
			to  int
			mad *verbs.MAD
		}
		var queue []flight
		var step func(i int, ev Event)
		step = func(i int, ev Event) {
			for _, a := range m[i].Step(nil, now, ev) {
				switch a := a.(type) {
				case SendMAD:
					for range 1 + r.IntN(2) {
						if r.IntN(5) > 0 {
							queue = append(queue, flight{1 - i, a.MAD})
						}
					}
				case RequestReceived:
					qpn++
					step(i, Accept{Handle: a.Handle, QPN: qpn})
				case ReplyReceived:
					step(i, Ready{Handle: a.Handle})
				case Established:
					up[i]++
				}
			}
		}
		step(0, Connect{Handle: 1, Remote: gidB, ServiceID: service(1), QPN: 0x50, PathMTU: ib.MTU1024})
		for n := 0; n < 1000 && (up != [2]int{1, 1} || len(queue) > 0); n++ {
			if len(queue) == 0 {
				now = now.Add(time.Second)
				step(0, Wake{})
				step(1, Wake{})
				continue
			}
			k := r.IntN(len(queue))
			f := queue[k]
			queue = append(queue[:k], queue[k+1:]...)
			in := &verbs.MAD{Remote: gids[1-f.to], Local: gids[f.to], QPN: ib.QPNGSI, Data: f.mad.Data}
			if r.IntN(2) == 0 {
				step(f.to, RecvMAD{in})
				continue
			}
			in.QPN = ib.QPN(0x0a + 1 - f.to)
			step(f.to, RecvInband{in})
		}
		a, b := m[0].Conns(), m[1].Conns()
		expect.MustEqual(t, up, [2]int{1, 1}, "seed %d: up", seed)
		expect.MustEqual(t, len(a), 1, "seed %d: length of a", seed)
		expect.MustEqual(t, len(b), 1, "seed %d: length of b", seed)
		expect.MustEqual(t, a[0].RemoteQPN, b[0].LocalQPN, "seed %d: a[0]'s RemoteQPN", seed)
		expect.MustEqual(t, b[0].RemoteQPN, 0x50, "seed %d: b[0]'s RemoteQPN", seed)
	}
}
