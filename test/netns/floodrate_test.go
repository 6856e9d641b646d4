package netns

import (
	"fmt"
	"slices"
	"testing"
)

// A floodRound is the rate of TCP in Mb/s beside one flood, and beside the control before it
// and after it, so that a machine that becomes faster or slower favours neither. Rounds in a
// row share a control.
type floodRound struct {
	before, flood, after float64
	others               float64 // most that other processes had of the processors meanwhile
}

// kept is the part of its rate that TCP kept.
func (r floodRound) kept() float64 { return 2 * r.flood / (r.before + r.after) }

// counts reports whether the rate is that of the agent rather than of other processes.
func (r floodRound) counts() bool { return r.others <= mostOthers && r.before+r.after > 0 }

func (r floodRound) String() string {
	return fmt.Sprintf("%.0f %.0f %.0f (%.0f %%)", r.before, r.flood, r.after, 100*r.others)
}

// A verdict is what rounds say: the median of what was kept, and between what it lies with
// nine chances of ten, whatever the distribution (the sign test).
type verdict struct {
	rounds            int
	median, low, high float64
}

// judge looks at those rounds that of says.
func judge(rounds []floodRound, of func(floodRound) bool) (v verdict) {
	var kept []float64
	for _, r := range rounds {
		if of(r) {
			kept = append(kept, r.kept())
		}
	}
	n := len(kept)
	if n == 0 {
		return v
	}
	slices.Sort(kept)
	// The median is outside the k-th smallest and k-th largest with chance 2 P(Bin(n, 1/2) < k).
	k, chance, below := 0, 1.0, 0.0
	for range n {
		chance /= 2
	}
	for term := chance; ; {
		if below += term; k > 0 && 2*below > 0.1 || k > (n-1)/2 {
			break
		}
		k++
		term = term * float64(n-k+1) / float64(k)
	}
	k = max(1, min(k, (n+1)/2))
	return verdict{rounds: n, median: (kept[n/2] + kept[(n-1)/2]) / 2, low: kept[k-1], high: kept[n-k]}
}

// decided reports whether more rounds would hardly change the answer to: is it more than that?
func (v verdict) decided(keeps float64) bool {
	return v.rounds >= floodRounds && (v.low >= keeps || v.high < keeps)
}

func (v verdict) String() string {
	if v.rounds == 0 {
		return "no round counts"
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f) of %d rounds", v.median, v.low, v.high, v.rounds)
}

func TestFloodVerdict(t *testing.T) {
	of := func(kept ...float64) (rounds []floodRound) {
		for i, k := range kept { // the machine becomes slower all the time, and now and then much
			c := 8000 - 300*float64(i)
			rounds = append(rounds, floodRound{before: c + 150, flood: k * c, after: c - 150})
		}
		return rounds
	}
	busy := append(of(0.9, 0.9, 0.9, 0.9, 0.9), floodRound{before: 8000, flood: 10, after: 8000, others: 0.4},
		floodRound{})
	for _, tt := range []struct {
		name    string
		rounds  []floodRound
		want    string
		decided bool
	}{
		{"none", nil, "no round counts", false},
		{"one", of(0.9), "0.90 (0.90 to 0.90) of 1 rounds", false},
		{"five, all well", of(0.8, 0.9, 0.85, 1.0, 0.75), "0.85 (0.75 to 1.00) of 5 rounds", true},
		{"five, one bad", of(0.8, 0.9, 0.85, 1.0, 0.4), "0.85 (0.40 to 1.00) of 5 rounds", false},
		{"eight, one bad", of(0.8, 0.9, 0.84, 1.0, 0.4, 0.8, 0.9, 0.7), "0.82 (0.70 to 0.90) of 8 rounds", true},
		{"five, all bad", of(0.5, 0.4, 0.3, 0.6, 0.2), "0.40 (0.20 to 0.60) of 5 rounds", true},
		{"others had the machine", busy, "0.90 (0.90 to 0.90) of 5 rounds", true},
	} {
		v := judge(tt.rounds, floodRound.counts)
		if got := v.String(); got != tt.want {
			t.Errorf("%s: got %s, want %s", tt.name, got, tt.want)
		}
		if got := v.decided(0.7); got != tt.decided {
			t.Errorf("%s: decided %v, want %v", tt.name, got, tt.decided)
		}
	}
}
