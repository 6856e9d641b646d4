// Package mtu decides sizes: what Receive MTU we offer and accept, which UD MTU an underlay
// carries, and what to do with a packet too large for its next hop. datapath carries out the
// decisions. fib sets the MTUs of the device's routes.
//
// Every function is pure. All sizes are octets. An IP MTU counts from the IP header on. A Receive
// MTU also counts the 4-octet encapsulation header.
//
// Sources: RFC 4755 sections 5, 6 and 7.2, RFC 4391 section 7, RoCEv2 header sizes.
package mtu

import (
	"fmt"

	"ipoibcm/wire/encap"
)

// Sizes in octets.
const (
	DefaultReceive = 65524           // the Receive MTU that we offer, as Linux does
	DefaultDevice  = 65520           // IP MTU of the device: DefaultReceive less the header
	DefaultUD      = 2044            // RFC 4391 section 7: 2048 less the header
	MaxUD          = 4096 - 4        // the largest IB UD payload less the header
	MaxReceive     = uint32(1 << 31) // the largest IB message (RFC 4755 section 1)
	MinIPv6        = 1280            // RFC 8200 section 5
	MinIPv4        = 576             // the least that we accept where IPv6 is off; RFC 791 demands 68
	RetryReceive   = 2048            // the offer after a REJ 26 that names no smaller value
	headerLen      = encap.HeaderLen // octets
	ipv4HeaderLen  = 20              // without options
	ipv6HeaderLen  = 40              //
	tcpHeaderLen   = 20              // without options
)

// IPMTU returns the IP MTU that a Receive MTU leaves, 0 if it leaves none.
func IPMTU(receive uint32) int {
	return int(max(headerLen, min(receive, MaxReceive)) - headerLen)
}

// A RefusedError says that two Receive MTUs give an IP MTU below the minimum of a protocol on the
// interface. We answer the peer with REJ 26 and our own values, and serve it over UD
// (docs/rfc4755.md).
type RefusedError struct {
	Own, Peer uint32 // Receive MTUs
	Got, Need int    // IP MTUs
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("Receive MTU %d against our %d gives an IP MTU of %d, below %d", e.Peer, e.Own, e.Got, e.Need)
}

// Negotiate returns the IP MTU of a connection from both Receive MTUs: the
// smaller one less the encapsulation header, for both directions (RFC 4755
// section 5.1). ipv6 reports whether the interface carries IPv6. The error is a
// *RefusedError.
func Negotiate(own, peer uint32, ipv6 bool) (int, error) {
	need := MinIPv4
	if ipv6 {
		need = MinIPv6
	}
	got := IPMTU(min(own, peer))
	if got < need {
		return 0, &RefusedError{Own: own, Peer: peer, Got: got, Need: need}
	}
	return got, nil
}

// AfterReject returns the Receive MTU to offer in the one retry after a REJ 26. offered is the
// Receive MTU of the refused REQ, inREJ that of the REJ's private data (0 if there is none). The
// result is inREJ if that is smaller than offered, else RetryReceive if that is smaller, else 0.
// WinOFED rejects Receive MTUs larger than its own.
func AfterReject(offered, inREJ uint32) uint32 {
	for _, v := range [...]uint32{inREJ, RetryReceive} {
		if v > headerLen && v < offered {
			return v
		}
	}
	return 0
}

// Effective returns the MTU for a destination: that of its path (a connection or UD), but not more
// than that of the device, which the user may have lowered.
func Effective(device, path int) int { return min(device, path) }

// AdvMSS returns the TCP MSS to announce so that IP packets have at most packet octets.
func AdvMSS(packet int, ipv6 bool) int {
	if ipv6 {
		return max(0, packet-ipv6HeaderLen-tcpHeaderLen)
	}
	return max(0, packet-ipv4HeaderLen-tcpHeaderLen)
}
