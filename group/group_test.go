package group

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/ip"
)

var (
	addr  = netip.MustParseAddr
	start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
)

func gid(s string) ib.GID { return ib.GIDFromAddr(addr(s)) }

func TestMGID(t *testing.T) {
	for _, tt := range []struct {
		name  string
		a     string
		pkey  ib.PKey
		scope uint8
		want  string // empty: no MGID
	}{
		// 4755-2.1-2: multicast mapping is RFC 4391's. 4391-4-1, 4391-4-2, 4391-4-3, 4391-4.1-4
		{"broadcast", "255.255.255.255", 0xffff, 2, "ff12:401b:ffff::ffff:ffff"},
		{"all routers", "224.0.0.2", 0x8000, 2, "ff12:401b:8000::2"},
		{"all nodes", "ff02::1", 0xffff, 2, "ff12:601b:ffff::1"},
		{"the full member bit is set", "224.0.0.1", 0x7fff, 2, "ff12:401b:ffff::1"}, // 4391-4.1-1
		{"28 bits of an IPv4 group", "239.255.1.2", 0xffff, 2, "ff12:401b:ffff::fff:102"},
		{"80 bits of an IPv6 group", "ff05:1234:5678:9abc:def0:1234:5678:9abc", 0x8001, 2,
			"ff12:601b:8001:9abc:def0:1234:5678:9abc"},
		{"the link's scope, not the group's", "ff0e::101", 0xffff, 5, "ff15:601b:ffff::101"}, // 4391-4-4
		{"IPv4 in IPv6 form", "::ffff:224.0.0.1", 0xffff, 2, "ff12:401b:ffff::1"},
		{"unicast", "10.0.0.1", 0xffff, 2, ""},
		{"IPv6 unicast", "fe80::1", 0xffff, 2, ""},
		{"interface-local", "ff01::1", 0xffff, 2, ""},
	} {
		got, ok := MGID(addr(tt.a), tt.pkey, tt.scope)
		switch {
		case ok != (tt.want != ""):
			t.Errorf("%s: ok is %v, want %v", tt.name, ok, tt.want != "")
		case ok && got != gid(tt.want):
			t.Errorf("%s: got is %v, want %v", tt.name, got, gid(tt.want))
		}
	}
	if got := UnderlayGroup4(0x7a0b); got != addr("239.192.250.11") {
		t.Errorf("underlay group of P_Key 0x7a0b = %s", got)
	}
}

func TestTableIsASnapshot(t *testing.T) {
	m := New(Options{})
	m.Step(nil, start, Up{gid("fe80::1")})
	old := m.Table()
	m.Step(nil, start, Report{[]ip.Change{{Group: addr("239.1.1.1"), Kind: ip.Join}}})
	expect.Equal(t, old.Wanted(addr("239.1.1.1")), false, "Wanted of the old table")
	expect.Equal(t, m.Table().Wanted(addr("239.1.1.1")), true, "Wanted of the new table")
	if old.Broadcast() != gid("ff12:401b:ffff::ffff:ffff") {
		t.Errorf("broadcast GID %s", old.Broadcast())
	}
	a, b := addr("10.0.0.1"), addr("ff02::1")
	if n := testing.AllocsPerRun(100, func() { old.MGIDFor(a); old.MGIDFor(b); old.Wanted(b); old.IsGroup(a) }); n != 0 {
		t.Errorf("%v allocations per packet", n)
	}
}

func TestGroupsGoByUD(t *testing.T) {
	m := New(Options{})
	m.Step(nil, start, AddAddr{Prefix: netip.MustParsePrefix("10.0.0.1/24")})
	for a, want := range map[string]bool{
		"224.0.0.1": true, "ff02::1": true, "ff0e::1": true, "255.255.255.255": true, "10.0.0.255": true,
		"10.0.0.2": false, "10.0.1.255": false, "fe80::2": false,
	} {
		if got := m.Table().IsGroup(addr(a)); got != want {
			t.Errorf("%s is a group: %v, want %v", a, got, want) // 4755-2.1-1, 4755-2.1-3
		}
	}
}

