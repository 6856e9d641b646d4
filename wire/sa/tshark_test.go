package sa_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/wire/sa"
)

// A judged message is one of ours, and what tshark is to find in it.
type judged struct {
	name   string
	msg    sa.Message
	fields map[string]string
}

// everything returns messages with a value of its own in every field.
func everything() []judged {
	return []judged{
		{"MCMemberRecord", sa.Message{
			Header: sa.Header{Method: sa.MethodSet, TransactionID: 0x1122334455667788, SMKey: 0x99, AttrOffset: 7,
				Mask: sa.CreateMask},
			Record: sa.MCMemberRecord{MGID: broadcast, PortGID: hostB, QKey: 0x80010b1b, MLID: 0xc123,
				MTUSelector: sa.Less, MTU: ib.MTU4096, TrafficClass: 0x20, PKey: 0x8001, RateSelector: sa.Exactly, Rate: 16,
				LifeSelector: sa.Best, Life: 19, SL: 5, FlowLabel: 0x12345, HopLimit: 64, Scope: 2,
				JoinState: sa.SendOnlyNonMember, ProxyJoin: true}},
			map[string]string{
				"mad.method": "0x02", "mad.transactionid": "0x1122334455667788", "mad.attributeid": "0x0038",
				"sa.smkey": "0x0000000000000099", "sa.attributeoffset": "0x0007", "sa.componentmask": "0x00000000000173f7",
				"mcmemberrecord.mgid": broadcast.String(), "mcmemberrecord.portgid": hostB.String(),
				"mcmemberrecord.q_key": "0x80010b1b", "mcmemberrecord.mlid": "0xc123", "mcmemberrecord.mtuselector": "0x01",
				"mcmemberrecord.mtu": "0x05", "mcmemberrecord.tclass": "0x20", "mcmemberrecord.p_key": "0x8001",
				"mcmemberrecord.rateselector": "0x02", "mcmemberrecord.rate": "0x10",
				"mcmemberrecord.packetlifetimeselector": "0x03", "mcmemberrecord.packetlifetime": "0x13",
				"mcmemberrecord.sl": "0x05", "mcmemberrecord.flowlabel": "0x012345", "mcmemberrecord.hoplimit": "0x40",
				"mcmemberrecord.scope": "0x02", "mcmemberrecord.joinstate": "0x04", "mcmemberrecord.proxyjoin": "0x01"}},
		{"PathRecord", sa.Message{
			Header: sa.Header{Method: sa.MethodGetResp, Status: sa.StatusBusy, Mask: sa.PathMask},
			Record: sa.PathRecord{DGID: hostD, SGID: hostB, DLID: 6, SLID: 0x104, FlowLabel: 0xabcde, HopLimit: 3,
				TrafficClass: 0x44, Reversible: true, Numb: 2, PKey: 0x7fff, SL: 9, MTUSelector: sa.Exactly,
				MTU: ib.MTU1024, RateSelector: sa.Less, Rate: 7, LifeSelector: sa.Exactly, Life: 18, Preference: 1}},
			map[string]string{
				"mad.method": "0x81", "mad.status": "0x0001", "mad.attributeid": "0x0035", "sa.componentmask": "0x000000000000340c",
				"pathrecord.dgid": hostD.String(), "pathrecord.sgid": hostB.String(), "pathrecord.dlid": "0x0006",
				"pathrecord.slid": "0x0104", "pathrecord.flowlabel": "0x0abcde", "pathrecord.hoplimit": "0x03",
				"pathrecord.tclass": "0x44", "pathrecord.reversible": "0x01", "pathrecord.numbpath": "0x02",
				"pathrecord.p_key": "0x7fff", "pathrecord.sl": "0x0009", "pathrecord.mtuselector": "0x02",
				"pathrecord.mtu": "0x03", "pathrecord.rateselector": "0x01", "pathrecord.rate": "0x07",
				"pathrecord.packetlifetimeselector": "0x02", "pathrecord.packetlifetime": "0x12", "pathrecord.preference": "0x01"}},
		{"InformInfo", sa.Message{
			Header: sa.Header{Method: sa.MethodSet},
			Record: sa.InformInfo{GID: hostD, LIDBegin: 0x10, LIDEnd: 0x20, Generic: true, Subscribe: true, Type: 3,
				Trap: sa.TrapGroupDeleted, QPN: 0x123456, ResponseTime: 19, Producer: 4}},
			map[string]string{
				"mad.attributeid": "0x0003", "informinfo.gid": hostD.String(), "informinfo.lidrangebegin": "0x0010",
				"informinfo.lidrangeend": "0x0020", "informinfo.isgeneric": "0x01", "informinfo.subscribe": "0x01",
				"informinfo.type": "0x0003", "informinfo.trapnumberdeviceid": "0x0043", "informinfo.qpn": "0x123456",
				"informinfo.resptimevalue": "0x13", "informinfo.producertypevendorid": "0x000004"}},
		{"Notice", sa.Message{
			Header: sa.Header{Method: sa.MethodReport},
			Record: sa.Notice{Generic: true, Type: 3, Producer: 4, Trap: sa.TrapGroupCreated, IssuerLID: 7, Toggle: true,
				Count: 0x123, Details: details(broadcast)}},
			map[string]string{
				"mad.method": "0x06", "mad.attributeid": "0x0002", "notice.isgeneric": "0x01", "notice.type": "0x03",
				"notice.producertypevendorid": "0x000004", "notice.trapnumberdeviceid": "0x0042", "notice.issuerlid": "0x0007",
				"notice.noticetoggle": "0x01", "notice.noticecount": "0x0123", "trap.gidaddr": broadcast.String()}},
		{"ClassPortInfo", sa.Message{
			Header: sa.Header{Method: sa.MethodGetResp, Status: sa.StatusRedirect},
			Record: sa.ClassPortInfo{BaseVersion: 1, ClassVersion: 2, CapabilityMask: 0x2602, ResponseTime: 16,
				Redirect: sa.Locator{GID: hostD, TrafficClass: 0x20, SL: 3, FlowLabel: 0x1234, LID: 6, PKey: 0xffff,
					QPN: 0x112233, QKey: ib.QKeyGSI},
				Trap: sa.Locator{GID: hostB, QPN: 1, QKey: ib.QKeyGSI}}},
			map[string]string{
				"mad.attributeid": "0x0001", "mad.status": "0x0002",
				"classportinfo.baseversion": "0x01", "classportinfo.classversion": "0x02", "classportinfo.capabilitymask": "0x2602",
				"classportinfo.resptimevalue": "0x10", "classportinfo.redirectgid": hostD.String(),
				"classportinfo.redirecttc": "0x20", "classportinfo.redirectsl": "0x03",
				"classportinfo.redirectfl": "0x001234", "classportinfo.redirectlid": "0x0006",
				"classportinfo.redirectpkey": "0xffff", "classportinfo.redirectqp": "0x112233",
				"classportinfo.redirectqkey": "0x80010000", "classportinfo.trapgid": hostB.String(),
				"classportinfo.trapqp": "0x000001"}},
	}
}

