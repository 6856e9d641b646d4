package agent

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

// Who does not drive the agent is found out; who does is alive.
func TestAliveNamesTheDriver(t *testing.T) {
	a, _ := newAgent(t) // nobody drives it
	if err := a.alive(t.Context(), 10*time.Millisecond); err == nil ||
		!strings.Contains(err.Error(), "the driver has not moved") {
		t.Errorf("got %v, want a complaint about the driver", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := answerQueries(ctx, a)
	if err := a.alive(t.Context(), time.Minute); err != nil {
		t.Errorf("driven: %v", err)
	}
	stop()
	<-done
}

// The manager hears of each status once, and is not waited for.
func TestServiceIsNotWaitedFor(t *testing.T) {
	a, _ := newAgent(t)
	said := make(chan string)
	a.opt.Notify = func(s string) { said <- s }
	a.service = a.newService()
	for range serviceDepth {
		if !a.service.tell("x") {
			t.Fatal("no room in an empty queue")
		}
	}
	if a.service.tell("one more") {
		t.Error("the queue has no bound")
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.runService(ctx)
	}()
	for range serviceDepth {
		if got := <-said; got != "x" {
			t.Errorf("got %q, want x", got)
		}
	}
	stop()
	select {
	case <-a.service.told:
		t.Error("told is closed before the manager has heard that the agent stops")
	case got := <-said:
		if got != notifyStopping {
			t.Errorf("got %q at the end, want %q", got, notifyStopping)
		}
	}
	<-a.service.told // which the handover waits for
	<-done
}

func TestReloadingHasTheTime(t *testing.T) {
	text, usec, ok := strings.Cut(reloading(), "MONOTONIC_USEC=")
	expect.Equal(t, ok, true, "ok")
	expect.Equal(t, text, "RELOADING=1\n", "text")
	if len(usec) < 7 {
		t.Errorf("usec has %v elements, want at least 7", len(usec))
	}
}

// Who comes late gets what is kept of the past, and nothing twice.
func TestPastEvents(t *testing.T) {
	var h hub
	begin := time.Now()
	for i := range pastDepth + 3 {
		h.publish(control.Event{Time: begin.Add(time.Duration(i) * time.Second), Text: strconv.Itoa(i)})
	}
	s := h.subscribe(begin.Add(time.Duration(pastDepth)*time.Second), false)
	h.publish(control.Event{Time: begin.Add(time.Hour), Text: "live"})
	for _, want := range []string{"1025", "1026", "live"} {
		if e := <-s.ch; e.Text != want {
			t.Errorf("got %q, want %q", e.Text, want)
		}
	}
	if n := len(h.subscribe(begin.Add(-time.Hour), false).ch); n != pastDepth {
		t.Errorf("%d past events, want all %d that are kept", n, pastDepth)
	}
	if n := len(h.subscribe(time.Time{}, false).ch); n != 0 {
		t.Errorf("%d past events for who asks for none", n)
	}
}
