package tun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/wire/ip"
)

// errNotTried says that the trial could not be made, which says nothing about what
// would have been tried.
var errNotTried = errors.New("a network namespace for the test cannot be made")

// trialWait bounds each wait of a trial.
const trialWait = time.Second

// Addresses of the trial (RFC 5737), port 9 on both.
var trialOurs, trialTheirs = [4]byte{192, 0, 2, 1}, [4]byte{192, 0, 2, 2}

// tryChecksums sees whether checksums at a TUN can be ours, in a network namespace
// that nobody else sees: a packet from the kernel must get the right one, the
// kernel must believe us when we call a packet right, and drop one that is wrong.
func tryChecksums() error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not given back: the thread ends, and the namespace with it
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("%w: %w", errNotTried, err)
			return
		}
		done <- trial()
	}()
	return <-done
}

func trial() error {
	t, err := Open(Options{Name: "trial", trial: func() error { return nil }})
	if err != nil {
		return err
	}
	defer t.Close()
	if !t.csum.on || t.csum.why != "" {
		return errors.New(t.csum.why)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(s)
	if err := t.up(s); err != nil {
		return err
	}
	wait := unix.NsecToTimeval(int64(trialWait))
	if err := errors.Join(unix.Bind(s, &unix.SockaddrInet4{Port: 9, Addr: trialOurs}), unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)); err != nil {
		return fmt.Errorf("bind socket: %w", err)
	}
	if err := t.tryWrite(s); err != nil {
		return err
	}
	return t.tryRead(s)
}

// up gives the interface its address and sets it up. s is any socket.
func (t *File) up(s int) error {
	req, err := unix.NewIfreq(t.name)
	if err != nil {
		return err
	}
	if err := req.SetInet4Addr(trialOurs[:]); err != nil {
		return err
	}
	if err := unix.IoctlIfreq(s, unix.SIOCSIFADDR, req); err != nil {
		return fmt.Errorf("set address: %w", err)
	}
	if err := req.SetInet4Addr(trialTheirs[:]); err != nil {
		return err
	}
	if err := unix.IoctlIfreq(s, unix.SIOCSIFDSTADDR, req); err != nil {
		return fmt.Errorf("set the other address: %w", err)
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// tryWrite gives the kernel a packet whose checksum is wrong and one whose is
// right: only the second may arrive.
func (t *File) tryWrite(s int) error {
	good := trialPacket(checkFrom)
	bad := bytes.Clone(good)
	bad[28] ^= 1
	if n, err := t.Write([][]byte{bad, good}); n != 2 {
		return fmt.Errorf("write: %w", err)
	}
	got := make([]byte, len(good))
	n, _, err := unix.Recvfrom(s, got, 0)
	switch {
	case err != nil:
		return fmt.Errorf("a packet that was called right did not arrive: %w", err)
	case !bytes.Equal(got[:n], good[28:]):
		return errors.New("a packet with a wrong checksum arrived")
	case t.csum.verified.Load() != 1:
		return errors.New("the packet was not looked at")
	}
	// One that is wrong, and called right: it arrives if the kernel takes our word.
	var h [vnetLen]byte
	seg, _ := find(bad)
	seg.mark(&h, bad)
	if e := t.writeHeaded(&h, bad); e != 0 {
		return fmt.Errorf("write: %w", e)
	}
	n, _, err = unix.Recvfrom(s, got, 0)
	switch {
	case err != nil:
		return fmt.Errorf("the kernel looks at checksums all the same: %w", err)
	case !bytes.Equal(got[:n], bad[28:]):
		return errors.New("another packet arrived")
	}
	return nil
}

// tryRead has the kernel send a packet: it must come with the right checksum.
func (t *File) tryRead(s int) error {
	payload := trialPacket(checkFrom)
	if err := unix.Sendto(s, payload, 0, &unix.SockaddrInet4{Port: 9, Addr: trialTheirs}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	bufs, sizes := [][]byte{make([]byte, 2048)}, make([]int, 1)
	for end := time.Now().Add(trialWait); time.Now().Before(end); {
		n, err := t.TryRead(bufs, sizes)
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		if n == 0 {
			fds := [1]unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLIN}}
			_, _ = unix.Poll(fds[:], 10)
			continue
		}
		p := bufs[0][:sizes[0]]
		if len(p) != 28+len(payload) || p[0] != 0x45 || !bytes.Equal(p[28:], payload) {
			continue // the kernel's own, such as MLD reports
		}
		if valid, ok := verify(p); !valid || !ok {
			return errors.New("a packet came with a wrong checksum")
		}
		return nil
	}
	return errors.New("no packet came")
}

// trialPacket is a UDP packet to us with n octets of payload and a checksum.
func trialPacket(n int) []byte {
	b := make([]byte, 28+n)
	copy(b, []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0})
	copy(b[12:], trialTheirs[:])
	copy(b[16:], trialOurs[:])
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[10:], ip.Checksum(b[:20]))
	udp := b[20:]
	binary.BigEndian.PutUint16(udp, 9)
	binary.BigEndian.PutUint16(udp[2:], 9)
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	for i := range n {
		udp[8+i] = byte(i)
	}
	sum := ip.Sum(17+uint32(len(udp)), b[12:20])
	binary.BigEndian.PutUint16(udp[6:], ^uint16(ip.Sum(sum, udp)))
	return b
}
