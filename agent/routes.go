package agent

import (
	"cmp"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"syscall"

	"ipoibcm/hostnet"
	"ipoibcm/ipoib"
	"ipoibcm/mtu"
	"ipoibcm/rtnl"
)

// A kernel is what the keeper needs of hostnet; tests have another.
type kernel interface {
	SetRoute(rtnl.Route) error
	DelRoute(rtnl.Route) error
	FlushExceptions() error
}

// A routeKeeper mirrors the device's routes and keeps them as mtu.Routes says:
// after every change of addresses, of the device MTU, of connections, and after
// edits by others (design D7). It belongs to the driver.
//
// There is one route for each connection, so what a connection changes, and the
// kernel's echo of that, must not look at all of them.
type routeKeeper struct {
	k     kernel
	udMTU int
	best  int // verbs.Caps.BestMessage
	log   *slog.Logger

	seen    bool // a first Resync came
	link    rtnl.Link
	addrs   map[netip.Addr]rtnl.Addr
	routes  map[rtnl.Key]rtnl.Route // of others, the kernel first
	own     map[rtnl.Key]rtnl.Route // with our protocol number
	hosts   map[netip.Addr]int      // wanted host routes and their MTU
	dirty   bool                    // all must be looked at
	touched []netip.Addr            // hosts that must be
	failed  map[rtnl.Key]string     // what the kernel refused, said once

	flushDue               bool
	sets, dels, refused, f uint64
}

func newRouteKeeper(k kernel, udMTU, best int, log *slog.Logger) *routeKeeper {
	return &routeKeeper{k: k, udMTU: udMTU, best: best, log: log, addrs: map[netip.Addr]rtnl.Addr{},
		routes: map[rtnl.Key]rtnl.Route{}, own: map[rtnl.Key]rtnl.Route{}, hosts: map[netip.Addr]int{}, failed: map[rtnl.Key]string{}}
}

// known reports whether the device's state has been read.
func (r *routeKeeper) known() bool { return r.seen }

// apply takes one change into the mirror.
func (r *routeKeeper) apply(ev rtnl.Event) {
	switch ev.Kind {
	case rtnl.RouteSet:
		key := ev.Route.Key()
		if have, ok := r.route(key); !ok || !same(have, ev.Route) {
			r.dirty = true // not the echo of what we did
		}
		r.put(key, ev.Route)
		delete(r.failed, key)
		return
	case rtnl.RouteGone:
		key := ev.Route.Key()
		if _, ok := r.route(key); ok {
			r.dirty = true
			r.forget(key)
		}
		return
	case rtnl.Rerouted, rtnl.Rules:
		return // the mirror has what it needs
	}
	r.dirty = true
	switch ev.Kind {
	case rtnl.Resync:
		r.seen, r.link = true, ev.Snapshot.Link
		clear(r.addrs)
		clear(r.routes)
		clear(r.own)
		for _, a := range ev.Snapshot.Addrs {
			r.addrs[a.Prefix.Addr()] = a
		}
		for _, rt := range ev.Snapshot.Routes {
			r.put(rt.Key(), rt)
		}
	case rtnl.AddrSet:
		r.addrs[ev.Addr.Prefix.Addr()] = ev.Addr
	case rtnl.AddrGone:
		delete(r.addrs, ev.Addr.Prefix.Addr())
	case rtnl.LinkChange:
		r.link = ev.Link
	}
}

// same reports whether two routes of one key differ in nothing that matters here.
func same(a, b rtnl.Route) bool {
	return a.MTU == b.MTU && a.AdvMSS == b.AdvMSS && a.Src == b.Src && a.Protocol == b.Protocol && a.Via == b.Via
}

// route returns what the kernel has under key, as far as we know.
func (r *routeKeeper) route(key rtnl.Key) (rt rtnl.Route, ok bool) {
	if rt, ok = r.own[key]; !ok {
		rt, ok = r.routes[key]
	}
	return rt, ok
}

func (r *routeKeeper) put(key rtnl.Key, rt rtnl.Route) {
	r.forget(key) // it may have belonged to somebody else
	if rt.Protocol == rtnl.Protocol {
		r.own[key] = rt
	} else {
		r.routes[key] = rt
	}
}

func (r *routeKeeper) forget(key rtnl.Key) {
	delete(r.own, key)
	delete(r.routes, key)
}

