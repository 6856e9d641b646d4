package ipoib

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/simsm"
	"ipoibcm/nexthop"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	"ipoibcm/wire/ip"
	wire "ipoibcm/wire/sa"
)

// The broadcast group's Q_Key, MTU, SL and rate are those of the link, and other
// groups are made with them (RFC 4391 section 10): 4391-5-2, 4391-9.1.2-1, 4391-10-4, 4391-10-5.
func TestBroadcastGroupDecides(t *testing.T) {
	params := sa.Params{QKey: 0x1234, MTU: ib.MTU1024, Rate: 5, SL: 3, TrafficClass: 9, HopLimit: 2}
	w := newSubnet(t, 6, simsm.Options{Partitions: []simsm.Partition{{PKey: ib.DefaultPKey, Group: true, Params: params}}})
	a := w.port(1, true, Options{})
	w.run(4 * time.Second)
	s := a.f.Status()
	expect.Equal(t, s.QKey, 0x1234, "QKey in status")
	expect.Equal(t, a.ib.qkey, 0x1234, "qkey of the UD QP")
	if s.UDMTU != 1020 {
		t.Errorf("UD MTU %d, want 1020", s.UDMTU)
	}
	if s.IPv6 {
		t.Error("there is IPv6 on a link of 1020")
	}
	a.step(UnderlayChanged{Link: a.opt.Link, PathMTU: ib.MTU2048, UDMTU: 2044, Active: true})
	if got := a.f.Status().UDMTU; got != 1020 {
		t.Errorf("UD MTU %d after an event of the port, want the group's 1020", got)
	}
	b := w.port(2, true, Options{UDMTU: 576})
	w.run(4 * time.Second)
	if got := b.f.Status().UDMTU; got != 576 {
		t.Errorf("UD MTU %d where 576 was configured, want that", got)
	}
	mgid, _ := group.MGID(ip4("224.0.0.1"), ib.DefaultPKey, group.DefaultScope)
	path := a.ib.paths[mgid]
	want := verbs.Path{SGID: a.opt.Link.GID, DGID: mgid, DLID: a.ib.at[mgid], GRH: true, TrafficClass: 9,
		HopLimit: 2, SL: 3, PKey: ib.DefaultPKey, MTU: ib.MTU1024, Rate: 5}
	if path != want {
		t.Errorf("path of a group: got %+v\nwant %+v", path, want)
	}
}

// A subnet manager that starts again with another MTU of the broadcast group: a link of less than 1280 has no
// IPv6 (RFC 4391 section 7), and has it again later.
func TestBroadcastGroupGetsAnotherMTU(t *testing.T) {
	w := newSubnet(t, 17, simsm.Options{})
	a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
	w.run(4 * time.Second)
	for _, tt := range []struct {
		mtu  ib.MTU
		want int
	}{{ib.MTU1024, 1020}, {ib.MTU2048, 2044}, {ib.MTU512, 508}} {
		w.subnet.Partitions[0].Params.MTU = tt.mtu
		w.subnet.Start(w.now)
		w.run(4 * time.Second)
		for _, n := range w.nodes {
			s := n.f.Status()
			expect.Equal(t, s.UDMTU, tt.want, "%s: UD MTU with a group of %d", n.name, tt.mtu.Octets())
			expect.Equal(t, s.IPv6, tt.want >= 1280, "%s: IPv6 with a group of %d", n.name, tt.mtu.Octets())
			expect.Equal(t, s.Up, true, "%s: up with a group of %d", n.name, tt.mtu.Octets())
		}
		p := a.ping("10.0.0.2", 400, true)
		w.settle()
		expect.Equal(t, b.got(p), 1, "packets of a that b got with a group of %d", tt.mtu.Octets())
	}
}

