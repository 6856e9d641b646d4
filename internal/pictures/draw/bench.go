package draw

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// A Report is the part of a report of internal/bench that the pictures use, such as
// docs/bench/latest.json.
type Report struct {
	Started  time.Time `json:"started"`
	Rounds   int       `json:"rounds"`
	Transfer float64   `json:"transfer_seconds"`
	Machine  struct {
		Kernel     string `json:"kernel"`
		CPU        string `json:"cpu"`
		Processors int    `json:"processors"`
	} `json:"machine"`
	Series []Series `json:"series"`
}

// A Series is one number for each round.
type Series struct {
	Test      string    `json:"test"`
	Variant   string    `json:"variant"`
	MTU       int       `json:"underlay_mtu"`
	Family    string    `json:"family"`
	Contender string    `json:"contender"`
	Unit      string    `json:"unit"`
	Values    []float64 `json:"values"`
	Median    float64   `json:"median"`
	Low       float64   `json:"low"`
	High      float64   `json:"high"`
}

// ReadReport reads a report.
func ReadReport(b []byte) (r Report, err error) {
	if err = json.Unmarshal(b, &r); err == nil && len(r.Series) == 0 {
		err = fmt.Errorf("no series")
	}
	return r, err
}

// A BenchChart names what a chart shows of a report.
type BenchChart struct {
	Title, Axis   string
	Test, Variant string
	Than          string  // contender to which the ratios are
	Divide        float64 // divides the report's values to give those of the axis
}

// contenders are in the order of the charts. Ours are the last three.
var contenders = []string{"raw veth", "VXLAN", "wireguard-go", "RC", "UC", "UD"}

// find returns the series of a contender.
func (r Report) find(test, variant string, mtu int, contender string) *Series {
	for i := range r.Series {
		s := &r.Series[i]
		if s.Test == test && s.Variant == variant && s.MTU == mtu && s.Contender == contender && s.Family == "IPv6" {
			return s
		}
	}
	return nil
}

// Ratio returns the median of the ratios of a to b within each round. ok is false if they
// do not have values of equally many rounds, or if a value of b is zero.
func Ratio(a, b *Series) (ratio float64, ok bool) {
	if a == nil || b == nil || len(a.Values) == 0 || len(a.Values) != len(b.Values) {
		return 0, false
	}
	var all []float64
	for i := range a.Values {
		if b.Values[i] == 0 {
			return 0, false
		}
		all = append(all, a.Values[i]/b.Values[i])
	}
	slices.Sort(all)
	n := len(all)
	return (all[(n-1)/2] + all[n/2]) / 2, true
}

// group returns the bars of all contenders for one variant and MTU. It appends their values to words.
func (r Report) group(title string, c BenchChart, mtu int, words *string) BarGroup {
	g := BarGroup{Name: title}
	than := r.find(c.Test, c.Variant, mtu, c.Than)
	for i, name := range contenders {
		s := r.find(c.Test, c.Variant, mtu, name)
		if s == nil {
			continue
		}
		v := s.Median / c.Divide
		label := fmt.Sprintf("%s (%s–%s)", significant(v), significant(s.Low/c.Divide), significant(s.High/c.Divide))
		if ratio, ok := Ratio(s, than); ok && name != c.Than {
			label += fmt.Sprintf(", %s of %s", significant(ratio), c.Than)
		}
		*words += fmt.Sprintf(" %s, %s: %s.", title, name, significant(v))
		g.Bars = append(g.Bars, Bar{name, v, s.Low / c.Divide, s.High / c.Divide, label, i >= 3})
	}
	return g
}

// StressSVG draws all variants of a test from a report of make stress. It returns "" if there are none.
func StressSVG(r Report, c BenchChart) string {
	words, seen := "", map[string]bool{}
	var groups []BarGroup
	for _, s := range r.Series {
		if s.Test != c.Test || s.Family != "IPv6" || seen[s.Variant] {
			continue
		}
		seen[s.Variant] = true
		c.Variant = s.Variant
		groups = append(groups, r.group(s.Variant, c, s.MTU, &words))
	}
	return r.chart(c, groups, words)
}

// chart draws groups of bars; words are their values. It returns "" if there are none.
func (r Report) chart(c BenchChart, groups []BarGroup, words string) string {
	if len(groups) == 0 {
		return ""
	}
	return Bars{Title: c.Title, Axis: c.Axis, Desc: c.Axis + ", medians." + words, Foot: r.foot(), Groups: groups}.SVG()
}

// StressCharts are the charts of a report of make stress, by the name of the picture.
var StressCharts = map[string]BenchChart{
	"stress-paths": {"One TCP stream over long and lossy paths", "Goodput, Mb/s (more is better)",
		"goodput over a path", "", "raw veth", 1},
	"stress-ping": {"Ping beside TCP through a bottleneck", "Median round trip, ms (less is better)",
		"ping under load", "", "raw veth", 1},
	"stress-goodput": {"TCP through a bottleneck", "Goodput, Mb/s (more is better)",
		"goodput under load", "", "raw veth", 1},
}

// BenchSVG draws one chart of a report.
func BenchSVG(r Report, c BenchChart) (string, error) {
	words := ""
	var groups []BarGroup
	for _, mtu := range []int{9000, 1500} {
		if g := r.group(fmt.Sprintf("Underlay MTU %d, IPv6", mtu), c, mtu, &words); len(g.Bars) > 0 {
			groups = append(groups, g)
		}
	}
	svg := r.chart(c, groups, words)
	if svg == "" {
		return "", fmt.Errorf("%s, %s was not measured", c.Test, c.Variant)
	}
	return svg, nil
}

// foot returns a note on how the figures were made.
func (r Report) foot() []string {
	return []string{
		fmt.Sprintf("Median of %d rounds (lowest–highest), and the median of the ratios within a round. "+
			"RC, UC and UD are ours. All ends on one machine: %s, %d processors, Linux %s, on %s.",
			r.Rounds, r.Machine.CPU, r.Machine.Processors,
			r.Machine.Kernel, r.Started.Format(time.DateOnly)),
	}
}

// BenchCharts are the charts of docs/bench/latest.json, by the name of the picture.
var BenchCharts = map[string]BenchChart{
	"bench-goodput": {"One TCP stream: goodput", "Goodput, Gb/s (more is better)", "tcp", "1 stream", "raw veth", 1000},
	"bench-cpu": {"One TCP stream: processor time", "CPU seconds for each GB, both ends (less is better)",
		"cpu", "1 stream", "wireguard-go", 1},
	"bench-latency": {"64 octets there and back over TCP", "Median round trip, µs (less is better)", "latency",
		"64 octets, p50", "wireguard-go", 1},
	"bench-loss": {"One TCP stream, 1 of 1000 packets lost", "Goodput, Gb/s (more is better)",
		"loss", "0.1%", "raw veth", 1000},
}
