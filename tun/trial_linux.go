package tun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/hostnet"
	"ipoibcm/wire/ip"
)

// errNotTried says that the trial could not be made. It says nothing about what the kernel can do.
var errNotTried = errors.New("a network namespace for the test cannot be made")

// errSilence says that a packet did not come in time. On a busy machine that says little, and the
// trial is repeated.
var errSilence = errors.New("no packet came")

const (
	// trialVersion changes whenever the trial changes, because a kernel that has passed another
	// version of the trial may not pass this one.
	trialVersion = 1
	// trialWait bounds each wait of a trial.
	trialWait = time.Second
	// trialAttempts is how often the trial is made at most.
	trialAttempts = 3
)

// Addresses of the trial (RFC 5737), port 9 on both.
var trialOurs, trialTheirs = [4]byte{192, 0, 2, 1}, [4]byte{192, 0, 2, 2}

// tryHeaders tests whether we can compute checksums at a TUN, and whether TCP and UDP come and go
// in GSO packets. It uses a network namespace that nobody else sees.
func tryHeaders() (checksums, segments, datagrams error) {
	_ = hostnet.OwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil { // the namespace ends with the thread
			checksums = fmt.Errorf("%w: %w", errNotTried, err)
			segments, datagrams = checksums, checksums
			return nil
		}
		for range trialAttempts {
			if checksums, segments, datagrams = trial(); !slow(checksums) && !slow(segments) && !slow(datagrams) {
				break
			}
		}
		return nil
	})
	return checksums, segments, datagrams
}

// trialPause is called before the trial answers the kernel's SYN-ACK. Tests make it slow.
var trialPause = func() {}

// slow reports whether err says that something did not come in time.
func slow(err error) bool { return errors.Is(err, errSilence) || errors.Is(err, unix.EAGAIN) }

func trial() (checksums, segments, datagrams error) {
	t, err := Open(Options{Name: "trial", trial: func() (error, error, error) { return nil, nil, nil }})
	if err != nil {
		return err, err, err
	}
	defer t.Close()
	if !t.csum.on || t.csum.why != "" {
		return errors.New(t.csum.why), nil, nil
	}
	if err := t.tryChecksums(); err != nil {
		return err, nil, nil
	}
	if datagrams = errors.New(t.uso.why); t.uso.on.Load() {
		datagrams = t.tryDatagrams()
	}
	if segments = errors.New(t.tso.why); t.tso.on.Load() {
		segments = t.trySegments()
	}
	return nil, segments, datagrams
}

// tryChecksums tests that a packet from the kernel gets the right checksum, that the kernel trusts
// us when we call a packet right, and that it drops a packet with a wrong checksum.
func (t *File) tryChecksums() error {
	if err := t.withIfreq(setUp); err != nil {
		return err
	}
	s, err := trialSocket(unix.SOCK_DGRAM, "bind socket")
	if err != nil {
		return err
	}
	defer unix.Close(s)
	if err := t.tryWrite(s); err != nil {
		return err
	}
	return t.tryRead(s)
}

