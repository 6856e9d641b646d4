package fib

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/rtnl"
)

// A route that comes between the question about a neighbour and its answer, which
// does not know of it, is not missed: the kernel is asked again first.
func TestRerouteWhileHostIsAsked(t *testing.T) {
	peer, now := netip.MustParseAddr("10.0.0.2"), time.Now()
	link := rtnl.Link{Index: 7, Name: "ibcm0", MTU: 65520, Up: true, Running: true}
	m := New(Options{})
	m.Step(nil, now, Host{rtnl.Event{Kind: rtnl.Resync, Snapshot: &rtnl.Snapshot{Link: link}}})
	count := func(actions []Action) (asked, added int) {
		for _, a := range actions {
			switch a := a.(type) {
			case Lookup:
				asked++
			case SetRoute:
				if !a.Remove {
					added++
				}
			}
		}
		return asked, added
	}
	if asked, _ := count(m.Step(nil, now, SetHop{peer, Path{Kind: PathConn, MTU: 65520}})); asked != 1 {
		t.Fatalf("a new neighbour is asked for %d times, want 1", asked)
	}
	m.Step(nil, now, Host{rtnl.Event{Kind: rtnl.Rerouted, Prefix: netip.MustParsePrefix("10.0.0.0/28")}})
	old := rtnl.Answer{Type: rtnl.Unicast, OIF: link.Index, Protocol: rtnl.ProtoKernel, Prefix: netip.MustParsePrefix("10.0.0.0/24")}
	asked, added := count(m.Step(nil, now, Answered{Lookup: Lookup{Flow: rtnl.Flow{Dst: peer}, Link: link, Host: true}, NextHop: NextHop{Addr: peer, Answer: old}}))
	if added != 0 {
		t.Errorf("%d routes are added by an answer of before the change, want none", added)
	}
	if asked != 1 {
		t.Errorf("the neighbour is asked for %d times more, want 1", asked)
	}
}

// Where the kernel's changes are not told one by one, any of them may concern a
// neighbour.
func TestUnnamedRerouteDoubtsHosts(t *testing.T) {
	peer, now := netip.MustParseAddr("10.0.0.2"), time.Now()
	link := rtnl.Link{Index: 7, Name: "ibcm0", MTU: 65520, Up: true, Running: true}
	for _, unnamed := range []bool{false, true} {
		m := New(Options{})
		m.Step(nil, now, Host{rtnl.Event{Kind: rtnl.Resync, Snapshot: &rtnl.Snapshot{Link: link}}})
		m.Step(nil, now, SetHop{peer, Path{Kind: PathConn, MTU: 65520}})
		answer := rtnl.Answer{Type: rtnl.Unicast, OIF: link.Index, Protocol: rtnl.ProtoKernel, Prefix: netip.MustParsePrefix("10.0.0.0/24")}
		for _, a := range m.Step(nil, now, Answered{Lookup: Lookup{Flow: rtnl.Flow{Dst: peer}, Link: link, Host: true}, NextHop: NextHop{Addr: peer, Answer: answer}}) {
			if add, ok := a.(SetRoute); ok {
				m.Step(nil, now, Done{Action: add})
			}
		}
		removed := 0
		for _, a := range m.Step(nil, now, Host{rtnl.Event{Kind: rtnl.Rerouted, Unnamed: unnamed}}) {
			if a, ok := a.(SetRoute); ok && a.Remove {
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
	peer, now := netip.MustParseAddr("10.0.0.2"), time.Now()
	link := rtnl.Link{Index: 7, Name: "ibcm0", MTU: 65520, Up: true, Running: true}
	down := link
	down.Up = false
	answer := rtnl.Answer{Type: rtnl.Unicast, OIF: link.Index, Protocol: rtnl.ProtoKernel, Prefix: netip.MustParsePrefix("10.0.0.0/24")}
	for _, restarted := range []bool{false, true} {
		m := New(Options{})
		m.Step(nil, now, Host{rtnl.Event{Kind: rtnl.Resync, Snapshot: &rtnl.Snapshot{Link: link}}})
		m.Step(nil, now, SetHop{peer, Path{Kind: PathConn, MTU: 65520}})
		asked := Lookup{Flow: rtnl.Flow{Dst: peer}, Link: link, Host: true}
		out := m.Step(nil, now, Answered{Lookup: asked, NextHop: NextHop{Addr: peer, Answer: answer}})
		if len(out) != 1 {
			t.Fatalf("a guest causes %v, want its route", out)
		}
		if restarted {
			m.Step(nil, now, Host{rtnl.Event{Kind: rtnl.LinkChange, Link: down}})
			m.Step(nil, now, Host{rtnl.Event{Kind: rtnl.LinkChange, Link: link}})
		}
		lookups := 0
		for _, a := range m.Step(nil, now, Done{Action: out[0], Err: errors.New("network is down")}) {
			if _, ok := a.(Lookup); ok {
				lookups++
			}
		}
		if want := map[bool]int{true: 1}[restarted]; lookups != want {
			t.Errorf("restarted %v: asked %d times, want %d", restarted, lookups, want)
		}
	}
}
