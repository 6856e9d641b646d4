package sctp

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/mpa"
)

// Options of the tests.
var (
	p2p = mpa.Options{PeerToPeer: true, Negotiate: true, Depths: mpa.Depths{IRD: 4, ORD: 4}}
	cs  = mpa.Options{Negotiate: true, Depths: mpa.Depths{IRD: 4, ORD: 4}}
)

var all4 = mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRAll, IRD: 8, ORD: 4}

func unhex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

func TestControlVectors(t *testing.T) {
	// 6581-7-1, 6581-7-2, 6581-7-5, 6581-7-6
	for _, tt := range []struct {
		c    Control
		want string
	}{
		{Control{Function: FuncInitiate}, "00000001"},
		{Control{Function: FuncEnhancedInitiate, HasData: true, Enhanced: all4}, "00000005c008c004"},
		{Control{Function: FuncEnhancedAccept, HasData: true,
			Enhanced: mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRWrite, IRD: 4, ORD: 8}}, "0000000680048008"},
		{Control{Function: FuncEnhancedReject, HasData: true,
			Enhanced: mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRWrite, IRD: 4, ORD: 16}}, "0000000780048010"},
		{Control{Function: FuncEnhancedInitiate, HasData: true, Enhanced: all4, Private: []byte("ulp")},
			"00000005c008c004756c70"},
		{Control{SSN: 7, Function: FuncTerminate}, "00070004"},
	} {
		got, err := tt.c.AppendBinary(nil)
		if err != nil || hex.EncodeToString(got) != tt.want {
			t.Errorf("%v: %x %v, want %s", tt.c.Function, got, err, tt.want)
		}
		var c Control
		switch err := c.UnmarshalBinary(got); {
		case err != nil:
			t.Errorf("%v: err is %v, want nil", tt.c.Function, err)
		case c.Function != tt.c.Function:
			t.Errorf("%v: Function is %v, want %v", tt.c.Function, c.Function, tt.c.Function)
		case c.Enhanced != tt.c.Enhanced:
			t.Errorf("%v: Enhanced is %v, want %v", tt.c.Function, c.Enhanced, tt.c.Enhanced)
		case c.HasData != tt.c.HasData:
			t.Errorf("%v: HasData is %v, want %v", tt.c.Function, c.HasData, tt.c.HasData)
		case !bytes.Equal(c.Private, tt.c.Private):
			t.Errorf("%v: Private is %x, want %x", tt.c.Function, c.Private, tt.c.Private)
		}
	}
}

func TestControlLimits(t *testing.T) {
	for f := FuncInitiate; f <= FuncEnhancedReject; f++ {
		limit := 512
		if f.enhanced() {
			limit = 508
		}
		if f == FuncTerminate { // 6581-7-8
			limit = 0
		}
		for _, n := range []int{0, limit, limit + 1} { // 6581-7-7
			c := Control{Function: f, Private: make([]byte, n)}
			if _, err := c.AppendBinary(nil); (err == nil) != (n <= limit) {
				t.Errorf("%v with %d octets: sent %v", f, n, err)
			}
			in := append([]byte{0, 0, 0, byte(f)}, make([]byte, n)...)
			if f.enhanced() {
				in = append(in, 0, 0, 0, 0)
			}
			if err := c.UnmarshalBinary(in); (err == nil) != (n <= limit) {
				t.Errorf("%v with %d octets: received %v", f, n, err)
			}
		}
	}
	var c Control
	for _, in := range []string{"", "000000", "00000000", "00000008", "0000ffff", "00000005c008c0", "00000006"} {
		if c.UnmarshalBinary(unhex(in)) == nil {
			t.Errorf("%s was taken", in)
		}
	}
	// An Enhanced Reject may come without data.
	switch err := c.UnmarshalBinary(unhex("00000007aabb")); {
	case err != nil:
		t.Errorf("err is %v, want nil", err)
	case c.HasData:
		t.Errorf("HasData is true, want false")
	case len(c.Private) != 2:
		t.Errorf("Private has %v elements, want 2", len(c.Private))
	}
}

