package softroce

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// pathReserve is how many octets of a packet the IP and RoCEv2 headers and the ICRC take at
// most. Only an RDMA WRITE with immediate data over IPv6 takes four more, if it is one packet.
const pathReserve = 80

// A portState is what the underlay looks like at one moment. It is immutable.
type portState struct {
	verbs.Port
}

// has reports whether g is one of our GIDs.
func (p *portState) has(g ib.GID) bool { return slices.Contains(p.GIDs, g) }

// forgesUs reports whether a packet from src and a source port claims to be ours, and
// is not: it comes from one of our GIDs, but not from one of our sockets, whose ports
// nobody else can bind. A local user can send such packets from any other port.
func (d *Device) forgesUs(src ib.GID, port uint16) bool {
	if fixed := d.opts.GID; !fixed.IsZero() && src != fixed || fixed.IsZero() && !d.port.Load().has(src) {
		return false
	}
	return !d.ports[familyIndex(!src.Is4())].has(port)
}

// gidOf returns our first GID of a family, zero if there is none.
func (p *portState) gidOf(v4 bool) ib.GID {
	for _, g := range p.GIDs {
		if g.Is4() == v4 {
			return g
		}
	}
	return ib.GID{}
}

// An underlay reads the state of the network device by netlink.
type underlay struct {
	opts   *Options
	handle *netlink.Handle   // made at Open: it stays in that network namespace
	routes *hostnet.Resolver // made at Open too: it stays in that network namespace
}

// ErrStopped says that Options.Stop was closed while Open waited.
var ErrStopped = errors.New("asked to stop")

// errTentative says that the address to use is still tentative.
var errTentative = errors.New("the address is still tentative")

// read returns the device's state, with prefer as first GID if it is still there. While the
// address to use is tentative, it returns errTentative beside the state.
func (u *underlay) read(prefer ib.GID) (*portState, netlink.Link, error) {
	link, err := u.handle.LinkByName(u.opts.Underlay)
	if err != nil {
		return nil, nil, fmt.Errorf("underlay %s: %w", u.opts.Underlay, err)
	}
	at := link.Attrs()
	p := &portState{verbs.Port{
		PKeys: u.opts.pkeys(), GUID: u.opts.GUID, LID: ib.PermissiveLID,
		UnderlayIf: at.Name, UnderMTU: at.MTU, MTU: ib.MTUFromOctets(at.MTU - pathReserve),
	}}
	up := at.Flags&net.FlagUp != 0 && at.RawFlags&unix.IFF_RUNNING != 0
	addrs, err := u.addresses(link)
	if err != nil {
		return nil, nil, fmt.Errorf("addresses of %s: %w", at.Name, err)
	}
	var v6, v4 []ib.GID
	tentative, linkLocal := false, false // there are tentative addresses, a link-local one among them
	for _, a := range addrs {
		ip, _ := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		gid := ib.GIDFromAddr(ip)
		switch {
		case !u.opts.GID.IsZero() && gid != u.opts.GID, a.Flags&unix.IFA_F_DADFAILED != 0:
		case a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0:
			tentative, linkLocal = true, linkLocal || ip.IsLinkLocalUnicast()
		case ip.Is4():
			v4 = append(v4, gid)
		case ip.IsLinkLocalUnicast():
			v6 = slices.Insert(v6, 0, gid) // the default needs no configuration
		default:
			v6 = append(v6, gid)
		}
	}
	if g := u.opts.GID; !g.IsZero() && len(v4)+len(v6) == 0 && onLoopback(link, addrs, g) {
		v4 = append(v4, g)
	}
	p.GIDs = append(v6, v4...)
	if u.opts.PreferIPv4 {
		p.GIDs = append(v4, v6...)
	}
	if i := slices.Index(p.GIDs, prefer); i > 0 {
		p.GIDs = slices.Insert(slices.Delete(p.GIDs, i, i+1), 0, prefer)
	}
	p.Active = up && len(p.GIDs) > 0
	better := !u.opts.GID.IsZero() || len(v6) == 0 || linkLocal && !v6[0].Addr().IsLinkLocalUnicast()
	if tentative && better && !(u.opts.PreferIPv4 && len(v4) > 0) {
		return p, link, errTentative
	}
	return p, link, nil
}

// onLoopback reports whether g is an IPv4 address in a prefix of a loopback device, where
// all addresses of a prefix are local.
func onLoopback(link netlink.Link, addrs []netlink.Addr, g ib.GID) bool {
	return link.Attrs().Flags&net.FlagLoopback != 0 && g.Is4() && slices.ContainsFunc(addrs, func(a netlink.Addr) bool {
		return a.IPNet != nil && a.Contains(net.IP(g[12:]))
	})
}

// addresses lists the addresses. If a change interrupts the dump, it tries again, up to ten
// times.
func (u *underlay) addresses(link netlink.Link) (addrs []netlink.Addr, err error) {
	for range 10 {
		if addrs, err = u.handle.AddrList(link, netlink.FAMILY_ALL); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return addrs, err
		}
	}
	return addrs, nil // usable all the same
}

// wait reads the state until the address that is to be the first GID is usable: the link-local one,
// if there is one. When the time is over it takes another address if that one is still tentative, or
// else returns an error.
func (u *underlay) wait() (*portState, netlink.Link, error) {
	end := time.Now().Add(u.opts.addressWait())
	for {
		p, link, err := u.read(ib.GID{})
		switch late, g := time.Now().After(end), u.opts.GID; {
		case err != nil && !errors.Is(err, errTentative):
			return nil, nil, err
		case len(p.GIDs) > 0 && (err == nil || late && g.IsZero()): // late: another one, until the first is usable
			return p, link, nil
		case late && !g.IsZero():
			return nil, nil, fmt.Errorf("underlay %s: %v is not a usable address of it; it has %s", u.opts.Underlay, g, u.list(link))
		case late:
			return nil, nil, fmt.Errorf("underlay %s has no usable address: set it up, or give it an IPv4 address", u.opts.Underlay)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-u.opts.Stop:
			return nil, nil, ErrStopped
		}
	}
}

// list names the addresses of a device, for people.
func (u *underlay) list(link netlink.Link) string {
	addrs, err := u.addresses(link)
	if err != nil || len(addrs) == 0 {
		return "none"
	}
	var names []string
	for _, a := range addrs {
		names = append(names, a.IP.String())
	}
	return strings.Join(names, ", ")
}
