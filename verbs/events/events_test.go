package events

import (
	"sync"
	"sync/atomic"
	"testing"

	"ipoibcm/verbs"
)

func TestQueue(t *testing.T) {
	var dropped atomic.Uint64
	q := NewQueue(&dropped)
	for i := range Depth + 3 {
		q.Tell(verbs.Event{Kind: verbs.QPFatal, Text: string(rune('a' + i%26))})
	}
	if dropped.Load() != 3 {
		t.Errorf("%d dropped, want 3", dropped.Load())
	}
	var tellers sync.WaitGroup
	for range 4 {
		tellers.Go(func() {
			for range 100 {
				q.Tell(verbs.Event{})
			}
		})
	}
	q.Close()
	q.Close()
	tellers.Wait()
	n := 0
	for ev := range q.Events() {
		if ev.Text != string(rune('a'+n%26)) {
			t.Fatalf("event %d is %+v", n, ev)
		}
		n++
	}
	if n != Depth {
		t.Errorf("%d events, want %d", n, Depth)
	}
}

func TestTap(t *testing.T) {
	var s Tap
	if s.Get() != nil {
		t.Error("a tap that nobody set")
	}
	n := 0
	s.Set(func(bool, []byte) { n++ })
	s.Get()(true, nil)
	if n != 1 {
		t.Errorf("called %d times", n)
	}
	if s.Set(nil); s.Get() != nil {
		t.Error("the tap is still there")
	}
}
