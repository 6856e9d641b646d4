package mpa

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// This file explores the negotiation exhaustively for small values. What is
// expected stands in tables written from RFC 6581; the frames are put together
// here octet by octet. Nothing of it is computed by the code under test.

// u is 0x3FFF in the tables: the ULP sees to it.
const u = 0x3fff

var (
	wireDepths = []int{0, 1, 2, 3, u}
	ownIRDs    = [][2]int{{0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}, {2, 2}} // IRD, and what it can be raised to
	rtrSets    = []string{"B", "C", "BC", "D", "BD", "CD", "BCD"}
)

// replyORD is the ORD of an accepting reply: at most the initiator's IRD, and
// 0x3FFF is answered by 0x3FFF. By initiator IRD, then own ORD 0, 1, 2.
//
// 6581-9.1-1, 6581-9.1-4, 6581-9.1-7, 6581-9.1-8, 6581-9.1-20
var replyORD = map[int][3]int{
	0: {0, 0, 0},
	1: {0, 1, 1},
	2: {0, 1, 2},
	3: {0, 1, 2},
	u: {u, u, u},
}

// replyIRD is the IRD of an accepting reply: at least the initiator's ORD as far
// as it can be provided, and 0x3FFF is answered by 0x3FFF. By initiator ORD,
// then ownIRDs. With a Read RTR in the reply a 0 becomes 1 (readIRD).
//
// 6581-9.1-2, 6581-9.1-3, 6581-9.1-18
var replyIRD = map[int][6]int{
	0: {0, 0, 0, 1, 1, 2},
	1: {0, 1, 1, 1, 1, 2},
	2: {0, 1, 2, 1, 2, 2},
	3: {0, 1, 2, 1, 2, 2},
	u: {u, u, u, u, u, u},
}

// 6581-9.1-9
var readIRD = map[int]int{0: 1, 1: 1, 2: 2, u: u}

// strictRejects says which initiator ORDs a strict responder rejects; by ownIRDs.
var strictRejects = map[int][6]bool{
	1: {true},
	2: {true, true, false, true},
	3: {true, true, true, true, true, true},
}

// replyRTR is the set of RTR kinds in a reply to flag A: what both know, else what
// the responder knows. By kinds in the request, then rtrSets.
//
// 6581-9.2-7, 6581-9.2-9, 6581-9.2-11
var replyRTR = map[string][7]string{
	"":    {"B", "C", "BC", "D", "BD", "CD", "BCD"},
	"B":   {"B", "C", "B", "D", "B", "CD", "B"},
	"C":   {"B", "C", "C", "D", "BD", "C", "C"},
	"BC":  {"B", "C", "BC", "D", "B", "C", "BC"},
	"D":   {"B", "C", "BC", "D", "D", "D", "D"},
	"BD":  {"B", "C", "B", "D", "BD", "D", "BD"},
	"CD":  {"B", "C", "C", "D", "D", "CD", "CD"},
	"BCD": {"B", "C", "BC", "D", "BD", "CD", "BCD"},
}

// frameBy writes a startup frame.
func frameBy(reply bool, bits, rev int, flags string, ird, ord int, private string) []byte {
	b := []byte("MPA ID Req Frame")
	if reply {
		b[9] = 'p'
	}
	n := len(private)
	if bits&0x10 != 0 && rev > 1 {
		n += 4
	}
	b = append(b, byte(bits), byte(rev), byte(n>>8), byte(n))
	if bits&0x10 != 0 && rev > 1 {
		for i, c := range "ABCD" {
			if strings.ContainsRune(flags, c) {
				if i < 2 {
					ird |= 0x8000 >> i
				} else {
					ord |= 0x8000 >> (i - 2)
				}
			}
		}
		b = append(b, byte(ird>>8), byte(ird), byte(ord>>8), byte(ord))
	}
	return append(b, private...)
}

// A frameWords is what a frame says; without S only the first three.
type frameWords struct {
	reject, s bool
	rev       int
	flags     string
	ird, ord  int
}

