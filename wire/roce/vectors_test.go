package roce_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

var unhex = vector.Hex

// vectors reads testdata/vectors.txt: whole IP packets by name.
func vectors(t testing.TB) map[string][]byte { return vector.File(t, "testdata/vectors.txt") }

var (
	a4, b4 = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	a6, b6 = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
)

// build makes a whole packet from its parts, as a sender does.
func build(h roce.IPHeader, f roce.BTHFields, ext, payload []byte) []byte {
	f.Pad = roce.Pad(len(payload))
	n := roce.BTHLen + len(ext) + len(payload) + f.Pad + roce.ICRCLen
	p := h.Append(nil, n)
	hdr := make([]byte, roce.BTHLen, roce.BTHLen+len(ext))
	roce.PutBTH(hdr, f)
	hdr = append(hdr, ext...)
	tail := make([]byte, f.Pad)
	c := roce.NewFlow(h.Src, h.Dst).Start(h.SrcPort, n, h.ID).BTH(hdr).Update(hdr[roce.BTHLen:]).
		Update(payload).Update(tail)
	p = append(append(append(p, hdr...), payload...), tail...)
	p = append(p, 0, 0, 0, 0)
	c.Put(p[len(p)-4:])
	return p
}

func deth(k ib.QKey, src ib.QPN) []byte {
	b := bytes.Repeat([]byte{0xaa}, roce.DETHLen) // Put overwrites the reserved octet
	roce.PutDETH(b, k, src)
	return b
}

func aeth(s roce.Syndrome, msn uint32) []byte {
	b := make([]byte, roce.AETHLen)
	roce.PutAETH(b, s, msn)
	return b
}

const (
	echo = "08000000" + "4500001c00010000400166de0a0000010a0000020800f7ff00000000"
	udp1 = "08000000" + "4500001d00010000401166cd0a0000010a000002000900090009000041"
)

// TestVectors builds V8 to V15 from their fields and compares octet for octet,
// then reads them back.
func TestVectors(t *testing.T) {
	vs := vectors(t)
	ab := roce.IPHeader{Src: a4, Dst: b4, HopLimit: 64, SrcPort: 0xc123}
	ba := roce.IPHeader{Src: b4, Dst: a4, HopLimit: 64, SrcPort: 0xc123}
	ab6 := roce.IPHeader{Src: a6, Dst: b6, HopLimit: 64, SrcPort: 0xc123}
	arp := append(unhex("08060000"), unhex("0020080014040001"+
		"8000012300000000000000000000ffffc0000201"+"0a000001"+strings.Repeat("00", 20)+"0a000002")...)
	for _, tt := range []struct {
		name    string
		ip      roce.IPHeader
		f       roce.BTHFields
		ext     []byte
		payload []byte
	}{
		{"V8", ab, roce.BTHFields{Opcode: roce.UDSendOnly, PKey: ib.DefaultPKey, DestQPN: ib.QPNMulticast, PSN: 7},
			deth(ib.QKeyIPoIB, 0x123), arp},
		{"V9", ab, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey, DestQPN: 0xb2, AckReq: true,
			PSN: 0x123456}, nil, unhex(echo)},
		{"V10", ba, roce.BTHFields{Opcode: roce.RCAck, PKey: ib.DefaultPKey, DestQPN: 0xa1, PSN: 0x123456},
			aeth(roce.SyndromeACK, 1), nil},
		{"V11", ab, roce.BTHFields{Opcode: roce.UCSendOnly, PKey: ib.DefaultPKey, DestQPN: 0xb2}, nil, unhex(echo)},
		{"V12", ab, roce.BTHFields{Opcode: roce.RCSendOnly, PKey: ib.DefaultPKey, DestQPN: 0xb2, AckReq: true,
			PSN: 0x123457}, nil, unhex(udp1)},
		{"V13", ba, roce.BTHFields{Opcode: roce.RCAck, PKey: ib.DefaultPKey, DestQPN: 0xa1, PSN: 0x123457},
			aeth(roce.NAKSequence, 1), nil},
		{"V14", ba, roce.BTHFields{Opcode: roce.RCAck, PKey: ib.DefaultPKey, DestQPN: 0xa1, PSN: 0x123457},
			aeth(roce.RNRSyndrome(12), 1), nil},
		{"V15", ab6, roce.BTHFields{Opcode: roce.UDSendOnly, PKey: ib.DefaultPKey, DestQPN: 0x456, PSN: 9},
			deth(ib.QKeyIPoIB, 0x123), unhex(echo)},
	} {
		want := vs[tt.name]
		if got := build(tt.ip, tt.f, tt.ext, tt.payload); !bytes.Equal(got, want) {
			t.Errorf("%s:\n got %x\nwant %x", tt.name, got, want)
			continue
		}
		ip, p := mustParse(t, want)
		if ip != tt.ip {
			t.Errorf("%s: IP header %+v, want %+v", tt.name, ip, tt.ip)
		}
		tt.f.Pad = roce.Pad(len(tt.payload))
		if got := fields(p.BTH); got != tt.f {
			t.Errorf("%s: BTH %+v, want %+v", tt.name, got, tt.f)
		}
		if !bytes.Equal(p.Payload, tt.payload) {
			t.Errorf("%s: payload %x, want %x", tt.name, p.Payload, tt.payload)
		}
	}
	_, p := mustParse(t, vs["V8"])
	expect.Equal(t, p.DETH().QKey(), ib.QKeyIPoIB, "V8: Q_Key")
	expect.Equal(t, p.DETH().SrcQPN(), 0x123, "V8: source QPN")
	_, p = mustParse(t, vs["V14"])
	s := p.AETH().Syndrome()
	expect.Equal(t, s.IsRNR(), true, "V14: IsRNR")
	expect.Equal(t, s.RNRTimer(), 12, "V14: RNRTimer")
	expect.Equal(t, p.AETH().MSN(), 1, "V14: AETH.MSN")
}

