package agent

import "testing"

func TestGrowth(t *testing.T) {
	for _, tt := range []struct {
		name              string
		now, before, want uint64
	}{
		{"some since then", 12, 5, 7},
		{"none since then", 5, 5, 0},
		{"counted before then", 5, 100, 0},
	} {
		if got := growth(tt.now, tt.before); got != tt.want {
			t.Errorf("%s: growth(%d, %d) = %d, want %d", tt.name, tt.now, tt.before, got, tt.want)
		}
	}
}
