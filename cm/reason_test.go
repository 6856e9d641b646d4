package cm

import (
	"encoding/binary"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire/mad"
)

// A cause is one way to a REJ of ours, with the reason that it must have.
type cause struct {
	name   string
	opt    Options
	before []any // events, REQs (args) and pauses before the last
	last   any
	kind   mad.MessageKind
	want   Reason
	ari    bool // the REJ names our CA GUID
}

// The same peer as message makes: B with comm b1 and QPN b2.
var (
	first   = args{"comm": "b1", "qpn": "b2"}
	dialled = Connect{Handle: 1, Remote: gidB, ServiceID: serviceid.New(serviceid.RFC, 0x0b), QPN: 0xa1,
		PathMTU: ib.MTU1024, PrivateData: private(0x0a)}
	granted = Accept{Handle: incoming | 1, QPN: 0xa2, RNRRetry: 7, PrivateData: private(0x0a)}
)

// causes are all there are in this package; ipoib has its own (TestReasons there).
var causes = []cause{
	{name: "as many connections as there may be", opt: Options{MaxConns: 1}, before: []any{first},
		last: args{"comm": "b3", "qpn": "b4"}, want: ReasonNoQP},
	{name: "a QPN that is held back", before: []any{dialled, first}, last: Accept{Handle: incoming | 1, QPN: 0xa1},
		want: ReasonNoQP},
	{name: "as many half-open ones", opt: Options{MaxHalfOpen: 1}, before: []any{first},
		last: args{"comm": "b3", "qpn": "b4"}, want: ReasonNoResources},
	{name: "nobody answered our REQ", opt: Options{MaxRetries: -1}, before: []any{dialled}, last: time.Minute,
		kind: mad.KindOther, want: ReasonTimeout, ari: true},
	{name: "nobody answered our REP", before: []any{args{"retries": "0"}, granted}, last: time.Minute,
		kind: mad.KindOther, want: ReasonTimeout, ari: true},
	{name: "our user did not answer a REQ", before: []any{first}, last: time.Minute, want: ReasonTimeout, ari: true},
	{name: "our user did not answer a REP", before: []any{dialled, reply("")}, last: time.Minute,
		kind: mad.KindREP, want: ReasonTimeout, ari: true},
	{name: "our user gave up before the REP", before: []any{dialled}, last: Disconnect{Handle: 1},
		kind: mad.KindOther, want: ReasonTimeout, ari: true},
	{name: "QP 1", last: args{"qpn": "1"}, want: ReasonUnsupported},
	{name: "the multicast QPN", last: args{"qpn": "ffffff"}, want: ReasonUnsupported},
	{name: "another service ID", last: args{"service": "b"}, want: ReasonInvalidServiceID},
	{name: "the service ID of another QPN", last: args{"service": "010000000000000b"}, want: ReasonInvalidServiceID},
	{name: "reliable datagram", last: args{"transport": "rd"}, want: ReasonInvalidTransport},
	{name: "a QP that is in use", before: []any{first}, last: args{"comm": "b3", "qpn": "b2"}, want: ReasonStale},
	{name: "the QP of a connection in TIMEWAIT", before: []any{first, granted, dreq{}},
		last: args{"comm": "b3", "qpn": "b2"}, want: ReasonStale},
	{name: "the communication ID of a connection in TIMEWAIT", before: []any{first, granted, dreq{}}, last: first,
		want: ReasonStale},
	{name: "a REP with a QP that is in use", before: []any{first, granted, dialled}, last: reply("b2"),
		kind: mad.KindREP, want: ReasonStale},
	{name: "another source GID", last: args{"local": "C"}, want: ReasonInvalidGID},
	{name: "another destination GID", last: args{"to": "C"}, want: ReasonInvalidGID},
	{name: "path MTU 0", last: args{"mtu": "0"}, want: ReasonInvalidMTU},
	{name: "path MTU 6", last: args{"mtu": "6"}, want: ReasonInvalidMTU},
	{name: "our user's word about a REQ", before: []any{first},
		last: Reject{Handle: incoming | 1, Reason: ReasonConsumer, PrivateData: private(0x0a)}, want: ReasonConsumer},
	{name: "our user's word about a REP", before: []any{dialled, reply("")},
		last: Reject{Handle: 1, Reason: ReasonConsumer, PrivateData: private(0x0a)}, kind: mad.KindREP, want: ReasonConsumer},
	{name: "our user goes with a REQ unanswered", before: []any{first}, last: Disconnect{Handle: incoming | 1},
		want: ReasonConsumer},
	{name: "our user goes with a REP unanswered", before: []any{dialled, reply("")}, last: Disconnect{Handle: 1},
		kind: mad.KindREP, want: ReasonConsumer},
	{name: "our user goes before the RTU", before: []any{first, granted}, last: Disconnect{Handle: incoming | 1},
		kind: mad.KindOther, want: ReasonConsumer},
	{name: "a REP to a REQ that was abandoned", before: []any{dialled, Cancel{1}}, last: reply(""),
		kind: mad.KindREP, want: ReasonConsumer},
	{name: "a REP to a REQ that was given up", before: []any{dialled, Disconnect{Handle: 1}}, last: reply(""),
		kind: mad.KindREP, want: ReasonConsumer},
	{name: "a communication ID in use, other QP", before: []any{first}, last: args{"comm": "b1", "qpn": "b4"},
		want: ReasonDuplicateCommID},
	{name: "a communication ID in use, other service", before: []any{first},
		last: args{"comm": "b1", "qpn": "b2", "service": "b"}, want: ReasonDuplicateCommID},
	{name: "a REP with a communication ID in use", before: []any{first, granted, dialled}, last: reply("b4"),
		kind: mad.KindREP, want: ReasonDuplicateCommID},
	{name: "class version 3", last: args{"version": "3"}, want: ReasonInvalidVersion},
}

