// Command bench measures ipoibcm beside a raw veth pair, VXLAN and wireguard-go,
// on this machine and in one run. Rounds are interleaved (raw, VXLAN,
// wireguard-go, RC, UC, UD, raw, …), so that other load on the machine affects all
// of them alike. What counts is the ratio within a round.
//
//	go run ./internal/bench -program bin/ipoibcmd          # the short matrix, at most 8 minutes
//	go run ./internal/bench -program bin/ipoibcmd -full    # the whole matrix
//	go run ./internal/bench -program bin/ipoibcmd -quick   # everything, too short to mean much
//	go run ./internal/bench -program bin/ipoibcmd -stress  # slow, shared and narrow paths
//	go run ./internal/bench -program bin/ipoibcmd -cores   # data threads, on slow processors
//	go run ./internal/bench -program bin/ipoibcmd -against OLD  # this program beside an older one
//
// It builds wireguard-go into .cache, installs Debian's iperf3 if it is missing,
// and prints tables as it goes. With -write DIR it also writes latest.md and
// latest.json, stress.md and stress.json, or cores.md there.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
	wg "ipoibcm/internal/wireguard"
)

// schema is the version of latest.json.
const schema = 1

func main() {
	if len(os.Args) > 1 && os.Args[1] == farmCommand {
		exit(runFarm(os.Args[2:], os.Stdin, os.Stdout))
	}
	b := bench{out: os.Stdout, progress: os.Stderr}
	_, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS)
	b.terminal = err == nil
	flag.StringVar(&b.program, "program", "bin/ipoibcmd", "the ipoibcmd binary to measure")
	flag.BoolVar(&b.full, "full", false, "the whole matrix: IPv4 too, 4 streams, both directions, every rate of loss; "+
		"with -against 4 streams and both directions")
	quick := flag.Bool("quick", false, "three short rounds of everything that the short matrix has: to see that it works")
	flag.IntVar(&b.rounds, "rounds", 0, "rounds (default 5, with -quick 3)")
	flag.IntVar(&b.seconds, "seconds", 0, "length of each transfer (default 2, with -quick or -stress 1)")
	stress := flag.Bool("stress", false, "what others feel of an overloaded peer, narrow paths, datagrams: "+
		"written as stress.md and stress.json")
	flag.StringVar(&b.contender, "contender", "", "with -stress or -against: measure only raw veth and this")
	flag.StringVar(&b.against, "against", "",
		"measure only raw veth, the program and this older one, and print their ratios")
	cores := flag.Bool("cores", false, "goodput with 1, 2 and 4 data threads on slow processors: written as cores.md")
	only := flag.String("only", "", "run only steps whose name contains this")
	flag.StringVar(&b.tcp, "tcp", "", "congestion control of TCP, for example cubic (default this machine's)")
	dir := flag.String("write", "", "write latest.md and latest.json to this directory")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	matrix := "short"
	switch {
	case *quick:
		matrix, b.rounds, b.seconds = "quick", cmp.Or(b.rounds, 3), cmp.Or(b.seconds, 1)
	case b.full:
		matrix = "full"
	}
	if b.against != "" {
		matrix = "against"
	}
	if *stress {
		matrix, b.rounds, b.seconds = "stress", cmp.Or(b.rounds, 3), cmp.Or(b.seconds, 1)
	}
	if *cores {
		matrix, b.rounds = "cores", cmp.Or(b.rounds, 3)
	}
	b.rounds, b.seconds = cmp.Or(b.rounds, 5), cmp.Or(b.seconds, 2)
	exit(b.run(ctx, matrix, *only, *dir))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A bench is one run.
