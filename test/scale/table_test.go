package scale

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

var (
	tableFlag = flag.Bool("scale.table", false, "let TestTable measure everything at every size and print it")
	jsonFlag  = flag.String("scale.json", "", "write what TestTable measures to this file as well")
	docFlag   = flag.Bool("scale.doc", false, "write what TestTable measures into docs/scale.md as well")
)

// doc is where the figures stand, between two lines.
const (
	doc      = "../../docs/scale.md"
	docBegin = "<!-- measured -->\n"
	docEnd   = "<!-- end of measured -->\n"
)

// A report is all figures of one run.
type report struct {
	Go         string    `json:"go"`
	Processors int       `json:"processors"`
	Model      string    `json:"model,omitempty"`
	Sizes      []figures `json:"sizes"`
	Setups     struct {
		Ours   float64 `json:"req_ours"`
		Theirs float64 `json:"req_theirs"`
		Both   float64 `json:"both_ends"` // one machine at each end, one after the other
	} `json:"setups_per_cpu_second"`
}

// figures are those of one size.
type figures struct {
	Neighbours      int       `json:"neighbours"`
	OctetsNeighbour int64     `json:"octets_per_neighbour"`
	OctetsConn      int64     `json:"octets_per_idle_connection,omitempty"`
	StepNanos       int64     `json:"step_ns_median"`
	Operations      []opTable `json:"operations"`
}

type opTable struct {
	Name        string  `json:"name"`
	StepNanos   int64   `json:"step_ns_median"`
	TotalNanos  int64   `json:"total_ns_mean"`
	Allocations float64 `json:"allocations"`
}

// minSetups is how many connections one machine should set up in a second of processor time. Machines
// differ: the table shows it, and no test decides by it.
const minSetups = 20_000

// maxConnField is the most neighbours of which each is given a connection.
const maxConnField = 10_000

// perSecond returns the median rate of some runs.
func perSecond(tb testing.TB, n int, ours bool) float64 {
	var ds []time.Duration
	for range 5 {
		d, _ := setups(tb, n, ours)
		ds = append(ds, d)
	}
	return float64(time.Second) / float64(median(ds))
}

func measure(tb testing.TB, n int) figures {
	out := figures{Neighbours: n, OctetsNeighbour: perNeighbour(tb, n)}
	if n <= maxConnField {
		out.OctetsConn = perConn(tb, n)
	}
	f := newField(newCrowd(tb, crowdOptions(n)), n)
	allocs := allocations(f)
	all, each := stopwatch(f)
	out.StepNanos = all.Nanoseconds()
	for i, op := range each {
		out.Operations = append(out.Operations, opTable{op.Name, op.Median.Nanoseconds(), op.Mean.Nanoseconds(), allocs[i]})
	}
	return out
}

// TestTable measures everything: make scale.
func TestTable(t *testing.T) {
	if !*tableFlag {
		t.Skip("takes longer: make scale")
	}
	r := report{Go: runtime.Version(), Processors: runtime.NumCPU(), Model: model()}
	for _, n := range []int{100, 1000, 10_000, 100_000} {
		r.Sizes = append(r.Sizes, measure(t, n))
	}
	r.Setups.Ours, r.Setups.Theirs = perSecond(t, maxConnField, true), perSecond(t, maxConnField, false)
	r.Setups.Both = 1 / (1/r.Setups.Ours + 1/r.Setups.Theirs)
	text := r.String()
	fmt.Print("\n", text, "\n")
	if *jsonFlag != "" {
		b, err := json.MarshalIndent(r, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(*jsonFlag, append(b, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if *docFlag {
		writeDoc(t, text)
	}
}

func writeDoc(t *testing.T, text string) {
	b, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), docBegin)
	_, after, ok2 := strings.Cut(rest, docEnd)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the figures", doc)
	}
	if err := os.WriteFile(doc, []byte(before+docBegin+text+docEnd+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// model returns what the processor calls itself.
func model() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for l := range strings.Lines(string(b)) {
		if name, value, ok := strings.Cut(l, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// String prints r as tables that are read as they are and as Markdown.
func (r report) String() string {
	var rows [][]string
	head := []string{"neighbours"}
	for _, s := range r.Sizes {
		head = append(head, fmt.Sprint(s.Neighbours))
	}
	row := func(name string, value func(figures) string) {
		cells := []string{name}
		for _, s := range r.Sizes {
			cells = append(cells, value(s))
		}
		rows = append(rows, cells)
	}
	row(fmt.Sprintf("octets per neighbour (bound %d)", maxPerNeighbour),
		func(s figures) string { return fmt.Sprint(s.OctetsNeighbour) })
	row(fmt.Sprintf("octets per idle connection, besides its neighbour (bound %d)", maxPerConn), func(s figures) string {
		if s.OctetsConn == 0 {
			return "-"
		}
		return fmt.Sprint(s.OctetsConn)
	})
	row(fmt.Sprintf("median Step (bound: last column %d x first)", maxRatio),
		func(s figures) string { return micros(s.StepNanos) })
	var b strings.Builder
	table(&b, head, rows)
	rows = nil
	head[0] = "median Step of, in microseconds; steps together; allocations"
	for i, op := range r.Sizes[0].Operations {
		row(op.Name, func(s figures) string {
			o := s.Operations[i]
			return fmt.Sprintf("%s; %s; %.0f", micros(o.StepNanos), micros(o.TotalNanos), o.Allocations)
		})
	}
	b.WriteByte('\n')
	table(&b, head, rows)
	b.WriteByte('\n')
	table(&b, []string{fmt.Sprintf("set-ups in a second of processor time, %d connections (%d wanted)",
		maxConnField, minSetups), ""}, [][]string{
		{"one machine, the REQ is its own", fmt.Sprintf("%.0f", r.Setups.Ours)},
		{"one machine, the REQ is the peer's", fmt.Sprintf("%.0f", r.Setups.Theirs)},
		{"both ends, a machine at each", fmt.Sprintf("%.0f", r.Setups.Both)},
	})
	fmt.Fprintf(&b, "\n%s, %d processors, %s.\n", r.Go, r.Processors, r.Model)
	return b.String()
}

func micros(nanos int64) string { return fmt.Sprintf("%.2f", float64(nanos)/float64(time.Microsecond)) }

// table writes rows below head, the first column to the left and the others to the right.
func table(b *strings.Builder, head []string, rows [][]string) {
	width := make([]int, len(head))
	for _, cells := range append([][]string{head}, rows...) {
		for i, c := range cells {
			width[i] = max(width[i], len(c))
		}
	}
	line := func(cells []string) {
		fmt.Fprintf(b, "| %-*s |", width[0], cells[0])
		for i, c := range cells[1:] {
			fmt.Fprintf(b, " %*s |", width[i+1], c)
		}
		b.WriteByte('\n')
	}
	line(head)
	fmt.Fprintf(b, "| %s |", strings.Repeat("-", width[0]))
	for _, w := range width[1:] {
		fmt.Fprintf(b, " %s: |", strings.Repeat("-", max(2, w-1)))
	}
	b.WriteByte('\n')
	for _, cells := range rows {
		line(cells)
	}
}
