package lab

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// ErrTimeout says that nothing came back in time.
var ErrTimeout = errors.New("no answer")

// A Ping says which echo request to send.
type Ping struct {
	Dst  netip.Addr
	Size int    // octets of the whole IP packet; zero means 84 (IPv4) or 104
	DF   bool   // do not fragment (IPv4: set DF), so that a packet too large fails with EMSGSIZE
	Zone string // device, for link-local addresses
	// Timeout is how long the answer may take. Zero means 1 s.
	Timeout time.Duration
}

// Ping sends one ICMP or ICMPv6 echo request from the host, waits for the reply, and
// returns the round-trip time. A reply with another payload is an error.
func (h *Host) Ping(p Ping) (time.Duration, error) {
	return In(h, func() (time.Duration, error) { return Echo(p) })
}

// Echo does what [Host.Ping] does, from the namespace of the calling thread.
func Echo(p Ping) (time.Duration, error) {
	v6 := p.Dst.Is6()
	header := 28
	if v6 {
		header = 48
	}
	if p.Size == 0 {
		p.Size = header + 56
	}
	if p.Size < header || p.Size > 65535 {
		return 0, fmt.Errorf("ping of %d octets: impossible", p.Size)
	}
	if p.Timeout == 0 {
		p.Timeout = time.Second
	}
	fd, err := p.socket()
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	id, seq := uint16(rand.Uint32()), uint16(1)
	msg := EchoRequest(8+p.Size-header, v6, id, seq)
	start := time.Now()
	if err := unix.Sendto(fd, msg, 0, Sockaddr(p.Dst.WithZone(p.Zone))); err != nil {
		return 0, fmt.Errorf("ping %s, %d octets: %w", p.Dst, p.Size, err)
	}
	buf := make([]byte, 1<<16)
	for deadline := start.Add(p.Timeout); ; {
		left := time.Until(deadline)
		if left <= 0 {
			return 0, fmt.Errorf("ping %s, %d octets: %w in %v", p.Dst, p.Size, ErrTimeout, p.Timeout)
		}
		tv := unix.NsecToTimeval(left.Nanoseconds())
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err == unix.EAGAIN || err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("ping %s: %w", p.Dst, err)
		}
		got, n16, ok := EchoReply(buf[:n], v6, id)
		if !ok || n16 != seq {
			continue
		}
		if len(got) != len(msg) || string(got[8:]) != string(msg[8:]) {
			return 0, fmt.Errorf("ping %s: the answer differs from the request", p.Dst)
		}
		return time.Since(start), nil
	}
}

// socket opens an echo socket that fragments packets unless p.DF is set.
func (p *Ping) socket() (int, error) {
	v6 := p.Dst.Is6()
	fd, err := EchoSocket(v6)
	if err != nil {
		return -1, err
	}
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<20)
	switch {
	case !v6 && p.DF:
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
	case !v6:
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
	case p.DF:
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO)
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 1)
	}
	return fd, nil
}

// EchoSocket opens a raw socket for ICMP, or for ICMPv6 if v6 is set.
func EchoSocket(v6 bool) (int, error) {
	family, proto := unix.AF_INET, unix.IPPROTO_ICMP
	if v6 {
		family, proto = unix.AF_INET6, unix.IPPROTO_ICMPV6
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return -1, fmt.Errorf("ICMP socket: %w", err)
	}
	return fd, nil
}

// EchoRequest returns an echo request of size octets; the kernel does the checksum of ICMPv6.
func EchoRequest(size int, v6 bool, id, seq uint16) []byte {
	msg := make([]byte, size)
	msg[0] = 8
	if v6 {
		msg[0] = 128
	}
	binary.BigEndian.PutUint16(msg[4:], id)
	binary.BigEndian.PutUint16(msg[6:], seq)
	for i := 8; i < len(msg); i++ {
		msg[i] = byte(i) ^ byte(id)
	}
	if !v6 {
		binary.BigEndian.PutUint16(msg[2:], checksum(msg))
	}
	return msg
}

