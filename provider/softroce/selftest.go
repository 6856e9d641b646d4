package softroce

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// ErrLoopback says that the loopback device carries nothing, so that an offload was
// asked for but not tried with packets.
var ErrLoopback = errors.New("the loopback device is down, or a firewall closes it")

// TestOffloads sends packets with UDP_SEGMENT and with UDP_GRO on the loopback device of
// the caller's namespace, because a kernel may take the socket option and still do it
// wrong. A nil error means that the offload works. ErrLoopback means that the kernel takes
// the option, but that no packets could be sent to try it.
func TestOffloads() (gso, gro error) { return testOffload(true, false), testOffload(false, true) }

// testOffload sends a few datagrams, as one batch if gso is true or else one by one, and
// receives them, joined by the kernel if gro is true.
func testOffload(gso, gro bool) error {
	const segment, last = 1000, 500
	data := make([]byte, 2*segment+last)
	for i := range data {
		data[i] = byte(i * 7)
	}
	in, err := loopSocket()
	if err != nil {
		return err
	}
	defer unix.Close(in)
	out, err := loopSocket()
	if err != nil {
		return err
	}
	defer unix.Close(out)
	if gro {
		err = setAll(in, []sockopt{{unix.IPPROTO_UDP, optUDPGRO, 1, "UDP_GRO", false}})
	}
	if gso && err == nil {
		err = setAll(out, []sockopt{{unix.IPPROTO_UDP, optUDPSegment, segment, "UDP_SEGMENT", false}})
	}
	if err != nil {
		return err
	}
	any := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if err := unix.Bind(in, any); err != nil {
		return ErrLoopback
	}
	to, err := unix.Getsockname(in)
	if err != nil {
		return fmt.Errorf("read socket name: %w", err)
	}
	if gso {
		err = unix.Sendto(out, data, 0, to)
	} else {
		for rest := data; len(rest) > 0 && err == nil; rest = rest[min(segment, len(rest)):] {
			err = unix.Sendto(out, rest[:min(segment, len(rest))], 0, to)
		}
	}
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EADDRNOTAVAIL):
		return ErrLoopback
	case err != nil:
		return fmt.Errorf("send: %w", err)
	}
	var got []byte
	buf, ctl := make([]byte, 1<<16), make([]byte, recvCtlLen)
	for len(got) < len(data) {
		n, ctlLen, _, _, err := unix.Recvmsg(in, buf, ctl, 0)
		if err == unix.EAGAIN && len(got) == 0 && (gso || gro) && testOffload(false, false) != nil {
			return ErrLoopback // nothing passes without the offload either
		}
		if err != nil {
			return fmt.Errorf("%d of %d octets came: %w", len(got), len(data), err)
		}
		var md meta
		if md.read(ctl[:ctlLen]); n > segment && md.segment != segment {
			return fmt.Errorf("%d octets came in segments of %d, not of %d", n, md.segment, segment)
		}
		got = append(got, buf[:n]...)
	}
	if !bytes.Equal(got, data) {
		return errors.New("what came is not what was sent")
	}
	return nil
}

// loopSocket opens a UDP socket that waits for a second at most.
func loopSocket() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
	if err != nil {
		return -1, fmt.Errorf("open UDP socket: %w", err)
	}
	second := unix.NsecToTimeval(int64(time.Second))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &second); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("set SO_RCVTIMEO: %w", err)
	}
	return fd, nil
}