func details(g ib.GID) (d [54]byte) {
	copy(d[6:], g[:])
	return d
}

// TestTshark: tshark finds every field where we wrote it.
func TestTshark(t *testing.T) {
	if _, err := exec.LookPath("tshark"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("tshark is not installed")
		}
		t.Skip("tshark is not installed")
	}
	all := everything()
	file := filepath.Join(t.TempDir(), "mads.pcap")
	if err := os.WriteFile(file, pcap(all), 0o600); err != nil {
		t.Fatal(err)
	}
	column, args := map[string]int{}, []string{"-n", "-r", file, "-T", "fields", "-E", "occurrence=f"}
	for _, tt := range all {
		for name := range tt.fields {
			if _, ok := column[name]; !ok {
				column[name] = len(column)
				args = append(args, "-e", "infiniband."+name)
			}
		}
	}
	c := exec.Command("tshark", args...)
	var complaint strings.Builder
	c.Stderr = &complaint
	out, err := c.Output()
	if err != nil {
		t.Fatalf("tshark: %v\n%s", err, &complaint)
	}
	rows := strings.Split(strings.TrimRight(string(out), "\n"), "\n")
	if len(rows) != len(all) {
		t.Fatalf("tshark sees %d packets, want %d", len(rows), len(all))
	}
	for i, tt := range all {
		values := append(strings.Split(rows[i], "\t"), make([]string, len(column))...)
		for name, want := range tt.fields {
			if got := values[column[name]]; got != want {
				t.Errorf("%s: %s: tshark sees %q, want %q", tt.name, name, got, want)
			}
		}
	}
}

// pcap wraps MADs as RoCE does: Ethernet, GRH, BTH and DETH of a UD packet to QP 1.
func pcap(all []judged) []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(nil, 0xa1b2c3d4)
	b = le.AppendUint16(b, 2)
	b = le.AppendUint16(b, 4)
	for _, v := range []uint32{0, 0, 65535, 1} {
		b = le.AppendUint32(b, v)
	}
	for _, j := range all {
		f := append(bytes.Repeat([]byte{2}, 12), 0x89, 0x15)
		f = append(f, 0x60, 0, 0, 0)
		f = binary.BigEndian.AppendUint16(f, 12+8+256+4)
		f = append(f, 0x1b, 1)
		f = append(f, make([]byte, 32)...)
		f = append(f, 0x64, 0, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 7) // BTH: UD SEND only
		f = append(f, 0x80, 1, 0, 0, 0, 0, 0, 1)                   // DETH
		f, _ = j.msg.AppendBinary(f)
		f = append(f, 0, 0, 0, 0) // ICRC
		for _, v := range []uint32{0, 0, uint32(len(f)), uint32(len(f))} {
			b = le.AppendUint32(b, v)
		}
		b = append(b, f...)
	}
	return b
}
