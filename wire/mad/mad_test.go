package mad_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/serviceid"
	"ipoibcm/wire"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// vectors reads the MADs out of testdata/vectors.txt: IPv4 20, UDP 8, BTH 12,
// DETH 8, then the MAD and the ICRC.
func vectors(t testing.TB) map[string][]byte {
	m := vector.File(t, "testdata/vectors.txt")
	for name, b := range m {
		m[name] = b[48 : len(b)-4]
	}
	return m
}

// The values all vectors share.
const (
	tid    = 0x0000000500000001 // V1 to V4; V5 and V6 one more, V7 two
	idA    = 0x11223344
	idB    = 0x55667788
	guidA  = 0x0002c90300001111
	guidB  = 0x0002c90300002222
	udQPNA = 0x000123
	udQPNB = 0x000456
)

func gid(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

// private returns the IPoIB private data at the start of n octets.
func private(q ib.QPN) []byte {
	b, _ := encap.PrivateData{QPN: q, ReceiveMTU: 65524}.AppendBinary(nil)
	return b
}

func vectorV1() mad.REQ {
	m := mad.REQ{
		TransactionID: tid, LocalCommID: idA, ServiceID: serviceid.New(serviceid.Legacy, udQPNB), LocalCAGUID: guidA,
		LocalQPN: 0xa1, ResponderResources: 4, RemoteCMResponseTimeout: 20, Transport: ib.RC,
		LocalCMResponseTimeout: 20, RetryCount: 0, PKey: ib.DefaultPKey, PathMTU: ib.MTU1024, MaxCMRetries: 15, SRQ: true,
		Primary: mad.PathInfo{
			LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID, LocalGID: gid("192.0.2.1"), RemoteGID: gid("192.0.2.2"),
			FlowLabel: 0x12345, PacketRate: 3, TrafficClass: 0x20, HopLimit: 64, SL: 5, LocalACKTimeout: 18,
		},
	}
	copy(m.PrivateData[:], private(udQPNA))
	return m
}

func TestVectors(t *testing.T) {
	v1 := vectorV1()
	v7 := v1
	v7.TransactionID, v7.LocalCommID, v7.ServiceID = tid+2, 0x11223355, serviceid.New(serviceid.RFC, udQPNB)
	v7.LocalQPN, v7.StartingPSN, v7.Transport, v7.SRQ = 0xa2, 0x10, ib.UC, false
	v7.ResponderResources, v7.Primary.FlowLabel, v7.Primary.TrafficClass = 0, 0, 0
	v2 := mad.REP{TransactionID: tid, LocalCommID: idB, RemoteCommID: idA, LocalQPN: 0xb2, StartingPSN: 0x123456,
		TargetACKDelay: 15, SRQ: true, LocalCAGUID: guidB}
	v3 := mad.RTU{TransactionID: tid, LocalCommID: idA, RemoteCommID: idB}
	v4 := mad.REJ{TransactionID: tid, RemoteCommID: idA, Reason: mad.RejConsumer}
	v5 := mad.DREQ{TransactionID: tid + 1, LocalCommID: idA, RemoteCommID: idB, RemoteQPN: 0xb2}
	v6 := mad.DREP{TransactionID: tid + 1, LocalCommID: idB, RemoteCommID: idA}
	copy(v2.PrivateData[:], private(udQPNB)) // 4755-3.2-11, 4755-6-1: UD QPN and Receive MTU in REP
	copy(v3.PrivateData[:], private(udQPNA)) // in RTU
	copy(v4.PrivateData[:], private(udQPNB)) // 4755-3.2-12: in REJ

	vs := vectors(t)
	for _, tt := range []struct {
		name string
		msg  mad.Message
	}{
		{"V1", v1}, // 4755-3.2-2, 4755-3.2-5, 4755-2.3-2, 4755-5.1-1
		{"V2", v2}, // 4755-2.3-3, 4755-3.2-3
		{"V3", v3},
		{"V4", v4}, // 4755-3.3-6
		{"V5", v5},
		{"V6", v6},
		{"V7", v7}, // 4755-3.2-6
	} {
		h, got, err := mad.Parse(vs[tt.name])
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if got != tt.msg {
			t.Errorf("%s: (-want +got)\n%s", tt.name, cmp.Diff(tt.msg, got))
		}
		if out, err := tt.msg.AppendBinary(nil); err != nil || !bytes.Equal(out, vs[tt.name]) {
			t.Errorf("%s: %v\n got %x\nwant %x", tt.name, err, out, vs[tt.name])
		}
		expect.Equal(t, h.Class, mad.ClassCM, "%s: Class", tt.name)
		expect.Equal(t, h.ClassVersion, mad.VersionCM, "%s: ClassVersion", tt.name)
		expect.Equal(t, h.Method, mad.MethodSend, "%s: Method", tt.name)
		expect.Equal(t, h.Attr, tt.msg.Attr(), "%s: Attr", tt.name)
	}
}

// 4755-3.3-2: the sender's link-layer address is the UD QPN of the private data
// with the primary local GID of the REQ. 4755-6-2: the private data comes first.
func TestREQNamesItsSender(t *testing.T) {
	var m mad.REQ
	if err := m.UnmarshalBinary(vectors(t)["V1"]); err != nil {
		t.Fatal(err)
	}
	var pd encap.PrivateData
	if err := pd.UnmarshalBinary(m.PrivateData[:]); err != nil {
		t.Fatal(err)
	}
	got := encap.LinkAddr{QPN: pd.QPN, GID: m.Primary.LocalGID}
	expect.Equal(t, got, encap.LinkAddr{QPN: udQPNA, GID: gid("::ffff:192.0.2.1")}, "sender")
	expect.Equal(t, pd.ReceiveMTU, 65524, "Receive MTU")
	for i, v := range m.PrivateData[encap.PrivateDataLen:] { // 4755-6-5
		if v != 0 {
			t.Errorf("private data octet %d is %#x", encap.PrivateDataLen+i, v)
		}
	}
}

var allOnes = ib.GID(bytes.Repeat([]byte{0xff}, 16))

// pathWith returns a path in which f sets a field.
func pathWith(f func(*mad.PathInfo)) (p mad.PathInfo) { f(&p); return p }

// fieldPlaces are the cases of TestEveryFieldHasItsPlace.
var fieldPlaces = []struct {
	name string
	msg  mad.Message
	off  int    // in CM data
	want string // octets there; all others are zero
}{
	{"REQ local communication ID", mad.REQ{LocalCommID: 0xffffffff}, 0, "ffffffff"},
	{"REQ service ID", mad.REQ{ServiceID: 0x0100000000000048}, 8, "0100000000000048"}, // 4755-3.5-4
	{"REQ CA GUID", mad.REQ{LocalCAGUID: 0xffffffffffffffff}, 16, "ffffffffffffffff"},
	{"REQ Q_Key", mad.REQ{LocalQKey: 0xffffffff}, 28, "ffffffff"},
	{"REQ QPN", mad.REQ{LocalQPN: 0xffffff}, 32, "ffffff"},
	{"REQ responder resources", mad.REQ{ResponderResources: 0xff}, 35, "ff"},
	{"REQ initiator depth", mad.REQ{InitiatorDepth: 0xff}, 39, "ff"},
	{"REQ remote response timeout", mad.REQ{RemoteCMResponseTimeout: 31}, 43, "f8"},
	{"REQ transport", mad.REQ{Transport: 3}, 43, "06"},
	{"REQ flow control", mad.REQ{EndToEndFlowControl: true}, 43, "01"},
	{"REQ starting PSN", mad.REQ{StartingPSN: 0xffffff}, 44, "ffffff"},
	{"REQ local response timeout", mad.REQ{LocalCMResponseTimeout: 31}, 47, "f8"},
	{"REQ retry count", mad.REQ{RetryCount: 7}, 47, "07"},
	{"REQ P_Key", mad.REQ{PKey: 0xffff}, 48, "ffff"},
	{"REQ path MTU", mad.REQ{PathMTU: ib.MTU4096}, 50, "50"},
	{"REQ RDC exists", mad.REQ{RDCExists: true}, 50, "08"},
	{"REQ RNR retry count", mad.REQ{RNRRetryCount: 7}, 50, "07"},
	{"REQ max CM retries", mad.REQ{MaxCMRetries: 15}, 51, "f0"},
	{"REQ SRQ", mad.REQ{SRQ: true}, 51, "08"},
	{"REQ extended transport", mad.REQ{ExtendedTransport: 7}, 51, "07"},
	{"REQ primary LIDs", mad.REQ{Primary: mad.PathInfo{LocalLID: 1, RemoteLID: 2}}, 52, "00010002"},
	{"REQ primary local GID", mad.REQ{Primary: mad.PathInfo{LocalGID: allOnes}}, 56, strings.Repeat("ff", 16)},
	{"REQ primary remote GID", mad.REQ{Primary: mad.PathInfo{RemoteGID: allOnes}}, 72, strings.Repeat("ff", 16)},
	{"REQ primary flow label", mad.REQ{Primary: mad.PathInfo{FlowLabel: 0xfffff}}, 88, "fffff0"},
	{"REQ primary packet rate", mad.REQ{Primary: mad.PathInfo{PacketRate: 63}}, 91, "3f"},
	{"REQ primary traffic class", mad.REQ{Primary: mad.PathInfo{TrafficClass: 255}}, 92, "ff"},
	{"REQ primary hop limit", mad.REQ{Primary: mad.PathInfo{HopLimit: 255}}, 93, "ff"},
	{"REQ primary SL", mad.REQ{Primary: mad.PathInfo{SL: 15}}, 94, "f0"},
	{"REQ primary subnet local", mad.REQ{Primary: mad.PathInfo{SubnetLocal: true}}, 94, "08"},
	{"REQ primary ACK timeout", mad.REQ{Primary: mad.PathInfo{LocalACKTimeout: 31}}, 95, "f8"},
	{"REQ alternate LIDs", mad.REQ{Alternate: mad.PathInfo{LocalLID: 1, RemoteLID: 2}}, 96, "00010002"},
	{"REQ alternate local GID", mad.REQ{Alternate: mad.PathInfo{LocalGID: allOnes}}, 100, strings.Repeat("ff", 16)},
	{"REQ alternate flow label", mad.REQ{Alternate: mad.PathInfo{FlowLabel: 0xfffff}}, 132, "fffff0"},
	{"REQ alternate ACK timeout", mad.REQ{Alternate: mad.PathInfo{LocalACKTimeout: 31}}, 139, "f8"},
	{"REQ private data", mad.REQ{PrivateData: [92]byte{0: 1, 91: 2}}, 140, "01" + strings.Repeat("00", 90) + "02"},

	{"MRA IDs", mad.MRA{LocalCommID: 1, RemoteCommID: 2}, 0, "0000000100000002"},
	{"MRA message", mad.MRA{MessageMRAed: mad.KindLAP}, 8, "80"},
	{"MRA timeout", mad.MRA{ServiceTimeout: 31}, 9, "f8"},
	{"MRA private data", mad.MRA{PrivateData: [222]byte{0: 1, 221: 2}}, 10, "01" + strings.Repeat("00", 220) + "02"},

	{"REJ IDs", mad.REJ{LocalCommID: 1, RemoteCommID: 2}, 0, "0000000100000002"},
	{"REJ message", mad.REJ{MessageRejected: mad.KindREP}, 8, "40"},
	{"REJ info length", mad.REJ{ARILength: 8}, 9, "10"},
	{"REJ reason", mad.REJ{Reason: mad.RejConsumer}, 10, "001c"}, // 4755-3.3-6
	{"REJ info", mad.REJ{ARI: [72]byte{0: 1, 71: 2}}, 12, "01" + strings.Repeat("00", 70) + "02"},
	{"REJ private data", mad.REJ{PrivateData: [148]byte{0: 1, 147: 2}}, 84, "01" + strings.Repeat("00", 146) + "02"},

	{"REP IDs", mad.REP{LocalCommID: 1, RemoteCommID: 2}, 0, "0000000100000002"},
	{"REP Q_Key", mad.REP{LocalQKey: 0xffffffff}, 8, "ffffffff"},
	{"REP QPN", mad.REP{LocalQPN: 0xffffff}, 12, "ffffff"},
	{"REP starting PSN", mad.REP{StartingPSN: 0xffffff}, 20, "ffffff"},
	{"REP resources and depth", mad.REP{ResponderResources: 1, InitiatorDepth: 2}, 24, "0102"},
	{"REP ack delay", mad.REP{TargetACKDelay: 31}, 26, "f8"},
	{"REP failover", mad.REP{FailoverAccepted: 3}, 26, "06"},
	{"REP flow control", mad.REP{EndToEndFlowControl: true}, 26, "01"},
	{"REP RNR retry count", mad.REP{RNRRetryCount: 7}, 27, "e0"},
	{"REP SRQ", mad.REP{SRQ: true}, 27, "10"},
	{"REP CA GUID", mad.REP{LocalCAGUID: 0xffffffffffffffff}, 28, "ffffffffffffffff"},
	{"REP private data", mad.REP{PrivateData: [196]byte{0: 1, 195: 2}}, 36, "01" + strings.Repeat("00", 194) + "02"},

	{"RTU IDs", mad.RTU{LocalCommID: 1, RemoteCommID: 2}, 0, "0000000100000002"},
	{"RTU private data", mad.RTU{PrivateData: [224]byte{0: 1, 223: 2}}, 8, "01" + strings.Repeat("00", 222) + "02"},
	{"DREQ QPN", mad.DREQ{RemoteQPN: 0xffffff}, 8, "ffffff"},
	{"DREQ private data", mad.DREQ{PrivateData: [220]byte{0: 1, 219: 2}}, 12, "01" + strings.Repeat("00", 218) + "02"},
	{"DREP private data", mad.DREP{PrivateData: [224]byte{0: 1, 223: 2}}, 8, "01" + strings.Repeat("00", 222) + "02"},

	{"SIDR_REQ", mad.SIDRREQ{RequestID: 1, PKey: 0xffff, ServiceID: 2}, 0, "00000001ffff00000000000000000002"},
	{"SIDR_REQ private data", mad.SIDRREQ{PrivateData: [216]byte{0: 1, 215: 2}}, 16,
		"01" + strings.Repeat("00", 214) + "02"},
	{"SIDR_REP", mad.SIDRREP{RequestID: 1, Status: mad.SIDRRejected, InfoLength: 3, QPN: 0xffffff,
		ServiceID: 4, QKey: 5}, 0,
		"00000001" + "02030000" + "ffffff00" + "0000000000000004" + "00000005"},
	{"SIDR_REP info", mad.SIDRREP{Info: [72]byte{0: 1, 71: 2}}, 24, "01" + strings.Repeat("00", 70) + "02"},
	{"SIDR_REP private data", mad.SIDRREP{PrivateData: [136]byte{0: 1, 135: 2}}, 96,
		"01" + strings.Repeat("00", 134) + "02"},

	{"LAP QPN", mad.LAP{RemoteQPN: 0xffffff}, 12, "ffffff"},
	{"LAP timeout", mad.LAP{RemoteCMResponseTimeout: 31}, 15, "f8"},
	{"LAP LIDs", mad.LAP{Alternate: mad.PathInfo{LocalLID: 1, RemoteLID: 2}}, 20, "00010002"},
	{"LAP local GID", mad.LAP{Alternate: mad.PathInfo{LocalGID: allOnes}}, 24, strings.Repeat("ff", 16)},
	{"LAP remote GID", mad.LAP{Alternate: mad.PathInfo{RemoteGID: allOnes}}, 40, strings.Repeat("ff", 16)},
	{"LAP flow label", mad.LAP{Alternate: mad.PathInfo{FlowLabel: 0xfffff}}, 56, "fffff0"},
	{"LAP traffic class", mad.LAP{Alternate: pathWith(func(p *mad.PathInfo) { p.TrafficClass = 255 })}, 59, "ff"},
	{"LAP hop limit", mad.LAP{Alternate: pathWith(func(p *mad.PathInfo) { p.HopLimit = 255 })}, 60, "ff"},
	{"LAP packet rate", mad.LAP{Alternate: pathWith(func(p *mad.PathInfo) { p.PacketRate = 63 })}, 61, "3f"},
	{"LAP SL and subnet local", mad.LAP{Alternate: pathWith(func(p *mad.PathInfo) {
		p.SL, p.SubnetLocal = 15, true
	})}, 62, "f8"},
	{"LAP ACK timeout", mad.LAP{Alternate: pathWith(func(p *mad.PathInfo) { p.LocalACKTimeout = 31 })}, 63, "f8"},
	{"LAP private data", mad.LAP{PrivateData: [168]byte{0: 1, 167: 2}}, 64, "01" + strings.Repeat("00", 166) + "02"},

	{"APR", mad.APR{InfoLength: 5, Status: mad.APRReject}, 8, "0503"},
	{"APR info", mad.APR{Info: [72]byte{0: 1, 71: 2}}, 12, "01" + strings.Repeat("00", 70) + "02"},
	{"APR private data", mad.APR{PrivateData: [148]byte{0: 1, 147: 2}}, 84, "01" + strings.Repeat("00", 146) + "02"},

	{"ClassPortInfo", mad.ClassPortInfo{Method: mad.MethodGetResp, BaseVersion: 1, ClassVersion: 2,
		CapabilityMask: 0xffff, CapabilityMask2: 1, ResponseTime: 31},
		0, "0102ffff0000003f"},
	{"ClassPortInfo rest", mad.ClassPortInfo{Method: mad.MethodGet, Redirect: [32]byte{31: 1},
		Trap: [32]byte{0: 2}}, 39, "0102"},
}

// TestEveryFieldHasItsPlace sets one field to all ones, and shows which octets
// of the MAD hold it.
func TestEveryFieldHasItsPlace(t *testing.T) {
	for _, tt := range fieldPlaces {
		b, err := tt.msg.AppendBinary([]byte{0xee})
		if err != nil || len(b) != 1+mad.Len {
			t.Errorf("%s: %d octets, %v", tt.name, len(b), err)
			continue
		}
		b = b[1:]
		data := make([]byte, mad.Len-mad.HeaderLen)
		copy(data[tt.off:], vector.Hex(tt.want))
		if !bytes.Equal(b[mad.HeaderLen:], data) {
			t.Errorf("%s:\n got %x\nwant %x", tt.name, b[mad.HeaderLen:], data)
		}
		if _, got, err := mad.Parse(b); err != nil || got != tt.msg {
			t.Errorf("%s: (-want +got) %v\n%s", tt.name, err, cmp.Diff(tt.msg, got))
		}
	}
}

// TestReservedBitsAreIgnored sets everything that no field owns.
// A value that its field has no room for changes no other field.
func TestNarrowFieldsAreMasked(t *testing.T) {
	for _, tt := range []struct {
		name string
		msg  mad.Message
		off  int // in CM data
		want string
	}{
		{"REQ retry count", mad.REQ{RetryCount: 0xff}, 47, "07"},
		{"REQ RNR retry count", mad.REQ{RNRRetryCount: 0xff}, 50, "07"},
		{"REQ extended transport", mad.REQ{ExtendedTransport: 0xff}, 51, "07"},
		{"REQ packet rate", mad.REQ{Primary: mad.PathInfo{PacketRate: 0xff}}, 88, "0000003f"},
		{"REP failover", mad.REP{FailoverAccepted: 0xff}, 26, "06"},
		{"LAP packet rate", mad.LAP{Alternate: mad.PathInfo{PacketRate: 0xff}}, 61, "3f"},
	} {
		b, err := tt.msg.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, mad.Len-mad.HeaderLen)
		copy(want[tt.off:], vector.Hex(tt.want))
		if got := b[mad.HeaderLen:]; !bytes.Equal(got, want) {
			t.Errorf("%s:\n got %x\nwant %x", tt.name, got, want)
		}
	}
}

