package roce_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/wire"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

func TestOpcodes(t *testing.T) {
	for _, tt := range []struct {
		op        roce.Opcode
		code      uint8
		tr        ib.Transport
		headerLen int
		starts    bool
		ends      bool
		name      string
	}{
		{roce.RCSendFirst, 0x00, ib.RC, 12, true, false, "RC SEND_FIRST"},
		{roce.RCSendMiddle, 0x01, ib.RC, 12, false, false, "RC SEND_MIDDLE"},
		{roce.RCSendLast, 0x02, ib.RC, 12, false, true, "RC SEND_LAST"},
		{roce.RCSendLastImm, 0x03, ib.RC, 16, false, true, "RC SEND_LAST_IMM"},
		{roce.RCSendOnly, 0x04, ib.RC, 12, true, true, "RC SEND_ONLY"},
		{roce.RCSendOnlyImm, 0x05, ib.RC, 16, true, true, "RC SEND_ONLY_IMM"},
		{roce.RCWriteFirst, 0x06, ib.RC, 28, true, false, "RC WRITE_FIRST"},
		{roce.RCWriteOnlyImm, 0x0b, ib.RC, 32, true, true, "RC WRITE_ONLY_IMM"},
		{roce.RCReadRequest, 0x0c, ib.RC, 28, true, true, "RC READ_REQUEST"},
		{roce.RCReadResponseFirst, 0x0d, ib.RC, 16, true, false, "RC READ_RESPONSE_FIRST"},
		{roce.RCReadResponseMiddle, 0x0e, ib.RC, 12, false, false, "RC READ_RESPONSE_MIDDLE"},
		{roce.RCReadResponseLast, 0x0f, ib.RC, 16, false, true, "RC READ_RESPONSE_LAST"},
		{roce.RCReadResponseOnly, 0x10, ib.RC, 16, true, true, "RC READ_RESPONSE_ONLY"},
		{roce.RCAck, 0x11, ib.RC, 16, true, true, "RC ACK"},
		{roce.RCSendLastInv, 0x16, ib.RC, 16, false, true, "RC SEND_LAST_INV"},
		{roce.RCSendOnlyInv, 0x17, ib.RC, 16, true, true, "RC SEND_ONLY_INV"},
		{roce.UCSendFirst, 0x20, ib.UC, 12, true, false, "UC SEND_FIRST"},
		{roce.UCWriteOnlyImm, 0x2b, ib.UC, 32, true, true, "UC WRITE_ONLY_IMM"},
		{roce.UDSendOnly, 0x64, ib.UD, 20, true, true, "UD SEND_ONLY"},
		{roce.UDSendOnlyImm, 0x65, ib.UD, 24, true, true, "UD SEND_ONLY_IMM"},
	} {
		tr, ok := tt.op.Transport()
		expect.Equal(t, uint8(tt.op), tt.code, "%#02x: op", tt.code)
		expect.Equal(t, ok, true, "%#02x: ok", tt.code)
		expect.Equal(t, tr, tt.tr, "%#02x: tr", tt.code)
		expect.Equal(t, tt.op.HeaderLen(), tt.headerLen, "%#02x: HeaderLen", tt.code)
		expect.Equal(t, tt.op.Starts(), tt.starts, "%#02x: Starts", tt.code)
		expect.Equal(t, tt.op.Ends(), tt.ends, "%#02x: Ends", tt.code)
		expect.Equal(t, tt.op.String(), tt.name, "%#02x: String", tt.code)
		if got := tt.op.Operation().With(tt.tr); got != tt.op {
			t.Errorf("%v: operation %v with %v = %v", tt.op, tt.op.Operation(), tt.tr, got)
		}
	}
	for _, op := range []roce.Opcode{0x15, 0x18, 0x2c, 0x36, 0x60, 0x63, 0x66, 0x80, 0xff} {
		switch _, ok := op.Transport(); {
		case ok:
			t.Errorf("ok is true")
		case op.Valid():
			t.Errorf("Valid is true, want false")
		case op.HeaderLen() != 0:
			t.Errorf("HeaderLen is %v, want 0", op.HeaderLen())
		}
	}
	if service, ok := roce.CNP.Transport(); ok {
		t.Errorf("CNP belongs to the service %v, want none", service)
	}
	expect.Equal(t, roce.CNP.Valid(), true, "CNP: Valid")
}