// frameOf reads one back.
func frameOf(b []byte) frameWords {
	w := frameWords{reject: b[16]&0x20 != 0, s: b[16]&0x10 != 0, rev: int(b[17])}
	if !w.s {
		return w
	}
	i, o := int(b[20])<<8|int(b[21]), int(b[22])<<8|int(b[23])
	for k, c := range "ABCD" {
		depth := i
		if k >= 2 {
			depth = o
		}
		if depth&(0x8000>>(k%2)) != 0 {
			w.flags += string(c)
		}
	}
	w.ird, w.ord = i&0x3fff, o&0x3fff
	return w
}

func setOf(kinds string) (t RTRTypes) {
	for i, c := range "BCD" {
		if strings.ContainsRune(kinds, c) {
			t |= 1 << i
		}
	}
	return t
}

// flagSets are all 16 combinations of the flags.
func flagSets() (l []string) {
	for i := range 16 {
		s := ""
		for k, c := range "ABCD" {
			if i&(1<<k) != 0 {
				s += string(c)
			}
		}
		l = append(l, s)
	}
	return l
}

var t0 = time.Unix(1000, 0)

// answerTo gives req to a responder that accepts and returns what it wrote.
func answerTo(o Options, req []byte) (r *Responder, acts []Action, wrote []byte) {
	r, err := NewResponder(o)
	if err != nil {
		panic(err)
	}
	acts = r.Step(acts, t0, Start{})
	acts = r.Step(acts, t0, Recv{req})
	acts = r.Step(acts, t0, Accept{})
	for _, a := range acts {
		if w, ok := a.(Write); ok {
			wrote = append(wrote, w.Data...)
		}
	}
	return r, acts, wrote
}

func has[T Action](acts []Action) (v T, ok bool) {
	for _, a := range acts {
		if v, ok = a.(T); ok {
			return v, true
		}
	}
	return v, false
}

func TestEveryRequest(t *testing.T) {
	n := 0
	for _, flags := range flagSets() {
		for set := range rtrSets {
			for _, ird := range wireDepths {
				for _, ord := range wireDepths {
					for i := range ownIRDs {
						for ownORD := range 3 {
							for _, strict := range []bool{false, true} {
								n++
								checkReply(t, request{flags, set, ird, ord}, i, ownORD, strict)
							}
						}
					}
				}
			}
		}
	}
	t.Logf("%d requests", n)
}

// A request is one with enhanced data: its flags and depths, and which of rtrSets the
// responder takes.
type request struct {
	flags    string
	set      int
	ird, ord int
}

// checkReply has a responder of ownIRDs[i] and ownORD answer q, and compares with the tables.
func checkReply(t *testing.T, q request, i, ownORD int, strict bool) {
	t.Helper()
	kinds, p2p := strings.CutPrefix(q.flags, "A")
	own, irds := rtrSets[q.set], ownIRDs[i]
	o := Options{Depths: Depths{IRD: Depth(irds[0]), MaxIRD: Depth(irds[1]), ORD: Depth(ownORD)},
		RTR: setOf(own), StrictIRD: strict}
	wantFlags := ""
	if p2p { // 6581-9.2-6
		wantFlags = "A" + replyRTR[kinds][q.set]
	} // else 6581-9.2-16, 6581-9.2-17, 6581-9.2-18
	wantIRD := replyIRD[q.ord][i]
	if strings.Contains(wantFlags, "D") {
		wantIRD = readIRD[wantIRD]
	}
	wantORD := replyORD[q.ird][ownORD]
	reject := strict && strictRejects[q.ord][i]
	r, acts, wrote := answerTo(o, frameBy(false, 0x10, 2, q.flags, q.ird, q.ord, ""))
	what := fmt.Sprintf("request %q IRD %d ORD %d, we %v %+v strict %v", q.flags, q.ird, q.ord, own, o.Depths, strict)
	// 6581-10-1, 6581-10-7
	expect.MustEqual(t, frameOf(wrote), frameWords{reject, true, 2, wantFlags, wantIRD, wantORD}, "%s: reply", what)
	if reject {
		f, failed := has[Failed](acts)
		expect.MustEqual(t, failed, true, "%s: failed", what)
		expect.MustEqual(t, f.Err.Code(), CodeInsufficient, "%s: Err.Code", what)
		return
	}
	res := r.Result()
	// What this end has: as in the reply, or unchanged where the ULP sees to it.
	localIRD, localORD := wantIRD, wantORD
	if q.ord == u {
		localIRD = irds[0]
	}
	if q.ird == u {
		localORD = ownORD
	}
	expect.MustEqual(t, int(res.IRD), localIRD, "%s: local IRD", what)
	expect.MustEqual(t, int(res.ORD), localORD, "%s: local ORD", what)
	// 6581-9.1-6
	expect.MustEqual(t, int(res.Peer.IRD), q.ird, "%s: Peer.IRD", what)
	expect.MustEqual(t, int(res.Peer.ORD), q.ord, "%s: Peer.ORD", what)
	expect.MustEqual(t, res.Enhanced, true, "%s: Enhanced", what)
	expect.MustEqual(t, res.PeerToPeer, p2p, "%s: PeerToPeer", what)
}