// told prints the kinds of session actions.
func told(acts []SessionAction) string {
	var l []string
	for _, a := range acts {
		s := strings.TrimPrefix(fmt.Sprintf("%T", a), "sctp.")
		switch a := a.(type) {
		case SendChunk:
			var c Control
			switch {
			case a.Chunk.PPID == PPIDSegment:
				s = "segment"
			case c.UnmarshalBinary(a.Chunk.Data) == nil:
				s = c.Function.String()
			default:
				s = "bad chunk"
			}
			s = fmt.Sprintf("%s/%d", s, int(a.Chunk.Data[0])<<8|int(a.Chunk.Data[1]))
		case SessionDown:
			if a.Err != nil {
				s += "-" + a.Err.Reason.String()
			}
		}
		l = append(l, s)
	}
	return strings.Join(l, ", ")
}

type endpoints struct {
	*testing.T
	a, b *Endpoint
}

func newEndpoints(t *testing.T, o EndpointOptions) *endpoints {
	t.Helper()
	a, err := NewEndpoint(EndpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	o.Listen = true
	b, err := NewEndpoint(o)
	if err != nil {
		t.Fatal(err)
	}
	return &endpoints{t, a, b}
}

// move gives the chunks among acts to e and returns what e does.
func move(e *Endpoint, acts []SessionAction) (out []SessionAction) {
	for _, a := range acts {
		if c, ok := a.(SendChunk); ok {
			out = e.Step(out, ChunkIn(c))
		}
	}
	return out
}

func (e *endpoints) wantActs(what string, acts []SessionAction, want string) []SessionAction {
	e.Helper()
	if got := told(acts); got != want {
		e.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
	return acts
}

// depthsFit checks that neither end sends more RDMA Reads at a time than the other takes.
func depthsFit(t *testing.T, a, b mpa.Result) {
	t.Helper()
	if a.ORD > b.IRD {
		t.Fatalf("a's ORD is %d, want b's IRD %d at most", a.ORD, b.IRD)
	}
	if b.ORD > a.IRD {
		t.Fatalf("b's ORD is %d, want a's IRD %d at most", b.ORD, a.IRD)
	}
}

func TestSessionAccepted(t *testing.T) {
	for _, o := range []mpa.Options{{}, cs, p2p} {
		e := newEndpoints(t, EndpointOptions{Options: mpa.Options{Depths: mpa.Depths{IRD: 8, ORD: 8}}})
		name := ""
		if o.Enhanced() {
			name = "Enhanced "
		}
		// 6581-7-4, 6581-7-14
		acts := e.wantActs("connect", e.a.Step(nil, SessionConnect{5, o, []byte("hello")}), name+"Initiate/0")
		acts = e.wantActs("initiate", move(e.b, acts), "SessionRequest")
		// 6581-7-9, 6581-7-10
		q := acts[0].(SessionRequest)
		expect.Equal(t, string(q.Private), "hello", "Private")
		expect.Equal(t, q.Enhanced, o.Enhanced(), "Enhanced")
		expect.Equal(t, q.Stream, 5, "Stream")
		acts = e.wantActs("accept", e.b.Step(nil, SessionAnswer{Stream: 5, Private: []byte("yes")}),
			name+"Accept/0, SessionUp")
		b := acts[1].(SessionUp).Result
		// No RTR is sent over SCTP, whatever the model.
		acts = e.wantActs("accepted", move(e.a, acts), "SessionUp")
		a := acts[0].(SessionUp).Result
		if o.Enhanced() {
			depthsFit(t, a, b)
			expect.Equal(t, b.ORD, 4, "b's ORD")
		}
		switch {
		case string(a.Private) != "yes":
			t.Errorf("a's Private is %v, want \"yes\"", string(a.Private))
		case string(b.Private) != "hello":
			t.Errorf("b's Private is %v, want \"hello\"", string(b.Private))
		case a.PeerToPeer != o.PeerToPeer:
			t.Errorf("a's PeerToPeer is %v, want %v", a.PeerToPeer, o.PeerToPeer)
		}
		// 6581-7-13: either side first
		acts = e.wantActs("passive sends", e.b.Step(nil, SessionSend{5, []byte("seg")}), "segment/1")
		acts = e.wantActs("segment", move(e.a, acts), "SegmentIn")
		if s := acts[0].(SegmentIn); string(s.Segment) != "seg" {
			t.Errorf("%+v", s)
		}
		// An RTR that comes all the same is a segment like others.
		acts = move(e.b, e.a.Step(nil, SessionSend{5, mpa.AppendRTR(nil, mpa.RTRWrite)}))
		e.wantActs("active sends", acts, "SegmentIn")
		// 6581-7-12: the ordinary Terminate, whatever made the session
		acts = e.wantActs("close", e.a.Step(nil, SessionClose{5}), "Terminate/2, SessionDown")
		e.wantActs("terminated", move(e.b, acts), "SessionDown")
		if e.a.Sessions()+e.b.Sessions() != 0 {
			t.Error("sessions are left")
		}
		e.wantActs("late", e.b.Step(nil, ChunkIn{Chunk{5, PPIDSegment, []byte{0, 9, 1}}}), "")
		// The stream can be used again.
		e.wantActs("again", move(e.b, e.a.Step(nil, SessionConnect{5, o, nil})), "SessionRequest")
	}
}

func TestSessionRejected(t *testing.T) {
	for _, tt := range []struct {
		name   string
		o      mpa.Options
		own    mpa.Options
		answer SessionAnswer
		want   string
	}{
		// 6581-7-15
		{"by the user", p2p, mpa.Options{}, SessionAnswer{Reject: true}, "Enhanced Reject/0, SessionDown"},
		{"by the user, unenhanced", mpa.Options{}, mpa.Options{}, SessionAnswer{Reject: true}, "Reject/0, SessionDown"},
		// 6581-7-3: what would have been accepted without negotiation
		{"needs more ORD", cs, mpa.Options{Depths: mpa.Depths{MinORD: 16}}, SessionAnswer{},
			"Enhanced Reject/0, SessionDown-settle"},
		{"strict about IRD", cs, mpa.Options{StrictIRD: true}, SessionAnswer{}, "Enhanced Reject/0, SessionDown-settle"},
		{"the same, unenhanced", mpa.Options{Depths: mpa.Depths{ORD: 99}},
			mpa.Options{StrictIRD: true, Depths: mpa.Depths{MinORD: 16}}, SessionAnswer{}, "Accept/0, SessionUp"},
		// 6581-7-11: no common RTR is answered by an Accept that names ours
		{"no common RTR", mpa.Options{PeerToPeer: true, RTR: mpa.RTRSend}, mpa.Options{RTR: mpa.RTRWrite}, SessionAnswer{},
			"Enhanced Accept/0, SessionUp"},
	} {
		e := newEndpoints(t, EndpointOptions{Options: tt.own})
		acts := move(e.b, e.a.Step(nil, SessionConnect{0, tt.o, nil}))
		e.wantActs(tt.name, acts, "SessionRequest")
		tt.answer.Private = []byte("because")
		acts = e.wantActs(tt.name, e.b.Step(nil, tt.answer), tt.want)
		acts = move(e.a, acts)
		if strings.Contains(tt.want, "Reject") {
			e.wantActs(tt.name, acts, "SessionRejected")
			rej := acts[0].(SessionRejected).Result
			switch {
			case string(rej.Private) != "because":
				t.Errorf("%s: Private is %q, want \"because\"", tt.name, string(rej.Private))
			case tt.own.MinORD > 0 && rej.Peer.ORD != 16:
				t.Errorf("%s: Peer.ORD is %v, want 16", tt.name, rej.Peer.ORD)
			}
		}
	}
}

// TestSessionSettle: an Accept that the active side cannot work with.
func TestSessionSettle(t *testing.T) {
	for _, tt := range []struct {
		name   string
		accept string
		code   mpa.Code
	}{
		{"ORD that we have no IRD for", "0000000680044005", mpa.CodeInsufficient},
		{"no RTR that we generate", "00000006c0040000", mpa.CodeNoRTR},
	} {
		o := p2p
		o.RTR = mpa.RTRRead
		e := newEndpoints(t, EndpointOptions{})
		e.a.Step(nil, SessionConnect{0, o, nil})
		acts := e.a.Step(nil, ChunkIn{Chunk{0, PPIDControl, unhex(tt.accept)}})
		e.wantActs(tt.name, acts, "segment/1, Terminate/2, SessionDown-settle")
		s, _ := mpa.ParseSegment(acts[0].(SendChunk).Chunk.Data[2:])
		c, err := mpa.ParseTerminate(s.Payload)
		if err != nil {
			t.Errorf("%s: err is %v, want nil", tt.name, err)
		}
		expect.Equal(t, c, tt.code.Cause(), "%s: c", tt.name)
		expect.Equal(t, acts[2].(SessionDown).Err.Code, tt.code, "%s: acts[2].(SessionDown).Err.Code", tt.name)
	}
}

func TestSessionIllegal(t *testing.T) {
	ctl := func(ssn byte, f Function, more ...byte) ChunkIn {
		return ChunkIn{Chunk{3, PPIDControl, append([]byte{0, ssn, 0, byte(f)}, more...)}}
	}
	data := []byte{0x80, 1, 0x80, 1}
	seg := ChunkIn{Chunk{3, PPIDSegment, []byte{0, 0, 1, 2}}}
	// 6581-7-17: active side, after its Initiate
	for _, tt := range []struct {
		name string
		o    mpa.Options
		ev   SessionEvent
		want string
	}{
		{"Accept to an Enhanced Initiate", p2p, ctl(0, FuncAccept), "Terminate/1, SessionDown-illegal_sequence"},
		{"Reject to an Enhanced Initiate", p2p, ctl(0, FuncReject), "Terminate/1, SessionDown-illegal_sequence"},
		{"Enhanced Accept to an Initiate", mpa.Options{}, ctl(0, FuncEnhancedAccept, data...),
			"Terminate/1, SessionDown-illegal_sequence"},
		{"Enhanced Initiate that crosses", p2p, ctl(0, FuncEnhancedInitiate, data...),
			"Terminate/1, SessionDown-illegal_sequence"},
		{"segment before the Accept", p2p, seg, "Terminate/1, SessionDown-illegal_sequence"},
		{"unknown function", p2p, ctl(0, 9), "Terminate/1, SessionDown-malformed"},
		{"Terminate with private data", p2p, ctl(0, FuncTerminate, 1), "Terminate/1, SessionDown-malformed"},
		{"Enhanced Accept without data", p2p, ctl(0, FuncEnhancedAccept, 1, 2, 3), "Terminate/1, SessionDown-malformed"},
		{"another PPID", p2p, ChunkIn{Chunk{3, 46, []byte{0, 0, 0, 6}}}, "Terminate/1, SessionDown-malformed"},
		{"one octet", p2p, ChunkIn{Chunk{3, PPIDControl, []byte{0}}}, "Terminate/1, SessionDown-malformed"},
		{"far ahead", p2p, ChunkIn{Chunk{3, PPIDControl, []byte{0x10, 1, 0, 4}}}, "Terminate/1, SessionDown-window"},
		{"behind", p2p, ChunkIn{Chunk{3, PPIDControl, []byte{0xff, 0xff, 0, 6}}}, ""},
		{"a Terminate", p2p, ctl(0, FuncTerminate), "SessionDown"}, // 6581-7-16
		{"nothing for us", p2p, SessionAnswer{Stream: 3}, ""},
		{"stream in use", p2p, SessionConnect{Stream: 3}, "SessionDown-illegal_sequence"},
		{"too early to send", p2p, SessionSend{Stream: 3}, ""},
		{"association down", p2p, AssociationDown{}, "SessionDown-lost"},
	} {
		e := newEndpoints(t, EndpointOptions{})
		e.a.Step(nil, SessionConnect{3, tt.o, nil})
		e.wantActs(tt.name, e.a.Step(nil, tt.ev), tt.want)
	}
	// Passive side, without a session.
	for _, tt := range []struct {
		name string
		o    EndpointOptions
		ev   SessionEvent
		want string
	}{
		{"segment", EndpointOptions{Listen: true}, seg, ""},
		{"Accept", EndpointOptions{Listen: true}, ctl(0, FuncAccept), ""},
		{"Initiate that is not the first chunk", EndpointOptions{Listen: true}, ctl(1, FuncInitiate), ""},
		{"malformed", EndpointOptions{Listen: true}, ctl(0, FuncEnhancedInitiate), ""},
		{"nobody listens", EndpointOptions{}, ctl(0, FuncInitiate), ""},
		{"RFC 5043 only", EndpointOptions{Listen: true, Options: mpa.Options{Revision: 1}},
			ctl(0, FuncEnhancedInitiate, data...), "Terminate/0"},
		{"Enhanced Initiate", EndpointOptions{Listen: true}, ctl(0, FuncEnhancedInitiate, data...), "SessionRequest"},
	} {
		b, err := NewEndpoint(tt.o)
		if err != nil {
			t.Fatal(err)
		}
		e := &endpoints{t, nil, b}
		e.wantActs(tt.name, b.Step(nil, tt.ev), tt.want)
		if tt.want == "SessionRequest" {
			e.wantActs("data while the user thinks", b.Step(nil, ChunkIn{Chunk{3, PPIDSegment, []byte{0, 1, 2}}}),
				"Terminate/0, SessionDown-illegal_sequence")
		}
	}
}

// TestSecondAccept: 6581-7-17. A session is accepted once.
func TestSecondAccept(t *testing.T) {
	for _, o := range []mpa.Options{{}, p2p} {
		e := newEndpoints(t, EndpointOptions{})
		move(e.b, e.a.Step(nil, SessionConnect{3, o, nil}))
		accept := e.b.Step(nil, SessionAnswer{Stream: 3})
		e.wantActs("the Accept", move(e.a, accept), "SessionUp")
		for _, act := range accept {
			if c, ok := act.(SendChunk); ok {
				again := append([]byte{0, 1}, c.Chunk.Data[2:]...)
				got := e.a.Step(nil, ChunkIn{Chunk{3, PPIDControl, again}})
				e.wantActs("and once more", got, "Terminate/1, SessionDown-illegal_sequence")
			}
		}
	}
}

// TestSessionPending: the number of requests that wait for the user is bounded; one
// more is refused by the provider itself.
func TestSessionPending(t *testing.T) {
	e := newEndpoints(t, EndpointOptions{MaxPending: 2})
	for stream := range uint16(5) {
		want := "SessionRequest"
		if stream >= 2 { // 6581-7-16
			want = "Terminate/0"
		}
		acts := e.wantActs("initiate", move(e.b, e.a.Step(nil, SessionConnect{stream, p2p, nil})), want)
		if stream >= 2 {
			e.wantActs("refused", move(e.a, acts), "SessionDown")
		}
	}
	e.b.Step(nil, SessionAnswer{Stream: 0})
	e.b.Step(nil, SessionAnswer{Stream: 1, Reject: true})
	for stream := uint16(7); stream < 9; stream++ {
		e.wantActs("room again", move(e.b, e.a.Step(nil, SessionConnect{stream, p2p, nil})), "SessionRequest")
	}
	n := uint64(0)
	e.b.Counters(func(name string, v uint64) {
		if name == "pending_limit" {
			n = v
		}
	})
	if n != 3 {
		t.Errorf("%d refused, want 3", n)
	}
}

// TestSessionOrder delivers chunks in every order: they come out by DDP-SSN.
func TestSessionOrder(t *testing.T) {
	var perms func(n int) [][]int
	perms = func(n int) (out [][]int) {
		if n == 0 {
			return [][]int{nil}
		}
		for _, p := range perms(n - 1) {
			for i := range n {
				out = append(out, append(append(append([]int(nil), p[:i]...), n-1), p[i:]...))
			}
		}
		return out
	}
	for _, order := range perms(5) {
		e := newEndpoints(t, EndpointOptions{})
		move(e.b, e.a.Step(nil, SessionConnect{0, p2p, nil}))
		acts := e.b.Step(nil, SessionAnswer{})
		for i := range 3 {
			acts = e.b.Step(acts, SessionSend{0, []byte{byte(i)}})
		}
		acts = e.b.Step(acts, SessionClose{})
		var chunks []SendChunk
		for _, a := range acts {
			if c, ok := a.(SendChunk); ok {
				chunks = append(chunks, c)
			}
		}
		var got []SessionAction
		for _, i := range order {
			c := chunks[i].Chunk
			c.Data = bytes.Clone(c.Data)
			got = e.a.Step(got, ChunkIn{c})
			got = e.a.Step(got, ChunkIn{c}) // once more
			clear(c.Data)                   // the association's again
		}
		e.wantActs(fmt.Sprint(order), got[:1], "SessionUp")
		e.wantActs(fmt.Sprint(order), got[1:], "SegmentIn, SegmentIn, SegmentIn, SessionDown")
	}
}

// TestSessionWindow: one chunk is late by as many as the window takes.
func TestSessionWindow(t *testing.T) {
	e := newEndpoints(t, EndpointOptions{})
	move(e.b, e.a.Step(nil, SessionConnect{0, p2p, nil}))
	accept := e.b.Step(nil, SessionAnswer{})
	var got []SessionAction
	for i := range sessionWindow {
		got = append(got, move(e.a, e.b.Step(nil, SessionSend{0, []byte{byte(i)}}))...)
	}
	e.wantActs("early", got, "")
	got = move(e.a, accept)
	if len(got) != 1+sessionWindow || told(got[:2]) != "SessionUp, SegmentIn" {
		t.Fatalf("%d actions: %s", len(got), told(got[:min(3, len(got))]))
	}
	for i, act := range got[1:] {
		if s := act.(SegmentIn); len(s.Segment) != 1 || s.Segment[0] != byte(i) {
			t.Fatalf("segment %d: %+v", i, s)
		}
	}
	// And by octets.
	for i := range 17 {
		b := make([]byte, 1<<16)
		b[0], b[1] = byte((sessionWindow+2+i)>>8), byte(sessionWindow+2+i)
		want := ""
		if i == 16 {
			want = "Terminate/1, SessionDown-window"
		}
		e.wantActs("large ones", e.a.Step(nil, ChunkIn{Chunk{0, PPIDSegment, b}}), want)
	}
}

// TestSessionWindowOfAll: what all sessions hold together is bounded, and is given
// back when they end.
func TestSessionWindowOfAll(t *testing.T) {
	e := newEndpoints(t, EndpointOptions{})
	const n = 60000
	b := make([]byte, n)
	held, refused := 0, uint16(0)
	for stream := uint16(0); refused == 0; stream++ {
		e.a.Step(nil, SessionConnect{stream, p2p, nil})
		for k := range 17 {
			b[0], b[1] = 0, byte(k+1)
			if acts := e.a.Step(nil, ChunkIn{Chunk{stream, PPIDSegment, b}}); len(acts) > 0 {
				e.wantActs("too much", acts, "Terminate/1, SessionDown-window")
				refused = stream
				break
			}
			held += n
		}
		if held > 16<<20 {
			t.Fatalf("%d octets are held", held)
		}
	}
	if held < 15<<20 {
		t.Errorf("%d octets were held, want %d at least", held, 15<<20)
	}
	expect.Equal(t, e.a.Sessions(), int(refused), "number of sessions")
	e.a.Step(nil, SessionClose{0})
	e.a.Step(nil, SessionConnect{500, p2p, nil})
	e.wantActs("room again", e.a.Step(nil, ChunkIn{Chunk{500, PPIDSegment, b}}), "")
	e.a.Step(nil, AssociationDown{})
	expect.Equal(t, e.a.octets, 0, "octets that are left")
	expect.Equal(t, e.a.Sessions(), 0, "number of sessions that are left")
}

func TestSessionReasonsAreComplete(t *testing.T) {
	for r := range NumSessionReasons {
		switch {
		case r.String() == "":
			t.Errorf("reason %d has no name", r)
		case r.Clause() == "":
			t.Errorf("reason %d (%v) has no clause", r, r)
		case r.Outcome() == mpa.Refuse:
			t.Errorf("reason %d (%v) has outcome %v, which is for start-up", r, r, r.Outcome())
		}
	}
}

// TestRegisteredFunctions: 6581-11-1. A session control chunk has its function code in
// octets 2 and 3.
func TestRegisteredFunctions(t *testing.T) {
	for _, reject := range []bool{false, true} {
		e := newEndpoints(t, EndpointOptions{})
		asked := e.a.Step(nil, SessionConnect{Stream: 1, Options: mpa.Options{Negotiate: true}})
		if got := asked[0].(SendChunk).Chunk.Data; !bytes.HasPrefix(got, unhex("00000005")) {
			t.Errorf("Enhanced Initiate is %x, want 0000 0005", got)
		}
		move(e.b, asked)
		want := unhex("00000006")
		if reject {
			want = unhex("00000007")
		}
		answer := e.b.Step(nil, SessionAnswer{Stream: 1, Reject: reject})
		if got := answer[0].(SendChunk).Chunk.Data; !bytes.HasPrefix(got, want) {
			t.Errorf("the answer, rejecting %v, is %x, want %x", reject, got, want)
		}
	}
}

func FuzzEndpoint(f *testing.F) {
	f.Add([]byte("\x00\x08\x00\x00\x00\x05\xc0\x08\xc0\x04\x81\x05\x00\x01abc"))
	f.Add([]byte("\x01\x08\x00\x00\x00\x06\x80\x04\x80\x08\x40\x04\x00\x02\x00\x04"))
	f.Fuzz(func(t *testing.T, in []byte) {
		o := EndpointOptions{Listen: true, MaxPending: 2, MaxSessions: 4}
		e, _ := NewEndpoint(o)
		e.Step(nil, SessionConnect{1, p2p, nil})
		for len(in) >= 2 {
			stream, kind, n := uint16(in[0]&7), in[0]>>6, min(int(in[1]), len(in)-2)
			body := in[2 : 2+n]
			in = in[2+n:]
			ppid := PPIDControl
			if kind&1 != 0 {
				ppid = PPIDSegment
			}
			acts := e.Step(nil, ChunkIn{Chunk{stream, ppid, body}})
			if _, err := Carry(nopAssociation{}, acts); err != nil {
				t.Fatal(err)
			}
			if kind == 2 {
				e.Step(nil, SessionAnswer{Stream: stream, Reject: n&1 != 0})
			}
			pending, octets := 0, 0
			for _, s := range e.sessions {
				for _, c := range s.early {
					octets += len(c.Data) + chunkOverhead
				}
				if s.state == sessionPending {
					pending++
				}
				if len(s.early) > sessionWindow {
					t.Fatalf("%d chunks wait", len(s.early))
				}
			}
			if octets != e.octets {
				t.Fatalf("%d octets wait, counted %d", octets, e.octets)
			}
			switch {
			case len(e.sessions) > 4:
				t.Fatalf("sessions has %v elements, want at most 4", len(e.sessions))
			case pending != e.pending:
				t.Fatalf("pending is %v, want %v", pending, e.pending)
			case pending > 2:
				t.Fatalf("pending is %v, want at most 2", pending)
			}
		}
	})
}

type nopAssociation struct{}

func (nopAssociation) Send(Chunk) error { return nil }
