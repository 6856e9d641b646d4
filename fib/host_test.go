package fib

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// A testDevice is a device that is up, a neighbour with a connection, and what the
// kernel answers for it.
var (
	testPeer   = netip.MustParseAddr("10.0.0.2")
	testLink   = rtnl.Link{Index: 7, Name: "ibcm0", MTU: 65520, Up: true, Running: true}
	testAnswer = rtnl.Answer{Type: rtnl.Unicast, OIF: 7, Protocol: rtnl.ProtoKernel,
		Prefix: netip.MustParsePrefix("10.0.0.0/24")}
)

// withPeer returns a machine that wants a host route to testPeer, and what it asked for.
func withPeer(t *testing.T) (m *Table, asked SetRoute) {
	m = New(Options{})
	m.Step(nil, time.Now(), Host{rtnl.Event{Kind: rtnl.Resync, Snapshot: &rtnl.Snapshot{Link: testLink}}})
	out := routesOf(m.Step(nil, time.Now(), SetHop{testPeer, nexthop.Path{Kind: nexthop.PathConn, MTU: 65520}}))
	if len(out) != 1 {
		t.Fatalf("a new neighbour causes %d changes, want 1", len(out))
	}
	return m, out[0]
}

// done is the outcome o of a change.
func done(s SetRoute, o nexthop.Outcome) Done { return Done{Action: s, Outcome: o} }

// placed says that the route of s is there, and answers as the kernel does without it.
func placed(s SetRoute) Done { return done(s, nexthop.Outcome{Route: s.New, Answer: testAnswer}) }

// only returns the one change of out; what says after what it came.
func only(t *testing.T, what string, out []SetRoute) SetRoute {
	t.Helper()
	if len(out) != 1 {
		t.Fatalf("%s: %d changes, want 1", what, len(out))
	}
	return out[0]
}

// checkRemoval checks that out is one change, which removes old and sets nothing, and returns it.
func checkRemoval(t *testing.T, what string, out []SetRoute, old rtnl.Route) SetRoute {
	t.Helper()
	s := only(t, what, out)
	expect.MustEqual(t, s.Old, old, "%s: route to be removed", what)
	if s.New.Dst.IsValid() {
		t.Fatalf("%s: %v is set, want nothing but a removal", what, s.New.Dst)
	}
	return s
}

func routesOf(actions []Action) (out []SetRoute) {
	for _, a := range actions {
		if s, ok := a.(SetRoute); ok {
			out = append(out, s)
		}
	}
	return out
}

// A route that comes while the kernel is asked about a neighbour, which may not have known
// of it, is not missed: ours is taken away and the kernel asked again.
func TestRerouteWhileHostIsAsked(t *testing.T) {
	m, asked := withPeer(t)
	if out := routesOf(m.Step(nil, time.Now(),
		Host{rtnl.Event{Kind: rtnl.Rerouted, Prefix: netip.MustParsePrefix("10.0.0.0/28")}})); len(out) != 0 {
		t.Errorf("%d changes while one is under way, want none", len(out))
	}
	out := routesOf(m.Step(nil, time.Now(), placed(asked)))
	if len(out) != 1 {
		t.Fatalf("%d changes after an answer of before the change, want 1", len(out))
	}
	if !out[0].Ask {
		t.Error("the kernel is not asked again")
	}
	if out[0].Old != asked.New {
		t.Errorf("asked again beside route %v, want it taken away", asked.New)
	}
}

// Where the kernel's changes are not told one by one, any of them may concern a
// neighbour.
func TestUnnamedRerouteDoubtsHosts(t *testing.T) {
	for _, unnamed := range []bool{false, true} {
		m, asked := withPeer(t)
		m.Step(nil, time.Now(), placed(asked))
		removed := 0
		for _, a := range routesOf(m.Step(nil, time.Now(), Host{rtnl.Event{Kind: rtnl.Rerouted, Unnamed: unnamed}})) {
			if a.Old == asked.New {
				removed++
			}
		}
		if want := map[bool]int{true: 1}[unnamed]; removed != want {
			t.Errorf("with unnamed routes %v: %d routes are taken out of the way, want %d", unnamed, removed, want)
		}
	}
}

// A route that is refused is asked about again if something changed meanwhile: the
// device went down and came up, say.
func TestRefusedWhileDoubted(t *testing.T) {
	down := testLink
	down.Up = false
	for _, restarted := range []bool{false, true} {
		m, asked := withPeer(t)
		if restarted {
			m.Step(nil, time.Now(), Host{rtnl.Event{Kind: rtnl.LinkChange, Link: down}})
			m.Step(nil, time.Now(), Host{rtnl.Event{Kind: rtnl.LinkChange, Link: testLink}})
		}
		again := len(routesOf(m.Step(nil, time.Now(), done(asked, nexthop.Outcome{Err: errors.New("network is down")}))))
		if want := map[bool]int{true: 1}[restarted]; again != want {
			t.Errorf("restarted %v: asked %d times, want %d", restarted, again, want)
		}
	}
}

