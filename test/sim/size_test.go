package sim

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/internal/long"
	"ipoibcm/internal/simfabric"
)

var (
	hostsFlag   = flag.Int("sim.hosts", 0, "simulate this many hosts in TestSize and TestForever")
	foreverFlag = flag.Bool("sim.forever", false, "let TestForever run seeds until it is stopped")
	forFlag     = flag.Duration("sim.for", 0, "or for so long")
)

// maxHosts is how many have an address each.
const maxHosts = 250

// tempest is one whole simulation among n hosts: a storm, a calm in which all
// must be well again, and the end of every host. Every check there is runs in it.
func tempest(w *world, n int) {
	d := 15 * time.Second
	if n > 16 {
		d = 20 * time.Second
	}
	w.tally = map[string]uint64{}
	w.storm(storms(n, d))
	w.settle()
	w.end()
	w.count("sim: hosts", uint64(n))
	w.count("sim: steps", w.steps)
	w.count("sim: packets of the workload", w.lastID)
	w.count("sim: packets on the network", w.f.Stats.Sent)
	w.count("sim: seconds of virtual time", uint64(w.f.Now().Sub(epoch)/time.Second))
	for name, n := range map[string]uint64{"lost": w.f.Stats.Lost, "repeated": w.f.Stats.Duplicated,
		"held back": w.f.Stats.Reordered,
		"damaged":   w.f.Stats.Flipped, "cut off": w.f.Stats.Cut} {
		w.count("network: "+name, n)
	}
}

// A fleet is many simulations, as many at a time as there are processors.
type fleet struct {
	hosts int
	fault fault                           // of the first host of each
	seeds func() (seed uint64, more bool) // called by one goroutine at a time

	mu     sync.Mutex
	runs   int
	tally  map[string]uint64
	failed *violation // the one with the smallest seed
	seed   uint64     // its seed
}

// run lets the fleet sail until the seeds end or one fails.
func (f *fleet) run() {
	f.tally = map[string]uint64{}
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for seed, more := f.next(); more; seed, more = f.next() {
				var tally map[string]uint64
				v := try(seed, func(w *world) {
					w.fault = f.fault
					tempest(w, f.hosts)
					tally = w.tally
				})
				f.done(seed, tally, v)
			}
		})
	}
	wg.Wait()
}

func (f *fleet) next() (seed uint64, more bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed != nil {
		return 0, false
	}
	return f.seeds()
}

func (f *fleet) done(seed uint64, tally map[string]uint64, v *violation) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runs++
	for name, n := range tally {
		f.tally[name] += n
	}
	if v != nil && (f.failed == nil || seed < f.seed) {
		f.failed, f.seed = v, seed
	}
}

// replay is the command that runs the seed that failed again.
func (f *fleet) replay() string {
	return fmt.Sprintf("go test ./test/sim -run '^TestSize$' -sim.hosts=%d -sim.seed=%d", f.hosts, f.seed)
}

// figures lists what happened in lines.
func (f *fleet) figures() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d simulations of %d hosts\n", f.runs, f.hosts)
	for _, kind := range []string{"sim: ", "network: ", "delivered", "established", ""} {
		for _, name := range slices.Sorted(maps.Keys(f.tally)) {
			if n := f.tally[name]; n > 0 && (kind != "" && strings.HasPrefix(name, kind) ||
				kind == "" && strings.Contains(name, "drop")) {
				fmt.Fprintf(&b, "%12d %s\n", n, strings.TrimPrefix(name, "sim: "))
			}
		}
	}
	return b.String()
}

// seedsUpTo yields the seeds from 1 to n, or the one of -sim.seed.
func seedsUpTo(n int) func() (uint64, bool) {
	seed, last := uint64(0), uint64(n)
	if s := simfabric.Seed(); s != 0 {
		seed, last = s-1, s
	}
	return func() (uint64, bool) {
		seed++
		return seed, seed <= last
	}
}

// TestSize runs many small worlds and a large one through everything that can go
// wrong, and looks at every packet, every step, every record and what is left.
//
// 4755-2.1-1, 4755-2.1-2, 4755-2.3-1, 4755-3.3-1, 4755-5.1-2, 4755-5.1-5, 4755-5.1-6 and 4755-8-1 hold
// throughout, among 2 hosts and among 200.
func TestSize(t *testing.T) {
	sizes := []struct{ hosts, runs int }{{8, 500}, {200, 1}}
	switch {
	case raceDetector:
		sizes = []struct{ hosts, runs int }{{8, 50}, {40, 1}}
	case !long.Form():
		sizes = []struct{ hosts, runs int }{{8, 30}, {40, 1}}
	}
	if n := *hostsFlag; n > 0 {
		sizes = []struct{ hosts, runs int }{{min(n, maxHosts), 1}}
	}
	for _, s := range sizes {
		t.Run(fmt.Sprintf("hosts=%d", s.hosts), func(t *testing.T) {
			t.Parallel() // the large world keeps one processor busy
			f := fleet{hosts: s.hosts, seeds: seedsUpTo(s.runs)}
			start := time.Now()
			f.run()
			t.Logf("%v for %s", time.Since(start).Round(time.Millisecond), f.figures())
			if f.failed != nil {
				t.Logf("what came before:\n%s", f.failed.before)
				t.Fatalf("%s\nreplay with: %s", f.failed.text, f.replay())
			}
			if *hostsFlag == 0 && simfabric.Seed() == 0 {
				expect.Equal(t, f.runs, s.runs, "number of simulations")
				expect.Equal(t, f.tally["sim: hosts"], uint64(s.runs*s.hosts), "hosts in all of them")
			}
		})
	}
}

// TestForever runs seeds nobody has seen until one fails or it is stopped:
// make sim. With -sim.for it ends by itself. It begins with -sim.seed if that is given.
func TestForever(t *testing.T) {
	if !*foreverFlag && *forFlag == 0 {
		t.Skip("runs until it is stopped: make sim")
	}
	first := simfabric.Seed()
	if first == 0 {
		first = rand.Uint64N(1 << 48)
	}
	f := fleet{hosts: 8}
	if n := *hostsFlag; n > 0 {
		f.hosts = min(n, maxHosts)
	}
	start, told, seed := time.Now(), time.Now(), first
	f.seeds = func() (uint64, bool) {
		if time.Since(told) >= time.Second {
			told = time.Now()
			fmt.Printf("%8v  %d simulations of %d hosts from seed %d on, %d steps, %d packets, %d connections\n",
				time.Since(start).Round(time.Second), f.runs, f.hosts, first, f.tally["sim: steps"],
				f.tally["sim: packets on the network"], f.tally["established_active"])
		}
		seed++
		return seed - 1, *forFlag == 0 || time.Since(start) < *forFlag
	}
	f.run()
	if f.failed == nil {
		t.Logf("%v for %s, from seed %d on", time.Since(start).Round(time.Second), f.figures(), first)
		return
	}
	t.Logf("what came before:\n%s", f.failed.before)
	t.Fatalf("%s\nreplay with: %s", f.failed.text, f.replay())
}
