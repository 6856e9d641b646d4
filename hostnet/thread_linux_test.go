package hostnet

import (
	"errors"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// The first thread is never the one, even where it is the one at hand; what f does
// to its namespace is seen by nobody else.
func TestOwnThread(t *testing.T) {
	want := errors.New("what f says")
	// The first thread's, and this one's: they differ if a test before was on the first.
	names := [2]string{"/proc/self/ns/net", "/proc/thread-self/ns/net"}
	var before [2]string
	for i, name := range names {
		var err error
		if before[i], err = os.Readlink(name); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			err := OwnThread(func() error {
				if unix.Gettid() == unix.Getpid() {
					t.Error("on the first thread")
				}
				if err := unix.Unshare(unix.CLONE_NEWNET); err != nil && err != unix.EPERM {
					t.Error(err)
				}
				return want
			})
			if err != want {
				t.Errorf("it said %v", err)
			}
		})
	}
	wg.Wait()
	for i, name := range names {
		if after, err := os.Readlink(name); after != before[i] || err != nil {
			t.Errorf("%s is %s (%v), was %s", name, after, err, before[i])
		}
	}
}
