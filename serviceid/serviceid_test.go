package serviceid_test

import (
	"encoding/binary"
	"encoding/hex"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
)

func TestNewAndParse(t *testing.T) {
	for _, tt := range []struct {
		name string
		form serviceid.Form
		qpn  ib.QPN
		want string // octets on the wire
	}{
		// Octet 0 is 0x01 (4755-3.5-1), the type 0 (4755-3.5-2), the reserved
		// octets 0 (4755-3.5-3, 4755-9-1), then the UD QPN of the node being
		// connected to (4755-3.5-4, 4755-3.1-12).
		{"RFC 4755", serviceid.RFC, 0x48, "0100000000000048"},
		{"RFC 4755, largest QPN", serviceid.RFC, 0xffffff, "0100000000ffffff"},
		{"Linux", serviceid.Legacy, 0x456, "1000000000000456"}, // IPOIB_CM_IETF_ID of ipoib.h
		{"Linux, QPN 0", serviceid.Legacy, 0, "1000000000000000"},
	} {
		id := serviceid.New(tt.form, tt.qpn)
		var b [8]byte
		binary.BigEndian.PutUint64(b[:], uint64(id))
		expect.Equal(t, hex.EncodeToString(b[:]), tt.want, "%s: octets", tt.name)
		expect.Equal(t, id.String(), "0x"+tt.want, "%s: String", tt.name)
		form, qpn := serviceid.Parse(id)
		expect.Equal(t, form, tt.form, "%s: form of %v", tt.name, id)
		expect.Equal(t, qpn, tt.qpn, "%s: QPN of %v", tt.name, id)
	}
	if id := serviceid.New(serviceid.RFC, 0xff000048); id != 0x0100000000000048 {
		t.Errorf("QPN of more than 24 bits: %v", id)
	}
	if id := serviceid.New(serviceid.Other, 0x48); id != 0 {
		t.Errorf("no form: %v", id)
	}
}

func TestParseOther(t *testing.T) {
	for _, tt := range []struct {
		name string
		id   serviceid.ID
	}{
		{"zero", 0},
		{"type 1", 0x0101000000000048},
		{"reserved octet 2", 0x0100010000000048},
		{"reserved octet 4", 0x0100000001000048},
		{"legacy with reserved bits", 0x1000000080000456},
		{"the range of rdma_cm's TCP port space", 0x0000000001064e20},
		{"octet 0 has both", 0x1100000000000048},
	} {
		form, qpn := serviceid.Parse(tt.id)
		expect.Equal(t, form, serviceid.Other, "%s: form of %v", tt.name, tt.id)
		expect.Equal(t, qpn, 0, "%s: QPN of %v", tt.name, tt.id)
	}
}

func TestFormString(t *testing.T) {
	if s := serviceid.RFC.String() + serviceid.Legacy.String() + serviceid.Other.String(); s != "rfclegacyother" {
		t.Error(s)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(uint64(0x0100000000000048))
	f.Add(uint64(0x1000000000ffffff))
	f.Add(uint64(0x0101000000000048))
	f.Fuzz(func(t *testing.T, v uint64) {
		form, q := serviceid.Parse(serviceid.ID(v))
		if !q.Valid() {
			t.Fatalf("%#x: QPN %v", v, q)
		}
		if form != serviceid.Other && serviceid.New(form, q) != serviceid.ID(v) {
			t.Fatalf("%#x is %v of %v, which makes %v", v, form, q, serviceid.New(form, q))
		}
	})
}
