package main

import (
	"fmt"
	"math"
	"slices"
)

// A Verdict is one target and what was measured for it.
type Verdict struct {
	Name     string   `json:"name"`
	Want     string   `json:"want"`
	Measured *float64 `json:"measured"` // median; nil if nothing was measured
	Low      *float64 `json:"low"`
	High     *float64 `json:"high"`
	Rounds   int      `json:"rounds"`
	Needed   int      `json:"rounds_needed,omitempty"`
	Met      bool     `json:"met"`
	Aim      string   `json:"aim,omitempty"` // a stricter bound than Want
	AimMet   bool     `json:"aim_met,omitempty"`
}

// Outcome returns "met", "missed", or why neither can be said.
func (v Verdict) Outcome() string {
	switch {
	case v.Measured == nil:
		return "not measured"
	case v.Rounds < v.Needed:
		return fmt.Sprintf("only %d of %d rounds", v.Rounds, v.Needed)
	case v.Met:
		return "met"
	}
	return "missed"
}

// A target bounds the median of a number, or of the ratio of two within rounds.
type target struct {
	name   string
	num    Key
	den    Key     // zero means that num counts by itself
	less   float64 // if not zero, the target bounds num - less*den, not the ratio
	atMost bool
	bound  float64
	aim    float64 // zero means that there is none
	unit   string  // of num
	rounds int     // how many rounds are needed; zero sets no limit
}

// targets returns the targets of a run, for each underlay MTU and address family at which TCP goodput was
// measured. If it was not measured, these are MTU 9000 and 1500 over IPv6.
func targets(r *Report) (list []target) {
	places := r.places(testTCP)
	if len(places) == 0 {
		places = []place{{9000, family6}, {1500, family6}}
	}
	for _, p := range places {
		one := func(contender string) Key { return p.key(testTCP, oneStream, contender) }
		bound, aim := 0.50, 0.60
		if p.mtu < 9000 {
			bound, aim = 0.35, 0.50
		}
		list = append(list,
			target{name: fmt.Sprintf("RC of raw veth, one TCP stream, %v", p), num: one(oursRC), den: one(raw),
				bound: bound, aim: aim},
			target{name: fmt.Sprintf("RC of wireguard-go, one TCP stream, %v", p), num: one(oursRC), den: one(wireguard),
				bound: 2, aim: 2.5},
			target{name: fmt.Sprintf("UC of RC at the same Receive MTU, %v", p), num: one(oursUC), den: one(oursRC),
				bound: 0.95},
			target{name: fmt.Sprintf("RC's CPU seconds per GB of wireguard-go's, %v", p),
				num: p.key(testCPU, oneStream, oursRC), den: p.key(testCPU, oneStream, wireguard), atMost: true, bound: 0.5})
		for _, v := range []string{small.name(pacedNot, "p50"), small.name(paced, "p50")} {
			of := func(contender string) Key { return p.key(testLatency, v, contender) }
			list = append(list,
				target{name: fmt.Sprintf("RC's latency of wireguard-go's, %s, %v", v, p), num: of(oursRC),
					den: of(wireguard), atMost: true, bound: 0.5},
				target{name: fmt.Sprintf("RC's latency of VXLAN's, %s, %v", v, p), num: of(oursRC), den: of(vxlan),
					atMost: true, bound: 2.5})
		}
	}
	return slices.Concat(list, lossTargets(r), setupTargets(), peerTargets(), destTargets())
}

// judge returns the verdict on t.
func (t target) judge(r *Report) Verdict {
	sign, values := "≥", r.values(t.num)
	if t.atMost {
		sign = "≤"
	}
	switch {
	case t.less != 0:
		values = beyond(values, r.values(t.den), t.less)
	case t.den != (Key{}):
		values = ratios(values, r.values(t.den))
	}
	v := Verdict{Name: t.name, Want: sign + " " + number(t.bound), Rounds: len(values), Needed: t.rounds}
	if t.unit != "" {
		v.Want += " " + t.unit
	}
	if t.aim != 0 {
		v.Aim = sign + " " + number(t.aim)
	}
	m := median(values)
	if math.IsNaN(m) {
		return v
	}
	low, high := slices.Min(values), slices.Max(values)
	v.Measured, v.Low, v.High = &m, &low, &high
	within := func(bound float64) bool {
		if t.atMost {
			return m <= bound
		}
		return m >= bound
	}
	v.Met = within(t.bound) && v.Rounds >= v.Needed
	v.AimMet = t.aim != 0 && v.Met && within(t.aim)
	return v
}

// judge fills in r.Targets.
func (r *Report) judge() {
	r.Targets = nil
	list := targets(r)
	if r.Matrix == "stress" {
		list = stressTargets(r)
	}
	for _, t := range list {
		r.Targets = append(r.Targets, t.judge(r))
	}
}
