package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A campaign gives every chosen mutant its verdict.
type campaign struct {
	options
	root, tmp string
	out       io.Writer
	journal   *journalFile
	total     int
	started   time.Time

	mu       sync.Mutex
	verdicts []verdict
	again    int // verdicts that the journal had
	said     time.Time
}

func (c *campaign) tree() *tree {
	return &tree{read: func(file string) ([]byte, error) { return os.ReadFile(filepath.Join(c.root, file)) }}
}

// do gives verdicts, one package of tests after the other.
func (c *campaign) do(chosen []*mutant) {
	t := c.tree()
	var asleep []*mutant
	alone, packages := map[string][]*mutant{}, map[string]bool{}
	for _, m := range chosen {
		if v, ok := c.journal.verdict(m); ok {
			c.again++
			c.add(v)
			continue
		}
		sleeps, err := t.asleep(m)
		switch {
		case err != nil:
			c.settle(verdict{mutant: m, Result: broken, Why: err.Error()})
			continue
		case sleeps:
			asleep = append(asleep, m)
		default:
			alone[m.pkg] = append(alone[m.pkg], m)
		}
		packages[m.pkg] = true
	}
	if c.again > 0 {
		fmt.Fprintf(c.out, "%d verdicts of this tree from %s\n", c.again, journal)
	}
	overlay, asleep, err := c.sleepers(t, asleep)
	if err != nil {
		for _, m := range chosen {
			if !c.has(m) {
				c.settle(verdict{mutant: m, Result: broken, Why: err.Error()})
			}
		}
		return
	}
	sleeping := map[string][]*mutant{}
	for _, m := range asleep {
		sleeping[m.pkg] = append(sleeping[m.pkg], m)
	}
	for _, pkg := range slices.Sorted(maps.Keys(packages)) {
		c.inPackage(t, pkg, overlay, sleeping[pkg], alone[pkg])
	}
}

// inPackage gives verdicts on the mutants whose tests are in pkg.
func (c *campaign) inPackage(t *tree, pkg, overlay string, asleep, alone []*mutant) {
	all := slices.Concat(asleep, alone)
	if len(all) == 0 {
		return // the compiler refused them all
	}
	bin := filepath.Join(c.tmp, strings.ReplaceAll(pkg, "/", "-")+".test")
	if out, err := c.build(pkg, overlay, bin); err != nil {
		for _, m := range all {
			c.settle(verdict{mutant: m, Result: broken, Why: "the tests of " + pkg + " do not build: " + firstLines(out, 3)})
		}
		return
	}
	defer os.Remove(bin)
	sound := c.baseline(bin, pkg, all)
	c.parallel(len(all), func(i int) {
		m := all[i]
		switch {
		case sound[m.pattern()] != "":
			c.settle(verdict{mutant: m, Result: broken, Why: "without any mutant: " + sound[m.pattern()]})
		case i < len(asleep):
			c.settle(c.try(bin, m, m.number))
		default:
			c.settle(c.tryAlone(t, m))
		}
	})
}

// parallel calls f with each number from 0 to n-1, several at a time.
func (c *campaign) parallel(n int, f func(int)) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, c.options.parallel)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			f(i)
			<-slots
		})
	}
	wg.Wait()
}

// baseline runs each set of tests without any mutant. To judge mutants, the tests of a set
// must pass, and not be skipped. baseline returns, by pattern, why a set cannot, or "".
func (c *campaign) baseline(bin, pkg string, ms []*mutant) map[string]string {
	wrong := map[string]string{}
	for _, m := range ms {
		wrong[m.pattern()] = ""
	}
	sets := slices.Sorted(maps.Keys(wrong))
	var mu sync.Mutex
	c.parallel(len(sets), func(i int) {
		r := c.tests(bin, pkg, sets[i], 0, "-test.v")
		why := ""
		switch {
		case r.err != nil:
			why = "the tests fail: " + firstLines(complaints(r.out), 3)
		case strings.Contains(r.out, "--- SKIP"):
			why = "skipped: " + after(r.out, "--- SKIP")
		case !strings.Contains(r.out, "--- PASS"):
			why = "no test matches " + sets[i]
		}
		mu.Lock()
		wrong[sets[i]] = why
		mu.Unlock()
	})
	return wrong
}

func after(s, mark string) string { return firstLines(s[strings.Index(s, mark):], 2) }

// refused matches an error of the compiler in a mutant.
var refused = regexp.MustCompile(`mutant-(\d+)\.go:(.*)`)

