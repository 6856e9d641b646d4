package ip

import (
	"errors"
	"net/netip"
)

// ErrSilent says that a packet must not be answered with an ICMP error.
var ErrSilent = errors.New("ip: this packet must not be answered with an ICMP error")

// AppendTooBig appends to b the ICMP message that tells the sender of orig that
// it is larger than mtu octets: "fragmentation needed" for IPv4 (RFC 1191),
// "packet too big" for IPv6 (RFC 4443).
//
// Its source is nextHop if that is a unicast address of the same family, else
// orig's destination: the kernel behind a TUN ignores an own address there. It
// quotes, for IPv4, as much as fits 576 octets, for IPv6, 1280.
//
// orig must be a packet we were asked to send: never answered are ICMP errors,
// fragments other than the first, packets from or (IPv4) to a group, and those
// with an mtu no link may have (below 68, 1280); the error is then [ErrSilent].
func AppendTooBig(b, orig []byte, nextHop netip.Addr, mtu int) ([]byte, error) {
	panic("todo")
}