// TestNeededORD: a responder whose ULP cannot do with less rejects and says what
// it needs. By initiator IRD, then needed ORD 0 to 3: -1 accepts.
func TestNeededORD(t *testing.T) {
	for ird, row := range map[int][4]int{0: {-1, 1, 2, 3}, 1: {-1, -1, 2, 3}, 2: {-1, -1, -1, 3},
		3: {-1, -1, -1, -1}, u: {-1, -1, -1, -1}} {
		for need, want := range row {
			o := Options{Depths: Depths{IRD: 1, ORD: 1, MinORD: Depth(need)}}
			_, acts, wrote := answerTo(o, frameBy(false, 0x10, 2, "AC", ird, 1, "hello"))
			what, reply := fmt.Sprintf("initiator IRD %d, needed ORD %d", ird, need), frameOf(wrote)
			expect.Equal(t, reply.reject, want >= 0, "%s: reject", what)
			expect.Equal(t, reply.s, true, "%s: S", what)
			// 6581-9.1-10, 6581-9.1-11: no Terminate, the code is for the ULP
			_, terminates := has[SendTerminate](acts)
			expect.Equal(t, terminates, false, "%s: the responder sends a Terminate", what)
			f, failed := has[Failed](acts)
			expect.MustEqual(t, failed, want >= 0, "%s: failed", what)
			if failed {
				expect.Equal(t, reply.ord, want, "%s: ORD of the reply", what)
				expect.Equal(t, f.Err.Code(), CodeInsufficient, "%s: Err.Code", what)
			}
		}
	}
}

// TestEveryRevision: which reply each form of request gets.
func TestEveryRevision(t *testing.T) {
	const (
		closed = iota
		plain
		enhanced
	)
	for _, tt := range []struct {
		rev, s, own int
		want        int
	}{
		{0, 0, 0, closed}, {0, 1, 0, closed},
		{1, 0, 0, plain},    // 6581-6-10, 6581-10-3, 6581-10-5
		{1, 1, 0, plain},    // S is a reserved bit there
		{2, 0, 0, plain},    // 6581-10-7
		{2, 1, 0, enhanced}, // 6581-10-6
		{3, 0, 0, closed}, {3, 1, 0, closed}, {255, 1, 0, closed},
		{1, 0, 1, plain}, {1, 1, 1, plain},
		{2, 0, 1, closed},
		{2, 1, 1, closed}, // 6581-10-2, 6581-10-8
		{1, 0, 2, plain}, {2, 0, 2, plain}, {2, 1, 2, enhanced},
	} {
		// Four octets of private data, so that S with revision 2 is well-formed.
		for res := range 16 { // 6581-6-6, 6581-10-10
			req := frameBy(false, tt.s<<4|res, tt.rev, "", 1, 1, "ulp!")
			r, acts, wrote := answerTo(Options{Revision: uint8(tt.own), Depths: Depths{IRD: 1, ORD: 1}}, req)
			got := closed
			if len(wrote) > 0 {
				got = plain
				w := frameOf(wrote)
				if w.s {
					got = enhanced
				}
				expect.Equal(t, w.rev, tt.rev, "%+v: revision of the reply", tt)
				expect.Equal(t, wrote[16]&0x0f, 0, "%+v: Res of the reply", tt) // 6581-6-5
				expect.Equal(t, string(r.Result().Private), "ulp!", "%+v: private data", tt)
			}
			_, closes := has[Close](acts)
			f, failed := has[Failed](acts)
			expect.Equal(t, got, tt.want, "%+v: got", tt)
			expect.Equal(t, closes, got == closed, "%+v: closes", tt)
			expect.Equal(t, failed, closes, "%+v: failed", tt)
			if failed {
				expect.Equal(t, f.Err.Code(), CodeFrame, "%+v: Err.Code", tt)
			}
			if res != 0 && tt.rev == 1 {
				expect.Equal(t, r.Counters()[ReasonReserved], 1, "%+v: frames with reserved bits", tt)
			}
		}
	}
}