func TestReservedBitsAreIgnored(t *testing.T) {
	for name, offs := range map[string]map[int]byte{
		"V1": {4: 0xff, 5: 0xff, 24: 0xff, 36: 0xff, 40: 0xff, 90: 0x0f, 91: 0xc0, 94: 0x07, 95: 0x07, 138: 0x07, 139: 0x07},
		"V2": {15: 0xff, 16: 0xff, 19: 0xff, 23: 0xff, 27: 0x0f},
		"V4": {8: 0x3f, 9: 0x01},
		"V5": {11: 0xff},
	} {
		b := vectors(t)[name]
		_, want, err := mad.Parse(b)
		if err != nil {
			t.Fatal(err)
		}
		b[18] = 0xff // of the header
		for o, v := range offs {
			b[mad.HeaderLen+o] |= v
		}
		if _, got, err := mad.Parse(b); err != nil || got != want {
			t.Errorf("%s: (-want +got) %v\n%s", name, err, cmp.Diff(want, got))
		}
	}
}

func TestParseRefuses(t *testing.T) {
	good := vectors(t)["V1"]
	set := func(i int, v byte) []byte { b := bytes.Clone(good); b[i] = v; return b }
	for _, tt := range []struct {
		name  string
		in    []byte
		short bool
	}{
		{"nothing", nil, true},
		{"half a header", good[:23], true},
		{"one octet short", good[:255], true},
		{"base version 2", set(0, 2), false},
		{"another class", set(1, 3), false},
		{"another class version", set(2, 1), false},
		{"method Get", set(3, 1), false},
		{"an attribute that CM does not have", set(17, 0x1b), false},
		{"ClassPortInfo sent", func() []byte { b := set(16, 0); b[17] = 1; return b }(), false},
	} {
		_, m, err := mad.Parse(tt.in)
		var short *wire.ShortError
		var field *wire.FieldError
		expect.Equal(t, m, nil, "%s: m", tt.name)
		expect.Equal(t, errors.As(err, &short), tt.short, "%s: As(err, &short)", tt.name)
		if errors.As(err, &field) == tt.short {
			t.Errorf("%s: %v (%T), want an error of a field: %v", tt.name, err, err, !tt.short)
		}
	}
	var rep mad.REP
	if err := rep.UnmarshalBinary(good); err == nil || rep != (mad.REP{}) {
		t.Errorf("a REQ read as REP: %+v, %v", rep, err)
	}
	h, _, _ := mad.Parse(set(2, 1))
	// Enough to answer with reason 31.
	expect.Equal(t, h.ClassVersion, 1, "ClassVersion of what was refused")
	expect.Equal(t, h.Attr, mad.AttrREQ, "Attr of what was refused")
}

