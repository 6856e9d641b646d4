package softroce

import (
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// A completion queue keeps all completions in order, whatever its ring begins with, and tells of those beyond
// what the user asked for only.
func TestCQGrows(t *testing.T) {
	const depth = 4 * firstRing
	d, _ := pair(t, families[0], nil)
	c := newCQ(d.threads[0], depth)
	n, wcs := uint64(0), make([]verbs.WC, 2*depth)
	for _, tt := range []struct {
		add   int
		grown uint64
	}{{firstRing / 2, 0}, {depth, 0}, {depth + 1, 1}} {
		for i := range tt.add {
			c.add(verbs.WC{ID: n + uint64(i)})
		}
		expect.MustEqual(t, c.Poll(wcs), tt.add, "completions of %d", tt.add)
		for i := range tt.add {
			expect.MustEqual(t, wcs[i].ID, n+uint64(i), "ID of completion %d of %d", i, tt.add)
		}
		n += uint64(tt.add)
		expect.Equal(t, counter(d, "cq_grown"), tt.grown, "cq_grown after %d", tt.add)
	}
}
