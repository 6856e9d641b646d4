// Package fibtest has a kernel for tests. It has routes of several devices and tables, answers
// lookups, and returns the events that its changes cause. Its choice of routes is written from
// ip-route(8) and ip-rule(8), and shares no code with fib.
package fibtest

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"ipoibcm/fib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// Index is the index of the device under test.
const Index = 7

var multicast6 = netip.MustParsePrefix("ff00::/8")

// A Route is one route of the kernel, with its device.
type Route struct {
	rtnl.Route
	OIF int
}

// A Rule sends flows to a table. Zero fields match everything.
type Rule struct {
	Priority  int
	From, To  netip.Prefix
	TOS       uint8
	Table     int
	Blackhole bool
}

// A Kernel has the tables of one host. Its methods return the events that the interface must see.
type Kernel struct {
	Link   rtnl.Link
	Others []netip.Addr // addresses of other devices of the host
	// Members are the indexes of the other devices in the VRF of the device (see method VRF).
	Members []int
	Routes  []Route                 // other routes; the kernel's own of the device come from its addresses
	Rules   []Rule                  // besides the default ones
	Own     map[rtnl.Key]rtnl.Route // routes of protocol 75

	Refuse  error     // the error of every change, if not nil
	Peer    bool      // addresses are those of the other end of a point-to-point link
	SetRule rtnl.Rule // the last rule that was set
	Flushed int
	Told    func(string) // called for each change of a route, and each question about a neighbour; may be nil

	addrs   []netip.Prefix
	metrics map[rtnl.Key]rtnl.Route // of the kernel's own routes
}

// New returns a kernel whose device is down and has no address.
func New() *Kernel {
	return &Kernel{Link: rtnl.Link{Index: Index, Name: "ibcm0", MTU: 65520, Type: "tun"},
		Own: map[rtnl.Key]rtnl.Route{}, metrics: map[rtnl.Key]rtnl.Route{}}
}

// Start returns the first events.
func (k *Kernel) Start() []fib.Event {
	s := &rtnl.Snapshot{Link: k.Link, Routes: slices.Concat(k.kernel(), k.own())}
	for _, p := range k.addrs {
		s.Addrs = append(s.Addrs, rtnl.Addr{Prefix: p, Permanent: true})
	}
	return []fib.Event{k.rules(), fib.Host{Event: rtnl.Event{Kind: rtnl.Resync, Snapshot: s}}}
}

func (k *Kernel) rules() fib.Event {
	f := rtnl.DstOnly
	if len(k.Rules) > 0 {
		f = rtnl.WithSource
	}
	return fib.Host{Event: rtnl.Event{Kind: rtnl.Rules, Fields: f}}
}

// Up sets the device up or down. A device that goes down loses its routes.
func (k *Kernel) Up(up bool) []fib.Event {
	before := k.kernel()
	k.Link.Up, k.Link.Running = up, up
	evs := []fib.Event{fib.Host{Event: rtnl.Event{Kind: rtnl.LinkChange, Link: k.Link}}}
	if !up {
		for _, r := range k.own() {
			evs = append(evs, gone(r))
		}
		clear(k.Own)
		clear(k.metrics)
		k.Routes = slices.DeleteFunc(k.Routes, func(r Route) bool { return r.OIF == Index })
	}
	return append(evs, k.changes(before)...)
}

// VRF puts the device, with its addresses and routes, into a VRF of index master.
func (k *Kernel) VRF(master, table int) []fib.Event {
	before := k.kernel()
	k.Link.Master, k.Link.VRFTable = master, table
	evs := []fib.Event{fib.Host{Event: rtnl.Event{Kind: rtnl.LinkChange, Link: k.Link}}}
	for _, r := range k.own() { // the kernel flushes the device's routes
		evs = append(evs, gone(r))
	}
	clear(k.Own)
	clear(k.metrics)
	return append(evs, k.changes(before)...)
}

