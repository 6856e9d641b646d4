package ip

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
)

// Reports that Linux sent: IGMPv3 with the router alert option, MLDv2 behind a
// hop-by-hop header.
var (
	igmpJoin  = unhex("46c00028000040000102f9ab0a4d0001e0000016940400002200e9af0000000104000000ef4d0101")
	igmpLeave = unhex("46c00028000040000102f9ab0a4d0001e0000016940400002200eaaf0000000103000000ef4d0101")
	mldJoin   = unhex("6000000000380001fe800000000000006c1f23fffe813566ff020000000000000000000000000016" +
		"3a000502000001008f00b5000000000204000000ff15000000000000000000000000beef04000000ff0200000000000000000001ff813566")
	mldLeave = unhex("6000000000240001fe800000000000006c1f23fffe813566ff020000000000000000000000000016" +
		"3a000502000001008f00ee010000000103000000ff15000000000000000000000000beef")
)

// igmp puts a message, whose checksum it makes right, into a packet.
func igmp(m string) []byte {
	b := unhex(m)
	binary.BigEndian.PutUint16(b[2:], Checksum(b))
	return append(AppendV4Header(nil, addr("10.0.0.1"), addr("224.0.0.22"), ProtoIGMP, 1, 0, true, len(b)), b...)
}

func mld(m string) []byte {
	b := unhex(m)
	src, dst := addr("fe80::1"), addr("ff02::16")
	binary.BigEndian.PutUint16(b[2:], Checksum6(src, dst, ProtoICMPv6, b))
	p := AppendV6Header(nil, src, dst, ProtoHopByHop, 1, 8+len(b))
	return append(append(p, unhex("3a00050200000100")...), b...)
}

func TestReports(t *testing.T) {
	ch := func(g string, k ChangeKind, n int) Change { return Change{addr(g), k, n} }
	for _, tt := range []struct {
		name string
		pkt  []byte
		want []Change
	}{
		{"IGMPv3 join from Linux", igmpJoin, []Change{ch("239.77.1.1", Exclude, 0)}},
		{"IGMPv3 leave from Linux", igmpLeave, []Change{ch("239.77.1.1", Include, 0)}},
		{"MLDv2 join from Linux", mldJoin, []Change{ch("ff15::beef", Exclude, 0), ch("ff02::1:ff81:3566", Exclude, 0)}},
		{"MLDv2 leave from Linux", mldLeave, []Change{ch("ff15::beef", Include, 0)}},
		{"IGMPv1 report", igmp("12000000ef010203"), []Change{ch("239.1.2.3", Join, 0)}},
		{"IGMPv2 report", igmp("16000000ef010203"), []Change{ch("239.1.2.3", Join, 0)}},
		{"IGMPv2 leave", igmp("17000000ef010203"), []Change{ch("239.1.2.3", Leave, 0)}},
		{"IGMPv3, every kind, sources and auxiliary data", igmp("2200000000000007" +
			"01000001ef0000010a000009" + "02000000ef000002" + "03000002ef0000030a0000090a00000a" + "04010000ef000004deadbeef" +
			"05000001ef0000050a000009" + "06000001ef0000060a000009" + "09000000ef000007"),
			[]Change{ch("239.0.0.1", Include, 1), ch("239.0.0.2", Exclude, 0), ch("239.0.0.3", Include, 2),
				ch("239.0.0.4", Exclude, 0), ch("239.0.0.5", Allow, 1), ch("239.0.0.6", Block, 1)}},
		{"MLDv1 report", mld("8300000000000000ff15000000000000000000000000beef"), []Change{ch("ff15::beef", Join, 0)}},
		{"MLDv1 done", mld("8400000000000000ff15000000000000000000000000beef"), []Change{ch("ff15::beef", Leave, 0)}},
		{"no records", igmp("2200000000000000"), nil},
	} {
		if !IsReport(tt.pkt) {
			t.Errorf("%s: not seen as a report", tt.name)
		}
		got, err := AppendChanges(nil, tt.pkt)
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, %v; want %v", tt.name, got, err, tt.want)
		}
	}
}

func TestNoReports(t *testing.T) {
	flip := func(b []byte, off int) []byte { b = bytes.Clone(b); b[off] ^= 1; return b }
	for _, tt := range []struct {
		name string
		pkt  []byte
		not  bool // it is no report at all
	}{
		{"echo", echo4, true},
		{"IGMP query", igmp("1164000000000000"), true},
		{"MLD query", mld("820000000000000000000000000000000000000000000000"), true},
		{"later fragment", flip(igmp("16000000ef010203"), 7), true},
		{"checksum", flip(igmpJoin, 27), false},
		{"MLD checksum", flip(mldJoin, 51), false},
		{"group that is none", igmp("160000000a010203"), false},
		{"more records said than there", igmp("220000000000000204000000ef000001"), false},
		{"more sources said than there", igmp("220000000000000104000fffef000001"), false},
		{"second record's group is none", igmp("220000000000000204000000ef000001040000000a000001"), false},
		{"short", igmp("16000000"), false},
		{"short MLD", mld("8300000000000000ff15"), false},
	} {
		got, err := AppendChanges(nil, tt.pkt)
		switch {
		case err == nil:
			t.Errorf("%s: err is nil", tt.name)
		case errors.Is(err, ErrNotReport) != tt.not:
			t.Errorf("%s: Is(err, ErrNotReport) is %v, want %v", tt.name, errors.Is(err, ErrNotReport), tt.not)
		case len(got) != 0:
			t.Errorf("%s: got has %v elements, want 0", tt.name, len(got))
		}
	}
}

func TestWanted(t *testing.T) {
	for _, tt := range []struct {
		c           Change
		want, known bool
	}{
		{Change{Kind: Join}, true, true}, {Change{Kind: Leave}, false, true}, {Change{Kind: Exclude}, true, true},
		{Change{Kind: Include, Sources: 1}, true, true}, {Change{Kind: Include}, false, true},
		{Change{Kind: Allow, Sources: 1}, true, true}, {Change{Kind: Block, Sources: 1}, false, false},
	} {
		if want, known := tt.c.Wanted(); want != tt.want || known != tt.known {
			t.Errorf("%s with %d sources: %v %v, want %v %v", tt.c.Kind, tt.c.Sources, want, known, tt.want, tt.known)
		}
	}
}

func FuzzReports(f *testing.F) {
	for _, b := range [][]byte{igmpJoin, igmpLeave, mldJoin, mldLeave, igmp("16000000ef010203"),
		mld("8300000000000000ff15000000000000000000000000beef")} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := AppendChanges(nil, in)
		if err != nil && len(got) > 0 {
			t.Fatalf("%v with %d changes", err, len(got))
		}
		for _, c := range got {
			if !c.Group.IsMulticast() {
				t.Fatalf("%v is no group: out of %x", c.Group, in)
			}
		}
		if len(got) > len(in)/8 {
			t.Fatalf("%d changes, want one for 8 octets at most: out of %x", len(got), in)
		}
		if len(got) == 0 || in[0]>>4 != 4 {
			return
		}
		if !IsReport(in) {
			t.Fatalf("a report, but not seen as one: %x", in)
		}
	})
}
