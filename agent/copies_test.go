package agent

import (
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/nexthop"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// An ahProvider makes address handles, and knows which are left.
type ahProvider struct {
	stubProvider
	live map[*stubAH]bool
	fail bool
}

type stubAH struct {
	verbs.AH
	p *ahProvider
}

func (p *ahProvider) CreateAH(verbs.AHAttr) (verbs.AH, error) {
	if p.fail {
		return nil, verbs.ErrInvalid
	}
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

// A path for which no handle could be made is not counted as a user of one that is made later.
func TestHandleOfAPathWithoutOne(t *testing.T) {
	a, _ := newAgent(t)
	p := &ahProvider{live: map[*stubAH]bool{}, fail: true}
	a.opt.Provider, a.opt.MaxNeighbours, a.ahs = p, 1, map[ib.GID]*handle{}
	a.paths = map[netip.Addr]*path{}
	gid, another := ib.GID{0xfe, 0x80, 15: 1}, ib.GID{0xfe, 0x80, 15: 2}
	to := nexthop.Path{Kind: nexthop.PathGroup, Link: encap.LinkAddr{GID: gid}, MTU: 2044}
	first, second := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	a.setPath(first, to)
	p.fail = false
	a.setPath(second, to)
	used := a.ahs[gid].ah.(*stubAH)
	a.delPath(first)
	if _, err := a.handle(another); err != nil { // there is room for one that is not used
		t.Fatal(err)
	}
	if !p.live[used] {
		t.Error("the handle of a path is destroyed while the path uses it")
	}
	a.delPath(second)
	if _, err := a.handle(ib.GID{0xfe, 0x80, 15: 3}); err != nil {
		t.Fatal(err)
	}
	if p.live[used] {
		t.Error("the handle is kept although nothing uses it")
	}
}