func TestAddressesAreBounded(t *testing.T) {
	m := New(Options{})
	for i := range maxAddrs + 5 {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		m.Step(nil, start, AddAddr{Prefix: netip.PrefixFrom(a, 32)})
	}
	expect.Equal(t, len(m.addrs), maxAddrs, "number of addresses")
	expect.Equal(t, m.refusedAddrs, 5, "refusedAddrs")
}

// FuzzMachine plays random events and compares what was joined and left with
// what the machine says it wants.
func FuzzMachine(f *testing.F) {
	f.Add([]byte{0, 0, 2, 1, 4, 1, 5, 1, 8, 0, 9, 0, 1, 0})
	f.Add([]byte{4, 1, 4, 2, 4, 3, 0, 1, 7, 1, 0, 0, 3, 1, 6, 3, 7, 0, 8, 9, 10, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		m := New(Options{MaxGroups: 4})
		joined, now, last := map[ib.GID]bool{}, start, (*Table)(nil)
		for in = in[:min(len(in), 400)]; len(in) >= 2; in = in[2:] {
			ev := fuzzEvent(in[0], in[1])
			switch ev.(type) {
			case Up:
				clear(joined) // a new QP
			case JoinFailed:
				delete(joined, gid("ff12:601b:ffff::1"))
			case Wake:
				now = now.Add(time.Duration(in[1]) * time.Second)
			}
			for _, a := range m.Step(nil, now, ev) {
				switch a := a.(type) {
				case Join:
					if joined[a.MGID] {
						t.Fatalf("%T: joined %s twice", ev, a.MGID)
					}
					joined[a.MGID] = true
				case Leave:
					if !joined[a.MGID] {
						t.Fatalf("%T: left %s, which was not joined", ev, a.MGID)
					}
					delete(joined, a.MGID)
				case Publish:
					last = a.Table
				}
			}
			if last != nil && last != m.Table() {
				t.Fatalf("%T: a table was not published", ev)
			}
			checkMachine(t, m, ev, joined)
		}
	})
}

// fuzzEvent is the event that two octets stand for.
func fuzzEvent(k, x byte) Event {
	groups := []string{"239.1.1.1", "239.1.1.2", "ff05::1", "ff02::1:ff00:1", "ff15::beef", "224.0.0.1", "ff01::5",
		"ff02::beef"}
	addrs := []string{"fe80::1/64", "2001:db8::1/64", "2001:db8::2/64", "10.0.0.1/24", "fe80::1/128"}
	gids := []string{"fe80::1", "192.0.2.1", "fe80::2", "192.0.2.2"}
	n := int(x)
	g, p := addr(groups[n%len(groups)]), netip.MustParsePrefix(addrs[n%len(addrs)])
	switch k % 11 {
	case 0:
		return Up{gid(gids[n%len(gids)])}
	case 1:
		return Down{}
	case 2:
		return AddAddr{Prefix: p}
	case 3:
		return DelAddr{p}
	case 4, 5, 6:
		return Report{[]ip.Change{{Group: g, Kind: ip.ChangeKind(n%6) + 1, Sources: n & 1}}}
	case 7:
		return SetPeers{Peers: slices.Repeat([]ib.GID{gid("fe80::9")}, n&1), Copies: n&2 != 0}
	case 8:
		return JoinFailed{MGID: gid("ff12:601b:ffff::1")}
	case 9:
		return Wake{}
	case 10:
		return Kernel{[]netip.Addr{g, addr("224.0.0.1")}}
	}
	return nil
}

