package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"ipoibcm/node"
)

// attachment returns the request to the service, from the configuration and the result of the IPAM plugin.
func attachment(c netConf, args *skel.CmdArgs, r *current.Result) (node.Attachment, error) {
	a := node.Attachment{
		Key: node.Key{ContainerID: args.ContainerID, IfName: args.IfName}, Network: c.Name, Netns: args.Netns,
		Master: c.Master,
		Mode:   c.Mode, UDMTU: c.UDMTU, ReceiveMTU: c.ReceiveMTU, PKey: uint16(c.PKey),
		Members: c.Members,
	}
	if len(r.IPs) == 0 {
		return a, errors.New("the IPAM plugin gave no address")
	}
	for _, ip := range r.IPs {
		p, err := prefix(&ip.Address)
		if err != nil {
			return a, err
		}
		a.Addresses = append(a.Addresses, p)
	}
	for _, route := range r.Routes {
		dst, err := prefix(&route.Dst)
		if err != nil {
			return a, err
		}
		to := node.Route{Dst: dst.Masked(), GW: gateway(r, route, dst.Addr().Is6()), MTU: route.MTU, AdvMSS: route.AdvMSS,
			Priority: route.Priority, Scope: route.Scope}
		if route.Table != nil {
			to.Table = *route.Table
		}
		a.Routes = append(a.Routes, to)
	}
	return a, nil
}

// gateway returns a route's own gateway, or else the gateway of the first address of its family that has
// one. Without either it returns none, and the route leads to the link. A route whose scope is the link has
// only a gateway of its own.
func gateway(r *current.Result, route *types.Route, v6 bool) netip.Addr {
	if a, ok := netip.AddrFromSlice(route.GW); ok {
		return a.Unmap()
	}
	if route.Scope != nil && *route.Scope >= unix.RT_SCOPE_LINK {
		return netip.Addr{}
	}
	for _, ip := range r.IPs {
		if a, ok := netip.AddrFromSlice(ip.Gateway); ok && a.Unmap().Is6() == v6 {
			return a.Unmap()
		}
	}
	return netip.Addr{}
}

func prefix(n *net.IPNet) (netip.Prefix, error) {
	a, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if p := netip.PrefixFrom(a.Unmap(), bits); ok && p.IsValid() {
		return p, nil
	}
	return netip.Prefix{}, fmt.Errorf("the IPAM plugin gave %v, which is no address with a prefix length", n)
}
