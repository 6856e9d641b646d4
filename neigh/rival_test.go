package neigh

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
)

// claims returns an announcement that ip is at link.
func claims(t *testing.T, ip netip.Addr, link encap.LinkAddr) RecvARP {
	t.Helper()
	b, err := arp.NewAnnouncement(link, ip).AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	return RecvARP{From: link.Key(), Payload: b}
}

// wakeTo serves all deadlines until now.
func wakeTo(tab *Table, now time.Time) (out []Action) {
	for d := tab.Deadline(); !d.IsZero() && !d.After(now); d = tab.Deadline() {
		out = append(out, tab.Step(nil, d, Wake{})...)
	}
	return out
}

// Five claims a second, for ten minutes, by a host that is not the neighbour: it takes
// no packet, costs two probes a second at most, and one line of log.
func TestTakeover(t *testing.T) {
	for _, tt := range []struct {
		name   string
		mine   encap.LinkAddr // of the impostor
		always bool
	}{
		{"another host", hosts["C"], false},
		{"the same GID with another QPN", hosts["B'"], false},
		{"every announcement believed", hosts["C"], true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var log bytes.Buffer
			tab := newTable(Options{AcceptAlways: tt.always,
				Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
			tab.Step(nil, t0, Resolve{IP: ip2})
			tab.Step(nil, t0, answer(t, hosts["B"]))
			const ms = time.Millisecond
			lost, probes := 0, 0
			run := func(now time.Time, acts []Action) {
				for _, a := range acts {
					if u, ok := a.(SendUD); ok && u.To.LinkAddr.Key() == hosts["B"].Key() {
						probes++
						tab.Step(nil, now, answer(t, hosts["B"]))
					}
				}
			}
			const steps = 10 * 60 * 10
			for i := range steps {
				now := t0.Add(time.Duration(i) * 100 * ms)
				run(now, wakeTo(tab, now))
				if i%2 == 0 {
					run(now, tab.Step(nil, now, claims(t, ip2, tt.mine)))
				}
				if i%10 == 5 { // the neighbour announces itself too
					tab.Step(nil, now, claims(t, ip2, hosts["B"]))
				}
				if at(tab) != hosts["B"] {
					lost++
				}
			}
			if tt.always {
				if lost < steps/4 {
					t.Errorf("%d of %d packets went elsewhere: the impostor of this test is none", lost, steps)
				}
			} else if lost != 0 {
				t.Errorf("%d of %d packets went elsewhere, want none", lost, steps)
			}
			if probes > steps/10*2 {
				t.Errorf("%d probes in %d s", probes, steps/10)
			}
			if lines := strings.Count(log.String(), "\n"); lines != 1 {
				t.Errorf("%d lines of log, want 1:\n%.1000s", lines, log.String())
			}
		})
	}
}

// No more than maxChallenges neighbours are asked at a time, whatever is claimed.
func TestChallengesAreBounded(t *testing.T) {
	tab := newTable(Options{SourceRate: -1, RequestRate: -1})
	const n = maxChallenges + 50
	link := func(i int, of byte) encap.LinkAddr {
		return encap.LinkAddr{QPN: ib.QPN(0x1000 + i),
			GID: ib.GIDFromAddr(netip.MustParseAddr(fmt.Sprintf("fe80::%x:%x", of, i)))}
	}
	ip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(1 + i>>8), byte(i)}) }
	for i := range n {
		b, _ := arp.NewRequest(link(i, 1), ip(i), ip1).AppendBinary(nil)
		tab.Step(nil, t0, RecvARP{Payload: b})
	}
	asked := 0
	now := t0.Add(2 * time.Second)
	for i := range n {
		for _, a := range tab.Step(nil, now, claims(t, ip(i), link(i, 2))) {
			if _, ok := a.(SendUD); ok {
				asked++
			}
		}
	}
	if asked != maxChallenges {
		t.Errorf("%d neighbours were asked, want %d", asked, maxChallenges)
	}
	if got := tab.Counters().Drops[DropChallenges]; got != n-maxChallenges {
		t.Errorf("%d claims refused for that, want %d", got, n-maxChallenges)
	}
	wakeTo(tab, now.Add(time.Second))
	if tab.challenges != 0 {
		t.Errorf("%d neighbours are still asked a second later", tab.challenges)
	}
	if got := tab.Counters().Changed; got != maxChallenges {
		t.Errorf("%d neighbours have moved, want the %d that did not answer", got, maxChallenges)
	}
}
