package hostnet

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// OwnThread runs f on an OS thread that ends with f. So no other goroutine gets into a network
// namespace that f enters. It never uses the process's first thread: that does not end, and
// /proc/PID/net and nsenter(1) show its namespace.
func OwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not given back: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			err := OwnThread(f) // elsewhere, because this thread is locked
			runtime.UnlockOSThread()
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// InNamespace runs f in network namespace ns: on this thread if it is in ns, else on a thread of
// its own.
func InNamespace(ns netns.NsHandle, f func() error) error {
	here, err := netns.Get()
	if err != nil {
		return fmt.Errorf("find network namespace: %w", err)
	}
	same := here.Equal(ns)
	here.Close()
	if same {
		return f()
	}
	return OwnThread(func() error {
		if err := netns.Set(ns); err != nil {
			return fmt.Errorf("%w: %w", ErrEnter, err)
		}
		return f()
	})
}
