package vectors

import (
	"encoding/hex"
	"strings"
	"time"

	"ipoibcm/mpa"
)

func mpaFile() file {
	f := file{Title: "MPA revision 2 (RFC 6581): startup frames, and what two ends settle on"}
	peer := mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRAll, IRD: 8, ORD: 4}
	for _, tt := range []struct {
		name, note string
		f          mpa.Frame
	}{
		{"request of revision 1", "nothing is negotiated", mpa.Frame{CRC: true, Rev: 1}},
		{"enhanced request", "IRD 8, ORD 4, an RTR of any type; private data of RFC 8797 behind",
			mpa.Frame{CRC: true, Rev: 2, S: true, Enhanced: peer,
				Private: []byte{0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3}}},
		{"enhanced request, client-server", "without A the flags B, C and D are zero",
			mpa.Frame{Rev: 2, S: true, Enhanced: mpa.Enhanced{IRD: 1, ORD: 16}}},
		{"enhanced request, ORD left to the ULP", "0x3FFF is a mark and no number",
			mpa.Frame{Rev: 2, S: true, Enhanced: mpa.Enhanced{IRD: 1, ORD: mpa.DepthULP}}},
		{"enhanced accept", "a zero-length Write is the RTR", mpa.Frame{Reply: true, CRC: true, Rev: 2, S: true,
			Enhanced: mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRWrite, IRD: 4, ORD: 8}}},
		{"enhanced reject", "the responder needs an ORD of 16",
			mpa.Frame{Reply: true, CRC: true, Reject: true, Rev: 2, S: true,
				Enhanced: mpa.Enhanced{PeerToPeer: true, RTR: mpa.RTRWrite, IRD: 4, ORD: 16}}},
	} {
		f.samples = append(f.samples, frame(tt.name, tt.note, tt.f))
	}
	f.Decisions = negotiations()
	return f
}

func frame(name, note string, m mpa.Frame) sample {
	s := sample{name: "MPA " + name, note: note}
	key := "MPA ID Req Frame"
	if m.Reply {
		key = "MPA ID Rep Frame"
	}
	n := len(m.Private)
	if m.S {
		n += mpa.EnhancedLen
	}
	s.raw("key: "+key, []byte(key), "RFC 5044 section 7.1.1")
	s.word("M, markers", 1, flag1(m.Markers), "RFC 5044 section 7.1.1")
	s.word("C, CRC", 1, flag1(m.CRC), "RFC 5044 section 7.1.1")
	s.word("R, rejected", 1, flag1(m.Reject), "RFC 5044 section 7.1.1")
	s.word("S, enhanced", 1, flag1(m.S), "RFC 6581 section 6")
	s.word("reserved", 4, 0, "RFC 6581 section 6")
	s.word("revision", 8, uint64(m.Rev), "RFC 6581 section 6")
	s.word("private data length", 16, uint64(n), "RFC 6581 section 6")
	if m.S {
		s.enhanced(m.Enhanced)
	}
	s.raw("private data of the ULP", m.Private, "RFC 6581 section 9")
	s.encode = func() ([]byte, error) { return m.AppendBinary(nil) }
	if m.Private == nil {
		m.Private = []byte{}
	}
	s.want = m
	s.decode = func(b []byte) (any, error) { var f mpa.Frame; err := f.UnmarshalBinary(b); return f, err }
	return s
}

func (s *sample) enhanced(e mpa.Enhanced) {
	const clause = "RFC 6581 section 9"
	s.word("A, peer-to-peer", 1, flag1(e.PeerToPeer), clause)
	s.word("B, RTR by Send", 1, flag1(e.RTR&mpa.RTRSend != 0), clause)
	s.word("IRD", 14, uint64(e.IRD), clause)
	s.word("C, RTR by RDMA Write", 1, flag1(e.RTR&mpa.RTRWrite != 0), clause)
	s.word("D, RTR by RDMA Read", 1, flag1(e.RTR&mpa.RTRRead != 0), clause)
	s.word("ORD", 14, uint64(e.ORD), clause)
}

