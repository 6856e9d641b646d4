package hostnet

import (
	"strings"
	"testing"
)

// FuzzGroups reads any text as the kernel's lists of multicast groups.
func FuzzGroups(f *testing.F) {
	f.Add("Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n1\tlo        :     1      "+
		"V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n", uint8(1))
	f.Add("1    lo              ff020000000000000000000000000001     1 0000000C 0\n2    eth0            "+
		"ff0200000000000000000001ff000001     1 00000004 0\n", uint8(2))
	f.Add("\t\n2 x\n\tzz\n\t", uint8(2))
	f.Fuzz(func(t *testing.T, text string, index uint8) {
		lines := strings.Count(text, "\n") + 1
		v4, v6 := parseIGMP(text, int(index)), parseIGMP6(text, int(index))
		if len(v4) > lines || len(v6) > lines {
			t.Fatalf("%d and %d groups out of %d lines", len(v4), len(v6), lines)
		}
		for _, g := range v4 {
			if !g.Is4() {
				t.Fatalf("IPv4 group %v", g)
			}
		}
		for _, g := range v6 {
			if !g.Is6() {
				t.Fatalf("IPv6 group %v", g)
			}
		}
	})
}
