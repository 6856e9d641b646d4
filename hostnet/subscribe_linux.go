package hostnet

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// eventBatch bounds the datagrams that one receive reads. Then the reader of Events gets their
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

// subscribe joins netlink groups in the network namespace of the calling thread.
func subscribe(groups ...uint) (*subscription, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("subscribe to netlink: %w", err)
	}
	addr := unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	for _, g := range groups {
		addr.Groups |= 1 << (g - 1)
	}
	if err := unix.Bind(fd, &addr); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("subscribe to netlink: %w", err)
	}
	s := &subscription{file: os.NewFile(uintptr(fd), "netlink"), buf: make([]byte, maxEvent)}
	if s.raw, err = s.file.SyscallConn(); err != nil {
		s.file.Close()
		return nil, fmt.Errorf("subscribe to netlink: %w", err)
	}
	s.setBuffer(1 << 20)
	return s, nil
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

// receive waits for notifications, at most wait if that is not zero. It calls f for each message
// that is there, of at most eventBatch datagrams. The message is valid until f returns. The error
// is EAGAIN after wait, else the system's.
func (s *subscription) receive(wait time.Duration, f func(*message)) error {
	var deadline time.Time
	if wait != 0 {
		deadline = time.Now().Add(wait)
	}
	if err := s.file.SetReadDeadline(deadline); err != nil {
		return err
	}
	var failed error
	err := s.raw.Read(func(fd uintptr) (done bool) {
		for range eventBatch {
			n, err := retry(func() (int, error) { return unix.Read(int(fd), s.buf) })
			if err == unix.EAGAIN {
				return done
			}
			done = true
			if err != nil {
				failed = err
				return done
			}
			for b := s.buf[:n]; ; {
				m, rest, ok := nextMessage(b)
				if !ok {
					break
				}
				f(&m)
				b = rest
			}
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
