package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func read(t *testing.T, r *run, events ...string) int {
	t.Helper()
	bad, err := r.readTests(strings.NewReader(strings.Join(events, "\n")), place{}, 1, func() {})
	if err != nil {
		t.Fatal(err)
	}
	return bad
}

func newRun(out *bytes.Buffer) *run {
	p := &progress{w: out, now: time.Now}
	p.begin()
	return &run{out: p, results: map[string]*result{}}
}

func TestSummary(t *testing.T) {
	var out bytes.Buffer
	r := newRun(&out)
	bad := read(t, r,
		`{"Action":"start","Package":"p"}`,
		`{"Action":"run","Package":"p","Test":"TestA"}`,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:7: got 1, want 2\n"}`,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"--- FAIL: TestA (0.00s)\n"}`,
		`{"Action":"fail","Package":"p","Test":"TestA"}`,
		`{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:9: not root: no namespaces\n"}`,
		`{"Action":"output","Package":"p","Test":"TestB","Output":"--- SKIP: TestB (0.00s)\n"}`,
		`{"Action":"skip","Package":"p","Test":"TestB"}`,
		`{"Action":"pass","Package":"p","Test":"TestC"}`,
		`{"Action":"fail","Package":"p","Elapsed":1.5}`,
		`{"Action":"skip","Package":"no/tests"}`,
	)
	if bad != 1 {
		t.Errorf("%d failures, want 1", bad)
	}
	for _, want := range []string{"---- p.TestA\n    a_test.go:7: got 1, want 2", "FAIL   1/1  p ", "3 tests, 1 skipped"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, &out)
		}
	}
	var sum bytes.Buffer
	if r.summary(&sum) {
		t.Error("a run with a failure counts as good")
	}
	want := "==== failed\n  p.TestA: got 1, want 2\n==== skipped\n  p.TestB: not root: no namespaces\n1 " +
		"passed, 1 failed, 1 skipped in "
	if !strings.HasPrefix(sum.String(), want) {
		t.Errorf("got\n%s\nwant\n%s", &sum, want)
	}
}

// What a test logs before it fails is not why it failed.
func TestFailure(t *testing.T) {
	t.Chdir(t.TempDir())
	source := "package p\n\tt.Logf(\"seed\")\n\tt.Error(\"wrong\")\n\tt.Log(\"the end\")\n\thelp(t)\n"
	if err := os.WriteFile("p_test.go", []byte(source), 0o644); err != nil {
		t.Fatal(err)
	}
	const seed, wrong, end = "    p_test.go:2: seed\n", "    p_test.go:3: wrong\n", "    p_test.go:4: the end\n"
	const helped = "    p_test.go:5: helped\n"
	for _, tt := range []struct {
		name, want string
		lines      []string
	}{
		{"a log before and after", "wrong", []string{seed, "more\n", wrong, end}},
		{"logs only", "seed", []string{seed, end}},
		{"a message of a helper before", "wrong", []string{helped, wrong}},
		{"a message of a helper only", "helped", []string{seed, helped, end}},
		{"a file that is not there", "gone", []string{seed, "    q_test.go:2: gone\n", end}},
		{"no message", "", []string{"--- FAIL: TestX\n"}},
	} {
		if got := failure(".", tt.lines); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

// Of a long output the beginning and the end are shown.
func TestLongOutput(t *testing.T) {
	events := []string{`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:7: got 1, want 2\n"}`}
	for range 2 * maxShown {
		events = append(events, `{"Action":"output","Package":"p","Test":"TestA","Output":"a table\n"}`)
	}
	events = append(events, `{"Action":"output","Package":"p","Test":"TestA","Output":"--- FAIL: TestA (0.00s)\n"}`,
		`{"Action":"fail","Package":"p","Test":"TestA"}`, `{"Action":"fail","Package":"p"}`)
	var out bytes.Buffer
	read(t, newRun(&out), events...)
	for _, want := range []string{"    a_test.go:7: got 1, want 2\na table\n", "\n... 402 lines are left out ...\na table\n",
		"a table\n--- FAIL: TestA (0.00s)\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q", want)
		}
	}
	if n := strings.Count(out.String(), "a table\n"); n != maxShown-2 {
		t.Errorf("%d lines of the table are shown, want %d", n, maxShown-2)
	}
}

