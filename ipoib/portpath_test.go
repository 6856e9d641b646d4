package ipoib

import (
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/simsm"
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

// Two hosts behind one LID, such as two virtual functions of an adapter, and MADs without a GRH: of both
// GIDs that counts which the MAD itself names.
func TestNameSenderBehindOneLID(t *testing.T) {
	for _, dials := range []string{"a", "c"} {
		w := newSubnet(t, 18, simsm.Options{})
		a, b, c := w.port(1, false, Options{}), w.port(2, false, Options{}), w.port(3, false, Options{})
		c.ib.port.LID = b.ib.port.LID
		w.run(4 * time.Second)
		a.ping("10.0.0.2", 9000, true) // so that a knows the path to b, whose GID is the lower one
		w.settle()
		from, to, ip := a, c, "10.0.0.3"
		if dials == "c" {
			from, to, ip = c, a, "10.0.0.1"
		}
		p := from.ping(ip, 9000, true)
		w.settle()
		expect.Equal(t, to.got(p), 1, "%s dials: packets that arrived", dials)
		expect.MustEqual(t, len(c.up()), 1, "%s dials: connections of c", dials)
		expect.Equal(t, c.up()[0].Via, ViaGSI, "%s dials: the way of its CM messages", dials)
	}
}
