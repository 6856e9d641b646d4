package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// number prints v with about three figures.
func number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "–"
	case a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// A table is a Markdown table whose columns are aligned in the source too.
type table struct {
	head []string
	rows [][]string
}

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(w io.Writer) {
	width := make([]int, len(t.head))
	for _, r := range append([][]string{t.head}, t.rows...) {
		for i, c := range r {
			width[i] = max(width[i], utf8.RuneCountInString(c), 3)
		}
	}
	line := func(cells []string) {
		var b strings.Builder
		for i := range t.head {
			c := ""
			if i < len(cells) {
				c = cells[i]
			}
			b.WriteString("| " + c + strings.Repeat(" ", width[i]-utf8.RuneCountInString(c)+1))
		}
		fmt.Fprintln(w, b.String()+"|")
	}
	line(t.head)
	rule := make([]string, len(t.head))
	for i := range rule {
		rule[i] = strings.Repeat("-", width[i])
	}
	line(rule)
	for _, r := range t.rows {
		line(r)
	}
}

// A section is a table of the report: contenders down, variants across.
type section struct {
	test, title string
	scale       float64 // the unit is divided by it
	unit        string
	ratio       bool // show the ratio to raw veth
	tall        bool // variants down, contenders across, for many variants with long names
}

var sections = []section{
	{testTCP, "TCP goodput", 1000, "Gb/s", true, false},
	{testCPU, "CPU seconds per GB, both hosts", 1, "s/GB", true, false},
	{testLatency, "Request and response over TCP", 1, "µs", false, false},
	{testLoss, "TCP goodput while the underlay loses packets", 1000, "Gb/s", false, false},
	{testSetup, "Setting connections up", 1, "", false, false},
	{testMemory, "Resident memory of the agent", 1, "KiB", false, false},
	{testPeers, "TCP goodput to one of many peers", 1000, "Gb/s", false, false},
	{testDests, "UDP goodput, 8000 octets, behind one gateway", 1000, "Gb/s", false, false},
	{testLearned, "Destinations behind one gateway", 1, "", false, false},
	{testPing, "Ping under load, median", 1, "ms", false, true},
	{testPinged, "Share of these pings that were answered", 1, "", false, true},
	{testOverTCP, "Goodput of that load", 1, "Mb/s", true, true},
	{testAgain, "Share of that load that was sent again, by TCP and by the queue pair", 1, "%", false, true},
	{testQPAgain, "Of these the queue pair's share alone", 1, "%", false, true},
	{testFast, "Goodput of one TCP stream to a fast host", 1, "Mb/s", true, true},
	{testFastPing, "Ping to that host, median", 1, "ms", false, true},
	{testBusy, "Ping beside two busy programs", 1, "ms", false, true},
	{testShare, "Least and most of several senders, of an equal share", 1, "of equal", true, true},
	{testThree, "Goodput of three senders to one host, together", 1, "Mb/s", true, true},
	{testHop, "Goodput of one TCP stream over a hop of 1500, 2 s after it began", 1, "Mb/s", true, true},
	{testPath, "Goodput of one TCP stream over a path, with each packet one frame", 1, "Mb/s", true, true},
	{testPPS, "Datagrams received per second", 1000, "thousand", true, true},
}

// printAll writes the tables of one section, one for each place.
func (s section) printAll(w io.Writer, r *Report) { s.print(w, r, r.places(s.test)) }

func (s section) print(w io.Writer, r *Report, places []place) {
	if len(places) == 0 {
		return
	}
	fmt.Fprintf(w, "\n## %s\n", s.title)
	for _, p := range places {
		variants := r.variants(s.test, p.mtu, p.family)
		t := table{head: []string{fmt.Sprint(p)}}
		if s.unit != "" {
			t.head[0] += ", " + s.unit
		}
		if s.tall {
			s.fillTall(&t, r, p, variants)
		} else {
			s.fill(&t, r, p, variants)
		}
		fmt.Fprintln(w)
		t.print(w)
	}
}

// fill gives t a column for each variant, and a row for each contender that was measured.
func (s section) fill(t *table, r *Report, p place, variants []string) {
	t.head = append(t.head, variants...)
	for _, c := range contenders {
		row := []string{c}
		some := false
		for _, v := range variants {
			cell := s.cell(r, p.key(s.test, v, c))
			some = some || cell != ""
			row = append(row, cell)
		}
		if some {
			t.row(row...)
		}
	}
}

