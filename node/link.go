package node

import (
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
			route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(r.Dst), MTU: r.MTU}
			if r.GW.IsValid() {
				route.Gw = r.GW.AsSlice()
			} else {
				route.Scope = netlink.SCOPE_LINK
			}
			if err := netlink.RouteReplace(route); err != nil {
				return fmt.Errorf("add route %v by %v: %w", r.Dst, r.GW, err)
			}
		}
		return nil
	})
}

// lacks returns an error if a pod's interface is not there, is down or has lost an address.
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
			if !slices.ContainsFunc(have, func(h netlink.Addr) bool {
				got, ok := netip.AddrFromSlice(h.IP)
				return ok && got.Unmap() == want.Addr()
			}) {
				return fmt.Errorf("interface %s of the pod has lost its address %v", a.IfName, want)
			}
		}
		return nil
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	p = p.Masked()
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