// sleepers writes the overlay of dormant mutants and returns the mutants that compile.
// It settles the others as broken.
func (c *campaign) sleepers(t *tree, ms []*mutant) (overlay string, kept []*mutant, err error) {
	for {
		files, err := t.dormant(ms)
		if err != nil {
			return "", nil, err
		}
		overlay, err := c.overlay(files, filepath.Join(c.tmp, "sleepers"))
		if err != nil || len(ms) == 0 {
			return overlay, ms, err
		}
		out, err := c.compile(overlay, files)
		if err == nil {
			return overlay, ms, nil
		}
		why := map[int]string{}
		for _, f := range refused.FindAllStringSubmatch(out, -1) {
			if n, err := strconv.Atoi(f[1]); err == nil && why[n] == "" {
				why[n] = f[2]
			}
		}
		if len(why) == 0 {
			return "", nil, fmt.Errorf("the mutants do not build:\n%s", out)
		}
		ms = slices.DeleteFunc(slices.Clone(ms), func(m *mutant) bool {
			w, bad := why[m.number]
			if bad {
				c.settle(verdict{mutant: m, Result: broken, Why: "does not compile: " + w})
			}
			return bad
		})
	}
}

// overlay writes changed files into a directory. It returns the path of the file that lists them for
// the go command (-overlay).
func (c *campaign) overlay(files map[string]string, dir string) (string, error) {
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	replace := map[string]string{}
	for _, f := range slices.Sorted(maps.Keys(files)) {
		at := filepath.Join(dir, strconv.Itoa(len(replace))+".go")
		if err := os.WriteFile(at, []byte(files[f]), 0o600); err != nil {
			return "", err
		}
		replace[filepath.Join(c.root, f)] = at
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, b, 0o600)
}

// compile builds the packages that have changed files.
func (c *campaign) compile(overlay string, files map[string]string) (string, error) {
	dirs := map[string]bool{}
	for f := range files {
		dirs["./"+filepath.Dir(f)] = true
	}
	args := append([]string{"build", "-buildvcs=false", "-overlay", overlay}, slices.Sorted(maps.Keys(dirs))...)
	return c.goCommand(args...)
}

func (c *campaign) build(pkg, overlay, bin string) (string, error) {
	return c.goCommand("test", "-c", "-vet=off", "-buildvcs=false", "-overlay", overlay, "-o", bin, "./"+pkg)
}

func (c *campaign) goCommand(args ...string) (string, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir = c.root
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// tryAlone builds a mutant that cannot sleep, and runs its tests.
func (c *campaign) tryAlone(t *tree, m *mutant) verdict {
	name := filepath.Join(c.tmp, strconv.Itoa(m.number))
	files, err := t.awake(m)
	if err != nil {
		return verdict{mutant: m, Result: broken, Why: err.Error()}
	}
	overlay, err := c.overlay(files, name)
	if err != nil {
		return verdict{mutant: m, Result: broken, Why: err.Error()}
	}
	bin := filepath.Join(name, "tests")
	defer os.RemoveAll(name)
	if out, err := c.build(m.pkg, overlay, bin); err != nil {
		return verdict{mutant: m, Result: broken, Why: "does not compile: " + firstLines(out, 3)}
	}
	return c.try(bin, m, 0)
}

// try runs the tests of one mutant.
func (c *campaign) try(bin string, m *mutant, number int) verdict {
	started := time.Now()
	var r outcome
	if c.who {
		r = c.tests(bin, m.pkg, everyTest, number, "-test.failfast=false")
	} else {
		r = c.tests(bin, m.pkg, m.pattern(), number)
	}
	v := verdict{mutant: m, Seconds: time.Since(started).Seconds()}
	v.Result, v.Why = judge(m, r)
	if c.who && v.Result == killed {
		v.Why = strings.Join(failures(r.out), " ")
	}
	return v
}

// everyTest is the pattern of all tests, and of all fuzz targets with their corpora.
const everyTest = "^(Test|Fuzz)"

var failure = regexp.MustCompile(`(?m)^--- FAIL: (\w+) (\(.*\))`)

// failures are the tests that failed, and how long each took.
func failures(out string) (names []string) {
	for _, f := range failure.FindAllStringSubmatch(out, -1) {
		names = append(names, f[1]+f[2])
	}
	return names
}

// An outcome is how a run of tests ended.
type outcome struct {
	out  string
	err  error
	late bool // it was ended because it took too long
}

// tests runs tests of a package, with one mutant awake if number is not zero.
func (c *campaign) tests(bin, pkg, pattern string, number int, more ...string) outcome {
	// The program's own timeout comes earlier, and prints where the tests stood.
	ctx, stop := context.WithTimeout(context.Background(), c.bound+5*time.Second)
	defer stop()
	args := append([]string{"-test.run", pattern, "-test.timeout", c.bound.String(), "-test.failfast",
		"-test.count=1"}, more...)
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Dir = filepath.Join(c.root, pkg)
	cmd.Env = append(os.Environ(), variable+"="+strconv.Itoa(number), "GOMEMLIMIT=2GiB")
	cmd.WaitDelay = time.Second // children that hold its output
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Start()
	if err == nil {
		limitMemory(cmd.Process.Pid)
		err = cmd.Wait()
	}
	return outcome{out.String(), err, ctx.Err() != nil}
}

// firstLines returns the first n lines of s as one.
func firstLines(s string, n int) string {
	l := strings.Split(strings.TrimSpace(s), "\n")
	for i := range l {
		l[i] = strings.TrimSpace(l[i])
	}
	return strings.Join(l[:min(n, len(l))], " | ")
}
