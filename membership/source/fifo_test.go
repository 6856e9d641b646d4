package source

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/membership"
)

// A list in something that is no file, as a pipe that nobody writes to, is a failure: it
// is not waited for, which would hold up the end of the agent.
func TestListInAPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "members")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	evs, done := make(chan membership.Event, 16), make(chan struct{})
	go func() {
		defer close(done)
		(&File{Path: path}).Run(ctx, func(ev membership.Event) { evs <- ev })
	}()
	select {
	case ev := <-evs:
		if got, want := text(ev), "failed: "+path+": not a regular file"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for a writer")
	}
	stop()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("it does not end")
		fd, _ := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK, 0) // let it go
		unix.Close(fd)
		<-done
	}
}
