package main

import (
	"testing"

	"ipoibcm/internal/expect"
)

func TestCountLoss(t *testing.T) {
	out := `table netdev ipoibcm_bench {
	chain loss {
		type filter hook ingress device "eth0" priority filter; policy accept;
		meta l4proto { tcp, udp } counter packets 1000 bytes 4096000 comment "came"
		meta l4proto { tcp, udp } numgen random mod 1000 == 0 counter packets 3 bytes 12000 drop comment "lost"
	}
}
`
	came, lost, octets := countLoss(out)
	expect.Equal(t, came, 1000, "came")
	expect.Equal(t, lost, 3, "lost")
	expect.Equal(t, octets, 4096000, "octets")
	came, lost, octets = countLoss("table netdev other {}")
	expect.Equal(t, came, 0, "of another table: came")
	expect.Equal(t, lost, 0, "of another table: lost")
	expect.Equal(t, octets, 0, "of another table: octets")
}

func TestCheckLoss(t *testing.T) {
	for _, tt := range []struct {
		name       string
		came, lost int
		octets     int64
		rate       int
		ok         bool
	}{
		{"as asked", 100_000, 98, 400_000_000, 1000, true},
		{"none asked", 100_000, 0, 400_000_000, 0, true},
		{"too few to lose one", 500, 0, 2_000_000, 1000, true},
		{"the rule drops nothing", 100_000, 0, 400_000_000, 1000, false},
		{"batches, not packets of the wire", 100_000, 98, 6_000_000_000, 1000, false},
		{"nothing passed it", 0, 0, 0, 1000, false},
	} {
		if err := checkLoss(tt.came, tt.lost, tt.octets, 9000, tt.rate); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestLossName(t *testing.T) {
	for rate, want := range map[int]string{0: "no loss", 10000: "0.01%", 1000: "0.1%", 100: "1%"} {
		if got := lossName(rate); got != want {
			t.Errorf("one in %d: %q, want %q", rate, got, want)
		}
	}
}
