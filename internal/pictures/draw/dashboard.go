package draw

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// A Dashboard is what a Prometheus answered to the queries of a Grafana dashboard.
type Dashboard struct {
	Title   string
	About   string // where the answers come from
	Seconds float64
	Panels  []Panel
}

// A Panel is one panel of a dashboard. X, Y, W and H are its gridPos, in a grid of 24 columns.
type Panel struct {
	Title, Type, Unit string
	X, Y, W, H        int
	Curves            []Curve
}

// A Curve is one series. Points alternates seconds from the beginning and values.
type Curve struct {
	Name   string
	Points []float64
}

// ReadDashboard reads what TestDashboardQueries has written.
func ReadDashboard(b []byte) (d Dashboard, err error) {
	if err = json.Unmarshal(b, &d); err != nil {
		return d, err
	}
	if d.Seconds <= 0 || len(d.Panels) == 0 {
		return d, fmt.Errorf("%d panels over %v s", len(d.Panels), d.Seconds)
	}
	for _, p := range d.Panels {
		if p.W < 1 || p.H < 1 || p.X < 0 || p.Y < 0 || p.X+p.W > 24 || p.Y+p.H > 1000 {
			return d, fmt.Errorf("panel %q is %d by %d at %d, %d", p.Title, p.W, p.H, p.X, p.Y)
		}
		for _, c := range p.Curves {
			if len(c.Points)%2 != 0 || len(c.Points) == 0 {
				return d, fmt.Errorf("panel %q, %q: %d numbers", p.Title, c.Name, len(c.Points))
			}
		}
	}
	return d, nil
}

// curveColours can be told apart by readers who do not tell red from green.
var curveColours = []string{blue, "#d9730d", teal, "#8250df", "#6e7781", "#b35900", "#0969da",
	"#57606a", "#953800", "#1b7c83"}

// Measures of a dashboard.
const (
	dashWidth  = 1200
	dashMargin = 12
	dashColumn = (dashWidth - 2*dashMargin) / 24.0
	dashRow    = 34.0
	dashTop    = 78.0
	legendMost = 6
)

// DashboardSVG draws the panels where their gridPos puts them.
func DashboardSVG(d Dashboard) string {
	p := New(dashWidth, d.Title, fmt.Sprintf("A dashboard of %d panels. %s", len(d.Panels), d.About))
	p.Text(20, 30, "title", d.Title)
	for i, l := range Wrap(d.About, 11.5, dashWidth-40) {
		p.Text(20, 50+16*float64(i), "small faint", l)
	}
	bottom := dashTop
	for _, panel := range d.Panels {
		x := dashMargin + dashColumn*float64(panel.X)
		y := dashTop + dashRow*float64(panel.Y)
		w, h := dashColumn*float64(panel.W), dashRow*float64(panel.H)
		bottom = max(bottom, y+h)
		p.Rect(x+3, y+3, w-6, h-6, 4, "#fbfcfd", rule)
		p.Text(x+14, y+23, "bold", panel.Title)
		if panel.Type == "stat" {
			p.stat(panel, x, y, w, h)
		} else {
			p.plot(panel, d.Seconds, x, y, w, h)
		}
	}
	return p.SVG(bottom + dashMargin)
}

// stat writes the last value of each series.
func (p *Picture) stat(panel Panel, x, y, w, h float64) {
	const size = 11.5
	n := float64(max(len(panel.Curves), 1))
	part := (w - 20) / n
	for i, c := range panel.Curves {
		mid := x + 10 + part*(float64(i)+0.5)
		p.Text(mid, y+h-62, "figure good middle", unit(c.Points[len(c.Points)-1], panel.Unit))
		for k, l := range Wrap(c.Name, size, part-8) {
			p.Text(mid, y+h-42+14*float64(k), "small faint middle", l)
		}
	}
}

// highest is the largest value of a curve, and at least zero.
func (c Curve) highest() (high float64) {
	for i := 1; i < len(c.Points); i += 2 {
		high = max(high, c.Points[i])
	}
	return high
}

