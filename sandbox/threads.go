package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A thread is what the kernel says of one thread of the process.
type thread struct {
	id         string
	uid        int
	caps       uint64 // permitted
	noNewPrivs int
	seccomp    int // 2: it has a filter
}

// readThreads reads what all threads of the process may do.
func readThreads() ([]thread, error) {
	files, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		return nil, err
	}
	var out []thread
	for _, path := range files {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		if err != nil {
			return nil, err
		}
		out = append(out, parseThread(filepath.Base(filepath.Dir(path)), string(b)))
	}
	if len(out) == 0 {
		return nil, errors.New("/proc shows no threads of this process")
	}
	return out, nil
}

func parseThread(id, status string) thread {
	t := thread{id: id, uid: -1}
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		words := append(strings.Fields(value), "", "") // two at least
		switch key {
		case "Uid":
			t.uid = number(words[1]) // effective
		case "CapPrm":
			t.caps, _ = strconv.ParseUint(words[0], 16, 64)
		case "NoNewPrivs":
			t.noNewPrivs = max(0, number(words[0]))
		case "Seccomp":
			t.seccomp = max(0, number(words[0]))
		}
	}
	return t
}

// number reads a number of /proc; -1 if it is none.
func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return -1
	}
	return n
}

// verify returns an error if a thread is not in the sandbox.
func (o *Options) verify(threads []thread, filtered bool) error {
	for _, t := range threads {
		if o.User != nil && t.uid != o.User.UID {
			return fmt.Errorf("thread %s is user %d still", t.id, t.uid)
		}
		if o.became && t.caps != o.keep() {
			return fmt.Errorf("thread %s has capabilities %#x, want %#x", t.id, t.caps, o.keep())
		}
		if t.noNewPrivs != 1 {
			return fmt.Errorf("thread %s has not got no_new_privs", t.id)
		}
		if filtered && t.seccomp != unix.SECCOMP_MODE_FILTER {
			return fmt.Errorf("thread %s has no filter of system calls", t.id)
		}
	}
	return nil
}

// Raise makes every permitted capability of this process effective. If the capabilities come from the
// program's file, as in a container image, they are only permitted at first.
func Raise() error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if data[0].Effective == data[0].Permitted && data[1].Effective == data[1].Permitted {
		return nil
	}
	return setCapabilities(uint64(data[0].Permitted) | uint64(data[1].Permitted)<<32)
}

// setCapabilities gives every thread exactly caps, permitted and effective.
func setCapabilities(caps uint64) error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(caps), Permitted: uint32(caps)},
		{Effective: uint32(caps >> 32), Permitted: uint32(caps >> 32)},
	}
	err := allThreads(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&data[0])))
	if err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	return nil
}