// MTU sets the MTU of the device.
func (k *Kernel) MTU(n int) []fib.Event {
	k.Link.MTU = n
	return []fib.Event{fib.Host{Event: rtnl.Event{Kind: rtnl.LinkChange, Link: k.Link}}}
}

// AddAddr puts an address on the device.
func (k *Kernel) AddAddr(p netip.Prefix) []fib.Event {
	if slices.Contains(k.addrs, p) {
		return nil
	}
	before := k.kernel()
	k.addrs = append(k.addrs, p)
	evs := []fib.Event{fib.Host{Event: rtnl.Event{Kind: rtnl.AddrSet, Addr: rtnl.Addr{Prefix: p, Permanent: true}}}}
	return append(evs, k.changes(before)...)
}

// DelAddr takes an address off the device.
func (k *Kernel) DelAddr(p netip.Prefix) []fib.Event {
	i := slices.Index(k.addrs, p)
	if i < 0 {
		return nil
	}
	before := k.kernel()
	k.addrs = slices.Delete(k.addrs, i, i+1)
	evs := []fib.Event{fib.Host{Event: rtnl.Event{Kind: rtnl.AddrGone, Addr: rtnl.Addr{Prefix: p, Permanent: true}}}}
	return append(evs, k.changes(before)...)
}

// Addrs returns the addresses of the device.
func (k *Kernel) Addrs() []netip.Prefix { return k.addrs }

// AddRoute adds somebody else's route.
func (k *Kernel) AddRoute(r Route) []fib.Event {
	k.Routes = append(k.Routes, r)
	return []fib.Event{rerouted(r.Dst)}
}

// DelRoute removes somebody else's route.
func (k *Kernel) DelRoute(r Route) []fib.Event {
	k.Routes = slices.DeleteFunc(k.Routes, func(o Route) bool { return o == r })
	return []fib.Event{rerouted(r.Dst)}
}

// SetRules replaces the rules.
func (k *Kernel) SetRules(rs ...Rule) []fib.Event {
	k.Rules = rs
	slices.SortStableFunc(k.Rules, func(a, b Rule) int { return cmp.Compare(a.Priority, b.Priority) })
	return []fib.Event{k.rules()}
}

func rerouted(p netip.Prefix) fib.Event {
	return fib.Host{Event: rtnl.Event{Kind: rtnl.Rerouted, Prefix: p}}
}

func gone(r rtnl.Route) fib.Event {
	return fib.Host{Event: rtnl.Event{Kind: rtnl.RouteGone, Route: r}}
}

// kernel returns the kernel's own routes of the device, as its addresses make them.
func (k *Kernel) kernel() []rtnl.Route {
	if !k.Link.Up {
		return nil
	}
	table := rtnl.TableMain
	if k.Link.VRFTable != 0 {
		table = k.Link.VRFTable
	}
	out := make([]rtnl.Route, 0, 2*len(k.addrs))
	add := func(r rtnl.Route) {
		if slices.ContainsFunc(out, func(o rtnl.Route) bool { return o.Key() == r.Key() }) {
			return
		}
		if m, ok := k.metrics[r.Key()]; ok {
			r.MTU, r.AdvMSS = m.MTU, m.AdvMSS
		}
		out = append(out, r)
	}
	for _, p := range k.addrs {
		r := rtnl.Route{Dst: p.Masked(), Table: table, Type: rtnl.Unicast, Protocol: rtnl.ProtoKernel}
		if p.Addr().Is4() {
			r.Src, r.Scope = p.Addr(), rtnl.ScopeLink
			add(r)
			if p.Bits() < 31 {
				add(rtnl.Route{Dst: single(last(p)), Table: rtnl.TableLocal, Type: rtnl.Broadcast,
					Protocol: rtnl.ProtoKernel, Scope: rtnl.ScopeLink, Src: p.Addr()})
			}
			continue
		}
		r.Metric = 256
		add(r)
		add(rtnl.Route{Dst: multicast6, Table: rtnl.TableLocal, Type: rtnl.Multicast,
			Protocol: rtnl.ProtoKernel, Metric: 256})
	}
	return out
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// last returns the last address of an IPv4 prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(b)
}

