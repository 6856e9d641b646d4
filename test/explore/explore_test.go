package explore

import (
	"flag"
	"regexp"
	"testing"
	"time"

	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

var (
	large = flag.Bool("explore.large", false, "explore to the larger bounds")
	only  = flag.String("explore.only", "", "explore only the worlds whose names match")
)

// maxStates bounds one search. None of those below comes near it.
const maxStates = 20_000_000

var (
	both  = [][2]int{{0, 1}, {1, 0}}
	alone = [][2]int{{0, 1}}
)

// two are hosts a and b, of which a has the smaller address; b receives less.
func two(change func(a, b *host)) []host {
	a, b := host{qpn: 0x101, gid: 1}, host{qpn: 0x102, gid: 2, receive: 9000}
	if change != nil {
		change(&a, &b)
	}
	return []host{a, b}
}

func modes(m, n ipoib.Mode) []host {
	return two(func(a, b *host) { a.mode, b.mode = m, n })
}

// oneSeesUC are hosts with both modes, of which a believes that b has only UC:
// a's REQ is for UC, b's for RC.
func oneSeesUC() []host {
	return two(func(a, b *host) { a.mode, b.mode, a.sees = ipoib.ModeAuto, ipoib.ModeAuto, encap.FlagUC })
}

// three are hosts whose QPNs and GIDs are in opposite orders.
func three() []host {
	return []host{{qpn: 0x101, gid: 3}, {qpn: 0x102, gid: 2, receive: 9000}, {qpn: 0x103, gid: 1}}
}

// worlds are what is explored, with the bounds that continuous integration has
// time for, or the larger ones.
func worlds(large bool) []setup {
	more := func(small, big int) int {
		if large {
			return big
		}
		return small
	}
	return []setup{
		{name: "rc", hosts: two(nil), pairs: both, losses: 1, repeats: 1, delays: 1, jitter: 0x80},
		{name: "rc, two losses", hosts: two(nil), pairs: both, losses: 2, repeats: more(0, 1), delays: more(0, 1), jitter: 0x80},
		{name: "rc, two delays", hosts: two(nil), pairs: both, losses: more(0, 1), repeats: more(0, 1), delays: 2, jitter: 0xff},
		{name: "uc", hosts: modes(ipoib.ModeUC, ipoib.ModeUC), pairs: both, losses: 1, repeats: more(0, 1), delays: more(0, 1), jitter: 0},
		{name: "rc crosses uc", hosts: oneSeesUC(), pairs: both, losses: 1, repeats: more(0, 1), delays: more(0, 1), jitter: 0x80},
		{name: "queue pairs take time", hosts: two(nil), pairs: both, losses: more(0, 1), repeats: more(0, 1), delays: 1, slowQP: true, jitter: 0x80},
		{name: "0x10 crosses 0x01", hosts: two(func(a, b *host) { a.legacyFirst = true }), pairs: both, losses: 1, repeats: more(0, 1), delays: more(0, 1), jitter: 0x80},
		{name: "0x01 crosses 0x10", hosts: two(func(a, b *host) { b.legacyFirst = true }), pairs: both, losses: more(0, 1), repeats: more(0, 1), delays: more(0, 1), jitter: 0x80},
		{name: "restart", hosts: two(nil), pairs: both, losses: more(0, 1), delays: more(0, 1), restarts: 1, jitter: 0x80},
		{name: "restart of one that is up", hosts: two(nil), pairs: both, losses: more(1, 1), delays: more(0, 1), repeats: more(0, 1), restarts: 1, up: true, jitter: 0},
		{name: "three hosts", hosts: three(), pairs: [][2]int{{0, 1}, {1, 0}, {1, 2}}, losses: more(0, 1), repeats: more(0, 1), jitter: 0x80},
		{name: "three hosts, ring", hosts: three(), pairs: [][2]int{{0, 1}, {1, 2}, {2, 0}}, losses: more(0, 1), repeats: more(0, 1), jitter: 0x80},
	}
}

func TestExplore(t *testing.T) {
	if testing.Short() {
		t.Skip("a search takes a minute")
	}
	var total, cores int
	begin := time.Now()
	for _, s := range worlds(*large) {
		if ok, err := regexp.MatchString(*only, s.name); err != nil || !ok {
			continue
		}
		start := time.Now()
		r := s.search(maxStates)
		if r.failure != "" {
			t.Fatal(r.failure)
		}
		total, cores = total+r.states, cores+r.cores
		t.Logf("%-26s losses %d, repeats %d, delays %d, restarts %d: %7d states (%d by what machines and fabric hold), %d transitions, %d steps deep; recovers within %v; %v",
			s.name, s.losses, s.repeats, s.delays, s.restarts, r.states, r.cores, r.transitions, r.depth, r.slowest, time.Since(start).Round(time.Millisecond))
		if !r.complete {
			t.Errorf("%s: given up at %d states", s.name, maxStates)
		}
	}
	t.Logf("%d distinct states, %d by what machines and fabric hold, in %v", total, cores, time.Since(begin).Round(time.Second))
	if *only == "" && cores < 100_000 {
		t.Errorf("only %d distinct states", cores)
	}
}
