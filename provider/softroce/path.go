package softroce

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

const (
	// defaultHopLimit is what an AH with HopLimit 0 gets.
	defaultHopLimit = 64
	// maxBatch4 and maxBatch6 bound the UDP payload octets of one UDP_SEGMENT call, which
	// the kernel treats as one IP packet of at most 65535 octets.
	maxBatch4 = 65535 - 28
	maxBatch6 = 65535 - 48
	// maxSegments is UDP_MAX_SEGMENTS of older kernels.
	maxSegments = 64
	// bestMessage fills whole packets at every path MTU. At a path MTU of 1024 or more they
	// leave in one call: 15 packets of 4096 octets, or 60 of 1024. Another 4096 octets
	// would take a second call.
	bestMessage = 15 * 4096
)

// A path is all that the packets to one destination have in common, ready for
// the kernel. It belongs to one sender, under whose lock it is used.
type path struct {
	attr   verbs.AHAttr // SGID and HopLimit filled in
	sender *sender
	flow   roce.Flow
	head   roce.IPHeader // for the tap
	v6     bool
	max    int // UDP payload octets of one call
	// whole is the path by which the IPv6 UD packets leave that must be fragmented; nil on
	// all other paths.
	whole *path
	route *routeMTU // nil: the MTU of the route is not obeyed
	// capable says that packets leave ECN-capable. A connection may turn it on and off while
	// it lasts.
	capable atomic.Bool

	ifindex int32 // that name and ctl are made for
	name    [unix.SizeofSockaddrInet6]byte
	nameLen uint32
	_       cmsgAligned
	ctl     [128]byte // control messages; UDP_SEGMENT is the last
	ctlLen  int       // length without UDP_SEGMENT
	segLen  int       // length with UDP_SEGMENT
	segAt   int       // where the value of UDP_SEGMENT is

	// How UDP_SEGMENT fares on this path.
	refused    int       // batches the kernel has refused since one passed
	batchAgain time.Time // when the next batch is tried, after a refusal
}

// newPath checks attr, fills in what it leaves open, and returns the path that
// packets between the two QPNs take; the QPNs matter for the source port only.
func (d *Device) newPath(attr verbs.AHAttr, ud bool, src, dst ib.QPN) (*path, error) {
	return d.threads[0].newPath(attr, ud, src, dst)
}

func (th *thread) newPath(attr verbs.AHAttr, ud bool, src, dst ib.QPN) (*path, error) {
	d := th.dev
	if attr.DGID.IsZero() {
		return nil, fmt.Errorf("%w: no destination GID", verbs.ErrInvalid)
	}
	port := d.port.Load()
	if attr.SGID.IsZero() {
		attr.SGID = port.gidOf(attr.DGID.Is4())
	}
	switch {
	case attr.SGID.IsZero():
		return nil, fmt.Errorf("%w: no source GID for %v on %s", verbs.ErrInvalid, attr.DGID, d.opts.Underlay)
	case attr.SGID.Is4() != attr.DGID.Is4():
		return nil, fmt.Errorf("%w: source %v and destination %v of different families", verbs.ErrInvalid, attr.SGID, attr.DGID)
	}
	attr.HopLimit = cmp.Or(attr.HopLimit, defaultHopLimit)
	attr.TrafficClass = cmp.Or(attr.TrafficClass, uint8(d.class.Load()))
	s := th.pickSender(!attr.DGID.Is4(), roce.SourcePort(attr.FlowLabel, src, dst))
	if s == nil {
		return nil, fmt.Errorf("%w: no socket for %v", verbs.ErrInvalid, attr.DGID)
	}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("no socket for %v: %w", attr.DGID, err)
	}
	p := d.pathOver(s, attr)
	if ud && p.v6 {
		if err := d.sender6UD.open(); err != nil {
			return nil, fmt.Errorf("no socket for %v: %w", attr.DGID, err)
		}
		p.whole = d.pathOver(d.sender6UD, attr)
	}
	return p, nil
}

