package hostnet

import (
	"ipoibcm/internal/expect"
	"ipoibcm/rtnl"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// quiet is how long a test waits for an event that must not come: longer than settle.
const quiet = 60 * time.Millisecond

// watched opens the device of a test and passes its first events.
func watched(t *testing.T) *Device {
	t.Helper()
	inNetns(t)
	tun := newTUN(t, "ibcm0")
	settledVeth(t, "v0", "v1")
	d := openUp(t, tun)
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	ip(t, "addr add 10.8.0.1/24 dev v0\naddr add fd08::1/64 dev v0 nodad\n")
	awaitIPv6(t, 4, 3)
	rest(t, d)
	return d
}

// rest waits until no event comes, and returns what came: Rerouted by prefix, and the
// last Fields of Rules.
func rest(t *testing.T, d *Device) (rerouted map[netip.Prefix]int, fields []rtnl.Fields) {
	t.Helper()
	rerouted = map[netip.Prefix]int{}
	for end := time.After(3 * time.Second); ; {
		select {
		case ev := <-d.Events():
			switch ev.Kind {
			case rtnl.Rerouted:
				rerouted[ev.Prefix]++
			case rtnl.Rules:
				fields = append(fields, ev.Fields)
			}
		case <-time.After(quiet):
			return rerouted, fields
		case <-end:
			t.Fatal("events do not end")
		}
	}
}

func TestFirstEvents(t *testing.T) {
	inNetns(t)
	tun := newTUN(t, "ibcm0")
	ip(t, "rule add from 10.0.0.0/8 lookup 7\n")
	d, err := Open(tun)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if ev := <-d.Events(); ev.Kind != rtnl.Resync {
		t.Errorf("first event %v, want RESYNC", ev.Kind)
	}
	ev := <-d.Events()
	if ev.Kind != rtnl.Rules {
		t.Fatalf("second event %v, want RULES", ev.Kind)
	}
	if ev.Fields != rtnl.WithSource {
		t.Errorf("rules at start look at %v, want %v", ev.Fields, rtnl.WithSource)
	}
}

func TestRerouted(t *testing.T) {
	d := watched(t)
	const all = ""
	for _, tt := range []struct {
		do   string
		want string
	}{
		{"route add 10.77.0.0/16 via 10.9.0.2", "10.77.0.0/16"},
		{"route change 10.77.0.0/16 via 10.9.0.3", "10.77.0.0/16"},
		{"route add 10.77.0.0/16 via 10.9.0.4 metric 9 table 99", "10.77.0.0/16"},
		{"route del 10.77.0.0/16 table 99", "10.77.0.0/16"},
		{"route add 10.78.0.0/16 via 10.8.0.2", "10.78.0.0/16"},
		{"route add 10.79.0.0/16 nexthop via 10.9.0.2 nexthop via 10.8.0.2", "10.79.0.0/16"},
		{"route add blackhole 10.80.0.0/16", "10.80.0.0/16"},
		{"route del 10.79.0.0/16", "10.79.0.0/16"},
		{"route add default via 10.9.0.2", "0.0.0.0/0"},
		{"route add fd77::/32 via fd09::2", "fd77::/32"},
		{"route append fd77::/32 via fd08::2", "fd77::/32"},
		{"route del fd77::/32 via fd08::2", "fd77::/32"},
		{"nexthop add id 1 via 10.9.0.5 dev ibcm0", all},
		{"nexthop del id 1", all},
		{"addr add 10.7.0.1/24 dev v1", all},
		{"link set v1 mtu 1400", all},
		{"link set v0 down", all},
		{"rule add to 10.99.0.0/16 lookup 99", all},
		{"rule del to 10.99.0.0/16 lookup 99", all},
	} {
		ip(t, tt.do)
		rerouted, fields := rest(t, d)
		wantRules := 0
		if strings.HasPrefix(tt.do, "rule") {
			wantRules = 1
		}
		for end := time.Now().Add(3 * time.Second); len(fields) < wantRules && time.Now().Before(end); {
			more, late := rest(t, d) // the rules are read first, which may take longer than quiet
			fields = append(fields, late...)
			for p, n := range more {
				rerouted[p] += n
			}
		}
		want := netip.Prefix{}
		if tt.want != all {
			want = netip.MustParsePrefix(tt.want)
			if len(rerouted) != 1 {
				t.Errorf("%s: rerouted %v, want only %v", tt.do, rerouted, want)
			}
		}
		if rerouted[want] == 0 {
			t.Errorf("%s: rerouted %v, want %v", tt.do, rerouted, want)
		}
		if len(fields) != wantRules {
			t.Errorf("%s: %d events of rules %v, want %d", tt.do, len(fields), fields, wantRules)
		}
	}
	if err := d.writeSysctl("ipv4/conf/v1/forwarding", "1"); err != nil {
		t.Skip(err)
	}
	if rerouted, _ := rest(t, d); rerouted[netip.Prefix{}] == 0 {
		t.Errorf("forwarding on: rerouted %v, want all", rerouted)
	}
}

// A rule of ours that somebody removes is told, like any other.
func TestRemovedRuleIsTold(t *testing.T) {
	d := watched(t)
	rule := rtnl.Rule{Priority: 1000, To: netip.MustParsePrefix("224.0.0.0/4"), OIF: "ibcm0", Table: 7575}
	if err := d.AddRule(rule); err != nil {
		t.Fatal(err)
	}
	if rerouted, _ := rest(t, d); len(rerouted) != 0 {
		t.Errorf("added: rerouted %v, want none", rerouted)
	}
	ip(t, "rule del pref 1000")
	if rerouted, _ := rest(t, d); rerouted[netip.Prefix{}] == 0 {
		t.Errorf("removed: rerouted %v, want all", rerouted)
	}
}

// What we change ourselves leads where packets went before: a reader that asks again
// and sets metrics whenever it is told would have no end.
func TestOurChangesDoNotReroute(t *testing.T) {
	d := watched(t)
	for _, r := range []rtnl.Route{host("10.9.0.2", 8996), host("fd09::2", 8996), host("10.9.0.2", 2044)} {
		if err := d.AddRoute(r); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range snapshot(t, d).Routes {
		if r.Protocol == rtnl.ProtoKernel && r.Type == rtnl.Unicast {
			r.MTU, r.AdvMSS = 2044, 65480
			if err := d.SetRoute(r); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := d.AddRule(rtnl.Rule{Priority: 1000, To: netip.MustParsePrefix("224.0.0.0/4"), OIF: "ibcm0",
		Table: 7575}); err != nil {
		t.Fatal(err)
	}
	if n, err := d.RemoveOurs(); n != 3 || err != nil {
		t.Errorf("removed %d (%v), want two routes and a rule", n, err)
	}
	// Those of another interface of ours.
	ip(t, `
route add 10.8.0.2/32 dev v0 proto 75 mtu 1400
rule add to 224.0.0.0/4 oif v0 lookup 7576 pref 1002 protocol 75
rule del pref 1002
route del 10.8.0.2/32 dev v0
`)
	if rerouted, _ := rest(t, d); len(rerouted) != 0 {
		t.Errorf("rerouted %v, want none", rerouted)
	}
}

func TestRulesSayWhatTheyLookAt(t *testing.T) {
	d := watched(t)
	for _, tt := range []struct {
		do   string
		want rtnl.Fields
	}{
		{"rule add from 10.9.0.1 lookup 7", rtnl.WithSource},
		{"rule add ipproto tcp dport 80 lookup 7", rtnl.WithPorts},
		{"rule del from 10.9.0.1 lookup 7\nrule del ipproto tcp dport 80 lookup 7", rtnl.DstOnly},
		{"rule add dsfield 0x10 lookup 7", rtnl.WithSource},
		{"rule del dsfield 0x10 lookup 7", rtnl.DstOnly},
		{"rule add iif v0 lookup 7", rtnl.WithSource},
		{"rule del iif v0 lookup 7", rtnl.DstOnly},
		{"-6 rule add from fd09::1 lookup 7", rtnl.WithSource},
		{"-6 rule del from fd09::1 lookup 7", rtnl.DstOnly},
		{"-6 rule add sport 7 ipproto udp lookup 7", rtnl.WithPorts},
		{"-6 rule flush\n-6 rule add lookup main", rtnl.DstOnly},
		{"route add 10.77.0.0/16 tos 0x10 via 10.8.0.2", rtnl.WithSource},
		{"route del 10.77.0.0/16 tos 0x10", rtnl.DstOnly},
		{"-6 route add fd77::/32 from fd08::/64 via fd08::2", rtnl.WithSource},
	} {
		ip(t, tt.do)
		deadline := time.After(3 * time.Second)
		for said := false; !said; {
			select {
			case ev := <-d.Events():
				said = ev.Kind == rtnl.Rules && ev.Fields == tt.want
			case <-deadline:
				t.Fatalf("%s: never told %v", tt.do, tt.want)
			}
		}
	}
	// Whoever opens it now sees the same.
	other, err := Open(d.Index())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	<-other.Events()
	if ev := <-other.Events(); ev.Fields != rtnl.WithSource {
		t.Errorf("opened beside a route with a source: %v, want %v", ev.Fields, rtnl.WithSource)
	}
}

// A router's table does not go through the mirror, nor does its change make the
// reader begin anew.
func TestRoutesOfARouter(t *testing.T) {
	d := watched(t)
	resyncs := d.Counters().Resyncs
	const n = 3 * EventBound
	for i := range n {
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: d.Index(), Protocol: unix.RTPROT_BGP,
			Dst: ipnet(netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 8), byte(i), 0}), 24).String()),
			Gw:  []byte{10, 9, 0, 2}}); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(quiet) // nothing tells that the watch has read all and has told no more
	if held := len(d.Events()); held > reroutedBound {
		t.Errorf("%d events held, want at most %d", held, reroutedBound)
	}
	rerouted, _ := rest(t, d)
	if rerouted[netip.Prefix{}] == 0 {
		t.Errorf("%d prefixes told, and never all", len(rerouted))
	}
	if c := d.Counters(); c.Resyncs != resyncs {
		t.Errorf("%d resyncs, want %d", c.Resyncs, resyncs)
	}
	if c := d.Counters(); c.Merged == 0 {
		t.Error("nothing was merged")
	}
	got := find(snapshot(t, d), func(r rtnl.Route) bool { return r.Protocol == unix.RTPROT_BGP })
	if len(got) != 0 {
		t.Errorf("%d of its routes are in the snapshot, want none", len(got))
	}
}

