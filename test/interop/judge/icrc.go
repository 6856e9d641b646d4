// Package judge checks captures without our codecs: it computes the ICRC from its
// definition, without package roce, and tshark dissects the rest.
package judge

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
)

// RoCE returns the IP packet inside an Ethernet frame, and how many octets its IP and
// UDP headers have. ok is false if it is not RoCEv2.
func RoCE(frame []byte) (ip []byte, headers int, ok bool) {
	if len(frame) < 14 {
		return nil, 0, false
	}
	ip = frame[14:]
	total := 0
	switch typ := binary.BigEndian.Uint16(frame[12:]); {
	case typ == 0x0800 && len(ip) >= 28 && ip[9] == 17:
		total, headers = int(binary.BigEndian.Uint16(ip[2:])), int(ip[0]&15)*4
	case typ == 0x86dd && len(ip) >= 48 && ip[6] == 17:
		total, headers = 40+int(binary.BigEndian.Uint16(ip[4:])), 40
	}
	if total > len(ip) || total < headers+8+12+4 || binary.BigEndian.Uint16(ip[headers+2:]) != 4791 {
		return nil, 0, false
	}
	return ip[:total], headers + 8, true
}

// CheckICRC returns an error if a RoCEv2 packet does not carry the ICRC that
// IBA annex A17.3.3 defines.
func CheckICRC(frame []byte) error {
	ip, headers, ok := RoCE(frame)
	if !ok {
		return fmt.Errorf("no RoCEv2 packet: %x", frame[:min(len(frame), 64)])
	}
	b := append(slices.Repeat([]byte{0xff}, 8), ip[:len(ip)-4]...) // eight octets for the LRH that is not there
	h := b[8:]
	if h[0]>>4 == 4 {
		h[1], h[8], h[10], h[11] = 0xff, 0xff, 0xff, 0xff // TOS, TTL, header checksum
	} else {
		h[0] |= 0x0f // traffic class and flow label
		h[1], h[2], h[3], h[7] = 0xff, 0xff, 0xff, 0xff
	}
	h[headers-2], h[headers-1] = 0xff, 0xff // UDP checksum
	h[headers+4] = 0xff                     // FECN, BECN
	want, got := crc32.ChecksumIEEE(b), binary.LittleEndian.Uint32(ip[len(ip)-4:])
	if want != got {
		return fmt.Errorf("ICRC is %08x, should be %08x: %x", got, want, ip[:min(len(ip), headers+40)])
	}
	return nil
}

// A BTH holds the fields of a packet that tests look at.
type BTH struct {
	Opcode   byte
	QPN, PSN uint32
	AckReq   bool
	// Syndrome and MSN are read from behind the BTH. They have a meaning if an AETH is there.
	Syndrome byte
	MSN      uint32
	Payload  int // octets behind the BTH, extension headers and pad included, without ICRC
}

// Base reads the BTH of a RoCEv2 packet.
func Base(frame []byte) (h BTH, ok bool) {
	ip, n, ok := RoCE(frame)
	if !ok {
		return h, false
	}
	b := ip[n:]
	h = BTH{
		Opcode: b[0], QPN: binary.BigEndian.Uint32(b[4:]) & 0xffffff, PSN: binary.BigEndian.Uint32(b[8:]) & 0xffffff,
		AckReq: b[8]&0x80 != 0, Payload: len(b) - 12 - 4,
	}
	if len(b) >= 20 {
		h.Syndrome, h.MSN = b[12], binary.BigEndian.Uint32(b[12:])&0xffffff
	}
	return h, true
}
