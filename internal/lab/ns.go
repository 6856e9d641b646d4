// Package lab makes small networks out of network namespaces, and sends real
// traffic through them: ICMP echo, TCP with checksums, multicast. The demo, doctor,
// benchmarks and the tests in test/ use it. It needs root, and the program nft to make
// a device drop or mark packets.
package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"ipoibcm/hostnet"
)

// A Host is one network namespace, visible to ip netns under its name.
type Host struct {
	Name string
	ns   netns.NsHandle
	nl   *netlink.Handle
}

// NewHost makes a namespace with its loopback up. The name must be free.
func NewHost(name string) (*Host, error) {
	h := &Host{Name: name}
	err := hostnet.OwnThread(func() error {
		home, err := netns.Get()
		if err != nil {
			return err
		}
		defer home.Close()
		if h.ns, err = netns.NewNamed(name); err != nil {
			return fmt.Errorf("make namespace %s: %w", name, err)
		}
		return netns.Set(home)
	})
	if err != nil {
		return nil, err
	}
	// Without this argument it would open every family that it knows. A kernel may lack xfrm and netfilter.
	if h.nl, err = netlink.NewHandleAt(h.ns, unix.NETLINK_ROUTE); err != nil {
		h.Close()
		return nil, fmt.Errorf("netlink in %s: %w", name, err)
	}
	lo, err := h.nl.LinkByName("lo")
	if err == nil {
		err = h.nl.LinkSetUp(lo)
	}
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("loopback of %s: %w", name, err)
	}
	return h, nil
}

// Close removes the namespace's name. The namespace itself ends with the last process and socket in it.
func (h *Host) Close() error {
	if h.nl != nil {
		h.nl.Close()
	}
	err := h.ns.Close()
	return errors.Join(err, netns.DeleteNamed(h.Name))
}

// Netlink returns the handle for rtnetlink requests in the namespace.
func (h *Host) Netlink() *netlink.Handle { return h.nl }

// Do runs f inside the namespace. Sockets that f opens stay there.
func (h *Host) Do(f func() error) error {
	return hostnet.OwnThread(func() error {
		if err := netns.Set(h.ns); err != nil {
			return fmt.Errorf("enter %s: %w", h.Name, err)
		}
		return f()
	})
}

// In runs f inside the namespace of h, as [Host.Do] does, and returns its results.
func In[T any](h *Host, f func() (T, error)) (v T, err error) {
	err = h.Do(func() (err error) {
		v, err = f()
		return err
	})
	return v, err
}

// Start starts a command inside the namespace.
func (h *Host) Start(c *exec.Cmd) error { return h.Do(c.Start) }

// Sysctl writes a file below /proc/sys of the namespace, named with slashes.
func (h *Host) Sysctl(name, value string) error {
	return h.Do(func() error {
		return os.WriteFile(filepath.Join("/proc/sys", filepath.FromSlash(name)), []byte(value), 0)
	})
}

// Link returns a device of the host.
func (h *Host) Link(dev string) (netlink.Link, error) {
	l, err := h.nl.LinkByName(dev)
	if err != nil {
		return nil, fmt.Errorf("%s in %s: %w", dev, h.Name, err)
	}
	return l, nil
}

// Up sets a device up.
func (h *Host) Up(dev string) error { return h.withLink(dev, h.nl.LinkSetUp) }

// Down sets a device down.
func (h *Host) Down(dev string) error { return h.withLink(dev, h.nl.LinkSetDown) }

// SetMTU sets the MTU of a device.
func (h *Host) SetMTU(dev string, mtu int) error {
	return h.withLink(dev, func(l netlink.Link) error { return h.nl.LinkSetMTU(l, mtu) })
}

func (h *Host) withLink(dev string, f func(netlink.Link) error) error {
	l, err := h.Link(dev)
	if err != nil {
		return err
	}
	if err := f(l); err != nil {
		return fmt.Errorf("%s in %s: %w", dev, h.Name, err)
	}
	return nil
}

// AddAddr puts an address on a device.
func (h *Host) AddAddr(dev, prefix string) error {
	return h.withLink(dev, func(l netlink.Link) error {
		a, err := netlink.ParseAddr(prefix)
		if err != nil {
			return err
		}
		a.Flags |= 0x02 // IFA_F_NODAD: the underlay is usable at once
		return h.nl.AddrAdd(l, a)
	})
}

// DelAddr takes an address off a device.
func (h *Host) DelAddr(dev, prefix string) error {
	return h.withLink(dev, func(l netlink.Link) error {
		a, err := netlink.ParseAddr(prefix)
		if err != nil {
			return err
		}
		return h.nl.AddrDel(l, a)
	})
}

// AddRoute adds a route: to dst by gateway via through dev.
func (h *Host) AddRoute(dev, dst, via string) error {
	return h.withLink(dev, func(l netlink.Link) error {
		_, n, err := net.ParseCIDR(dst)
		if err != nil {
			return err
		}
		return h.nl.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: n, Gw: net.ParseIP(via)})
	})
}

// RouteTo returns the MTU of the route to dst, 0 if the route has none of its own,
// and a text such as "10.0.0.2 dev ibcm0 mtu 65520".
func (h *Host) RouteTo(dst netip.Addr) (mtu int, text string, err error) {
	routes, err := h.nl.RouteGet(dst.AsSlice())
	if err != nil {
		return 0, "", fmt.Errorf("route to %s in %s: %w", dst, h.Name, err)
	}
	if len(routes) == 0 {
		return 0, "", fmt.Errorf("no route to %s in %s", dst, h.Name)
	}
	r := routes[0]
	text = dst.String()
	if l, err := h.nl.LinkByIndex(r.LinkIndex); err == nil {
		text += " dev " + l.Attrs().Name
	}
	if r.MTU != 0 {
		text += fmt.Sprintf(" mtu %d", r.MTU)
	}
	return r.MTU, text, nil
}