// setUp gives the interface of req its address and sets it up.
func setUp(s int, req *unix.Ifreq) error {
	for _, a := range []struct {
		what string
		addr [4]byte
		set  uint
	}{{"set address", trialOurs, unix.SIOCSIFADDR}, {"set the other address", trialTheirs, unix.SIOCSIFDSTADDR}} {
		if err := req.SetInet4Addr(a.addr[:]); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(s, a.set, req); err != nil {
			return fmt.Errorf("%s: %w", a.what, err)
		}
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// trialSocket opens a socket of that type, which waits for trialWait at most, on our address. what
// it is bound for is for people.
func trialSocket(typ int, what string) (int, error) {
	s, err := unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	wait := unix.NsecToTimeval(int64(trialWait))
	if err := errors.Join(unix.Bind(s, &unix.SockaddrInet4{Port: 9, Addr: trialOurs}),
		unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)); err != nil {
		unix.Close(s)
		return -1, fmt.Errorf("%s: %w", what, err)
	}
	return s, nil
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
	// A packet that is wrong and called right arrives if the kernel trusts us.
	var h [vnetLen]byte
	seg, _ := find(bad)
	seg.mark(&h, bad)
	if e := t.writev([]unix.Iovec{vec(h[:]), vec(bad)}); e != 0 {
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

// tryRead has the kernel send a packet, which must come with the right checksum.
func (t *File) tryRead(s int) error {
	payload := trialPacket(checkFrom)
	if err := unix.Sendto(s, payload, 0, &unix.SockaddrInet4{Port: 9, Addr: trialTheirs}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return t.each(func(p []byte) (bool, error) {
		if len(p) != 28+len(payload) || !bytes.Equal(p[28:], payload) {
			return false, nil
		}
		if valid, ok := verify(p); !valid || !ok {
			return false, errors.New("a packet came with a wrong checksum")
		}
		return true, nil
	})
}

// each gives f the IPv4 packets without options that the kernel sends, until f returns done or an
// error. Other packets are the kernel's own, such as MLD reports. If f is not done within
// trialWait, the error is errSilence.
func (t *File) each(f func(p []byte) (done bool, err error)) error {
	bufs, sizes := make([][]byte, 16), make([]int, 16)
	for i := range bufs {
		bufs[i] = make([]byte, maxTotal+1)
	}
	for end, last := time.Now().Add(trialWait), false; !last; {
		last = time.Now().After(end) // one more look then
		n, err := t.TryRead(bufs, sizes)
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		for i := range n {
			if p := bufs[i][:sizes[i]]; p[0] == 0x45 {
				if done, err := f(p); done || err != nil {
					return err
				}
			}
		}
		if n == 0 {
			fds := [1]unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLIN}}
			_, _ = unix.Poll(fds[:], 10)
		}
	}
	return errSilence
}

// A trialPeer is the other end of a TCP connection. It knows enough TCP for a connection that
// loses nothing and is over after 4 KB.
type trialPeer struct{ seq, ack uint32 }

// packet returns the next packet of the peer.
func (e *trialPeer) packet(flags byte, payload []byte) []byte {
	b := make([]byte, 40+len(payload))
	ipHeader(b, protoTCP)
	t := b[20:]
	binary.BigEndian.PutUint32(t[tcpSeq:], e.seq)
	binary.BigEndian.PutUint32(t[8:], e.ack)
	t[tcpOffset], t[tcpFlags], t[14] = 5<<4, flags, 0xff
	copy(t[20:], payload)
	seal(b, tcpSum)
	e.seq += uint32(len(payload))
	return b
}

// trySegments has a TCP connection carry 4000 octets each way. The kernel gets them as one GSO
// packet. In the other direction, the GSO packets that the kernel gives must split into the right
// packets.
func (t *File) trySegments() error {
	l, err := trialSocket(unix.SOCK_STREAM, "listen")
	if err != nil {
		return err
	}
	defer unix.Close(l)
	if err := unix.Listen(l, 1); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	// BBR sends single packets to a peer that is slow to answer, as we are on a busy machine. Every
	// kernel has reno.
	if err := unix.SetsockoptString(l, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno"); err != nil {
		return fmt.Errorf("choose reno: %w", err)
	}
	peer := trialPeer{seq: 1<<32 - 1} // SYN has one, and the first octet is number 0
	if _, err := t.Write([][]byte{peer.packet(tcpSYN, nil)}); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	peer.seq++
	if err := t.each(func(p []byte) (bool, error) {
		if p[9] != protoTCP || len(p) < 40 || p[20+tcpFlags] != tcpSYN|tcpACK {
			return false, nil
		}
		peer.ack = binary.BigEndian.Uint32(p[20+tcpSeq:]) + 1
		return true, nil
	}); err != nil {
		return fmt.Errorf("wait for a connection: %w", err)
	}
	trialPause()
	data := make([]byte, 4000)
	for i := range data {
		data[i] = byte(i >> 4)
	}
	s, err := t.tryMerged(l, &peer, data)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	return t.trySplit(s, &peer, data)
}

// tryMerged sends data to the kernel, and returns the socket at which it arrived. l is the
// listening socket.
func (t *File) tryMerged(l int, peer *trialPeer, data []byte) (s int, err error) {
	packets := [][]byte{peer.packet(tcpACK, nil)}
	for i := 0; i < len(data); i += 1000 {
		packets = append(packets, peer.packet(tcpACK, data[i:i+1000]))
	}
	if n, err := t.Write(packets); n != len(packets) {
		return -1, fmt.Errorf("write: %w", err)
	}
	if s, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC); err != nil {
		return -1, fmt.Errorf("no connection: %w", err)
	}
	got := make([]byte, len(data))
	wait := unix.NsecToTimeval(int64(trialWait))
	_ = unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)
	n, err := receiveAll(s, got)
	switch {
	case err != nil:
		err = fmt.Errorf("what was put together did not arrive: %w", err)
	case !bytes.Equal(got[:n], data):
		err = errors.New("what was put together did not arrive as it was")
	case t.tso.merged.Load() != 4 || t.tso.written.Load() != 1:
		err = errors.New("nothing was put together")
	default:
		return s, nil
	}
	unix.Close(s)
	return -1, err
}