func TestSyndrome(t *testing.T) {
	for _, tt := range []struct {
		s             roce.Syndrome
		ack, rnr, nak bool
		name          string
	}{
		{0x00, true, false, false, "ACK"},
		{roce.SyndromeACK, true, false, false, "ACK"},
		{roce.RNRSyndrome(0), false, true, false, "RNR NAK (655.36ms)"},
		{roce.RNRSyndrome(12), false, true, false, "RNR NAK (640µs)"},
		{roce.RNRSyndrome(31), false, true, false, "RNR NAK (491.52ms)"},
		{roce.NAKSequence, false, false, true, "NAK PSN sequence error"},
		{roce.NAKInvalidReq, false, false, true, "NAK invalid request"},
		{roce.NAKRemoteAccess, false, false, true, "NAK remote access error"},
		{roce.NAKRemoteOp, false, false, true, "NAK remote operational error"},
		{roce.NAKInvalidRDReq, false, false, true, "NAK invalid RD request"},
		{0x7f, false, false, true, "Syndrome(0x7f)"},
		{0x40, false, false, false, "Syndrome(0x40)"},
		{0xff, false, false, false, "Syndrome(0xff)"},
	} {
		expect.Equal(t, tt.s.IsACK(), tt.ack, "%#02x: IsACK", uint8(tt.s))
		expect.Equal(t, tt.s.IsRNR(), tt.rnr, "%#02x: IsRNR", uint8(tt.s))
		expect.Equal(t, tt.s.IsNAK(), tt.nak, "%#02x: IsNAK", uint8(tt.s))
		expect.Equal(t, tt.s.String(), tt.name, "%#02x: String", uint8(tt.s))
	}
}

func TestExtensionHeaders(t *testing.T) {
	var reth [roce.RETHLen]byte
	roce.PutRETH(reth[:], 0x0102030405060708, 0x11223344, 70000)
	var imm, inv [4]byte
	roce.PutImmDt(imm[:], 0xdeadbeef)
	binary.BigEndian.PutUint32(inv[:], 0xcafe)
	ip := roce.IPHeader{Src: a4, Dst: b4, SrcPort: 0xc000}
	_, p := mustParse(t, build(ip, roce.BTHFields{Opcode: roce.UCWriteOnlyImm, Solicited: true},
		append(reth[:], imm[:]...), []byte("abc")))
	h := p.RETH()
	expect.Equal(t, h.Addr(), 0x0102030405060708, "Addr")
	expect.Equal(t, h.RKey(), 0x11223344, "RKey")
	expect.Equal(t, h.Length(), 70000, "Length")
	expect.Equal(t, p.ImmDt().Value(), 0xdeadbeef, "ImmDt.Value")
	expect.Equal(t, string(p.Payload), "abc", "Payload")
	expect.Equal(t, p.BTH.Solicited(), true, "BTH.Solicited")
	switch {
	case p.DETH() != nil:
		t.Errorf("DETH is %v, want nil", p.DETH())
	case p.AETH() != nil:
		t.Errorf("AETH is %v, want nil", p.AETH())
	case p.IETH() != nil:
		t.Errorf("IETH is %v, want nil", p.IETH())
	}
	_, p = mustParse(t, build(ip, roce.BTHFields{Opcode: roce.RCSendLastInv}, inv[:], nil))
	switch {
	case p.IETH().RKey() != 0xcafe:
		t.Errorf("IETH.RKey is %#x, want 0xcafe", p.IETH().RKey())
	case len(p.Payload) != 0:
		t.Errorf("Payload has %v elements, want 0", len(p.Payload))
	case p.RETH() != nil:
		t.Errorf("RETH is %v, want nil", p.RETH())
	case p.ImmDt() != nil:
		t.Errorf("ImmDt is %v, want nil", p.ImmDt())
	}
}