// changes returns events for the difference between the kernel's own routes now and before.
func (k *Kernel) changes(before []rtnl.Route) (evs []fib.Event) {
	now := k.kernel()
	for _, r := range before {
		if !slices.ContainsFunc(now, func(n rtnl.Route) bool { return n.Key() == r.Key() }) {
			evs = append(evs, gone(r), rerouted(r.Dst))
		}
	}
	for _, r := range now {
		if !slices.Contains(before, r) {
			evs = append(evs, fib.Host{Event: rtnl.Event{Kind: rtnl.RouteSet, Route: r}}, rerouted(r.Dst))
		}
	}
	return evs
}

// Kernel returns the kernel's own routes of the device.
func (k *Kernel) Kernel() []rtnl.Route { return k.kernel() }

// Edit changes the metrics of one of the kernel's own routes, as somebody else would.
func (k *Kernel) Edit(r rtnl.Route) []fib.Event {
	k.metrics[r.Key()] = r
	return []fib.Event{fib.Host{Event: rtnl.Event{Kind: rtnl.RouteSet, Route: r}}, rerouted(r.Dst)}
}

// Do carries out an action that is for the kernel, and returns the events that it causes. ok is
// false for other actions.
func (k *Kernel) Do(a fib.Action) (evs []fib.Event, ok bool) {
	switch a := a.(type) {
	case fib.Lookup:
		hop, err := nexthop.Ask(k, a.Link, a.Flow)
		return []fib.Event{fib.Answered{Lookup: a, NextHop: hop, Err: err}}, true
	case fib.SetRoute:
		return []fib.Event{fib.Done{Action: a, Outcome: nexthop.Change(a).Do(router{k})}}, true
	case fib.SetRule:
		k.SetRule = a.New
		return nil, true
	case fib.FlushExceptions:
		k.Flushed++
		return nil, true
	}
	return nil, false
}

// A router is a Kernel as a [nexthop.Router].
type router struct{ *Kernel }

// AddRoute adds a route of protocol 75, or gives it other metrics.
func (k router) AddRoute(r rtnl.Route) error {
	k.told("add", r)
	for o := range k.others {
		if o.Key() == r.Key() {
			return rtnl.ErrExists
		}
	}
	if k.Refuse == nil {
		k.Own[r.Key()] = r
	}
	return k.Refuse
}

// SetRoute gives one of the kernel's own routes other metrics.
func (k router) SetRoute(r rtnl.Route) error {
	k.told("set", r)
	if k.Refuse == nil {
		k.metrics[r.Key()] = r
	}
	return k.Refuse
}

// DelRoute removes a route of protocol 75.
func (k router) DelRoute(r rtnl.Route) error {
	k.told("del", r)
	if _, ok := k.Own[r.Key()]; !ok {
		return rtnl.ErrNotFound
	}
	delete(k.Own, r.Key())
	return nil
}

// Lookup answers for a neighbour.
func (k router) Lookup(q rtnl.Query) (rtnl.Answer, error) {
	if q.TOS == 0 {
		k.told("? host", q.Dst)
	}
	return k.Kernel.Lookup(q)
}

func (k router) told(what string, about any) {
	if k.Told != nil {
		k.Told(fmt.Sprintf("%s %v", what, about))
	}
}

// HostMTU returns the MTU of our host route to a, zero if there is none.
func (k *Kernel) HostMTU(a netip.Addr) int {
	for _, r := range k.Own {
		if r.Dst == single(a) {
			return r.MTU
		}
	}
	return 0
}

// own returns the routes of protocol 75 in order.
func (k *Kernel) own() []rtnl.Route {
	return slices.SortedFunc(maps.Values(k.Own), func(a, b rtnl.Route) int { return a.Dst.Compare(b.Dst) })
}

// others yields all routes but those of protocol 75.
func (k *Kernel) others(yield func(Route) bool) {
	for _, r := range k.Routes {
		if !yield(r) {
			return
		}
	}
	for _, r := range k.kernel() {
		if !yield(Route{r, Index}) {
			return
		}
	}
}

