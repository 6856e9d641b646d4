package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/membership"
)

// A File is a list of members in a file ([membership.ParseList]), read again when it or
// its directory changes.
type File struct {
	Path string
	// Every is the interval at which the file is read although no change was seen: on a network file
	// system, changes by other hosts are not seen. Zero means 30 s.
	Every time.Duration
	// Settle is the wait from a change until the file is read, because several changes come together.
	// Zero means 50 ms.
	Settle time.Duration
}

// maxFile bounds the file, in octets.
const maxFile = 4 << 20

// Name is the source as a URL.
func (f *File) Name() string { return "file://" + f.Path }

// Run reads the file whenever it changes, until ctx ends.
func (f *File) Run(ctx context.Context, tell func(membership.Event)) {
	every, settle := cmp.Or(f.Every, 30*time.Second), cmp.Or(f.Settle, 50*time.Millisecond)
	changed, stop := watch(filepath.Dir(f.Path))
	defer stop()
	for {
		tell(f.Read())
		select {
		case <-changed:
			pause(ctx, settle)
		case <-time.After(jittered(every)):
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// Read reads the file once.
func (f *File) Read() membership.Event {
	// O_NONBLOCK, because opening a pipe would wait until somebody writes to it.
	in, err := os.OpenFile(f.Path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return membership.Failed{Err: err}
	}
	defer in.Close()
	if st, err := in.Stat(); err != nil || !st.Mode().IsRegular() {
		return membership.Failed{Err: errors.Join(err, fmt.Errorf("%s: not a regular file", f.Path))}
	}
	b, err := io.ReadAll(io.LimitReader(in, maxFile+1))
	if err != nil {
		return membership.Failed{Err: err}
	}
	list, err := membership.ParseList(f.Path, b)
	if err != nil {
		return membership.Failed{Err: fmt.Errorf("%s: %w", f.Path, err)}
	}
	return membership.Listed{Members: list}
}

// watch returns a channel that gets a token after changes in a directory, and a function that ends it. To
// watch the file alone is not enough: editors and configuration managers put another file in its place.
// Without inotify the channel gets nothing.
func watch(dir string) (<-chan struct{}, func()) {
	changed := make(chan struct{}, 1)
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return changed, func() {}
	}
	const what = unix.IN_CLOSE_WRITE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_CREATE | unix.IN_DELETE |
		unix.IN_ATTRIB
	if _, err := unix.InotifyAddWatch(fd, dir, what); err != nil {
		unix.Close(fd)
		return changed, func() {}
	}
	f := os.NewFile(uintptr(fd), "inotify")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	return changed, func() {
		f.Close() // ends the read
		<-ended
	}
}