// Beside a host that is never quiet, what is in doubt is read all the same.
func TestDoubtEndsBesideBusyHost(t *testing.T) {
	d := watched(t)
	w := watcher{Device: d, rules: true}
	w.after(nil) // a notification came
	if !w.rules {
		t.Error("read at the first notification, want after settling")
	}
	w.since = w.since.Add(-2 * settleMax)
	w.after(nil)
	if w.rules {
		t.Errorf("not read after %v of notifications", 2*settleMax)
	}
}

// The kernel keeps an address once for each length.
func TestAddressWithTwoLengths(t *testing.T) {
	d := watched(t)
	var s state
	ip(t, "addr add 10.6.0.2/24 dev ibcm0\naddr add 10.6.0.2/16 dev ibcm0\naddr del 10.6.0.2/24 dev ibcm0\n")
	short, long := netip.MustParsePrefix("10.6.0.2/16"), netip.MustParsePrefix("10.6.0.2/24")
	s.addrs, s.routes = map[netip.Prefix]rtnl.Addr{}, map[rtnl.Key]rtnl.Route{}
	gone := false
	for end := time.After(3 * time.Second); !gone; {
		select {
		case ev := <-d.Events():
			s.apply(ev)
			gone = ev.Kind == rtnl.AddrGone
		case <-end:
			t.Fatal("never told that the /24 is gone")
		}
	}
	if _, ok := s.addrs[long]; ok {
		t.Errorf("%v is there still", long)
	}
	if _, ok := s.addrs[short]; !ok {
		t.Errorf("%v is gone too", short)
	}
}

