package netns

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// A counted says whether a host's counter has counted something.
type counted struct {
	host        int
	group, name string
	some        bool
}

// What the underlay marks is answered by the peer, slows the queue pair down, and reaches
// the TCP connections inside. Who does not answer is not sent ECN-capable packets, and
// nobody is where the path clears the bits.
func TestCongestionMarks(t *testing.T) {
	parallel(t)
	needNFT(t)
	const first, second = 0, 1
	for _, tt := range []struct {
		name     string
		mode     string
		ipv4     bool
		args     [2]string // ecn of the two
		from, to string
		n        int
		wants    []counted
	}{
		{"RC", "rc", false, [2]string{"auto", "auto"}, "ect0", "ce", 40, []counted{
			{second, "softroce", "rc_ce_in", true}, {second, "softroce", "rc_cnps_out", true},
			{second, "datapath", "rx_marked", true},
			{first, "softroce", "rx_cnp", true}, {first, "softroce", "rc_ce_reductions", true},
			{first, "softroce", "rc_ect_lost", false},
			{second, "datapath", "rx_drop_congested", false}}},
		{"RC over IPv4", "rc", true, [2]string{"auto", "auto"}, "ect0", "ce", 40, []counted{
			{second, "softroce", "rc_ce_in", true}, {second, "datapath", "rx_marked", true},
			{first, "softroce", "rc_ce_reductions", true}}},
		{"the other does not", "rc", false, [2]string{"auto", "off"}, "ect0", "ce", 1, []counted{
			{second, "softroce", "rc_ce_in", false}, {first, "softroce", "rc_ce_reductions", false}}},
		{"the path clears it", "rc", false, [2]string{"auto", "auto"}, "ect0", "not-ect", 1, []counted{
			{first, "softroce", "rc_ect_lost", true}, {second, "softroce", "rc_ce_in", false}}},
		{"UD, on", "ud", false, [2]string{"on", "on"}, "ect0", "ce", 40, []counted{
			{second, "datapath", "rx_marked", true}, {second, "datapath", "rx_drop_congested", false}}},
		{"UC, on", "uc", false, [2]string{"on", "auto"}, "ect0", "ce", 100, []counted{
			{second, "softroce", "uc_ce_in", true}, {second, "softroce", "uc_cnps_out", true},
			{second, "datapath", "rx_marked", true}}},
		{"UD by itself", "ud", false, [2]string{"auto", "auto"}, "ect0", "ce", 1, []counted{
			{second, "datapath", "rx_marked", false}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{ipv4: tt.ipv4})
			a, b := s.hosts[0], s.hosts[1]
			for i, h := range s.hosts {
				s.must(h.Sysctl("net/ipv4/tcp_ecn", "1"))
				h.run("--mode", tt.mode, "--ecn", tt.args[i])
			}
			s.must(b.Mark(underlay, tt.from, tt.to, tt.n))
			a.reach(b.v4)
			if tt.mode != "ud" {
				a.connect(b, strings.ToUpper(tt.mode))
			}
			s.sendMarked(tt.wants)
			if w := fmt.Sprint(a.status().Warnings, b.status().Warnings); w != "[] []" {
				t.Error(w)
			}
		})
	}
}

// sendMarked sends from the first host to the second, and compares what was counted. A stream whose SYN was
// lost goes without ECN, so what is wanted may take several.
func (s *segment) sendMarked(wants []counted) {
	s.Helper()
	a, b := s.hosts[0], s.hosts[1]
	missing := func(w counted) bool { return w.some && s.hosts[w.host].counter(w.group, w.name) == 0 }
	for i := 0; i == 0 || i < 5 && slices.ContainsFunc(wants, missing); i++ {
		a.send(b, b.v4, 16<<20)
		a.send(b, b.v6, 16<<20)
	}
	for _, w := range wants {
		if n := s.hosts[w.host].counter(w.group, w.name); n > 0 != w.some {
			s.Errorf("%s %s of host %d is %d, want some: %v", w.group, w.name, w.host, n, w.some)
		}
	}
}
