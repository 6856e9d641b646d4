package tun

import (
	"encoding/binary"
	"sync/atomic"

	"ipoibcm/wire/ip"
)

// Of struct virtio_net_hdr, which IFF_VNET_HDR puts before every packet, in the
// host's octet order: octet 0 flags, 1 GSO type, 2 header length, 4 segment size,
// 6 where the checksum's cover begins, 8 where in that the checksum is.
const (
	vnetLen       = 10
	vnetNeedsCsum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	vnetDataValid = 2 // VIRTIO_NET_HDR_F_DATA_VALID
	tunFCsum      = 1 // TUN_F_CSUM
)

// checkFrom is the length in octets from which a packet for the kernel is worth
// having its checksum looked at here.
const checkFrom = 512

// The headers of the packets we write.
var (
	vnetPlain [vnetLen]byte
	vnetValid = [vnetLen]byte{vnetDataValid}
)

// Checksums says who computes the checksums of TCP and UDP at the TUN. The kernel
// would do it one packet after the other with words of 8 octets, before it gives
// a packet out and when it takes one in.
type Checksums struct {
	On        bool
	Why       string // why not, or what is doubtful
	Completed uint64 // packets from the kernel that got theirs here
	Verified  uint64 // packets for the kernel whose own was seen to be right
	Wrong     uint64 // those whose was not: the kernel drops and counts them
	Odd       uint64 // from the kernel, whose cover made no sense: dropped
}

// csums is the state behind it.
type csums struct {
	on                              bool
	why                             string
	completed, verified, wrong, odd atomic.Uint64
}

// Checksums says what became of [Options.NoChecksum], and counts.
func (t *File) Checksums() Checksums {
	c := &t.csum
	return Checksums{On: c.on, Why: c.why, Completed: c.completed.Load(), Verified: c.verified.Load(), Wrong: c.wrong.Load(), Odd: c.odd.Load()}
}

// complete puts the checksum into p, if header h asks for it. It reports whether
// that made sense.
func (c *csums) complete(h *[vnetLen]byte, p []byte) bool {
	if h[0]&vnetNeedsCsum == 0 {
		return true
	}
	start := int(binary.NativeEndian.Uint16(h[6:]))
	at := start + int(binary.NativeEndian.Uint16(h[8:]))
	if at+2 > len(p) {
		c.odd.Add(1)
		return false
	}
	// The field holds the sum of the pseudo-header.
	sum := ^uint16(ip.Sum(0, p[start:]))
	if sum == 0 {
		sum = 0xffff // zero means none, in UDP
	}
	binary.BigEndian.PutUint16(p[at:], sum)
	c.completed.Add(1)
	return true
}

// header returns what goes before p on its way to the kernel.
func (c *csums) header(p []byte) *[vnetLen]byte {
	if len(p) < checkFrom {
		return &vnetPlain
	}
	switch valid, ok := verify(p); {
	case !ok:
		return &vnetPlain
	case !valid:
		c.wrong.Add(1)
		return &vnetPlain
	}
	c.verified.Add(1)
	return &vnetValid
}

// verify checks the checksum of a whole TCP or UDP packet. It does not look into
// anything else (ok is false).
func verify(p []byte) (valid, ok bool) {
	var proto byte
	var sum uint32
	var seg []byte
	switch p[0] >> 4 {
	case 4:
		n := int(p[0]&15) * 4
		if n < 20 || len(p) < n || int(binary.BigEndian.Uint16(p[2:])) != len(p) || binary.BigEndian.Uint16(p[6:])&0x3fff != 0 {
			return false, false
		}
		proto, seg, sum = p[9], p[n:], ip.Sum(0, p[12:20])
	case 6:
		if len(p) < 40 || int(binary.BigEndian.Uint16(p[4:])) != len(p)-40 {
			return false, false
		}
		proto, seg, sum = p[6], p[40:], ip.Sum(0, p[8:40])
	default:
		return false, false
	}
	switch {
	case proto == 6 && len(seg) >= 20:
	case proto == 17 && len(seg) >= 8 && seg[6]|seg[7] != 0 && int(binary.BigEndian.Uint16(seg[4:])) == len(seg):
	default:
		return false, false
	}
	return ip.Sum(sum+uint32(proto)+uint32(len(seg)), seg) == 0xffff, true
}
