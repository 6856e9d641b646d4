package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// The gain by data threads is measured on slow processors, because this machine may have only two.
// A control group gives each data thread a part of a processor, and one more group does so for all
// other threads of the agent. Loops that only count, in the same groups, show how much there is to
// gain at most.
const (
	corePart   = 12 // percent of a processor
	coreRest   = 1  // percent more for an agent with one data thread, for its other threads
	corePeriod = 20 * time.Millisecond
	coreHosts  = 5 // one with several data threads, and its peers
	coreFlows  = 2 // for each peer
	freeFlows  = 1 // for each peer, without control groups
	coreSettle = 500 * time.Millisecond
)

// coreThreads are the numbers of data threads that are compared, freeThreads those without control groups.
var coreThreads, freeThreads = []int{1, 2, 4}, []int{1, 2}

// A coreResult is one measurement with a number of data threads.
type coreResult struct {
	mode    string
	receive bool
	threads int
	flows   int // for each peer
	mbps    float64
	spins   float64 // rounds of the loops, per second
	used    float64 // processors that the agent used
	other   float64 // share of the sent packets that another thread than the connection's read from the TUN
}

// cores measures goodput with 1, 2 and 4 data threads, and with 1 and 2 without control groups.
func (b *bench) cores(ctx context.Context, dir string) error {
	root, err := cpuGroups()
	if err != nil {
		return err
	}
	g := &coreGroups{dir: filepath.Join(root, fmt.Sprintf("ipoibcm-bench-%d", os.Getpid()))}
	defer g.remove()
	if err := g.make(); err != nil {
		return err
	}
	var limited, free []coreResult
	for round := range b.rounds {
		for _, mode := range []string{oursRC, oursUC} {
			for _, n := range coreThreads {
				if err := b.coreRound(ctx, g, round, coreResult{mode: mode, threads: n, flows: coreFlows}, &limited); err != nil {
					return err
				}
			}
			// Each is first in every other round.
			for i := range freeThreads {
				n := freeThreads[(i+round)%len(freeThreads)]
				if err := b.coreRound(ctx, &coreGroups{}, round, coreResult{mode: mode, threads: n, flows: freeFlows}, &free); err != nil {
					return err
				}
			}
		}
	}
	b.clear()
	text := coreTable(limited) + fmt.Sprintf("\nWithout control groups, on %d processors that all hosts and programs share, %d TCP flows to each peer:\n\n",
		runtime.NumCPU(), freeFlows) + freeTable(free)
	fmt.Fprint(b.out, text)
	if dir == "" {
		return nil
	}
	head := fmt.Sprintf("# Data threads on slow processors\n\nWritten by `make cores`; build %s. Each data thread had\n%d %% of a processor "+
		"(cpu.cfs_quota_us, periods of %v), all others of the agent together as much; with one data thread all of them had %d %%. "+
		"%d peers, %d TCP flows each; %d rounds of %d s, medians.\n\n", b.build(), corePart, corePeriod, corePart+coreRest, coreHosts-1, coreFlows,
		b.rounds, b.seconds)
	return os.WriteFile(filepath.Join(dir, "cores.md"), []byte(head+text), 0o644)
}

// coreRound measures goodput in both directions as r says, and as many loops as data threads after each.
// It appends both results to list.
func (b *bench) coreRound(ctx context.Context, g *coreGroups, round int, r coreResult, list *[]coreResult) (err error) {
	b.say("round %d of %d: %s, %d threads", round+1, b.rounds, r.mode, r.threads)
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s, %d threads: %w", r.mode, r.threads, errors.Join(ctx.Err(), err))
		}
	}()
	m, err := b.newMesh(ctx, r.mode, meshKind{at: place{9000, family6}, size: coreHosts, threads: r.threads})
	if err != nil {
		return err
	}
	defer m.close()
	g.pid, g.n = m.agents[meshSender].PID(), r.threads
	defer g.leave()
	if err := g.sort(); err != nil {
		return err
	}
	d := b.transferTime(0)
	for _, r.receive = range []bool{false, true} {
		if err = b.coreGoodput(ctx, m, g, &r, d); err != nil {
			return err
		}
		if r.spins, err = g.spin(r.threads, d); err != nil {
			return err
		}
		*list = append(*list, r)
	}
	return nil
}

