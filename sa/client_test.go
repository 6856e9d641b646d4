package sa

import (
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

var testPort = Port{Active: true, LID: 4, SMLID: 1, GID: names["B"]}

// ready returns a Client whose administrator has answered with info.
func ready(t *testing.T, opt Options, port Port, info wire.ClassPortInfo) (*Client, time.Time) {
	t.Helper()
	opt.Rand, opt.Spread = rand.NewPCG(1, 2), -1
	c, now := New(opt), time.Unix(1000, 0)
	q := sentMAD(t, c.Step(nil, now, SetPort{port}))
	c.Step(nil, now, RecvMAD{answer(t, q, info)})
	if got := c.Info().State; got != StateReady {
		t.Fatalf("state: got %v, want %v", got, StateReady)
	}
	return c, now
}

// sentMAD returns the one MAD among actions.
func sentMAD(t *testing.T, actions []Action) SendMAD {
	t.Helper()
	var out []SendMAD
	for _, a := range actions {
		if s, ok := a.(SendMAD); ok {
			out = append(out, s)
		}
	}
	if len(out) != 1 {
		t.Fatalf("%d MADs sent, want 1", len(out))
	}
	return out[0]
}

func answer(t *testing.T, q SendMAD, r wire.Record) *MAD {
	t.Helper()
	var m wire.Message
	if err := m.UnmarshalBinary(q.MAD.Data[:]); err != nil {
		t.Fatal(err)
	}
	m.Method, m.Record = response(m.Method), r
	in := &MAD{Peer: q.MAD.Peer}
	m.AppendBinary(in.Data[:0])
	return in
}

// TestQueryTimeout: a query fails on time, in the middle of a try too.
func TestQueryTimeout(t *testing.T) {
	c, now := ready(t, Options{QueryTimeout: 2500 * time.Millisecond, MaxTries: 9}, testPort, wire.ClassPortInfo{})
	begin := now
	actions := c.Step(nil, now, Query{PathKey{DGID: names["D"]}})
	for range 9 {
		for _, a := range actions {
			if f, ok := a.(PathFailed); ok {
				if f.Cause != TimedOut {
					t.Errorf("cause: got %v, want %v", f.Cause, TimedOut)
				}
				if got := now.Sub(begin); got != 2500*time.Millisecond {
					t.Errorf("failed after %v, want 2.5s", got)
				}
				return
			}
		}
		now = c.Deadline()
		actions = c.Step(nil, now, Wake{})
	}
	t.Error("it did not fail")
}

// TestPatience: how long an answer is waited for follows from what administrator
// and port say, within bounds.
func TestPatience(t *testing.T) {
	for _, tt := range []struct {
		name           string
		answer, subnet ib.Timeout
		want           time.Duration
	}{
		{"both fast", 8, 10, 250 * time.Millisecond},
		{"what they say", 16, 14, (65536 + 2*16384) * 4096 * time.Nanosecond},
		{"slow subnet", 8, 19, time.Second},
		{"slow administrator", 31, 10, time.Second},
		{"a port that does not say", 0, 0, time.Second},
	} {
		port := testPort
		port.SubnetTimeout = tt.subnet
		c, now := ready(t, Options{}, port, wire.ClassPortInfo{ResponseTime: tt.answer})
		if got := sentMAD(t, c.Step(nil, now, Query{PathKey{DGID: names["D"]}})).Wait; got != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestSpread: not all ports of a subnet ask in the same moment.
func TestSpread(t *testing.T) {
	waits := map[time.Duration]bool{}
	for seed := range uint64(20) {
		c, now := New(Options{Rand: rand.NewPCG(seed, 0)}), time.Unix(1000, 0)
		for _, a := range c.Step(nil, now, SetPort{testPort}) {
			if _, ok := a.(SendMAD); ok {
				t.Fatal("sent at once")
			}
		}
		d := c.Deadline().Sub(now)
		if d <= 0 || d >= 100*time.Millisecond {
			t.Errorf("first MAD after %v, want less than 100ms", d)
		}
		waits[d] = true
		sentMAD(t, c.Step(nil, c.Deadline(), Wake{}))
	}
	if len(waits) < 15 {
		t.Errorf("%d different waits of 20", len(waits))
	}
}

// TestPathOfRecord: every field of the record that tells of the way, and when a GRH
// is needed.
func TestPathOfRecord(t *testing.T) {
	for _, tt := range []struct {
		name     string
		hop      uint8
		required bool
		want     bool
	}{
		{"in the subnet", 0, false, false},
		{"in the subnet, by a hop limit of 1", 1, false, false},
		{"over a router", 64, false, true},
		{"the port asks for it", 0, true, true},
	} {
		port := testPort
		port.GRHRequired = tt.required
		c, now := ready(t, Options{}, port, wire.ClassPortInfo{})
		key := PathKey{DGID: names["D"], PKey: 0x8001, TrafficClass: 5}
		q := sentMAD(t, c.Step(nil, now, Query{key}))
		r := wire.PathRecord{DGID: names["D"], SGID: names["B"], DLID: 6, SLID: 4, FlowLabel: 9, HopLimit: tt.hop,
			TrafficClass: 5,
			PKey:         0x8001, SL: 3, MTU: ib.MTU1024, Rate: 7, Life: 17}
		want := verbs.Path{SGID: names["B"], DGID: names["D"], SLID: 4, DLID: 6, GRH: tt.want, FlowLabel: 9,
			TrafficClass: 5, HopLimit: tt.hop,
			SL: 3, PKey: 0x8001, MTU: ib.MTU1024, Rate: 7, Life: 17}
		for _, a := range c.Step(nil, now, RecvMAD{answer(t, q, r)}) {
			switch got, ok := a.(PathFound); {
			case !ok:
				t.Errorf("%s: ok is false, want true", tt.name)
			case got.Path != want:
				t.Errorf("%s: Path is %v, want %v", tt.name, got.Path, want)
			case got.Key != key:
				t.Errorf("%s: Key is %v, want %v", tt.name, got.Key, key)
			}
		}
		if got := c.Info().Paths; got != 1 {
			t.Errorf("%s: %d paths, want 1", tt.name, got)
		}
	}
}

// TestGRHRequired: a port all of whose packets need a GRH reaches the administrator
// by the GUID that is the same in all subnets, as Linux does (sa_query.c).
func TestGRHRequired(t *testing.T) {
	known := ib.GID{0: 0xfe, 1: 0x80, 8: 0x02, 15: 0x02}
	for _, tt := range []struct {
		name       string
		required   bool
		redirected ib.GID
		to, then   ib.GID
	}{
		{"not needed", false, names["E"], ib.GID{}, ib.GID{}},
		{"needed", true, names["E"], known, names["E"]},
		{"needed, and the redirect names none", true, ib.GID{}, known, known},
	} {
		port := testPort
		port.GRHRequired = tt.required
		c, now := ready(t, Options{}, port, wire.ClassPortInfo{})
		q := sentMAD(t, c.Step(nil, now, Query{PathKey{DGID: names["D"]}}))
		if got := q.MAD.Peer.GID; got != tt.to {
			t.Errorf("%s: GID: got %v, want %v", tt.name, got, tt.to)
		}
		var m wire.Message
		if err := m.UnmarshalBinary(q.MAD.Data[:]); err != nil {
			t.Fatal(err)
		}
		m.Method, m.Status = wire.MethodGetResp, wire.StatusRedirect
		m.Record = wire.ClassPortInfo{Redirect: wire.Locator{GID: tt.redirected, LID: 7, QPN: 1}}
		back := &MAD{Peer: q.MAD.Peer}
		m.AppendBinary(back.Data[:0])
		if got := sentMAD(t, c.Step(nil, now, RecvMAD{back})).MAD.Peer.GID; got != tt.then {
			t.Errorf("%s: redirected: GID: got %v, want %v", tt.name, got, tt.then)
		}
		if port.GRHRequired = !tt.required; c.Step(nil, now, SetPort{port}) == nil {
			t.Errorf("%s: it is not asked again after that changed", tt.name)
		}
	}
}

// TestQKeys: MADs go to QP 1 with its Q_Key, whatever the driver knows.
func TestQKeys(t *testing.T) {
	c, now := ready(t, Options{}, testPort, wire.ClassPortInfo{})
	report := wire.Message{Header: wire.Header{Method: wire.MethodReport}, Record: wire.Notice{Generic: true, Trap: 66}}
	in := &MAD{Peer: Address{LID: 1, QPN: ib.QPNGSI}}
	report.AppendBinary(in.Data[:0])
	if got := sentMAD(t, c.Step(nil, now, RecvMAD{in})).MAD.Peer.QKey; got != ib.QKeyGSI {
		t.Errorf("Q_Key of the answer to a report: got %v, want %v", got, ib.QKeyGSI)
	}
	q := sentMAD(t, c.Step(nil, now, Query{PathKey{DGID: names["D"]}}))
	if q.MAD.Peer.QKey != ib.QKeyGSI {
		t.Errorf("Q_Key of a question: got %v, want %v", q.MAD.Peer.QKey, ib.QKeyGSI)
	}
	var m wire.Message
	if err := m.UnmarshalBinary(q.MAD.Data[:]); err != nil {
		t.Fatal(err)
	}
	m.Method, m.Status = wire.MethodGetResp, wire.StatusRedirect
	m.Record = wire.ClassPortInfo{Redirect: wire.Locator{LID: 7, SL: 2, QPN: 5, PKey: 0x8001}}
	back := &MAD{Peer: q.MAD.Peer}
	m.AppendBinary(back.Data[:0])
	want := Address{LID: 7, SL: 2, QPN: 5, PKey: 0x8001, QKey: ib.QKeyGSI}
	if got := sentMAD(t, c.Step(nil, now, RecvMAD{back})).MAD.Peer; got != want {
		t.Errorf("redirected to %+v, want %+v", got, want)
	}
}

// TestWords: what status shows.
func TestWords(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{StateAsking.String(), "asking"},
		{State(9).String(), "ready"},
		{NoAdmin.String(), "no subnet manager"},
		{Cause(99).String(), "bad argument"},
		{DropUnknown.String(), "unknown_tid"},
	} {
		if tt.got != tt.want {
			t.Errorf("got %q, want %q", tt.got, tt.want)
		}
	}
}

// TestParamsOf: RFC 4391 section 10 has a group share P_Key, Q_Key, SL, MTU and hop
// limit with the broadcast group, and should have it share the rest.
// 4391-10-4, 4391-10-5, 4391-9.1.2-1
func TestParamsOf(t *testing.T) {
	r := wire.MCMemberRecord{QKey: 0xb1b, MTU: ib.MTU4096, Rate: 7, TrafficClass: 3, SL: 2, FlowLabel: 9,
		HopLimit: 64, PKey: 0x8001}
	c, now := ready(t, Options{}, testPort, wire.ClassPortInfo{})
	q := sentMAD(t, c.Step(nil, now, Join{MGID: names["g1"], PKey: r.PKey, State: wire.FullMember, Create: true,
		Params: ParamsOf(r)}))
	var m wire.Message
	if err := m.UnmarshalBinary(q.MAD.Data[:]); err != nil {
		t.Fatal(err)
	}
	want := r
	want.MGID, want.PortGID, want.JoinState = names["g1"], testPort.GID, wire.FullMember
	want.MTUSelector, want.RateSelector = wire.Exactly, wire.Exactly
	if m.Record != want {
		t.Errorf("got %+v\nwant %+v", m.Record, want)
	}
	if m.Mask != wire.CreateMask {
		t.Errorf("mask: got %#x, want %#x", m.Mask, wire.CreateMask)
	}
}
