package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// fuzz runs every fuzz target of the tree, one after the other, and prints a table at the end. Each
// target runs for the time d or, if the time all is not zero, for an equal part of that. If keep is not
// zero, fuzz fills each target's committed corpus up to keep inputs, with those that fuzzing found
// interesting.
func (r *run) fuzz(d, all time.Duration, keep int) {
	targets, err := fuzzTargets()
	if err != nil {
		r.note("fuzz targets", failed, err.Error())
		return
	}
	if all > 0 {
		d = max(all/time.Duration(max(len(targets), 1)), time.Second).Round(time.Second)
	}
	tmp, err := os.MkdirTemp("", "fuzz")
	if err != nil {
		r.note("fuzz targets", failed, err.Error())
		return
	}
	defer os.RemoveAll(tmp)
	program := filepath.Join(tmp, "fuzz.test")
	rows := make([]fuzzRow, 0, len(targets))
	steps := make([]step, 0, len(targets))
	for _, t := range targets {
		name := t.pkg + "." + t.name
		steps = append(steps, step{name: name, do: r.check(name, func() error {
			// The program is built before, so that only the fuzzing is measured.
			if err := r.stream("go", "test", "-c", "-fuzz=^"+t.name+"$", "-o", program, t.pkg); err != nil {
				return err
			}
			cache, err := t.cache()
			if err != nil {
				return err
			}
			var out bytes.Buffer
			c := exec.Command(program, "-test.run=^$", "-test.fuzz=^"+t.name+"$", "-test.fuzztime="+d.String(),
				"-test.fuzzcachedir="+filepath.Dir(cache), "-test.timeout=0",
				"-test.fuzzminimizetime=1s") // the default of 60 s would take most of the time
			c.Dir = t.dir
			c.Stdout = io.MultiWriter(r.out, &out)
			c.Stderr = c.Stdout // with the same writer exec makes one Write at a time
			start := time.Now()
			err = c.Run()
			if err != nil && ranOutOfTime(out.String()) {
				err = nil
			}
			row := readFuzz(out.String())
			row.target, row.took, row.found = t, time.Since(start), err != nil
			if c.ProcessState != nil {
				row.cpu = c.ProcessState.UserTime() + c.ProcessState.SystemTime() // of its workers too
			}
			rows = append(rows, row)
			if err == nil && keep > 0 {
				err = t.keep(keep)
			}
			return err
		})})
	}
	r.do(steps)
	fuzzTable(r.out, rows)
}

// A fuzzRow is the result of one target.
type fuzzRow struct {
	target              fuzzTarget
	took, cpu           time.Duration // by the wall clock, and of processors
	execs, fresh, total int           // executions, inputs that reached something new, and all such
	found               bool
}

var fuzzLine = regexp.MustCompile(`execs: (\d+) .*new interesting: (\d+) \(total: (\d+)\)`)

// readFuzz reads the counts of a row from the last line of progress in out.
func readFuzz(out string) (row fuzzRow) {
	all := fuzzLine.FindAllStringSubmatch(out, -1)
	if len(all) > 0 {
		for i, n := range []*int{&row.execs, &row.fresh, &row.total} {
			*n, _ = strconv.Atoi(all[len(all)-1][i+1])
		}
	}
	return row
}

func fuzzTable(w io.Writer, rows []fuzzRow) {
	var took, cpu time.Duration
	execs, finds := 0, 0
	fmt.Fprintf(w, "\n| target | time | CPU | executions | new inputs | all inputs | |\n| --- | --- | --- | "+
		"--- | --- | --- | --- |\n")
	for _, r := range rows {
		verdict := ""
		if r.found {
			verdict = "FAILED"
			finds++
		}
		fmt.Fprintf(w, "| `%s` %s | %.0f s | %.0f s | %d | %d | %d | %s |\n",
			strings.TrimPrefix(r.target.pkg, "ipoibcm/"), r.target.name, r.took.Seconds(), r.cpu.Seconds(), r.execs,
			r.fresh, r.total, verdict)
		took += r.took
		cpu += r.cpu
		execs += r.execs
	}
	fmt.Fprintf(w, "\n%d targets, %.1f minutes, %.1f CPU-minutes with %d workers, %d executions, %d finds\n",
		len(rows), took.Minutes(), cpu.Minutes(), runtime.GOMAXPROCS(0), execs, finds)
}

// cache returns the directory in which go test too keeps the interesting inputs of t.
func (t fuzzTarget) cache() (string, error) {
	out, err := exec.Command("go", "env", "GOCACHE").Output()
	return filepath.Join(strings.TrimSpace(string(out)), "fuzz", t.pkg, t.name), err
}

// keep copies inputs of at most maxKept octets from the cache of go test to the
// committed corpus, until the corpus has n.
func (t fuzzTarget) keep(n int) error {
	type input struct {
		path string
		size int64
	}
	var all []input
	from, err := t.cache()
	if err != nil {
		return err
	}
	files, err := os.ReadDir(from)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, f := range files {
		if st, err := f.Info(); err == nil && st.Size() <= maxKept {
			all = append(all, input{filepath.Join(from, f.Name()), st.Size()})
		}
	}
	slices.SortFunc(all, func(a, b input) int {
		return cmp.Or(cmp.Compare(a.size, b.size), strings.Compare(a.path, b.path))
	})
	to := filepath.Join(t.dir, "testdata", "fuzz", t.name)
	if have, err := os.ReadDir(to); err == nil {
		n -= len(have)
	}
	if n <= 0 || len(all) == 0 {
		return nil
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	// Evenly over all sizes: the smallest are alike.
	for i := range min(n, len(all)) {
		in := all[i*len(all)/min(n, len(all))]
		b, err := os.ReadFile(in.path)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(in.path)), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// maxKept is the largest file that goes into a corpus, in octets.
const maxKept = 4096

// ranOutOfTime reports whether go test failed only because its time ended while
// it waited for a worker. It reports that as a failure, but for a real failure it
// prints a failing input, and another text.
func ranOutOfTime(out string) bool {
	return onlyDeadline.MatchString(out) && !strings.Contains(out, "Failing input")
}

var onlyDeadline = regexp.MustCompile(
	`(?m)^--- FAIL: Fuzz\w+ \(.*\)\n\s+context deadline exceeded\n(exit status 1\n)?FAIL`)

type fuzzTarget struct{ pkg, dir, name string }

var fuzzFunc = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(\w+ \*testing\.F\)`)

// fuzzTargets finds the fuzz targets in the source: go test -list would build every
// test program and run its TestMain.
func fuzzTargets() (targets []fuzzTarget, err error) {
	const format = `{{$d := .Dir}}{{$p := .ImportPath}}{{range .TestGoFiles}}{{$p}}	{{$d}}/{{.}}
{{end}}{{range .XTestGoFiles}}{{$p}}	{{$d}}/{{.}}
{{end}}`
	out, err := exec.Command("go", "list", "-f", format, "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("list test files: %w", err)
	}
	for _, l := range strings.Split(string(out), "\n") {
		pkg, file, ok := strings.Cut(l, "\t")
		if !ok {
			continue
		}
		src, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, m := range fuzzFunc.FindAllSubmatch(src, -1) {
			targets = append(targets, fuzzTarget{pkg, filepath.Dir(file), string(m[1])})
		}
	}
	return targets, nil
}
