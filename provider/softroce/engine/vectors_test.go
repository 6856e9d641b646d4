package engine

import (
	"encoding/hex"
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// The vectors of wire/roce/testdata/vectors.txt that a queue pair makes by itself, from BTH through
// padding. A is QPN 0xa1, B is QPN 0xb2.
const (
	v9    = "0400ffff000000b280123456" + icmp9
	v10   = "1100ffff000000a1001234561f000001"
	v11   = "2400ffff000000b200000000" + icmp9
	v13   = "1100ffff000000a10012345760000001"
	v14   = "1100ffff000000a1001234572c000001"
	icmp9 = "080000004500001c00010000400166de0a0000010a0000020800f7ff00000000"
)

// vectorPair is A and B as the vectors have them.
func vectorPair(t *testing.T, tr ib.Transport, psn ib.PSN) *pair {
	return newPair(t, tr, func(c *Config, attr *verbs.QPAttr) {
		if c.QPN == 0xa2 {
			c.QPN = 0xb2
		}
		if attr.DestQPN == 0xa2 {
			attr.DestQPN = 0xb2
		}
		attr.RQPSN, attr.SQPSN = psn, psn
	})
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

func TestVectors(t *testing.T) {
	check := func(name string, got [][]byte, want string) {
		t.Helper()
		if len(got) != 1 {
			t.Fatalf("%s: %d packets", name, len(got))
		}
		if s := hex.EncodeToString(got[0][:len(got[0])-roce.ICRCLen]); s != want {
			t.Errorf("%s\n got %s\nwant %s", name, s, want)
		}
	}
	p := vectorPair(t, ib.RC, 0x123456)
	p.b.postRecv(1, make([]byte, 100))
	p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(unhex(icmp9), 4)})
	out := p.output(p.a)
	check("V9", out, v9)
	p.input(p.b, out[0])
	ack := p.output(p.b)
	check("V10", ack, v10)
	p.input(p.a, ack[0])

	// V14: no receive. V13: a gap.
	p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, 33))})
	out = p.output(p.a)
	expect.Equal(t, out[0][1], 0x30, "V12: second octet of the BTH")
	expect.Equal(t, len(out[0]), 12+36+4, "V12: length")
	p.input(p.b, out[0])
	check("V14", p.output(p.b), v14)
	p = vectorPair(t, ib.RC, 0x123456)
	p.b.postRecv(1, make([]byte, 100))
	for i := range 3 {
		p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(make([]byte, i))})
	}
	out = p.output(p.a)
	p.input(p.b, out[0])
	p.output(p.b)
	p.input(p.b, out[2])
	p.now = p.now.Add(patienceTime)
	p.b.Wake(p.now)
	p.b.dropEarly() // a gap that the NAK told would be in it
	check("V13", p.output(p.b), v13)

	u := vectorPair(t, ib.UC, 0)
	u.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(unhex(icmp9))})
	out = u.output(u.a)
	check("V11", out, v11)
}

// TestVectorSegments is V16: the ICRCs of a message in three segments.
func TestVectorSegments(t *testing.T) {
	p := vectorPair(t, ib.RC, 0x200000)
	msg := make([]byte, 600)
	for i := range msg {
		msg[i] = byte(i)
	}
	p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg(msg, 100, 300)})
	flow := roce.NewFlow(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"))
	out := p.output(p.a)
	if len(out) != 3 {
		t.Fatalf("%d packets", len(out))
	}
	for i, want := range []string{"38f336bf", "bdcb155e", "2910885d"} {
		covered := out[i][:len(out[i])-roce.ICRCLen]
		var got [4]byte
		flow.Sum(0xc123, covered, 0).Put(got[:])
		if n := len(out[i]) + 28; n != []int{300, 300, 132}[i] || hex.EncodeToString(got[:]) != want {
			t.Errorf("segment %d: IP length %d, ICRC %x, want %s", i, n, got, want)
		}
	}
}
