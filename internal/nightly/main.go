// Command nightly is what "make nightly" runs: all steps that take long, one after the
// other, with a table at the end. It keeps the results under .cache/nightly, for each
// state of the source, so that the next run does not repeat the steps that are done.
//
//	go run ./internal/nightly               # a night
//	go run ./internal/nightly -hour 1m      # a minute, not an hour, for each step without an end of its own
//	go run ./internal/nightly -only sim,soak
//	go run ./internal/nightly -again        # repeat steps that are done
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

// A step is one command that takes long.
type step struct {
	name, what string
	command    []string
}

// steps returns the steps of a night, in order. Those without an end of their own take the time hour each.
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

// choose returns the steps whose names are in list, in its order, or all if list is empty.
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

// source names the state of the source: the commit, and a hash of what differs from it
// in files that git tracks. The results of the benchmark do not count.
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
