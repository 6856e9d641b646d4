package hostnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"ipoibcm/rtnl"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// lookupTimeout bounds the wait for one answer. The kernel answers within the system call that
// asks, so the timeout passes only if the answer was lost.
const lookupTimeout = 2 * time.Second

// lookupStale is how many answers to earlier requests are skipped in one Lookup.
const lookupStale = 16

// lookupTries bounds how often one Lookup repeats a question. While another program did nothing but
// add and remove a route, two tries did not suffice once in 250,000 lookups.
const lookupTries = 8

// A Resolver asks the kernel for routes, on a socket of its own: a dump or a change
// on another socket does not delay it.
type Resolver struct {
	mu     sync.Mutex
	fd     int // -1 when closed
	seq    uint32
	out    [256]byte
	in     [4096]byte
	strays uint64 // answers to requests that had been given up
}

// OpenResolver opens the socket in the network namespace of the calling thread.
func OpenResolver() (*Resolver, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	tv := unix.NsecToTimeval(lookupTimeout.Nanoseconds())
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1), // an error does not repeat the request
		unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("set up netlink: %w", err)
	}
	return &Resolver{fd: fd}, nil
}

// Close closes the socket.
func (l *Resolver) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fd >= 0 {
		unix.Close(l.fd)
		l.fd = -1
	}
}

// Lookup asks the kernel which route a packet would take. That there is no route is an answer too;
// an error means that the question was not answered. Other methods may be called meanwhile, but
// one Lookup waits for another.
//
// The kernel gives the same error if an IPv4 destination has no route and if the source is no
// address of this host. Lookup tells them apart: the second is [rtnl.ErrForeignSource].
//
// An IPv6 lookup that finds a route while somebody removes it answers that there is none, even if
// another route leads there (fib6_info_hold_safe in net/ipv6/route.c). So if IPv6 has no route,
// Lookup asks again, up to lookupTries times in all.
//
// The question names the protocol only if it is TCP, UDP or ICMP: the kernel refuses others
// (rtm_getroute_parse_ip_proto in net/ipv4/fib_frontend.c).
func (l *Resolver) Lookup(q rtnl.Query) (rtnl.Answer, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	flags := uint32(0)
	if q.Match {
		flags = unix.RTM_F_FIB_MATCH
	}
	a, err := l.ask(q, flags)
	for try := 1; err == unix.ENETUNREACH && q.Dst.Is6() && try < lookupTries; try++ {
		a, err = l.ask(q, flags)
	}
	if err != nil {
		return l.whyNot(q, err)
	}
	if !q.Match {
		a.Prefix = netip.Prefix{} // of the destination, not of the route
	}
	return a, nil
}

// Lookup asks as [Resolver.Lookup] does, in the network namespace of the device.
func (d *Device) Lookup(q rtnl.Query) (rtnl.Answer, error) { return d.look.Lookup(q) }

// whyNot returns the answer that err stands for. If err is no answer, or the source is no address
// of this host, it returns an error.
func (l *Resolver) whyNot(q rtnl.Query, err error) (a rtnl.Answer, _ error) {
	no, ok := errors.AsType[unix.Errno](err)
	if !ok {
		return a, err
	}
	if a.Type, ok = whyNot[no]; !ok {
		return a, fmt.Errorf("look up %v: %w", q.Dst, no)
	}
	if q.IIF == 0 && q.Src.Is4() && (no == unix.EINVAL || no == unix.ENETUNREACH) {
		own, err := l.ask(rtnl.Query{Flow: rtnl.Flow{Dst: q.Src}}, 0)
		if err != nil || own.Type != rtnl.Local {
			return rtnl.Answer{}, rtnl.ErrForeignSource
		}
	}
	return a, nil
}

