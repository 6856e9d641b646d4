package netns

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/peerrpc"
	"ipoibcm/rdmacm"
	"ipoibcm/serviceid"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// A forgery is a kind of packet that a forger sends, each from another source:
// GID, QPN, IP address and communication ID are drawn at random, and nothing else
// is wrong with it.
type forgery string

const (
	forgedARP  forgery = "ARP"
	forgedND   forgery = "ND"
	forgedREQ  forgery = "REQ"
	inbandREQ  forgery = "REQ in-band"
	forgedData forgery = "UD data"
	askingREQ  forgery = "REQ to ask" // for the service of agents that ask each other
)

const (
	// forgerBatch is how many frames one call sends.
	forgerBatch = 64
	etherLen    = 14
	// destPortAt is where a frame over IPv6 has its UDP destination port.
	destPortAt = etherLen + 40 + 2
)

// A forger holds Ethernet frames for one victim, ready to be sent. No two are
// alike, and none is sent twice to an agent.
type forger struct {
	fd     int
	kind   forgery
	victim *host
	gid    netip.Addr
	qpn    ib.QPN
	r      *rand.Rand
	ether  []byte // header of every frame

	frames [][]byte
	iovs   []unix.Iovec
	msgs   []mmsghdr
}

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
	_   [4]byte
}

// forge makes n frames that go from a host on the segment to the agent of victim.
func (s *segment) forge(from, victim *host, kind forgery, n int) *forger {
	s.Helper()
	f := s.forger(from, victim)
	f.kind, f.r, f.frames = kind, rand.New(rand.NewPCG(uint64(len(kind)), uint64(n))), make([][]byte, n)
	f.renew()
	return f
}

// forger returns one without frames.
func (s *segment) forger(from, victim *host) *forger {
	s.Helper()
	here, err := from.Link(underlay)
	s.must(err)
	fd := -1
	s.must(from.Do(func() (err error) { // protocol 0: nothing is received
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: here.Attrs().Index})
		}
		return err
	}))
	s.Cleanup(func() { unix.Close(fd) })
	_ = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1)
	there, err := victim.Link(underlay)
	s.must(err)
	gid := netip.MustParseAddr(victim.status().Interface.GID)
	qpn, err := parseQPN(victim.status().Interface.UDQPN)
	s.must(err)
	f := &forger{fd: fd, victim: victim, gid: gid, qpn: qpn}
	f.ether = append(f.ether, there.Attrs().HardwareAddr...)
	f.ether = append(f.ether, here.Attrs().HardwareAddr...)
	f.ether = binary.BigEndian.AppendUint16(f.ether, unix.ETH_P_IPV6)
	return f
}

// load takes IPv6 packets for its frames.
func (f *forger) load(packets [][]byte) {
	f.frames = f.frames[:0]
	for _, p := range packets {
		f.frames = append(f.frames, append(append([]byte(nil), f.ether...), p...))
	}
	f.point()
}

// point has the system call find the frames.
func (f *forger) point() {
	f.iovs, f.msgs = make([]unix.Iovec, len(f.frames)), make([]mmsghdr, len(f.frames))
	for i, fr := range f.frames {
		f.iovs[i].Base = &fr[0]
		f.iovs[i].SetLen(len(fr))
		f.msgs[i].hdr.Iov = &f.iovs[i]
		f.msgs[i].hdr.SetIovlen(1)
	}
}

// renew makes all frames anew.
func (f *forger) renew() {
	for i := range f.frames {
		f.frames[i] = append(append(f.frames[i][:0], f.ether...), forged(f.r, f.kind, f.victim, f.gid, f.qpn)...)
	}
	f.point()
}