// plot draws lines over time, with a legend below. If there are more than legendMost
// lines, the legend shows those with the highest values.
func (p *Picture) plot(panel Panel, seconds, x, y, w, h float64) {
	if len(panel.Curves) > legendMost {
		panel.Curves = slices.Clone(panel.Curves)
		slices.SortStableFunc(panel.Curves, func(a, b Curve) int { return cmp.Compare(b.highest(), a.highest()) })
	}
	high := 0.0
	for _, c := range panel.Curves {
		high = max(high, c.highest())
	}
	shown := min(len(panel.Curves), legendMost)
	left, right, top := x+82, x+w-20, y+38
	bottom := y + h - 48 - 16*float64(shown)
	marks, _ := ticks(cmp.Or(high, 1), 4)
	scale := (bottom - top) / marks[len(marks)-1]
	for _, v := range marks {
		p.Line(left, bottom-v*scale, right, bottom-v*scale, 1, rule)
		p.Text(left-8, bottom-v*scale+4, "small faint end", unit(v, panel.Unit))
	}
	at := func(s float64) float64 { return left + s/seconds*(right-left) }
	for s := 0.0; s <= seconds; s += 10 {
		p.Text(at(s), bottom+16, "small faint middle", fmt.Sprintf("%d s", int(s)))
	}
	for i, c := range panel.Curves {
		for _, piece := range pieces(c.Points) {
			points := make([]float64, 0, len(piece))
			for k := 0; k+1 < len(piece); k += 2 {
				points = append(points, at(piece[k]), bottom-piece[k+1]*scale)
			}
			p.Curve(points, 1.8, curveColours[i%len(curveColours)])
		}
	}
	p.legend(panel, x, bottom+48, w)
}

// pieces splits a curve where the time between two points is more than 1.5 times the shortest such time.
func pieces(points []float64) (all [][]float64) {
	step := math.Inf(1)
	for k := 2; k+1 < len(points); k += 2 {
		step = min(step, points[k]-points[k-2])
	}
	from := 0
	for k := 2; k+1 < len(points); k += 2 {
		if points[k]-points[k-2] > 1.5*step {
			all, from = append(all, points[from:k]), k
		}
	}
	return append(all, points[from:])
}

// legend writes the names of the series with mean and maximum.
func (p *Picture) legend(panel Panel, x, y, w float64) {
	if len(panel.Curves) == 0 {
		p.Text(x+82, y, "small faint", "no data")
		return
	}
	p.Text(x+w-100, y-18+2, "small faint end", "mean")
	p.Text(x+w-20, y-18+2, "small faint end", "max")
	for i, c := range panel.Curves {
		if i == legendMost {
			return
		}
		sum := 0.0
		for k := 1; k < len(c.Points); k += 2 {
			sum += c.Points[k]
		}
		base := y + 16*float64(i)
		p.Rect(x+16, base-8, 14, 4, 2, curveColours[i%len(curveColours)], "none")
		name := c.Name
		if more := len(panel.Curves) - legendMost; more > 0 && i == legendMost-1 {
			name += fmt.Sprintf(", and %d more", more)
		}
		p.Text(x+38, base-1, "small", name)
		p.Text(x+w-100, base-1, "small end", unit(2*sum/float64(len(c.Points)), panel.Unit))
		p.Text(x+w-20, base-1, "small end", unit(c.highest(), panel.Unit))
	}
}

// unit prints a value in one of Grafana's units.
func unit(v float64, u string) string {
	if rate := rates[u]; rate != "" {
		return prefixed(v) + rate
	}
	if words, ok := switches[u]; ok {
		return words[v != 0]
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// rates and switches are Grafana's units that are not printed as plain numbers.
var (
	rates    = map[string]string{"Bps": "B/s", "pps": "p/s", "ops": "/s"}
	switches = map[string]map[bool]string{
		"bool_on_off": {true: "On", false: "Off"}, "bool_yes_no": {true: "Yes", false: "No"}}
)

// prefixed prints v with three digits and the prefix of a thousand, a million or more.
func prefixed(v float64) string {
	for _, s := range []struct {
		of   float64
		name string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if math.Abs(v) >= s.of {
			return strconv.FormatFloat(v/s.of, 'g', 3, 64) + " " + s.name
		}
	}
	return strconv.FormatFloat(v, 'g', 3, 64) + " "
}
