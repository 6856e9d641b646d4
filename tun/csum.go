package tun

import (
	"encoding/binary"
	"sync/atomic"

	"ipoibcm/wire/ip"
)

// Constants of struct virtio_net_hdr, which IFF_VNET_HDR puts before every packet, in the host's
// octet order. At octet 0 are the flags, at 1 the GSO type, at 2 the length of the headers, at 4
// the segment size, at 6 the offset in the packet of the first octet that the checksum covers, and
// at 8 the offset of the checksum from there.
const (
	vnetLen       = 10
	vnetNeedsCsum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	tunFCsum      = 1 // TUN_F_CSUM
)

// checkFrom is the least length in octets of a packet for the kernel whose checksum is worth
// checking here.
const checkFrom = 512

// Checksums reports whether we compute the checksums of TCP and UDP at the TUN. Otherwise the
// kernel computes them packet by packet with words of 8 octets, before it gives a packet out and
// when it takes one in.
type Checksums struct {
	On        bool
	Why       string // why not, or what is doubtful
	Completed uint64 `name:"checksums_completed"` // packets from the kernel whose checksum was computed here
	Verified  uint64 `name:"checksums_verified"`  // packets for the kernel whose checksum was found right here
	Wrong     uint64 `name:"checksums_wrong"`     // packets for the kernel with a wrong checksum: the kernel drops and counts them
	Malformed uint64 `name:"drop_checksum_range"` // packets from the kernel whose covered octets made no sense: dropped
}

// csums is the state behind [Checksums].
type csums struct {
	on                                    bool
	why                                   string
	completed, verified, wrong, malformed atomic.Uint64
}

// Checksums reports whether checksums are computed here (see [Options.NoChecksum]), and returns the
// counts of t and its further queues.
func (t *File) Checksums() Checksums {
	c := &t.csum
	s := Checksums{On: c.on, Why: c.why, Completed: c.completed.Load(), Verified: c.verified.Load(),
		Wrong: c.wrong.Load(), Malformed: c.malformed.Load()}
	for _, q := range t.queues {
		more := q.Checksums()
		s.Completed, s.Verified = s.Completed+more.Completed, s.Verified+more.Verified
		s.Wrong, s.Malformed = s.Wrong+more.Wrong, s.Malformed+more.Malformed
	}
	return s
}

// complete puts the checksum into p, if header h asks for it. It reports whether h made sense.
func (c *csums) complete(h *[vnetLen]byte, p []byte) bool {
	if h[0]&vnetNeedsCsum == 0 {
		return true
	}
	start := int(binary.NativeEndian.Uint16(h[6:]))
	at := start + int(binary.NativeEndian.Uint16(h[8:]))
	if at+2 > len(p) {
		c.malformed.Add(1)
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

// look checks the checksum of p, a packet for the kernel that has at least checkFrom octets. right
// reports that the checksum is right, and then s is the segment of p. The caller then marks the
// checksum as one that is still to be computed ([segment.mark]), as in packets from the host's own
// programs. The kernel trusts such a packet, and computes the checksum if it sends the packet on to
// another host. (A TUN does not know VIRTIO_NET_HDR_F_DATA_VALID.)
func (c *csums) look(p []byte) (s segment, right bool) {
	if len(p) < checkFrom {
		return s, false
	}
	s, ok := find(p)
	switch {
	case !ok:
	case !s.valid(p):
		c.wrong.Add(1)
	default:
		c.verified.Add(1)
		return s, true
	}
	return s, false
}

// A segment is the TCP segment or UDP datagram in a packet.
type segment struct {
	start int    // offset of the segment in the packet
	at    int    // offset of its checksum in the packet
	head  int    // octets of all headers, IP included
	sum   uint32 // sum of the pseudo-header
}

// find finds the segment of a whole TCP or UDP packet that has a checksum. For any other packet ok
// is false.
func find(p []byte) (s segment, ok bool) {
	if len(p) == 0 {
		return s, false
	}
	var proto byte
	switch p[0] >> 4 {
	case 4:
		n := int(p[0]&15) * 4
		if n < 20 || len(p) < n || int(binary.BigEndian.Uint16(p[2:])) != len(p) ||
			binary.BigEndian.Uint16(p[6:])&0x3fff != 0 {
			return s, false
		}
		proto, s.start, s.sum = p[9], n, ip.Sum(0, p[12:20])
	case 6:
		if len(p) < 40 || int(binary.BigEndian.Uint16(p[4:])) != len(p)-40 {
			return s, false
		}
		proto, s.start, s.sum = p[6], 40, ip.Sum(0, p[8:40])
	default:
		return s, false
	}
	seg := p[s.start:]
	switch {
	case proto == 6 && len(seg) >= 20:
		s.at, s.head = s.start+16, s.start+int(seg[12]>>4)*4
		if s.head < s.start+20 || s.head > len(p) {
			return s, false
		}
	case proto == 17 && len(seg) >= 8 && seg[6]|seg[7] != 0 && int(binary.BigEndian.Uint16(seg[4:])) == len(seg):
		s.at, s.head = s.start+6, s.start+8
	default:
		return s, false
	}
	s.sum += uint32(proto) + uint32(len(seg))
	return s, true
}

// valid reports whether the checksum is right.
func (s *segment) valid(p []byte) bool { return ip.Sum(s.sum, p[s.start:]) == 0xffff }

// mark sets h and p so that the kernel completes the checksum.
func (s *segment) mark(h *[vnetLen]byte, p []byte) {
	binary.BigEndian.PutUint16(p[s.at:], uint16(ip.Sum(s.sum, nil)))
	h[0] = vnetNeedsCsum
	binary.NativeEndian.PutUint16(h[2:], uint16(s.head))
	binary.NativeEndian.PutUint16(h[6:], uint16(s.start))
	binary.NativeEndian.PutUint16(h[8:], uint16(s.at-s.start))
}

// verify checks the checksum of a packet. ok is false if find does not take the packet.
func verify(p []byte) (valid, ok bool) {
	s, ok := find(p)
	return ok && s.valid(p), ok
}