// EchoReply returns the ICMP message in got, which an echo socket has received, and its sequence number. ok is false
// if it is no echo reply to id.
func EchoReply(got []byte, v6 bool, id uint16) (msg []byte, seq uint16, ok bool) {
	if !v6 { // an IPv4 raw socket shows the IP header
		if len(got) < 20 || len(got) < int(got[0]&15)*4 {
			return nil, 0, false
		}
		got = got[int(got[0]&15)*4:]
	}
	kind := byte(0)
	if v6 {
		kind = 129
	}
	if len(got) < 8 || got[0] != kind || binary.BigEndian.Uint16(got[4:]) != id {
		return nil, 0, false
	}
	return got, binary.BigEndian.Uint16(got[6:]), true
}

func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) >= 2; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// Sockaddr returns the address for a raw socket, or for a port that the kernel chooses. Its zone names a device.
func Sockaddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	sa := &unix.SockaddrInet6{Addr: a.As16()}
	if ifi, err := net.InterfaceByName(a.Zone()); err == nil {
		sa.ZoneId = uint32(ifi.Index)
	}
	return sa
}

// A Transfer is the outcome of one TCP transfer.
type Transfer struct {
	Octets   int64
	Duration time.Duration
	SHA256   [32]byte // of the data, compared at both ends; of nothing after a timed transfer
	MSS      int      // sender's MSS at the end (TCP_INFO), octets
	Retrans  int      // segments the sender's TCP sent again
}

// Mbps returns the rate in Mb/s.
func (t Transfer) Mbps() float64 {
	if t.Duration <= 0 {
		return 0
	}
	return float64(t.Octets) * 8 / 1e6 / t.Duration.Seconds()
}