func TestNames(t *testing.T) {
	for code, want := range map[mad.RejectReason]string{
		8: "invalid service ID", 10: "stale connection", 26: "invalid path MTU", 28: "consumer reject",
		33: "invalid alternate flow label", 34: "reason 34", 35: "vendor option not supported", 0: "reason 0",
		36: "reason 36",
	} {
		if code.String() != want {
			t.Errorf("reason %d is %q, want %q", uint16(code), code, want)
		}
	}
	for r := mad.RejectReason(1); r <= 35; r++ {
		if r != 34 && strings.HasPrefix(r.String(), "reason") {
			t.Errorf("reason %d has no name", uint16(r))
		}
	}
	for a := mad.AttrREQ; a <= mad.AttrAPR; a++ {
		if strings.HasPrefix(a.String(), "Attr") {
			t.Errorf("attribute %#x has no name", uint16(a))
		}
	}
	if got := vectorV1().String(); got != "REQ comm=11223344 service=0x1000000000000456 qpn=0x0000a1 "+
		"psn=000000 RC mtu=1024" {
		t.Error(got)
	}
}

// TestCaptures reads what kernels sent and writes it again: every octet comes back.
func TestCaptures(t *testing.T) {
	for name, want := range map[string]string{
		"testdata/rdma_cm_rping_v4.pcap": "REQ REP RTU DREQ DREP",
		"testdata/rdma_cm_reject.pcap":   "REQ REJ",
	} {
		var got []string
		for _, b := range capturedMADs(t, name) {
			h, m, err := mad.Parse(b)
			if err != nil {
				t.Errorf("%s: %v in %x", name, err, b)
				continue
			}
			if n := len(got); n == 0 || got[n-1] != h.Attr.String() { // without repetitions
				got = append(got, h.Attr.String())
			}
			if out, _ := m.AppendBinary(nil); !bytes.Equal(out, b) {
				t.Errorf("%s: %v\n got %x\nwant %x", name, m, out, b)
			}
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%s: %s, want %s", name, s, want)
		}
	}
}