// TestEveryReplyForm: what an initiator makes of each form of reply: both
// revisions and others, enhanced and not, accepting and rejecting, with every
// combination of the remaining flags.
func TestEveryReplyForm(t *testing.T) {
	const (
		closed = iota
		up     // unenhanced
		upS    // enhanced
		no     // rejected, without depths
		noS    // rejected, with the responder's depths
	)
	asked := map[string]Options{"plain": {}, "plain 2": {Revision: 2}, "only 1": {Revision: 1},
		"enhanced": {Negotiate: true, Depths: Depths{IRD: 1, ORD: 1}}}
	n := 0
	for _, tt := range []struct {
		rev, s, r                     int
		plain, plain2, only1, enhance int
	}{
		// RFC 5044 section 7.1.1: close if unable to interoperate
		{0, 0, 0, closed, closed, closed, closed}, {0, 1, 0, closed, closed, closed, closed},
		{0, 0, 1, closed, closed, closed, closed},
		{3, 0, 0, closed, closed, closed, closed}, {3, 1, 0, closed, closed, closed, closed},
		{3, 1, 1, closed, closed, closed, closed},
		{255, 0, 0, closed, closed, closed, closed}, {255, 1, 1, closed, closed, closed, closed},
		// S is a reserved bit in revision 1; what accepts an enhanced request must be enhanced
		{1, 0, 0, up, up, up, closed}, {1, 1, 0, up, up, up, closed},
		{1, 0, 1, no, no, no, no}, {1, 1, 1, no, no, no, no},
		{2, 0, 0, up, up, closed, closed}, {2, 0, 1, no, no, closed, no},
		// An unenhanced request gets an unenhanced reply. 6581-10-3
		{2, 1, 0, closed, closed, closed, upS}, {2, 1, 1, closed, closed, closed, noS},
	} {
		for ask, want := range map[string]int{"plain": tt.plain, "plain 2": tt.plain2, "only 1": tt.only1,
			"enhanced": tt.enhance} {
			for more := range 64 { // M, C, Res
				n++
				bits := more>>4<<6 | tt.r<<5 | tt.s<<4 | more&0x0f
				// Four octets of private data, so that S with revision 2 is well-formed.
				m, _ := asks(asked[ask])
				acts := m.Step(nil, t0, Recv{frameBy(true, bits, tt.rev, "", 1, 1, "ulp!")})
				what := fmt.Sprintf("%s is answered by revision %d, bits %#x", ask, tt.rev, bits)
				var res Result
				got, ok := closed, false
				if e, yes := has[Established](acts); yes {
					got, res, ok = up, e.Result, true
				} else if e, yes := has[Rejected](acts); yes {
					got, res, ok = no, e.Result, true
				}
				if res.Enhanced {
					got++
				}
				expect.MustEqual(t, got, want, "%s: what comes of it", what)
				_, terminates := has[SendTerminate](acts)
				expect.Equal(t, terminates, false, "%s: the initiator sends a Terminate", what)
				f, failed := has[Failed](acts)
				expect.MustEqual(t, failed, !ok, "%s: failed", what)
				if failed {
					expect.Equal(t, f.Err.Code(), CodeFrame, "%s: Err.Code", what)
					continue
				}
				expect.Equal(t, string(res.Private), "ulp!", "%s: private data", what)
				expect.Equal(t, res.SendMarkers, more&0x20 != 0, "%s: SendMarkers", what)
				expect.Equal(t, res.CRC, more&0x10 != 0, "%s: CRC", what)
				expect.Equal(t, int(res.Rev), tt.rev, "%s: Rev", what)
				// 6581-6-6
				expect.Equal(t, m.Counters()[ReasonReserved] == 1, more&0x0f != 0, "%s: reserved bits are counted", what)
			}
		}
	}
	t.Logf("%d replies", n)
}

