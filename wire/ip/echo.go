package ip

import "net/netip"

// An Echo is an ICMP or ICMPv6 echo request or reply, with its IP header.
type Echo struct {
	Src, Dst netip.Addr // both IPv4 or both IPv6
	Reply    bool
	ID, Seq  uint16
	TTL      uint8 // zero means 64 when sent
	DF       bool  // IPv4 only
	Data     []byte
}

// AppendBinary appends the whole IP packet to b.
func (e Echo) AppendBinary(b []byte) ([]byte, error) { panic("todo") }

// UnmarshalBinary sets e from the IP packet b; Data is a part of b. Anything but
// a whole echo message with a right checksum is an error.
func (e *Echo) UnmarshalBinary(b []byte) error { panic("todo") }

// RAMTU returns the MTU option of the router advertisement in the IPv6 packet
// pkt. ok is false if pkt is none, or has no such option.
func RAMTU(pkt []byte) (mtu uint32, ok bool) { panic("todo") }