// forged makes one IP packet.
func forged(r *rand.Rand, kind forgery, victim *host, gid netip.Addr, qpn ib.QPN) []byte {
	var a [16]byte
	a[0], a[1] = 0xfe, 0x80
	binary.BigEndian.PutUint64(a[8:], r.Uint64())
	src := netip.AddrFrom16(a)
	link := encap.LinkAddr{Flags: encap.FlagRC, QPN: 2 + ib.QPN(r.Uint32N(1<<24-3)), GID: ib.GIDFromAddr(src)}
	from, to, key := link.QPN, qpn, ib.QKeyIPoIB
	var body []byte
	var err error
	switch kind {
	case forgedARP:
		sender := netip.AddrFrom4([4]byte{10, byte(1 + r.Uint32N(200)), byte(r.Uint32()), byte(1 + r.Uint32N(250))})
		body, err = arp.NewRequest(link, sender, victim.v4).AppendBinary([]byte{byte(encap.ARP >> 8),
			byte(encap.ARP & 0xff), 0, 0})
	case forgedND:
		b := victim.v6.As16()
		binary.BigEndian.PutUint64(b[8:], r.Uint64())
		body, err = nd.NewNS(netip.AddrFrom16(b), victim.v6,
			link).AppendBinary([]byte{byte(encap.IPv6 >> 8), byte(encap.IPv6 & 0xff), 0, 0})
	case forgedData: // to a UDP port of the interface that is closed
		a := [4]byte{10, byte(1 + r.Uint32N(200)), byte(r.Uint32()), byte(1 + r.Uint32N(250))}
		udp := append(binary.BigEndian.AppendUint16(nil, uint16(r.Uint32())), 0, 9, 0, 8+64, 0, 0)
		body = append(header4(netip.AddrFrom4(a), victim.v4, unix.IPPROTO_UDP, len(udp)+64),
			append(udp, make([]byte, 64)...)...)
		body = append([]byte{byte(encap.IPv4 >> 8), byte(encap.IPv4 & 0xff), 0, 0}, body...)
	case forgedREQ, inbandREQ, askingREQ:
		req := mad.REQ{TransactionID: r.Uint64(), LocalCommID: mad.CommID(r.Uint32()),
			ServiceID:   serviceid.New(serviceid.RFC, qpn),
			LocalCAGUID: ib.GUID(r.Uint64()), LocalQPN: 2 + ib.QPN(r.Uint32N(1<<24-3)), RemoteCMResponseTimeout: 16,
			LocalCMResponseTimeout: 16,
			Transport:              ib.RC, StartingPSN: ib.PSN(r.Uint32N(1 << 24)), RetryCount: 7, RNRRetryCount: 7,
			PKey: ib.DefaultPKey, PathMTU: ib.MTU1024, MaxCMRetries: 15, SRQ: true}
		req.Primary = mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID, LocalGID: link.GID,
			RemoteGID: ib.GIDFromAddr(gid),
			HopLimit:  64, LocalACKTimeout: 14}
		pd, _ := encap.PrivateData{QPN: link.QPN, ReceiveMTU: 65524}.AppendBinary(nil)
		copy(req.PrivateData[:], pd)
		if kind == askingREQ {
			req.ServiceID, req.ResponderResources, req.InitiatorDepth = serviceid.RDMAIP(peerrpc.Port), 4, 4
			copy(req.PrivateData[:], rdmacm.Header{SrcPort: 40000, Src: src, Dst: gid}.Append(nil))
		}
		if kind != inbandREQ {
			from, to, key = ib.QPNGSI, ib.QPNGSI, ib.QKeyGSI
			body, err = req.AppendBinary(nil)
		} else {
			body, err = req.AppendBinary([]byte{byte(encap.InbandCM >> 8), byte(encap.InbandCM & 0xff), 0, 0})
		}
	}
	if err != nil {
		panic(err)
	}
	return forgedUD(r, src, gid, from, to, key, body)
}

// forgedUD makes one UD packet.
func forgedUD(r *rand.Rand, src, dst netip.Addr, from, to ib.QPN, key ib.QKey, body []byte) []byte {
	pad := roce.Pad(len(body))
	b := make([]byte, roce.BTHLen+roce.DETHLen, roce.BTHLen+roce.DETHLen+len(body)+pad)
	roce.PutBTH(b, roce.BTHFields{Opcode: roce.UDSendOnly, Pad: pad, PKey: ib.DefaultPKey, DestQPN: to,
		PSN: ib.PSN(r.Uint32N(1 << 24))})
	roce.PutDETH(b[roce.BTHLen:], key, from)
	return sealed(r, src, dst, append(append(b, body...), make([]byte, pad)...))
}

// sealed puts IP and UDP headers in front of covered, which begins with the BTH,
// and the ICRC behind it.
func sealed(r *rand.Rand, src, dst netip.Addr, covered []byte) []byte {
	n := len(covered) + roce.ICRCLen
	pkt := roce.IPHeader{Src: src, Dst: dst, HopLimit: 64, SrcPort: 0xc000 | uint16(r.Uint32N(1<<14))}.Append(nil, n)
	pkt = append(append(pkt, covered...), make([]byte, roce.ICRCLen)...)
	if err := rocetest.Seal(pkt); err != nil {
		panic(err)
	}
	return pkt
}

// send sends perSecond frames to the UDP port until ctx ends or there are no more,
// and returns how many left.
func (f *forger) send(ctx context.Context, port, perSecond int) (sent int, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := time.Now()
	for ctx.Err() == nil && sent < len(f.frames) {
		due := int(time.Since(start).Seconds()*float64(perSecond)) - sent
		if due <= 0 {
			time.Sleep(time.Millisecond)
			continue
		}
		n := min(due, forgerBatch, len(f.frames)-sent)
		for _, fr := range f.frames[sent : sent+n] {
			binary.BigEndian.PutUint16(fr[destPortAt:], uint16(port))
		}
		did, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(f.fd), uintptr(unsafe.Pointer(&f.msgs[sent])),
			uintptr(n), 0, 0, 0)
		switch errno {
		case 0:
			sent += int(did)
		case unix.ENOBUFS, unix.EAGAIN, unix.EINTR:
		default:
			return sent, fmt.Errorf("send forged packets: %w", errno)
		}
	}
	return sent, nil
}
