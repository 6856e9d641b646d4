package vectors

import (
	"encoding/hex"
	"math"
	"net/netip"

	"ipoibcm/mtu"
	"ipoibcm/wire/encap"
)

// crossingFile has what becomes of a REQ that comes while one of ours is outstanding.
func crossingFile() file {
	f := file{Title: "REQs that cross (RFC 4755 section 3.3): local is the receiver of the REQ, remote its sender"}
	a, b := linkA, linkB
	sameQPN, sameGID := a, a
	sameQPN.GID, sameGID.QPN = gid("fe80::3"), a.QPN+1
	top := a
	top.QPN, top.GID = 0xfffffe, gid("fe80::1")
	uc := a
	uc.Flags = encap.FlagUC
	for _, tt := range []struct {
		name          string
		local, remote encap.LinkAddr
		outstanding   bool
		accept        bool
	}{
		{"local is smaller by its QPN", a, b, true, true},
		{"local is larger by its QPN", b, a, true, false},
		{"local is smaller by the last octet of its GID", a, sameQPN, true, true},
		{"local is larger by the last octet of its GID", sameQPN, a, true, false},
		{"the GID is the same, local's QPN smaller by one", a, sameGID, true, true},
		{"the GID is the same, local's QPN larger by one", sameGID, a, true, false},
		{"the QPN counts before the GID, and unsigned", top, b, true, false},
		{"flags do not count: UC against RC, local smaller", uc, b, true, true},
		{"flags do not count: RC and UC against UC, local larger", b, uc, true, false},
		{"the addresses are equal: a REQ of our own", a, a, true, false},
		{"no REQ of ours is outstanding, local larger", b, a, false, true},
	} {
		want := object{"verdict": "accept"}
		if !tt.accept {
			want = object{"verdict": "reject", "reason": 28}
		}
		f.Decisions = append(f.Decisions, decision{Rule: "crossing", Name: tt.name, Clause: "RFC 4755 section 3.3",
			Given: object{"local": linkHex(tt.local), "remote": linkHex(tt.remote), "outstanding": tt.outstanding},
			Want:  want,
			decide: func() object {
				if !tt.outstanding || tt.local.Compare(tt.remote) < 0 {
					return object{"verdict": "accept"}
				}
				return object{"verdict": "reject", "reason": 28}
			}})
	}
	return f
}

func linkHex(a encap.LinkAddr) string {
	b, _ := a.AppendBinary(nil)
	return hex.EncodeToString(b)
}

// mtuFile has the MTU of connections, and what becomes of packets that are too large.
func mtuFile() file {
	f := file{Title: "MTUs: of a connection (RFC 4755 section 5.1), and what becomes of an IP packet (section 7.2)"}
	for _, tt := range []struct {
		name      string
		own, peer uint32
		ipv6      bool
		want      int // 0: refused
	}{
		{"both as Linux", 65524, 65524, true, 65520},
		{"the peer's is smaller", 65524, 2048, true, 2044},
		{"ours is smaller", 9000, 65524, true, 8996},
		{"the peer's is as large as 32 bits allow", 65524, math.MaxUint32, true, 65520},
		{"both above the largest message of InfiniBand", math.MaxUint32, math.MaxUint32, true, 1<<31 - 4},
		{"just enough for IPv6", 65524, 1284, true, 1280},
		{"too small for IPv6", 65524, 1283, true, 0},
		{"enough without IPv6", 65524, 1283, false, 1279},
		{"just enough for IPv4", 65524, 580, false, 576},
		{"too small for IPv4", 65524, 579, false, 0},
		{"the header alone", 65524, 4, false, 0},
		{"nothing", 65524, 0, true, 0},
	} {
		want := object{"ip_mtu": tt.want}
		if tt.want == 0 {
			want = object{"reject": 26}
		}
		f.Decisions = append(f.Decisions, decision{Rule: "receive_mtu", Name: tt.name, Clause: "RFC 4755 section 5.1",
			Given: object{"own": tt.own, "peer": tt.peer, "ipv6": tt.ipv6}, Want: want,
			decide: func() object {
				got, err := mtu.Negotiate(tt.own, tt.peer, tt.ipv6)
				if err != nil {
					return object{"reject": 26}
				}
				return object{"ip_mtu": got}
			}})
	}
	f.Decisions = append(f.Decisions, packets()...)
	return f
}