func fields(h roce.BTH) roce.BTHFields {
	return roce.BTHFields{Opcode: h.Opcode(), Solicited: h.Solicited(), Pad: h.Pad(), PKey: h.PKey(),
		DestQPN: h.DestQPN(), AckReq: h.AckReq(), PSN: h.PSN()}
}

func mustParse(t testing.TB, ip []byte) (h roce.IPHeader, p roce.Packet) {
	t.Helper()
	h, payload, err := rocetest.ParseIP(ip)
	if err == nil {
		err = p.Parse(payload)
	}
	if err != nil {
		t.Fatalf("%v in %x", err, ip)
	}
	return h, p
}

// TestVectorSegmentation is V16: 600 octets at path MTU 256.
func TestVectorSegmentation(t *testing.T) {
	msg := make([]byte, 600)
	for i := range msg {
		msg[i] = byte(i)
	}
	for _, tt := range []struct {
		op    roce.Opcode
		psn   ib.PSN
		part  []byte
		icrc  string
		ipLen int
	}{
		{roce.RCSendFirst, 0x200000, msg[:256], "38f336bf", 300},
		{roce.RCSendMiddle, 0x200001, msg[256:512], "bdcb155e", 300},
		{roce.RCSendLast, 0x200002, msg[512:], "2910885d", 132},
	} {
		p := build(roce.IPHeader{Src: a4, Dst: b4, HopLimit: 64, SrcPort: 0xc123},
			roce.BTHFields{Opcode: tt.op, PKey: ib.DefaultPKey, DestQPN: 0xb2, AckReq: tt.op.Ends(), PSN: tt.psn}, nil, tt.part)
		expect.Equal(t, hex.EncodeToString(p[len(p)-4:]), tt.icrc, "%v: ICRC", tt.op)
		expect.Equal(t, len(p), tt.ipLen, "%v: octets", tt.op)
	}
}