// Where the subnet manager has no broadcast group there is no link, unless we are told
// to make one.
func TestCreateBroadcast(t *testing.T) {
	none := simsm.Options{Partitions: []simsm.Partition{{PKey: ib.DefaultPKey}}}
	w := newSubnet(t, 7, none)
	a := w.port(1, true, Options{})
	w.run(10 * time.Second)
	if a.f.Status().Up {
		t.Error("up without a broadcast group")
	}
	if s := a.f.Fabric(); s.Failed == nil || !s.Failed.NoGroup {
		t.Errorf("why it is not joined: got %+v, want that it does not exist", s.Failed)
	}
	w.port(2, true, Options{Fabric: &Fabric{CreateBroadcast: true}})
	w.run(2 * time.Minute) // a's next try
	for _, n := range w.nodes {
		if !n.f.Status().Up {
			t.Errorf("%s is not up, and there is a broadcast group now", n.name)
		}
	}
}

// What is sent to a group that nobody here has joined makes the port a member that
// sends, and waits for that; not more of it than there is room for: 4391-10-1.
func TestSendOnly(t *testing.T) {
	for _, tt := range []struct {
		name  string
		opt   simsm.Options
		state wire.JoinState
	}{
		{"a full member that sends", simsm.Options{Delay: 50 * time.Millisecond}, wire.SendOnlyFullMember},
		{"an administrator of old", simsm.Options{Delay: 50 * time.Millisecond, NoSendOnlyFull: true},
			wire.SendOnlyNonMember},
	} {
		w := newSubnet(t, 8, tt.opt)
		a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
		w.run(5 * time.Second)
		g := ip4("239.1.2.3")
		mgid, _ := group.MGID(g, ib.DefaultPKey, group.DefaultScope)
		b.step(KernelGroups{Groups: []netip.Addr{g}})
		w.run(time.Second)
		n := len(b.tun)
		for range maxGroupQueue + 5 {
			a.output(mustEcho("10.0.0.1", "239.1.2.3", 100))
		}
		w.run(time.Second)
		if got := len(b.tun) - n; got != maxGroupQueue {
			t.Errorf("%s: b got %d packets, want the %d that may wait", tt.name, got, maxGroupQueue)
		}
		if got := a.counter("drop_group_queue"); got != 5 {
			t.Errorf("%s: %d packets dropped, want 5", tt.name, got)
		}
		if got := w.subnet.Members(mgid)[a.opt.Link.GID]; got != tt.state {
			t.Errorf("%s: a is %v of the group, want %v", tt.name, got, tt.state)
		}
		if a.ib.at[mgid] != 0 {
			t.Errorf("%s: the UD QP of a receives the group", tt.name)
		}
		if path, _ := a.path(g); path.Kind != nexthop.PathGroup {
			t.Errorf("%s: the data path sends by %v, want by itself", tt.name, path.Kind)
		}
	}
}

// A group that is not there, and that nobody may make by sending to it: the packet goes
// to all routers, if there are any (RFC 4391 section 10), but for groups of the link
// itself: 4391-10-2.
func TestToAllRouters(t *testing.T) {
	w := newSubnet(t, 9, simsm.Options{NoSendOnlyFull: true})
	a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
	w.run(5 * time.Second)
	a.output(mustEcho("10.0.0.1", "239.1.2.3", 100))
	w.run(time.Second)
	if got := a.counter("drop_no_group"); got != 1 {
		t.Errorf("%d packets dropped without routers, want 1", got)
	}
	b.step(KernelGroups{Groups: []netip.Addr{ip.AllRouters4}})
	w.run(time.Minute)
	a.output(mustEcho("10.0.0.1", "224.0.0.77", 100))
	w.run(time.Second)
	if got := a.counter("drop_no_group"); got != 2 {
		t.Errorf("%d packets dropped after one to a group of the link, want 2", got)
	}
	for n := range uint64(2) {
		before, arrived := a.counter("sent_to_all_routers"), len(b.tun)
		a.output(mustEcho("10.0.0.1", "239.1.2.4", 100))
		w.run(time.Second)
		if got := a.counter("sent_to_all_routers") - before; got != 1 {
			t.Errorf("packet %d: %d went to all routers, want 1", n, got)
		}
		if got := len(b.tun) - arrived; got != 1 {
			t.Errorf("packet %d: %d arrived at a router, want 1", n, got)
		}
	}
	mgid, _ := group.MGID(ip.AllRouters4, ib.DefaultPKey, group.DefaultScope)
	if w.subnet.Members(mgid)[a.opt.Link.GID] == 0 {
		t.Error("a has not joined the group of all routers to send")
	}
}

