package netns

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// oracleForeign are the sources of packets to be forwarded, by family. The last
// has no route back.
var oracleForeign = [2][]netip.Addr{
	{netip.MustParseAddr("172.16.3.10"), netip.MustParseAddr("172.16.3.11"), netip.MustParseAddr("172.16.3.12"),
		netip.MustParseAddr("198.51.100.5")},
	{netip.MustParseAddr("fd16:3::10"), netip.MustParseAddr("fd16:3::11"), netip.MustParseAddr("fd16:3::12"),
		netip.MustParseAddr("2001:db8:99::5")},
}

// A probe is one packet that both hosts are to send.
type probe struct {
	dst, src netip.Addr // src zero: the kernel chooses
	tos      byte
	port     uint16
	forward  bool // it comes in by arrival
}

func (p probe) String() string {
	how := "from here"
	if p.forward {
		how = "forwarded"
	}
	return fmt.Sprintf("%s to %s, source %v, tos %#x, port %d", how, p.dst, p.src, p.tos, p.port)
}

// An outcome is what became of a probe: nothing if it is zero.
type outcome struct {
	hopAt
	src netip.Addr // of the packet: the kernel may have chosen it
	err unix.Errno // of the sender
}

func (o outcome) String() string {
	switch {
	case o.err != 0:
		return o.err.Error()
	case o.dev == "":
		return "nothing"
	}
	return fmt.Sprintf("%s on %s from %s", o.addr, o.dev, o.src)
}

// A side is one of the two hosts, and what was seen of its packets.
type side struct {
	name   string
	fd     [2]int // UDP sockets, by family
	inject int    // packet socket at the far end of arrival
	to     unix.SockaddrLinklayer
	mac    [2]net.HardwareAddr // of arrival, and of its far end

	mu   sync.Mutex
	seq  uint32 // of the round under way; packets of others do not count
	got  []outcome
	last time.Time // when the last one was seen
}

// begin starts a round.
func (s *side) begin(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	s.got = make([]outcome, n)
	s.last = time.Now()
}

func (s *side) set(i int, o outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got[i], s.last = o, time.Now()
}

// saw takes a packet that is on its way to a next hop.
func (s *side) saw(packet []byte, at hopAt) {
	seq, i, ok := probeOf(packet)
	s.mu.Lock()
	defer s.mu.Unlock()
	if ok && seq == s.seq && int(i) < len(s.got) {
		src, _ := ip.Src(packet)
		s.got[i], s.last = outcome{hopAt: at, src: src}, time.Now()
	}
}

// outcomes returns what was seen so far, and how long nothing has come.
func (s *side) outcomes() ([]outcome, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]outcome(nil), s.got...), time.Since(s.last)
}

const probePort = 40755 // source port of probes

// probeOf finds the numbers that a probe carries behind its UDP header.
func probeOf(p []byte) (seq, i uint32, ok bool) {
	at, proto := 40, 6
	if len(p) > 0 && p[0]>>4 == 4 {
		at, proto = 20, 9
	}
	if len(p) < at+16 || p[proto] != unix.IPPROTO_UDP || binary.BigEndian.Uint16(p[at:]) != probePort {
		return 0, 0, false
	}
	return binary.BigEndian.Uint32(p[at+8:]), binary.BigEndian.Uint32(p[at+12:]), true
}

// send sends probe i as part of round seq.
func (s *side) send(p probe, seq uint32, i int) error {
	data := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, seq), uint32(i))
	if p.forward {
		return unix.Sendto(s.inject, s.frame(p, data), 0, &s.to)
	}
	if p.dst.Is4() {
		oob := cmsgInt(unix.IPPROTO_IP, unix.IP_TOS, int32(p.tos))
		if p.src.IsValid() {
			oob = append(oob, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: p.src.As4()})...)
		}
		return unix.Sendmsg(s.fd[0], data, oob, &unix.SockaddrInet4{Port: int(p.port), Addr: p.dst.As4()}, 0)
	}
	oob := cmsgInt(unix.IPPROTO_IPV6, unix.IPV6_TCLASS, int32(p.tos))
	if p.src.IsValid() {
		oob = append(oob, unix.PktInfo6(&unix.Inet6Pktinfo{Addr: p.src.As16()})...)
	}
	return unix.Sendmsg(s.fd[1], data, oob, &unix.SockaddrInet6{Port: int(p.port), Addr: p.dst.As16()}, 0)
}

func cmsgInt(level, typ, v int32) []byte {
	b := make([]byte, unix.CmsgSpace(4))
	binary.NativeEndian.PutUint64(b, uint64(unix.CmsgLen(4)))
	binary.NativeEndian.PutUint32(b[8:], uint32(level))
	binary.NativeEndian.PutUint32(b[12:], uint32(typ))
	binary.NativeEndian.PutUint32(b[16:], uint32(v))
	return b
}

// frame is p as an Ethernet frame that comes in by arrival.
func (s *side) frame(p probe, data []byte) []byte {
	b := append(append([]byte(nil), s.mac[0]...), s.mac[1]...)
	src, dst, n := p.src.AsSlice(), p.dst.AsSlice(), 8+len(data)
	if p.dst.Is4() {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
		b = append(b, 0x45, p.tos, 0, byte(20+n), 0, 0, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0)
		b = append(append(b, src...), dst...)
		binary.BigEndian.PutUint16(b[etherLen+10:], ^onesSum(0, b[etherLen:]))
	} else {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
		b = append(b, 0x60|p.tos>>4, p.tos<<4, 0, 0, 0, byte(n), unix.IPPROTO_UDP, 64)
		b = append(append(b, src...), dst...)
	}
	at := len(b)
	b = binary.BigEndian.AppendUint16(b, probePort)
	b = binary.BigEndian.AppendUint16(b, p.port)
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	b = append(append(b, 0, 0), data...)
	sum := onesSum(uint32(unix.IPPROTO_UDP+n), src)
	sum = onesSum(uint32(sum), dst)
	binary.BigEndian.PutUint16(b[at+6:], ^onesSum(uint32(sum), b[at:]))
	return b
}

