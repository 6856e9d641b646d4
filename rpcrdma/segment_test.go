package rpcrdma

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"ipoibcm/internal/expect"
)

// A lent is a call that lends memory for its reply: the octets of the segments of
// each Write chunk, and of those of the Reply chunk, which is nil if there is none.
type lent struct {
	writes [][]uint32
	reply  []uint32
}

// randomLent makes one of a few small segments, some without octets.
func randomLent(r *rand.Rand) (l lent) {
	segments := func() (lens []uint32) {
		for range 1 + r.IntN(4) {
			lens = append(lens, uint32(r.IntN(4)*300))
		}
		return lens
	}
	for range r.IntN(4) {
		l.writes = append(l.writes, segments())
	}
	if r.IntN(3) > 0 {
		l.reply = segments()
	}
	return l
}

// header is its transport header, of version two with XID 7, and the segments.
func (l lent) header() (b []byte, offered []Segment) {
	b = words(7, 2, 1, 0, 0, 0, 0)
	list := func(lens []uint32) {
		b = append(b, words(1, uint32(len(lens)))...)
		for _, n := range lens {
			s := Segment{uint32(len(offered) + 1), n, uint64(len(offered)) << 16}
			offered = append(offered, s)
			b = append(b, words(s.Handle, n, 0, uint32(s.Offset))...)
		}
	}
	for _, w := range l.writes {
		list(w)
	}
	b = append(b, words(0)...)
	if l.reply == nil {
		return append(b, words(0)...), offered
	}
	list(l.reply)
	return b, offered
}

// short puts the octets of a reply into the segments one after the other, as a
// responder writes them. Where some are left over behind the last of a chunk, that
// segment is the first that is too short: index and need are its number, from 1,
// and what it would have to have. A chunk without octets takes no item.
func (l lent) short(items []Span, total int) (index, need uint32, fits bool) {
	fill := func(lens []uint32, n int) bool {
		last := uint32(0)
		for _, last = range lens {
			index++
			for have := last; have > 0 && n > 0; have-- {
				n--
			}
		}
		need = last + uint32(n)
		return n == 0
	}
	for i, lens := range l.writes {
		if slices.Max(lens) == 0 {
			index += uint32(len(lens))
			continue
		}
		if !fill(lens, items[i].Len) {
			return index, need, false
		}
		total -= (items[i].Len + 3) / 4 * 4
	}
	head, _ := l.header() // that of a reply is as long
	if len(head)+total <= 4096 {
		return 0, 0, true
	}
	if l.reply == nil {
		return 0, uint32(total), false
	}
	fits = fill(l.reply, total)
	return index, need, fits
}

// TestFirstShortSegment: V2-5.2.4-8, V2-5.2.4-9.
func TestFirstShortSegment(t *testing.T) {
	r := rand.New(rand.NewPCG(14, 3))
	long, fitted := 0, 0
	for range 1000 {
		w := up(t, Options{}, Options{})
		s := w.server()
		s.program = nil
		l := randomLent(r)
		in, offered := l.header()
		s.offered = append(s.offered, offered...)
		// A reply with an item for each chunk, and more.
		payload := octets(rpcReply7)
		var items []Span
		for range l.writes {
			n := 1 + r.IntN(900)
			items = append(items, Span{len(payload), n})
			payload = append(payload, make([]byte, (n+3)/4*4)...)
		}
		payload = append(payload, make([]byte, r.IntN(3)*2200)...)

		s.step(Recv{Data: append(in, rpcOf(7)...)})
		before := len(s.sends)
		s.step(Answer{ID: s.serves[len(s.serves)-1].ID, Payload: payload, Reduce: items})
		if n := len(s.sends) - before; n != 1 {
			w.Fatalf("%d answers to %x", n, in)
		}
		got := s.lastSent()
		index, need, fits := l.short(items, len(payload))
		if fits {
			fitted++
			if wordAt(got, 3) > 1 {
				t.Fatalf("%+v has room for %d octets with items %v; answered by %x", l, len(payload), items, got)
			}
			continue
		}
		long++
		if want := words(7, 2, 32, 4, 3, 1, index, need); !bytes.Equal(got, want) {
			t.Fatalf("%+v, items %v, %d octets:\n got %x\nwant %x", l, items, len(payload), got, want)
		}
	}
	if long < 100 {
		t.Errorf("%d of the replies were too long, want 100 at least", long)
	}
	if fitted < 100 {
		t.Errorf("%d of the replies fitted, want 100 at least", fitted)
	}
}

// TestRetryWithAnySegment: V2-5.2.4-10. A requester understands a responder that
// names any segment of the chunk that was too short, the first or the last, and
// offers as many octets together.
func TestRetryWithAnySegment(t *testing.T) {
	for index := range uint32(7) {
		w := up(t, Options{}, Options{})
		c := w.client()
		c.segment = 1000
		w.server().program = nil
		c.step(Submit{ID: 1, Payload: rpc(0), MaxReply: 5000})
		xid := wordAt(c.lastSent(), 0)
		before := len(c.sends)
		c.step(Recv{Data: words(xid, 2, 32, 4, 3, 0, index, 5024)})
		if named := index >= 1 && index <= 5; !named {
			want := 0
			if index == 0 {
				want = 1 // 5024 octets in any form
			}
			if n := len(c.sends) - before; n != want {
				t.Errorf("segment %d: sent %d times again, want %d", index, n, want)
			}
			continue
		}
		if len(c.sends) != before+1 {
			t.Fatalf("segment %d: sent %d times again: %+v", index, len(c.sends)-before, c.done)
		}
		again := c.lastSent()
		if got := wordAt(again, 0); got != xid {
			t.Errorf("segment %d: XID %#x, want %#x", index, got, xid)
		}
		// Read list, Write list, Reply chunk, its segments of four words each.
		expect.MustEqual(t, wordAt(again, 6), 0, "segment %d: wordAt(again, 6)", index)
		expect.MustEqual(t, wordAt(again, 7), 0, "segment %d: wordAt(again, 7)", index)
		expect.MustEqual(t, wordAt(again, 8), 1, "segment %d: wordAt(again, 8)", index)
		total := uint32(0)
		for i := range int(wordAt(again, 9)) {
			total += wordAt(again, 11+4*i)
		}
		if total != 9024 {
			t.Errorf("segment %d: %d octets are offered, want 9024", index, total)
		}
	}
}

// TestRetryIsBounded: V2-5.2.4-10. A responder that asks for more each time is asked
// again as often as the options say.
func TestRetryIsBounded(t *testing.T) {
	for retries, want := range map[int]int{-1: 1, 0: 2, 1: 2, 3: 4} {
		w := up(t, Options{MaxRetries: retries}, Options{})
		c := w.client()
		w.server().program = nil
		before := len(c.sends)
		c.step(Submit{ID: 1, Payload: rpc(0), MaxReply: 5000})
		for i := range uint32(10) {
			if len(c.done) > 0 {
				break
			}
			c.step(Recv{Data: words(wordAt(c.lastSent(), 0), 2, 32, 4, 3, 0, 1, 6000+i*1000)})
		}
		if got := len(c.sends) - before; got != want {
			t.Errorf("%d retries: sent %d times, want %d", retries, got, want)
		}
		if len(c.done) != 1 {
			t.Errorf("%d retries: the call ended %d times", retries, len(c.done))
		}
	}
}