// whyNot maps the errors that are answers to a type of route. A lookup ends with them if it finds
// no route, or a route of that type (fib_props in net/ipv4/fib_semantics.c, ip6_rt_type_to_error in
// net/ipv6/route.c).
var whyNot = map[unix.Errno]rtnl.RouteType{
	unix.ENETUNREACH:  rtnl.Unreachable,
	unix.EHOSTUNREACH: rtnl.Unreachable,
	unix.EACCES:       rtnl.Prohibit,
	unix.EINVAL:       rtnl.Blackhole,
	unix.EAGAIN:       rtnl.Unreachable, // a throw route, and no later rule leads to another
}

// ask sends one request and reads its answer. An error of the kernel is a bare
// unix.Errno. The caller has l.mu.
func (l *Resolver) ask(q rtnl.Query, flags uint32) (rtnl.Answer, error) {
	if l.fd < 0 {
		return rtnl.Answer{}, errClosed
	}
	l.seq++
	if _, err := retry(func() (int, error) {
		return unix.Write(l.fd, appendQuery(l.out[:0], q, flags, l.seq))
	}); err != nil {
		return rtnl.Answer{}, fmt.Errorf("ask for route: %w", brokenSocket{err})
	}
	for range lookupStale {
		n, err := retry(func() (int, error) { return unix.Read(l.fd, l.in[:]) })
		if err != nil {
			return rtnl.Answer{}, fmt.Errorf("read route: %w", brokenSocket{err})
		}
		a, mine, err := parseAnswer(l.in[:n], l.seq, q)
		if mine {
			return a, err
		}
		l.strays++ // a late answer to a request that was given up
	}
	return rtnl.Answer{}, errors.New("hostnet: no answer among those to earlier requests")
}

// A brokenSocket is an error of the socket. It hides the error number, so that nobody takes it for
// the kernel's answer.
type brokenSocket struct{ err error }

func (e brokenSocket) Error() string { return e.err.Error() }

func retry(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); err != unix.EINTR {
			return n, err
		}
	}
}

// appendQuery appends a request for the route of q (RTM_GETROUTE).
func appendQuery(b []byte, q rtnl.Query, flags, seq uint32) []byte {
	b = append(b, 0, 0, 0, 0) // length, below
	b = binary.NativeEndian.AppendUint16(b, unix.RTM_GETROUTE)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = append(b, 0, 0, 0, 0)
	family, bits, srcBits := byte(unix.AF_INET6), byte(128), byte(0)
	if q.Dst.Is4() {
		family, bits = unix.AF_INET, 32
		flags |= unix.RTM_F_LOOKUP_TABLE // else the answer says main, wherever the route stands
	}
	if q.Src.IsValid() {
		srcBits = bits
	}
	b = append(b, family, bits, srcBits, q.TOS, 0, 0, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, flags)
	b = appendAddr(b, unix.RTA_DST, q.Dst)
	if q.Src.IsValid() {
		b = appendAddr(b, unix.RTA_SRC, q.Src)
	}
	if q.OIF != 0 {
		b = appendAttr32(b, unix.RTA_OIF, q.OIF)
	}
	if q.IIF != 0 {
		b = appendAttr32(b, unix.RTA_IIF, q.IIF)
	}
	if knownProto(family, q.Proto) {
		b = appendAttr(b, unix.RTA_IP_PROTO, []byte{q.Proto})
		b = appendPort(b, unix.RTA_SPORT, q.SrcPort)
		b = appendPort(b, unix.RTA_DPORT, q.DstPort)
	}
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	return b
}

func knownProto(family, proto byte) bool {
	switch proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		return true
	case unix.IPPROTO_ICMP:
		return family == unix.AF_INET
	case unix.IPPROTO_ICMPV6:
		return family == unix.AF_INET6
	}
	return false
}

func appendPort(b []byte, typ int, port uint16) []byte {
	if port == 0 {
		return b
	}
	return appendAttr(b, typ, []byte{byte(port >> 8), byte(port)})
}