// rtrAllowed says which kinds of RTR an initiator may send: those that it
// generates and the reply names, be they fewer than the responder supports or
// more than were asked for. By rtrSets (ours), then reply.
//
// 6581-9.2-12, 6581-1.1-2, 6581-1.1-3, 6581-9.2-8, 6581-9.2-10; an empty entry is a Terminate, 6581-9.2-13
var rtrAllowed = map[string][8]string{
	//      "", B,   C,   BC,   D,   BD,   CD,   BCD
	"B":   {"", "B", "", "B", "", "B", "", "B"},
	"C":   {"", "", "C", "C", "", "", "C", "C"},
	"BC":  {"", "B", "C", "BC", "", "B", "C", "BC"},
	"D":   {"", "", "", "", "D", "D", "D", "D"},
	"BD":  {"", "B", "", "B", "D", "BD", "D", "BD"},
	"CD":  {"", "", "C", "C", "D", "D", "CD", "CD"},
	"BCD": {"", "B", "C", "BC", "D", "BD", "CD", "BCD"},
}

// initiatorIRD is an initiator's IRD after the reply: at least the responder's
// ORD, -1 where that cannot be provided. By responder ORD, then ownIRDs.
//
// 6581-9.1-12, 6581-9.1-14, 6581-9.1-21
var initiatorIRD = map[int][6]int{
	0: {0, 0, 0, 1, 1, 2},
	1: {-1, 1, 1, 1, 1, 2},
	2: {-1, -1, 2, -1, 2, 2},
	3: {-1, -1, -1, -1, -1, -1},
	u: {0, 0, 0, 1, 1, 2},
}

// initiatorORD is an initiator's ORD after the reply: at most the responder's
// IRD. By responder IRD, then own ORD 0, 1, 2.
//
// 6581-9.1-13, 6581-9.1-19, 6581-3-1
var initiatorORD = map[int][3]int{
	0: {0, 0, 0},
	1: {0, 1, 1},
	2: {0, 1, 2},
	3: {0, 1, 2},
	u: {0, 1, 2},
}

// asks starts an initiator and returns its request.
func asks(o Options) (*Initiator, []byte) {
	m, err := NewInitiator(o, nil)
	if err != nil {
		panic(err)
	}
	w, _ := has[Write](m.Step(nil, t0, Start{}))
	return m, w.Data
}

func TestEveryReply(t *testing.T) {
	n := 0
	for _, own := range append([]string{""}, rtrSets...) { // "" is client-server
		for i, irds := range ownIRDs {
			for ownORD := range 3 {
				for ulp := range 4 {
					o := Options{Depths: Depths{IRD: Depth(irds[0]), MaxIRD: Depth(irds[1]), ORD: Depth(ownORD)}, Negotiate: true,
						PeerToPeer: own != "", RTR: setOf(own), ULPIRD: ulp&1 != 0, ULPORD: ulp&2 != 0}
					ord := ownORD
					if strings.Contains(own, "D") && ord == 0 {
						ord = 1 // a Read RTR is a Read
					}
					_, req := asks(o)
					wantFlags, wantIRD, wantORD := own, irds[0], ord
					if own != "" { // 6581-5-3, 6581-9.2-3, 6581-9.2-4; else 6581-9.2-15
						wantFlags = "A" + own
					}
					if o.ULPIRD { // 6581-9.1-17
						wantIRD = u
					}
					if o.ULPORD {
						wantORD = u
					}
					expect.MustEqual(t, frameOf(req), frameWords{false, true, 2, wantFlags, wantIRD, wantORD}, "request")
					for _, flags := range flagSets() {
						for _, rIRD := range wireDepths {
							for _, rORD := range wireDepths {
								n += 2
								oneReply(t, o, own, i, ord, flags, rIRD, rORD)
							}
						}
					}
				}
			}
		}
	}
	t.Logf("%d replies", n)
}