func TestBestOutcomeCounts(t *testing.T) {
	r := newRun(new(bytes.Buffer))
	read(t, r, `{"Action":"skip","Package":"p","Test":"TestAllocs"}`, `{"Action":"pass","Package":"p"}`)
	read(t, r, `{"Action":"pass","Package":"p","Test":"TestAllocs"}`, `{"Action":"pass","Package":"p"}`)
	var sum bytes.Buffer
	if !r.summary(&sum) || !strings.HasPrefix(sum.String(), "nothing was skipped\n1 passed, 0 failed, 0 skipped in ") {
		t.Errorf("skipped with the race detector, passed without: %s", &sum)
	}
}

func TestFailuresWithoutATest(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		events     []string
	}{
		{"does not build", "p: does not build", []string{
			`{"ImportPath":"p [p.test]","Action":"build-output","Output":"p/x.go:3:1: syntax error\n"}`,
			`{"ImportPath":"p [p.test]","Action":"build-fail"}`,
			`{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}`}},
		{"panics", "p: TestX did not end", []string{
			`{"Action":"run","Package":"p","Test":"TestX"}`,
			`{"Action":"output","Package":"p","Test":"TestX","Output":"panic: oops\n"}`,
			`{"Action":"fail","Package":"p"}`}},
		{"exits", "p: failed outside its tests", []string{`{"Action":"fail","Package":"p"}`}},
	} {
		var out, sum bytes.Buffer
		r := newRun(&out)
		if bad := read(t, r, tt.events...); bad != 1 {
			t.Errorf("%s: %d failures, want 1", tt.name, bad)
		}
		if r.summary(&sum); !strings.Contains(sum.String(), tt.want) {
			t.Errorf("%s: summary lacks %q:\n%s", tt.name, tt.want, &sum)
		}
	}
}

// Lanes are under way at once, the steps of each in order; the next stage waits for all.
func TestStages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		r, began := newRun(&out), time.Now()
		takes := func(name string, d time.Duration) step {
			return step{name, func() {
				time.Sleep(d)
				r.note(name, passed, time.Since(began).String())
			}}
		}
		r.only = "s"
		r.stages([][]step{
			{takes("s1", 5*time.Minute)},
			{takes("s2", time.Minute), takes("x", time.Hour), takes("s3", 2*time.Minute)},
		}, [][]step{{takes("s4", time.Minute)}})
		var got []string
		for _, name := range r.order {
			got = append(got, name+" "+r.results[name].why)
		}
		if want := []string{"s2 1m0s", "s3 3m0s", "s1 5m0s", "s4 6m0s"}; !slices.Equal(got, want) {
			t.Errorf("ended at %v, want %v", got, want)
		}
		if want := "==== 4 of 4: s4\n==== s4 has ended after 60 s\n"; !strings.HasSuffix(out.String(), want) {
			t.Errorf("got\n%swant %s at the end", &out, want)
		}
	})
}

func TestMissingToolFailsInCI(t *testing.T) {
	for _, ci := range []bool{false, true} {
		r := newRun(new(bytes.Buffer))
		r.ci = ci
		r.missing("tshark", "not installed")
		if good := r.summary(new(bytes.Buffer)); good == ci {
			t.Errorf("CI=%v: good is %v", ci, good)
		}
	}
}

