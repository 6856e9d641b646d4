package tun

import (
	"bytes"
	"encoding/binary"
	"sync/atomic"

	"ipoibcm/wire/ip"
)

// Constants of struct virtio_net_hdr and TUNSETOFFLOAD.
const (
	vnetTCP4 = 1 // VIRTIO_NET_HDR_GSO_TCPV4
	vnetTCP6 = 4 // VIRTIO_NET_HDR_GSO_TCPV6
	tunFTSO4 = 2 // TUN_F_TSO4
	tunFTSO6 = 4 // TUN_F_TSO6
)

// Offsets in the TCP header, its least length, its flags (RFC 9293 section 3.1), and the protocol
// number.
const (
	tcpSeq, tcpOffset, tcpFlags, tcpSum = 4, 12, 13, 16
	tcpLen                              = 20
	tcpFIN, tcpSYN, tcpPSH              = 0x01, 0x02, 0x08
	tcpACK, tcpCWR                      = 0x10, 0x80
	protoTCP                            = 6
)

const (
	maxTotal = 65535 // octets of the largest IPv4 packet
	// maxMerged bounds the packets that are merged into one GSO packet for the kernel.
	maxMerged = 64
	// maxHead is the largest size in octets of an IPv6 header and a TCP header with options.
	maxHead = 40 + 60
	// mergeBelow is the length in octets above which no two packets fit into one.
	mergeBelow = maxTotal / 2
)

// Segments reports whether the kernel gives and takes TCP in GSO packets, which may be longer than
// a packet on the wire. Where packets are short, one call then moves dozens of them.
type Segments struct {
	On        bool
	Why       string // why not, or what is doubtful
	Split     uint64 `name:"pieces_split"`       // GSO packets from the kernel that were split
	Made      uint64 `name:"packets_split"`      // packets that split GSO packets became
	Written   uint64 `name:"pieces_merged"`      // GSO packets for the kernel that merged packets became
	Merged    uint64 `name:"packets_merged"`     // packets for the kernel that were merged
	Malformed uint64 `name:"drop_gso_malformed"` // GSO packets that made no sense, and packets of them that did not fit: dropped
}

// tso is the state behind [Segments].
type tso struct {
	toggle
	split, made, malformed atomic.Uint64

	rest large  // the GSO packet that is being split; under File.readMu
	keep []byte // buffer for rest between two reads
}

// Segments reports whether TCP packets to and from the kernel may be GSO packets (see
// [Options.NoSegments]), and returns the counts of t and its further queues.
func (t *File) Segments() Segments {
	s := &t.tso
	sum := Segments{On: s.on.Load(), Why: s.reason(), Split: s.split.Load(), Made: s.made.Load(), Merged: s.merged.Load(),
		Written: s.written.Load(), Malformed: s.malformed.Load()}
	for _, q := range t.queues {
		more := q.Segments()
		sum.Split, sum.Made, sum.Merged = sum.Split+more.Split, sum.Made+more.Made, sum.Merged+more.Merged
		sum.Written, sum.Malformed = sum.Written+more.Written, sum.Malformed+more.Malformed
	}
	return sum
}

// A large is a GSO packet of TCP or UDP from the kernel that is being split. RFC 791, RFC 8200,
// RFC 9293 and RFC 768 say which header fields differ from one packet to the next.
type large struct {
	p     []byte // all headers, and payload
	at    int    // offset in p of the payload of the next packet
	v4    bool
	udp   bool   // it is UDP: no sequence numbers and flags
	tcp   int    // offset of the TCP or UDP header
	head  int    // octets of all headers
	size  int    // payload octets of each packet but the last
	sum   uint32 // of the pseudo-header, without the length
	seq   uint32 // of the next packet
	id    uint16 // IPv4 identification of the next packet
	flags byte   // as the kernel gave them
}

// asLarge parses p, a GSO packet that the kernel gave with header h. ok reports whether it is
// valid.
func asLarge(h *[vnetLen]byte, p []byte) (l large, ok bool) {
	l = large{p: p, udp: h[1] == vnetUDP, size: int(binary.NativeEndian.Uint16(h[4:])),
		tcp: int(binary.NativeEndian.Uint16(h[6:]))}
	proto, sumAt, least := byte(protoTCP), tcpSum, tcpLen
	if l.udp {
		proto, sumAt, least = protoUDP, udpSum, udpLen
	}
	if h[0]&vnetNeedsCsum == 0 || l.size == 0 || int(binary.NativeEndian.Uint16(h[8:])) != sumAt ||
		len(p) < l.tcp+least || !isBehindIP(p, l.tcp, proto) {
		return l, false
	}
	if l.v4 = p[0]>>4 == 4; l.v4 {
		l.id = binary.BigEndian.Uint16(p[4:])
	}
	t := p[l.tcp:]
	if l.head = l.tcp + udpLen; !l.udp {
		l.head = l.tcp + int(t[tcpOffset]>>4)*4
		l.seq, l.flags = binary.BigEndian.Uint32(t[tcpSeq:]), t[tcpFlags]
	}
	if l.head < l.tcp+least || l.head >= len(p) || !l.udp && h[1] != tcpType(p) {
		return l, false
	}
	l.at = l.head
	// The field holds the sum of the pseudo-header, which has the length in it.
	l.sum = uint32(binary.BigEndian.Uint16(t[sumAt:])) + uint32(^uint16(len(t)))
	return l, true
}

