package main

import (
	"slices"
	"strings"
	"testing"
)

// Every row of the plan has another name, raw veth is measured beside it where its packets pass,
// and rows of one kind of hosts follow each other.
func TestStressPlan(t *testing.T) {
	b := &bench{rounds: 3, seconds: 1}
	names := map[string]bool{}
	for _, s := range b.stressPlan() {
		if names[s.name] {
			t.Errorf("two rows are called %q", s.name)
		}
		names[s.name] = true
	}
	kinds := map[meshKind]bool{}
	var last meshKind
	for _, r := range slices.Concat(b.sharedRows(), b.datagramRows(1500), b.hopRows(), b.pathRows()) {
		if r.kind != last && kinds[r.kind] {
			t.Errorf("%s: hosts of this kind were there before", r.name)
		}
		last, kinds[r.kind] = r.kind, true
		if !slices.Contains(r.judged, oursRC) {
			t.Errorf("%s: RC is not measured in every round", r.name)
		}
		if !strings.HasPrefix(r.name, "hop") && !slices.Contains(slices.Concat(r.judged, r.others), raw) {
			t.Errorf("%s: raw veth is not measured", r.name)
		}
		for _, who := range r.others {
			if slices.Contains(r.judged, who) {
				t.Errorf("%s: %s is named twice", r.name, who)
			}
		}
	}
}

// What was measured of each row has the bounds that are wanted of it.
func TestStressTargets(t *testing.T) {
	var r Report
	r.Matrix = "stress"
	at := place{9000, family6}
	for _, k := range []struct{ test, variant string }{
		{testPing, "bystander, " + overload.name}, {testPinged, "bystander, " + overload.name},
		{testPing, multicastVariant}, {testPing, "1 stream, " + short30.name}, {testAgain, "1 stream, " + short30.name},
		{testShare, "least of three senders, " + midTCP.name}, {testShare, "most of 48 streams, " + slowTCP.name},
		{testBusy, busyVariant(0.99)}, {testPPS, "1400 octets"},
	} {
		for _, who := range contenders {
			fill(&r, at.key(k.test, k.variant, who), 1)
		}
	}
	r.judge()
	wants := map[string]string{}
	for _, v := range r.Targets {
		if _, twice := wants[v.Name]; twice {
			t.Errorf("two targets are called %q", v.Name)
		}
		wants[v.Name] = v.Want
	}
	for name, want := range map[string]string{
		"answers to the bystander, " + overload.name + ", UC":                      "≥ 1.00",
		"ping beyond twice raw veth's, bystander, " + overload.name + ", UD":       "≤ 0.50 ms",
		"ping beyond twice raw veth's, " + multicastVariant + ", RC":               "≤ 0.50 ms",
		"of RC's packets sent again, 1 stream, " + short30.name:                    "≤ 3.00 %",
		"RC's share, least of three senders, " + midTCP.name:                       "≥ 0.70",
		"RC's share, most of 48 streams, " + slowTCP.name:                          "≤ 1.30",
		"RC's ping of wireguard-go's, p99, two busy programs beside":               "≤ 1.20",
		"RC's datagrams of raw veth's, 1400 octets":                                "≥ 0.90",
		"goodput of the overloaded peer, bystander, 20 Mb/s behind the bridge, RC": "≥ 18.0 Mb/s",
	} {
		if got := wants[name+", "+at.String()]; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