// capturedMADs returns the payloads of UD SENDs to QP 1 over IPv4.
func capturedMADs(t testing.TB, name string) (mads [][]byte) {
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	const eth, headers = 14, 20 + 8 + 12 + 8
	for b = b[24:]; len(b) >= 16; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		ip := b[16+eth : 16+n]
		if len(ip) == headers+mad.Len+4 && ip[28] == 0x64 && bytes.Equal(ip[33:36], []byte{0, 0, 1}) {
			mads = append(mads, ip[headers:headers+mad.Len])
		}
		b = b[16+n:]
	}
	return mads
}

func FuzzParse(f *testing.F) {
	for _, b := range vectors(f) {
		f.Add(b)
	}
	for a := mad.AttrREQ; a <= mad.AttrAPR; a++ {
		b := bytes.Repeat([]byte{0xff}, mad.Len)
		copy(b, []byte{1, mad.ClassCM, mad.VersionCM, byte(mad.MethodSend)})
		b[16], b[17] = 0, byte(a)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		h, m, err := mad.Parse(in)
		if err != nil {
			return
		}
		out, _ := m.AppendBinary(nil)
		h2, m2, err := mad.Parse(out)
		switch {
		case err != nil:
			t.Fatalf("round trip: %v", err)
		case m != m2:
			t.Fatalf("round trip: m is %v, want %v", m, m2)
		case h.TransactionID != h2.TransactionID:
			t.Fatalf("round trip: TransactionID is %v, want %v", h.TransactionID, h2.TransactionID)
		case h.Method != h2.Method:
			t.Fatalf("round trip: Method is %v, want %v", h.Method, h2.Method)
		}
		if s, ok := m.(interface{ String() string }); !ok || s.String() == "" {
			t.Fatalf("%T does not print", m)
		}
	})
}

func FuzzHeader(f *testing.F) {
	f.Add(bytes.Repeat([]byte{1}, mad.HeaderLen))
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b mad.Header
		if a.UnmarshalBinary(in) != nil {
			return
		}
		out, _ := a.AppendBinary(nil)
		if err := b.UnmarshalBinary(out); err != nil || a != b {
			t.Fatalf("round trip: %+v, then %+v (%v)", a, b, err)
		}
	})
}
