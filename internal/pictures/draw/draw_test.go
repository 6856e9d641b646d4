package draw

import (
	"slices"
	"strings"
	"testing"
)

func TestTicks(t *testing.T) {
	for _, tt := range []struct {
		high, last      float64
		steps, decimals int
	}{
		{17.3, 17.5, 7, 1},
		{347, 350, 7, 0},
		{0.9, 1, 5, 1},
		{0.07, 0.07, 7, 2},
		{100, 100, 5, 0},
		{0, 1, 1, 0},
	} {
		got, decimals := ticks(tt.high, 8)
		if last := got[len(got)-1]; last < tt.last*0.999 || last > tt.last*1.001 {
			t.Errorf("up to %v: the last is %v, want %v", tt.high, last, tt.last)
		}
		if len(got)-1 != tt.steps {
			t.Errorf("up to %v: %d steps, want %d", tt.high, len(got)-1, tt.steps)
		}
		if decimals != tt.decimals {
			t.Errorf("up to %v: %d decimals, want %d", tt.high, decimals, tt.decimals)
		}
	}
}

func TestSignificant(t *testing.T) {
	for v, want := range map[float64]string{16957.97: "16958", 304.2: "304", 17: "17.0",
		9.792: "9.79", 0.0714: "0.07", 0: "0"} {
		if got := significant(v); got != want {
			t.Errorf("%v is %q, want %q", v, got, want)
		}
	}
}

func TestRatio(t *testing.T) {
	a, b := &Series{Values: []float64{1, 6, 9}}, &Series{Values: []float64{2, 2, 9}}
	if got, ok := Ratio(a, b); got != 1 || !ok {
		t.Errorf("the median ratio is %v, %v, want 1", got, ok)
	}
	if _, ok := Ratio(a, &Series{Values: []float64{1}}); ok {
		t.Error("series of different rounds have a ratio")
	}
	if _, ok := Ratio(a, nil); ok {
		t.Error("a series has a ratio to none")
	}
}

// The short form of make bench measures less than the whole one, and wireguard-go may be missing.
func TestFiguresNotMeasured(t *testing.T) {
	tcp := func(contender string, mtu int, median float64) Series {
		return Series{Test: "tcp", Variant: "1 stream", MTU: mtu, Contender: contender, Family: "IPv6",
			Median: median, Values: []float64{median}}
	}
	table := FiguresTable(Report{Rounds: 1, Series: []Series{tcp("RC", 9000, 6), tcp("raw veth", 9000, 10), tcp("RC", 1500, 5)}})
	for _, want := range []string{
		"goodput, of the plain underlay's | 0.60 | – |\n",
		"goodput, of wireguard-go's | – | – |\n",
		"| memory of an idle connection | – | |\n",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("%q is not in\n%s", want, table)
		}
	}
}

func TestWrap(t *testing.T) {
	const text = "0x0100000000000102 is one word that is wider than a line"
	for _, width := range []float64{40, 80, 1000} {
		lines := Wrap(text, 10, width)
		if got := strings.Join(lines, " "); got != text {
			t.Errorf("at %v: %q", width, got)
		}
		for _, l := range lines {
			if TextWidth(l, 10) > width && strings.Contains(l, " ") {
				t.Errorf("at %v: %q is too wide", width, l)
			}
		}
	}
}

func TestFold(t *testing.T) {
	line := "ok   both dial at once   11 ms  REQs crossed, and more than a line takes"
	parts := fold(line, 30)
	for _, p := range parts {
		if n := len([]rune(p)); n > 30 {
			t.Errorf("%q has %d columns, want at most 30", p, n)
		}
	}
	got := strings.Fields(strings.Join(parts, " "))
	if want := strings.Fields(line); !slices.Equal(got, want) {
		t.Errorf("words are %q, want %q", got, want)
	}
	if got := fold(strings.Repeat("x", 70), 30); len(got) != 3 {
		t.Errorf("70 columns are %d lines of 30, want 3", len(got))
	}
}

