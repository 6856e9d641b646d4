package agent

import (
	"context"
	"strings"
	"testing"
	"time"
)

// Who does not drive the agent is found out; who does is alive.
func TestAliveNamesTheDriver(t *testing.T) {
	a, _ := newAgent(t) // nobody drives it
	if err := a.alive(t.Context(), 10*time.Millisecond); err == nil || !strings.Contains(err.Error(), "the driver has not moved") {
		t.Errorf("got %v, want a complaint about the driver", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case q := <-a.queries:
				q()
			case <-ctx.Done():
				return
			}
		}
	}()
	if err := a.alive(t.Context(), time.Second); err != nil {
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
	if got := <-said; got != notifyStopping {
		t.Errorf("got %q at the end, want %q", got, notifyStopping)
	}
	<-done
}

func TestReloadingHasTheTime(t *testing.T) {
	text, usec, ok := strings.Cut(reloading(), "MONOTONIC_USEC=")
	if !ok || text != "RELOADING=1\n" || len(usec) < 7 {
		t.Errorf("got %q, want RELOADING=1 and the monotonic time in microseconds", reloading())
	}
}
