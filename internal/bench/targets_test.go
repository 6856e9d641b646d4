package main

import (
	"strings"
	"testing"

	"ipoibcm/internal/expect"
)

func fill(r *Report, k Key, values ...float64) {
	for _, v := range values {
		r.add(k, "", v)
	}
}

func TestJudge(t *testing.T) {
	at := place{9000, family6}
	num, den := at.key(testTCP, oneStream, oursRC), at.key(testTCP, oneStream, raw)
	for _, tt := range []struct {
		name     string
		num, den []float64
		target   target
		outcome  string
		measured float64
		aim      bool
	}{
		// The ratio of the medians is 30/60; the median of the ratios is 0.6.
		{"ratios are of rounds", []float64{30, 60, 6}, []float64{60, 100, 10}, target{bound: 0.55}, "met", 0.6, false},
		{"the bound itself", []float64{5}, []float64{10}, target{bound: 0.5, aim: 0.6}, "met", 0.5, false},
		{"below the bound", []float64{49}, []float64{100}, target{bound: 0.5, aim: 0.6}, "missed", 0.49, false},
		{"beyond the aim", []float64{7}, []float64{10}, target{bound: 0.5, aim: 0.6}, "met", 0.7, true},
		{"at most", []float64{3}, []float64{10}, target{bound: 0.5, atMost: true}, "met", 0.3, false},
		{"above at most", []float64{6}, []float64{10}, target{bound: 0.5, atMost: true}, "missed", 0.6, false},
		{"the other contender is missing", []float64{6}, nil, target{bound: 0.5}, "not measured", 0, false},
		{"too few rounds", []float64{9, 9}, []float64{10, 10}, target{bound: 0.5, rounds: 9},
			"only 2 of 9 rounds", 0.9, false},
	} {
		var r Report
		fill(&r, num, tt.num...)
		fill(&r, den, tt.den...)
		tt.target.num, tt.target.den = num, den
		v := tt.target.judge(&r)
		expect.Equal(t, v.Outcome(), tt.outcome, "%s: Outcome", tt.name)
		expect.Equal(t, v.AimMet, tt.aim, "%s: AimMet", tt.name)
		expect.Equal(t, v.Met, tt.outcome == "met", "%s: Met", tt.name)
		switch {
		case (v.Measured != nil) != (tt.measured != 0):
			t.Errorf("%s: v.Measured != nil is %v, want %v", tt.name, v.Measured != nil, tt.measured != 0)
		case v.Measured != nil && *v.Measured != tt.measured:
			t.Errorf("%s: Measured is %v, want %v", tt.name, *v.Measured, tt.measured)
		}
	}
}

// A number by itself is bounded too, and its unit is shown.
func TestJudgeNumber(t *testing.T) {
	var r Report
	k := place{9000, family6}.key("setup", "p50", oursRC)
	fill(&r, k, 1, 3, 2)
	v := target{num: k, atMost: true, bound: 2, unit: "ms"}.judge(&r)
	expect.Equal(t, v.Outcome(), "met", "Outcome")
	expect.Equal(t, v.Want, "≤ 2.00 ms", "Want")
	expect.Equal(t, *v.Low, 1, "Low")
	expect.Equal(t, *v.High, 3, "High")
}

// Each place has its own bound, and every target of what the matrix leaves out is
// there without a verdict.
func TestTargets(t *testing.T) {
	var r Report
	for _, mtu := range []int{9000, 1500} {
		at := place{mtu, family6}
		fill(&r, at.key(testTCP, oneStream, raw), 10)
		fill(&r, at.key(testTCP, oneStream, oursRC), 4)
	}
	r.judge()
	outcomes := map[string]string{}
	for _, v := range r.Targets {
		if _, twice := outcomes[v.Name]; twice {
			t.Errorf("two targets are called %q", v.Name)
		}
		outcomes[v.Name] = v.Outcome()
		if !strings.HasPrefix(v.Name, "RC of raw veth") && v.Outcome() != "not measured" {
			t.Errorf("%s: %s", v.Name, v.Outcome())
		}
	}
	for name, want := range map[string]string{
		"RC of raw veth, one TCP stream, underlay MTU 9000, IPv6": "missed",
		"RC of raw veth, one TCP stream, underlay MTU 1500, IPv6": "met",
		"RC at 0.1% loss of RC without, underlay MTU 9000, IPv6":  "not measured",
	} {
		if outcomes[name] != want {
			t.Errorf("%s: %q, want %q", name, outcomes[name], want)
		}
	}
}