// HostRoutes lists the host routes through dev that have an MTU and the given
// protocol number, each as "10.0.0.2 mtu 65520".
func (h *Host) HostRoutes(dev string, protocol int) ([]string, error) {
	l, err := h.Link(dev)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		var routes []netlink.Route
		for range 10 {
			if routes, err = h.nl.RouteList(l, family); !errors.Is(err, netlink.ErrDumpInterrupted) {
				break
			}
		}
		if err != nil {
			return nil, fmt.Errorf("routes of %s in %s: %w", dev, h.Name, err)
		}
		for _, r := range routes {
			if r.Dst == nil || int(r.Protocol) != protocol || r.MTU == 0 {
				continue
			}
			if ones, bits := r.Dst.Mask.Size(); ones == bits {
				out = append(out, fmt.Sprintf("%s mtu %d", r.Dst.IP, r.MTU))
			}
		}
	}
	return out, nil
}

// Connect joins two hosts, or two devices of one host, by a veth pair with the given MTU. Both ends are up
// and without DAD. A device name has at most 15 characters.
func Connect(a *Host, devA string, b *Host, devB string, mtu int) error {
	for _, h := range []*Host{a, b} {
		if err := quiet(h); err != nil {
			return err
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = devA, mtu
	err := a.nl.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: devB, PeerMTU: uint32(mtu),
		PeerNamespace: netlink.NsFd(int(b.ns))})
	if err != nil {
		return fmt.Errorf("veth %s-%s: %w", devA, devB, err)
	}
	return errors.Join(a.ready(devA), b.ready(devB))
}

// SetMaster makes dev a port of a bridge in h. An empty name takes dev out of its bridge.
func (h *Host) SetMaster(dev, bridge string) error {
	l, err := h.Link(dev)
	if err != nil {
		return err
	}
	if bridge == "" {
		return h.nl.LinkSetNoMaster(l)
	}
	br, err := h.Link(bridge)
	if err != nil {
		return err
	}
	return h.nl.LinkSetMaster(l, br)
}

// Rehearse makes two hosts whose names begin with prefix, joins them by a veth
// pair and removes them again. It returns an error if a network cannot be made here.
func Rehearse(prefix string) (err error) {
	var hosts [2]*Host
	for i := range hosts {
		if hosts[i], err = NewHost(prefix + string(rune('a'+i))); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, hosts[i].Close()) }()
	}
	return Connect(hosts[0], "eth0", hosts[1], "eth0", 1500)
}

// quiet turns DAD off for devices that are made later in h, so that underlay
// addresses are usable at once.
func quiet(h *Host) error {
	return errors.Join(h.Sysctl("net/ipv6/conf/default/accept_dad", "0"), h.Sysctl("net/ipv6/conf/all/accept_dad", "0"))
}

func (h *Host) ready(dev string) error {
	if err := h.Sysctl("net/ipv6/conf/"+dev+"/accept_dad", "0"); err != nil {
		return fmt.Errorf("DAD of %s in %s: %w", dev, h.Name, err)
	}
	return h.Up(dev)
}

// Segment joins several hosts to the bridge "br0", which it makes in a host of its own.
// The device of every host is called "eth0"; the port of the bridge to hosts[i] is
// called "port" and i. Multicast snooping is off, because there is no querier.
func Segment(bridge *Host, hosts []*Host, mtu int) error {
	if err := quiet(bridge); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "br0", mtu
	off := false
	br := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &off}
	if err := bridge.nl.LinkAdd(br); err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	if err := bridge.Up("br0"); err != nil {
		return err
	}
	for i, h := range hosts {
		port := fmt.Sprintf("port%d", i)
		if err := Connect(bridge, port, h, "eth0", mtu); err != nil {
			return err
		}
		if err := bridge.SetMaster(port, "br0"); err != nil {
			return fmt.Errorf("bridge port %s: %w", port, err)
		}
	}
	return nil
}

// LinkLocal returns the IPv6 link-local address of a device.
func (h *Host) LinkLocal(dev string) (netip.Addr, error) {
	l, err := h.Link(dev)
	if err != nil {
		return netip.Addr{}, err
	}
	addrs, err := h.nl.AddrList(l, netlink.FAMILY_V6)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return netip.Addr{}, err
	}
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && ip.IsLinkLocalUnicast() {
			return ip, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s in %s has no link-local address", dev, h.Name)
}

// Sweep removes the names of namespaces that start with prefix. It is for the
// namespaces of a run that was killed.
func Sweep(prefix string) {
	names, _ := filepath.Glob("/run/netns/" + prefix + "*")
	for _, n := range names {
		netns.DeleteNamed(strings.TrimPrefix(n, "/run/netns/"))
	}
}

// SweepKilled removes the namespaces whose process is gone. Their names are prefix, the
// process ID, a hyphen and more.
func SweepKilled(prefix string) {
	left, _ := filepath.Glob("/run/netns/" + prefix + "*")
	for _, path := range left {
		name := filepath.Base(path)
		pid, _, _ := strings.Cut(strings.TrimPrefix(name, prefix), "-")
		if n, err := strconv.Atoi(pid); err == nil && unix.Kill(n, 0) == unix.ESRCH {
			Sweep(name)
		}
	}
}