// Send transfers data by TCP from h to addr, an address of the host to. If octets is not
// zero, Send sends that many octets and compares the SHA-256 of both ends; otherwise it
// sends for the time d. It returns when the receiver has confirmed all data.
func (h *Host) Send(ctx context.Context, to *Host, addr netip.Addr, octets int64,
	d time.Duration) (t Transfer, err error) {
	ln, err := In(to, func() (*net.TCPListener, error) {
		return net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	})
	if err != nil {
		return t, fmt.Errorf("listen in %s: %w", to.Name, err)
	}
	defer ln.Close()
	type result struct {
		n   int64
		sum [32]byte
		err error
	}
	received := make(chan result, 1)
	go func() {
		n, sum, err := receive(ln, octets > 0)
		received <- result{n, sum, err}
	}()
	dst := ln.Addr().(*net.TCPAddr)
	conn, err := In(h, func() (*net.TCPConn, error) {
		c, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", dst.String())
		tcp, _ := c.(*net.TCPConn)
		return tcp, err
	})
	if err != nil {
		ln.Close()
		<-received
		return t, fmt.Errorf("connect from %s: %w", h.Name, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := send(conn, &t, octets, d); err != nil {
		ln.Close()
		return t, fmt.Errorf("send to %s: %w", dst, errors.Join(err, ctx.Err()))
	}
	select {
	case r := <-received:
		switch {
		case r.err != nil:
			return t, fmt.Errorf("receive in %s: %w", to.Name, r.err)
		case r.n != t.Octets:
			return t, fmt.Errorf("%d octets sent, %d received", t.Octets, r.n)
		case octets > 0 && r.sum != t.SHA256:
			return t, errors.New("SHA-256 differs between sender and receiver")
		}
	case <-ctx.Done():
		return t, ctx.Err()
	}
	return t, nil
}

// send writes data, waits for the octet with which the receiver confirms all of it,
// and fills in t. Only a transfer of a given size is hashed: hashing costs more than
// the network, and a timed transfer is there to measure the network.
func send(conn *net.TCPConn, t *Transfer, octets int64, d time.Duration) error {
	block := make([]byte, 1<<20)
	rand.NewChaCha8([32]byte{1}).Read(block)
	sum := sha256.New()
	start := time.Now()
	end := start.Add(d)
	for octets > 0 && t.Octets < octets || octets == 0 && time.Now().Before(end) {
		b := block
		if octets > 0 {
			b = b[:min(int64(len(b)), octets-t.Octets)]
		}
		n, err := conn.Write(b)
		t.Octets += int64(n)
		if octets > 0 {
			sum.Write(b[:n])
		}
		if err != nil {
			return err
		}
	}
	sum.Sum(t.SHA256[:0])
	if err := conn.CloseWrite(); err != nil {
		return err
	}
	if info, err := TCPInfo(conn); err == nil {
		t.MSS, t.Retrans = int(info.Snd_mss), int(info.Total_retrans)
	}
	var done [1]byte
	if _, err := io.ReadFull(conn, done[:]); err != nil {
		return fmt.Errorf("wait for the receiver: %w", err)
	}
	t.Duration = time.Since(start)
	return nil
}

// receive takes one connection, reads it to its end and confirms with one octet.
func receive(ln *net.TCPListener, hash bool) (n int64, digest [32]byte, err error) {
	conn, err := ln.AcceptTCP()
	if err != nil {
		return 0, digest, err
	}
	defer conn.Close()
	sum := sha256.New()
	buf := make([]byte, 1<<20)
	for {
		got, err := conn.Read(buf)
		n += int64(got)
		if hash {
			sum.Write(buf[:got])
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return n, digest, err
		}
	}
	sum.Sum(digest[:0])
	_, err = conn.Write([]byte{1})
	return n, digest, err
}

// TCPInfo asks the kernel of conn's socket for its TCP_INFO.
func TCPInfo(conn *net.TCPConn) (info *unix.TCPInfo, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	control := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info, errors.Join(control, err)
}

// Multicast joins group on the device devTo of the host to. It then sends a datagram of
// size octets of UDP payload from h through devFrom, again and again, until the host to
// has received one. After timeout it returns an error.
func (h *Host) Multicast(devFrom string, to *Host, devTo string, group netip.Addr, size int,
	timeout time.Duration) error {
	network := "udp4"
	if group.Is6() {
		network = "udp6"
	}
	in, err := In(to, func() (*net.UDPConn, error) {
		ifi, err := net.InterfaceByName(devTo)
		if err != nil {
			return nil, err
		}
		return net.ListenMulticastUDP(network, ifi, &net.UDPAddr{IP: group.AsSlice(), Port: mcastPort})
	})
	if err != nil {
		return fmt.Errorf("join %s in %s: %w", group, to.Name, err)
	}
	defer in.Close()
	out, err := In(h, func() (*net.UDPConn, error) {
		ifi, err := net.InterfaceByName(devFrom)
		if err != nil {
			return nil, err
		}
		out, err := net.ListenUDP(network, nil)
		if err != nil {
			return nil, err
		}
		if group.Is6() {
			return out, ipv6.NewPacketConn(out).SetMulticastInterface(ifi)
		}
		return out, ipv4.NewPacketConn(out).SetMulticastInterface(ifi)
	})
	if err != nil {
		return fmt.Errorf("multicast from %s: %w", h.Name, err)
	}
	defer out.Close()
	msg := make([]byte, size)
	rand.NewChaCha8([32]byte{2}).Read(msg)
	buf := make([]byte, 1<<16)
	// The agent may not have seen the kernel's report of the join yet: send more than once.
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); {
		if _, err := out.WriteToUDPAddrPort(msg, netip.AddrPortFrom(group, mcastPort)); err != nil {
			return fmt.Errorf("send to %s: %w", group, err)
		}
		in.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		n, _, err := in.ReadFromUDPAddrPort(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return err
		}
		if string(buf[:n]) == string(msg) {
			return nil
		}
	}
	return fmt.Errorf("multicast of %d octets to %s: %w in %v", size, group, ErrTimeout, timeout)
}

// mcastPort is the UDP port of multicast tests.
const mcastPort = 5353 + 1