// Who sends to a group that is not there hears of it when it is made, when it goes, and when
// it is made anew with another LID (traps 66 and 67): 4391-10-3.
func TestGroupTraps(t *testing.T) {
	for _, opt := range []simsm.Options{
		{NoSendOnlyFull: true}, {NoSendOnlyFull: true, Loss: 0.2, Dup: 0.2, Jitter: 5 * time.Millisecond},
	} {
		for seed := range uint64(3) {
			w := newSubnet(t, 12+seed, opt)
			a, b, c := w.port(1, true, Options{}), w.port(2, true, Options{}), w.port(3, true, Options{})
			w.run(20 * time.Second)
			g := ip4("239.1.2.3")
			mgid, _ := group.MGID(g, ib.DefaultPKey, group.DefaultScope)
			send := func(want string) {
				t.Helper()
				tun, dropped := len(b.tun), a.counter("drop_no_group")
				a.output(mustEcho("10.0.0.1", "239.1.2.3", 100))
				w.run(10 * time.Millisecond)
				got := "lost"
				if len(b.tun) == tun+1 {
					got = "received"
				} else if a.counter("drop_no_group") == dropped+1 {
					got = "dropped"
				}
				if got != want {
					w.Fatalf("a packet to the group was %s, want it %s", got, want)
				}
			}
			a.output(mustEcho("10.0.0.1", "239.1.2.3", 100))
			w.run(2 * time.Minute) // tries have become rare
			send("dropped")

			// Long before the next of them, but for reports that were lost, which the
			// administrator repeats.
			within := 500 * time.Millisecond
			if opt.Loss > 0 {
				within = 10 * time.Second
			}
			b.step(KernelGroups{Groups: []netip.Addr{g}})
			w.run(within)
			send("received")
			old := a.ib.paths[mgid].DLID

			b.step(KernelGroups{})
			w.run(within)
			send("dropped")
			if path, _ := a.path(g); path.Kind == nexthop.PathGroup {
				w.Fatalf("the data path goes on sending to a group that is gone")
			}

			c.step(KernelGroups{Groups: []netip.Addr{ip4("239.9.9.9")}}) // has the LID now
			w.run(within)
			b.step(KernelGroups{Groups: []netip.Addr{g}})
			w.run(within)
			if got := a.ib.paths[mgid].DLID; got == old {
				w.Fatalf("packets to the group made anew have MLID %#x, as before", got)
			}
			send("received")
		}
	}
}

// Traps are subscribed to when something is sent to a group, and only where reports arrive.
// They end with the agent, unless the kernel's own interface is on the port.
func TestSubscriptions(t *testing.T) {
	for _, tt := range []struct {
		name             string
		fabric           Fabric
		sends, then, end bool
	}{
		{"nothing is sent", Fabric{}, false, false, false},
		{"something is sent", Fabric{}, true, true, false},
		{"others take the reports", Fabric{NoReports: true}, true, false, false},
		{"the kernel's interface is on the port", Fabric{Shared: true}, true, true, true},
	} {
		w := newSubnet(t, 13, simsm.Options{})
		a := w.port(1, true, Options{Fabric: &tt.fabric})
		w.run(4 * time.Second)
		if tt.sends {
			a.output(mustEcho("10.0.0.1", "239.1.2.3", 100))
		}
		w.run(time.Second)
		for _, trap := range groupTraps {
			if got := w.subnet.Subscribed(a.ib.port, trap); got != tt.then {
				t.Errorf("%s: %v subscribed to: %v, want %v", tt.name, trap, got, tt.then)
			}
		}
		a.step(Shutdown{})
		w.run(time.Second)
		for _, trap := range groupTraps {
			if got := w.subnet.Subscribed(a.ib.port, trap); got != tt.end {
				t.Errorf("%s: after the end %v subscribed to: %v, want %v", tt.name, trap, got, tt.end)
			}
		}
	}
}

