package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	sayEvery  = 100 * time.Millisecond
	floodTime = 3 * time.Second
	silence   = time.Second // a flood is over after that long without a datagram
)

func destination(addr, device string) (to *net.UDPAddr, ifi *net.Interface, err error) {
	if to, err = net.ResolveUDPAddr("udp", addr); err == nil {
		ifi, err = net.InterfaceByName(device)
	}
	return to, ifi, err
}

// hear waits for one datagram to an address, which may be a multicast or broadcast address, and
// prints its length.
func hear(addr, device string) error {
	to, ifi, err := destination(addr, device)
	if err != nil {
		return err
	}
	var c *net.UDPConn
	if to.IP.IsMulticast() {
		c, err = net.ListenMulticastUDP("udp", ifi, to)
	} else {
		c, err = net.ListenUDP("udp", to)
	}
	if err != nil {
		return err
	}
	defer c.Close()
	fmt.Println("ready")
	buf := make([]byte, 1<<16)
	n, _, err := c.ReadFrom(buf)
	fmt.Println(n)
	return err
}

// say sends datagrams of n octets through device until it is killed.
func say(addr string, n int, device string) error {
	to, ifi, err := destination(addr, device)
	if err != nil {
		return err
	}
	c, err := net.ListenUDP("udp", nil)
	if err != nil {
		return err
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	if err := raw.Control(func(fd uintptr) { opt = through(int(fd), to.IP, ifi) }); err != nil || opt != nil {
		return errors.Join(err, opt)
	}
	for b := make([]byte, n); ; time.Sleep(sayEvery) {
		if _, err := c.WriteToUDP(b, to); err != nil {
			fmt.Fprintln(os.Stderr, "traffic:", err) // an interface that is coming up may not have its address yet
		}
	}
}

// through makes a socket send its datagrams to the group ip through the device ifi. If ip is no group, it
// allows the socket to send broadcasts instead.
func through(fd int, ip net.IP, ifi *net.Interface) error {
	switch {
	case !ip.IsMulticast():
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
	case ip.To4() == nil:
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, ifi.Index)
	}
	// The socket is an IPv6 socket, which takes options of IPv4 too.
	return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, &unix.IPMreqn{Ifindex: int32(ifi.Index)})
}

// sink prints "ready", and when a flood is over, how many octets of it have arrived.
func sink(addr string) error {
	c, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.(*net.UDPConn).SetReadBuffer(4 << 20); err != nil {
		return err
	}
	fmt.Println("ready")
	octets, buf := 0, make([]byte, 1<<16)
	for {
		n, _, err := c.ReadFrom(buf)
		var late net.Error
		if octets > 0 && errors.As(err, &late) && late.Timeout() {
			fmt.Println(octets)
			return nil
		}
		if err != nil {
			return err
		}
		octets += n
		if err := c.SetReadDeadline(time.Now().Add(silence)); err != nil {
			return err
		}
	}
}

// flood sends datagrams at a rate in Mb/s that the other end may not keep up with, for floodTime, and prints
// how many octets it sent.
func flood(addr string, size int, rate string) error {
	mbps, err := strconv.Atoi(rate)
	if err != nil {
		return err
	}
	c, err := net.Dial("udp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	b := make([]byte, size)
	start, sent := time.Now(), 0
	for {
		now := time.Since(start)
		if now > floodTime {
			fmt.Println(sent)
			return nil
		}
		for due := int(now.Seconds() * float64(mbps) * 1e6 / 8); sent < due; sent += size {
			if _, err := c.Write(b); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return err
			}
		}
		time.Sleep(time.Millisecond)
	}
}