// isBehindIP reports whether the IP packet p is whole, and no fragment, and its header of protocol
// proto can be at offset at.
func isBehindIP(p []byte, at int, proto byte) bool {
	switch p[0] >> 4 {
	case 4:
		return at >= 20 && int(p[0]&15)*4 == at && p[9] == proto &&
			int(binary.BigEndian.Uint16(p[2:])) == len(p) && binary.BigEndian.Uint16(p[6:])&0x3fff == 0
	case 6:
		return at >= 40 && (at == 40) == (p[6] == proto) && int(binary.BigEndian.Uint16(p[4:])) == len(p)-40
	}
	return false
}

// tcpType returns the type of a GSO packet of TCP with the IP header of p.
func tcpType(p []byte) byte {
	if p[0]>>4 == 4 {
		return vnetTCP4
	}
	return vnetTCP6
}

// more reports whether a packet is left.
func (l *large) more() bool { return l.at < len(l.p) }

// next puts the next packet into buf and returns its length. It returns 0 if the packet does not
// fit, and drops it. For the first packet buf may be the GSO packet itself.
func (l *large) next(buf []byte) int {
	from := l.at
	l.at = min(l.at+l.size, len(l.p))
	total := l.head + l.at - from
	if len(buf) < total {
		l.seq, l.id = l.seq+uint32(l.at-from), l.id+1
		return 0
	}
	b := buf[:total]
	if &b[0] != &l.p[0] {
		copy(b, l.p[:l.head])
		copy(b[l.head:], l.p[from:l.at])
	}
	if l.v4 {
		binary.BigEndian.PutUint16(b[2:], uint16(total))
		binary.BigEndian.PutUint16(b[4:], l.id)
		b[10], b[11] = 0, 0
		binary.BigEndian.PutUint16(b[10:], ip.Checksum(b[:l.tcp]))
	} else {
		binary.BigEndian.PutUint16(b[4:], uint16(total-40))
	}
	t := b[l.tcp:]
	if l.udp {
		l.putUDP(t)
		l.id++
		return total
	}
	binary.BigEndian.PutUint32(t[tcpSeq:], l.seq)
	t[tcpFlags] = l.flags
	if l.more() {
		t[tcpFlags] &^= tcpFIN | tcpPSH
	}
	if from > l.head {
		t[tcpFlags] &^= tcpCWR
	}
	t[tcpSum], t[tcpSum+1] = 0, 0
	binary.BigEndian.PutUint16(t[tcpSum:], ^uint16(ip.Sum(l.sum+uint32(len(t)), t)))
	l.seq, l.id = l.seq+uint32(l.at-from), l.id+1
	return total
}

// keep moves the rest of the GSO packet into buf, because the reader gets the buffer that holds it.
func (l *large) keep(buf []byte) {
	n := copy(buf, l.p[:l.head])
	n += copy(buf[n:], l.p[l.at:])
	l.p, l.at = buf[:n], l.head
	// The next packet is not the first.
	l.flags &^= tcpCWR
}

// take splits the GSO packet in bufs[0][:n], which came with header h, over bufs, and returns how
// many it filled. It keeps the packets that do not fit into bufs for resume.
func (s *tso) take(h *[vnetLen]byte, n int, bufs [][]byte, sizes []int) int {
	l, ok := asLarge(h, bufs[0][:n])
	if !ok {
		s.malformed.Add(1)
		return 0
	}
	s.split.Add(1)
	s.rest = l
	done := s.resume(bufs, sizes)
	if s.rest.more() {
		if s.keep == nil {
			s.keep = make([]byte, maxTotal+1)
		}
		s.rest.keep(s.keep)
	}
	return done
}

// resume fills bufs with further packets of the GSO packet that is being split, and returns how
// many it filled.
func (s *tso) resume(bufs [][]byte, sizes []int) (n int) {
	for n < len(bufs) && s.rest.more() {
		if sizes[n] = s.rest.next(bufs[n]); sizes[n] == 0 {
			s.malformed.Add(1)
			continue
		}
		n++
	}
	s.made.Add(uint64(n))
	return n
}

// A group is a GSO packet for the kernel that is being merged from packets in a row.
type group struct {
	seg   segment // of the first packet
	first []byte  // the first packet
	n     int     // packets
	size  int     // payload octets of each but the last
	total int     // octets
	ended bool    // nothing may follow
}

