package draw

import (
	"math"
	"strconv"
)

// A Bar is one value of a chart.
type Bar struct {
	Name      string
	Value     float64
	Low, High float64 // the range of the rounds
	Label     string  // beside the bar
	Ours      bool
}

// A BarGroup holds bars for comparison with each other.
type BarGroup struct {
	Name string
	Bars []Bar
}

// Bars is a chart of horizontal bars.
type Bars struct {
	Title, Desc string
	Axis        string // what is measured, and its unit
	Foot        []string
	Groups      []BarGroup
}

// ticks returns round values at equal steps, from zero to the first that is not below high. The number of
// steps that fit into high is at most the parameter most. decimals is how many decimals the values need.
func ticks(high, most float64) (values []float64, decimals int) {
	if high <= 0 {
		return []float64{0, 1}, 0
	}
	unit := math.Pow(10, math.Floor(math.Log10(high/most)))
	step := unit
	for _, k := range []float64{1, 2, 2.5, 5, 10} {
		if step = k * unit; high/step <= most {
			break
		}
	}
	for d := step; d < 1 && math.Abs(d-math.Round(d)) > 1e-9; d *= 10 {
		decimals++
	}
	if step > 1 && step != math.Round(step) {
		decimals = 1
	}
	for i := 0; ; i++ {
		values = append(values, float64(i)*step)
		if float64(i)*step >= high {
			return values, decimals
		}
	}
}

// significant prints v with three digits.
func significant(v float64) string {
	decimals := 0
	for a := math.Abs(v); a != 0 && a < 100 && decimals < 2; a *= 10 {
		decimals++
	}
	return strconv.FormatFloat(v, 'f', decimals, 64)
}

// SVG draws the chart.
func (c Bars) SVG() string {
	const (
		width, left, right = 860, 130, 280
		bar, gap           = 20, 6
	)
	p := New(width, c.Title, c.Desc)
	p.Text(20, 30, "title", c.Title)
	high := 0.0
	for _, g := range c.Groups {
		for _, b := range g.Bars {
			high = max(high, b.Value, b.High)
		}
	}
	marks, decimals := ticks(high, 8)
	scale := (width - left - right) / marks[len(marks)-1]
	at := func(v float64) float64 { return left + v*scale }
	top := 50.0
	bottom := top
	for _, g := range c.Groups {
		bottom += 26 + float64(len(g.Bars))*(bar+gap) + 8
	}
	for _, v := range marks {
		p.Line(at(v), top, at(v), bottom, 1, rule)
		p.Text(at(v), bottom+18, "small faint middle", strconv.FormatFloat(v, 'f', decimals, 64))
	}
	y := top
	for _, g := range c.Groups {
		p.Text(20, y+18, "bold", g.Name)
		y += 26
		for _, b := range g.Bars {
			fill := "#9aa7b4"
			if b.Ours {
				fill = blue
			}
			p.Text(left-10, y+15, "end", b.Name)
			p.Rect(left, y, max(1, b.Value*scale), bar, 2, fill, "none")
			if b.High > b.Low {
				mid := y + bar/2
				p.Line(at(b.Low), mid, at(b.High), mid, 1.5, ink)
				p.Line(at(b.Low), mid-4, at(b.Low), mid+4, 1.5, ink)
				p.Line(at(b.High), mid-4, at(b.High), mid+4, 1.5, ink)
			}
			p.Text(width-right+14, y+15, "small", b.Label)
			y += bar + gap
		}
		y += 8
	}
	y = bottom + 40
	p.Text(at(0), y, "faint", c.Axis)
	y += 24
	for _, f := range c.Foot {
		for _, l := range Wrap(f, 11.5, width-40) {
			p.Text(20, y, "small faint", l)
			y += 16
		}
	}
	return p.SVG(y)
}
