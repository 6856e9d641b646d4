package main

import (
	"fmt"
	"slices"
	"time"
)

// What is measured: the Test of a [Key].
const (
	testTCP     = "tcp"     // goodput, Mb/s
	testCPU     = "cpu"     // CPU seconds per GB of goodput, both hosts
	testLatency = "latency" // of a request and its response, µs
	testLoss    = "loss"    // goodput while packets are lost, Mb/s
	testSetup   = "setup"   // connections being set up
	testMemory  = "memory"  // resident memory of the agent, and its live heap, KiB
	testPeers   = "peers"   // goodput to one of many peers, Mb/s
)

// The contenders.
const (
	raw       = "raw veth"
	vxlan     = "VXLAN"
	wireguard = "wireguard-go"
	oursRC    = "RC"
	oursUC    = "UC"
	oursUD    = "UD"
)

// contenders are in the order of the tables and of every other round.
var contenders = []string{raw, vxlan, wireguard, oursRC, oursUC, oursUD}

// Families. The underlay and the traffic have the same one. The exceptions are set-up and memory, many
// peers, and many destinations, which measure IPv4 traffic over an IPv6 underlay.
const (
	family6 = "IPv6"
	family4 = "IPv4"
)

// A Key says what was measured, how and for whom.
type Key struct {
	Test      string `json:"test"`
	Variant   string `json:"variant"` // "1 stream", "64 octets, p50", …
	MTU       int    `json:"underlay_mtu"`
	Family    string `json:"family"`
	Contender string `json:"contender"`
}

// A Series is one number for each round.
type Series struct {
	Key
	Unit   string    `json:"unit"`
	Values []float64 `json:"values"` // one for each round, in order
	Median float64   `json:"median"`
	Low    float64   `json:"low"`
	High   float64   `json:"high"`
}

// A Skip says what was not measured, and why.
type Skip struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// A Machine is the machine on which a run was made.
type Machine struct {
	Kernel     string `json:"kernel"`
	CPU        string `json:"cpu"`
	Processors int    `json:"processors"`
	Go         string `json:"go"`
	// TCP is the congestion control of TCP at all ends. It decides how long a queue becomes.
	TCP string `json:"tcp,omitempty"`
	// OtherCPU is the share of all processors that processes outside the run used
	// meanwhile. Above a few percent timings are noisy.
	OtherCPU float64 `json:"other_cpu"`
	// Copies is how fast 16 MiB were copied in memory before each round of traffic, in
	// GB/s. Other programs use the same memory. Goodput depends on its speed, most of all
	// for a contender that copies often.
	Copies []float64 `json:"copies_gb_per_s,omitempty"`
}

// A Report is a whole run: docs/bench/latest.json, or stress.json.
type Report struct {
	Version  int               `json:"version"` // of this schema
	Started  time.Time         `json:"started"`
	Seconds  float64           `json:"seconds"` // how long the run took
	Matrix   string            `json:"matrix"`  // "quick", "short", "full", "against" or "stress"
	Rounds   int               `json:"rounds"`
	Transfer float64           `json:"transfer_seconds"` // of each transfer
	Build    string            `json:"build"`
	Machine  Machine           `json:"machine"`
	Tools    map[string]string `json:"tools"`
	Series   []*Series         `json:"series"`
	Skipped  []Skip            `json:"skipped"`
	Targets  []Verdict         `json:"targets"`

	index map[Key]*Series
}

// add appends the value of one round.
func (r *Report) add(k Key, unit string, value float64) {
	if r.index == nil {
		r.index = map[Key]*Series{}
	}
	s := r.index[k]
	if s == nil {
		s = &Series{Key: k, Unit: unit}
		r.index[k] = s
		r.Series = append(r.Series, s)
	}
	s.Values = append(s.Values, value)
	s.Median, s.Low, s.High = median(s.Values), slices.Min(s.Values), slices.Max(s.Values)
}

// values returns the rounds of k, nil if it was not measured.
func (r *Report) values(k Key) []float64 {
	if s := r.index[k]; s != nil {
		return s.Values
	}
	return nil
}

// skip notes once that something was not measured.
func (r *Report) skip(what, why string, args ...any) {
	s := Skip{what, fmt.Sprintf(why, args...)}
	if !slices.Contains(r.Skipped, s) {
		r.Skipped = append(r.Skipped, s)
	}
}

// variants returns the variants of a test at one MTU and family, in the order of measurement.
func (r *Report) variants(test string, mtu int, family string) (out []string) {
	for _, s := range r.Series {
		if s.Test == test && s.MTU == mtu && s.Family == family && !slices.Contains(out, s.Variant) {
			out = append(out, s.Variant)
		}
	}
	return out
}

// A place is an underlay that something was measured on.
type place struct {
	mtu    int
	family string
}

func (p place) String() string { return fmt.Sprintf("underlay MTU %d, %s", p.mtu, p.family) }

// key returns the key of a series that was measured at p.
func (p place) key(test, variant, contender string) Key {
	return Key{test, variant, p.mtu, p.family, contender}
}

// places returns the places where a test was made, in the order of measurement.
func (r *Report) places(test string) (out []place) {
	for _, s := range r.Series {
		if p := (place{s.MTU, s.Family}); s.Test == test && !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}