type bench struct {
	program         string
	against         string // an older program to compare with; empty if there is none
	full            bool   // more loads
	rounds, seconds int
	out, progress   io.Writer
	terminal        bool // progress is a terminal

	wireguard string // the program wireguard-go; empty if it is not measured
	tcp       string // congestion control of TCP; empty means this machine's default
	contender string // the only one to measure beside raw veth; empty means all
	iperf     bool   // iperf3 makes the traffic
	dir       string // for sockets and logs
	hosts     int    // made so far
	cpu       cpuUse // of all loads
	started   time.Time
	r         Report

	meshes   map[string]*mesh // of meshKind, by contender; nil for one that could not be made
	meshKind meshKind
}

func (b *bench) run(ctx context.Context, matrix, only, dir string) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	programs := []*string{&b.program}
	if b.against != "" {
		programs = append(programs, &b.against)
	}
	for _, program := range programs {
		if _, err := os.Stat(*program); err != nil {
			return fmt.Errorf("%w (make build)", err)
		}
		// A name without a slash would be looked for in PATH.
		if *program, err = filepath.Abs(*program); err != nil {
			return err
		}
	}
	if b.dir, err = os.MkdirTemp("", "ipoibcm-bench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	lab.SweepKilled(namePrefix)
	defer lab.Sweep(fmt.Sprintf("%s%d-", namePrefix, os.Getpid()))
	b.started = time.Now()
	if matrix == "cores" {
		return b.cores(ctx, dir)
	}
	if b.r, err = b.report(matrix); err != nil {
		return err
	}
	b.prepare(ctx)
	defer b.closeMeshes()
	plan := b.plan(matrix)
	if matrix == "stress" {
		plan = b.stressPlan()
	}
	first, cpuErr := readCPU()
	for _, s := range plan {
		if ctx.Err() != nil {
			break
		}
		if !strings.Contains(s.name, only) {
			b.r.skip(s.name, "not asked for")
			continue
		}
		if err := s.do(ctx); err != nil {
			b.r.skip(s.name, "%v", err)
		}
		b.clear()
		for _, sec := range sections {
			if slices.Contains(s.shows, sec.test) && slices.Contains(b.r.places(sec.test), s.at) {
				sec.print(b.out, &b.r, []place{s.at})
			}
		}
	}
	if last, err := readCPU(); matrix == "stress" && cpuErr == nil && err == nil {
		b.cpu = first.until(last) // the loads of stress do not measure processor time themselves
	}
	b.r.Seconds = time.Since(b.started).Seconds()
	if b.cpu.wall > 0 {
		b.r.Machine.OtherCPU = b.cpu.other.Seconds() / b.cpu.wall.Seconds() / float64(runtime.NumCPU())
	}
	b.print(matrix)
	if dir == "" || ctx.Err() != nil { // an interrupted run is not written
		return ctx.Err()
	}
	return b.write(dir)
}

// print judges the results and prints them.
func (b *bench) print(matrix string) {
	if matrix == "stress" {
		for _, sec := range sections {
			sec.printAll(b.out, &b.r)
		}
	}
	b.r.judge()
	if b.against == "" {
		b.r.printTargets(b.out)
	} else {
		b.r.printAgainst(b.out)
	}
	for _, s := range b.r.Skipped {
		fmt.Fprintf(b.out, "not measured: %s: %s\n", s.What, s.Why)
	}
	fmt.Fprintf(b.out, "\n%.0f s; other processes used %.0f%% of the processors meanwhile\n", b.r.Seconds,
		100*b.r.Machine.OtherCPU)
}

// prepare gets iperf3 and wireguard-go ready, or notes why they are missing.
func (b *bench) prepare(ctx context.Context) {
	if v, err := needIperf(ctx); err == nil {
		b.iperf, b.r.Tools["iperf3"] = true, v
	} else {
		b.r.skip("iperf3", "%v; the traffic is made by the bench itself", err)
	}
	var err error
	if b.wireguard, err = wg.Build(ctx, ".cache"); err == nil {
		b.r.Tools["wireguard-go"] = wg.Version
		return
	}
	b.r.skip(wireguard, "%v", err)
}

