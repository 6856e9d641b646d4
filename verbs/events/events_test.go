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
		if n < Depth && ev.Text != string(rune('a'+n%26)) {
			t.Fatalf("event %d is %+v", n, ev)
		}
		if n == Depth && ev.Kind != verbs.EventsLost {
			t.Errorf("after the last event comes %v, want %v", ev.Kind, verbs.EventsLost)
		}
		n++
	}
	if n != Depth+1 {
		t.Errorf("%d events, want %d and %v", n, Depth, verbs.EventsLost)
	}
}

// Each gap is told after what came before it, and the loss of the device always.
func TestQueueTellsOfGaps(t *testing.T) {
	q := NewQueue(new(atomic.Uint64))
	fill := func() {
		for range 2 * Depth {
			q.Tell(verbs.Event{Kind: verbs.QPFatal})
		}
	}
	fill()
	<-q.Events()
	q.Tell(verbs.Event{Kind: verbs.PortActive}) // no room: the last place is for EventsLost
	for range Depth {
		<-q.Events()
	}
	if ev := <-q.Events(); ev.Kind != verbs.EventsLost {
		t.Errorf("after the second gap: %v, want %v", ev.Kind, verbs.EventsLost)
	}
	fill()
	q.Tell(verbs.Event{Kind: verbs.DeviceFatal})
	q.Close()
	var last verbs.Event
	for ev := range q.Events() {
		last = ev
	}
	if last.Kind != verbs.DeviceFatal {
		t.Errorf("the last event is %v, want %v", last.Kind, verbs.DeviceFatal)
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
