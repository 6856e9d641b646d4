package tun

import (
	"bytes"
	"encoding/binary"
	"sync/atomic"

	"ipoibcm/wire/ip"
)

// Constants of struct virtio_net_hdr and TUNSETOFFLOAD, since Linux 6.2.
const (
	vnetUDP  = 5    // VIRTIO_NET_HDR_GSO_UDP_L4
	tunFUSO4 = 0x20 // TUN_F_USO4
	tunFUSO6 = 0x40 // TUN_F_USO6; the kernel takes both or none
)

// Offsets in the UDP header, its length, and the protocol number (RFC 768).
const (
	udpLength, udpSum = 4, 6
	udpLen            = 8
	protoUDP          = 17
)

// Datagrams reports whether the kernel gives and takes several UDP datagrams of one flow as one GSO
// packet. They stay datagrams: a program reads them one at a time, unless it asked for more
// (UDP_GRO).
type Datagrams struct {
	On      bool
	Why     string // why not, or what is doubtful
	Split   uint64 `name:"udp_gso_split"`        // GSO packets from the kernel that were split
	Written uint64 `name:"udp_gso_written"`      // GSO packets for the kernel that merged datagrams became
	Merged  uint64 `name:"udp_datagrams_merged"` // datagrams for the kernel that were merged
}

// uso is the state behind [Datagrams].
type uso struct {
	toggle
	split atomic.Uint64
}

// Datagrams reports whether UDP packets to and from the kernel may be GSO packets (see
// [Options.NoDatagrams]), and returns the counts of t and its further queues.
func (t *File) Datagrams() Datagrams {
	s := &t.uso
	sum := Datagrams{On: s.on.Load(), Why: s.reason(), Split: s.split.Load(), Merged: s.merged.Load(),
		Written: s.written.Load()}
	for _, q := range t.queues {
		more := q.Datagrams()
		sum.Split, sum.Merged, sum.Written = sum.Split+more.Split, sum.Merged+more.Merged, sum.Written+more.Written
	}
	return sum
}

// putUDP sets length and checksum in the UDP header of datagram t.
func (l *large) putUDP(t []byte) {
	binary.BigEndian.PutUint16(t[udpLength:], uint16(len(t)))
	t[udpSum], t[udpSum+1] = 0, 0
	sum := ^uint16(ip.Sum(l.sum+uint32(len(t)), t))
	if sum == 0 {
		sum = 0xffff // zero means none
	}
	binary.BigEndian.PutUint16(t[udpSum:], sum)
}

// isUDP reports whether p, which is not empty, is UDP right behind an IP header
// without options.
func isUDP(p []byte) bool {
	switch p[0] {
	case 0x45:
		return len(p) > 28 && p[9] == protoUDP
	default:
		return p[0]>>4 == 6 && len(p) > 48 && p[6] == protoUDP
	}
}

// A datagrams is a GSO packet of UDP for the kernel that is being merged from datagrams of one
// flow and one length; the last may be shorter.
type datagrams struct{ group }

// begin makes p, a UDP packet, the first packet. right says that look has found its checksum right,
// and that s is its segment; else begin checks a short packet itself. begin reports whether others
// may follow.
func (m *datagrams) begin(p []byte, s segment, right bool) bool {
	if len(p) > mergeBelow {
		return false
	}
	if !right {
		var ok bool
		if len(p) >= checkFrom { // it was looked at
			return false
		}
		if s, ok = find(p); !ok || !s.valid(p) {
			return false
		}
	}
	n := len(p) - s.head
	if n == 0 || p[0]>>4 == 4 && p[6]&^0x40 != 0 { // DF may be set
		return false
	}
	*m = datagrams{group{seg: s, first: p, n: 1, size: n, total: len(p)}}
	return true
}

// add appends p if it is of the same flow, its headers differ only where they must, and its
// checksum is right.
func (m *datagrams) add(p []byte) bool {
	n := len(p) - m.seg.head
	if m.ended || m.n == maxMerged || n <= 0 || n > m.size || m.total+n > maxTotal || !isUDP(p) || !m.sameFlow(p) {
		return false
	}
	s, ok := find(p)
	if !ok || s.head != m.seg.head || !s.valid(p) {
		return false
	}
	m.n, m.total = m.n+1, m.total+n
	m.ended = n < m.size
	return true
}

// sameFlow reports whether p's headers equal those of the first packet, except where they must
// differ.
func (m *datagrams) sameFlow(p []byte) bool {
	at := m.seg.start
	return bytes.Equal(m.first[at:at+udpLength], p[at:at+udpLength]) && m.sameIP(p) // ports
}

// finish changes the headers of the first packet to those of the GSO packet, and fills in h, which
// goes before it.
func (m *datagrams) finish(h *[vnetLen]byte) {
	start := m.seg.start
	binary.BigEndian.PutUint16(m.first[start+udpLength:], uint16(m.total-start))
	m.group.finish(h, vnetUDP)
}