// oneReply gives one reply to an initiator, accepting and rejecting.
func oneReply(t *testing.T, o Options, own string, i, ord int, flags string, rIRD, rORD int) {
	what := fmt.Sprintf("%+v, reply %q IRD %d ORD %d", o, flags, rIRD, rORD)
	oneRejection(t, o, what, flags, rIRD, rORD)

	m, _ := asks(o)
	acts := m.Step(nil, t0, Recv{frameBy(true, 0x10, 2, flags, rIRD, rORD, "")})
	res := m.Result()
	expect.MustEqual(t, int(res.Peer.IRD), rIRD, "%s: Peer.IRD", what)
	expect.MustEqual(t, int(res.Peer.ORD), rORD, "%s: Peer.ORD", what)
	expect.MustEqual(t, res.Enhanced, true, "%s: Enhanced", what)
	kinds, p2p := strings.CutPrefix(flags, "A")
	wantIRD, wantORD := initiatorIRD[rORD][i], initiatorORD[rIRD][ord]
	allowed, code := "", Code(0)
	switch {
	case wantIRD < 0:
		code = CodeInsufficient
	case p2p != (own != ""): // the reply must match flag A
		code = CodeNoRTR
	case p2p:
		allowed = rtrAllowed[own][setOf(kinds)]
		if wantORD == 0 { // no Read may be sent, not even this one
			allowed = strings.ReplaceAll(allowed, "D", "")
		}
		if allowed == "" {
			code = CodeNoRTR
		}
	}
	if code != 0 {
		terminates(t, what, acts, code)
		return
	}
	if allowed != "" {
		// 6581-9.3-1, 6581-5-4, 6581-5-5: the RTR comes before everything else
		rtr, ok := acts[0].(SendRTR)
		switch {
		case !ok:
			t.Fatalf("%s: ok is false", what)
		case rtr.Type&setOf(allowed) != rtr.Type:
			t.Fatalf("%s: Type&setOf(allowed) is %v, want %v", what, rtr.Type&setOf(allowed), rtr.Type)
		case rtr.Type == 0:
			t.Fatalf("%s: no type of RTR was chosen, want one of %q", what, allowed)
		case rtr.Type != res.RTR:
			t.Fatalf("%s: Type is %v, want %v", what, rtr.Type, res.RTR)
		}
		acts = acts[1:]
	}
	up, ok := acts[0].(Established)
	expect.MustEqual(t, ok, true, "%s: ok", what)
	expect.MustEqual(t, len(acts), 1, "%s: length of acts", what)
	expect.MustEqual(t, int(up.Result.IRD), wantIRD, "%s: Result.IRD", what)
	expect.MustEqual(t, int(up.Result.ORD), wantORD, "%s: Result.ORD", what)
	expect.MustEqual(t, up.Result.PeerToPeer, p2p, "%s: Result.PeerToPeer", what)
}

func isClose(a Action) bool { _, ok := a.(Close); return ok }

// terminates checks that acts are a Terminate with the code, then the end; the ULP gets the code.
func terminates(t *testing.T, what string, acts []Action, code Code) {
	t.Helper()
	term, ok1 := has[SendTerminate](acts)
	f, ok3 := has[Failed](acts)
	switch {
	case len(acts) != 3:
		t.Fatalf("%s: acts has %v elements, want 3", what, len(acts))
	case !ok1:
		t.Fatalf("%s: no Terminate in %v", what, acts)
	case !isClose(acts[1]):
		t.Fatalf("%s: %T comes second, want Close", what, acts[1])
	case !ok3:
		t.Fatalf("%s: no Failed in %v", what, acts)
	case term.Code != code:
		t.Fatalf("%s: Code is %v, want %v", what, term.Code, code)
	case f.Err.Code() != code:
		t.Fatalf("%s: Err.Code is %v, want %v", what, f.Err.Code(), code)
	}
}

