// Command nightly is what "make nightly" runs: all that takes long, one after the
// other, with a table at the end. What it has done it keeps under .cache/nightly, for
// each state of the source: a run that was stopped goes on where it was.
//
//	go run ./internal/nightly               # a night
//	go run ./internal/nightly -hour 1m      # shorter where a step has no end of its own
//	go run ./internal/nightly -only sim,soak
//	go run ./internal/nightly -again        # also what is done
package main

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// A step is one thing that takes long.
type step struct {
	name, what string
	command    []string
}

// steps are those of a night, in order.
func steps(hour time.Duration) []step {
	d := hour.String()
	return []step{
		{"fuzz", "every fuzz target", []string{"make", "--no-print-directory", "fuzz", "ALL=" + d}},
		{"sim", "simulations with new seeds", []string{"make", "--no-print-directory", "sim", "D=" + d}},
		{"explore", "connection set-up in every interleaving", []string{"make", "--no-print-directory", "explore"}},
		{"mutants", "every mutant", []string{"make", "--no-print-directory", "mutants"}},
		{"soak", "load, deaths and restarts", []string{"make", "--no-print-directory", "soak", "D=" + d}},
		{"service", "reloads and handovers under load", []string{"make", "--no-print-directory", "service", "D=" + d}},
		{"bench-full", "the whole benchmark", []string{"make", "--no-print-directory", "bench-full"}},
	}
}

func main() {
	hour := flag.Duration("hour", time.Hour, "how long a step goes on that has no end of its own")
	only := flag.String("only", "", "only steps of these names, with commas between")
	again := flag.Bool("again", false, "also steps that are done")
	flag.Parse()
	todo, err := choose(steps(*hour), *only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "nightly:", err)
		os.Exit(2)
	}
	n := &night{steps: todo, dir: filepath.Join(".cache", "nightly", source()), again: *again, out: os.Stdout,
		every: time.Minute, stop: make(chan os.Signal, 1)}
	signal.Notify(n.stop, os.Interrupt, syscall.SIGTERM)
	ok, err := n.run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "nightly:", err)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

// choose returns the steps whose names are in list, all if it is empty.
func choose(all []step, list string) (chosen []step, err error) {
	if list == "" {
		return all, nil
	}
	for _, name := range strings.Split(list, ",") {
		i := slices.IndexFunc(all, func(s step) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("there is no step %q", name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// source names the state of the source: the commit, and a hash of what differs
// from it. The benchmark's own results do not count.
func source() string {
	commit, err := exec.Command("git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		return "no-commit"
	}
	name := strings.TrimSpace(string(commit))
	diff, err := exec.Command("git", "diff", "HEAD", "--", ".", ":!docs/bench").Output()
	if err == nil && len(diff) > 0 {
		name += fmt.Sprintf("-%x", sha256.Sum256(diff))[:9]
	}
	return name
}