// coreGoodput fills in the goodput of all flows together, the processors used, and r.other.
func (b *bench) coreGoodput(ctx context.Context, m *mesh, g *coreGroups, r *coreResult, d time.Duration) error {
	var loads backgrounds
	defer func() { loads.stop() }()
	for i := range m.hosts[meshPeer:] {
		from, to := meshSender, meshPeer+i
		if r.receive {
			from, to = to, from
		}
		l, err := m.streams(ctx, from, to, r.flows)
		if err != nil {
			return err
		}
		loads = append(loads, l)
	}
	time.Sleep(coreSettle)
	if err := g.sort(); err != nil { // for threads that began meanwhile
		return err
	}
	counted := func(name string) float64 {
		n, err := m.agents[meshSender].Counter(ctx, "datapath", name)
		if err != nil {
			return math.NaN()
		}
		return float64(n)
	}
	other, sent := counted("tx_other_thread"), counted("tx_packets")
	before, used, start := loads.received(), g.used(), time.Now()
	time.Sleep(d)
	took := time.Since(start).Seconds()
	_, _, octets := shares(before, loads.received())
	r.mbps, r.used = octets*8/1e6/took, (g.used()-used)/took
	r.other = (counted("tx_other_thread") - other) / max(1, counted("tx_packets")-sent)
	return nil
}

// cpuGroups returns where control groups of version 1 with the controller cpu are mounted.
func cpuGroups() (string, error) {
	f, err := os.Open("/proc/mounts")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) > 3 && f[2] == "cgroup" && strings.Contains(","+f[3]+",", ",cpu,") {
			return f[1], nil
		}
	}
	return "", errors.New("no control groups of version 1 with the controller cpu: those of version 2 take no single threads here")
}

// coreGroups are the control groups of the data threads, that of all other threads, and [oneGroup].
type coreGroups struct {
	dir string // empty: no groups, and threads use what they get
	pid int    // the process whose threads are in them
	n   int    // data threads
}

func (g *coreGroups) part(name string) string { return filepath.Join(g.dir, name) }

// make makes the control groups.
func (g *coreGroups) make() error {
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return err
	}
	for _, name := range groupNames {
		if err := os.Mkdir(g.part(name), 0o755); err != nil {
			return err
		}
		part := time.Duration(corePart)
		if name == oneGroup {
			part += coreRest
		}
		for file, d := range map[string]time.Duration{"cpu.cfs_period_us": corePeriod, "cpu.cfs_quota_us": corePeriod * part / 100} {
			if err := writeNumber(filepath.Join(g.part(name), file), int(d.Microseconds())); err != nil {
				return err
			}
		}
	}
	return nil
}

// restGroup is for threads that are no data threads. oneGroup is for all threads of an agent with one
// data thread.
const restGroup, oneGroup = "rest", "one"

// groupNames are the names of all groups; there are as many for data threads as [coreThreads] has at most.
var groupNames = []string{restGroup, oneGroup, dataGroup(0), dataGroup(1), dataGroup(2), dataGroup(3)}

func dataGroup(i int) string { return fmt.Sprintf("data%d", i) }

func writeNumber(file string, n int) error { return os.WriteFile(file, []byte(strconv.Itoa(n)), 0) }

// sort puts each thread of the process into its group. A single data thread has no name, and its work
// may move from thread to thread. All threads of such an agent therefore share one group, which has
// coreRest more, for the work of the other threads.
func (g *coreGroups) sort() error {
	if g.dir == "" {
		return nil
	}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/comm", g.pid))
	if err != nil {
		return err
	}
	found := 0
	for _, f := range files {
		name, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		tid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		group := threadGroup(strings.TrimSpace(string(name)), g.n)
		if group != restGroup {
			found++
		}
		if err := writeNumber(filepath.Join(g.part(group), "tasks"), tid); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("put thread %d into %s: %w", tid, group, err)
		}
	}
	if g.n > 1 && found != g.n {
		return fmt.Errorf("%d of %d data threads found", found, g.n)
	}
	return nil
}

// threadGroup returns the group for the thread name of an agent with that many data threads.
func threadGroup(name string, threads int) string {
	if i, ok := strings.CutPrefix(name, "data "); ok {
		return "data" + i
	}
	if threads == 1 {
		return oneGroup
	}
	return restGroup
}

// leave moves the process back to the parent group, if it still lives.
func (g *coreGroups) leave() {
	if g.dir == "" {
		return
	}
	_ = writeNumber(filepath.Join(filepath.Dir(g.dir), "cgroup.procs"), g.pid)
}

