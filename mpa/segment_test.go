package mpa

import (
	"bytes"
	"reflect"
	"testing"

	"ipoibcm/internal/expect"
)

func TestSegments(t *testing.T) {
	for _, s := range []Segment{
		{Opcode: OpWrite, Last: true, STag: 0x01020304, TO: 0x1122334455667788, Payload: []byte("abc")},
		{Opcode: OpReadResponse, STag: 9, TO: 1 << 63, Payload: []byte("abc")},
		{Opcode: OpSend, MSN: 1, MO: 1000, Payload: []byte("x")},
		{Opcode: OpSendInvalidate, Last: true, STag: 0xdeadbeef, MSN: 7, Payload: []byte{}},
		{Opcode: OpSendSolicited, Last: true, MSN: 1 << 31, Payload: []byte("y")},
		{Opcode: OpSendSolicitedInvalidate, Last: true, STag: 5, MSN: 3, Payload: []byte("y")},
		{Opcode: OpReadRequest, Last: true, QN: QueueRead, MSN: 2, Payload: ReadRequest{1, 2, 3, 4, 5}.Append(nil)},
	} {
		b := append(s.AppendHeader(nil), s.Payload...)
		got, err := ParseSegment(b)
		if err != nil || !reflect.DeepEqual(got, s) {
			t.Errorf("%v:\n got %+v (%v)\nwant %+v", s.Opcode, got, err, s)
		}
		// Reserved bits are not looked at.
		b[0] |= 0x3c
		b[1] |= 0x30
		if got, err := ParseSegment(b); err != nil || got.Opcode != s.Opcode {
			t.Errorf("%v with reserved bits: %v", s.Opcode, err)
		}
	}
	var r ReadRequest
	if err := r.UnmarshalBinary(ReadRequest{1, 2, 3, 4, 5}.Append(nil)); err != nil || r != (ReadRequest{1, 2, 3, 4, 5}) {
		t.Errorf("%+v %v", r, err)
	}
	if r.UnmarshalBinary(make([]byte, 27)) == nil {
		t.Error("a Read Request of 27 octets was taken")
	}
}

// Octets 2 to 5 of a Send that invalidates nothing are zero (RFC 5040 section 5.3).
func TestSendNamesNoSTag(t *testing.T) {
	for _, op := range []Opcode{OpSend, OpSendSolicited, OpReadRequest, OpTerminate} {
		b := (&Segment{Opcode: op, STag: 0x01020304}).AppendHeader(nil)
		if got := string(b[2:6]); got != "\x00\x00\x00\x00" {
			t.Errorf("%v: %x", op, got)
		}
	}
}

