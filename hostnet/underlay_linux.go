package hostnet

import (
	"cmp"
	"errors"
	"fmt"
	"ipoibcm/rtnl"
	"net/netip"
	"slices"

	"github.com/Mellanox/rdmamap"
	"github.com/mdlayher/genetlink"
	mnl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// An Info is what is known about a device that may serve as underlay.
type Info struct {
	Link   rtnl.Link
	Addrs  []rtnl.Addr
	Driver string // "mlx5_core", "veth"; "" if unknown
	Speed  int    // Mbit/s; 0 if unknown

	// Features are the ethtool features that are on, sorted, among them
	// "tx-udp-segmentation" and "rx-gro". Nil if unknown.
	Features []string

	// RDMA is the name of the RDMA device on it, such as "mlx5_0" or "rxe0"; "" if there is none.
	RDMA string
}

// HasFeature reports whether the ethtool feature is on.
func (i *Info) HasFeature(name string) bool { return slices.Contains(i.Features, name) }

// Lookup returns the link with this name. The error is ErrNotFound if there is none.
func Lookup(name string) (rtnl.Link, error) {
	l, err := netlink.LinkByName(name)
	if _, ok := errors.AsType[netlink.LinkNotFoundError](err); ok {
		return rtnl.Link{}, fmt.Errorf("%w: device %s", ErrNotFound, name)
	}
	if err != nil {
		return rtnl.Link{}, fmt.Errorf("read link %s: %w", name, err)
	}
	return linkOf(l), nil
}

// Underlay returns what is known of the device with this name. The error is ErrNotFound if there
// is none.
func Underlay(name string) (Info, error) {
	l, err := Lookup(name)
	if err != nil {
		return Info{}, err
	}
	e := dialEthtool()
	defer e.close()
	return info(l, e)
}

// Devices returns all devices of the namespace, in order of their index.
func Devices() ([]Info, error) {
	links, err := retryDump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	e := dialEthtool()
	defer e.close()
	var infos []Info
	for _, l := range links {
		i, err := info(linkOf(l), e)
		if err != nil {
			return nil, err
		}
		infos = append(infos, i)
	}
	slices.SortFunc(infos, func(a, b Info) int { return cmp.Compare(a.Link.Index, b.Link.Index) })
	return infos, nil
}

// retryDump is dump for the library's lists.
func retryDump[T any](list func() ([]T, error)) (v []T, err error) {
	for range dumpTries {
		if v, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return v, err
		}
	}
	return v, nil
}

func info(l rtnl.Link, e *ethtool) (Info, error) {
	i := Info{Link: l}
	addrs, err := retryDump(func() ([]netlink.Addr, error) {
		return netlink.AddrList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.Index}}, netlink.FAMILY_ALL)
	})
	if err != nil {
		return i, fmt.Errorf("read addresses of %s: %w", l.Name, err)
	}
	for _, a := range addrs {
		i.Addrs = append(i.Addrs, addrFrom(a))
	}
	i.Driver = driver(l.Name)
	i.Speed = e.speed(l.Name)
	i.Features = e.features(l.Name)
	if name, err := rdmamap.GetRdmaDeviceForNetdevice(l.Name); err == nil {
		i.RDMA = name
	}
	return i, nil
}

func addrFrom(a netlink.Addr) rtnl.Addr {
	ones, _ := a.Mask.Size()
	out := rtnl.Addr{
		Prefix:    netip.PrefixFrom(addrOf(a.IP).Unmap(), ones),
		Scope:     uint8(a.Scope),
		Tentative: a.Flags&unix.IFA_F_TENTATIVE != 0,
		DADFailed: a.Flags&unix.IFA_F_DADFAILED != 0,
		Permanent: a.Flags&unix.IFA_F_PERMANENT != 0,
	}
	if len(a.Broadcast) > 0 {
		out.Broadcast = addrOf(a.Broadcast).Unmap()
	}
	if a.Peer != nil && !a.Peer.IP.Equal(a.IP) {
		out.Peer = addrOf(a.Peer.IP).Unmap()
	}
	return out
}

// driver asks for the driver by ioctl. sysfs would show the namespace of whoever mounted it.
func driver(name string) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	d, err := unix.IoctlGetEthtoolDrvinfo(fd, name)
	if err != nil {
		return ""
	}
	return unix.ByteSliceToString(d.Driver[:])
}

// An ethtool asks the kernel's generic netlink family "ethtool". A nil one knows nothing: the
// family may be missing.
type ethtool struct {
	c      *genetlink.Conn
	family genetlink.Family
}

func dialEthtool() *ethtool {
	c, err := genetlink.Dial(nil)
	if err != nil {
		return nil
	}
	f, err := c.GetFamily(unix.ETHTOOL_GENL_NAME)
	if err != nil {
		c.Close()
		return nil
	}
	return &ethtool{c, f}
}

func (e *ethtool) close() {
	if e != nil {
		e.c.Close()
	}
}

// get sends one request about a device and returns the attributes of the reply, none if there is no reply.
func (e *ethtool) get(cmd uint8, name string) []byte {
	const header = 1 // the same in every request
	if e == nil {
		return nil
	}
	ae := mnl.NewAttributeEncoder()
	ae.Nested(header, func(ae *mnl.AttributeEncoder) error {
		ae.String(unix.ETHTOOL_A_HEADER_DEV_NAME, name)
		return nil
	})
	b, err := ae.Encode()
	if err != nil {
		return nil
	}
	msgs, err := e.c.Execute(genetlink.Message{
		Header: genetlink.Header{Command: cmd, Version: unix.ETHTOOL_GENL_VERSION}, Data: b,
	}, e.family.ID, mnl.Request)
	if err != nil || len(msgs) == 0 {
		return nil
	}
	return msgs[0].Data
}

func (e *ethtool) speed(name string) int {
	for _, v := range attrs(e.get(unix.ETHTOOL_MSG_LINKMODES_GET, name), unix.ETHTOOL_A_LINKMODES_SPEED) {
		if speed := int32(u32(v)); speed > 0 { // -1 is unknown
			return int(speed)
		}
	}
	return 0
}

// features returns the names in the bit set of active features.
func (e *ethtool) features(name string) (names []string) {
	for _, active := range attrs(e.get(unix.ETHTOOL_MSG_FEATURES_GET, name), unix.ETHTOOL_A_FEATURES_ACTIVE) {
		for _, bits := range attrs(active, unix.ETHTOOL_A_BITSET_BITS) {
			for _, bit := range attrs(bits, unix.ETHTOOL_A_BITSET_BITS_BIT) {
				for _, name := range attrs(bit, unix.ETHTOOL_A_BITSET_BIT_NAME) {
					names = append(names, unix.ByteSliceToString(name))
				}
			}
		}
	}
	slices.Sort(names)
	return names
}