// A neighbour whose connection comes back while its host route is being removed gets one again.
func TestWantedAgainWhileRemoved(t *testing.T) {
	m, asked := withPeer(t)
	m.Step(nil, time.Now(), placed(asked))
	removal := routesOf(m.Step(nil, time.Now(), SetHop{testPeer, nexthop.Path{Kind: nexthop.PathUD, MTU: 2044}}))
	s := checkRemoval(t, "a lost connection", removal, asked.New)
	if out := routesOf(m.Step(nil, time.Now(), SetHop{testPeer, nexthop.Path{Kind: nexthop.PathConn, MTU: 65520}})); len(out) != 0 {
		t.Errorf("%d changes while the removal is under way, want none", len(out))
	}
	again := only(t, "after the removal", routesOf(m.Step(nil, time.Now(), done(s, nexthop.Outcome{Removed: true}))))
	expect.Equal(t, again.Ask, true, "after the removal: Ask")
	expect.Equal(t, again.New.MTU, 65520, "after the removal: MTU")
}

// A host route that the kernel does not remove is known to be there, and is removed after the next change.
func TestRemovalRefused(t *testing.T) {
	m, asked := withPeer(t)
	m.Step(nil, time.Now(), placed(asked))
	removal := routesOf(m.Step(nil, time.Now(), SetHop{testPeer, nexthop.Path{Kind: nexthop.PathUD, MTU: 2044}}))
	s := checkRemoval(t, "a lost connection", removal, asked.New)
	refused := done(s, nexthop.Outcome{Err: errors.New("no buffer space")})
	if out := routesOf(m.Step(nil, time.Now(), refused)); len(out) != 0 {
		t.Errorf("%+v at once after a refusal, want nothing", out)
	}
	c := m.Counters()
	expect.Equal(t, c.RoutesRemoved, 0, "RoutesRemoved")
	expect.Equal(t, c.RoutesRefused, 1, "RoutesRefused")
	again := routesOf(m.Step(nil, time.Now(),
		Host{rtnl.Event{Kind: rtnl.Rerouted, Prefix: netip.MustParsePrefix("10.0.0.0/28")}}))
	s = checkRemoval(t, "after the next change", again, asked.New)
	m.Step(nil, time.Now(), done(s, nexthop.Outcome{Removed: true}))
	if n := m.Counters().RoutesRemoved; n != 1 {
		t.Errorf("%d routes removed, want 1", n)
	}
}

// A host route that could not be taken out of the way, so that the kernel was not asked, is wanted still.
func TestAskRefused(t *testing.T) {
	m, asked := withPeer(t)
	m.Step(nil, time.Now(), placed(asked))
	change := Host{rtnl.Event{Kind: rtnl.Rerouted, Prefix: netip.MustParsePrefix("10.0.0.0/28")}}
	for range 2 {
		s := only(t, "after a change", routesOf(m.Step(nil, time.Now(), change)))
		expect.MustEqual(t, s.Old, asked.New, "after a change: route to be taken out of the way")
		expect.MustEqual(t, s.Ask, true, "after a change: Ask")
		out := routesOf(m.Step(nil, time.Now(), done(s, nexthop.Outcome{Err: errors.New("no buffer space")})))
		if len(out) != 0 {
			t.Errorf("%+v at once after a refusal, want nothing", out)
		}
	}
}

// Neighbours whose host routes the kernel did not remove are forgotten when the device goes down, and no other
// neighbour is left out for that.
func TestDownAfterRemovalsRefused(t *testing.T) {
	m, asked := withPeer(t)
	m.Step(nil, time.Now(), placed(asked))
	lost := nexthop.Path{Kind: nexthop.PathUD, MTU: 2044}
	const n = 200
	peer := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}) }
	for i := range n {
		out := routesOf(m.Step(nil, time.Now(), SetHop{peer(i), nexthop.Path{Kind: nexthop.PathConn, MTU: 65520}}))
		m.Step(nil, time.Now(), placed(out[0]))
		if i%2 == 0 {
			out = routesOf(m.Step(nil, time.Now(), SetHop{peer(i), lost}))
			m.Step(nil, time.Now(), done(out[0], nexthop.Outcome{Err: errors.New("no buffer space")}))
		}
	}
	down := testLink
	down.Up = false
	m.Step(nil, time.Now(), Host{rtnl.Event{Kind: rtnl.LinkChange, Link: down}})
	out := routesOf(m.Step(nil, time.Now(), Host{rtnl.Event{Kind: rtnl.LinkChange, Link: testLink}}))
	if len(out) != n/2+1 {
		t.Errorf("%d host routes when the device is up again, want %d", len(out), n/2+1)
	}
	for _, s := range out {
		if s.Old.Dst.IsValid() {
			t.Errorf("%v is to be removed, though it went with the device", s.Old)
		}
	}
}

// A Resync that finds IPv6 where it was does not have it set up again: addresses that somebody has deleted would
// come back. One that finds it after it had gone does.
func TestResyncIsNotIPv6Up(t *testing.T) {
	m := New(Options{})
	groups := rtnl.Route{Dst: multicast6, Type: rtnl.Multicast, Protocol: rtnl.ProtoKernel, Table: rtnl.TableLocal}
	ups := func(ev rtnl.Event) (n int) {
		for _, a := range m.Step(nil, time.Now(), Host{ev}) {
			if _, ok := a.(IPv6Up); ok {
				n++
			}
		}
		return n
	}
	all := func() rtnl.Event {
		return rtnl.Event{Kind: rtnl.Resync, Snapshot: &rtnl.Snapshot{Link: testLink, Routes: []rtnl.Route{groups}}}
	}
	for i := range 2 {
		if n := ups(all()); n != 0 {
			t.Errorf("Resync %d: IPv6Up %d times, want none", i, n)
		}
	}
	ups(rtnl.Event{Kind: rtnl.RouteGone, Route: groups})
	if n := ups(all()); n != 1 {
		t.Errorf("Resync after it had gone: IPv6Up %d times, want once", n)
	}
}
