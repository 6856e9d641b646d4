package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/wireguard"
)

// tunnel sets up one of the two ends of a WireGuard tunnel.
func tunnel(device string, number int) error {
	keys, err := wireguard.TestKeys()
	if err != nil {
		return err
	}
	other := 3 - number
	return wireguard.ConfigureKernel(device, keys[number-1], wireguard.Peer{
		Key:      keys[other-1].PublicKey(),
		Endpoint: netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf("fd78::%d", other)), wireguard.Port),
		Allowed:  netip.MustParsePrefix(fmt.Sprintf("fd77::%d/128", other)),
	})
}

// outside counts the packets that arrive on a device until standard input ends. It prints how many were
// RoCEv2 over IPv6, and how many there were in all.
func outside(device string) error {
	link, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Index}); err != nil {
		return err
	}
	fmt.Println("ready")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	roce, seen := 0, 0
	for buf := make([]byte, 64); ; {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			fmt.Println(roce, seen)
			return nil
		}
		seen++
		if n >= 48 && buf[0]>>4 == 6 && buf[6] == unix.IPPROTO_UDP && int(buf[42])<<8|int(buf[43]) == 4791 {
			roce++
		}
	}
}