// onesSum adds b, of even length, in ones' complement (RFC 1071).
func onesSum(sum uint32, b []byte) uint16 {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// A fabric plays all neighbours of the agent that are no hosts: it answers for
// them with a QPN each, and tells by the QPN who a datagram is for.
type fabric struct {
	conn *net.UDPConn
	gid  netip.Addr // its own
	book *addressBook
	side *side
	psn  ib.PSN
}

const firstQPN = 0x1000 // the QPN of a neighbour is this and its number

// serve reads datagrams until the socket is closed.
func (f *fabric) serve() {
	b := make([]byte, 1<<16)
	for {
		n, from, err := f.conn.ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		f.receive(b[:n], from)
	}
}

func (f *fabric) receive(b []byte, from netip.AddrPort) {
	at := roce.BTHLen + roce.DETHLen
	if len(b) < at+encap.HeaderLen+roce.ICRCLen || roce.BTH(b).Opcode() != roce.UDSendOnly {
		return
	}
	var h encap.Header
	payload := b[at : len(b)-roce.ICRCLen-roce.BTH(b).Pad()]
	if h.UnmarshalBinary(payload) != nil {
		return
	}
	payload = payload[encap.HeaderLen:]
	switch {
	case h.Type == encap.ARP:
		var p arp.Packet
		if p.UnmarshalBinary(payload) == nil && p.Op == arp.Request && !p.IsProbe() {
			if own, ok := f.link(p.TargetIP); ok {
				f.reply(p.Sender, own, encap.ARP, p.ReplyFrom(own), from)
			}
		}
	case h.Type == encap.IPv6 && nd.KindOf(payload) == nd.NeighborSolicitation:
		var m nd.NS
		if m.UnmarshalBinary(payload) == nil && !m.IsDAD() {
			if own, ok := f.link(m.Target); ok {
				f.reply(encap.LinkAddr{QPN: roce.DETH(b[roce.BTHLen:]).SrcQPN()}, own, encap.IPv6, m.Answer(own, false), from)
			}
		}
	default:
		if a, ok := f.book.find(int(roce.BTH(b).DestQPN()) - firstQPN); ok {
			f.side.saw(payload, hopAt{ifName, a})
		}
	}
}

// link is the link-layer address of a neighbour that the fabric plays.
func (f *fabric) link(a netip.Addr) (encap.LinkAddr, bool) {
	id := f.book.ids[a]
	if id == 0 || f.book.own[a] {
		return encap.LinkAddr{}, false
	}
	return encap.LinkAddr{QPN: firstQPN + ib.QPN(id), GID: ib.GIDFromAddr(f.gid)}, true
}

func (f *fabric) reply(to, own encap.LinkAddr, t encap.EtherType, m interface{ AppendBinary([]byte) ([]byte, error) },
	dst netip.AddrPort) {
	body, err := m.AppendBinary([]byte{byte(t >> 8), byte(t & 0xff), 0, 0})
	if err != nil {
		return
	}
	pad := roce.Pad(len(body))
	n := roce.BTHLen + roce.DETHLen + len(body) + pad + roce.ICRCLen
	port := uint16(f.conn.LocalAddr().(*net.UDPAddr).Port)
	pkt := roce.IPHeader{Src: f.gid, Dst: dst.Addr().WithZone(""), HopLimit: 64, SrcPort: port}.Append(nil, n)
	at := len(pkt)
	pkt = append(pkt, make([]byte, n)...)
	f.psn++
	roce.PutBTH(pkt[at:], roce.BTHFields{Opcode: roce.UDSendOnly, Pad: pad, PKey: ib.DefaultPKey, DestQPN: to.QPN,
		PSN: f.psn & 0xffffff})
	roce.PutDETH(pkt[at+roce.BTHLen:], ib.QKeyIPoIB, own.QPN)
	copy(pkt[at+roce.BTHLen+roce.DETHLen:], body)
	if rocetest.Seal(pkt) == nil {
		_, _ = f.conn.WriteToUDPAddrPort(pkt[at:], netip.AddrPortFrom(dst.Addr(), roce.Port))
	}
}

// watch reads the frames that come in by the devices, until done, on a packet
// socket that the calling thread opens.
func watch(devices map[int]func(frame []byte), done <-chan struct{}) (wait func(), err error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
	if err != nil {
		return nil, err
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	tv := unix.NsecToTimeval(int64(50 * time.Millisecond))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		unix.Close(fd)
		return nil, err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer unix.Close(fd)
		b := make([]byte, 1<<16)
		for {
			select {
			case <-done:
				return
			default:
			}
			n, from, err := unix.Recvfrom(fd, b, 0)
			if err != nil {
				continue
			}
			if sll, ok := from.(*unix.SockaddrLinklayer); ok && sll.Pkttype != unix.PACKET_OUTGOING &&
				devices[sll.Ifindex] != nil {
				devices[sll.Ifindex](b[:n])
			}
		}
	})
	return wg.Wait, nil
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// macOf is the Ethernet address of a neighbour, and neighbourOf its number.
func macOf(id int) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, byte(id >> 8), byte(id)} }

func idOf(mac []byte) int { return int(mac[4])<<8 | int(mac[5]) }