// A subnet manager that started anew has forgotten the subscriptions, too.
func TestSubscriptionsReturn(t *testing.T) {
	w := newSubnet(t, 14, simsm.Options{})
	a := w.port(1, true, Options{})
	w.run(4 * time.Second)
	a.output(mustEcho("10.0.0.1", "239.1.2.3", 100))
	w.run(time.Second)
	w.subnet.Start(w.now)
	if w.subnet.Subscribed(a.ib.port, wire.TrapGroupCreated) {
		t.Fatal("a subnet manager that has just started knows subscriptions")
	}
	w.run(2 * time.Second)
	for _, trap := range groupTraps {
		if !w.subnet.Subscribed(a.ib.port, trap) {
			t.Errorf("%v is not subscribed to again", trap)
		}
	}
}

// At the end memberships end as well, but for those that the kernel's own interface on
// the port needs.
func TestLeaveRule(t *testing.T) {
	for _, shared := range []bool{false, true} {
		w := newSubnet(t, 10, simsm.Options{})
		a := w.port(1, true, Options{Fabric: &Fabric{Shared: shared}})
		w.run(4 * time.Second)
		n := 0
		for _, g := range w.subnet.Groups() {
			if w.subnet.Members(g)[a.opt.Link.GID] != 0 {
				n++
			}
		}
		if n < 4 {
			t.Errorf("member of %d groups, want 4 at least", n)
		}
		a.step(Shutdown{})
		w.run(time.Second)
		left := 0
		for _, g := range w.subnet.Groups() {
			if w.subnet.Members(g)[a.opt.Link.GID] != 0 {
				left++
			}
		}
		want := 0
		if shared {
			want = n
		}
		if left != want {
			t.Errorf("shared %v: member of %d groups after the end, want %d", shared, left, want)
		}
		if len(a.joined) != 0 {
			t.Errorf("shared %v: the UD QP is attached to %v", shared, a.joined)
		}
	}
}

// However many groups there are, none is left behind, nor those whose join is under way: at
// the end nobody waits for answers.
func TestLeavesAll(t *testing.T) {
	w := newSubnet(t, 15, simsm.Options{})
	a := w.port(1, true, Options{})
	w.run(4 * time.Second)
	var many []netip.Addr
	for i := range byte(40) {
		many = append(many, netip.AddrFrom4([4]byte{239, 1, 2, i}))
	}
	a.step(KernelGroups{Groups: many})
	w.run(time.Second)
	for i := range byte(40) {
		a.output(mustEcho("10.0.0.1", fmt.Sprintf("239.3.4.%d", i), 100))
	}
	if n := len(w.subnet.Groups()); n < 40 {
		t.Fatalf("%d groups, want 40 at least", n)
	}
	a.step(Shutdown{})
	w.run(time.Second)
	for _, g := range w.subnet.Groups() {
		if how := w.subnet.Members(g)[a.opt.Link.GID]; how != 0 {
			t.Errorf("after the end a is a %v member of %v", how, g)
		}
	}
}

// The link goes and comes back, with LIDs, P_Keys and members as they were or not: the
// hosts speak again.
func TestSubnetLink(t *testing.T) {
	w := newSubnet(t, 11, simsm.Options{Loss: 0.1, Jitter: time.Millisecond})
	a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
	w.run(10 * time.Second)
	for i := range 5 {
		n := w.nodes[i%2]
		w.subnet.SetLink(w.now, n.ib.port, false)
		w.run(time.Duration(w.r.Int64N(int64(5 * time.Second))))
		if i%2 == 0 {
			w.subnet.Relabel(w.now, n.ib.port)
		}
		w.subnet.SetLink(w.now, n.ib.port, true)
		w.run(time.Minute)
		w.subnet.Start(w.now)
		w.run(time.Minute)
	}
	w.run(5 * time.Minute)
	p, q := a.ping("10.0.0.2", 100, true), b.ping("10.0.0.1", 9000, true)
	w.settle()
	expect.MustEqual(w, a.got(q), 1, "a's copies of q")
	expect.MustEqual(w, b.got(p), 1, "b's copies of p")
}