// sameIP reports whether p's IP header equals that of the first packet, except where it must
// differ.
func (g *group) sameIP(p []byte) bool {
	f := g.first
	if p[0]>>4 != 4 {
		return bytes.Equal(f[:4], p[:4]) && bytes.Equal(f[6:40], p[6:40])
	}
	// Identifications count up, or with DF mean nothing (RFC 6864).
	counts := p[6] != 0 || binary.BigEndian.Uint16(p[4:]) == binary.BigEndian.Uint16(f[4:])+uint16(g.n)
	return counts && f[0] == p[0] && f[1] == p[1] && f[6] == p[6] && f[8] == p[8] && bytes.Equal(f[12:20], p[12:20])
}

// finish changes the IP header of the first packet to that of the GSO packet, and fills in h, which
// goes before it.
func (g *group) finish(h *[vnetLen]byte, gsoType byte) {
	p, s := g.first, g.seg
	s.sum += uint32(g.total - len(p)) // the pseudo-header has the length
	if p[0]>>4 == 4 {
		binary.BigEndian.PutUint16(p[2:], uint16(g.total))
		p[10], p[11] = 0, 0
		binary.BigEndian.PutUint16(p[10:], ip.Checksum(p[:s.start]))
	} else {
		binary.BigEndian.PutUint16(p[4:], uint16(g.total-s.start))
	}
	s.mark(h, p)
	h[1] = gsoType
	binary.NativeEndian.PutUint16(h[4:], uint16(g.size))
}

// A merger is a group of TCP packets.
type merger struct {
	group
	seq  uint32 // of the packet that may follow
	push bool   // the last one has PSH
}

// begin makes p, whose checksum is right, the first packet. It reports whether
// others may follow.
func (m *merger) begin(p []byte, s segment) bool {
	n := len(p) - s.head
	if !mergeable(p, s) || n == 0 || len(p) > mergeBelow {
		return false
	}
	t := p[s.start:]
	if t[tcpFlags] != tcpACK || congested(p) {
		return false
	}
	*m = merger{group: group{seg: s, first: p, n: 1, size: n, total: len(p)},
		seq: binary.BigEndian.Uint32(t[tcpSeq:]) + uint32(n)}
	return true
}

// mergeable reports whether p is TCP right behind an IP header without options or extension
// headers, and no fragment.
func mergeable(p []byte, s segment) bool {
	if s.at != s.start+tcpSum {
		return false
	}
	if p[0]>>4 == 4 {
		return s.start == 20 && p[6]&^0x40 == 0 // DF may be set
	}
	return s.start == 40
}

// congested reports whether a packet has a CE mark. TCP counts such packets one by one (RFC 9768),
// so they are not merged.
func congested(p []byte) bool {
	if p[0]>>4 == 4 {
		return p[1]&3 == 3
	}
	return p[1]>>4&3 == 3
}

// add appends p if it continues the last packet, its headers differ only where they must, and its
// checksum is right.
func (m *merger) add(p []byte) bool {
	if m.ended || m.n == maxMerged {
		return false
	}
	s, ok := find(p)
	n := len(p) - s.head
	if !ok || s.head != m.seg.head || s.start != m.seg.start || !mergeable(p, s) || n == 0 || n > m.size ||
		m.total+n > maxTotal {
		return false
	}
	t := p[s.start:s.head]
	if !m.sameIP(p) || !m.sameTCP(t) || binary.BigEndian.Uint32(t[tcpSeq:]) != m.seq ||
		t[tcpFlags]&^tcpPSH != tcpACK || !s.valid(p) {
		return false
	}
	m.n, m.total, m.seq = m.n+1, m.total+n, m.seq+uint32(n)
	m.push = t[tcpFlags]&tcpPSH != 0
	m.ended = m.push || n < m.size
	return true
}

// sameTCP reports whether t is the first packet's TCP header, but for sequence
// number, flags and checksum.
func (m *merger) sameTCP(t []byte) bool {
	f := m.first[m.seg.start:m.seg.head]
	return bytes.Equal(f[:tcpSeq], t[:tcpSeq]) && bytes.Equal(f[tcpSeq+4:tcpFlags], t[tcpSeq+4:tcpFlags]) &&
		bytes.Equal(f[tcpFlags+1:tcpSum], t[tcpFlags+1:tcpSum]) && bytes.Equal(f[tcpSum+2:], t[tcpSum+2:])
}

// finish changes the headers of the first packet to those of the GSO packet, and fills in h, which
// goes before it.
func (m *merger) finish(h *[vnetLen]byte) {
	if m.push {
		m.first[m.seg.start+tcpFlags] |= tcpPSH
	}
	m.group.finish(h, tcpType(m.first))
}