// parseAnswer reads an answer of the kernel. mine is false if it belongs to another request than
// seq, which asked q.
func parseAnswer(b []byte, seq uint32, q rtnl.Query) (a rtnl.Answer, mine bool, err error) {
	m, _, ok := nextMessage(b)
	if !ok || m.seq != seq {
		return a, false, nil
	}
	switch {
	case m.typ == unix.NLMSG_ERROR && len(m.data) >= 4:
		no := -int32(binary.NativeEndian.Uint32(m.data))
		if no == 0 {
			return a, true, errShort // we ask for no acknowledgement
		}
		return a, true, unix.Errno(no)
	case m.typ != unix.RTM_NEWROUTE || len(m.data) < unix.SizeofRtMsg:
		return a, true, errShort
	}
	a.Table, a.Protocol, a.Type = int(m.data[4]), m.data[5], rtnl.RouteType(m.data[7])
	dst := unspecified(m.data[0]) // the kernel names no destination for a default route
	err = eachAttr(m.data[unix.SizeofRtMsg:], func(typ int, v []byte) {
		switch typ {
		case unix.RTA_OIF:
			a.OIF = u32(v)
		case unix.RTA_TABLE:
			a.Table = u32(v)
		case unix.RTA_MULTIPATH:
			if h, ok := hopThrough(v, q); ok {
				a.OIF, a.Via = h.device, h.via
			}
		case unix.RTA_METRICS:
			eachAttr(v, func(typ int, v []byte) {
				if typ == unix.RTAX_MTU {
					a.MTU = u32(v)
				}
			})
		default:
			routeAddr(typ, v, &dst, &a.Via, &a.Src)
		}
	})
	a.Prefix = netip.PrefixFrom(dst, int(m.data[1]))
	return a, true, err
}

// A routeHop is one hop of a multipath route.
type routeHop struct {
	device, weight int
	via            netip.Addr
}

// hopThrough chooses one of the hops in b, an RTA_MULTIPATH, that leave by the device q.Through and
// are usable. A hash of the destination and source addresses spreads packets over the hops by their
// weights, so a flow keeps its hop.
func hopThrough(b []byte, q rtnl.Query) (h routeHop, ok bool) {
	var hops []routeHop
	sum := 0
	for len(b) >= unix.SizeofRtNexthop {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtNexthop || n > len(b) {
			break
		}
		h := routeHop{device: u32(b[4:8]), weight: int(b[3]) + 1}
		eachAttr(b[unix.SizeofRtNexthop:n], func(typ int, v []byte) {
			switch {
			case typ == unix.RTA_GATEWAY:
				h.via = addrOf(v)
			case typ == unix.RTA_VIA && len(v) > 2:
				h.via = addrOf(v[2:])
			}
		})
		if h.device == q.Through && b[2]&(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN) == 0 {
			hops = append(hops, h)
			sum += h.weight
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	if sum == 0 {
		return h, false
	}
	spread := fnv.New32a()
	dst, src := q.Dst.As16(), q.Src.As16() // a zero Src is ::
	spread.Write(dst[:])
	spread.Write(src[:])
	at := int(spread.Sum32()>>8) % sum
	for _, h := range hops {
		if at -= h.weight; at < 0 {
			return h, true
		}
	}
	panic("unreachable")
}

// A message is one netlink message in a buffer.
type message struct {
	typ, flags uint16
	seq, pid   uint32
	data       []byte
}

// nextMessage cuts the first message off b.
func nextMessage(b []byte) (m message, rest []byte, ok bool) {
	if len(b) < unix.NLMSG_HDRLEN {
		return m, nil, false
	}
	n := int(binary.NativeEndian.Uint32(b))
	if n < unix.NLMSG_HDRLEN || n > len(b) {
		return m, nil, false
	}
	return message{
		typ: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]),
		seq: binary.NativeEndian.Uint32(b[8:]), pid: binary.NativeEndian.Uint32(b[12:]),
		data: b[unix.NLMSG_HDRLEN:n],
	}, b[min((n+3)&^3, len(b)):], true
}
