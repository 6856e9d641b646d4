// Package ib holds the words of InfiniBand: the numbers that every other package
// passes around, each with a type of its own and arithmetic that wraps where
// the wire wraps.
//
// It encodes nothing larger than one number and knows no protocol. Sources: IBA
// volume 1 as far as RFC 4755, RFC 4391 and the Linux headers show it.
package ib

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// A GID is a 128-bit port address. On RoCEv2 it is an IPv6 address, or an IPv4
// address in ::ffff:a.b.c.d form.
type GID [16]byte

// GIDFromAddr returns the GID of an underlay address: IPv6 unchanged, IPv4
// mapped. Zones are dropped. The zero Addr gives the zero GID.
func GIDFromAddr(a netip.Addr) GID {
	if !a.IsValid() {
		return GID{}
	}
	return GID(a.As16())
}

// ParseGID reads a GID written as an IPv6 or IPv4 address.
func ParseGID(s string) (GID, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return GID{}, fmt.Errorf("GID %q is neither an IPv6 nor an IPv4 address", s)
	}
	return GIDFromAddr(a), nil
}

// Addr returns the underlay address of g, IPv4 if g is IPv4-mapped.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// Is4 reports whether g is an IPv4-mapped GID.
func (g GID) Is4() bool { return netip.AddrFrom16(g).Is4In6() }

// IsMulticast reports whether g is an MGID: ff00::/8, or a mapped IPv4 group.
func (g GID) IsMulticast() bool {
	if g.Is4() {
		return g[12]&0xf0 == 0xe0
	}
	return g[0] == 0xff
}

// IsZero reports whether g is all zeros, which means "none".
func (g GID) IsZero() bool { return g == GID{} }

// String prints g as an IPv6 address; mapped ones as ::ffff:a.b.c.d.
func (g GID) String() string { return netip.AddrFrom16(g).String() }

// MarshalText writes g as String does.
func (g GID) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText reads what ParseGID reads.
func (g *GID) UnmarshalText(b []byte) (err error) {
	*g, err = ParseGID(string(b))
	return err
}

// A GUID is a 64-bit EUI-64 of a CA or port.
type GUID uint64

// String prints g in 16 hexadecimal digits, as ibstat does.
func (g GUID) String() string { return fmt.Sprintf("0x%016x", uint64(g)) }

// A LID is a 16-bit local identifier. RoCE has none: there CM messages carry PermissiveLID.
type LID uint16

// PermissiveLID is what CM messages carry where there are no LIDs (RoCE).
const PermissiveLID LID = 0xffff

// A QPN is a 24-bit queue pair number.
type QPN uint32

// Queue pair numbers with a meaning of their own.
const (
	QPNSMI       QPN = 0
	QPNGSI       QPN = 1        // the general service interface, where CM MADs go
	QPNMulticast QPN = 0xffffff // destination of every multicast packet
	QPNMask      QPN = 0xffffff
)

// Valid reports whether q fits 24 bits.
func (q QPN) Valid() bool { return q <= QPNMask }

// String prints q in hexadecimal, as rdma tools do.
func (q QPN) String() string { return fmt.Sprintf("0x%06x", uint32(q)) }

// A PSN is a 24-bit packet sequence number. It wraps: compare with Before and
// Sub, never with <.
type PSN uint32

// PSNMask keeps the 24 bits of a PSN.
const PSNMask PSN = 0xffffff

// Add returns p advanced by n packets, which may be negative.
func (p PSN) Add(n int) PSN { return (p + PSN(uint32(int32(n)))) & PSNMask }

// Sub returns the signed distance from q to p, in -2^23 to 2^23-1.
func (p PSN) Sub(q PSN) int { return int(int32(uint32(p-q)<<8) >> 8) }

// Before reports whether p comes before q, half the number space away at most.
func (p PSN) Before(q PSN) bool { return p.Sub(q) < 0 }

// String prints p in six hexadecimal digits.
func (p PSN) String() string { return fmt.Sprintf("%06x", uint32(p)) }