// overRoute makes p obey the MTU of the route to its destination.
func (p *path) overRoute() {
	p.route = p.sender.dev.routes.to(p.attr.SGID, p.attr.DGID)
	if p.whole != nil {
		p.whole.route = p.route
	}
}

// most returns the longest packet, BTH through pad, that may be sent on p. The MTU of the
// link counts only if p.whole can take longer packets: otherwise the kernel refuses them by
// itself.
func (p *path) most() int {
	octets := math.MaxInt32
	if p.whole != nil {
		octets = p.sender.dev.port.Load().UnderMTU
	}
	if p.route != nil && p.sender.gso {
		octets = min(octets, p.route.octets())
	}
	if p.v6 {
		octets -= 20 // its header is so much longer
	}
	return octets - 20 - 8 - roce.ICRCLen
}

// pathOver makes the path for attr, which is complete, over sender s.
func (d *Device) pathOver(s *sender, attr verbs.AHAttr) *path {
	p := &path{attr: attr, sender: s, v6: !attr.DGID.Is4(), max: maxBatch6}
	if !p.v6 {
		p.max = maxBatch4
	}
	from, to := attr.SGID.Addr(), attr.DGID.Addr()
	p.flow = roce.NewFlow(from, to)
	p.head = roce.IPHeader{Src: from, Dst: to, TrafficClass: attr.TrafficClass, HopLimit: attr.HopLimit, SrcPort: p.sender.port}
	p.bind()
	return p
}

// mayBatch reports whether p may use UDP_SEGMENT.
func (p *path) mayBatch() bool { return p.refused == 0 || !time.Now().Before(p.batchAgain) }

// batchRefused notes that the kernel refused a batch whose first packet passed by
// itself. Other routes and devices may take batches, and this one may later.
func (p *path) batchRefused() {
	d := p.sender.dev
	wait := min(segmentAgain<<min(p.refused, 8), segmentAgainMax)
	p.refused++
	p.batchAgain = time.Now().Add(wait)
	d.count.gsoRefused.Add(1)
	d.log.Debug("UDP_SEGMENT refused, sending packets one by one", "dgid", p.attr.DGID, "again_in", wait)
}

// batchPassed notes that the kernel took a batch.
func (p *path) batchPassed() {
	if p.refused > 0 {
		p.refused = 0
		p.sender.dev.log.Debug("UDP_SEGMENT works again", "dgid", p.attr.DGID)
	}
}

// ECN in a traffic class (RFC 3168 section 5): its bits, and ECT(0).
const ecnMask, ect0 = 3, 2

// class returns the traffic class of packets on p.
func (p *path) class() uint8 {
	if p.capable.Load() {
		return p.attr.TrafficClass&^ecnMask | ect0
	}
	return p.attr.TrafficClass
}

// setCapable sets whether packets on p leave ECN-capable. The caller holds the lock of the
// sender of p.
func (p *path) setCapable(on bool) {
	if p.capable.Swap(on) == on {
		return
	}
	p.head.TrafficClass = p.class()
	p.bind()
	if s := p.sender; s.conn != nil && s.conn.path == p {
		s.disconnect() // its socket has the other class
	}
}

// bind writes the address and the control messages. They name the network device and hold
// the traffic class, so bind is called again when one of these changes.
func (p *path) bind() {
	d := p.sender.dev
	p.ifindex = d.ifindex.Load()
	p.address(d.opts.udpPort())
	p.control()
}

func (p *path) address(port uint16) {
	binary.BigEndian.PutUint16(p.name[2:], port)
	if !p.v6 {
		sa := (*unix.RawSockaddrInet4)(unsafe.Pointer(&p.name[0]))
		sa.Family, sa.Addr = unix.AF_INET, [4]byte(p.attr.DGID[12:])
		p.nameLen = unix.SizeofSockaddrInet4
		return
	}
	sa := (*unix.RawSockaddrInet6)(unsafe.Pointer(&p.name[0]))
	sa.Family, sa.Addr = unix.AF_INET6, p.attr.DGID
	if a := p.attr.DGID.Addr(); a.IsLinkLocalUnicast() || a.IsMulticast() {
		sa.Scope_id = uint32(p.ifindex)
	}
	p.nameLen = unix.SizeofSockaddrInet6
}

