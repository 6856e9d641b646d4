package hostnet

import (
	"cmp"
	"encoding/binary"
	"errors"
	"ipoibcm/rtnl"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var errShort = errors.New("hostnet: short netlink message")

// eachAttr calls f for every attribute in b. typ is without the flag bits.
func eachAttr(b []byte, f func(typ int, v []byte)) error {
	for len(b) >= unix.SizeofRtAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return errShort
		}
		f(int(binary.NativeEndian.Uint16(b[2:]))&0x3fff, b[unix.SizeofRtAttr:n])
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

// attrs returns the values of the attributes of one type in b.
func attrs(b []byte, typ int) (values [][]byte) {
	eachAttr(b, func(t int, v []byte) {
		if t == typ {
			values = append(values, v)
		}
	})
	return values
}

func u32(v []byte) int {
	if len(v) < 4 {
		return 0
	}
	return int(binary.NativeEndian.Uint32(v))
}

func addrOf(v []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(v)
	return a
}

func familyOf(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func unspecified(family byte) netip.Addr {
	if family == unix.AF_INET {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// A routeMsg is a route, and the fields that tell whether it concerns a device.
type routeMsg struct {
	rtnl.Route
	oif       int
	exception bool // a learned path MTU, not a route
}

// parseRoute reads the body of an RTM_NEWROUTE or RTM_DELROUTE.
func parseRoute(b []byte) (m routeMsg, err error) {
	if len(b) < unix.SizeofRtMsg {
		return m, errShort
	}
	family, dstLen := b[0], int(b[1])
	m.TOS, m.Table, m.Protocol, m.Scope, m.Type = b[3], int(b[4]), b[5], b[6], rtnl.RouteType(b[7])
	flags := binary.NativeEndian.Uint32(b[8:])
	m.OnLink = flags&unix.RTNH_F_ONLINK != 0
	m.exception = flags&unix.RTM_F_CLONED != 0
	if family != unix.AF_INET && family != unix.AF_INET6 {
		return m, errors.New("hostnet: route of another family")
	}
	dst := unspecified(family)
	err = eachAttr(b[unix.SizeofRtMsg:], func(typ int, v []byte) {
		switch typ {
		case unix.RTA_OIF:
			m.oif = u32(v)
		case unix.RTA_PRIORITY:
			m.Metric = uint32(u32(v))
		case unix.RTA_TABLE:
			m.Table = u32(v)
		case unix.RTA_PREF:
			if len(v) == 1 {
				m.Pref = v[0]
			}
		case unix.RTA_CACHEINFO:
			if len(v) >= 12 { // rta_expires, in USER_HZ
				m.Expires = max(int(int32(u32(v[8:])))/100, 0)
			}
		case unix.RTA_METRICS:
			m.parseMetrics(v)
		default:
			routeAddr(typ, v, &dst, &m.Via, &m.Src)
		}
	})
	if err != nil {
		return m, err
	}
	if !dst.IsValid() || dstLen > dst.BitLen() {
		return m, errShort
	}
	m.Dst = netip.PrefixFrom(dst, dstLen)
	return m, nil
}

// routeAddr reads an attribute that is an address of a route.
func routeAddr(typ int, v []byte, dst, via, src *netip.Addr) {
	switch typ {
	case unix.RTA_DST:
		*dst = addrOf(v)
	case unix.RTA_GATEWAY:
		*via = addrOf(v)
	case unix.RTA_VIA:
		if len(v) > 2 {
			*via = addrOf(v[2:])
		}
	case unix.RTA_PREFSRC:
		*src = addrOf(v)
	}
}

func (m *routeMsg) parseMetrics(b []byte) {
	var other strings.Builder
	eachAttr(b, func(typ int, v []byte) {
		switch typ {
		case unix.RTAX_LOCK:
			m.MTULock = u32(v)&(1<<unix.RTAX_MTU) != 0
		case unix.RTAX_MTU:
			m.MTU = u32(v)
		case unix.RTAX_ADVMSS:
			m.AdvMSS = u32(v)
		default:
			other.Write(appendAttr(nil, typ, v))
		}
	})
	m.Other = other.String()
}

// appendAttr appends one attribute, padded.
func appendAttr(b []byte, typ int, v []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(v)))
	b = binary.NativeEndian.AppendUint16(b, uint16(typ))
	b = append(b, v...)
	return append(b, make([]byte, -len(v)&3)...)
}

func appendAttr32(b []byte, typ, v int) []byte {
	var n [4]byte
	binary.NativeEndian.PutUint32(n[:], uint32(v))
	return appendAttr(b, typ, n[:])
}

func appendAddr(b []byte, typ int, a netip.Addr) []byte {
	v := a.As16() // IPv4 is its end
	return appendAttr(b, typ, v[16-a.BitLen()/8:])
}

// appendRoute appends the body of a request about r on the device. A removal has only the fields
// that identify the route.
func appendRoute(b []byte, r rtnl.Route, index int, removal bool) []byte {
	typ, table := cmp.Or(r.Type, rtnl.Unicast), cmp.Or(r.Table, rtnl.TableMain)
	var flags uint32
	if r.OnLink {
		flags = unix.RTNH_F_ONLINK
	}
	b = append(b, familyOf(r.Dst.Addr()), byte(r.Dst.Bits()), 0, r.TOS, byte(min(table, 252)), r.Protocol, r.Scope, byte(typ))
	if table <= 255 {
		b[len(b)-4] = byte(table)
	}
	b = binary.NativeEndian.AppendUint32(b, flags)
	b = appendAttr32(b, unix.RTA_TABLE, table)
	if r.Dst.Bits() > 0 {
		b = appendAddr(b, unix.RTA_DST, r.Dst.Addr())
	}
	b = appendAttr32(b, unix.RTA_OIF, index)
	if r.Metric != 0 {
		b = appendAttr32(b, unix.RTA_PRIORITY, int(r.Metric))
	}
	switch {
	case !r.Via.IsValid():
	case r.Via.Is4() == r.Dst.Addr().Is4():
		b = appendAddr(b, unix.RTA_GATEWAY, r.Via)
	default:
		b = appendAttr(b, unix.RTA_VIA, append(binary.NativeEndian.AppendUint16(nil, unix.AF_INET6), r.Via.AsSlice()...))
	}
	if removal {
		return b
	}
	if r.Src.IsValid() {
		b = appendAddr(b, unix.RTA_PREFSRC, r.Src)
	}
	if r.Pref != 0 {
		b = appendAttr(b, unix.RTA_PREF, []byte{r.Pref})
	}
	if r.Expires != 0 {
		b = appendAttr32(b, unix.RTA_EXPIRES, r.Expires)
	}
	metrics := []byte(r.Other)
	if r.MTU != 0 {
		metrics = appendAttr32(metrics, unix.RTAX_MTU, r.MTU)
		if r.MTULock {
			metrics = appendAttr32(metrics, unix.RTAX_LOCK, 1<<unix.RTAX_MTU)
		}
	}
	if r.AdvMSS != 0 {
		metrics = appendAttr32(metrics, unix.RTAX_ADVMSS, r.AdvMSS)
	}
	if len(metrics) > 0 {
		b = appendAttr(b, unix.RTA_METRICS|unix.NLA_F_NESTED, metrics)
	}
	return b
}

// parseAddr reads the body of an RTM_NEWADDR or RTM_DELADDR.
func parseAddr(b []byte) (a rtnl.Addr, index int, err error) {
	if len(b) < unix.SizeofIfAddrmsg {
		return a, 0, errShort
	}
	bits, flags := int(b[1]), int(b[2])
	a.Scope = b[3]
	index = u32(b[4:])
	var local, address netip.Addr
	err = eachAttr(b[unix.SizeofIfAddrmsg:], func(typ int, v []byte) {
		switch typ {
		case unix.IFA_LOCAL:
			local = addrOf(v)
		case unix.IFA_ADDRESS:
			address = addrOf(v)
		case unix.IFA_BROADCAST:
			a.Broadcast = addrOf(v)
		case unix.IFA_FLAGS:
			flags = u32(v)
		}
	})
	switch {
	case err != nil:
		return a, index, err
	case !local.IsValid():
		local = address
	case address != local:
		a.Peer = address
	}
	if !local.IsValid() || bits > local.BitLen() {
		return a, index, errShort
	}
	a.Prefix = netip.PrefixFrom(local, bits)
	a.Tentative = flags&unix.IFA_F_TENTATIVE != 0
	a.DADFailed = flags&unix.IFA_F_DADFAILED != 0
	a.Permanent = flags&unix.IFA_F_PERMANENT != 0
	a.Generated = flags&unix.IFA_F_STABLE_PRIVACY != 0
	return a, index, nil
}

// linkOf returns those fields of a link that we show.
func linkOf(l netlink.Link) rtnl.Link {
	a := l.Attrs()
	table := 0
	if v, ok := a.Slave.(*netlink.VrfSlave); ok {
		table = int(v.Table)
	}
	return rtnl.Link{
		Index: a.Index, Name: a.Name, MTU: a.MTU, HWAddr: a.HardwareAddr.String(),
		Up: a.RawFlags&unix.IFF_UP != 0, Running: a.RawFlags&unix.IFF_RUNNING != 0,
		Type: linkType(l), Master: a.MasterIndex, VRFTable: table,
	}
}

func linkType(l netlink.Link) string {
	if t := l.Type(); t != "device" {
		return t
	}
	return ""
}
