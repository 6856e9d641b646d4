package ip

import "net/netip"

const (
	icmp4HostUnreachable = 1 // code (RFC 792)

	icmp6Unreachable     = 1
	icmp6AddrUnreachable = 3 // code (RFC 4443 section 3.1)
)

// AppendUnreachable appends to b the ICMP message that tells the sender of orig
// that its next hop does not answer: "host unreachable" for IPv4 (RFC 1812
// section 5.2.7.1), "address unreachable" for IPv6 (RFC 4443 section 3.1).
//
// The message has the source and the quote that [AppendTooBig] gives it, and the
// same packets give [ErrSilent]. So does every IPv6 packet to a group, whatever
// nextHop is.
func AppendUnreachable(b, orig []byte, nextHop netip.Addr) ([]byte, error) {
	if Version(orig) == 6 {
		return appendError6(b, orig, nextHop, icmp6Unreachable, icmp6AddrUnreachable, 0)
	}
	return appendError4(b, orig, nextHop, icmp4HostUnreachable, 0)
}