func TestBTH(t *testing.T) {
	b := bytes.Repeat([]byte{0xff}, roce.BTHLen)
	roce.PutBTH(b, roce.BTHFields{}) // reserved bits are zero when sent
	if !bytes.Equal(b, make([]byte, roce.BTHLen)) {
		t.Errorf("zero BTH is %x", b)
	}
	h := roce.BTH(bytes.Repeat([]byte{0xff}, roce.BTHLen)) // and ignored when received
	expect.Equal(t, h.PSN(), ib.PSNMask, "BTH of ones: PSN")
	expect.Equal(t, h.DestQPN(), ib.QPNMulticast, "BTH of ones: DestQPN")
	expect.Equal(t, h.Pad(), 3, "BTH of ones: Pad")
	expect.Equal(t, h.FECN(), true, "BTH of ones: FECN")
	expect.Equal(t, h.BECN(), true, "BTH of ones: BECN")
	expect.Equal(t, h.AckReq(), true, "BTH of ones: AckReq")
	expect.Equal(t, h.Version(), 15, "BTH of ones: Version")
	h.SetAckReq(false)
	expect.Equal(t, h.AckReq(), false, "A bit cleared: AckReq")
	expect.Equal(t, h[8], 0x7f, "A bit cleared: octet 8")
	h.SetAckReq(true)
	if h[8] != 0xff {
		t.Errorf("A bit set: %x", h[8])
	}
}

func TestParseRefuses(t *testing.T) {
	good := make([]byte, 32)
	roce.PutBTH(good, roce.BTHFields{Opcode: roce.RCSendOnly})
	set := func(i int, v byte) []byte { b := bytes.Clone(good); b[i] = v; return b }
	for _, tt := range []struct {
		name  string
		in    []byte
		short bool
	}{
		{"nothing", nil, true},
		{"a BTH and half an ICRC", good[:14], true},
		{"no room for the DETH", func() []byte { b := set(0, byte(roce.UDSendOnly)); return b[:20] }(), true},
		{"no room for the pad", func() []byte { b := set(1, 0x10); return b[:16] }(), true},
		{"an opcode that no service has", set(0, 0x1f), false},
		{"transport version 1", set(1, 0x01), false},
		{"length no multiple of four", good[:31], false},
	} {
		var p roce.Packet
		err := p.Parse(tt.in)
		var short *wire.ShortError
		var field *wire.FieldError
		expect.Equal(t, errors.As(err, &short), tt.short, "%s: %q is of a length", tt.name, err)
		expect.Equal(t, errors.As(err, &field), !tt.short, "%s: %q is of a field", tt.name, err)
	}
}

func TestParseIPRefuses(t *testing.T) {
	v4, v6 := vectors(t)["V9"], vectors(t)["V15"]
	mapped := func(i int) []byte {
		b := bytes.Clone(v6)
		copy(b[i:], "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff")
		return b
	}
	set := func(b []byte, i int, v byte) []byte { b = bytes.Clone(b); b[i] = v; return b }
	for _, tt := range []struct {
		name string
		in   []byte
	}{
		{"nothing", nil},
		{"version 5", set(v4, 0, 0x55)},
		{"IPv4 options", set(v4, 0, 0x46)},
		{"IPv4 fragment", set(v4, 6, 0x20)},
		{"IPv4 TCP", set(v4, 9, 6)},
		{"IPv4 checksum", set(v4, 10, 0)},
		{"IPv4 cut", v4[:len(v4)-1]},
		{"IPv4 header cut", v4[:27]},
		{"IPv4 other port", set(v4, 23, 1)},
		{"IPv4 UDP length", set(v4, 25, 8)},
		{"IPv6 extension header", set(v6, 6, 44)},
		{"IPv6 cut", v6[:len(v6)-1]},
		{"IPv6 header cut", v6[:47]},
		{"IPv6 UDP length", set(v6, 45, 1)},
		{"IPv6 from an IPv4-mapped address", mapped(8)},
		{"IPv6 to an IPv4-mapped address", mapped(24)},
	} {
		switch h, p, err := rocetest.ParseIP(tt.in); {
		case err == nil:
			t.Errorf("%s: err is nil", tt.name)
		case p != nil:
			t.Errorf("%s: p is %v, want nil", tt.name, p)
		case h != (roce.IPHeader{}):
			t.Errorf("%s: h is %v, want %v", tt.name, h, roce.IPHeader{})
		}
	}
	if err := rocetest.Seal(roce.IPHeader{Src: a4, Dst: b4}.Append(nil, 0)); err == nil {
		t.Error("sealed a packet without BTH")
	}
	if _, p, err := rocetest.ParseIP(append(bytes.Clone(v4), 0, 0)); err != nil || len(p) != len(v4)-28 { // Ethernet padding
		t.Errorf("octets behind: %v, %d octets", err, len(p))
	}
}