func TestReadMermaid(t *testing.T) {
	const good = "sequenceDiagram\n participant a as left\n participant b as right\n Note over a: it begins\n" +
		" a->>b: REQ\n Note left of a: REQ_SENT\n b-xa: REJ 8, no\n"
	s, err := ReadMermaid(good)
	if err != nil {
		t.Fatal(err)
	}
	want := []Step{{Note, 0, "it begins"}, {Message, 0, "REQ"}, {State, 0, "REQ_SENT"}, {Lost, 1, "REJ 8, no"}}
	if !slices.Equal(s.Steps, want) {
		t.Errorf("steps are %v, want %v", s.Steps, want)
	}
	for _, bad := range []string{"", "participant a as x\nparticipant b as y", good + " a~~b: what"} {
		if _, err := ReadMermaid(bad); err == nil {
			t.Errorf("%q is understood", bad)
		}
	}
}

func TestPrefixed(t *testing.T) {
	for v, want := range map[float64]string{0: "0 B/s", 999: "999 B/s", 1e3: "1 kB/s",
		331.9e6: "332 MB/s", 2e9: "2 GB/s"} {
		if got := unit(v, "Bps"); got != want {
			t.Errorf("%v is %q, want %q", v, got, want)
		}
	}
}

func TestPieces(t *testing.T) {
	got := pieces([]float64{0, 1, 1, 1, 2, 1, 5, 1, 6, 1})
	if want := [][]float64{{0, 1, 1, 1, 2, 1}, {5, 1, 6, 1}}; !slices.EqualFunc(got, want, slices.Equal[[]float64]) {
		t.Errorf("pieces are %v, want %v", got, want)
	}
}

// FuzzReadDashboard: what is read can be drawn.
func FuzzReadDashboard(f *testing.F) {
	f.Add([]byte(`{"Title":"t","Seconds":30,"Panels":[{"Title":"p","Type":"timeseries","Unit":"Bps","W":12,"H":8,` +
		`"Curves":[{"Name":"c","Points":[0,1,1,5]}]},{"Title":"s","Type":"stat","W":1,"H":1,"Curves":[{"Points":[0,1]}]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if d, err := ReadDashboard(b); err == nil && !strings.HasSuffix(DashboardSVG(d), "</svg>\n") {
			t.Error("the picture has no end")
		}
	})
}

// FuzzReadMermaid: what is understood can be drawn.
func FuzzReadMermaid(f *testing.F) {
	f.Add("sequenceDiagram\nparticipant a as x\nparticipant b as y\na->>b: REQ to 0x01, UD QPN 1\nNote over b: <so & so>")
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := ReadMermaid(text); err == nil && !strings.HasSuffix(SequenceSVG("t", "d", s), "</svg>\n") {
			t.Error("the picture has no end")
		}
	})
}

func TestTextIsEscaped(t *testing.T) {
	p := New(10, "a<b", "c&d")
	p.Text(0, 0, "", "<script>\x00")
	if svg := p.SVG(10); strings.Contains(svg, "<script") || strings.Contains(svg, "\x00") {
		t.Errorf("the text is not escaped: %s", svg)
	}
}

func TestStressVariants(t *testing.T) {
	r := Report{Series: []Series{
		{Test: "goodput over a path", Variant: "10 ms", MTU: 9000, Family: "IPv6", Contender: "raw veth",
			Values: []float64{4}, Median: 4},
		{Test: "goodput over a path", Variant: "10 ms", MTU: 9000, Family: "IPv6", Contender: "RC",
			Values: []float64{3}, Median: 3},
	}}
	svg := StressSVG(r, StressCharts["stress-paths"])
	for _, want := range []string{"10 ms", "0.75 of raw veth"} {
		if !strings.Contains(svg, want) {
			t.Errorf("the chart does not say %q", want)
		}
	}
	if svg := StressSVG(r, StressCharts["stress-ping"]); svg != "" {
		t.Error("a test that was not run has a chart")
	}
}