// A hostView is what the machine wants to know of the device.
type hostView struct {
	up     bool
	mtu    int
	addrs  map[netip.Prefix]bool
	routes []ipoib.Route
}

// view returns the device as the machine sees it.
func (r *routeKeeper) view() hostView {
	v := hostView{up: r.link.Up && !r.link.Gone, mtu: r.link.MTU, addrs: map[netip.Prefix]bool{}}
	for _, a := range r.addrs {
		v.addrs[a.Prefix] = true
	}
	for _, rt := range r.routes {
		if rt.Type != rtnl.Unicast || rt.Table == rtnl.TableLocal {
			continue
		}
		v.routes = append(v.routes, ipoib.Route{Prefix: rt.Dst, Gateway: rt.Via})
	}
	slices.SortFunc(v.routes, func(a, b ipoib.Route) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()), a.Gateway.Compare(b.Gateway))
	})
	v.routes = slices.Compact(v.routes)
	return v
}

func (r *routeKeeper) setHost(a netip.Addr, mtu int) {
	if r.hosts[a] != mtu {
		r.hosts[a] = mtu
		r.touched = append(r.touched, a)
	}
}

func (r *routeKeeper) delHost(a netip.Addr) {
	if _, ok := r.hosts[a]; ok {
		delete(r.hosts, a)
		r.touched = append(r.touched, a)
	}
}

// flushExceptions makes the next flush also forget the path MTUs the kernel has
// learned: after the routes, else a packet in between learns the old one again.
func (r *routeKeeper) flushExceptions() { r.flushDue = true }

// flush makes the kernel's routes what they should be.
func (r *routeKeeper) flush() {
	switch {
	case !r.seen:
	case r.dirty:
		r.dirty, r.touched = false, r.touched[:0]
		r.sync(slices.Collect(maps.Keys(r.hosts)), slices.SortedFunc(maps.Keys(r.own), compareKeys))
	case len(r.touched) > 0:
		hosts := slices.Clone(r.touched)
		r.touched = r.touched[:0]
		keys := make([]rtnl.Key, len(hosts))
		for i, a := range hosts {
			keys[i] = hostKey(a)
		}
		r.sync(hosts, keys)
	}
	if r.flushDue {
		r.flushDue = false
		r.f++
		if err := r.k.FlushExceptions(); err != nil {
			r.log.Warn("cannot flush the kernel's path MTUs", "err", err)
		}
	}
}

// sync makes the device's routes and those to these hosts what they should be, and
// removes which of the own routes should not be.
func (r *routeKeeper) sync(hosts []netip.Addr, own []rtnl.Key) {
	if !r.link.Up || r.link.Gone {
		return // the kernel has dropped the routes, and adds none
	}
	wanted := make(map[rtnl.Key]bool, len(hosts))
	for _, want := range mtu.Routes(r.device(hosts)) {
		for _, rt := range r.match(want) {
			key := rt.Key()
			wanted[key] = true
			if have, ok := r.route(key); ok && have.MTU == rt.MTU && have.AdvMSS == rt.AdvMSS && have.Src == rt.Src {
				continue
			}
			r.set(rt)
		}
	}
	for _, key := range own {
		if rt, ok := r.own[key]; ok && !wanted[key] {
			r.del(rt)
		}
	}
}

func compareKeys(a, b rtnl.Key) int {
	return cmp.Or(a.Dst.Addr().Compare(b.Dst.Addr()), cmp.Compare(a.Dst.Bits(), b.Dst.Bits()), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Metric, b.Metric), a.Via.Compare(b.Via))
}

// device gathers what mtu.Routes decides from, of these hosts.
func (r *routeKeeper) device(hosts []netip.Addr) mtu.Device {
	d := mtu.Device{MTU: r.link.MTU, UDMTU: r.udMTU, BestMessage: r.best}
	for _, rt := range r.routes {
		switch {
		case isConnected(rt):
			d.Prefixes = append(d.Prefixes, rt.Dst)
			if rt.Dst.IsSingleIP() { // a peer address: the connected route is the host route
				hosts = append(hosts, rt.Dst.Addr())
			}
		case rt.Type == rtnl.Broadcast:
			d.Broadcasts = append(d.Broadcasts, rt.Dst.Addr())
		case isMulticast6(rt):
			d.Multicast6 = true
		}
	}
	for a := range r.addrs {
		d.IPv4 = d.IPv4 || a.Is4()
	}
	for _, a := range hosts {
		if m, ok := r.hosts[a]; ok {
			d.Neighbors = append(d.Neighbors, mtu.Neighbor{IP: a, MTU: m})
		}
	}
	return d
}

