package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
)

// A message is a size of requests and of their responses in octets.
type message int

const (
	small message = 64
	large message = 16 << 10
)

// name is the variant of a [Key].
func (m message) name(pace time.Duration, quantile string) string {
	size := fmt.Sprintf("%d octets", int(m))
	if m >= 1<<10 {
		size = fmt.Sprintf("%d KiB", int(m)>>10)
	}
	if pace != pacedNot {
		size += fmt.Sprintf(" every %d ms", pace.Milliseconds())
	}
	return size + ", " + quantile
}

// The time from one request to the next. With pacedNot, each request is sent right after the
// response to the one before. With paced, all threads sleep before each request.
const (
	pacedNot = time.Duration(0)
	paced    = 20 * time.Millisecond
)

// latencies sends requests over one TCP connection for the time d and returns how
// long each response took, in µs. Threads block in the kernel on both sides:
// nothing of Go's scheduler lies between them and the network.
func latencies(ctx context.Context, m *mesh, size message, pace, d time.Duration) (out []float64, err error) {
	to := m.hosts[meshPeer]
	a := m.addrs[meshPeer]
	ln, err := lab.In(to, func() (int, error) { return listen(a) })
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	served := make(chan error, 1)
	go func() {
		served <- to.Do(func() error {
			defer unix.Close(ln)
			return respond(ln, size)
		})
	}()
	out, err = lab.In(m.hosts[meshSender], func() ([]float64, error) { return request(ctx, a, ln, size, pace, d) })
	if err == nil || errors.Is(err, errConnected) {
		return out, errors.Join(err, <-served)
	}
	return nil, err // the accept times out by itself
}

// errConnected marks an error after the connection was made. [respond] then sees the end of
// the stream and returns.
var errConnected = errors.New("the connection ended")

// patience is how long one call may block.
var patience = unix.Timeval{Sec: 5}

func tcpSocket(a netip.Addr) (int, error) {
	family := unix.AF_INET6
	if a.Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &patience))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func listen(a netip.Addr) (int, error) {
	fd, err := tcpSocket(a)
	if err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, lab.Sockaddr(a)); err == nil {
		err = unix.Listen(fd, 1)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// again makes a system call that may block, and makes it again as long as a signal interrupts it: because of the
// time-outs of the socket the kernel does not restart it by itself.
func again(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// respond accepts one connection and answers each message with one of the same size,
// until the other side closes the connection.
func respond(ln int, m message) error {
	fd := -1
	err := again(func() (err error) {
		fd, _, err = unix.Accept4(ln, unix.SOCK_CLOEXEC)
		return err
	})
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	conn := os.NewFile(uintptr(fd), "connection") // it blocks, as the socket does
	defer conn.Close()
	buf := make([]byte, m)
	for {
		if _, err := io.ReadFull(conn, buf); err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		if _, err := conn.Write(buf); err != nil {
			return err
		}
	}
}

// request connects to ln, a listening socket on the address a. It sends requests until d is over, but at least ten,
// and returns how long each response took, in µs. It leaves out the first five.
func request(ctx context.Context, a netip.Addr, ln int, m message, pace, d time.Duration) (out []float64, err error) {
	to, err := unix.Getsockname(ln)
	if err != nil {
		return nil, err
	}
	fd, err := tcpSocket(a)
	if err != nil {
		return nil, err
	}
	conn := os.NewFile(uintptr(fd), "connection")
	defer conn.Close()
	// The kernel takes a second connect of a blocking socket for the first going on.
	if err := again(func() error { return unix.Connect(fd, to) }); err != nil {
		return nil, fmt.Errorf("connect to %v: %w", a, err)
	}
	buf := make([]byte, m)
	const warm = 5
	next := time.Now()
	for end := next.Add(d); time.Now().Before(end) || len(out) < 2*warm; {
		if err := ctx.Err(); err != nil {
			return nil, errors.Join(errConnected, err)
		}
		if pace > 0 {
			next = next.Add(pace)
			time.Sleep(time.Until(next))
		}
		start := time.Now()
		if _, err := conn.Write(buf); err != nil {
			return nil, errors.Join(errConnected, err)
		}
		if _, err := io.ReadFull(conn, buf); err != nil {
			return nil, errors.Join(errConnected, err)
		}
		out = append(out, float64(time.Since(start).Nanoseconds())/1e3)
	}
	return out[warm:], nil
}
