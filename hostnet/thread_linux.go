package hostnet

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// OwnThread runs f on an OS thread that ends with f, so that the network namespace
// f puts it into is nobody else's. It is never the process's first thread, which
// does not end, and which /proc/PID/net and nsenter(1) go by.
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

// InNamespace runs f in network namespace ns: on this thread if it is in it, else on
// one of its own.
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