// A step is a part of the run.
type step struct {
	name  string
	at    place
	shows []string // tests whose tables are printed after it
	do    func(context.Context) error
}

// plan returns the steps of a matrix.
func (b *bench) plan(matrix string) (steps []step) {
	places := []place{{9000, family6}, {1500, family6}}
	loads := []load{{streams: 1}}
	rates, lossy, losers := []int{0, 1000}, places[:1], []string{raw, oursRC}
	if b.full {
		loads = append(loads, load{streams: 4}, load{streams: 1, both: true})
	}
	if matrix == "full" {
		places = append(places, place{9000, family4}, place{1500, family4})
		rates, lossy, losers = losses, places[:2], contenders
	}
	for _, p := range places {
		steps = append(steps, step{"traffic, " + p.String(), p, []string{testTCP, testCPU, testLatency},
			func(ctx context.Context) error {
				return b.traffic(ctx, p, loads)
			}})
	}
	for _, p := range lossy {
		steps = append(steps, step{"loss, " + p.String(), p, []string{testLoss}, func(ctx context.Context) error {
			return b.loss(ctx, p, rates, losers)
		}})
	}
	if b.against != "" {
		steps = slices.DeleteFunc(steps, func(s step) bool { return slices.Contains(s.shows, testLoss) })
		return append(steps, step{"set-up and memory", setupPlace, []string{testSetup, testMemory}, b.setups})
	}
	return append(steps,
		step{"set-up and memory", setupPlace, []string{testSetup, testMemory}, b.setups},
		step{"many peers", setupPlace, []string{testPeers}, b.many},
		step{"many destinations", setupPlace, []string{testDests, testLearned}, b.destinations})
}

// eraseLine makes a terminal move the cursor to the start of the line and erase the line.
const eraseLine = "\r\x1b[K"

// say shows what is being done: on a terminal always on the same line, else on a line of its own.
func (b *bench) say(format string, args ...any) {
	text := fmt.Sprintf("%3.0f s  %s", time.Since(b.started).Seconds(), fmt.Sprintf(format, args...))
	if b.terminal {
		fmt.Fprint(b.progress, eraseLine, text)
		return
	}
	fmt.Fprintln(b.progress, text)
}

func (b *bench) clear() {
	if b.terminal {
		fmt.Fprint(b.progress, eraseLine)
	}
}

