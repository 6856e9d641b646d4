package main

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// untilEOF reads f until it ends. Go's poller waits for a pipe, of which f becomes non-blocking, and no
// thread does: ADR 0013 says what a thread that waits in a system call can do to the whole process.
func untilEOF(f *os.File) {
	if fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err == nil {
		_ = unix.SetNonblock(fd, true) // without it a thread waits
		dup := os.NewFile(uintptr(fd), f.Name())
		defer dup.Close()
		f = dup
	}
	_, _ = io.Copy(io.Discard, f) // the input is as good as over if it cannot be read
}
