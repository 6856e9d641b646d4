package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"ipoibcm/internal/expect"
)

func TestTable(t *testing.T) {
	tab := table{head: []string{"what", "µs"}}
	tab.row("RC", "1.00")
	tab.row("wireguard-go")
	var b strings.Builder
	tab.print(&b)
	want := `| what         | µs   |
| ------------ | ---- |
| RC           | 1.00 |
| wireguard-go |      |
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

func report() *Report {
	r := &Report{Version: schema, Matrix: "short", Rounds: 3, Transfer: 2,
		Started: time.Date(2026, 2, 3, 4, 5, 0, 0, time.UTC), Seconds: 300, Build: "b",
		Machine: Machine{CPU: "a CPU", Processors: 2, Kernel: "6", TCP: "cubic", Go: "go", OtherCPU: 0.3,
			Copies: []float64{20, 8, 10}}, Tools: map[string]string{"iperf3": "3.18"}}
	at := place{9000, family6}
	fill(r, at.key(testTCP, oneStream, raw), 10000, 20000, 30000)
	fill(r, at.key(testTCP, oneStream, oursRC), 5000, 12000, 15000)
	r.skip(wireguard, "cannot be built")
	r.skip(wireguard, "cannot be built")
	r.judge()
	return r
}

// Contenders that have nothing at a place are left out of its table; cells have
// the median, the spread and the median of the ratios.
func TestPrint(t *testing.T) {
	var b strings.Builder
	report().print(&b)
	got := b.String()
	for _, want := range []string{`## TCP goodput

| underlay MTU 9000, IPv6, Gb/s | 1 stream                |
| ----------------------------- | ----------------------- |
| raw veth                      | 20.0 (10.0–30.0)        |
| RC                            | 12.0 (5.00–15.0) = 0.50 |

`,
		"in 5 minutes; build b.", "a CPU, 2 processors, Linux 6, TCP cubic, go, iperf3 3.18. Other processes used 30% of the " +
			"processors meanwhile: **timings are noisy**, ratios less so. Copies of 16 MiB in memory, before each " +
			"round: 10.0 GB/s (8.0–20.0).\n",
		"## Not measured\n\n- wireguard-go: cannot be built\n",
		"| met, not the aim ≥ 0.60 |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("missing: %q", want)
		}
	}
	if strings.Contains(got, "## Request and response") {
		t.Error("a test that was not made has a heading")
	}
	if t.Failed() {
		t.Log(got)
	}
}

// What is not measured must not keep the report from being written: JSON has no NaN.
func TestJSON(t *testing.T) {
	out, err := json.Marshal(report())
	if err != nil {
		t.Fatal(err)
	}
	var back struct {
		Series []struct {
			Contender string    `json:"contender"`
			MTU       int       `json:"underlay_mtu"`
			Values    []float64 `json:"values"`
			Median    float64   `json:"median"`
		} `json:"series"`
		Targets []struct {
			Measured *float64 `json:"measured"`
		} `json:"targets"`
	}
	if err := json.Unmarshal(out, &back); err != nil {
		t.Fatal(err)
	}
	s := back.Series
	expect.MustEqual(t, len(s), 2, "length of series")
	expect.Equal(t, s[1].Contender, oursRC, "series: Contender")
	expect.Equal(t, s[1].MTU, 9000, "series: MTU")
	expect.Equal(t, len(s[1].Values), 3, "series: length of Values")
	expect.Equal(t, s[1].Median, 12000, "series: Median")
	switch v := back.Targets; {
	case len(v) < 5:
		t.Errorf("targets: v has %v elements, want at least 5", len(v))
	case v[0].Measured == nil:
		t.Errorf("targets: Measured is nil")
	case *v[0].Measured != 0.5:
		t.Errorf("targets: Measured is %v, want 0.5", *v[0].Measured)
	case v[1].Measured != nil:
		t.Errorf("targets: Measured is %v, want nil", v[1].Measured)
	}
}

// A tall section has its variants down and contenders across.
func TestTallSection(t *testing.T) {
	var r Report
	at := place{9000, family6}
	r.add(at.key(testPing, "a long name", raw), "ms", 2)
	r.add(at.key(testPing, "a long name", oursRC), "ms", 3)
	r.add(at.key(testPing, "another", oursRC), "ms", 4)
	var b strings.Builder
	for _, s := range sections {
		if s.test == testPing {
			s.printAll(&b, &r)
		}
	}
	var cells [][]string
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "|") {
			cells = append(cells, strings.FieldsFunc(line, func(r rune) bool { return r == '|' || r == '\n' }))
		}
	}
	if len(cells) != 4 {
		t.Fatalf("%d lines of the table, want 4:\n%s", len(cells), b.String())
	}
	for i, want := range [][2]string{2: {"a long name", "3.00"}, 3: {"another", "4.00"}} {
		if i < 2 {
			continue
		}
		if got := strings.TrimSpace(cells[i][0]); got != want[0] {
			t.Errorf("row %d is %q, want %q", i, got, want[0])
		}
		if got := strings.TrimSpace(cells[i][1+slices.Index(contenders, oursRC)]); got != want[1] {
			t.Errorf("RC in row %d has %q, want %q", i, got, want[1])
		}
	}
}
