package tun

import (
	"bytes"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// trialSegment is the payload in octets of the trial's datagrams; the last one is shorter.
const trialSegment = 1000

// tryDatagrams tests UDP in GSO packets. Four datagrams are written to the kernel as one GSO packet
// and must arrive as four. Then a program sends four in one call, and they must come out of the TUN
// as four packets.
func (t *File) tryDatagrams() error {
	s, err := trialSocket(unix.SOCK_DGRAM, "bind socket")
	if err != nil {
		return err
	}
	defer unix.Close(s)
	if err := t.tryGathered(s); err != nil {
		return err
	}
	return t.tryCut(s)
}

// tryGathered writes datagrams that are merged, and tests that they arrive one by one.
func (t *File) tryGathered(s int) error {
	var packets, want [][]byte
	for _, n := range []int{trialSegment, trialSegment, trialSegment, trialSegment / 2} {
		p := trialPacket(n)
		packets, want = append(packets, p), append(want, bytes.Clone(p[28:]))
	}
	if n, err := t.Write(packets); n != len(packets) {
		return fmt.Errorf("write: %w", err)
	}
	if t.uso.merged.Load() != uint64(len(packets)) || t.uso.written.Load() != 1 {
		return errors.New("no datagrams were put together")
	}
	got := make([]byte, 2*trialSegment)
	for i, w := range want {
		n, _, err := unix.Recvfrom(s, got, 0)
		switch {
		case err != nil:
			return fmt.Errorf("datagram %d of those put together did not arrive: %w", i, err)
		case !bytes.Equal(got[:n], w):
			return fmt.Errorf("datagram %d of those put together did not arrive as it was", i)
		}
	}
	return nil
}

// tryCut sends datagrams in one call. It tests that the kernel gives them as a GSO packet, and that
// they come out of t unchanged.
func (t *File) tryCut(s int) error {
	if err := unix.SetsockoptInt(s, unix.IPPROTO_UDP, unix.UDP_SEGMENT, trialSegment); err != nil {
		return fmt.Errorf("UDP_SEGMENT: %w", err)
	}
	data := make([]byte, 3*trialSegment+trialSegment/2)
	for i := range data {
		data[i] = byte(i >> 4)
	}
	if err := unix.Sendto(s, data, 0, &unix.SockaddrInet4{Port: 9, Addr: trialTheirs}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	var got []byte
	err := t.each(func(p []byte) (bool, error) {
		if p[9] != protoUDP || len(p) < 28+trialSegment/2 {
			return false, nil
		}
		if valid, ok := verify(p); !valid || !ok {
			return false, errors.New("a datagram came with a wrong checksum")
		}
		got = append(got, p[28:]...)
		return len(got) >= len(data), nil
	})
	return splitWell(err, got, data, &t.uso.split, "nothing came as one GSO packet")
}