// remove removes the groups, which are empty by then.
func (g *coreGroups) remove() {
	for _, name := range append(groupNames[:len(groupNames):len(groupNames)], "") {
		for range 50 { // threads that have ended may still be in the group
			if err := os.Remove(g.part(name)); err == nil || errors.Is(err, os.ErrNotExist) {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// used returns the seconds of processor time that the agent has used.
func (g *coreGroups) used() (seconds float64) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", g.pid)) // nanoseconds on a processor, and two more
	for _, f := range files {
		b, _ := os.ReadFile(f) // nothing if the thread has ended
		first, _, _ := strings.Cut(string(b), " ")
		ns, _ := strconv.ParseUint(first, 10, 64)
		seconds += float64(ns) / 1e9
	}
	return seconds
}

// spin runs n loops for d, each in the group of a data thread, and returns how many rounds all of them
// together made in a second. Without groups it runs none.
func (g *coreGroups) spin(n int, d time.Duration) (float64, error) {
	if g.dir == "" {
		return 0, nil
	}
	var count atomic.Uint64
	var stop atomic.Bool
	errs := make([]error, n)
	var loops, ready sync.WaitGroup
	ready.Add(n)
	for i := range n {
		loops.Go(func() {
			runtime.LockOSThread() // never unlocked, so that the thread ends with the goroutine
			errs[i] = writeNumber(filepath.Join(g.part(dataGroup(i)), "tasks"), unix.Gettid())
			ready.Done()
			for x := uint64(1); errs[i] == nil && !stop.Load(); count.Add(1) {
				for range 10_000 {
					x = x*6364136223846793005 + 1442695040888963407
				}
				if x == 0 {
					return
				}
			}
		})
	}
	ready.Wait()
	before, start := count.Load(), time.Now()
	time.Sleep(d)
	n64, took := count.Load()-before, time.Since(start).Seconds()
	stop.Store(true)
	loops.Wait()
	return float64(n64) / took, errors.Join(errs...)
}

// coreMedians are the medians of the results with a number of data threads. each is the goodput for each
// processor used, in Gb/s.
type coreMedians struct{ mbps, spins, used, each, other float64 }

func mediansOf(all []coreResult, mode string, receive bool, threads int) coreMedians {
	var mbps, spins, used, each, other []float64
	for _, r := range all {
		if r.mode == mode && r.receive == receive && r.threads == threads {
			mbps, spins, used = append(mbps, r.mbps), append(spins, r.spins), append(used, r.used)
			each, other = append(each, r.mbps/1000/r.used), append(other, r.other)
		}
	}
	return coreMedians{median(mbps), median(spins), median(used), median(each), median(other)}
}

// coreTable returns a table of the medians, and of how they scale with the number of threads.
func coreTable(all []coreResult) string {
	var b strings.Builder
	b.WriteString("| | threads | Mb/s | to one thread | loops to one | of what loops gain | processors used | Gb/s for each | to one thread | read by another thread |\n")
	b.WriteString("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n")
	for _, mode := range []string{oursRC, oursUC} {
		for _, receive := range []bool{false, true} {
			way := "sending"
			if receive {
				way = "receiving"
			}
			one := mediansOf(all, mode, receive, 1)
			for _, n := range coreThreads {
				r := mediansOf(all, mode, receive, n)
				scale, loops := r.mbps/one.mbps, r.spins/one.spins
				fmt.Fprintf(&b, "| %s, %s | %d | %.0f | %.2f | %.2f | %.2f | %.3f | %.2f | %.2f | %.1f %% |\n", mode, way, n, r.mbps, scale, loops,
					scale/loops, r.used, r.each, r.each/one.each, 100*r.other)
			}
		}
	}
	return b.String()
}

// freeTable returns a table of the medians without control groups. The ratio to one thread is the median of
// the ratios within the rounds.
func freeTable(all []coreResult) string {
	var b strings.Builder
	b.WriteString("| | one thread, Mb/s | two threads | ratio | lowest–highest |\n| --- | ---: | ---: | ---: | ---: |\n")
	for _, mode := range []string{oursRC, oursUC} {
		for _, way := range []string{"sending", "receiving"} {
			mbps := map[int][]float64{}
			for _, r := range all {
				if r.mode == mode && r.receive == (way == "receiving") {
					mbps[r.threads] = append(mbps[r.threads], r.mbps)
				}
			}
			one, two := mbps[freeThreads[0]], mbps[freeThreads[1]]
			of := ratios(two, one)
			fmt.Fprintf(&b, "| %s, %s | %.0f | %.0f | %.2f | %.2f–%.2f |\n", mode, way, median(one), median(two), median(of), slices.Min(of), slices.Max(of))
		}
	}
	return b.String()
}
