package mpa

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"ipoibcm/internal/expect"
)

func requestFrame(bits, rev int) []byte { return frameBy(false, bits, rev, "", 1, 1, "") }

// withLength puts n into b as the length of its private data.
func withLength(b []byte, n int) []byte { b[18], b[19] = byte(n>>8), byte(n); return b }

// badFrames are the cases of TestBadFrames.
var badFrames = []struct {
	name   string
	in     []byte
	reason Reason // ReasonNone: it is taken
	code   Code
}{
	{"wrong key in the first octet", []byte("X"), ReasonKey, CodeFrame},
	{"wrong key in the last octet", []byte("MPA ID Req Fram3"), ReasonKey, CodeFrame},
	{"another protocol", []byte("GET / HTTP/1.1\r\n\r\n"), ReasonKey, CodeFrame},
	{"a reply", frameBy(true, 0, 1, "", 0, 0, ""), ReasonBothResponders, CodeFrame},
	{"revision 0", requestFrame(0, 0), ReasonRev, CodeFrame},
	{"revision 3", requestFrame(0x10, 3), ReasonRev, CodeFrame},
	{"PD_Length 513", withLength(requestFrame(0, 1), 513), ReasonTooLong, CodeFrame},
	{"PD_Length 65535", withLength(requestFrame(0, 1), 65535), ReasonTooLong, CodeFrame},
	{"S with PD_Length 0", withLength(requestFrame(0x10, 2), 0)[:20], ReasonNoData, CodeFrame}, // 6581-6-12
	{"S with PD_Length 1", withLength(requestFrame(0x10, 2), 1)[:21], ReasonNoData, CodeFrame},
	{"S with PD_Length 2", withLength(requestFrame(0x10, 2), 2)[:22], ReasonNoData, CodeFrame},
	{"S with PD_Length 3", withLength(requestFrame(0x10, 2), 3)[:23], ReasonNoData, CodeFrame},
	{"S with PD_Length 4", requestFrame(0x10, 2), ReasonNone, 0},
	{"PD_Length below what comes", append(requestFrame(0x10, 2), 0), ReasonEarlyData, CodeFrame},
	{"reserved bits", requestFrame(0x0f, 2), ReasonNone, 0}, // 6581-6-6
	{"R in a request", requestFrame(0x20, 1), ReasonNone, 0},
	{"512 octets", frameBy(false, 0, 1, "", 0, 0, strings.Repeat("x", 512)), ReasonNone, 0},
	{"508 octets behind enhanced data", frameBy(false, 0x10, 2, "", 0, 0, strings.Repeat("x", 508)), ReasonNone, 0},
}

// TestBadFrames: every way to be wrong ends in a defined way, with a code and a
// counter.
func TestBadFrames(t *testing.T) {
	for _, tt := range badFrames {
		// The whole at once, and octet by octet: the same end, at the first octet
		// that shows it.
		for _, single := range []bool{false, true} {
			r := responder(t, Options{})
			var acts []Action
			if single {
				for i := range tt.in {
					acts = append(acts, r.Step(nil, t0, Recv{tt.in[i : i+1]})...)
				}
			} else {
				acts = r.Step(nil, t0, Recv{tt.in})
			}
			want := "Request"
			if tt.reason != ReasonNone {
				want = "Close Failed-" + tt.reason.String()
				if tt.reason == ReasonEarlyData && single {
					want = "Request " + want
				}
				expect.Equal(t, r.Counters()[tt.reason], 1, "%s: Counters()[tt.reason]", tt.name)
				expect.Equal(t, tt.reason.Code(), tt.code, "%s: Code", tt.name)
				expect.Equal(t, tt.reason.Outcome(), CloseTCP, "%s: Outcome", tt.name)
			}
			wantActs(t, tt.name, acts, want)
		}
	}
	// The initiator's end.
	for _, tt := range []struct {
		name   string
		opts   Options
		in     []byte
		reason Reason
	}{
		{"a request", p2p, frameBy(false, 0, 1, "", 0, 0, ""), ReasonBothInitiators},
		{"a short enhanced reply", p2p, withLength(frameBy(true, 0x10, 2, "", 0, 0, ""), 3)[:23], ReasonNoData},
		{"an unenhanced reply", p2p, frameBy(true, 0, 2, "", 0, 0, ""), ReasonUnenhancedReply},
		{"a reply of revision 1", p2p, frameBy(true, 0x10, 1, "", 0, 0, ""), ReasonUnenhancedReply},
		{"an enhanced reply that was not asked for", Options{}, frameBy(true, 0x10, 2, "", 0, 0, ""), ReasonUnaskedEnhanced},
		{"revision 2 to revision 1", Options{Revision: 1}, frameBy(true, 0, 2, "", 0, 0, ""), ReasonRev},
	} {
		i, _ := asks(tt.opts)
		wantActs(t, tt.name, i.Step(nil, t0, Recv{tt.in}), "Close Failed-"+tt.reason.String())
		if i.Counters()[tt.reason] != 1 {
			t.Errorf("%s is not counted", tt.name)
		}
	}
}