func TestFuzzTimeIsNoFailure(t *testing.T) {
	for _, tt := range []struct {
		name, out string
		want      bool
	}{
		{"time", "fuzz: elapsed: 1s, execs: 740\n--- FAIL: FuzzX (1.20s)\n    context deadline " +
			"exceeded\nFAIL\nexit status 1\nFAIL\tp\t1.2s\n", true},
		{"a find", "--- FAIL: FuzzX (0.20s)\n    --- FAIL: FuzzX (0.00s)\n        x_test.go:3: bad\n    Failing " +
			"input written to testdata/fuzz/FuzzX/1\nFAIL\n", false},
		{"a find at the end", "--- FAIL: FuzzX (1.20s)\n    context deadline exceeded\nFAIL\n    Failing input " +
			"written to testdata/fuzz/FuzzX/1\n", false},
		{"does not build", "FAIL\tp [build failed]\n", false},
	} {
		if got := ranOutOfTime(tt.out); got != tt.want {
			t.Errorf("%s: got %v", tt.name, got)
		}
	}
}

// What was under way when go test was killed has failed.
func TestKilledMeanwhile(t *testing.T) {
	var sum bytes.Buffer
	r := newRun(new(bytes.Buffer))
	bad := read(t, r, `{"Action":"start","Package":"p"}`, `{"Action":"run","Package":"p","Test":"TestX"}`,
		`{"Action":"output","Package":"p","Test":"TestX","Output":"=== RUN   TestX\n"}`)
	if bad != 1 {
		t.Errorf("%d failures, want 1", bad)
	}
	if r.summary(&sum); !strings.Contains(sum.String(), "p: TestX did not end") {
		t.Errorf("summary:\n%s", &sum)
	}
}

// The dog barks when nothing happens, and only then.
func TestWatchdog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var barks []string
		begin := time.Now()
		d := watchdog(10*time.Minute, func(syscall.Signal) { t.Error("it barked though there was progress") })
		for range 100 {
			time.Sleep(9 * time.Minute)
			d.reset()
		}
		d.stop()
		synctest.Wait()
		begin = time.Now()
		d = watchdog(10*time.Minute, func(s syscall.Signal) {
			barks = append(barks, time.Since(begin).String()+" "+s.String())
		})
		time.Sleep(11 * time.Minute)
		synctest.Wait()
		if want := []string{"10m0s quit", "10m15s killed"}; !slices.Equal(barks, want) {
			t.Errorf("barks %v, want %v", barks, want)
		}
		d.stop()
		d = watchdog(time.Minute, func(syscall.Signal) { t.Error("it barked after the end") })
		d.stop()
		time.Sleep(time.Hour)
	})
}

func TestGroup(t *testing.T) {
	g := group([]string{"ipoibcm/agent", "ipoibcm/cm", "ipoibcm/test/interop", "ipoibcm/test/interop/guest",
		"ipoibcm/test/netns", "ipoibcm/test/sim", "ipoibcm/test/arch", "ipoibcm/counters"},
		func(dir string) bool { return hasThreads(filepath.Join("..", "..", dir)) })
	if want := []string{"ipoibcm/test/sim", "ipoibcm/test/arch", "ipoibcm/agent", "ipoibcm/cm", "ipoibcm/counters"}; !slices.Equal(g.unit, want) {
		t.Errorf("unit %v, want %v", g.unit, want)
	}
	if want := []string{"ipoibcm/agent"}; !slices.Equal(g.clocked, want) {
		t.Errorf("clocked %v, want %v", g.clocked, want)
	}
	if want := []string{"ipoibcm/test/sim", "ipoibcm/test/arch", "ipoibcm/cm", "ipoibcm/counters"}; !slices.Equal(g.pure, want) {
		t.Errorf("pure %v, want %v", g.pure, want)
	}
	if want := []string{"ipoibcm/counters"}; !slices.Equal(g.pureThreads, want) {
		t.Errorf("pureThreads %v, want %v", g.pureThreads, want)
	}
	if want := []string{"ipoibcm/test/netns"}; !slices.Equal(g.netns, want) {
		t.Errorf("netns %v, want %v", g.netns, want)
	}
	// The names are those of packages that there are.
	for _, dir := range slices.Concat(slowest, clockedPackages, oneGoroutine, fromSource) {
		if _, err := os.Stat(filepath.Join("..", "..", dir)); err != nil {
			t.Error(err)
		}
	}
}
