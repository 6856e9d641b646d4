package main

import (
	"context"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Both sides over loopback: so many answers as fit, each of the whole size, and
// the end of the one side is the end of the other.
func TestLatencies(t *testing.T) {
	for _, tt := range []struct {
		name string
		addr string
		m    message
		pace time.Duration
		d    time.Duration
		n    int // at least
	}{
		{"small", "127.0.0.1", small, pacedNot, 20 * time.Millisecond, 5},
		{"large", "127.0.0.1", large, pacedNot, 20 * time.Millisecond, 5},
		{"IPv6", "::1", small, pacedNot, 20 * time.Millisecond, 5},
		{"however short", "127.0.0.1", small, time.Millisecond, 0, 5},
	} {
		a := netip.MustParseAddr(tt.addr)
		ln, err := listen(a)
		if err != nil {
			t.Skip(err)
		}
		served := make(chan error, 1)
		go func() { served <- respond(ln, tt.m) }()
		us, err := request(context.Background(), a, ln, tt.m, tt.pace, tt.d)
		if err != nil || len(us) < tt.n {
			t.Errorf("%s: %d answers, want at least %d (%v)", tt.name, len(us), tt.n, err)
		}
		for _, v := range us {
			if v <= 0 {
				t.Errorf("%s: an answer came after %v µs", tt.name, v)
			}
		}
		if err := <-served; err != nil {
			t.Errorf("%s: the other side: %v", tt.name, err)
		}
	}
}

// Go's runtime interrupts threads by signals when it likes: an accept goes on all the same.
func TestLatenciesInterrupted(t *testing.T) {
	a := netip.MustParseAddr("127.0.0.1")
	ln, err := listen(a)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ln)
	served, tid := make(chan error, 1), make(chan int, 1)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with this goroutine
		tid <- unix.Gettid()
		served <- respond(ln, small)
	}()
	accepting := <-tid
	for range 20 {
		time.Sleep(time.Millisecond)
		if err := unix.Tgkill(unix.Getpid(), accepting, unix.SIGURG); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := request(t.Context(), a, ln, small, pacedNot, 0); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestMessageName(t *testing.T) {
	for _, tt := range []struct {
		m    message
		pace time.Duration
		want string
	}{
		{small, pacedNot, "64 octets, p50"},
		{small, paced, "64 octets every 20 ms, p50"},
		{large, pacedNot, "16 KiB, p50"},
	} {
		if got := tt.m.name(tt.pace, "p50"); got != tt.want {
			t.Errorf("%d, %v: %q, want %q", tt.m, tt.pace, got, tt.want)
		}
	}
}
