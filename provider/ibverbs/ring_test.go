package ibverbs

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

func TestWorkRequestID(t *testing.T) {
	for _, tt := range [][3]uint32{{idSend, 0, 0}, {idRecv, 0x3fffffff, math.MaxUint32}, {idShared, 7, 9}} {
		kind, owner, place := splitID(makeID(tt[0], tt[1], tt[2]))
		if [3]uint32{kind, owner, place} != tt {
			t.Errorf("%v became %d, %d, %d", tt, kind, owner, place)
		}
	}
}

func TestRing(t *testing.T) {
	r := newRing(5, 2)
	r.head, r.tail = math.MaxUint32-2, math.MaxUint32-2 // places wrap soon
	sg := []verbs.SGE{{Buf: []byte("a")}, {Buf: []byte("b")}}
	var places []uint32
	for i := range 5 {
		places = append(places, r.push(entry{id: uint64(i), len: i, sg: sg}))
	}
	sg[0].Buf = nil // the ring has a copy
	if r.room() != 0 {
		t.Errorf("room for %d in a full ring", r.room())
	}
	r.unpush(1)
	if _, ok := r.take(places[4]); ok {
		t.Error("took what was not posted after all")
	}
	// Not signaled: 0 completes without a word when 1 does.
	e, ok := r.take(places[1])
	expect.MustEqual(t, ok, true, "ok")
	expect.Equal(t, e.id, 1, "id")
	expect.Equal(t, e.len, 1, "len")
	expect.MustEqual(t, len(e.sg), 2, "length of sg")
	expect.Equal(t, string(e.sg[0].Buf), "a", "Buf")
	for _, p := range []uint32{places[0], places[1]} {
		if e, ok := r.take(p); ok {
			t.Errorf("took %+v twice", e)
		}
	}
	if r.room() != 3 {
		t.Errorf("room for %d, want 3", r.room())
	}
	r.clear()
	if _, ok := r.take(places[2]); ok || r.room() != 5 {
		t.Errorf("a cleared ring has room for %d", r.room())
	}
}

// TestSlots completes in any order.
func TestSlots(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	s := newSlots(8, 1)
	posted := map[uint32]uint64{}
	for id := range uint64(1000) {
		if s.room() > 0 && rng.IntN(3) > 0 {
			place := s.push(id, []verbs.SGE{{Buf: []byte{byte(id)}}})
			if _, twice := posted[place]; twice {
				t.Fatalf("place %d is in use", place)
			}
			posted[place] = id
			continue
		}
		place := uint32(rng.IntN(10))
		want, ok := posted[place]
		e, got := s.take(place)
		expect.MustEqual(t, got, ok, "whether place %d was taken from", place)
		if ok {
			expect.MustEqual(t, e.id, want, "ID at place %d", place)
			expect.MustEqual(t, e.sg[0].Buf[0], byte(want), "first octet at place %d", place)
		}
		delete(posted, place)
	}
	if s.room()+len(posted) != 8 {
		t.Errorf("room for %d beside %d", s.room(), len(posted))
	}
	if !slices.Contains(s.used, true) {
		t.Error("the test ends with nothing posted")
	}
}