// TestICRCAgainstPlainCRC compares the tables with the CRC over a masked copy of
// the whole packet, as IBA annex A17.3.3 tells it.
func TestICRCAgainstPlainCRC(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		ip := roce.IPHeader{Src: a4, Dst: b4, TrafficClass: uint8(r.Uint32()), HopLimit: uint8(r.Uint32()),
			ID: uint16(r.Uint32()), MayFragment: r.IntN(4) == 0, SrcPort: uint16(r.Uint32())}
		if r.IntN(2) == 0 {
			ip.Src, ip.Dst, ip.ID, ip.MayFragment, ip.FlowLabel = a6, b6, 0, false, r.Uint32N(1<<20)
		}
		payload := make([]byte, 4*r.IntN(1100))
		for i := range payload {
			payload[i] = byte(r.Uint32())
		}
		n := roce.BTHLen + len(payload) + roce.ICRCLen
		p := ip.Append(nil, n)
		hdr := make([]byte, roce.BTHLen)
		roce.PutBTH(hdr, roce.BTHFields{Opcode: roce.RCSendMiddle, DestQPN: ib.QPN(r.Uint32()) & ib.QPNMask,
			PSN: ib.PSN(r.Uint32()) & ib.PSNMask})
		hdr[4] = byte(r.Uint32())
		p = append(append(append(p, hdr...), payload...), 0, 0, 0, 0)
		if !ip.MayFragment { // no Flow makes others
			roce.NewFlow(ip.Src, ip.Dst).Sum(ip.SrcPort, p[ip.Len():len(p)-4], ip.ID).Put(p[len(p)-4:])
		} else if err := rocetest.Seal(p); err != nil {
			t.Fatal(err)
		}
		masked := append(bytes.Repeat([]byte{0xff}, 8), p[:len(p)-4]...)
		m := masked[8:]
		if ip.Src.Is4() {
			m[1], m[8], m[10], m[11], m[26], m[27], m[28+4] = 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff
		} else {
			m[0], m[1], m[2], m[3], m[7], m[46], m[47], m[48+4] = 0x6f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff
		}
		if got, want := binary.LittleEndian.Uint32(p[len(p)-4:]), crc32.ChecksumIEEE(masked); got != want {
			t.Fatalf("%+v: ICRC %08x, want %08x", ip, got, want)
		}
		if ok, err := rocetest.CheckIP(p); !ok || err != nil {
			t.Fatalf("%+v: rocetest says ICRC right = %v, %v", ip, ok, err)
		}
	}
}

// TestVerifyFindsID takes packets of every length class and every kind of
// identification, and then breaks them.
func TestVerifyFindsID(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	flow := roce.NewFlow(a4, b4)
	var falsely int
	const broken = 20000
	for i := range broken {
		id := uint16(r.Uint32())
		if i%3 == 0 {
			id %= 64
		}
		n := 4 * r.IntN(64)
		if i%500 == 0 {
			n = 65000
		}
		b := make([]byte, roce.BTHLen+n+roce.ICRCLen)
		roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCSendMiddle, PSN: ib.PSN(i)})
		flow.Sum(0xc001, b[:len(b)-4], id).Put(b[len(b)-4:])
		var p roce.Packet
		if err := p.Parse(b); err != nil {
			t.Fatal(err)
		}
		if got, ok := flow.Verify(0xc001, &p); !ok || got != id {
			t.Fatalf("%d octets: identification %#x, %v; want %#x", n, got, ok, id)
		}
		// A flipped bit may look like another identification, once in 65536.
		b[5+r.IntN(7)] ^= 1 << r.IntN(7)
		if got, ok := flow.Verify(0xc001, &p); ok {
			falsely++
			if got == id {
				t.Fatalf("a flipped bit went unseen: %x", b)
			}
		}
	}
	if falsely > 5 {
		t.Errorf("%d of %d broken packets accepted", falsely, broken)
	}
	flow6 := roce.NewFlow(a6, b6)
	b := make([]byte, 16)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.RCSendLast})
	flow6.Sum(1, b[:12], 0).Put(b[12:])
	var p roce.Packet
	if err := p.Parse(b); err != nil {
		t.Fatal(err)
	}
	if _, ok := flow6.Verify(1, &p); !ok {
		t.Error("IPv6: right ICRC refused")
	}
	if _, ok := flow6.Verify(2, &p); ok {
		t.Error("IPv6: wrong port accepted")
	}
	// IPv6 has no identification: what would be the trace of one on IPv4 is an error.
	trace := flow.Sum(1, b[:12], 5) ^ flow.Sum(1, b[:12], 0)
	p.ICRC ^= trace
	if id, ok := flow6.Verify(1, &p); ok {
		t.Errorf("IPv6: identification %d accepted", id)
	}
}