// pairs makes one mesh of two hosts for each contender at a place. It leaves out a contender whose
// mesh cannot be made, and notes the reason.
func (b *bench) pairs(ctx context.Context, at place, names []string) (list []*mesh, stop func()) {
	var stops []func()
	for _, name := range names {
		if name == wireguard && b.wireguard == "" {
			continue
		}
		b.say("%v: setting up %s", at, name)
		m, err := b.newMesh(ctx, name, meshKind{at: at, size: 2, veth: true})
		if err != nil {
			b.r.skip(fmt.Sprintf("%s, %v", name, at), "%v", err)
			continue
		}
		list, stops = append(list, m), append(stops, m.close)
	}
	return list, func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// measureEach makes one measurement of each contender, and repeats it once if it failed. It returns those
// contenders for which the measurement succeeded. The report notes the failures.
func (b *bench) measureEach(ctx context.Context, list []*mesh, round int, what string,
	measure func(*mesh) error) (left []*mesh) {
	for _, m := range list {
		b.say("%v, round %d of %d: %s%s", m.at, round+1, b.rounds, what, m.contender)
		if err := b.twice(ctx, m, measure); err != nil {
			b.r.skip(fmt.Sprintf("%s, %v, from there on", m.contender, m.at), "%v", err)
			continue
		}
		left = append(left, m)
	}
	return left
}

// twice makes one measurement, and repeats it once if it failed: a working contender may
// lose a handshake. The report notes the failure.
func (b *bench) twice(ctx context.Context, m *mesh, measure func(*mesh) error) error {
	err := measure(m)
	if err == nil || ctx.Err() != nil {
		return err
	}
	b.r.skip(fmt.Sprintf("%s, %v, one measurement, made again", m.contender, m.at), "%v", err)
	return measure(m)
}

// traffic measures goodput, its cost and latency.
func (b *bench) traffic(ctx context.Context, at place, loads []load) error {
	list, stop := b.pairs(ctx, at, b.measured())
	defer stop()
	for round := range b.rounds {
		b.r.Machine.Copies = append(b.r.Machine.Copies, copySpeed())
		if round > 0 {
			slices.Reverse(list) // no contender is always the one after the same other
		}
		for _, l := range loads {
			list = b.measureEach(ctx, list, round, l.String()+", ", func(m *mesh) error {
				t, err := b.runLoad(ctx, m, l)
				if err != nil {
					return err
				}
				b.r.add(m.key(testTCP, l.String()), "Mb/s", t.mbps())
				b.r.add(m.key(testCPU, l.String()), "s/GB", t.cpuPerGB())
				return nil
			})
		}
		for _, q := range []struct {
			message
			pace time.Duration
		}{{small, pacedNot}, {small, paced}, {large, pacedNot}} {
			list = b.measureEach(ctx, list, round, "latency of ", func(m *mesh) error {
				us, err := latencies(ctx, m, q.message, q.pace, b.transferTime(0)/4)
				if err != nil {
					return err
				}
				b.r.add(m.key(testLatency, q.name(q.pace, "p50")), "µs", quantile(us, 0.50))
				if q.pace == pacedNot { // else there are too few requests for this quantile
					b.r.add(m.key(testLatency, q.name(q.pace, "p99")), "µs", quantile(us, 0.99))
				}
				return nil
			})
		}
	}
	return ctx.Err()
}

// write writes both forms of the report.
func (b *bench) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	j, err := json.MarshalIndent(b.r, "", " ")
	if err != nil {
		return err
	}
	var md strings.Builder
	b.r.print(&md)
	name := "latest"
	if b.r.Matrix == "stress" {
		name = "stress"
	}
	return errors.Join(os.WriteFile(filepath.Join(dir, name+".json"), append(j, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, name+".md"), []byte(md.String()), 0o644))
}

// report returns an empty report.
func (b *bench) report(matrix string) (Report, error) {
	on, err := machine(b.tcp)
	return Report{Version: schema, Started: b.started.UTC().Truncate(time.Second), Matrix: matrix, Rounds: b.rounds,
		Transfer: float64(b.seconds), Build: b.build(), Machine: on, Tools: map[string]string{}, Skipped: []Skip{}}, err
}

// build returns the program's version, and the state of the tree according to git: make
// has just built the program from it.
func (b *bench) build() string {
	line := "unknown"
	if out, err := exec.Command(b.program, "--version").Output(); err == nil {
		line, _, _ = strings.Cut(string(out), "\n")
	}
	if out, err := exec.Command("git", "describe", "--always", "--dirty").Output(); err == nil {
		line += ", tree " + strings.TrimSpace(string(out))
	}
	return line
}

// tcpControl is the setting of a namespace's congestion control of TCP.
const tcpControl = "net/ipv4/tcp_congestion_control"

// machine describes this machine. An empty tcp means its default congestion control.
func machine(tcp string) (Machine, error) {
	own, err := os.ReadFile("/proc/sys/" + tcpControl)
	if err != nil {
		return Machine{}, err
	}
	known, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if tcp != "" && !slices.Contains(strings.Fields(string(known)), tcp) {
		return Machine{}, errors.Join(err, fmt.Errorf("TCP has no %q here, but %s", tcp, bytes.TrimSpace(known)))
	}
	m := Machine{CPU: "unknown CPU", Processors: runtime.NumCPU(), Go: runtime.Version(),
		TCP: cmp.Or(tcp, strings.TrimSpace(string(own)))}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			m.CPU = strings.TrimSpace(v)
			break
		}
	}
	return m, nil
}
