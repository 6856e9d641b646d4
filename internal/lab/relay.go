package lab

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// An Impairment says how many in 1000 RoCEv2 packets a Relay loses, duplicates, reorders and
// corrupts, on average. It does at most one of the first three to a packet, and may corrupt the
// packet as well.
type Impairment struct {
	Lose, Duplicate, Reorder, Corrupt int
}

// A Relay is a pair of wires between two devices of a host, which carries every
// frame from one to the other and impairs RoCEv2 frames.
type Relay struct {
	// Packets counts the RoCEv2 packets that arrived. The other fields count those that were impaired.
	Packets, Lost, Duplicated, Reordered, Corrupted atomic.Int64

	carrier
	imp atomic.Pointer[Impairment]
}

// heldFor is how many RoCEv2 packets at most overtake a reordered one. heldAtMost is how
// long the reordered packet waits at most if no other frame arrives.
const (
	heldFor    = 3
	heldAtMost = 2 * time.Millisecond
)

// ConnectThrough joins a and b by way of mid, where a relay connects the devices
// "left" and "right". On both a and b the device is called dev. ConnectThrough turns its
// offloads off, so that the relay sees single packets with finished checksums. Close ends
// the relay.
func ConnectThrough(a, mid, b *Host, dev string, mtu int, imp Impairment, seed uint64) (*Relay, error) {
	if err := mid.Sysctl("net/ipv6/conf/default/disable_ipv6", "1"); err != nil {
		return nil, err
	}
	for _, end := range []struct {
		h    *Host
		side string
	}{{a, "left"}, {b, "right"}} {
		if err := Connect(end.h, dev, mid, end.side, mtu); err != nil {
			return nil, err
		}
		if err := end.h.WholePackets(dev); err != nil {
			return nil, err
		}
	}
	r := &Relay{}
	r.Impair(imp)
	return r, r.start(mid, "left", "right", seed, func(from, to int, rnd *rand.Rand) { r.carry(from, to, mtu, rnd) })
}

// Impair sets what the relay does to packets from now on.
func (r *Relay) Impair(imp Impairment) { r.imp.Store(&imp) }

// A carrier carries frames between two devices of a host.
type carrier struct {
	stop atomic.Bool
	wg   sync.WaitGroup
}

// start carries frames with carry in both directions, each with its own random numbers, until stop is set.
func (c *carrier) start(h *Host, a, b string, seed uint64, carry func(from, to int, rnd *rand.Rand)) error {
	left, err := h.packetSocket(a)
	if err != nil {
		return err
	}
	right, err := h.packetSocket(b)
	if err != nil {
		unix.Close(left)
		return err
	}
	c.wg.Go(func() {
		var both sync.WaitGroup
		both.Go(func() { carry(left, right, rand.New(rand.NewPCG(seed, 0))) })
		both.Go(func() { carry(right, left, rand.New(rand.NewPCG(seed, 1))) })
		both.Wait()
		unix.Close(left)
		unix.Close(right)
	})
	return nil
}

// Close ends the carrying; nothing passes any more.
func (c *carrier) Close() {
	c.stop.Store(true)
	c.wg.Wait()
}

// packetSocket opens a socket for whole frames: it receives those that arrive on dev, and sends on dev.
func (h *Host) packetSocket(dev string) (fd int, err error) {
	l, err := h.Link(dev)
	if err != nil {
		return -1, err
	}
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // network order
	err = h.Do(func() error {
		var err error
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open packet socket: %w", err)
		}
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 32<<20)
		tv := unix.NsecToTimeval(int64(heldAtMost))
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1)
		}
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Attrs().Index})
		}
		if err != nil {
			unix.Close(fd)
			return fmt.Errorf("packet socket on %s in %s: %w", dev, h.Name, err)
		}
		return nil
	})
	return fd, err
}

// carry forwards frames until the relay is closed.
func (r *Relay) carry(from, to, mtu int, rnd *rand.Rand) {
	buf := make([]byte, mtu+64)
	var held []byte // the packet that others overtake
	left := 0
	release := func() {
		if held != nil {
			unix.Write(to, held)
			held = nil
		}
	}
	defer release()
	for !r.stop.Load() {
		n, err := unix.Read(from, buf)
		if err != nil || n == 0 { // timeout, ENETDOWN
			release()
			if err != unix.EAGAIN && err != unix.EINTR {
				time.Sleep(time.Millisecond)
			}
			continue
		}
		frame := buf[:n]
		if !isRoCE(frame) {
			unix.Write(to, frame)
			continue
		}
		r.Packets.Add(1)
		imp := r.imp.Load()
		if rnd.IntN(1000) < imp.Corrupt {
			r.Corrupted.Add(1)
			corrupt(frame, rnd)
		}
		switch p := rnd.IntN(1000); {
		case p < imp.Lose:
			r.Lost.Add(1)
			continue
		case p < imp.Lose+imp.Duplicate:
			r.Duplicated.Add(1)
			unix.Write(to, frame)
		case p < imp.Lose+imp.Duplicate+imp.Reorder && held == nil:
			r.Reordered.Add(1)
			held, left = append([]byte(nil), frame...), 1+rnd.IntN(heldFor)
			continue
		}
		unix.Write(to, frame)
		if held != nil {
			if left--; left == 0 {
				release()
			}
		}
	}
}

// corrupt flips a bit behind the UDP header of a frame for which isRoCE is true. It sets
// the UDP checksum to zero, so that only the ICRC can show the damage.
func corrupt(frame []byte, rnd *rand.Rand) {
	udp := 14 + 40
	if binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_IP {
		udp = 14 + int(frame[14]&15)*4
	}
	binary.BigEndian.PutUint16(frame[udp+6:], 0)
	if body := frame[udp+8:]; len(body) > 0 {
		body[rnd.IntN(len(body))] ^= 1 << rnd.IntN(8)
	}
}

// isRoCE reports whether an Ethernet frame carries UDP to port 4791.
func isRoCE(frame []byte) bool {
	if len(frame) < 14+20+8 {
		return false
	}
	ip := frame[14:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case unix.ETH_P_IP:
		head := int(ip[0]&15) * 4
		return ip[9] == unix.IPPROTO_UDP && len(ip) >= head+8 && binary.BigEndian.Uint16(ip[head+2:]) == 4791
	case unix.ETH_P_IPV6:
		return ip[6] == unix.IPPROTO_UDP && len(ip) >= 48 && binary.BigEndian.Uint16(ip[42:]) == 4791
	}
	return false
}