// TestICRCVectors checks every vector, and the packet of an adapter whose
// BTH octet 4 and identification are not zero.
func TestICRCVectors(t *testing.T) {
	for name, ip := range vectors(t) {
		if ok, err := rocetest.CheckIP(ip); err != nil || !ok {
			t.Errorf("%s: ICRC right = %v, %v", name, ok, err)
		}
		h, p := mustParse(t, ip)
		if id, ok := roce.NewFlow(h.Src, h.Dst).Verify(h.SrcPort, &p); !ok || id != h.ID {
			t.Errorf("%s: identification %#x, %v; want %#x", name, id, ok, h.ID)
		}
		sealed := bytes.Clone(ip)
		clear(sealed[len(sealed)-4:])
		if err := rocetest.Seal(sealed); err != nil || !bytes.Equal(sealed, ip) {
			t.Errorf("%s: sealed %x (%v), want %x", name, sealed, err, ip)
		}
		// What routers may change is not covered.
		c := bytes.Clone(ip)
		c[roceOffset(c)+4] ^= 0xff // FECN, BECN
		if c[0]>>4 == 4 {
			c[1], c[8] = c[1]^0x03, c[8]-1
			fixChecksum(c)
		} else {
			c[1], c[7] = c[1]^0x3f, c[7]-1
		}
		if ok, err := rocetest.CheckIP(c); err != nil || !ok {
			t.Errorf("%s: ICRC right = %v, %v after a hop", name, ok, err)
		}
	}
}

func roceOffset(ip []byte) int {
	if ip[0]>>4 == 4 {
		return 28
	}
	return 48
}

func fixChecksum(ip []byte) {
	ip[10], ip[11] = 0, 0
	var s uint32
	for i := 0; i < 20; i += 2 {
		s += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	s = s>>16 + s&0xffff
	s += s >> 16
	binary.BigEndian.PutUint16(ip[10:], ^uint16(s))
}

// TestCaptures checks the ICRC of every RoCEv2 packet that a kernel sent, the
// way a UDP socket sees it: the identification has to be found.
func TestCaptures(t *testing.T) {
	names, err := filepath.Glob("testdata/*.pcap")
	if err != nil || len(names) == 0 {
		t.Fatal("no captures", err)
	}
	for _, name := range names {
		var n int
		for _, ip := range readPcap(t, name) {
			h, payload, err := rocetest.ParseIP(ip)
			if err != nil {
				continue // not RoCEv2
			}
			var p roce.Packet
			if err := p.Parse(payload); err != nil {
				t.Errorf("%s: %v in %x", name, err, payload)
				continue
			}
			n++
			f := roce.NewFlow(h.Src, h.Dst)
			if h.MayFragment {
				if ok, err := rocetest.CheckIP(ip); !ok {
					t.Errorf("%s: wrong ICRC with DF clear (%v): %x", name, err, ip)
				}
			} else if id, ok := f.Verify(h.SrcPort, &p); !ok || id != h.ID {
				t.Errorf("%s: identification %#x, %v; want %#x: %x", name, id, ok, h.ID, ip)
			}
			if got := h.Append(nil, len(payload)); len(got) != h.Len() || !sameHeader(got, ip[:h.Len()]) {
				t.Errorf("%s: header\n got %x\nwant %x", name, got, ip[:h.Len()])
			}
			out := make([]byte, roce.BTHLen)
			roce.PutBTH(out, fields(p.BTH))
			if !bytes.Equal(out, p.BTH) {
				t.Errorf("%s: BTH %x, want %x", name, out, p.BTH)
			}
		}
		if n == 0 {
			t.Errorf("%s: no RoCEv2 packet", name)
		}
	}
}

// sameHeader compares all but the UDP checksum, which we send as 0.
func sameHeader(a, b []byte) bool { return bytes.Equal(a[:len(a)-2], b[:len(b)-2]) }

// readPcap returns the IP packets of a little-endian Ethernet capture.
func readPcap(t testing.TB, name string) (ips [][]byte) {
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	const ethLen = 14
	for b = b[24:]; len(b) >= 16; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		if frame := b[16 : 16+n]; n > ethLen {
			ips = append(ips, frame[ethLen:])
		}
		b = b[16+n:]
	}
	return ips
}