func (p *path) control() {
	at, class := 0, p.class()
	put := func(level, typ int32, n int) []byte {
		data, space := putCmsg(p.ctl[at:], level, typ, n)
		at += space
		return data
	}
	level, ofClass, ofHops := int32(unix.IPPROTO_IP), int32(unix.IP_TOS), int32(unix.IP_TTL)
	if p.v6 {
		level, ofClass, ofHops = unix.IPPROTO_IPV6, unix.IPV6_TCLASS, unix.IPV6_HOPLIMIT
		data := put(level, unix.IPV6_PKTINFO, unix.SizeofInet6Pktinfo)
		copy(data, p.attr.SGID[:])
		native.PutUint32(data[16:], uint32(p.ifindex))
	} else {
		data := put(level, unix.IP_PKTINFO, unix.SizeofInet4Pktinfo)
		native.PutUint32(data, uint32(p.ifindex))
		copy(data[4:], p.attr.SGID[12:])
	}
	if class != 0 {
		native.PutUint32(put(level, ofClass, 4), uint32(class))
	}
	if p.attr.HopLimit != defaultHopLimit {
		native.PutUint32(put(level, ofHops, 4), uint32(p.attr.HopLimit))
	}
	p.ctlLen = at
	p.segAt = at + unix.CmsgLen(0)
	put(unix.IPPROTO_UDP, optUDPSegment, 2)
	p.segLen = at
}

// sendUD sends datagrams. Those that the underlay or the route does not carry whole leave
// one by one: on IPv6 by p.whole, so that the kernel fragments them. On IPv4 they are lost.
func (p *path) sendUD(pkts []engine.Packet) {
	most := math.MaxInt
	if p.whole != nil {
		most = p.most()
	}
	sc := p.sender.th.scratch.get()
	defer p.sender.th.scratch.put(sc)
	for len(pkts) > 0 {
		n := 0
		for n < len(pkts) && pkts[n].Len() <= most {
			n++
		}
		if n > 0 {
			p.sender.mu.Lock()
			left := p.sender.send(sc, p, pkts[:n])
			p.sender.mu.Unlock()
			pkts = pkts[n-len(left):]
			if len(left) == 0 {
				continue
			}
		}
		w := p.whole.sender // too long for the underlay, or, as we now know, for the route
		w.mu.Lock()
		w.fragmentFor(p.whole)
		w.send(sc, p.whole, pkts[:1])
		w.mu.Unlock()
		w.dev.count.txFragmented.Add(1)
		pkts = pkts[1:]
	}
}

// An ah is an address handle: UD sends through it take its path.
type ah struct {
	*path
	classes atomic.Pointer[[256]atomic.Pointer[ah]] // by traffic class: the handles that WithClass has made
}

var _ verbs.ClassAH = (*ah)(nil)

// WithClass implements [verbs.ClassAH]. The handles of all classes send from one source
// port.
func (a *ah) WithClass(class uint8) verbs.AH {
	if class == a.attr.TrafficClass {
		return a
	}
	all := a.classes.Load()
	if all == nil {
		a.classes.CompareAndSwap(nil, new([256]atomic.Pointer[ah]))
		all = a.classes.Load()
	}
	if other := all[class].Load(); other != nil {
		return other
	}
	all[class].CompareAndSwap(nil, &ah{path: a.path.withClass(class)})
	return all[class].Load()
}

// withClass returns a path that differs from p in the traffic class only.
func (p *path) withClass(class uint8) *path {
	attr := p.attr
	attr.TrafficClass = class
	other := p.sender.dev.pathOver(p.sender, attr)
	if other.route = p.route; p.whole != nil {
		other.whole = p.whole.withClass(class)
	}
	return other
}

// Attr implements [verbs.AH].
func (a *ah) Attr() verbs.AHAttr { return a.attr }

// Destroy implements [verbs.AH]. Sends that were posted go on using a.
func (a *ah) Destroy() error { return nil }