// A PKey is a partition key; bit 0x8000 means full membership.
type PKey uint16

// DefaultPKey is the default partition with full membership.
const DefaultPKey PKey = 0xffff

// PKeyFull is the membership bit.
const PKeyFull PKey = 0x8000

// Match reports whether a packet with key p may be taken by a port that holds
// q: same partition, and at least one of the two a full member (IBA 10.9.3).
func (p PKey) Match(q PKey) bool { return p&^PKeyFull == q&^PKeyFull && (p|q)&PKeyFull != 0 }

// Index returns the place of partition p in table, the P_Keys of a port: that of p itself, else the first
// with another membership; -1 if the port is not in that partition. A port may hold both memberships of one.
func (p PKey) Index(table []PKey) int {
	if i := slices.Index(table, p); i >= 0 {
		return i
	}
	return slices.Index(table, p^PKeyFull)
}

// String prints p in hexadecimal.
func (p PKey) String() string { return fmt.Sprintf("0x%04x", uint16(p)) }

// A QKey guards a UD queue pair. Those with ControlledQKey set can be used
// only with privilege.
type QKey uint32

// Q_Keys with a meaning of their own.
const (
	QKeyGSI        QKey = 0x80010000 // QP 1
	QKeyIPoIB      QKey = 0x00000b1b // opensm's default for IPoIB groups
	ControlledQKey QKey = 0x80000000
)

// String prints k in hexadecimal.
func (k QKey) String() string { return fmt.Sprintf("0x%08x", uint32(k)) }

// An MTU is a path MTU code: 1 is 256 octets, 5 is 4096.
type MTU uint8

// The path MTUs InfiniBand knows.
const (
	MTU256 MTU = 1 + iota
	MTU512
	MTU1024
	MTU2048
	MTU4096
)

// Octets returns the payload octets of m, or 0 if m is no valid code.
func (m MTU) Octets() int {
	if m < MTU256 || m > MTU4096 {
		return 0
	}
	return 128 << m
}

// MTUFromOctets returns the largest code whose size is at most n, 0 if none.
func MTUFromOctets(n int) MTU {
	for m := MTU4096; m >= MTU256; m-- {
		if m.Octets() <= n {
			return m
		}
	}
	return 0
}

// String prints the octets.
func (m MTU) String() string { return fmt.Sprint(m.Octets()) }

// A Transport is a queue pair's service type. The values are those of the CM
// REQ's transport service type, except UD, which no REQ carries.
type Transport uint8

// Service types.
const (
	RC Transport = 0
	UC Transport = 1
	RD Transport = 2 // reliable datagram; never used, only recognised
	UD Transport = 0xff
)

// String prints RC, UC, RD or UD.
func (t Transport) String() string {
	switch t {
	case RC:
		return "RC"
	case UC:
		return "UC"
	case RD:
		return "RD"
	case UD:
		return "UD"
	}
	return fmt.Sprintf("Transport(%d)", uint8(t))
}

// A Timeout is a 5-bit time code n meaning 4.096 microseconds times 2^n, as in
// CM response timeouts and ACK timeouts. For an ACK timeout 0 means never.
type Timeout uint8

// Duration returns the time t stands for. Only the low 5 bits count.
func (t Timeout) Duration() time.Duration { return 4096 * time.Nanosecond << (t & 31) }

// TimeoutFor returns the smallest code whose duration is at least d, at most 31.
func TimeoutFor(d time.Duration) Timeout {
	for t := Timeout(0); t < 31; t++ {
		if t.Duration() >= d {
			return t
		}
	}
	return 31
}

// rnrMicros holds the RNR NAK timer codes in units of 10 microseconds.
var rnrMicros = [32]uint32{65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152}

// An RNRTimer is the 5-bit code of an RNR NAK delay; 0 is the longest, 655.36 ms.
type RNRTimer uint8

// Duration returns the delay t stands for. Only the low 5 bits count.
func (t RNRTimer) Duration() time.Duration {
	return time.Duration(rnrMicros[t&31]) * 10 * time.Microsecond
}
