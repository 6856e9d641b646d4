package hostnet

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// eventBatch bounds the datagrams that the watch reads at a time. Then the reader of Events gets their
// Rerouted events.
const eventBatch = 64

// maxEvent is a size in octets that no notification of the kernel exceeds.
const maxEvent = 1 << 17

// A subscription receives the kernel's notifications. It reads all into one buffer, because a
// router's full table causes a million of them.
type subscription struct {
	file *os.File
	raw  syscall.RawConn
	buf  []byte
}

// subscribe opens a netlink socket in the network namespace of the calling thread and joins groups. It reads
// datagrams of at most that many octets.
func subscribe(octets int, groups ...int) (*subscription, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("subscribe to netlink: %w", err)
	}
	s := &subscription{file: os.NewFile(uintptr(fd), "netlink"), buf: make([]byte, octets)}
	// The kernel takes a socket without an address for one of its own.
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		s.raw, err = s.file.SyscallConn()
	}
	if err == nil {
		err = s.join(groups...)
	}
	if err != nil {
		s.file.Close()
		return nil, fmt.Errorf("subscribe to netlink: %w", err)
	}
	return s, nil
}

// join joins netlink groups.
func (s *subscription) join(groups ...int) (err error) {
	failed := s.raw.Control(func(fd uintptr) {
		for _, g := range groups {
			err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g))
		}
	})
	return errors.Join(failed, err)
}

// setBuffer sets the size of the receive buffer, past the system's limit if that is allowed.
// Errors are ignored, because overflow is handled.
func (s *subscription) setBuffer(octets int) {
	s.raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, octets) != nil {
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, octets)
		}
	})
}

func (s *subscription) close() error { return s.file.Close() }

// receive waits for notifications, at most wait if that is not zero. It calls f for each datagram
// that is there, for at most limit of them. The datagram is valid until f returns. The error is
// EAGAIN after wait, else the system's.
func (s *subscription) receive(wait time.Duration, limit int, f func(b []byte)) error {
	var deadline time.Time
	if wait != 0 {
		deadline = time.Now().Add(wait)
	}
	if err := s.file.SetReadDeadline(deadline); err != nil {
		return err
	}
	var failed error
	err := s.raw.Read(func(fd uintptr) (done bool) {
		for range limit {
			n, err := retry(func() (int, error) { return unix.Read(int(fd), s.buf) })
			if err == unix.EAGAIN {
				return done
			}
			if done = true; err != nil {
				failed = err
				return done
			}
			f(s.buf[:n])
		}
		return done
	})
	if failed != nil {
		return failed
	}
	if os.IsTimeout(err) {
		return unix.EAGAIN
	}
	return err
}