// receiveAll receives from s until b is full. Signals, which Go's runtime sends to its threads, do not end it.
func receiveAll(s int, b []byte) (n int, err error) {
	for n < len(b) {
		got, err := unix.Read(s, b[n:])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return n, err
		case got == 0:
			return n, io.ErrUnexpectedEOF
		default:
			n += got
		}
	}
	return n, nil
}

// trySplit has the kernel send data, and tests that it comes in GSO packets that split into the
// right packets.
func (t *File) trySplit(s int, peer *trialPeer, data []byte) error {
	if n, err := unix.Write(s, data); n != len(data) {
		return fmt.Errorf("send: %w", err)
	}
	got, have := make([]byte, len(data)), 0
	err := t.each(func(p []byte) (bool, error) {
		seg, ok := find(p)
		if !ok || p[9] != protoTCP || !seg.valid(p) {
			return false, errors.New("a packet came with a wrong checksum")
		}
		if n := len(p) - seg.head; n > 0 {
			if binary.BigEndian.Uint32(p[seg.start+tcpSeq:]) == peer.ack {
				have += copy(got[have:], p[seg.head:])
				peer.ack += uint32(n)
			}
			_, _ = t.Write([][]byte{peer.packet(tcpACK, nil)})
		}
		return have == len(got), nil
	})
	return splitWell(err, got, data, &t.tso.split, "nothing came in GSO packets")
}

// splitWell returns why the kernel's GSO packets were not split as they should: reading them ended
// with err, got came of the data that were sent, and split counts the GSO packets, without which the
// reason is none.
func splitWell(err error, got, data []byte, split *atomic.Uint64, none string) error {
	switch {
	case err != nil:
		return err
	case !bytes.Equal(got, data):
		return errors.New("what was split did not come as it was")
	case split.Load() == 0:
		return errors.New(none)
	}
	return nil
}

// ipHeader writes the IPv4 header and the ports of a packet from trialTheirs to trialOurs into b,
// which is the whole packet.
func ipHeader(b []byte, proto byte) {
	copy(b, []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, proto, 0, 0})
	copy(b[12:], trialTheirs[:])
	copy(b[16:], trialOurs[:])
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[10:], ip.Checksum(b[:20]))
	binary.BigEndian.PutUint16(b[20:], 9)
	binary.BigEndian.PutUint16(b[22:], 9)
}

// seal puts the checksum of what is behind the IP header of b into the field at offset at there.
func seal(b []byte, at int) {
	sum := ip.Sum(uint32(b[9])+uint32(len(b)-20), b[12:20])
	binary.BigEndian.PutUint16(b[20+at:], ^uint16(ip.Sum(sum, b[20:])))
}

// trialPacket returns a UDP packet to trialOurs with n octets of payload and a checksum.
func trialPacket(n int) []byte {
	b := make([]byte, 28+n)
	ipHeader(b, protoUDP)
	udp := b[20:]
	binary.BigEndian.PutUint16(udp[udpLength:], uint16(len(udp)))
	for i := range n {
		udp[8+i] = byte(i)
	}
	seal(b, udpSum)
	return b
}
