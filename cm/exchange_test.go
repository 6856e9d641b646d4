package cm

import (
	"encoding/binary"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// in makes a MAD of B in the partition 0x8123, with transaction ID 0x77, from a
// QP that nobody should answer to.
func in(what string, a args) RecvMAD {
	m := message(what, a)
	m.PKey, m.QPN = 0x8123, 0x99
	binary.BigEndian.PutUint64(m.Data[8:], 0x77)
	return RecvMAD{m}
}

// TestExchange: what belongs to one exchange has one transaction ID and one
// P_Key, and goes to QP 1 whatever QP it came from (IBA volume 1 chapter 13).
func TestExchange(t *testing.T) {
	m, now := newManager(Options{}), time.Unix(1000, 0)
	sent := func(ev Event) *verbs.MAD { return find[SendMAD](t, m.Step(nil, now, ev)).MAD }
	tid := func(m *verbs.MAD) uint64 { return binary.BigEndian.Uint64(m.Data[8:]) }
	theirs := func(what string, m *verbs.MAD) {
		t.Helper()
		expect.Equal(t, tid(m), 0x77, "%s: tid(m)", what)
		expect.Equal(t, m.PKey, 0x8123, "%s: PKey", what)
		expect.Equal(t, m.QPN, ib.QPNGSI, "%s: QPN", what)
		expect.Equal(t, m.Remote, gidB, "%s: Remote", what)
		expect.Equal(t, m.Local, gidA, "%s: Local", what)
	}
	theirs("REJ without a connection", sent(in("REQ", args{"service": "b"})))
	theirs("SIDR_REP", sent(in("SIDR_REQ", args{})))
	theirs("DREP without a connection", sent(in("DREQ", args{"remote": "99"})))
	theirs("APR without a connection", sent(in("LAP", args{"remote": "99"})))

	m.Step(nil, now, in("REQ", args{}))
	theirs("MRA", sent(Defer{Handle: incoming | 1, Timeout: 20}))
	theirs("REP", sent(granted))
	m.Step(nil, now, in("RTU", args{"remote": "1"}))
	theirs("APR", sent(in("LAP", args{"remote": "1"})))
	switch bye := sent(Disconnect{Handle: incoming | 1}); {
	case tid(bye) == 0x77:
		t.Errorf("DREQ with transaction ID %#x, that of the exchange before", tid(bye))
	case tid(bye) == 0:
		t.Errorf("DREQ with transaction ID 0")
	case bye.PKey != 0x8123:
		t.Errorf("DREQ: PKey is %#x, want 0x8123", bye.PKey)
	}
	theirs("DREP", sent(in("DREQ", args{"remote": "1", "qpn": "a2"})))

	// Ours: the REQ draws a transaction ID, and the RTU has it too.
	req := sent(Connect{Handle: 1, Remote: gidB, QPN: 0xa1, PathMTU: ib.MTU1024, PKey: 0x8123,
		ServiceID: serviceid.New(serviceid.RFC, 0x0b)})
	id := args{"comm": "b7", "qpn": "b8", "remote": mad.CommID(binary.BigEndian.Uint32(req.Data[mad.HeaderLen:])).String()}
	m.Step(nil, now, in("REP", id))
	switch rtu := sent(Ready{Handle: 1}); {
	case tid(rtu) != tid(req):
		t.Errorf("tid(rtu) is %v, want %v", tid(rtu), tid(req))
	case tid(req) == 0:
		t.Errorf("REQ with transaction ID 0")
	case rtu.PKey != 0x8123:
		t.Errorf("PKey is %#x, want 0x8123", rtu.PKey)
	case req.PKey != 0x8123:
		t.Errorf("PKey is %#x, want 0x8123", req.PKey)
	}
}

// TestReply: what a REP says about the queue pairs, seen from the active side.
func TestReply(t *testing.T) {
	m, now := newManager(Options{}), time.Time{}
	m.Step(nil, now, Connect{Handle: 1, Remote: gidB, QPN: 0xa1, PathMTU: ib.MTU1024, AckTimeout: 14,
		ResponderResources: 1, InitiatorDepth: 2})
	rep := mad.REP{LocalCommID: 0xb1, RemoteCommID: 2, LocalQPN: 0xb2, LocalCAGUID: guidB, ResponderResources: 3,
		InitiatorDepth: 4, TargetACKDelay: 15}
	in := message("REP", args{})
	rep.AppendBinary(in.Data[:0])
	got := find[ReplyReceived](t, m.Step(nil, now, RecvMAD{in}))
	expect.Equal(t, got.InitiatorDepth, 3, "InitiatorDepth")
	expect.Equal(t, got.ResponderResources, 4, "ResponderResources")
	if got.AckTimeout != 16 {
		t.Errorf("ACK timeout %d, want 16: 14 and a delay of 15", got.AckTimeout)
	}
}

// TestTimewait: QPN and communication ID of a connection that has ended rest for
// as long as its ACK timeout, and at least for MinTimewait.
func TestTimewait(t *testing.T) {
	for _, tt := range []struct {
		ack  ib.Timeout
		want time.Duration
	}{{14, time.Second}, {20, ib.Timeout(20).Duration()}, {31, maxWait}} {
		// The numbers that follow are tried in turn as communication IDs; each
		// connection takes a transaction ID first.
		m, now := newManager(Options{Rand: &fixed{100, 5, 101, 5, 5, 6, 102}}), time.Unix(1000, 0)
		dial := func(h Handle, qpn ib.QPN) []Action {
			return m.Step(nil, now, Connect{Handle: h, Remote: gidB, QPN: qpn, PathMTU: ib.MTU1024, AckTimeout: tt.ack,
				ServiceID: serviceid.New(serviceid.RFC, 0x0b)})
		}
		dial(1, 0xa1)
		m.Step(nil, now, RecvMAD{message("REJ", args{"remote": "5", "reason": "10"})})
		if req := findMAD[mad.REQ](t, dial(2, 0xa2)); req.LocalCommID != 6 {
			t.Errorf("communication ID %v, want 6: 5 rests", req.LocalCommID)
		}
		if failed := find[Failed](t, dial(3, 0xa1)); failed.Reason != ReasonStale {
			t.Errorf("QPN a1 was used again: %+v", failed)
		}
		end := time.Time{}
		for _, c := range m.timers.All() {
			if c.state == StateTimewait {
				end = c.deadline
			}
		}
		if got := end.Sub(now); got != tt.want {
			t.Errorf("ACK timeout %v: TIMEWAIT of %v, want %v", tt.ack.Duration(), got, tt.want)
		}
	}
}
