package explore

import (
	"flag"
	"regexp"
	"testing"
	"time"

	"ipoibcm/internal/long"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

var (
	large = flag.Bool("explore.large", false, "explore to the larger bounds")
	only  = flag.String("explore.only", "", "explore only the worlds whose names match")
)

const (
	// maxStates bounds one search. None of those below comes near it.
	maxStates = 20_000_000
	// wanted is how many distinct states there must be in the long form, by what
	// machines and fabric hold: the same with other budgets left counts once.
	wanted = 100_000
	// wantedShort is the same for the short form.
	wantedShort = 5_000
)

var (
	both  = [][2]int{{0, 1}, {1, 0}}
	alone = [][2]int{{0, 1}}
)

// larger reports whether this is the long form, or explores to even larger bounds.
func larger() bool { return *large || long.Form() }

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

// shortWorlds are those of worlds that take seconds, with fewer budgets: one loss,
// one delay, or one restart of one pair.
func shortWorlds() (short []setup) {
	for _, s := range worlds(false) {
		if s.name == "three hosts" || s.name == "three hosts, all at once" {
			continue // "three hosts, ring" stays
		}
		s.losses, s.delays = min(s.losses, 1), min(s.delays, 1)
		if s.losses > 0 {
			s.delays = 0
		}
		if s.restarts == 0 {
			s.repeats = 0
		}
		if s.restarts > 0 {
			s.pairs = alone
		}
		short = append(short, s)
	}
	return short
}

// worlds are what is explored, with the bounds that make test-long has time for,
// or the larger ones.
func worlds(large bool) []setup {
	more := func(small, big int) int {
		if large {
			return big
		}
		return small
	}
	return []setup{
		{name: "rc", hosts: two(nil), pairs: both, losses: 1, repeats: 1, delays: 1, jitter: 0x80},
		{name: "rc, more losses", hosts: two(nil), pairs: both, losses: more(2, 3), repeats: more(0, 1),
			delays: more(1, 1), jitter: 0},
		{name: "rc, more delays", hosts: two(nil), pairs: both, losses: 0, repeats: more(0, 1), delays: more(2, 3),
			jitter: 0xff},
		{name: "uc", hosts: modes(ipoib.ModeUC, ipoib.ModeUC), pairs: both, losses: 1, repeats: more(0, 1),
			delays: 1, jitter: 0},
		{name: "rc crosses uc", hosts: oneSeesUC(), pairs: both, losses: 1, repeats: more(0, 1), delays: 1, jitter: 0x80},
		{name: "queue pairs take time", hosts: two(nil), pairs: both, losses: more(0, 1), repeats: 1, delays: 1,
			slowQP: true, jitter: 0x80},
		{name: "0x10 crosses 0x01", hosts: two(func(a, b *host) { a.legacyFirst = true }), pairs: both, losses: 1,
			repeats: more(0, 1), delays: 1, jitter: 0x80},
		{name: "0x01 crosses 0x10", hosts: two(func(a, b *host) { b.legacyFirst = true }), pairs: both, losses: 1,
			repeats: more(0, 1), delays: more(0, 1), jitter: 0x80},
		{name: "in-band", hosts: two(func(a, b *host) { a.cm, b.cm = ipoib.CMInband, ipoib.CMInband }), inband: true,
			pairs: both, losses: 1, repeats: more(0, 1), delays: 1, jitter: 0x80},
		{name: "in-band crosses QP 1", hosts: two(func(a, b *host) { a.diverted = true }), inband: true, pairs: both,
			losses: 1, repeats: more(0, 1), delays: 1, jitter: 0x80},
		{name: "QP 1 crosses in-band", hosts: two(func(a, b *host) { b.diverted = true }), inband: true, pairs: both,
			losses: 1, repeats: more(0, 1), delays: 1, jitter: 0x80},
		{name: "restart", hosts: two(nil), pairs: both, losses: more(0, 1), repeats: 0, delays: 0, restarts: 1, jitter: 0x80},
		{name: "restart, repeats", hosts: two(nil), pairs: alone, losses: more(0, 1), repeats: 1, delays: more(0, 1),
			restarts: 1, jitter: 0x80},
		{name: "restart of one that is up", hosts: two(nil), pairs: both, losses: 1, repeats: more(0, 1),
			delays: more(0, 1), restarts: 1, up: true, jitter: 0},
		{name: "three hosts", hosts: three(), pairs: [][2]int{{0, 1}, {1, 0}, {1, 2}}, losses: 1, repeats: more(0, 1),
			jitter: 0x80},
		{name: "three hosts, ring", hosts: three(), pairs: [][2]int{{0, 1}, {1, 2}, {2, 0}}, losses: more(0, 1),
			repeats: more(0, 1), jitter: 0x80},
		{name: "three hosts, all at once", hosts: three(), pairs: [][2]int{{0, 1}, {1, 0}, {1, 2}, {2, 1}},
			losses: more(0, 1), jitter: 0x80},
	}
}

func TestExplore(t *testing.T) {
	setups, least := shortWorlds(), wantedShort
	if larger() {
		setups, least = worlds(*large), wanted
	}
	most := maxStates
	if raceDetector {
		most = 1000 // enough to see the workers at work
	}
	total, cores := 0, map[print]bool{}
	begin := time.Now()
	for _, s := range setups {
		if ok, err := regexp.MatchString(*only, s.name); err != nil || !ok {
			continue
		}
		start, before := time.Now(), len(cores)
		r := s.search(most, cores)
		if r.failure != "" {
			t.Fatal(r.failure)
		}
		total += r.states
		t.Logf("%-25s losses %d, repeats %d, delays %d, restarts %d: %7d states, %7d new without budgets, %8d "+
			"transitions, %d steps deep, all can send again within %v; took %v",
			s.name, s.losses, s.repeats, s.delays, s.restarts, r.states, len(cores)-before, r.transitions, r.depth,
			r.slowest, time.Since(start).Round(time.Millisecond))
		if !r.complete && !raceDetector {
			t.Errorf("%s: given up at %d states", s.name, most)
		}
	}
	t.Logf("%d states, %d distinct without budgets, in %v", total, len(cores), time.Since(begin).Round(time.Second))
	if *only != "" || raceDetector {
		return // these are not all
	}
	if len(cores) < least {
		t.Errorf("%d distinct states, want %d at least", len(cores), least)
	}
}