func TestMasterOfLink(t *testing.T) {
	inNetns(t)
	d, err := Open(newVeth(t, "v0", "v1"))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var s state
	ip(t, "link add br0 type bridge\nlink set v0 master br0\n")
	br, err := netlink.LinkByName("br0")
	if err != nil {
		t.Fatal(err)
	}
	s.until(t, d, "master br0", func() bool { return s.link.Master == br.Attrs().Index })
	if s.link.VRFTable != 0 {
		t.Errorf("a bridge has VRF table %d", s.link.VRFTable)
	}
	ip(t, "link set v0 nomaster\n")
	s.until(t, d, "no master", func() bool { return s.link.Master == 0 })
}

// The kernel of this test may have no VRF: so from the attributes of its link.
func TestVRFOfLink(t *testing.T) {
	got := linkOf(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Index: 3, MasterIndex: 9,
		Slave: &netlink.VrfSlave{Table: 1001}}})
	if got.Master != 9 {
		t.Errorf("master %d, want 9", got.Master)
	}
	if got.VRFTable != 1001 {
		t.Errorf("VRF table %d, want 1001", got.VRFTable)
	}
}

// After an overrun nobody knows what was lost: everything may be another.
func TestOverrunReroutesAll(t *testing.T) {
	w := watcher{Device: &Device{events: make(chan rtnl.Event, EventBound)}}
	w.miss()
	expect.Equal(t, w.lost, true, "lost")
	expect.Equal(t, w.rules, true, "rules")
	expect.Equal(t, w.scan, true, "scan")
	w.tellRerouted()
	if ev := <-w.events; ev.Kind != rtnl.Rerouted || ev.Prefix.IsValid() {
		t.Errorf("told %+v, want REROUTED of all", ev)
	}
}

func FuzzRule(f *testing.F) {
	f.Add(appendRule(nil, rtnl.Rule{Priority: 1000, To: netip.MustParsePrefix("224.0.0.0/4"), OIF: "ibcm0", Table: 7575}))
	f.Add(appendRule(nil, rtnl.Rule{Priority: 1, To: netip.MustParsePrefix("fd00::/8"), Table: 7}))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseRule(b)
		if err != nil || m.family != unix.AF_INET && m.family != unix.AF_INET6 ||
			m.To.Addr().Is4() != (m.family == unix.AF_INET) {
			return
		}
		again, err := parseRule(appendRule(nil, m.Rule))
		if err != nil {
			t.Fatalf("%+v: %v", m.Rule, err)
		}
		if m.To.Bits() > 0 && again.Rule != m.Rule {
			t.Fatalf("%+v, then %+v", m.Rule, again.Rule)
		}
	})
}
