// Package pcapng writes captures that Wireshark opens: the IP packets a provider
// shows its tap, behind an Ethernet header of our making, as pcapng (the IETF
// opsawg draft). One section, nanosecond times, direction flags.
//
// The Ethernet addresses are not real: 02:49 and the last four octets of the IP
// address, so that one host keeps one address.
package pcapng

import (
	"encoding/binary"
	"time"
)

// EthernetLen is the length of the header put before each IP packet, in octets.
const EthernetLen = 14

// DefaultSnapLen is how many octets of one packet are kept if SnapLen is zero, the
// Ethernet header included. It is the largest value that tcpdump accepts.
const DefaultSnapLen = 262144

// Block types and options we write.
const (
	blockSHB = 0x0a0d0d0a // section header
	blockIDB = 0x00000001 // interface description
	blockEPB = 0x00000006 // enhanced packet

	byteOrderMagic = 0x1a2b3c4d
	linkEthernet   = 1

	optEnd         = 0
	optSHBUserAppl = 4
	optIDBName     = 2
	optIDBDesc     = 3
	optIDBTSResol  = 9
	optEPBFlags    = 2
	tsresolNanos   = 9
	flagInbound    = 1
	flagOutbound   = 2
	maxOptionLen   = 1024 // octets of a name or description that are kept
)

// An Interface is one source of packets in a capture.
type Interface struct {
	Name        string // such as "eth0"; at most 1024 octets are kept
	Description string // free text, likewise
	SnapLen     int    // octets kept per packet, Ethernet header included; zero means DefaultSnapLen
}

func (i Interface) snapLen() int {
	if i.SnapLen <= 0 {
		return DefaultSnapLen
	}
	return i.SnapLen
}

// AppendHeader appends the section header; application names the writing program.
func AppendHeader(b []byte, application string) []byte {
	b, start := beginBlock(b, blockSHB)
	b = binary.LittleEndian.AppendUint32(b, byteOrderMagic)
	b = append(b, 1, 0, 0, 0)                                // version 1.0
	b = binary.LittleEndian.AppendUint64(b, ^uint64(0))      // length not known
	b = appendOption(b, optSHBUserAppl, []byte(application)) // the only one worth having
	return endBlock(appendOption(b, optEnd, nil), start)
}

// AppendInterface appends an interface description. Interfaces are numbered from
// 0 in the order in which they are written.
func AppendInterface(b []byte, i Interface) []byte {
	b, start := beginBlock(b, blockIDB)
	b = append(b, linkEthernet, 0, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(i.snapLen()))
	if i.Name != "" {
		b = appendOption(b, optIDBName, []byte(i.Name))
	}
	if i.Description != "" {
		b = appendOption(b, optIDBDesc, []byte(i.Description))
	}
	b = appendOption(b, optIDBTSResol, []byte{tsresolNanos})
	return endBlock(appendOption(b, optEnd, nil), start)
}

// AppendPacket appends an IP packet of n octets that begins with ip, seen at t on interface id,
// behind an Ethernet header. out reports whether this host sent it. At most snapLen octets are
// kept, the Ethernet header included; zero means DefaultSnapLen. ip holds at least the IP header,
// and as much of the packet as is to be kept. A packet that is neither IPv4 nor IPv6 is kept with
// EtherType 0.
func AppendPacket(b []byte, id uint32, t time.Time, out bool, ip []byte, n, snapLen int) []byte {
	kept := min(EthernetLen+len(ip), Interface{SnapLen: snapLen}.snapLen())
	b, start := beginBlock(b, blockEPB)
	ns := uint64(t.UnixNano())
	for _, v := range [...]uint32{id, uint32(ns >> 32), uint32(ns), uint32(kept), uint32(EthernetLen + n)} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	eth := Ethernet(ip)
	b = append(b, eth[:min(EthernetLen, kept)]...)
	b = append(b, ip[:max(0, kept-EthernetLen)]...)
	b = pad(b, kept)
	flags := byte(flagInbound)
	if out {
		flags = flagOutbound
	}
	b = appendOption(b, optEPBFlags, []byte{flags, 0, 0, 0})
	return endBlock(appendOption(b, optEnd, nil), start)
}

// beginBlock appends type and a place for the length.
func beginBlock(b []byte, typ uint32) ([]byte, int) {
	start := len(b)
	b = binary.LittleEndian.AppendUint32(b, typ)
	return append(b, 0, 0, 0, 0), start
}

// endBlock fills in the length and repeats it at the end.
func endBlock(b []byte, start int) []byte {
	n := uint32(len(b) - start + 4)
	binary.LittleEndian.PutUint32(b[start+4:], n)
	return binary.LittleEndian.AppendUint32(b, n)
}

func appendOption(b []byte, code uint16, v []byte) []byte {
	v = v[:min(len(v), maxOptionLen)]
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(v)))
	return pad(append(b, v...), len(v))
}

// pad brings the n octets just appended to a multiple of 4.
func pad(b []byte, n int) []byte {
	return append(b, []byte{0, 0, 0}[:-n&3]...)
}