func isConnected(rt rtnl.Route) bool {
	return rt.Protocol == rtnl.ProtoKernel && rt.Type == rtnl.Unicast && rt.Table != rtnl.TableLocal && !rt.Via.IsValid()
}

func isMulticast6(rt rtnl.Route) bool {
	return rt.Type == rtnl.Multicast && rt.Dst.Addr().Is6()
}

// match returns the routes of the kernel that want speaks of, with its metrics
// in them, or a new one for those that are ours to add.
func (r *routeKeeper) match(want mtu.Route) []rtnl.Route {
	var out []rtnl.Route
	add := func(is func(rtnl.Route) bool) {
		for _, rt := range r.routes {
			if rt.Dst == want.Dst && is(rt) {
				rt.MTU, rt.AdvMSS = want.MTU, want.AdvMSS
				out = append(out, rt)
			}
		}
	}
	switch want.Kind {
	case mtu.RouteConnected:
		add(isConnected)
	case mtu.RouteBroadcast:
		add(func(rt rtnl.Route) bool { return rt.Type == rtnl.Broadcast })
	case mtu.RouteMulticast:
		add(isMulticast6)
	case mtu.RouteGroups:
		out = append(out, rtnl.Route{Dst: want.Dst, Table: rtnl.TableMain, Type: rtnl.Multicast, Protocol: rtnl.Protocol, Scope: rtnl.ScopeLink, MTU: want.MTU, AdvMSS: want.AdvMSS})
	case mtu.RouteHost:
		out = append(out, r.hostRoute(want))
	}
	return out
}

// hostRoute is the route to one neighbour. On IPv4 it names the source address
// of the subnet it is cut from: the kernel would take the device's first one.
func (r *routeKeeper) hostRoute(want mtu.Route) rtnl.Route {
	rt := ownHost(want.Dst)
	rt.MTU, rt.AdvMSS = want.MTU, want.AdvMSS
	if !want.Dst.Addr().Is4() {
		return rt
	}
	rt.Scope = rtnl.ScopeLink
	bits := -1
	for _, c := range r.routes {
		if isConnected(c) && c.Src.IsValid() && c.Dst.Contains(want.Dst.Addr()) && c.Dst.Bits() > bits {
			rt.Src, bits = c.Src, c.Dst.Bits()
		}
	}
	return rt
}

// ownHost is a host route of ours without metrics.
func ownHost(dst netip.Prefix) rtnl.Route {
	rt := rtnl.Route{Dst: dst, Table: rtnl.TableMain, Type: rtnl.Unicast, Protocol: rtnl.Protocol}
	if !dst.Addr().Is4() {
		rt.Metric = 1024
	}
	return rt
}

func hostKey(a netip.Addr) rtnl.Key { return ownHost(addrHost(a.Unmap())).Key() }

func (r *routeKeeper) set(rt rtnl.Route) {
	if err := r.k.SetRoute(rt); errors.Is(err, syscall.ENETDOWN) {
		return // the link went down this moment; coming up makes all routes anew
	} else if err != nil {
		r.refused++
		if r.failed[rt.Key()] != err.Error() {
			r.failed[rt.Key()] = err.Error()
			r.log.Warn("cannot set route", "route", rt, "err", err)
		}
		return
	}
	r.sets++
	r.put(rt.Key(), rt)
	delete(r.failed, rt.Key())
}

func (r *routeKeeper) del(rt rtnl.Route) {
	if err := r.k.DelRoute(rt); err != nil && !errors.Is(err, hostnet.ErrNotFound) {
		r.refused++
		r.log.Warn("cannot remove route", "route", rt, "err", err)
		return
	}
	r.dels++
	r.forget(rt.Key())
}

// shown reports whether the kernel has our host route to a.
func (r *routeKeeper) shown(a netip.Addr) bool {
	_, ok := r.own[hostKey(a)]
	return ok
}
