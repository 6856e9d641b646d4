package ipoib

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// A MAD without a GRH from a port with several GIDs has the same sender each time: a run from a
// seed is the same again.
func TestNameSenderIsTheSameEachTime(t *testing.T) {
	paths := map[ib.GID]*portPath{}
	for i := range byte(8) {
		gid := ib.GID{0: 0xfe, 1: 0x80, 15: i + 1}
		paths[gid] = &portPath{known: true, path: verbs.Path{DGID: gid, DLID: 7}}
	}
	f := &Interface{fab: &fabric{paths: paths}}
	for range 20 {
		m := verbs.MAD{Path: verbs.Path{DLID: 7}}
		f.nameSender(&m)
		expect.MustEqual(t, m.Remote, ib.GID{0: 0xfe, 1: 0x80, 15: 1}, "sender")
	}
}