// packets are IP packets against what their next hop carries: now, and when the
// connection is up that is being set up.
func packets() (all []decision) {
	host4, host6 := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")
	for _, tt := range []struct {
		name    string
		p       mtu.Packet
		h       mtu.NextHop
		verdict string
		mtu     int
	}{
		{"it fits", mtu.Packet{Len: 9000, Dst: host4, DF: true}, mtu.NextHop{MTU: 65520}, "send", 0},
		{"it just fits", mtu.Packet{Len: 2044, Dst: host6}, mtu.NextHop{MTU: 2044}, "send", 0},
		{"too large, IPv4 with DF", mtu.Packet{Len: 9000, Dst: host4, DF: true}, mtu.NextHop{MTU: 8996}, "too big", 8996},
		{"too large, IPv4 without DF", mtu.Packet{Len: 9000, Dst: host4}, mtu.NextHop{MTU: 8996}, "fragment", 8996},
		{"too large, IPv6", mtu.Packet{Len: 9000, Dst: host6}, mtu.NextHop{MTU: 8996}, "too big", 8996},
		{"it fits UD while a connection is set up", mtu.Packet{Len: 2000, Dst: host4},
			mtu.NextHop{MTU: 2044, Pending: 65520}, "send", 0},
		{"it fits the connection that is set up", mtu.Packet{Len: 9000, Dst: host4},
			mtu.NextHop{MTU: 2044, Pending: 65520}, "wait", 0},
		{"too large for that, to be fragmented for it", mtu.Packet{Len: 65520, Dst: host4},
			mtu.NextHop{MTU: 2044, Pending: 8996}, "wait", 0},
		{"too large for that, IPv6", mtu.Packet{Len: 65520, Dst: host6}, mtu.NextHop{MTU: 2044, Pending: 8996},
			"too big", 8996},
		{"group, without DF", mtu.Packet{Len: 3000, Dst: netip.MustParseAddr("239.1.1.1")}, mtu.NextHop{MTU: 2044},
			"fragment", 2044},
		{"group, with DF: no ICMP answers a group", mtu.Packet{Len: 3000, Dst: netip.MustParseAddr("239.1.1.1"),
			DF: true}, mtu.NextHop{MTU: 2044}, "discard", 0},
		{"group, IPv6: RFC 4443 section 2.4", mtu.Packet{Len: 3000, Dst: netip.MustParseAddr("ff02::1:3")},
			mtu.NextHop{MTU: 2044}, "too big", 2044},
		{"limited broadcast", mtu.Packet{Len: 3000, Dst: netip.MustParseAddr("255.255.255.255")},
			mtu.NextHop{MTU: 2044}, "discard", 0},
		{"IPv6 where less than 1280 is carried", mtu.Packet{Len: 1280, Dst: host6}, mtu.NextHop{MTU: 1020}, "discard", 0},
	} {
		want := object{"verdict": tt.verdict}
		if tt.mtu != 0 {
			want["mtu"] = tt.mtu
		}
		all = append(all, decision{Rule: "packet", Name: tt.name, Clause: "RFC 4755 section 7.2",
			Given: object{"octets": tt.p.Len, "to": tt.p.Dst.String(), "df": tt.p.DF, "mtu": tt.h.MTU,
				"pending": tt.h.Pending}, Want: want,
			decide: func() object {
				got := mtu.Decide(tt.p, tt.h)
				o := object{"verdict": got.Verdict.String()}
				if got.MTU != 0 {
					o["mtu"] = got.MTU
				}
				return o
			}})
	}
	return all
}
