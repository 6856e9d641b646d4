package node

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/hostnet"
)

// makeUnderlay makes a pod's underlay: a macvlan device of the master, in this namespace. Its MAC address
// is random, and so is the GID that is made of it. note is as in quieten.
func makeUnderlay(master, name string) (note string, err error) {
	parent, err := netlink.LinkByName(master)
	if err != nil {
		return "", fmt.Errorf("master %s: %w", master, err)
	}
	if parent.Attrs().Flags&net.FlagUp == 0 {
		return "", fmt.Errorf("master %s is down", master)
	}
	if err := removeUnderlay(name); err != nil { // left by an attachment that was interrupted
		return "", err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = name, parent.Attrs().Index
	if err := netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}); err != nil {
		return "", fmt.Errorf("make %s on %s: %w", name, master, err)
	}
	if note, err = quieten(filepath.Join("/proc/sys/net/ipv6/conf", name)); err != nil {
		return "", errors.Join(err, removeUnderlay(name))
	}
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("set %s up: %w", name, err), removeUnderlay(name))
	}
	return note, nil
}

// quieten turns off router advertisements and duplicate address detection for the device whose IPv6
// settings are in dir. This host must not take routes from the device's network, and without detection the
// random address is usable at once, not after a second. If the settings are read-only, both stay as they
// are, and note is a warning if the kernel would take routes.
func quieten(dir string) (note string, err error) {
	for _, key := range []string{"accept_ra", "accept_dad"} {
		switch err := os.WriteFile(filepath.Join(dir, key), []byte("0"), 0); {
		case err == nil, errors.Is(err, fs.ErrNotExist): // no IPv6 in this kernel
		case errors.Is(err, syscall.EROFS):
			if key == "accept_ra" && takesRoutes(setting(dir, key), setting(dir, "forwarding")) {
				note = "/proc/sys is read-only, so this host takes routes from router advertisements on its pods' underlays too: " +
					"mount it writable, or set net.ipv6.conf.default.accept_ra=0"
			}
		default:
			return "", err
		}
	}
	return note, nil
}

// setting reads the setting key in dir, without the end of its line.
func setting(dir, key string) string {
	text, _ := os.ReadFile(filepath.Join(dir, key)) // empty: unknown
	return strings.TrimSpace(string(text))
}

// takesRoutes reports whether the kernel takes routes from router advertisements (accept_ra in
// Documentation/networking/ip-sysctl.rst).
func takesRoutes(acceptRA, forwarding string) bool {
	return acceptRA == "2" || acceptRA != "0" && (forwarding == "0" || forwarding == "")
}

// isUp reports whether there is a device of this name that is up.
func isUp(name string) bool {
	i, err := net.InterfaceByName(name)
	return err == nil && i.Flags&net.FlagUp != 0
}

// removeUnderlay removes a device of ours. It is no error if there is none.
func removeUnderlay(name string) error {
	link, err := netlink.LinkByName(name)
	if notFound := (netlink.LinkNotFoundError{}); errors.As(err, &notFound) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return nil
}

// inPod runs f on a pod's interface, in the pod's network namespace.
func inPod(path, ifName string, f func(netlink.Link) error) error {
	ns, err := hostnet.OpenNamespace(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return hostnet.InNamespace(ns, func() error {
		link, err := netlink.LinkByName(ifName)
		if err != nil {
			return fmt.Errorf("interface %s of the pod: %w", ifName, err)
		}
		return f(link)
	})
}

// addRoutes gives a pod its routes.
func addRoutes(path, ifName string, routes []Route) error {
	if len(routes) == 0 {
		return nil
	}
	return inPod(path, ifName, func(link netlink.Link) error {
		for _, r := range routes {
			if err := addRoute(link, r); err != nil {
				return fmt.Errorf("add route %v by %v: %w", r.Dst, r.GW, err)
			}
		}
		return nil
	})
}

// addRoute adds one route. It takes the place of a route of the same interface, such as the one that the
// kernel makes of an address, but of no other's: the pod's other networks are not ours.
func addRoute(link netlink.Link, r Route) error {
	route := r.on(link)
	err := netlink.RouteAdd(route)
	if !errors.Is(err, syscall.EEXIST) {
		return err
	}
	same, err := routesLike(route)
	if err != nil {
		return err
	}
	for _, other := range same {
		if other.LinkIndex == route.LinkIndex {
			continue
		}
		dev := "another kind"
		if i, err := net.InterfaceByIndex(other.LinkIndex); err == nil {
			dev = i.Name
		}
		return fmt.Errorf("the pod has one of %s with the same table and priority: give this one others", dev)
	}
	return netlink.RouteReplace(route)
}

// on returns the route as the kernel takes it.
func (r Route) on(link netlink.Link) *netlink.Route {
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(r.Dst), MTU: r.MTU, AdvMSS: r.AdvMSS,
		Priority: r.Priority, Table: cmp.Or(r.Table, unix.RT_TABLE_MAIN)}
	if r.Dst.Addr().Is6() {
		route.Priority = cmp.Or(r.Priority, ip6Priority)
	}
	switch {
	case r.Scope != nil:
		route.Scope = netlink.Scope(*r.Scope)
	case !r.GW.IsValid():
		route.Scope = netlink.SCOPE_LINK
	}
	if r.GW.IsValid() {
		route.Gw = r.GW.AsSlice()
	}
	return route
}

// ip6Priority is what the kernel gives an IPv6 route without a priority (IP6_RT_PRIO_USER).
const ip6Priority = 1024

// routesLike returns the routes that the kernel has in the place of this one: with its destination, table
// and priority.
func routesLike(route *netlink.Route) ([]netlink.Route, error) {
	family := netlink.FAMILY_V4
	if len(route.Dst.IP) == net.IPv6len {
		family = netlink.FAMILY_V6
	}
	all, err := netlink.RouteListFiltered(family, route, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
	return slices.DeleteFunc(all, func(r netlink.Route) bool { return r.Priority != route.Priority }), err
}

// lacks returns an error if a pod's interface is not there, is down or has lost an address or a route.
func lacks(a *Attachment) error {
	return inPod(a.Netns, a.IfName, func(link netlink.Link) error {
		if link.Attrs().Flags&net.FlagUp == 0 {
			return fmt.Errorf("interface %s of the pod is down", a.IfName)
		}
		have, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, want := range a.Addresses {
			if !slices.ContainsFunc(have, func(h netlink.Addr) bool { return prefixOf(h.IPNet) == want }) {
				return fmt.Errorf("interface %s of the pod has lost its address %v", a.IfName, want)
			}
		}
		for _, r := range a.Routes {
			want := r.on(link)
			have, err := routesLike(want)
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(have, func(h netlink.Route) bool {
				return h.LinkIndex == want.LinkIndex && h.Gw.Equal(want.Gw)
			}) {
				return fmt.Errorf("interface %s of the pod has lost its route to %v", a.IfName, r.Dst)
			}
		}
		return nil
	})
}

// prefixOf returns an address with its prefix length.
func prefixOf(n *net.IPNet) netip.Prefix {
	a, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), bits)
}

func ipNet(p netip.Prefix) *net.IPNet {
	p = p.Masked()
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