// checkMachine checks after ev that what is wanted is joined, or going to be, and nothing else.
func checkMachine(t *testing.T, m *Machine, ev Event, joined map[ib.GID]bool) {
	t.Helper()
	want := map[ib.GID]bool{}
	for _, e := range m.Groups() {
		if e.Joined {
			want[m.rideOn(m.members[e.IP])] = true
		}
		if !m.Table().Wanted(e.IP) {
			t.Fatalf("%T: member %s is not wanted", ev, e.IP)
		}
		if e.Reasons == 0 {
			t.Fatalf("%T: %s has no reason", ev, e.IP)
		}
		if forAddress := e.Reasons&ForAddress != 0; (e.Refs > 0) != forAddress {
			t.Fatalf("%T: %d addresses need %s, but that it is for an address is %v", ev, e.Refs, e.IP, forAddress)
		}
		if m.up && !m.list && !e.Joined {
			if m.Deadline().IsZero() {
				t.Fatalf("%T: %s is neither joined nor going to be", ev, e.IP)
			}
		}
	}
	if fmt.Sprint(want) != fmt.Sprint(joined) {
		t.Fatalf("%T: joined %v, want %v", ev, joined, want)
	}
	learned := 0
	for _, e := range m.members {
		if e.reasons&(Always|ForAddress) == 0 {
			learned++
		}
	}
	if learned != m.learned {
		t.Fatalf("%T: %d learned groups counted as %d", ev, learned, m.learned)
	}
}

// A list of peers that is the same again leaves no group, not even for a moment.
func TestSamePeersAgain(t *testing.T) {
	m := New(Options{})
	m.Step(nil, start, Up{GID: gid("fe80::1")})
	for _, a := range m.Step(nil, start, SetPeers{}) {
		switch a := a.(type) {
		case Join:
			t.Errorf("joined %v again", a.MGID)
		case Leave:
			t.Errorf("left %v", a.MGID)
		}
	}
}

// A list that has become empty is a list still: no group is joined, and nothing is
// sent to one.
func TestListOfNobody(t *testing.T) {
	m := New(Options{Copies: true})
	acts := m.Step(nil, start, Up{GID: gid("fe80::1")})
	acts = m.Step(acts, start, SetPeers{Peers: []ib.GID{gid("fe80::2")}, Copies: true})
	for _, a := range m.Step(acts, start, SetPeers{Copies: true}) {
		if j, ok := a.(Join); ok {
			t.Errorf("joined %v, want no group", j.MGID)
		}
	}
	peers, copies := m.Table().Replicate()
	if len(peers) != 0 {
		t.Errorf("copies go to %v, want nobody", peers)
	}
	if !copies {
		t.Error("packets go to groups, want to nobody")
	}
}

// What a list has too much is counted, and of the others none is lost.
func TestListIsBounded(t *testing.T) {
	peers := make([]ib.GID, MaxPeers+3)
	for i := range peers {
		peers[i] = ib.GID{0xfe, 0x80, 14: byte(i >> 8), 15: byte(i)}
		peers[i][13] = 1
	}
	m := New(Options{Peers: append(peers, peers[0])})
	if got, _ := m.Table().Replicate(); len(got) != MaxPeers {
		t.Errorf("%d peers, want %d", len(got), MaxPeers)
	}
	if m.refusedPeers != 3 {
		t.Errorf("%d refused, want 3", m.refusedPeers)
	}
}

// The broadcast address of a subnet, also where its length is no multiple of 8.
func TestSubnetBroadcast(t *testing.T) {
	for _, tt := range []struct{ prefix, want string }{
		{"10.0.0.1/24", "10.0.0.255"},
		{"10.0.17.1/20", "10.0.31.255"},
		{"10.0.0.5/30", "10.0.0.7"},
		{"10.0.0.1/9", "10.127.255.255"},
	} {
		if got := subnetBroadcast(netip.MustParsePrefix(tt.prefix)); got.String() != tt.want {
			t.Errorf("%s: %v, want %s", tt.prefix, got, tt.want)
		}
	}
	for _, none := range []string{"10.0.0.0/31", "10.0.0.1/32"} {
		if got := subnetBroadcast(netip.MustParsePrefix(none)); got.IsValid() {
			t.Errorf("%s: %v, want none", none, got)
		}
	}
}