func TestMappedAddresses(t *testing.T) {
	if roce.NewFlow(ib.GIDFromAddr(a4).Addr(), b4) != roce.NewFlow(a4, b4) {
		t.Error("a mapped address makes another flow")
	}
}

func TestPutGRH(t *testing.T) {
	b := bytes.Repeat([]byte{0xee}, 40)
	v4 := vectors(t)["V8"]
	roce.IPHeader{Src: a4, Dst: b4, HopLimit: 64, SrcPort: 1}.PutGRH(b, len(v4)-28)
	if want := append(make([]byte, 20), v4[:20]...); !bytes.Equal(b, want) {
		t.Errorf("IPv4 GRH area %x, want %x", b, want)
	}
	v6 := vectors(t)["V15"]
	roce.IPHeader{Src: a6, Dst: b6, HopLimit: 64}.PutGRH(b, len(v6)-48)
	if !bytes.Equal(b, v6[:40]) {
		t.Errorf("IPv6 GRH area %x, want %x", b, v6[:40])
	}
}

func TestSourcePort(t *testing.T) {
	for _, tt := range []struct {
		name     string
		label    uint32
		src, dst ib.QPN
		want     uint16
	}{
		{"low bits only", 0x00005, 1, 1, 0xc005},
		{"high bits are folded in", 0x12345, 1, 1, 0xc000 | 0x2345 ^ 0x4},
		{"bits above 20 do not count", 0xfff00005, 1, 1, 0xc005},
		{"no label, small QPNs", 0, 2, 3, 0xc006},
		{"no label, product folded", 0, 0x100000, 0x10, 0xc010},
		{"no label, QPN 0", 0, 0, 7, 0xc000},
	} {
		if got := roce.SourcePort(tt.label, tt.src, tt.dst); got != tt.want {
			t.Errorf("%s: SourcePort(%#x, %v, %v) = %#x, want %#x", tt.name, tt.label, tt.src, tt.dst, got, tt.want)
		}
	}
}

// 4755-1-3: a UD payload of 4096 octets is the largest that a path MTU allows.
func TestPathMTULimit(t *testing.T) {
	_, p := mustParse(t, build(roce.IPHeader{Src: a6, Dst: b6}, roce.BTHFields{Opcode: roce.UDSendOnly},
		deth(1, 2), make([]byte, ib.MTU4096.Octets())))
	if len(p.Payload) != 4096 {
		t.Errorf("payload of %d octets", len(p.Payload))
	}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	b := make([]byte, roce.BTHLen+roce.DETHLen+4096+roce.ICRCLen)
	ip := make([]byte, 0, 64)
	grh := make([]byte, 40)
	var p roce.Packet
	h := roce.IPHeader{Src: a4, Dst: b4}
	if n := testing.AllocsPerRun(100, func() {
		flow := roce.NewFlow(a4, b4)
		roce.PutBTH(b, roce.BTHFields{Opcode: roce.UDSendOnly, PSN: 5})
		roce.PutDETH(b[roce.BTHLen:], 7, 8)
		c := flow.Start(0xc000, len(b), 9).BTH(b).Update(b[roce.BTHLen : len(b)-4])
		c.Put(b[len(b)-4:])
		switch {
		case p.Parse(b) != nil:
			t.Errorf("Parse(b) is %v, want nil", p.Parse(b))
		case p.DETH().SrcQPN() != 8:
			t.Errorf("DETH.SrcQPN is %v, want 8", p.DETH().SrcQPN())
		case p.BTH.PSN() != 5:
			t.Errorf("BTH.PSN is %v, want 5", p.BTH.PSN())
		}
		if id, ok := flow.Verify(0xc000, &p); !ok || id != 9 {
			t.Error("identification not found")
		}
		ip = h.Append(ip[:0], len(b))
		h.PutGRH(grh, len(b))
	}); n != 0 {
		t.Errorf("%v allocations per packet", n)
	}
}

