package mpa

import (
	"bytes"
	"testing"

	"ipoibcm/internal/expect"
)

// enhancedWord is the first word of the private data of a startup frame.
func enhancedWord(b []byte) string { return string(b[20:24]) }

// TestULPDepths: 6581-9.1-17, 6581-9.1-18, 6581-9.1-20. 0x3fff in a request takes
// that depth out of the negotiation, octet by octet: the reply has 0x3fff in the
// other one's place, and the depth of the responder stays as it was.
func TestULPDepths(t *testing.T) {
	own := Depths{IRD: 8, ORD: 4}
	for _, tt := range []struct {
		name     string
		o        Options
		request  string // octets 20 to 23
		reply    string // of a responder with IRD 2 and ORD 3
		ird, ord Depth  // of the responder then
	}{
		{"both negotiated", Options{Negotiate: true}, "00080004", "00020003", 2, 3},
		{"IRD is the ULP's", Options{Negotiate: true, ULPIRD: true}, "3fff0004", "00023fff", 2, 3},
		{"ORD is the ULP's", Options{Negotiate: true, ULPORD: true}, "00083fff", "3fff0003", 2, 3},
		{"both are", Options{Negotiate: true, ULPIRD: true, ULPORD: true}, "3fff3fff", "3fff3fff", 2, 3},
		{"only the model is negotiated", Options{PeerToPeer: true}, "ffffffff", "ffffffff", 2, 3},
		{"with a Write", Options{PeerToPeer: true, RTR: RTRWrite}, "bfffbfff", "bfffbfff", 2, 3},
		{"with a Send", Options{PeerToPeer: true, RTR: RTRSend}, "ffff3fff", "ffff3fff", 2, 3},
		{"with a Read", Options{PeerToPeer: true, RTR: RTRRead}, "bfff7fff", "bfff7fff", 2, 3},
	} {
		tt.o.Depths = own
		m, request := asks(tt.o)
		if got := enhancedWord(request); got != string(unhex(tt.request)) {
			t.Errorf("%s: asked %x, want %s", tt.name, got, tt.request)
		}
		r, _, reply := answerTo(Options{Depths: Depths{IRD: 2, ORD: 3}}, bytes.Clone(request))
		if got := enhancedWord(reply); got != string(unhex(tt.reply)) {
			t.Errorf("%s: answered %x, want %s", tt.name, got, tt.reply)
		}
		expect.Equal(t, r.Result().IRD, tt.ird, "%s: the responder's IRD", tt.name)
		expect.Equal(t, r.Result().ORD, tt.ord, "%s: the responder's ORD", tt.name)
		m.Step(nil, t0, Recv{reply})
		wantORD := Depth(4)
		if tt.request[4:] == "0004" {
			wantORD = 2 // the responder's IRD
		}
		expect.Equal(t, m.Result().IRD, 8, "%s: the initiator's IRD", tt.name)
		expect.Equal(t, m.Result().ORD, wantORD, "%s: the initiator's ORD", tt.name)
	}
}

// TestULPDepthsInReply: 6581-9.1-17, 6581-9.1-19, 6581-9.1-21. 0x3fff in a reply,
// whatever was asked, leaves that depth of the initiator alone. As a number it
// would be more than anyone has.
func TestULPDepthsInReply(t *testing.T) {
	for _, tt := range []struct {
		words    string
		ird, ord Depth // of an initiator with IRD 8, ORD 4
	}{
		{"3fff3fff", 8, 4},
		{"3fff0002", 8, 4},
		{"00023fff", 8, 2},
		{"00003fff", 8, 0},
		{"3fff0000", 8, 4},
	} {
		m, _ := asks(Options{Negotiate: true, Depths: Depths{IRD: 8, ORD: 4}})
		reply := append([]byte("MPA ID Rep Frame"), 0x10, 2, 0, 4)
		acts := m.Step(nil, t0, Recv{append(reply, unhex(tt.words)...)})
		if _, ok := has[Established](acts); !ok {
			t.Errorf("%s: %+v", tt.words, acts)
		}
		expect.Equal(t, m.Result().IRD, tt.ird, "%s: IRD", tt.words)
		expect.Equal(t, m.Result().ORD, tt.ord, "%s: ORD", tt.words)
	}
}

// TestRegisteredValues: 6581-11-1, as the machines send them. The Terminates have
// layer, type and code in the first two octets behind DDP's and RDMAP's 18.
func TestRegisteredValues(t *testing.T) {
	reply := func(words string) []byte {
		return append(append([]byte("MPA ID Rep Frame"), 0x10, 2, 0, 4), unhex(words)...)
	}
	for _, tt := range []struct {
		name string
		o    Options
		ev   Event
		want string
	}{
		{"local catastrophic", Options{Negotiate: true}, nil, "2005"},
		{"insufficient IRD", Options{Negotiate: true}, Recv{reply("00000009")}, "2006"},
		{"no matching RTR", Options{PeerToPeer: true, RTR: RTRSend}, Recv{reply("bfff3fff")}, "2007"},
	} {
		m, _ := asks(tt.o)
		if tt.ev == nil {
			m.Step(nil, t0, Recv{reply("00000000")})
			tt.ev = Fail{"of the test"}
		}
		term, ok := has[SendTerminate](m.Step(nil, t0, tt.ev))
		if !ok {
			t.Errorf("%s: no Terminate", tt.name)
			continue
		}
		if got := AppendTerminate(nil, term.Code.Cause())[18:20]; string(got) != string(unhex(tt.want)) {
			t.Errorf("%s: layer, type and code %x, want %s", tt.name, got, tt.want)
		}
	}
}
