package ibverbs

import (
	"bytes"
	"encoding/binary"
	"net"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// TestShow has packets made of work requests and reads them again.
func TestShow(t *testing.T) {
	payload := make([]byte, 2500)
	for i := range payload {
		payload[i] = byte(i * 7)
	}
	for _, tt := range []struct {
		name string
		f    flow
		m    message
		want []roce.Opcode
	}{
		{"RC of three packets", flow{transport: ib.RC, mtu: 1024}, message{op: verbs.Send, payload: payload},
			[]roce.Opcode{roce.RCSendFirst, roce.RCSendMiddle, roce.RCSendLast}},
		{"one with immediate", flow{transport: ib.RC, mtu: 4096},
			message{op: verbs.SendImm, imm: 0x01020304, payload: payload},
			[]roce.Opcode{roce.RCSendOnlyImm}},
		{"UC write", flow{transport: ib.UC, mtu: 2048},
			message{op: verbs.Write, remoteAddr: 1 << 40, rkey: 9, payload: payload},
			[]roce.Opcode{roce.RCWriteFirst.With(ib.UC), roce.RCWriteLast.With(ib.UC)}},
		{"UD", flow{transport: ib.UD, qkey: 0x0b1b}, message{op: verbs.Send, payload: payload},
			[]roce.Opcode{roce.RCSendOnly.With(ib.UD)}},
		{"nothing in it", flow{transport: ib.RC, mtu: 1024}, message{op: verbs.Send}, []roce.Opcode{roce.RCSendOnly}},
		{"a READ is not shown", flow{transport: ib.RC, mtu: 1024}, message{op: verbs.Read, payload: payload}, nil},
	} {
		tt.f.src, tt.f.dst, tt.f.qpn, tt.f.peer, tt.f.pkey, tt.f.hops = gid("fe80::1"), gid("fe80::2"), 0x11, 0x22, 0xffff, 64
		tt.m.psn = 0xffffff
		var got []roce.Opcode
		var whole []byte
		tt.f.show(func(out bool, ip []byte) {
			h, udp, err := rocetest.ParseIP(ip)
			switch ok, bad := rocetest.CheckIP(ip); {
			case err != nil:
				t.Fatalf("%s: %v", tt.name, err)
			case bad != nil:
				t.Fatalf("%s: bad is %v, want nil", tt.name, bad)
			case !ok:
				t.Fatalf("%s: ok is false, want true", tt.name)
			case !out:
				t.Fatalf("%s: out is false, want true", tt.name)
			}
			bth := roce.BTH(ip[h.Len():])
			expect.Equal(t, ib.GIDFromAddr(h.Dst), tt.f.dst, "%s: destination of packet %d", tt.name, len(got))
			expect.Equal(t, bth.DestQPN(), 0x22, "%s: DestQPN of packet %d", tt.name, len(got))
			expect.Equal(t, bth.PSN(), ib.PSN(0xffffff).Add(len(got)), "%s: PSN of packet %d", tt.name, len(got))
			if len(udp) == 0 {
				t.Errorf("%s: packet %d is empty", tt.name, len(got))
			}
			op := bth.Opcode()
			got = append(got, op)
			body := ip[h.Len()+op.HeaderLen() : len(ip)-roce.ICRCLen-bth.Pad()]
			whole = append(whole, body...)
		}, true, tt.m)
		if len(got) != len(tt.want) {
			t.Fatalf("%s: %v, want %v", tt.name, got, tt.want)
		}
		for i := range got {
			if got[i] != tt.want[i] {
				t.Errorf("%s: packet %d is %v, want %v", tt.name, i, got[i], tt.want[i])
			}
		}
		if tt.want != nil && !bytes.Equal(whole, tt.m.payload) {
			t.Errorf("%s: the payload is another", tt.name)
		}
	}
}

// An acknowledgement is shown as one IPv4 packet with a right ICRC.
func TestShowACK(t *testing.T) {
	f := flow{transport: ib.RC, src: gid("10.0.0.1"), dst: gid("10.0.0.2"), peer: 5, pkey: 0xffff, hops: 64}
	shown := 0
	f.ack(func(_ bool, ip []byte) {
		shown++
		ok, err := rocetest.CheckIP(ip)
		if err != nil {
			t.Fatalf("acknowledgement: %v", err)
		}
		expect.Equal(t, ok, true, "acknowledgement: whether its ICRC is right")
		expect.Equal(t, int(binary.BigEndian.Uint16(ip[2:])), len(ip), "acknowledgement: total length")
	}, true, 3, 4)
	expect.Equal(t, shown, 1, "number of packets shown")
}

func TestGather(t *testing.T) {
	sg := []verbs.SGE{{Buf: []byte("abc")}, {}, {Buf: []byte("defg")}}
	for n, want := range map[int]string{0: "", 2: "ab", 5: "abcde", 7: "abcdefg", 9: "abcdefg"} {
		if got := gather(sg, n); string(got) != want {
			t.Errorf("%d octets are %q, want %q", n, got, want)
		}
	}
}

// TestMemberships joins on the loopback device, where nobody hears of it.
func TestMemberships(t *testing.T) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Skip(err)
	}
	m := memberships{ifindex: lo.Index}
	defer m.close()
	v4, v6 := gid("239.192.255.255"), gid("ff12:401b:ffff::ffff:ffff")
	for _, mgid := range []ib.GID{v4, v6, v6} {
		if err := m.join(mgid); err != nil {
			t.Skipf("no multicast on lo: %v", err)
		}
	}
	if lost := m.renew(); lost != 0 || len(m.groups) != 2 {
		t.Errorf("%d groups, %d lost", len(m.groups), lost)
	}
	m.leave(v4)
	m.leave(v6)
	if m.groups[v6] == nil || m.groups[v4] != nil {
		t.Errorf("left once: %v", m.groups)
	}
	m.leave(v6)
	m.leave(v6) // never joined so often
	if len(m.groups) != 0 {
		t.Errorf("left: %v", m.groups)
	}
	if err := m.join(gid("10.0.0.1")); err == nil {
		t.Error("10.0.0.1 is a group")
	}
}

func TestOptions(t *testing.T) {
	if o := (&Options{}); o.addressWait() == 0 || o.log() == nil {
		t.Error("no defaults")
	}
	if o := (&Options{AddressWait: -1}); o.addressWait() != 0 {
		t.Errorf("negative waits %v", o.addressWait())
	}
}
