package agent

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// An ahProvider makes address handles, and knows which are left.
type ahProvider struct {
	stubProvider
	live map[*stubAH]bool
}

type stubAH struct {
	verbs.AH
	p *ahProvider
}

func (p *ahProvider) CreateAH(verbs.AHAttr) (verbs.AH, error) {
	h := &stubAH{p: p}
	p.live[h] = true
	return h, nil
}

func (h *stubAH) Destroy() error {
	delete(h.p.live, h)
	return nil
}

// Copies to more members than there is room for address handles: none is destroyed before its copy has
// left, and those that are not needed any more make room.
func TestCopiesKeepTheirHandles(t *testing.T) {
	a, _ := newAgent(t)
	p := &ahProvider{live: map[*stubAH]bool{}}
	a.opt.Provider, a.opt.MaxNeighbours, a.ahs = p, 4, map[ib.GID]*handle{}
	const batch = 6
	for i := range 5 {
		var to []ib.GID
		for j := range batch {
			to = append(to, ib.GID{0xfe, 0x80, 14: byte(i), 15: byte(j)})
		}
		a.holdHandles(to)
		if got := len(a.copier.to); got != batch {
			t.Fatalf("batch %d: %d handles, want %d", i, got, batch)
		}
		for j, d := range a.copier.to {
			if !p.live[d.AH.(*stubAH)] {
				t.Errorf("batch %d: the handle of member %d is destroyed before its copy has left", i, j)
			}
		}
		a.releaseHandles()
		if got := len(a.ahs); got > batch {
			t.Errorf("batch %d: %d handles are kept, want %d at most", i, got, batch)
		}
	}
}
