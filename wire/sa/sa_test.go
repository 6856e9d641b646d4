package sa_test

import (
	"encoding/hex"
	"errors"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/wire"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/sa"
)

// vectors returns the MADs of testdata/vectors.txt by name.
func vectors(t testing.TB) map[string][]byte {
	t.Helper()
	m := vector.File(t, "testdata/vectors.txt")
	for name, b := range m {
		expect.MustEqual(t, len(b), mad.Len, "length of %s", name)
	}
	return m
}

func gid(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

// Who and what the vectors are about.
var (
	hostB     = gid("fe80::2:c900:b0:1")
	hostD     = gid("fe80::2:c900:d0:1")
	broadcast = gid("ff12:401b:ffff::ffff:ffff")
	otherMGID = gid("ff12:401b:ffff::fb")
)

// broadcastJoin is what Linux asks with for the broadcast group.
func broadcastJoin() sa.MCMemberRecord {
	return sa.MCMemberRecord{MGID: broadcast, PortGID: hostB, PKey: 0xffff, JoinState: sa.FullMember}
}

// joined is opensm's answer to it.
func joined() sa.MCMemberRecord {
	r := broadcastJoin()
	r.QKey, r.MLID, r.MTUSelector, r.MTU, r.RateSelector, r.Rate = ib.QKeyIPoIB, 0xc000, sa.Exactly, ib.MTU2048,
		sa.Exactly, ib.Rate10G
	r.LifeSelector, r.Life, r.Scope = sa.Exactly, 18, 2
	return r
}

// created is the record of a group that its first member described.
func created(answer bool) sa.MCMemberRecord {
	r := joined()
	r.MGID, r.MLID, r.Scope, r.LifeSelector, r.Life = otherMGID, 0, 0, 0, 0
	if answer {
		r.MLID, r.LifeSelector = 0xc001, sa.Exactly
	}
	return r
}

func pathAsked(dgid ib.GID) sa.PathRecord {
	return sa.PathRecord{DGID: dgid, SGID: hostB, Numb: 1, PKey: 0xffff}
}

func path() sa.PathRecord {
	return sa.PathRecord{DGID: hostD, SGID: hostB, DLID: 6, SLID: 4, Reversible: true, PKey: 0xffff,
		MTUSelector: sa.Exactly, MTU: ib.MTU2048, RateSelector: sa.Exactly, Rate: ib.Rate10G,
		LifeSelector: sa.Exactly, Life: 18}
}

func informed() sa.InformInfo {
	return sa.InformInfo{LIDBegin: sa.AnyLID, Generic: true, Subscribe: true, Type: sa.AnyType, Trap: sa.TrapGroupCreated,
		QPN: 0x800001, ResponseTime: 19, Producer: sa.AnyProducer}
}

func TestVectors(t *testing.T) {
	left := broadcastJoin()
	left.MLID, left.MTUSelector, left.RateSelector, left.LifeSelector, left.Scope, left.JoinState = 0, sa.Exactly,
		sa.Exactly, sa.Exactly, 2, 0
	unknown := broadcastJoin()
	unknown.MGID = gid("ff12:401b:ffff::fc")

	vs := vectors(t)
	const ours, theirs = 0x5a000001, 0x100005a000001 // the simulator writes into the upper half
	for _, tt := range []struct {
		name   string
		method sa.Method
		status sa.Status
		tid    uint64
		offset uint16
		mask   sa.Mask
		record sa.Record
	}{
		{"get_class_port_info", sa.MethodGet, 0, 0x15a40a84, 0, 0, sa.ClassPortInfo{}},
		{"class_port_info", sa.MethodGetResp, 0, 0x1000015a40a84, 0, 0, sa.ClassPortInfo{
			BaseVersion: 1, ClassVersion: 2, CapabilityMask: 0x2602, CapabilityMask2: 0xb5e8, ResponseTime: 16,
			Redirect: sa.Locator{QPN: 1, QKey: ib.QKeyGSI}, Trap: sa.Locator{QKey: ib.QKeyGSI}}},
		{"join", sa.MethodSet, 0, ours, 0, sa.JoinMask, broadcastJoin()},
		{"joined", sa.MethodGetResp, 0, theirs, 7, sa.JoinMask, joined()},
		{"create", sa.MethodSet, 0, ours, 0, sa.CreateMask, created(false)},
		{"created", sa.MethodGetResp, 0, theirs, 7, sa.CreateMask, created(true)},
		{"no_group", sa.MethodGetResp, sa.StatusInsufficientComponents, theirs, 0, sa.JoinMask, unknown},
		{"leave", sa.MethodDelete, 0, ours, 0, sa.JoinMask, broadcastJoin()},
		{"left", sa.MethodDeleteResp, 0, theirs, 7, sa.JoinMask, left},
		{"get_path", sa.MethodGet, 0, ours, 0, sa.PathMask, pathAsked(hostD)},
		{"path", sa.MethodGetResp, 0, theirs, 8, sa.PathMask, path()},
		{"no_path", sa.MethodGetResp, sa.StatusNoRecords, theirs, 0, sa.PathMask, pathAsked(gid("fe80::1"))},
		{"get_path_table", sa.MethodGetTable, 0, 0x5dcd16ee, 0, sa.PathDGID | sa.PathSGID | sa.PathNumb,
			sa.PathRecord{DGID: hostD, SGID: hostB, Numb: 0x7f}},
		{"get_group", sa.MethodGetTable, 0, 0x3c1012ab, 0, sa.MCMGID, sa.MCMemberRecord{MGID: broadcast}},
		{"inform", sa.MethodSet, 0, 7, 0, 0, informed()},
		{"informed", sa.MethodGetResp, 0, 0x1000000000007, 4, 0, informed()},
	} {
		var got sa.Message
		if err := got.UnmarshalBinary(vs[tt.name]); err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		want := sa.Header{Method: tt.method, Status: tt.status, TransactionID: tt.tid, Attr: tt.record.Attr(),
			AttrOffset: tt.offset, Mask: tt.mask}
		if got.Header != want {
			t.Errorf("%s: header\n got %+v\nwant %+v", tt.name, got.Header, want)
		}
		if got.Record != tt.record {
			t.Errorf("%s: record\n got %+v\nwant %+v", tt.name, got.Record, tt.record)
		}
		if tt.method.IsResponse() {
			continue // opensm leaves something behind the record
		}
		if out, _ := got.AppendBinary(nil); string(out) != string(vs[tt.name]) {
			t.Errorf("%s: written\n got %x\nwant %x", tt.name, out, vs[tt.name])
		}
	}
}

func TestReport(t *testing.T) {
	vs := vectors(t)
	var m sa.Message
	if err := m.UnmarshalBinary(vs["report"]); err != nil {
		t.Fatal(err)
	}
	if m.Method != sa.MethodReport {
		t.Errorf("method: got %v, want Report", m.Method)
	}
	n, ok := m.Record.(sa.Notice)
	if !ok {
		t.Fatalf("record: got %T, want a Notice", m.Record)
	}
	expect.Equal(t, n.Generic, true, "Generic")
	expect.Equal(t, n.Type, 3, "Type")
	expect.Equal(t, n.Producer, 4, "Producer")
	if n.Trap != sa.TrapGroupCreated {
		t.Errorf("trap: got %v, want %v", n.Trap, sa.TrapGroupCreated)
	}
	if want := gid("ff12:401b:ffff::e000:1234"); !holds(n.GID())(want) {
		t.Errorf("group: got %v, want %v", n, want)
	}
	if want := gid("fe80::2:c900:a0:1"); n.IssuerGID != want || n.IssuerLID != 1 {
		t.Errorf("issuer: got %v, LID %d; want %v, LID 1", n.IssuerGID, n.IssuerLID, want)
	}
	if _, ok := n.LID(); ok {
		t.Error("trap 66 is about a LID")
	}
}

func holds[T comparable](got T, ok bool) func(want T) bool {
	return func(want T) bool { return ok && got == want }
}

// TestNoticesAboutLIDs: layouts as opensm's ib_types.h has them.
func TestNoticesAboutLIDs(t *testing.T) {
	link := sa.Notice{Generic: true, Trap: sa.TrapLinkState}
	copy(link.Details[:], []byte{0x00, 0x12})
	if !holds(link.LID())(0x12) {
		t.Errorf("trap 128: got %v, want LID 0x12", link)
	}
	capability := sa.Notice{Generic: true, Trap: sa.TrapCapabilityChange}
	copy(capability.Details[:], []byte{0, 0, 0x00, 0x34, 0, 0, 0x02, 0x51, 0x08, 0x68})
	if !holds(capability.LID())(0x34) {
		t.Errorf("trap 144: got %v, want LID 0x34", capability)
	}
	if !holds(capability.CapabilityMask())(0x02510868) {
		t.Errorf("trap 144: got mask %#x, want 0x2510868", capability.Details[6:10])
	}
	capability.Generic = false // then the number is a device ID
	if _, ok := capability.LID(); ok {
		t.Error("a vendor's notice is about a LID")
	}
	for _, n := range []sa.Notice{
		{Generic: true, Trap: sa.TrapGIDInService - 1},
		{Generic: true, Trap: sa.TrapGroupDeleted + 1},
		{Generic: false, Trap: sa.TrapGroupCreated}, // a device ID
	} {
		if _, ok := n.GID(); ok {
			t.Errorf("generic %v, trap %d: about a GID", n.Generic, n.Trap)
		}
	}
}

// TestRefused: what no message may look like, one octet of a good one changed.
func TestRefused(t *testing.T) {
	vs := vectors(t)
	for _, tt := range []struct {
		name, vector string
		at           int
		value        byte
		field        string
	}{
		{"base version 2", "joined", 0, 2, "base version"},
		{"class of the CM", "joined", 1, 7, "class"},
		{"class version 1", "joined", 2, 1, "class version"},
		{"attribute that we do not know", "joined", 17, 0x39, "attribute"},
		{"segment of a longer message", "joined", 26, 1, "RMPP flags"},
		{"answer that may have several", "path_table", 26, 1, "RMPP flags"}, // as it came
		{"generic 2", "inform", 56 + 22, 2, "generic"},
		{"subscribe 2", "inform", 56 + 23, 2, "subscribe"},
	} {
		b := append([]byte(nil), vs[tt.vector]...)
		b[tt.at] = tt.value
		before := sa.Message{Header: sa.Header{Method: 1}}
		m := before
		err := m.UnmarshalBinary(b)
		var fe *wire.FieldError
		if !errors.As(err, &fe) {
			t.Errorf("%s: got %v, want a FieldError", tt.name, err)
			continue
		}
		if fe.Field != tt.field {
			t.Errorf("%s: got %v, want the field %q", tt.name, err, tt.field)
		}
		if m != before {
			t.Errorf("%s: changed in spite of the error: %+v", tt.name, m)
		}
	}
	for n := range mad.Len {
		var m sa.Message
		var short *wire.ShortError
		if err := m.UnmarshalBinary(vs["joined"][:n]); !errors.As(err, &short) {
			t.Errorf("%d octets: got %v, want a ShortError", n, err)
		}
	}
}

// TestSelectedFields: neighbours in one octet do not leak into each other.
func TestSelectedFields(t *testing.T) {
	r := sa.MCMemberRecord{MTUSelector: sa.Best, MTU: 0x3f, RateSelector: sa.Less, Rate: 0x2a,
		LifeSelector: sa.Exactly, Life: 0x15, SL: 0xf, FlowLabel: 0xabcde, HopLimit: 0x77, Scope: 5,
		JoinState: sa.SendOnlyNonMember, ProxyJoin: true}
	b, _ := r.AppendBinary(nil)
	if got, want := hex.EncodeToString(b[38:]), "ff0000006a95fabcde7754800000"; got != want {
		t.Errorf("octets 38 to 51: got %s, want %s", got, want)
	}
	var back sa.MCMemberRecord
	if err := back.UnmarshalBinary(b); err != nil || back != r {
		t.Errorf("read again: got %+v (%v), want %+v", back, err, r)
	}
	p := sa.PathRecord{Raw: true, FlowLabel: 0x54321, HopLimit: 9, Numb: 0x7f, QoSClass: 0xabc, SL: 0xd, Preference: 3}
	b, _ = p.AppendBinary(nil)
	if got, want := hex.EncodeToString(b[44:]), "8543210900"+"7f0000abcd"+"00000003"+"000000000000"; got != want {
		t.Errorf("octets 44 to 63: got %s, want %s", got, want)
	}
}

func TestWords(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{sa.Status(0).String(), "success"},
		{sa.StatusBusy.String(), "busy (0x0001)"},
		{(sa.StatusBusy | sa.StatusNoRecords).String(), "busy, no records (0x0301)"},
		{sa.StatusBadAttribute.String(), "attribute not supported (0x000c)"},
		{sa.Status(0x7700).String(), "status 0x7700"},
		{sa.MethodDeleteResp.String(), "DeleteResp"},
		{sa.Method(0x33).String(), "Method(0x33)"},
		{sa.AttrNotice.String(), "Notice"},
		{sa.Attr(0x11).String(), "Attr(0x0011)"},
		{sa.JoinState(0).String(), "no member"},
		{(sa.FullMember | sa.SendOnlyNonMember).String(), "full, send-only"},
		{sa.Best.String(), "best"},
		{sa.Trap(300).String(), "trap 300"},
		{informed().String(), "InformInfo subscribe: group created"},
		{path().String(), "PathRecord dgid=fe80::2:c900:d0:1 sgid=fe80::2:c900:b0:1 dlid=0x0006 slid=0x0004 " +
			"pkey=0xffff mtu=2048 rate=3 life=18 sl=0 hop=0"},
		{joined().String(), "MCMemberRecord mgid=ff12:401b:ffff::ffff:ffff port=fe80::2:c900:b0:1 mlid=0xc000 " +
			"pkey=0xffff qkey=0x00000b1b mtu=2048 rate=3 sl=0 join=full"},
		{sa.ClassPortInfo{BaseVersion: 1, ClassVersion: 2, CapabilityMask2: 0xb5e8, ResponseTime: 16}.String(),
			"ClassPortInfo version=1.2 cap=0x0000 cap2=0x000b5e8 response=268.435456ms"},
	} {
		if tt.got != tt.want {
			t.Errorf("got %q, want %q", tt.got, tt.want)
		}
	}
	if sa.CreateMask != 0x173f7 {
		t.Errorf("CreateMask: got %#x, want Linux's 0x173f7", sa.CreateMask)
	}
	if sa.JoinMask != 0x10083 {
		t.Errorf("JoinMask: got %#x, want Linux's 0x10083", sa.JoinMask)
	}
	if sa.PathMask != 0x340c {
		t.Errorf("PathMask: got %#x, want Linux's 0x340c", sa.PathMask)
	}
}
