package netns

import (
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"ipoibcm/internal/pictures/draw"
)

// paint makes traffic, asks for every panel of the dashboard over that time, and writes the
// answers to -dashboard.
func paint(t *testing.T, d dashboard, a, b *host, ask promAsk) {
	t.Helper()
	const interval, step = 5 * time.Second, time.Second
	time.Sleep(interval + step) // no rate has anything of before
	begin := time.Now()
	play(a, b)
	end := time.Now()
	out := draw.Dashboard{Title: d.Title, Seconds: math.Round(end.Sub(begin).Seconds()),
		About: "What a Prometheus answered to the queries of packaging/grafana/ipoibcm.json, read every second " +
			"from one of two daemons: datagrams, twice as many, the peer is killed and comes back, a TCP stream towards us."}
	for _, p := range d.Panels {
		panel := draw.Panel{Title: p.Title, Type: p.Type, Unit: p.FieldConfig.Defaults.Unit,
			X: p.GridPos.X, Y: p.GridPos.Y, W: p.GridPos.W, H: p.GridPos.H}
		for _, q := range p.Targets {
			series, err := ask(a.seg.ctx, "query_range", url.Values{"query": {concrete(q.Expr, interval.String())},
				"start": {stamp(begin)}, "end": {stamp(end)}, "step": {step.String()}})
			if err != nil {
				t.Errorf("%s %s: %v", p.Title, q.RefID, err)
			}
			for _, s := range series {
				c, err := s.curve(q.LegendFormat, begin)
				if err != nil {
					t.Fatal(err)
				}
				panel.Curves = append(panel.Curves, c)
			}
		}
		out.Panels = append(out.Panels, panel)
	}
	text, err := json.MarshalIndent(out, "", " ")
	a.seg.must(err)
	a.seg.must(os.WriteFile(*dashboardTo, append(text, '\n'), 0o644))
}

// play makes the traffic of a picture.
func play(a, b *host) {
	_, stop := a.flow(b, b.v4, 1000)
	time.Sleep(12 * time.Second)
	_, more := a.flow(b, b.v4, 1000)
	time.Sleep(10 * time.Second)
	more()
	b.kill()
	time.Sleep(4 * time.Second)
	b.run()
	time.Sleep(12 * time.Second)
	stop()
	time.Sleep(6 * time.Second)
	end := transfer(b, a)
	time.Sleep(6 * time.Second)
	end()
	time.Sleep(8 * time.Second)
}

func stamp(at time.Time) string { return strconv.FormatFloat(float64(at.UnixMilli())/1e3, 'f', 3, 64) }

// label is a placeholder of Grafana's legends.
var label = regexp.MustCompile(`\{\{(\w+)\}\}`)

// curve is the series with the legend's name.
func (s promSeries) curve(legend string, begin time.Time) (c draw.Curve, err error) {
	c.Name = label.ReplaceAllStringFunc(legend, func(l string) string { return s.Metric[label.FindStringSubmatch(l)[1]] })
	for _, pair := range s.Values {
		at, isNumber := pair[0].(float64)
		text, isText := pair[1].(string)
		v, err := strconv.ParseFloat(text, 64)
		if !isNumber || !isText || err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
			return c, fmt.Errorf("%s: %v is no value at a time", c.Name, pair)
		}
		c.Points = append(c.Points, round(at-float64(begin.UnixMilli())/1e3), round(v))
	}
	return c, nil
}

// round leaves four digits, which is more than a picture shows.
func round(v float64) float64 {
	short, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 4, 64), 64)
	return short
}