// never are the reasons of a REJ (IBA volume 1 section 12.6) that nobody here can have.
var never = map[Reason]string{
	2: "reliable datagram, which is answered with 9", 7: "the same", 11: "the same",
	6:  "every communication ID that a peer may choose is good",
	13: "LIDs mean nothing on RoCE", 14: "every service level is taken", 15: "every traffic class is taken",
	16: "every hop limit is taken", 17: "the packet rate is not used: Linux sends what it likes on RoCE",
	32: "every flow label is taken",
	18: "an alternate path is no reason to refuse: the REP says that there is no failover", 19: "the same", 20: "the same",
	21: "the same", 22: "the same", 23: "the same", 33: "the same",
	24: "nobody is redirected", 25: "the same",
	27: "RDMA reads are not asked for, and a peer's offer of them is no demand",
	29: "every RNR retry count is taken: Linux names 0",
	34: "not assigned", 35: "vendor options are not read",
}

type (
	reply string // a REP to dialled, from that QPN (b2 if empty)
	dreq  struct{}
)

// do carries out one entry of a cause and returns what the Manager did.
func (c *cause) do(m *Manager, now *time.Time, what any) (out []Action) {
	ids := map[string]string{}
	for _, i := range m.Conns() {
		if i.Active {
			ids["remote"] = i.LocalCommID.String()
		}
	}
	switch what := what.(type) {
	case Event:
		return m.Step(nil, *now, what)
	case args:
		return m.Step(nil, *now, RecvMAD{message("REQ", what)})
	case reply:
		a := args{"remote": ids["remote"]}
		if what != "" {
			a["qpn"] = string(what)
		}
		return m.Step(nil, *now, RecvMAD{message("REP", a)})
	case dreq:
		return m.Step(nil, *now, RecvMAD{message("DREQ", args{"comm": "b1", "remote": "1", "qpn": "a2"})})
	case time.Duration:
		end := now.Add(what)
		for next := m.Deadline(); !next.IsZero() && next.Before(end); next = m.Deadline() {
			*now = next
			out = m.Step(out, *now, Wake{})
		}
		return out
	}
	panic("unknown entry")
}

// TestReasons shows which cause leads to which reason, of which message, and
// that every REJ carries the private data of the interface that was addressed.
func TestReasons(t *testing.T) {
	seen := map[Reason]bool{}
	for _, c := range causes {
		m, now := newManager(c.opt), time.Unix(1000, 0)
		for _, ev := range c.before {
			c.do(m, &now, ev)
		}
		rej := findMAD[mad.REJ](t, c.do(m, &now, c.last))
		seen[c.want] = true
		if rej.Reason != c.want || rej.MessageRejected != c.kind { // 4755-3.2-9
			t.Errorf("%s: got %v, want reason %d of %v", c.name, rej, c.want, c.kind)
		}
		var want [mad.REJPrivateLen]byte
		copy(want[:], private(0x0a))
		if rej.PrivateData != want { // 4755-3.2-12
			t.Errorf("%s: private data %x, want %x", c.name, rej.PrivateData, want)
		}
		if c.ari != (rej.ARILength == 8 && binary.BigEndian.Uint64(rej.ARI[:]) == uint64(guidA)) {
			t.Errorf("%s: additional information %x", c.name, rej.ARI[:rej.ARILength])
		}
		if a, ok := c.last.(args); ok {
			if id := mad.CommID(a.num("comm", 0xb1)); rej.RemoteCommID != id || rej.LocalCommID != 0 {
				t.Errorf("%s: IDs %v and %v, want 0 and %v", c.name, rej.LocalCommID, rej.RemoteCommID, id)
			}
		}
	}
	for r := Reason(1); r <= 35; r++ {
		if _, none := never[r]; seen[r] == none {
			t.Errorf("reason %d (%v): a cause %v, none %v", uint16(r), r, seen[r], none)
		}
	}
}

// An alternate path is no reason to refuse a connection: the REP says that it
// was not taken, and a LAP for another one is rejected.
func TestAlternatePath(t *testing.T) {
	for _, tt := range []struct {
		req  args
		want uint8
	}{{first, 0}, {args{"alternate": "C"}, failoverUnsupported}} {
		m := newManager(Options{})
		m.Step(nil, time.Time{}, RecvMAD{message("REQ", tt.req)})
		rep := findMAD[mad.REP](t, m.Step(nil, time.Time{}, granted))
		if rep.FailoverAccepted != tt.want {
			t.Errorf("%v: failover %d, want %d", tt.req, rep.FailoverAccepted, tt.want)
		}
		m.Step(nil, time.Time{}, RecvMAD{message("RTU", args{"remote": "1"})})
		if apr := findMAD[mad.APR](t, m.Step(nil, time.Time{},
			RecvMAD{message("LAP", args{"remote": "1"})})); apr.Status != mad.APRUnsupported {
			t.Errorf("LAP: %v", apr)
		}
	}
}