func TestReasonsAreComplete(t *testing.T) {
	seen := map[string]bool{}
	for r := ReasonNone + 1; r < NumReasons; r++ {
		switch {
		case r.String() == "":
			t.Errorf("reason %d has no name", r)
		case seen[r.String()]:
			t.Errorf("reason %d: seen[r.String()] is true, want false", r)
		case r.Clause() == "":
			t.Errorf("reason %d (%v) has no clause", r, r)
		case r.Outcome() == Terminate && r.Code() == 0:
			t.Errorf("reason %d (%v) ends with a Terminate of code 0", r, r)
		}
		seen[r.String()] = true
	}
	var a, b Counters
	a[ReasonKey], b[ReasonKey] = 1, 2
	a.Add(&b)
	sum := uint64(0)
	a.Each(func(_ string, v uint64) { sum += v })
	if sum != 3 {
		t.Errorf("sum %d", sum)
	}
}

// TestReasonsAreDocumented: docs/mpa.md has a row for each, with outcome, code and
// clause.
func TestReasonsAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../docs/mpa.md")
	if err != nil {
		t.Fatal(err)
	}
	for r := ReasonNone + 1; r < NumReasons; r++ {
		found := false
		for row := range strings.Lines(string(doc)) {
			cells := strings.Split(row, "|")
			if len(cells) != 7 || !strings.Contains(cells[1], "`"+r.String()+"`") {
				continue
			}
			found = true
			if !strings.Contains(cells[3], r.Outcome().String()) {
				t.Errorf("%v: the document's outcome is %q, want %v in it", r, cells[3], r.Outcome())
			}
			expect.Equal(t, strings.TrimSpace(cells[5]), r.Clause(), "%v: the document's clause", r)
			if r.Code() != 0 {
				expect.Equal(t, strings.TrimSpace(cells[4]), fmt.Sprint(uint8(r.Code())), "%v: the document's code", r)
			}
		}
		if !found {
			t.Errorf("%v is not in docs/mpa.md", r)
		}
	}
}

// TestTerminateCodes: what the codes look like in a Terminate.
func TestTerminateCodes(t *testing.T) {
	for c := CodeClosed; c <= CodeNoRTR; c++ {
		s, err := ParseSegment(AppendTerminate(nil, c.Cause()))
		if err != nil {
			t.Fatal(err)
		}
		got, perr := ParseTerminate(s.Payload)
		// 6581-8-1
		expect.Equal(t, perr, nil, "code %d: perr", c)
		expect.Equal(t, got, c.Cause(), "code %d: got", c)
		expect.Equal(t, got.Layer(), 2, "code %d: Layer", c)
		expect.Equal(t, got.Type(), 0, "code %d: Type", c)
		expect.Equal(t, got.Code(), uint8(c), "code %d: Code", c)
	}
	// 6581-8-5, 6581-8-1: layer 2, type 0, and the codes of RFC 5044 section 8
	// beside those of RFC 6581 section 8.
	for octets, code := range map[[2]byte]Code{
		{0x20, 1}: CodeClosed, {0x20, 2}: CodeCRC, {0x20, 3}: CodeMarker, {0x20, 4}: CodeFrame,
		{0x20, 5}: CodeLocal, {0x20, 6}: CodeInsufficient, {0x20, 7}: CodeNoRTR,
	} {
		s, err := ParseSegment(AppendTerminate(nil, code.Cause()))
		if err != nil {
			t.Fatal(err)
		}
		if got := [2]byte(s.Payload); got != octets {
			t.Errorf("a Terminate of code %d begins with % x, want % x", code, got, octets)
		}
	}
	if _, err := ParseTerminate([]byte{0x20}); err == nil {
		t.Error("a short Terminate was taken")
	}
}