// negotiations are two machines against each other: depths asked for, types of RTR
// that the initiator can send and the responder takes, and what comes of it.
func negotiations() (all []decision) {
	for _, tt := range []struct {
		name       string
		initiator  mpa.Options
		responder  mpa.Options
		start, end object // depths of initiator and responder when it is settled
		rtr        string
	}{
		{"both have what the other asks for", depths(8, 4, mpa.RTRAll), depths(8, 8, mpa.RTRAll),
			object{"ird": 8, "ord": 4}, object{"ird": 8, "ord": 8}, "C"},
		{"the responder's ORD is more than the initiator's IRD", depths(2, 2, mpa.RTRAll), depths(8, 8, mpa.RTRAll),
			object{"ird": 2, "ord": 2}, object{"ird": 8, "ord": 2}, "C"},
		{"the initiator's ORD is more than the responder's IRD", depths(4, 16, mpa.RTRAll), depths(4, 4, mpa.RTRAll),
			object{"ird": 4, "ord": 4}, object{"ird": 4, "ord": 4}, "C"},
		{"only the Send is taken", depths(4, 4, mpa.RTRAll), depths(4, 4, mpa.RTRSend),
			object{"ird": 4, "ord": 4}, object{"ird": 4, "ord": 4}, "B"},
		{"only a Read can be sent, and needs a depth of 1", depths(0, 0, mpa.RTRRead), depths(0, 0, mpa.RTRAll),
			object{"ird": 0, "ord": 1}, object{"ird": 1, "ord": 0}, "D"},
		{"no type in common: the initiator sends TERM 2, 0, 7", depths(4, 4, mpa.RTRSend), depths(4, 4, mpa.RTRWrite),
			nil, nil, ""},
	} {
		d := decision{Rule: "mpa", Name: tt.name, Clause: "RFC 6581 section 9",
			Given: object{"initiator": asked(tt.initiator), "responder": asked(tt.responder)}}
		d.decide = func() object { return settle(tt.initiator, tt.responder) }
		d.Want = d.decide()
		// What was expected above is held against what came out.
		expect := object{"rtr": tt.rtr, "initiator": tt.start, "responder": tt.end}
		if tt.rtr == "" {
			expect = object{"terminate": "2, 0, 7"}
		}
		expect["request"], expect["reply"] = d.Want["request"], d.Want["reply"]
		d.Want = expect
		all = append(all, d)
	}
	return all
}

func depths(ird, ord mpa.Depth, rtr mpa.RTRTypes) mpa.Options {
	return mpa.Options{Depths: mpa.Depths{IRD: ird, ORD: ord}, Negotiate: true, PeerToPeer: true, RTR: rtr}
}

func asked(o mpa.Options) object {
	return object{"ird": int(o.IRD), "ord": int(o.ORD), "rtr": flags(o.RTR)}
}

// flags names the types of RTR by the flags that stand for them.
func flags(r mpa.RTRTypes) string {
	var b strings.Builder
	for i, name := range []string{"B", "C", "D"} {
		if r>>i&1 != 0 {
			b.WriteString(name)
		}
	}
	return b.String()
}

// settle runs both machines, and returns frames and outcome.
func settle(io, ro mpa.Options) object {
	now := time.Unix(0, 0)
	i, err := mpa.NewInitiator(io, nil)
	if err != nil {
		return object{"error": err.Error()}
	}
	r, err := mpa.NewResponder(ro)
	if err != nil {
		return object{"error": err.Error()}
	}
	request := written(i.Step(nil, now, mpa.Start{}))
	r.Step(nil, now, mpa.Start{})
	r.Step(nil, now, mpa.Recv{Data: request})
	reply := written(r.Step(nil, now, mpa.Accept{}))
	o := object{"request": hex.EncodeToString(request), "reply": hex.EncodeToString(reply)}
	for _, a := range i.Step(nil, now, mpa.Recv{Data: reply}) {
		switch a := a.(type) {
		case mpa.SendTerminate:
			o["terminate"] = "2, 0, " + string(rune('0'+a.Code.Cause().Code()))
		case mpa.Established:
			o["rtr"] = flags(a.Result.RTR)
			o["initiator"] = object{"ird": int(a.Result.IRD), "ord": int(a.Result.ORD)}
			o["responder"] = object{"ird": int(r.Result().IRD), "ord": int(r.Result().ORD)}
		}
	}
	return o
}

// written returns a copy of what is to go out.
func written(acts []mpa.Action) []byte {
	for _, a := range acts {
		if w, ok := a.(mpa.Write); ok {
			return append([]byte(nil), w.Data...)
		}
	}
	return nil
}