func FuzzParse(f *testing.F) {
	for _, ip := range vectors(f) {
		f.Add(ip[roceOffset(ip):])
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var p roce.Packet
		if p.Parse(in) != nil {
			return
		}
		if got := p.Op.HeaderLen() + len(p.Payload) + p.BTH.Pad() + roce.ICRCLen; got != len(in) {
			t.Fatalf("parts make %d octets of %x", got, in)
		}
		for _, ext := range [][]byte{p.DETH(), p.AETH(), p.RETH(), p.ImmDt(), p.IETH()} {
			if len(ext) > p.Op.HeaderLen()-roce.BTHLen {
				t.Fatalf("%v: extension header %x", p.Op, ext)
			}
		}
		out := make([]byte, roce.BTHLen)
		roce.PutBTH(out, fields(p.BTH))
		if fields(roce.BTH(out)) != fields(p.BTH) {
			t.Fatalf("BTH %x became %x", p.BTH, out)
		}
		// Whatever ICRC it has: with the right one it is accepted.
		flow := roce.NewFlow(a4, b4)
		p.ICRC = flow.Sum(1, p.Covered, 0x1234)
		if id, ok := flow.Verify(1, &p); !ok || id != 0x1234 {
			t.Fatalf("identification %#x, %v", id, ok)
		}
	})
}

func FuzzParseIP(f *testing.F) {
	for _, ip := range vectors(f) {
		f.Add(ip)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		h, payload, err := rocetest.ParseIP(in)
		if err != nil {
			return
		}
		out := append(h.Append(nil, len(payload)), payload...)
		h2, payload2, err := rocetest.ParseIP(out)
		if err != nil {
			t.Fatalf("round trip: err is %v, want nil", err)
		}
		expect.MustEqual(t, h2, h, "round trip: h2")
		if !bytes.Equal(payload, payload2) {
			t.Fatalf("round trip: payload is %x, want %x", payload, payload2)
		}
		ok1, err1 := rocetest.CheckIP(in)
		ok2, err2 := rocetest.CheckIP(out)
		if ok1 != ok2 || (err1 == nil) != (err2 == nil) {
			t.Fatalf("ICRC %v %v, then %v %v", ok1, err1, ok2, err2)
		}
		if err1 == nil {
			sealed := bytes.Clone(in)
			err := rocetest.Seal(sealed)
			if ok, _ := rocetest.CheckIP(sealed); err != nil || !ok {
				t.Fatalf("sealed (%v) it is refused: %x", err, sealed)
			}
		} else if rocetest.Seal(in) == nil {
			t.Fatalf("sealed, though it cannot be checked (%v): %x", err1, in)
		}
	})
}

func BenchmarkICRC4096(b *testing.B) {
	flow := roce.NewFlow(a6, b6)
	hdr, payload := make([]byte, roce.BTHLen), make([]byte, 4096)
	b.SetBytes(4096)
	for b.Loop() {
		flow.Start(0xc000, 4112, 0).BTH(hdr).Update(payload).Put(hdr[8:])
	}
}

func BenchmarkVerify4096UnknownID(b *testing.B) {
	flow := roce.NewFlow(a4, b4)
	pkt := make([]byte, roce.BTHLen+4096+roce.ICRCLen)
	flow.Sum(1, pkt[:len(pkt)-4], 0xbeef).Put(pkt[len(pkt)-4:])
	var p roce.Packet
	if err := p.Parse(pkt); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(4096)
	for b.Loop() {
		if _, ok := flow.Verify(1, &p); !ok {
			b.Fatal("not found")
		}
	}
}

func BenchmarkNewFlow(b *testing.B) {
	for b.Loop() {
		roce.NewFlow(a6, b6)
	}
}
