package main

import (
	"strings"
	"testing"
)

// The table has medians, what threads gain, and how much that is of what loops gain.
func TestCoreTable(t *testing.T) {
	var all []coreResult
	for _, mode := range []string{oursRC, oursUC} {
		for _, receive := range []bool{false, true} {
			for i, n := range coreThreads {
				for _, x := range []float64{0.5, 1, 9} { // the median is 1
					all = append(all, coreResult{mode: mode, receive: receive, threads: n, mbps: 1000 * float64(1+i) * x,
						spins: 100 * float64(n) * x, used: 0.1 * float64(n) * x, other: 0.25})
				}
			}
		}
	}
	got := coreTable(all)
	for _, want := range []string{
		"| RC, sending | 1 | 1000 | 1.00 | 1.00 | 1.00 | 0.100 | 10.00 | 1.00 | 25.0 % |",
		"| RC, receiving | 2 | 2000 | 2.00 | 2.00 | 1.00 | 0.200 | 10.00 | 1.00 | 25.0 % |",
		"| UC, sending | 4 | 3000 | 3.00 | 4.00 | 0.75 | 0.400 | 7.50 | 0.75 | 25.0 % |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the table lacks %q:\n%s", want, got)
		}
	}
}

// Without control groups what counts are the ratios within the rounds.
func TestFreeTable(t *testing.T) {
	var all []coreResult
	for _, mode := range []string{oursRC, oursUC} {
		for _, receive := range []bool{false, true} {
			for round, mbps := range []float64{1000, 2000, 4000} {
				all = append(all, coreResult{mode: mode, receive: receive, threads: 1, mbps: mbps},
					coreResult{mode: mode, receive: receive, threads: 2, mbps: mbps * []float64{1.1, 0.5, 1.2}[round]})
			}
		}
	}
	got, want := freeTable(all), "| UC, receiving | 2000 | 1100 | 1.10 | 0.50–1.20 |"
	if !strings.Contains(got, want) {
		t.Errorf("the table lacks %q:\n%s", want, got)
	}
}

// Which group a thread belongs to goes by its name, and with one data thread all share one.
func TestThreadGroup(t *testing.T) {
	for _, tt := range []struct {
		name    string
		threads int
		want    string
	}{{"data 0", 2, "data0"}, {"data 3", 4, "data3"}, {"ipoibcmd", 2, restGroup}, {"ipoibcmd", 1, oneGroup}} {
		if got := threadGroup(tt.name, tt.threads); got != tt.want {
			t.Errorf("%q of %d: %s, want %s", tt.name, tt.threads, got, tt.want)
		}
	}
}