// fillTall gives t a column for each contender, and a row for each variant.
func (s section) fillTall(t *table, r *Report, p place, variants []string) {
	t.head = append(t.head, contenders...)
	for _, v := range variants {
		row := []string{v}
		for _, c := range contenders {
			row = append(row, s.cell(r, p.key(s.test, v, c)))
		}
		t.row(row...)
	}
}

// cell shows the median and the spread of a series. If s.ratio is set it also shows the median of the
// ratios to raw veth.
func (s section) cell(r *Report, k Key) string {
	e := r.index[k]
	if e == nil {
		return ""
	}
	out := number(e.Median / s.scale)
	if s.unit == "" {
		out += " " + e.Unit
	}
	if len(e.Values) > 1 {
		out += fmt.Sprintf(" (%s–%s)", number(e.Low/s.scale), number(e.High/s.scale))
	}
	base := k
	base.Contender = raw
	if of := ratios(e.Values, r.values(base)); s.ratio && k.Contender != raw && len(of) > 0 {
		out += fmt.Sprintf(" = %s", number(median(of)))
	}
	return out
}

// printTargets writes every target with its verdict.
func (r *Report) printTargets(w io.Writer) {
	fmt.Fprint(w, "\n## Targets\n\n")
	t := table{head: []string{"what", "want", "measured", "lowest–highest", "verdict"}}
	for _, v := range r.Targets {
		measured, spread, verdict := "–", "–", v.Outcome()
		if v.Measured != nil {
			measured, spread = number(*v.Measured), number(*v.Low)+"–"+number(*v.High)
		}
		if v.Aim != "" && v.Met {
			verdict += map[bool]string{true: ", and the aim ", false: ", not the aim "}[v.AimMet] + v.Aim
		}
		t.row(v.Name, v.Want, measured, spread, verdict)
	}
	t.print(w)
}

// print writes the whole report: docs/bench/latest.md, or stress.md.
func (r *Report) print(w io.Writer) {
	m := r.Machine
	fmt.Fprintf(w, "# Measured side by side\n\n")
	if r.Matrix == "stress" {
		fmt.Fprintf(w, "Written by `make stress`")
	} else {
		fmt.Fprintf(w, "Written by `make bench` (%s matrix)", r.Matrix)
	}
	fmt.Fprintf(w, " on %s, in %.0f minutes; build %s.\n\n", r.Started.UTC().Format("2006-01-02 15:04 UTC"),
		r.Seconds/60, r.Build)
	fmt.Fprintf(w, "%s, %d processors, Linux %s, TCP %s, %s", m.CPU, m.Processors, m.Kernel, m.TCP, m.Go)
	for _, tool := range []string{"iperf3", "wireguard-go"} {
		if v := r.Tools[tool]; v != "" {
			fmt.Fprintf(w, ", %s %s", tool, v)
		}
	}
	fmt.Fprintf(w, ". Other processes used %.0f%% of the processors meanwhile", 100*m.OtherCPU)
	if m.OtherCPU > 0.05 {
		fmt.Fprint(w, ": **timings are noisy**, ratios less so")
	}
	if len(m.Copies) > 0 {
		fmt.Fprintf(w, ". Copies of 16 MiB in memory, before each round: %.1f GB/s (%.1f–%.1f)", median(m.Copies),
			slices.Min(m.Copies), slices.Max(m.Copies))
	}
	fmt.Fprintf(w, ".\n\n")
	hosts := "Both hosts are network namespaces of this machine, joined by a veth pair; each\ncontender has a " +
		"pair of its own."
	if r.Matrix == "stress" {
		hosts = "Two to four hosts are network namespaces of this machine, joined by a bridge; each\ncontender has " +
			"its own. Who no target is about is measured in the first round only."
	}
	fmt.Fprintf(w, `%s Rounds are interleaved (raw, VXLAN, … UD, raw,
…): %d of them, transfers of %s s at least. Cells are the median (lowest–highest) of the
rounds; "= x" is the median of the ratios to the raw veth pair within a round.
Underlay and traffic are of the same family. How each number is made:
[README.md](README.md).
`, hosts, r.Rounds, number(r.Transfer))
	r.printTargets(w)
	for _, s := range sections {
		s.printAll(w, r)
	}
	if len(r.Skipped) == 0 {
		return
	}
	fmt.Fprint(w, "\n## Not measured\n\n")
	for _, s := range r.Skipped {
		fmt.Fprintf(w, "- %s: %s\n", s.What, s.Why)
	}
}