func TestBadSegments(t *testing.T) {
	u := func(b ...byte) []byte { return append(b, make([]byte, UntaggedLen-len(b))...) }
	queue := func(n byte, op byte) []byte { b := u(0x41, 0x40|op); b[9] = n; return b }
	for _, tt := range []struct {
		name string
		in   []byte
		want Cause
	}{
		{"nothing", nil, DDPCatastrophic},
		{"too short for a tagged header", make([]byte, 13), DDPCatastrophic},
		{"too short for an untagged header", u(0x41, 0x43)[:17], DDPCatastrophic},
		{"DDP version 0, tagged", u(0xc0, 0x40), DDPTaggedVersion},
		{"DDP version 2, untagged", u(0x42, 0x43), DDPUntaggedVersion},
		{"RDMAP version 0", u(0x41, 0x03), RDMAPVersion},
		{"unknown opcode", u(0x41, 0x48), RDMAPOpcode},
		{"tagged Send", u(0xc1, 0x43), RDMAPOpcode},
		{"untagged Write", u(0x41, 0x40), RDMAPOpcode},
		{"queue 3", queue(3, 3), DDPQueue},
		{"Send on queue 1", queue(1, 3), RDMAPOpcode},
		{"Read Request on queue 0", queue(0, 1), RDMAPOpcode},
	} {
		if _, err := ParseSegment(tt.in); err == nil || err.Cause != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}

func TestRTRSegments(t *testing.T) {
	for _, k := range []RTRTypes{RTRSend, RTRWrite, RTRRead} {
		s := rtrSegment(k)
		if s.RTR() != k {
			t.Errorf("%v is seen as %v", k, s.RTR())
		}
		s.Last = false
		if s.RTR() != 0 {
			t.Errorf("a part of %v is seen as %v", k, s.RTR())
		}
	}
	s := Segment{Opcode: OpReadRequest, Last: true, QN: 1, MSN: 1, Payload: ReadRequest{Size: 1}.Append(nil)}
	expect.Equal(t, s.RTR(), 0, "RTR of a Read Request for an octet")
	expect.Equal(t, dataSegment.RTR(), 0, "RTR of a Send with data")
}

func TestMULPDU(t *testing.T) {
	for _, tt := range []struct {
		emss    int
		markers bool
		want    int
	}{
		{1460, false, 1454}, {1460, true, 1442}, {1448, false, 1442}, {1461, false, 1454},
		{100, true, 128}, {1 << 20, false, MaxULPDU},
	} {
		if got := MULPDU(tt.emss, tt.markers); got != tt.want {
			t.Errorf("EMSS %d, markers %v: %d, want %d", tt.emss, tt.markers, got, tt.want)
		}
	}
}

// frames gives in to d in portions of step octets.
func frames(d *Deframer, in []byte, step int) (out [][]byte, err *Error) {
	for len(in) > 0 {
		p := in[:min(step, len(in))]
		in = in[len(p):]
		for {
			u, rest, ok, e := d.Next(p)
			if e != nil {
				return out, e
			}
			if !ok {
				break
			}
			out, p = append(out, bytes.Clone(u)), rest
		}
	}
	return out, nil
}

func TestStream(t *testing.T) {
	sizes := []int{0, 1, 2, 3, 4, 14, 18, 500, 505, 506, 507, 508, 512, 1018, 1454, 9000, MaxULPDU, 21}
	for i := range 4 {
		markers, crc := i&1 != 0, i&2 != 0
		fr := Framer{Markers: markers, CRC: crc}
		var stream []byte
		var want [][]byte
		for round := range 3 {
			for k, n := range sizes {
				b := make([]byte, n)
				for j := range b {
					b[j] = byte(j*7 + k + round)
				}
				want = append(want, b)
				stream = fr.Append(stream, b[:n/3], b[n/3:])
			}
		}
		if len(stream)%4 != 0 {
			t.Errorf("%d octets", len(stream))
		}
		if markers { // every 512 octets, reserved half and low bits zero
			for at := 0; at < len(stream); at += 512 {
				m := stream[at : at+4]
				expect.MustEqual(t, m[0], 0, "m[0]")
				expect.MustEqual(t, m[1], 0, "m[1]")
				expect.MustEqual(t, m[3]&3, 0, "m[3]&3")
			}
		}
		for _, step := range []int{1, 3, 4, 511, 512, 513, 1460, len(stream)} {
			d := Deframer{Markers: markers, CRC: crc}
			got, err := frames(&d, stream, step)
			if err != nil {
				t.Fatalf("markers %v CRC %v step %d: %v", markers, crc, step, err)
			}
			expect.MustEqual(t, len(got), len(want), "markers %v CRC %v step %d: number of FPDUs", markers, crc, step)
			for k := range got {
				if !bytes.Equal(got[k], want[k]) {
					t.Fatalf("markers %v CRC %v step %d: FPDU %d differs", markers, crc, step, k)
				}
			}
			expect.Equal(t, d.Partial(), false, "Partial at the end")
			if cap(d.buf) > 2*MaxULPDU {
				t.Errorf("left over: a buffer of %d octets, want %d at most", cap(d.buf), 2*MaxULPDU)
			}
		}
	}
}

func TestBadStream(t *testing.T) {
	for _, markers := range []bool{false, true} {
		fr := Framer{Markers: markers, CRC: true}
		good := fr.Append(nil, make([]byte, 1000), nil)
		for at := range good {
			for _, step := range []int{7, len(good)} {
				bad := bytes.Clone(good)
				bad[at] ^= 0x10
				d := Deframer{Markers: markers, CRC: true}
				got, err := frames(&d, bad, step)
				// A changed length may just make it wait for more.
				switch {
				case len(got) != 0:
					t.Fatalf("octet %d changed, markers %v: got has %v elements, want 0", at, markers, len(got))
				case err == nil && !d.Partial():
					t.Fatalf("octet %d changed, markers %v: Partial is false, want true", at, markers)
				}
				if err == nil {
					continue
				}
				if err.Code() != CodeCRC && err.Code() != CodeMarker {
					t.Fatalf("octet %d changed: %v has code %v, want %v or %v", at, err, err.Code(), CodeCRC, CodeMarker)
				}
				_, _, ok, again := d.Next(good)
				if ok {
					t.Fatalf("octet %d changed: a ULPDU came after the error %v", at, err)
				}
				if again == nil {
					t.Fatalf("octet %d changed: no error after the error %v", at, err)
				}
			}
		}
	}
	d := Deframer{}
	if _, err := frames(&d, []byte{0xfd, 0x01, 0, 0}, 1); err == nil || err.Reason != ReasonULPDULength {
		t.Errorf("ULPDU_Length 0xfd01: %v", err)
	}
	d = Deframer{Max: 100}
	if _, err := frames(&d, []byte{0, 101}, 2); err == nil {
		t.Error("longer than the limit was taken")
	}
	d = Deframer{Markers: true}
	if _, err := frames(&d, []byte{0, 0, 0, 4}, 4); err == nil || err.Code() != CodeMarker {
		t.Errorf("first marker points back: %v", err)
	}
}

func BenchmarkFPDU(b *testing.B) {
	for _, crc := range []bool{false, true} {
		name := "plain"
		if crc {
			name = "crc"
		}
		b.Run(name, func(b *testing.B) {
			payload, buf := make([]byte, 1436), []byte(nil)
			fr, d := Framer{CRC: crc}, Deframer{CRC: crc}
			s := Segment{Opcode: OpWrite, Last: true}
			var head [UntaggedLen]byte
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			for b.Loop() {
				buf = fr.Append(buf[:0], s.AppendHeader(head[:0]), payload)
				if _, _, ok, _ := d.Next(buf); !ok {
					b.Fatal("lost")
				}
			}
		})
	}
}
