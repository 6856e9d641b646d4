package mpa

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// Initiator
//
//	from     to       cause                           action
//	idle     waiting  Start                           Write request
//	waiting  up       accepting reply that settles    SendRTR if peer-to-peer, Established, Stream
//	waiting  dead     rejecting reply                 Rejected
//	waiting  dead     reply that does not settle      SendTerminate 6 or 7, Close, Failed
//	waiting  dead     bad frame, deadline, TCP ends   Close, Failed
//	waiting  idle     TCP ends or unenhanced reply,   Close, Redial
//	                  with Fallback
//	up       dead     Fail                            SendTerminate 5, Close, Failed
//
// Responder
//
//	from     to       cause                           action
//	idle     waiting  Start
//	waiting  asking   request                         Request
//	waiting  dead     bad frame, deadline, TCP ends   Close, Failed
//	asking   fenced   Accept                          Write reply, Accepted
//	asking   dead     Accept that cannot be, Reject,  Write rejecting reply, Failed
//	                  Fail
//	asking   dead     octets, TCP ends                Close, Failed
//	fenced   up       RTR that was negotiated;        Established
//	                  client-server: any FPDU
//	fenced   dead     any other FPDU                  SendTerminate 7, Close, Failed
//	fenced   dead     deadline, TCP ends, Fail        Close, Failed
//	up       dead     Fail                            SendTerminate 5, Close, Failed

// p2p and cs are initiators of the two models.
var (
	p2p = Options{PeerToPeer: true, Negotiate: true, Depths: Depths{IRD: 4, ORD: 4}}
	cs  = Options{Negotiate: true, Depths: Depths{IRD: 4, ORD: 4}}
)

// said prints the kinds of actions.
func said(acts []Action) string {
	var l []string
	for _, a := range acts {
		s := strings.TrimPrefix(fmt.Sprintf("%T", a), "mpa.")
		switch a := a.(type) {
		case SendTerminate:
			s += fmt.Sprint(uint8(a.Code))
		case SendRTR:
			s += "-" + a.Type.String()
		case Failed:
			s += "-" + a.Err.Reason.String()
			if a.Err.Reason == ReasonTerminated && a.Err.Code() != 0 {
				s += fmt.Sprint(uint8(a.Err.Code()))
			}
		}
		l = append(l, s)
	}
	return strings.Join(l, " ")
}

