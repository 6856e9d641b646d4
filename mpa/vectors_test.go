package mpa

import (
	"bytes"
	"encoding/hex"
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
)

var unhex = vector.Hex

const (
	vecReqR1 = "4d504120494420526571204672616d6540010000"
	vecReqR2 = "4d504120494420526571204672616d655002000cc008c004f6ab0e1801010303"
	vecRepR2 = "4d504120494420526570204672616d655002000c80048008f6ab0e1801000303"
	vecRejR2 = "4d504120494420526570204672616d657002000480048010"

	vecRTRSend  = "0012414300000000000000000000000100000000587be8c4"
	vecRTRWrite = "000ec140000000010000000000000000ebd34c5f"
	vecRTRRead  = "002e4141000000000000000100000001000000000000000100000000000000000000000000000001" +
		"000000000000000027dbd7e7"
	vecRTRReadResp = "000ec14200000001000000000000000021a3e83e"
	vecTerm5       = "0016414700000000000000020000000100000000200500001680d5f1"
	vecTerm6       = "0016414700000000000000020000000100000000200600006540fb1b"
	vecTerm7       = "0016414700000000000000020000000100000000200700001bd2babe"
)

var (
	all4    = Enhanced{PeerToPeer: true, RTR: RTRAll, IRD: 8, ORD: 4}
	rpcData = unhex("f6ab0e1801010303")
)

func TestFrameVectors(t *testing.T) {
	// 6581-6-1, 6581-6-2, 6581-6-3, 6581-6-4, 6581-6-11: octets of whole frames.
	for _, tt := range []struct {
		name string
		f    Frame
		want string
	}{
		{"request of revision 1", Frame{CRC: true, Rev: 1}, vecReqR1},
		// 6581-9-1, 6581-9-3, 6581-9-4, 6581-9-5, 6581-9.2-1, 6581-9.2-2
		{"enhanced request", Frame{CRC: true, Rev: 2, S: true, Enhanced: all4, Private: rpcData}, vecReqR2},
		{"enhanced accept", Frame{Reply: true, CRC: true, Rev: 2, S: true,
			Enhanced: Enhanced{PeerToPeer: true, RTR: RTRWrite, IRD: 4, ORD: 8},
			Private:  unhex("f6ab0e1801000303")}, vecRepR2},
		// 6581-9.1-10: a rejection that needs ORD 16
		{"enhanced reject", Frame{Reply: true, CRC: true, Reject: true, Rev: 2, S: true,
			Enhanced: Enhanced{PeerToPeer: true, RTR: RTRWrite, IRD: 4, ORD: 16}}, vecRejR2},
	} {
		got, err := tt.f.AppendBinary(nil)
		if err != nil || hex.EncodeToString(got) != tt.want {
			t.Errorf("%s:\n got %x (%v)\nwant %s", tt.name, got, err, tt.want)
		}
		var f Frame
		if err := f.UnmarshalBinary(got); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		again, _ := f.AppendBinary(nil)
		if !bytes.Equal(again, got) {
			t.Errorf("%s: read and written again\n got %x\nwant %x", tt.name, again, got)
		}
	}
}

// TestFrameRefusals: what a frame must not say. 6581-6-8: revision 1 has no S. RFC
// 5044 section 7.1.1: R is a reply's.
func TestFrameRefusals(t *testing.T) {
	if b, err := (&Frame{Rev: 1, S: true}).AppendBinary(nil); err == nil {
		t.Errorf("S in revision 1 was sent: %x", b)
	}
	for reply, want := range map[bool]byte{false: 0, true: 0x20} {
		b, err := (&Frame{Rev: 2, Reply: reply, Reject: true}).AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		if b[16] != want {
			t.Errorf("reply %v: flags %#x, want %#x", reply, b[16], want)
		}
	}
}

func TestFPDUVectors(t *testing.T) {
	term := func(c Code) []byte { return AppendTerminate(nil, c.Cause()) }
	for _, tt := range []struct {
		name  string
		ulpdu []byte
		want  string
	}{
		// 6581-1.1-1: the three messages that carry an RTR indication
		{"RTR Send", AppendRTR(nil, RTRSend), vecRTRSend},
		{"RTR Write", AppendRTR(nil, RTRWrite), vecRTRWrite},
		{"RTR Read", AppendRTR(nil, RTRRead), vecRTRRead},
		{"answer to it", (&Segment{Opcode: OpReadResponse, Last: true, STag: 1}).AppendHeader(nil), vecRTRReadResp},
		// 6581-8-1, 6581-8-2, 6581-8-3, 6581-8-4, 6581-11-1
		{"Terminate 5", term(CodeLocal), vecTerm5},
		{"Terminate 6", term(CodeInsufficient), vecTerm6},
		{"Terminate 7", term(CodeNoRTR), vecTerm7},
	} {
		fr := Framer{CRC: true}
		if got := fr.Append(nil, tt.ulpdu, nil); hex.EncodeToString(got) != tt.want {
			t.Errorf("%s:\n got %x\nwant %s", tt.name, got, tt.want)
		}
		d := Deframer{CRC: true}
		u, rest, ok, err := d.Next(unhex(tt.want))
		expect.Equal(t, ok, true, "%s: ok", tt.name)
		if err != nil {
			t.Errorf("%s: err is %v, want nil", tt.name, err)
		}
		expect.Equal(t, len(rest), 0, "%s: length of rest", tt.name)
		if !bytes.Equal(u, tt.ulpdu) {
			t.Errorf("%s: u is %x, want %x", tt.name, u, tt.ulpdu)
		}
	}
}

// TestFigures: the two FPDUs of RFC 5044 appendix A, with markers.
func TestFigures(t *testing.T) {
	head := (&Segment{Opcode: OpSend, Last: true, QN: 0, MSN: 1}).AppendHeader(nil)
	fr := Framer{Markers: true, CRC: true}
	got := fr.Append(nil, head, make([]byte, 24))
	want := unhex("00000000002a4143" + "0000000000000000" + "00000001" + "00000000" +
		"000000000000000000000000000000000000000000000000" + "52239983")
	if !bytes.Equal(got, want) {
		t.Errorf("figure 5:\n got %x\nwant %x", got, want)
	}
	// The second one lies so that a marker falls behind its MO.
	fr.pos = markerInterval - 20
	head = (&Segment{Opcode: OpSend, Last: true, QN: 0, MSN: 2}).AppendHeader(nil)
	got = fr.Append(nil, head, make([]byte, 24))
	want = unhex("002a4143" + "0000000000000000" + "00000002" + "00000000" + "00000014" +
		"000000000000000000000000000000000000000000000000" + "84925898")
	if !bytes.Equal(got, want) {
		t.Errorf("figure 6:\n got %x\nwant %x", got, want)
	}
}