// oneRejection has an initiator with options o hear a reply that rejects: what it offers is told all the same.
func oneRejection(t *testing.T, o Options, what, flags string, rIRD, rORD int) {
	t.Helper()
	m, _ := asks(o)
	acts := m.Step(nil, t0, Recv{frameBy(true, 0x30, 2, flags, rIRD, rORD, "why")})
	// 6581-9.1-6, 6581-9.1-15: in a rejection too
	rej, ok := has[Rejected](acts)
	expect.MustEqual(t, ok, true, "%s, rejecting: ok", what)
	expect.MustEqual(t, len(acts), 1, "%s, rejecting: length of acts", what)
	expect.MustEqual(t, int(rej.Result.Peer.IRD), rIRD, "%s, rejecting: Result.Peer.IRD", what)
	expect.MustEqual(t, int(rej.Result.Peer.ORD), rORD, "%s, rejecting: Result.Peer.ORD", what)
	expect.MustEqual(t, string(rej.Result.Private), "why", "%s, rejecting: Result.Private", what)
}

// TestBothSides runs every pair of small configurations against each other, both
// enhanced and not, and checks what must hold whatever was chosen.
func TestBothSides(t *testing.T) {
	n, up := 0, 0
	for _, neg := range []bool{false, true} {
		for _, p2p := range []bool{false, true} {
			for _, rev := range []uint8{0, 2} {
				for a := range 3 * 3 * 3 * 7 {
					for b := range 3 * 3 * 3 * 7 {
						n++
						oi := Options{Negotiate: neg, PeerToPeer: p2p, Revision: rev, RTR: RTRTypes(a/27 + 1),
							Depths: Depths{IRD: Depth(a % 3), ORD: Depth(a / 3 % 3), MaxIRD: Depth(a / 9 % 3)}}
						or := Options{RTR: RTRTypes(b/27 + 1),
							Depths: Depths{IRD: Depth(b % 3), ORD: Depth(b / 3 % 3), MaxIRD: Depth(b / 9 % 3)}}
						m, req := asks(oi)
						r, _, reply := answerTo(or, req)
						acts := m.Step(nil, t0, Recv{reply})
						got, ok := has[Established](acts)
						if !ok {
							term, _ := has[SendTerminate](acts)
							expect.MustEqual(t, term.Code, CodeNoRTR, "%+v with %+v: code", oi, or)
							expect.MustEqual(t, oi.RTR&or.RTR&^RTRRead, 0, "%+v with %+v: RTR that would do", oi, or)
							continue
						}
						up++
						i, p := got.Result, r.Result()
						expect.MustEqual(t, i.Enhanced, neg || p2p, "%+v with %+v: Enhanced", oi, or)
						expect.MustEqual(t, p.Enhanced, i.Enhanced, "%+v with %+v: Enhanced", oi, or)
						expect.MustEqual(t, i.PeerToPeer, p2p, "%+v with %+v: PeerToPeer", oi, or)
						expect.MustEqual(t, p.PeerToPeer, p2p, "%+v with %+v: PeerToPeer", oi, or)
						if !neg {
							continue
						}
						// 6581-9.1-5, 6581-9.1-22
						switch {
						case i.ORD > p.IRD:
							t.Fatalf("%+v with %+v: ORD is %v, want at most %v", oi, or, i.ORD, p.IRD)
						case p.ORD > i.IRD:
							t.Fatalf("%+v with %+v: ORD is %v, want at most %v", oi, or, p.ORD, i.IRD)
						case i.RTR == RTRRead && i.ORD == 0:
							t.Fatalf("%+v with %+v: ORD is 0, want at least 1 for the Read", oi, or)
						case i.RTR == RTRRead && p.IRD == 0:
							t.Fatalf("%+v with %+v: IRD is 0, want at least 1 for the Read", oi, or)
						}
					}
				}
			}
		}
	}
	t.Logf("%d pairs, %d established", n, up)
}
