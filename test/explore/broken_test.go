package explore

import (
	"strings"
	"testing"
)

// Every rule that matters, broken: the search must find a state in which it
// shows, within the bounds given here and no more.
func TestBroken(t *testing.T) {
	if raceDetector {
		t.Skip("its searches run as those of TestExplore, and without the race detector too")
	}
	with := func(hosts []host, a, b *fault) []host {
		hosts[0].fault, hosts[1].fault = a, b
		return hosts
	}
	crossed := two(func(a, b *host) { a.gid, b.gid = 2, 1 }) // the GIDs' order is not that of the QPNs
	for _, tt := range []struct {
		setup
		says string
	}{
		{setup{name: "comparison reversed on the smaller side", hosts: with(two(nil), reversed, nil), pairs: both},
			"for which"},
		{setup{name: "comparison reversed on the larger side", hosts: with(two(nil), nil, reversed), pairs: both},
			"not one connection"},
		{setup{name: "flags left in the comparison", hosts: with(two(nil), flagsLeft, flagsLeft), pairs: both}, "for which"},
		{setup{name: "GID compared before QPN on the smaller side", hosts: with(crossed, gidFirst, nil), pairs: both},
			"for which"},
		{setup{name: "GID compared before QPN on the larger side", hosts: with(two(func(a, b *host) {
			a.gid, b.gid = 2, 1
		}), nil, gidFirst), pairs: both}, "not one connection"},
		{setup{name: "REJ fatal for both", hosts: with(two(nil), rejFatal, rejFatal), pairs: both}, "an attempt of"},
		{setup{name: "a repeated REQ opens a second connection", hosts: with(two(nil), nil, duplicateREQ),
			pairs: alone, repeats: 1}, "an attempt of"},
		{setup{name: "a lost RTU is not made up for", hosts: with(two(nil), rtuOnce, rtuOnce), pairs: alone,
			losses: 1}, "an attempt of"},
		{setup{name: "crossings are told by mode", hosts: with(oneSeesUC(), keyedByMode, keyedByMode), pairs: both},
			"RFC connections up"},
		{setup{name: "a 0x01 REQ that crosses a 0x10 REQ comes to nothing", hosts: with(two(func(a, b *host) {
			a.legacyFirst = true
		}), blackhole, nil), pairs: both}, "without a 0x01 REQ"},
		{setup{name: "REJ 8 makes an RFC peer legacy", hosts: with(two(nil), rej8Legacy, nil), pairs: alone,
			restarts: 1}, "0x10 service ID"},
		{setup{name: "no redial while the old connection looks up", hosts: with(two(nil), noRedial, nil), pairs: both,
			restarts: 1, up: true}, "without a 0x01 REQ"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.jitter = 0x80
			r := tt.search(200_000, map[print]bool{})
			if r.failure == "" {
				t.Fatalf("not noticed in %d states", r.states)
			}
			first, _, _ := strings.Cut(r.failure, "\n")
			if !strings.Contains(first, tt.says) {
				t.Errorf("noticed as something else: %s", first)
			}
			t.Log(first)
			for i := range tt.hosts {
				tt.hosts[i].fault = nil
			}
			if r := tt.search(10_000, map[print]bool{}); r.failure != "" {
				t.Errorf("noticed although the rule is right: %s", r.failure)
			}
		})
	}
}

// Comparing GIDs first does no harm where their order is that of the QPNs: what
// the search objects to is the broken rule, not the hand that breaks it.
func TestBrokenOnlyWhereItMatters(t *testing.T) {
	hosts := two(nil)
	hosts[0].fault, hosts[1].fault = gidFirst, gidFirst
	s := setup{name: "GIDs in the order of QPNs", hosts: hosts, pairs: both, jitter: 0x80}
	if r := s.search(10_000, map[print]bool{}); r.failure != "" || !r.complete {
		t.Error(r.failure)
	}
}
