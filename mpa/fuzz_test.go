package mpa

import (
	"bytes"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

func FuzzFrame(f *testing.F) {
	for _, s := range []string{vecReqR1, vecReqR2, vecRepR2, vecRejR2} {
		f.Add(unhex(s))
	}
	f.Add(frameBy(false, 0x1f, 2, "BCD", u, u, "x")) // reserved bits, flags without A
	f.Add(frameBy(false, 0x10, 3, "A", 1, 1, ""))
	f.Add(append(unhex(vecReqR1)[:18], 0xff, 0xff))
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b Frame
		if a.UnmarshalBinary(in) != nil {
			return
		}
		out, err := a.AppendBinary(nil)
		if err != nil || b.UnmarshalBinary(out) != nil {
			t.Fatalf("%+v cannot be written: %v", a, err)
		}
		if !a.Reply {
			a.Reject = false // means nothing there
		}
		if a.S && !a.Enhanced.PeerToPeer {
			a.Enhanced.RTR = 0 // likewise
		}
		if !bytes.Equal(a.Private, b.Private) {
			t.Fatalf("%x, then %x", a.Private, b.Private)
		}
		a.Private, b.Private = nil, nil
		expect.MustEqual(t, a.Enhanced, b.Enhanced, "Enhanced")
		expect.MustEqual(t, a.Rev, b.Rev, "Rev")
		expect.MustEqual(t, a.S, b.S, "S")
		expect.MustEqual(t, a.Reply, b.Reply, "Reply")
		expect.MustEqual(t, a.Reject, b.Reject, "Reject")
		expect.MustEqual(t, a.CRC, b.CRC, "CRC")
		expect.MustEqual(t, a.Markers, b.Markers, "Markers")
	})
}

// FuzzMachines lets octets decide what happens to an initiator and a responder:
// they never panic, say Failed and Established at most once each, and nothing
// after Failed. Octets that drip, one per second, lead to Failed whatever they are.
func FuzzMachines(f *testing.F) {
	f.Add(byte(0), unhex(vecReqR2), unhex(vecRepR2))
	f.Add(byte(7), unhex(vecReqR1), unhex(vecRejR2))
	f.Add(byte(0x35), frameBy(false, 0x10, 2, "ABCD", 1, 1, ""), frameBy(true, 0x10, 2, "AD", 0, 9, ""))
	f.Add(byte(0x13), unhex(vecReqR2), unhex(vecRepR2))
	f.Fuzz(func(t *testing.T, mode byte, req, rep []byte) {
		o := Options{Negotiate: mode&1 != 0, PeerToPeer: mode&2 != 0, Fallback: mode&4 != 0, StrictIRD: mode&8 != 0,
			Depths: Depths{IRD: Depth(mode >> 6), ORD: Depth(mode >> 5 & 3), MaxIRD: 2}}
		i, err := NewInitiator(o, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, _ := NewResponder(o)
		for k, m := range []machine{i, r} {
			fuzzMachine(t, m, mode, [][]byte{rep, req}[k])
		}
	})
}

// A machine is either end.
type machine interface {
	Step([]Action, time.Time, Event) []Action
	Deadline() time.Time
}

// fuzzMachine has m read in, whole, in two parts or octet by octet, as mode says, and then
// whatever else may happen. It must end once, and never be up after octets that dripped.
func fuzzMachine(t *testing.T, m machine, mode byte, in []byte) {
	t.Helper()
	drips := mode&0x10 != 0
	var acts []Action
	now := t0
	step := func(ev Event) {
		n := len(acts)
		acts = m.Step(acts, now, ev)
		for j, a := range acts[n:] {
			switch a := a.(type) {
			case Redial:
				acts = m.Step(acts, now, Start{})
			case Request:
				acts = m.Step(acts, now, Accept{Private: a.Private[:min(len(a.Private), MaxULPData(true))]})
			case Failed:
				if n+j != len(acts)-1 {
					t.Fatalf("after Failed: %s", said(acts))
				}
			}
		}
	}
	step(Start{})
	cut := int(mode) % (len(in) + 1)
	if drips {
		for _, b := range in {
			now = now.Add(time.Second)
			step(Wake{})
			step(Recv{[]byte{b}})
		}
	} else {
		step(Recv{in[:cut]})
		step(Recv{in[cut:]})
	}
	step(FPDU{dataSegment})
	now = now.Add(time.Minute)
	step(Wake{})
	step(PeerClosed{})
	step(Fail{})
	failed, up := 0, 0
	for _, a := range acts {
		switch a.(type) {
		case Failed:
			failed++
		case Established:
			up++
		}
	}
	if drips {
		expect.MustEqual(t, failed, 1, "octets dripped: how many Failed of %s", said(acts))
		expect.MustEqual(t, up, 0, "octets dripped: how many Established of %s", said(acts))
	}
	switch {
	case failed > 1:
		t.Fatalf("failed is %v, want at most 1", failed)
	case up > 1:
		t.Fatalf("up is %v, want at most 1", up)
	case !m.Deadline().IsZero():
		t.Fatalf("Deadline.IsZero is false, want true")
	}
}

func FuzzDeframer(f *testing.F) {
	fr := Framer{Markers: true, CRC: true}
	good := fr.Append(fr.Append(nil, make([]byte, 600), nil), AppendRTR(nil, RTRRead), nil)
	f.Add(byte(3), byte(10), good)
	f.Add(byte(0), byte(1), unhex(vecRTRRead+vecTerm5))
	f.Add(byte(2), byte(255), unhex(vecRTRRead+vecTerm5))
	f.Fuzz(func(t *testing.T, mode, step byte, in []byte) {
		limit := 2000
		whole := Deframer{Markers: mode&1 != 0, CRC: mode&2 != 0, Max: limit}
		parts := whole
		a, err1 := frames(&whole, in, max(1, len(in)))
		b, err2 := frames(&parts, in, max(1, int(step)))
		expect.MustEqual(t, len(a), len(b), "cut differently it is different: length of a")
		expect.MustEqual(t, err1 == nil, err2 == nil, "cut differently it is different: err1 == nil")
		if err1 != nil && err1.Reason != err2.Reason {
			t.Fatalf("cut differently it is different: Reason is %v, want %v", err1.Reason, err2.Reason)
		}
		for i := range a {
			if !bytes.Equal(a[i], b[i]) {
				t.Fatalf("FPDU %d differs", i)
			}
			if len(a[i]) > limit {
				t.Fatalf("ULPDU of %d octets", len(a[i]))
			}
			if s, err := ParseSegment(a[i]); err == nil {
				var r ReadRequest
				_ = r.UnmarshalBinary(s.Payload)
				_, _ = ParseTerminate(s.Payload)
				_, _ = s.RTR(), s.String()
				again, err := ParseSegment(append(s.AppendHeader(nil), s.Payload...))
				if err != nil {
					t.Fatalf("err is %v, want nil", err)
				}
				expect.MustEqual(t, again.String(), s.String(), "String")
				expect.MustEqual(t, again.TO, s.TO, "TO")
				expect.MustEqual(t, again.MSN, s.MSN, "MSN")
			}
		}
		if cap(whole.buf) > 4*limit || cap(parts.buf) > 4*limit {
			t.Fatalf("buffers of %d and %d octets", cap(whole.buf), cap(parts.buf))
		}
	})
}
