package ratelimit

import (
	"testing"

	"ipoibcm/ib"
)

// A source is known by its GID and its QPN together, whichever are chosen to look alike.
func TestMemory(t *testing.T) {
	m := NewMemory([2]uint64{0x123456789abcdef1, 0xfedcba9876543211})
	a, b := ib.GID{0xfe, 0x80, 15: 1}, ib.GID{0xfe, 0x80, 15: 3}
	for _, tt := range []struct {
		name string
		now  int64
		gid  ib.GID
		qpn  ib.QPN
		want bool
	}{
		{"first", 1, a, 2, false},
		{"again", 2, a, 2, true},
		{"another QPN", 2, a, 4, false},
		{"another GID", 2, b, 2, false},
		{"both, by the same bits", 2, b, 0, false},
		{"within a generation", generation, a, 2, true},
		{"much later", 10 * generation, a, 2, false},
	} {
		if got := m.Seen(tt.now, tt.gid, tt.qpn); got != tt.want {
			t.Errorf("%s: seen %v, want %v", tt.name, got, tt.want)
		}
	}
	mistaken := 0
	for i := range 100_000 {
		if m.Seen(11*generation, ib.GID{0xfe, 0x80, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}, ib.QPN(i)) {
			mistaken++
		}
	}
	if mistaken > 200 {
		t.Errorf("%d of 100,000 sources were taken for others, want 200 at most", mistaken)
	}
}
