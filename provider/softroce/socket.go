package softroce

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket options that x/sys does not name.
const (
	optMulticastAll4 = 49  // IP_MULTICAST_ALL
	optMulticastAll6 = 29  // IPV6_MULTICAST_ALL
	optNoCheck6RX    = 102 // UDP_NO_CHECK6_RX
	optUDPSegment    = 103
	optUDPGRO        = 104
)

// A sockopt is one setsockopt call.
type sockopt struct {
	level, name, value int
	what               string
	optional           bool // older kernels do not have it
}

func setAll(fd int, opts []sockopt) error {
	for _, o := range opts {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil && !o.optional {
			return fmt.Errorf("set %s: %w", o.what, err)
		}
	}
	return nil
}

// The options that let a further socket bind a port.
var (
	reuseAddr = sockopt{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1, "SO_REUSEADDR", false}
	reusePort = sockopt{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1, "SO_REUSEPORT", false}
)

// openSocket opens a UDP socket that is bound to the underlay device, and calls prepare with it. If
// prepare fails, it closes the socket.
func openSocket(v6 bool, dev string, prepare func(fd int) error) (int, error) {
	family, only := unix.AF_INET, []sockopt(nil)
	if v6 {
		family, only = unix.AF_INET6, []sockopt{{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1, "IPV6_V6ONLY", false}}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
	if err != nil {
		return -1, fmt.Errorf("open UDP socket: %w", err)
	}
	if err = unix.BindToDevice(fd, dev); err != nil {
		err = fmt.Errorf("bind UDP socket to %s: %w", dev, err)
	} else if err = setAll(fd, only); err == nil {
		err = prepare(fd)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// setBuffer asks for n octets, beyond the system's limit if we may, and returns
// what the kernel gave.
func setBuffer(fd, force, plain, n int) int {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, n) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, plain, n)
	}
	got, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, plain)
	return got / 2 // the kernel doubles it for its own overhead
}

// recvOptions returns the options of a receiving socket. An ICMP message that quotes one of
// our packets reaches the socket bound to the packet's source port, and need not be true:
// with INTERFACE the kernel learns no path MTU from it (net/ipv4/udp.c, ip_sk_accept_pmtu;
// net/ipv6/udp.c, ip6_sk_accept_pmtu).
func recvOptions(v6 bool) []sockopt {
	opts := []sockopt{{unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1, "SO_RXQ_OVFL", true}}
	if v6 {
		return append(opts, discover6(unix.IPV6_PMTUDISC_INTERFACE),
			sockopt{unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1, "IPV6_RECVPKTINFO", false},
			sockopt{unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1, "IPV6_RECVHOPLIMIT", false},
			sockopt{unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1, "IPV6_RECVTCLASS", false},
			sockopt{unix.IPPROTO_IPV6, optMulticastAll6, 0, "IPV6_MULTICAST_ALL", true},
			// Foreign senders put 0 into the checksum, which IPv6 would drop.
			sockopt{unix.IPPROTO_UDP, optNoCheck6RX, 1, "UDP_NO_CHECK6_RX", false})
	}
	return append(opts, discover4(unix.IP_PMTUDISC_INTERFACE),
		sockopt{unix.IPPROTO_IP, unix.IP_PKTINFO, 1, "IP_PKTINFO", false},
		sockopt{unix.IPPROTO_IP, unix.IP_RECVTTL, 1, "IP_RECVTTL", false},
		sockopt{unix.IPPROTO_IP, unix.IP_RECVTOS, 1, "IP_RECVTOS", false},
		sockopt{unix.IPPROTO_IP, optMulticastAll4, 0, "IP_MULTICAST_ALL", true})
}

// discover4 and discover6 set which path MTUs a socket uses, and which it learns.
func discover4(how int) sockopt {
	return sockopt{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, how, "IP_MTU_DISCOVER", false}
}

func discover6(how int) sockopt {
	return sockopt{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, how, "IPV6_MTU_DISCOVER", false}
}

// sendOptions returns the options of a sending socket. With them the kernel uses no path
// MTU that it has learned from ICMP. What counts is the MTU of the link, and that of the
// route, which we read (routemtu.go).
//
// On IPv6 the kernel refuses packets larger than the link's MTU with INTERFACE, and
// fragments them with OMIT. On IPv4 it refuses them with PROBE, and sets DF. With DF a packet
// of an unconnected socket has the identification 0 (include/net/ip.h,
// ip_select_ident_segs), from which we compute the ICRC. INTERFACE sets no DF. But with PROBE
// the kernel learns path MTUs from ICMP, so every IPv4 sender has a guard, which gets the
// ICMP messages.
func sendOptions(v6, fragment bool, ifindex int) []sockopt {
	if v6 {
		disc := unix.IPV6_PMTUDISC_INTERFACE
		if fragment {
			disc = unix.IPV6_PMTUDISC_OMIT
		}
		return []sockopt{
			discover6(disc),
			{unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_LOOP, 0, "IPV6_MULTICAST_LOOP", false},
			{unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, ifindex, "IPV6_MULTICAST_IF", false},
			{unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, defaultHopLimit, "IPV6_MULTICAST_HOPS", false},
			{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, defaultHopLimit, "IPV6_UNICAST_HOPS", false},
		}
	}
	return []sockopt{
		discover4(unix.IP_PMTUDISC_PROBE),
		{unix.IPPROTO_IP, unix.IP_MULTICAST_LOOP, 0, "IP_MULTICAST_LOOP", false},
		{unix.IPPROTO_IP, unix.IP_MULTICAST_TTL, defaultHopLimit, "IP_MULTICAST_TTL", false},
		{unix.IPPROTO_IP, unix.IP_TTL, defaultHopLimit, "IP_TTL", false},
	}
}

// sockaddr returns a socket address; the zero Addr is the wildcard.
func sockaddr(v6 bool, a netip.Addr, port uint16, ifindex int) unix.Sockaddr {
	if !v6 {
		sa := &unix.SockaddrInet4{Port: int(port)}
		if a.IsValid() {
			sa.Addr = a.As4()
		}
		return sa
	}
	sa := &unix.SockaddrInet6{Port: int(port)}
	if a.IsValid() {
		sa.Addr = a.As16()
		if a.IsLinkLocalUnicast() {
			sa.ZoneId = uint32(ifindex)
		}
	}
	return sa
}

// cmsgAligned takes no room. In a struct it aligns the next field for a control message,
// whose header has a size_t.
type cmsgAligned = [0]uintptr

// putCmsg writes a control message header and returns the data after it and
// the space it takes.
func putCmsg(b []byte, level, typ int32, n int) (data []byte, space int) {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = level, typ
	h.SetLen(unix.CmsgLen(n))
	return b[unix.CmsgLen(0):unix.CmsgLen(n)], unix.CmsgSpace(n)
}

// native is the byte order of control messages.
var native = binary.NativeEndian