// Lookup answers as RTM_GETROUTE does.
func (k *Kernel) Lookup(q rtnl.Query) (rtnl.Answer, error) {
	inVRF := k.inVRF(q)
	if inVRF && q.OIF == k.Link.Master {
		q.OIF = 0 // it names the table, not a device
	}
	if !inVRF && slices.Contains(k.Others, q.Dst) {
		return rtnl.Answer{Type: rtnl.Local, OIF: 1, Table: rtnl.TableLocal}, nil
	}
	own := slices.ContainsFunc(k.addrs, func(p netip.Prefix) bool { return p.Addr() == q.Dst })
	if own && !k.Peer && inVRF == (k.Link.VRFTable != 0) {
		return rtnl.Answer{Type: rtnl.Local, OIF: 1, Table: cmp.Or(k.Link.VRFTable, rtnl.TableLocal)}, nil
	}
	for _, table := range k.tables(q, inVRF) {
		if table < 0 {
			return rtnl.Answer{Type: rtnl.Blackhole}, nil
		}
		if r, ok := k.best(table, q); ok {
			if r.Type >= rtnl.Blackhole {
				return rtnl.Answer{Type: r.Type}, nil
			}
			a := rtnl.Answer{Type: r.Type, OIF: r.OIF, Via: r.Via, Src: r.Src, Table: table}
			if q.Match {
				a.Prefix, a.Protocol, a.MTU = r.Dst, r.Protocol, r.MTU
			}
			return a, nil
		}
	}
	if q.OIF != 0 && q.Dst.Is4() { // taken for on-link
		return rtnl.Answer{Type: rtnl.Unicast, OIF: q.OIF}, nil
	}
	return rtnl.Answer{Type: rtnl.Unreachable}, nil
}

// inVRF reports whether q names the device's VRF, or a device in it: then the rule of
// l3mdev leads to the VRF's table.
func (k *Kernel) inVRF(q rtnl.Query) bool {
	member := func(device int) bool {
		return device != 0 && (device == Index || device == k.Link.Master || slices.Contains(k.Members, device))
	}
	return k.Link.VRFTable != 0 && (member(q.OIF) || q.OIF == 0 && member(q.IIF))
}

// tables lists the tables in which the rules look q up. A negative one is a blackhole.
func (k *Kernel) tables(q rtnl.Query, inVRF bool) (out []int) {
	out = append(out, rtnl.TableLocal)
	if inVRF {
		out = append(out, k.Link.VRFTable)
	}
	for _, r := range k.Rules {
		switch {
		case r.From.IsValid() && (!q.Src.IsValid() || !r.From.Contains(q.Src)):
		case r.To.IsValid() && !r.To.Contains(q.Dst):
		case r.TOS != 0 && r.TOS != q.TOS:
		case r.Blackhole:
			out = append(out, -1)
		default:
			out = append(out, r.Table)
		}
	}
	return append(out, rtnl.TableMain)
}

// best returns the route of the longest prefix. Among several it takes the one with the least
// metric, then the first.
func (k *Kernel) best(table int, q rtnl.Query) (best Route, ok bool) {
	host := rtnl.Route{Dst: single(q.Dst), Table: table, Type: rtnl.Unicast}
	if q.Dst.Is6() {
		host.Metric = 1024
	}
	look := func(r Route) bool {
		t := cmp.Or(r.Table, rtnl.TableMain)
		switch {
		case t != table || !r.Dst.Contains(q.Dst):
		case q.OIF != 0 && r.OIF != q.OIF && r.Type < rtnl.Blackhole:
		case !ok || r.Dst.Bits() > best.Dst.Bits() || r.Dst.Bits() == best.Dst.Bits() && r.Metric < best.Metric:
			best, ok = r, true
		}
		return true
	}
	k.others(look)
	if r, there := k.Own[host.Key()]; there {
		look(Route{r, Index})
	}
	return best, ok
}