func wantActs(t *testing.T, what string, acts []Action, want string) {
	t.Helper()
	if got := said(acts); got != want {
		t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

func responder(t *testing.T, o Options) *Responder {
	t.Helper()
	r, err := NewResponder(o)
	if err != nil {
		t.Fatal(err)
	}
	r.Step(nil, t0, Start{})
	return r
}

func terminateSegment(c Code) Segment {
	s, err := ParseSegment(AppendTerminate(nil, c.Cause()))
	if err != nil {
		panic(err)
	}
	return s
}

func rtrSegment(k RTRTypes) Segment {
	s, err := ParseSegment(AppendRTR(nil, k))
	if err != nil {
		panic(err)
	}
	return s
}

var dataSegment = Segment{Opcode: OpSend, Last: true, MSN: 1, Payload: []byte("data")}

func TestPeerToPeer(t *testing.T) {
	for _, k := range []RTRTypes{RTRSend, RTRWrite, RTRRead} {
		o := p2p
		o.RTR = k
		i, req := asks(o)
		r := responder(t, Options{Depths: Depths{IRD: 8, ORD: 8}})
		// 6581-5-1
		acts := r.Step(nil, t0, Recv{req})
		wantActs(t, "request", acts, "Request")
		q := acts[0].(Request)
		expect.Equal(t, q.Enhanced, true, "Enhanced")
		expect.Equal(t, q.Peer.RTR, k, "Peer.RTR")
		expect.Equal(t, q.Peer.IRD, 4, "Peer.IRD")
		expect.Equal(t, q.Rev, 2, "Rev")
		// 6581-5-2
		acts = r.Step(nil, t0, Accept{Private: []byte("hi")})
		wantActs(t, "accept", acts, "Write Accepted")
		// 6581-3-2: nothing may be sent until the first message is in
		if !r.Fenced() {
			t.Error("not fenced after the reply")
		}
		// 6581-5-4, 6581-5-6, 6581-9.3-1
		acts = i.Step(nil, t0, Recv{acts[0].(Write).Data})
		wantActs(t, "reply", acts, "SendRTR-"+k.String()+" Established")
		switch res := acts[1].(Established).Result; {
		case string(res.Private) != "hi":
			t.Errorf("Private is %q, want \"hi\"", string(res.Private))
		case !res.PeerToPeer:
			t.Errorf("PeerToPeer is false, want true")
		case res.RTR != k:
			t.Errorf("RTR is %v, want %v", res.RTR, k)
		}
		acts = r.Step(nil, t0, FPDU{rtrSegment(k)})
		wantActs(t, "RTR", acts, "Established")
		if res := acts[0].(Established).Result; res.RTR != k || r.Fenced() {
			t.Errorf("%+v", res)
		}
		// 6581-9.3-2: later faults are told by a Terminate, on both sides
		wantActs(t, "initiator fails", i.Step(nil, t0, Fail{}), "SendTerminate5 Close Failed-local")
		wantActs(t, "responder fails", r.Step(nil, t0, Fail{}), "SendTerminate5 Close Failed-local")
	}
}

func TestClientServer(t *testing.T) {
	for _, o := range []Options{{}, cs, {Revision: 2}, {Revision: 1}} {
		i, req := asks(o)
		// 6581-10-4, 6581-6-7, 6581-6-8, 6581-6-9
		switch enhanced := o.Negotiate; {
		case (req[16]&0x10 != 0) != enhanced:
			t.Errorf("req[16]&0x10 != 0 is %v, want %v", req[16]&0x10 != 0, enhanced)
		case !enhanced && len(req) != 20:
			t.Errorf("req has %v elements, want 20", len(req))
		}
		r := responder(t, Options{})
		acts := append(r.Step(nil, t0, Recv{req}), r.Step(nil, t0, Accept{})...)
		wantActs(t, "request", acts, "Request Write Accepted")
		// No RTR and no bound on the client's silence.
		if !r.Deadline().IsZero() {
			t.Error("a server waits only so long for its client")
		}
		acts = i.Step(nil, t0, Recv{append(acts[1].(Write).Data, 1, 2, 3)})
		wantActs(t, "reply", acts, "Established Stream")
		// What the responder sent cannot have waited for our first message.
		if i.Counters()[ReasonUnfenced] != 1 {
			t.Error("not counted")
		}
		if !i.Deadline().IsZero() {
			t.Error("deadline left")
		}
		// 6581-3-2: any first message lifts the fence
		wantActs(t, "data", r.Step(nil, t0, FPDU{dataSegment}), "Established")
	}
}

// TestFlagsWithoutA: B, C and D mean nothing without A, both ways.
func TestFlagsWithoutA(t *testing.T) {
	// 6581-9.2-18
	r, acts, wrote := answerTo(Options{}, frameBy(false, 0x10, 2, "BCD", 1, 1, ""))
	wantActs(t, "request", acts, "Request Write Accepted")
	if flags := frameOf(wrote).flags; flags != "" || r.Counters()[ReasonIdleFlags] != 1 {
		t.Errorf("reply flags %q", flags)
	}
	wantActs(t, "first data", r.Step(nil, t0, FPDU{dataSegment}), "Established")
	i, _ := asks(cs)
	wantActs(t, "reply", i.Step(nil, t0, Recv{frameBy(true, 0x10, 2, "BCD", 1, 1, "")}), "Established")
	// 6581-9.2-17: and they are not sent, whoever asks for them
	if b := (Enhanced{RTR: RTRAll, IRD: 1, ORD: 1}).Append(nil); !bytes.Equal(b, []byte{0, 1, 0, 1}) {
		t.Errorf("sent %x", b)
	}
}

func TestFirstMessage(t *testing.T) {
	for _, tt := range []struct {
		name string
		s    Segment
		want string
	}{
		{"a type that the reply named", rtrSegment(RTRWrite), "Established"},
		{"another", rtrSegment(RTRRead), "SendTerminate7 Close Failed-not_rtr"},
		{"data before the RTR", dataSegment, "SendTerminate7 Close Failed-not_rtr"},
		{"a Write with data", Segment{Opcode: OpWrite, Last: true, Payload: []byte{1}},
			"SendTerminate7 Close Failed-not_rtr"},
		{"a Write that is not all", Segment{Opcode: OpWrite}, "SendTerminate7 Close Failed-not_rtr"},
		{"a Terminate", terminateSegment(CodeNoRTR), "Close Failed-terminated7"}, // 6581-8-4: the initiator tells why
		{"an empty Terminate", Segment{Opcode: OpTerminate, Last: true}, "Close Failed-terminated"},
	} {
		r, _, _ := answerTo(Options{RTR: RTRWrite}, frameBy(false, 0x10, 2, "ABCD", 1, 1, ""))
		wantActs(t, tt.name, r.Step(nil, t0, FPDU{tt.s}), tt.want)
	}
}

// TestFailures: a local fault at each stage.
// TestEnhancedToOldResponder: 6581-10-8. One that speaks revision 1 only says why it
// closes: the request was enhanced, or of another revision.
func TestEnhancedToOldResponder(t *testing.T) {
	for want, o := range map[Reason]Options{ReasonEnhanced: p2p, ReasonRev: {Revision: 2}} {
		_, req := asks(o)
		r := responder(t, Options{Revision: 1})
		failed, ok := has[Failed](r.Step(nil, t0, Recv{req}))
		if !ok || failed.Err.Reason != want {
			t.Errorf("%+v, want %v", failed.Err, want)
		}
	}
}

// TestRTRTimeout: RFC 6581 section 9.3. A responder waits 10 s for the RTR
// indication, or what its options say, and without one closes.
func TestRTRTimeout(t *testing.T) {
	_, req := asks(p2p)
	for o, want := range map[time.Duration]time.Duration{0: 10 * time.Second, time.Minute: time.Minute} {
		r, _, _ := answerTo(Options{RTRTimeout: o}, req)
		if got := r.Deadline().Sub(t0); got != want {
			t.Errorf("the deadline is after %v, want %v", got, want)
		}
		wantActs(t, "just before", r.Step(nil, t0.Add(want-1), Wake{}), "")
		wantActs(t, "then", r.Step(nil, t0.Add(want), Wake{}), "Close Failed-rtr_timeout")
	}
	// In the client-server model the client may be silent for ever.
	_, req = asks(Options{Negotiate: true})
	r, _, _ := answerTo(Options{}, req)
	if got := r.Deadline(); !got.IsZero() {
		t.Errorf("the deadline is %v", got)
	}
}

func TestFailures(t *testing.T) {
	// 6581-9.3-2: a Terminate where one may be sent, otherwise a rejection or the end
	i, _ := asks(p2p)
	wantActs(t, "initiator before the reply", i.Step(nil, t0, Fail{}), "Close Failed-local")
	r := responder(t, Options{})
	wantActs(t, "responder before the request", r.Step(nil, t0, Fail{}), "Close Failed-local")
	r = responder(t, Options{})
	_, req := asks(p2p)
	r.Step(nil, t0, Recv{req})
	acts := r.Step(nil, t0, Fail{})
	wantActs(t, "responder before the reply", acts, "Write Failed-local")
	if w := frameOf(acts[0].(Write).Data); !w.reject || !w.s {
		t.Errorf("reply %x", acts[0].(Write).Data)
	}
	r, _, _ = answerTo(Options{}, req)
	wantActs(t, "responder before the first FPDU", r.Step(nil, t0, Fail{}), "Close Failed-local")
	for _, m := range []interface {
		Step([]Action, time.Time, Event) []Action
	}{i, r} { // what is dead stays so
		for _, ev := range []Event{Start{}, Recv{req}, PeerClosed{}, Wake{}, Fail{}, Accept{}, Reject{}, FPDU{dataSegment}} {
			wantActs(t, fmt.Sprintf("dead, %T", ev), m.Step(nil, t0.Add(time.Hour), ev), "")
		}
	}
}

func TestReject(t *testing.T) {
	for _, o := range []Options{{}, p2p} {
		i, req := asks(o)
		r := responder(t, Options{Depths: Depths{IRD: 2, ORD: 2}})
		r.Step(nil, t0, Recv{req})
		acts := r.Step(nil, t0, Reject{Private: []byte("no"), Depths: &Depths{IRD: 3, MinORD: 16}})
		wantActs(t, "reject", acts, "Write Failed-rejected")
		acts = i.Step(nil, t0, Recv{acts[0].(Write).Data})
		wantActs(t, "reply", acts, "Rejected")
		res := acts[0].(Rejected).Result
		// 6581-9.1-15
		if string(res.Private) != "no" || o.Negotiate && (res.Peer.ORD != 16 || res.Peer.IRD != 3 || !res.Enhanced) {
			t.Errorf("%+v", res)
		}
	}
	// A rejection without enhanced data is one all the same.
	i, _ := asks(p2p)
	acts := i.Step(nil, t0, Recv{frameBy(true, 0x20, 1, "", 0, 0, "old")})
	wantActs(t, "plain rejection", acts, "Rejected")
	if res := acts[0].(Rejected).Result; res.Enhanced || string(res.Private) != "old" {
		t.Errorf("%+v", res)
	}
}

// TestAskAgain: the user of an initiator whose IRD was too small tries again with
// what the rejection named.
func TestAskAgain(t *testing.T) {
	// 6581-9.1-16
	or := Options{Depths: Depths{IRD: 2, ORD: 8, MinORD: 6}}
	o := cs
	i, req := asks(o)
	_, _, reply := answerTo(or, req)
	acts := i.Step(nil, t0, Recv{reply})
	wantActs(t, "first attempt", acts, "Rejected")
	o.IRD = acts[0].(Rejected).Result.Peer.ORD
	i, req = asks(o)
	_, _, reply = answerTo(or, req)
	acts = i.Step(nil, t0, Recv{reply})
	wantActs(t, "second attempt", acts, "Established")
	res := acts[0].(Established).Result
	expect.Equal(t, res.IRD, 6, "IRD")
	expect.Equal(t, res.ORD, 2, "ORD")
	expect.Equal(t, res.Peer.ORD, 6, "Peer.ORD")
	expect.Equal(t, res.Peer.IRD, 2, "Peer.IRD")
}

func TestFallback(t *testing.T) {
	o := p2p
	o.Fallback = true
	old := Options{Revision: 1}
	for _, tt := range []struct {
		name string
		ev   Event
	}{
		{"closed", PeerClosed{errors.New("EOF")}},
		{"unenhanced reply", Recv{frameBy(true, 0, 2, "", 0, 0, "")}},
		{"reply of revision 1", Recv{frameBy(true, 0x10, 1, "", 0, 0, "")}},
	} {
		i, req := asks(o)
		// 6581-10-2, 6581-10-8: an old responder closes
		_, acts, _ := answerTo(old, req)
		wantActs(t, "old responder", acts, "Close Failed-enhanced_request")
		// 6581-10-9
		wantActs(t, tt.name, i.Step(nil, t0, tt.ev), "Close Redial")
		acts = i.Step(nil, t0, Start{})
		wantActs(t, tt.name+", again", acts, "Write")
		_, _, reply := answerTo(old, acts[0].(Write).Data)
		acts = i.Step(nil, t0, Recv{reply})
		wantActs(t, tt.name+", reply", acts, "Established")
		res := acts[0].(Established).Result
		expect.Equal(t, res.Fallback, true, "Fallback")
		expect.Equal(t, res.Enhanced, false, "Enhanced")
		expect.Equal(t, res.PeerToPeer, false, "PeerToPeer")
		expect.Equal(t, res.ORD, 4, "ORD")
		// Without the option: the end. 6581-10-8
		i, _ = asks(p2p)
		if got := said(i.Step(nil, t0, tt.ev)); !strings.HasPrefix(got, "Close Failed-") {
			t.Errorf("%s without Fallback: %s", tt.name, got)
		}
	}
	// Only once.
	i, _ := asks(o)
	i.Step(nil, t0, PeerClosed{})
	i.Step(nil, t0, Start{})
	wantActs(t, "closed again", i.Step(nil, t0, PeerClosed{}), "Close Failed-closed")
}

func TestMarkersAndCRC(t *testing.T) {
	for i := range 16 {
		oi := Options{Markers: i&1 != 0, CRC: i&2 != 0}
		or := Options{Markers: i&4 != 0, CRC: i&8 != 0}
		m, req := asks(oi)
		r, _, reply := answerTo(or, req)
		m.Step(nil, t0, Recv{reply})
		a, b := m.Result(), r.Result()
		// Each receiver decides about markers; one wish is enough for CRCs.
		expect.Equal(t, a.RecvMarkers, oi.Markers, "%+v with %+v: RecvMarkers", oi, or)
		expect.Equal(t, b.RecvMarkers, or.Markers, "%+v with %+v: RecvMarkers", oi, or)
		expect.Equal(t, a.SendMarkers, or.Markers, "%+v with %+v: SendMarkers", oi, or)
		expect.Equal(t, b.SendMarkers, oi.Markers, "%+v with %+v: SendMarkers", oi, or)
		expect.Equal(t, a.CRC, oi.CRC || or.CRC, "%+v with %+v: CRC", oi, or)
		expect.Equal(t, b.CRC, a.CRC, "%+v with %+v: CRC", oi, or)
	}
}

func TestOptionsRefused(t *testing.T) {
	for _, tt := range []struct {
		name      string
		o         Options
		initiator bool
		ok        bool
	}{
		{"responder without any RTR", Options{RTR: RTRNone}, false, false}, // 6581-9.2-5
		{"old responder without any RTR", Options{RTR: RTRNone, Revision: 1}, false, true},
		{"peer-to-peer without any RTR", Options{RTR: RTRNone, PeerToPeer: true}, true, false},
		{"client without any RTR", Options{RTR: RTRNone, Negotiate: true}, true, true},
		{"peer-to-peer in revision 1", Options{PeerToPeer: true, Revision: 1}, true, false},
		{"revision 3", Options{Revision: 3}, true, false},
	} {
		var err error
		if tt.initiator {
			_, err = NewInitiator(tt.o, nil)
		} else {
			_, err = NewResponder(tt.o)
		}
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	// 6581-9-2: four octets less for the ULP
	for _, o := range []Options{{}, p2p} {
		n := MaxULPData(o.PeerToPeer)
		if want := map[bool]int{false: 512, true: 508}[o.PeerToPeer]; n != want {
			t.Errorf("%d octets for the ULP, want %d", n, want)
		}
		_, err1 := NewInitiator(o, make([]byte, n))
		_, err2 := NewInitiator(o, make([]byte, n+1))
		if err1 != nil || err2 == nil {
			t.Errorf("%v, %v", err1, err2)
		}
		_, req := asks(o)
		r := responder(t, Options{})
		r.Step(nil, t0, Recv{req})
		wantActs(t, "too much in a reply", r.Step(nil, t0, Accept{Private: make([]byte, n+1)}), "Write Failed-local")
		r = responder(t, Options{})
		r.Step(nil, t0, Recv{req})
		wantActs(t, "too much in a rejection", r.Step(nil, t0, Reject{Private: make([]byte, n+1)}), "Write Failed-local")
	}
}

// TestDepthLimits: what a peer asks for is capped by what there is.
func TestDepthLimits(t *testing.T) {
	// 6581-12-1, 6581-9.1-22
	r, _, wrote := answerTo(Options{Depths: Depths{IRD: 4, MaxIRD: 16, ORD: 32}},
		frameBy(false, 0x10, 2, "", 0x3ffe, 0x3ffe, ""))
	reply := frameOf(wrote)
	expect.Equal(t, reply.ird, 16, "ird")
	expect.Equal(t, reply.ord, 32, "ord")
	expect.Equal(t, r.Result().Peer.IRD, MaxDepth, "Result.Peer.IRD")
	// Options out of range do not become 0x3FFF by accident.
	_, req := asks(Options{Negotiate: true, Depths: Depths{IRD: 0x7fff, ORD: 0x3fff}})
	if w := frameOf(req); w.ird != 0x3ffe || w.ord != 0x3ffe {
		t.Errorf("request IRD %#x ORD %#x", w.ird, w.ord)
	}
}

// TestPortions: any cut of the octets gives the same.
func TestPortions(t *testing.T) {
	_, req := asks(p2p)
	_, whole, reply := answerTo(Options{}, req)
	for cut := range len(req) {
		r := responder(t, Options{})
		acts := r.Step(nil, t0, Recv{req[:cut]})
		wantActs(t, "part", acts, "")
		acts = append(r.Step(nil, t0, Recv{req[cut:]}), r.Step(nil, t0, Accept{})...)
		if !reflect.DeepEqual(acts, whole) {
			t.Fatalf("cut at %d: %+v", cut, acts)
		}
	}
	i, _ := asks(p2p)
	var acts []Action
	for _, c := range append(reply, 'x', 'y') {
		acts = append(acts, i.Step(nil, t0, Recv{[]byte{c}})...)
	}
	wantActs(t, "octet by octet", acts, "SendRTR-write Established Stream Stream")
}
