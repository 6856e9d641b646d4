package mpa

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"ipoibcm/internal/expect"
)

// p2p is an initiator of the peer-to-peer model.
var p2p = Options{PeerToPeer: true, Negotiate: true, Depths: Depths{IRD: 4, ORD: 4}}

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

func terminateSegment(c Cause) Segment {
	s, err := ParseSegment(AppendTerminate(nil, c))
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

// The transitions, and the script that shows each.
//
// Initiator
//
//	from     to       cause                           action                            script
//	idle     waiting  Start                           Write request                     all
//	waiting  up       accepting reply that settles    SendRTR if peer-to-peer,          peer-to-peer,
//	                                                  Established, Stream               client-server
//	waiting  dead     rejecting reply                 Rejected                          reject, ask-again
//	waiting  dead     reply that does not settle      SendTerminate 6 or 7, Close,      (TestEveryReply)
//	                                                  Failed
//	waiting  dead     bad frame                       Close, Failed                     (TestBadFrames)
//	waiting  dead     deadline, TCP ends              Close, Failed                     slow-drip, tcp-ends
//	waiting  idle     TCP ends or unenhanced reply,   Close, Redial                     fallback
//	                  with Fallback
//	waiting  dead     Fail                            Close, Failed                     failures
//	up       dead     Fail                            SendTerminate 5, Close, Failed    peer-to-peer
//	up       dead     TCP ends                                                          tcp-ends
//
// Responder
//
//	from     to       cause                           action                            script
//	idle     waiting  Start                                                             all
//	waiting  asking   request                         Request                           peer-to-peer
//	waiting  dead     bad frame                       Close, Failed                     (TestBadFrames)
//	waiting  dead     deadline, TCP ends, Fail        Close, Failed                     slow-drip, tcp-ends,
//	                                                                                    failures
//	asking   fenced   Accept                          Write reply, Accepted             peer-to-peer
//	asking   dead     Accept that cannot be, Reject,  Write rejecting reply, Failed     private-data, reject,
//	                  Fail                                                              failures
//	asking   dead     octets, TCP ends                Close, Failed                     slow-drip, tcp-ends
//	fenced   up       RTR that was negotiated;        Established                       peer-to-peer,
//	                  client-server: any FPDU                                           client-server
//	fenced   dead     any other FPDU                  SendTerminate 7, Close, Failed    first-message
//	fenced   dead     deadline, TCP ends, Fail        Close, Failed                     rtr-timeout, tcp-ends,
//	                                                                                    failures
//	up       dead     Fail                            SendTerminate 5, Close, Failed    peer-to-peer
//	up       dead     TCP ends                                                          tcp-ends

// TestPeerToPeer: request, reply and RTR indication, for each kind of it.
//
// 6581-5-1, 6581-5-2: what a request and a reply say. 6581-3-2: nothing may be sent
// until the first message is in. 6581-5-4, 6581-5-6, 6581-9.3-1: the initiator sends
// the RTR indication first. 6581-9.3-2: later faults are told by a Terminate, on both
// sides.
func TestPeerToPeer(t *testing.T) { playScript(t, "peer-to-peer") }

// TestClientServer: no RTR indication, and no bound on the client's silence.
//
// 6581-10-4, 6581-6-7, 6581-6-8, 6581-6-9: which requests are enhanced. 6581-3-2: any
// first message lifts the fence.
func TestClientServer(t *testing.T) { playScript(t, "client-server") }

// TestFlagsWithoutA: B, C and D mean nothing without A, both ways.
func TestFlagsWithoutA(t *testing.T) {
	// 6581-9.2-18
	playScript(t, "flags-without-a")
	// 6581-9.2-17: they are not sent, whoever asks for them
	if b := (Enhanced{RTR: RTRAll, IRD: 1, ORD: 1}).Append(nil); !bytes.Equal(b, []byte{0, 1, 0, 1}) {
		t.Errorf("sent %x, want 00010001", b)
	}
}

// TestFirstMessage: what a responder makes of the initiator's first message.
//
// 6581-8-4: the initiator tells why it sends no RTR indication.
func TestFirstMessage(t *testing.T) { playScript(t, "first-message") }

// TestEnhancedToOldResponder: 6581-10-8. A responder that speaks only revision 1 says
// why it closes.
func TestEnhancedToOldResponder(t *testing.T) { playScript(t, "old-responder") }

// TestRTRTimeout: RFC 6581 section 9.3. A responder waits 10 s for the RTR indication,
// or what its options say, and without one closes.
func TestRTRTimeout(t *testing.T) { playScript(t, "rtr-timeout") }

// TestFailures: a local fault at each stage, and what is dead stays so.
//
// 6581-9.3-2: a Terminate where one may be sent, otherwise a rejection or the end.
func TestFailures(t *testing.T) { playScript(t, "failures") }

// TestReject: 6581-9.1-15. A rejection says what the responder wants.
func TestReject(t *testing.T) { playScript(t, "reject") }

// TestAskAgain: 6581-9.1-16. The user of an initiator whose IRD was too small tries
// again with what the rejection named.
func TestAskAgain(t *testing.T) { playScript(t, "ask-again") }

// TestFallback: after an enhanced attempt that failed, one without.
//
// 6581-10-2, 6581-10-8: an old responder closes. 6581-10-9: the initiator may try again.
func TestFallback(t *testing.T) { playScript(t, "fallback") }

// TestOptionsRefused: options that cannot work, and private data that does not fit.
//
// 6581-9.2-5: at least one kind of RTR indication. 6581-9-2: the enhanced data take four
// octets from the ULP.
func TestOptionsRefused(t *testing.T) {
	playScript(t, "options")
	playScript(t, "private-data")
}

// TestDepthLimits: 6581-12-1, 6581-9.1-22. What a peer asks for is capped by what there is.
func TestDepthLimits(t *testing.T) { playScript(t, "depth-limits") }

// TestSlowDrip: an octet a second does not keep a machine waiting.
func TestSlowDrip(t *testing.T) { playScript(t, "slow-drip") }

// TestTCPEnds: TCP may end at any time.
func TestTCPEnds(t *testing.T) { playScript(t, "tcp-ends") }

// TestMarkersAndCRC: both ends know who wants markers and whether there are CRCs.
func TestMarkersAndCRC(t *testing.T) {
	playScript(t, "markers-and-crc")
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
			t.Fatalf("cut at %d: %+v, want %+v", cut, acts, whole)
		}
	}
	i, _ := asks(p2p)
	var acts []Action
	for _, c := range append(reply, 'x', 'y') {
		acts = append(acts, i.Step(nil, t0, Recv{[]byte{c}})...)
	}
	wantActs(t, "octet by octet", acts, "SendRTR-write Established Stream Stream")
}
