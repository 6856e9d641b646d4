package hostnet

import (
	"errors"
	"ipoibcm/rtnl"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// settle is how long the watch waits for quiet before it reads everything anew.
	settle = 20 * time.Millisecond
	// settleMax bounds that wait: a host that runs BGP may never be quiet.
	settleMax = 250 * time.Millisecond
	// scanEvery is the least time between two readings of every device's routes. The next reading
	// also waits for scanRest times the duration of the one before.
	scanEvery = time.Second
	scanRest  = 10
	// reroutedBound bounds the events that wait when a Rerouted event is sent. With more, the
	// Rerouted ones merge into one, so that other events still fit.
	reroutedBound = EventBound / 2
)

// groups are the notifications that the watch looks at.
var groups = []int{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
	unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
	unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_NEXTHOP,
}

// An addrKey tells the addresses of a device apart: the kernel has 10.0.0.2/16 beside 10.0.0.2/24,
// and one address with several peers.
type addrKey struct {
	prefix netip.Prefix
	peer   netip.Addr
}

func keyOf(a rtnl.Addr) addrKey { return addrKey{a.Prefix, a.Peer} }

// A mirror is the state of the device as the events so far describe it to their reader.
type mirror struct {
	link   rtnl.Link
	addrs  map[addrKey]rtnl.Addr
	routes map[rtnl.Key]rtnl.Route
	dsts   map[netip.Prefix]int // number of routes with this destination
}

func (m *mirror) replace(s rtnl.Snapshot) {
	m.link, m.addrs = s.Link, map[addrKey]rtnl.Addr{}
	m.routes, m.dsts = map[rtnl.Key]rtnl.Route{}, map[netip.Prefix]int{}
	for _, a := range s.Addrs {
		m.addrs[keyOf(a)] = a
	}
	for _, r := range s.Routes {
		m.put(r)
	}
}

func (m *mirror) put(r rtnl.Route) {
	if _, ok := m.routes[r.Key()]; !ok {
		m.dsts[r.Dst]++
	}
	m.routes[r.Key()] = r
}

func (m *mirror) remove(k rtnl.Key) {
	delete(m.routes, k)
	if m.dsts[k.Dst]--; m.dsts[k.Dst] == 0 {
		delete(m.dsts, k.Dst)
	}
}

// A watcher is the state of one watch. Where the kernel's messages do not tell the whole truth, it
// sets doubt, and everything is read anew.
type watcher struct {
	*Device
	m     mirror
	doubt bool // read everything anew and tell the differences
	lost  bool // read everything anew and tell all of it
	rules bool // read the rules anew
	ruled bool // tell that the rules changed
	scan  bool // look again whether any route is sourced
	since time.Time

	batch   []netip.Prefix // destinations rerouted and not yet told; at most eventBatch
	early   bool           // the kernel may not have finished the changes that it has notified us of
	all     bool           // all destinations are rerouted, not yet told
	unnamed bool           // with all: routes are among the causes

	ruleFields rtnl.Fields
	hasSourced bool // there is a route that isSourced, or there was at the last look
	scanAfter  time.Time
	told       rtnl.Fields
}

// watch turns netlink messages into events until the socket is closed.
func (w *watcher) watch() {
	for {
		err := w.sub.receive(w.patience(), eventBatch, w.datagram)
		if w.closed.Load() {
			return
		}
		w.after(err)
		w.awaitKernel()
		w.tellRerouted()
		w.tellFields()
	}
}

// awaitKernel waits until the kernel has finished the changes that it has notified us of. When an IPv4
// route, an address or a next-hop object is deleted, or a device goes down, the kernel sends the
// notification before it removes the routes (fib_table_delete, __inet_del_ifa, __dev_notify_flags). An
// immediate Lookup could still return such a route. The kernel holds the RTNL lock over both steps, and
// an RTM_GETLINK request waits for that lock.
func (w *watcher) awaitKernel() {
	if !w.early {
		return
	}
	w.early = false
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(w.index)
	req.AddData(msg)
	_ = w.execute(req, unix.RTM_NEWLINK, func([]byte) { w.count.Waits.Add(1) }) // of a device that has gone as well
}

// after does what is due after one receive, whose error is err.
func (w *watcher) after(err error) {
	switch {
	case errors.Is(err, unix.EAGAIN):
		w.refresh()
	case errors.Is(err, unix.ENOBUFS):
		w.count.Overflows.Add(1)
		w.miss()
	case err != nil:
		w.count.Malformed.Add(1)
		w.miss()
		time.Sleep(settle) // an error that stays must not spin
	case w.due() && !w.since.IsZero() && time.Since(w.since) > settleMax:
		w.refresh()
	}
	if w.due() && w.since.IsZero() {
		w.since = time.Now()
	}
}

// due reports whether something is to be read anew.
func (w *watcher) due() bool {
	return w.doubt || w.lost || w.rules || w.scanDue()
}

func (w *watcher) scanDue() bool { return w.scan && time.Now().After(w.scanAfter) }

// patience returns how long to wait for the next notification; zero sets no limit.
func (w *watcher) patience() time.Duration {
	if w.due() || w.scan || w.all || w.ruled || w.told != w.fields() {
		return settle
	}
	return 0
}

// miss notes that notifications were lost.
func (w *watcher) miss() {
	w.lost, w.rules, w.scan = true, true, true
	w.all, w.unnamed = true, true
}

// fields returns which fields of a packet decide its next hop.
func (w *watcher) fields() rtnl.Fields {
	if w.hasSourced {
		return max(w.ruleFields, rtnl.WithSource)
	}
	return w.ruleFields
}

func (w *watcher) datagram(b []byte) {
	for m, rest, ok := nextMessage(b); ok; m, rest, ok = nextMessage(rest) {
		w.message(&m)
	}
}

func (w *watcher) message(m *message) {
	switch m.typ {
	case unix.RTM_NEWROUTE, unix.RTM_NEWRULE, unix.RTM_DELRULE: // the kernel finishes these before it notifies
	case unix.RTM_DELROUTE:
		w.early = w.early || len(m.data) > 0 && m.data[0] == unix.AF_INET
	default:
		w.early = true
	}
	switch m.typ {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		w.linkMessage(m)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		w.all = true
		w.addrMessage(m)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, err := parseRoute(m.data)
		if err != nil {
			w.count.Malformed.Add(1)
			w.doubt, w.all = true, true
			return
		}
		if r.exception {
			return
		}
		w.reroute(m, &r)
		w.routeMessage(m, &r)
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		r, err := parseRule(m.data)
		if err != nil {
			w.count.Malformed.Add(1)
		} else if r.protocol == rtnl.Protocol && !(m.typ == unix.RTM_DELRULE && m.pid != w.pid && w.madeRule(r.Rule)) {
			return // ours, unless somebody else has removed it
		}
		w.rules, w.ruled, w.all = true, true, true
	case unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP, rtmNewNexthopBucket, rtmDelNexthopBucket,
		unix.RTM_NEWNETCONF, unix.RTM_DELNETCONF:
		w.all = true
	}
}

// Constants of include/uapi/linux/rtnetlink.h: a resilient group moved a bucket to another hop.
const rtmNewNexthopBucket, rtmDelNexthopBucket = 116, 117

func (w *watcher) addrMessage(m *message) {
	a, index, err := parseAddr(m.data)
	if err != nil {
		w.count.Malformed.Add(1)
		w.doubt = true
		return
	}
	if index != w.index {
		return
	}
	if m.typ == unix.RTM_NEWADDR {
		w.setAddr(a)
		return
	}
	w.goneAddr(keyOf(a))
	w.doubt = true // routes with this source go, on some kernels silently
}

func (w *watcher) linkMessage(m *message) {
	if len(m.data) < unix.SizeofIfInfomsg || m.data[0] != unix.AF_UNSPEC {
		return
	}
	w.all = true
	if u32(m.data[4:]) != w.index {
		return
	}
	l := w.m.link
	if m.typ == unix.RTM_DELLINK {
		l.Gone, l.Up, l.Running = true, false, false
	} else {
		now, err := netlink.LinkDeserialize(nil, slices.Clone(m.data))
		if err != nil {
			w.count.Malformed.Add(1)
			return
		}
		l = linkOf(now)
	}
	w.setLink(l)
}

// reroute notes that packets to a route's destinations may have another next hop.
//
// Changes of our own are not noted. Routes of ours lead where packets went before, and so does a
// route of the kernel's that we gave other metrics: the messages of its removal and addition have
// our port. If they were reported, the reader would look up the route and set metrics again, which
// would be reported, and so on without end. Others' changes are always noted.
func (w *watcher) reroute(m *message, r *routeMsg) {
	if r.Protocol == rtnl.Protocol || m.pid == w.pid {
		return
	}
	if isSourced(m.data) {
		if m.typ == unix.RTM_NEWROUTE {
			w.hasSourced = true
		} else {
			w.scan = true // was it the last?
		}
	}
	switch {
	case slices.Contains(w.batch, r.Dst):
	case len(w.batch) == cap(w.batch):
		w.count.Merged.Add(1)
		w.all, w.unnamed = true, true
	default:
		w.batch = append(w.batch, r.Dst)
	}
}

// tellRerouted sends a Rerouted event for each prefix that reroute noted, if the reader keeps up.
// If not, it notes that all destinations are rerouted. For all, it sends one event when the reader
// has caught up. If their only cause was no route, the events of the prefixes are sent too, because
// the reader does more for a route.
func (w *watcher) tellRerouted() {
	for _, p := range w.batch {
		if w.unnamed || len(w.events) >= reroutedBound {
			w.count.Merged.Add(1)
			w.all, w.unnamed = true, true
			break
		}
		w.events <- rtnl.Event{Kind: rtnl.Rerouted, Prefix: p} // there is room, and we are the only writer
	}
	w.batch = w.batch[:0]
	if w.all && len(w.events) < reroutedBound {
		w.events <- rtnl.Event{Kind: rtnl.Rerouted, Unnamed: w.unnamed}
		w.all, w.unnamed = false, false
	}
}

// tellFields sends a Rules event if rules changed and have been read anew, or if other fields
// decide. If the channel is full, a later call sends it.
func (w *watcher) tellFields() {
	if f := w.fields(); (f != w.told || w.ruled && !w.rules) && len(w.events) < cap(w.events) {
		w.told, w.ruled = f, false
		w.events <- rtnl.Event{Kind: rtnl.Rules, Fields: f}
	}
}

// readFields reads what the result of fields depends on, before the first event.
func (w *watcher) readFields() (err error) {
	if w.ruleFields, err = w.Device.ruleFields(); err != nil {
		return err
	}
	if err := w.readSourced(); err != nil {
		return err
	}
	w.told = w.fields()
	return nil
}

// readSourced reads the routes of every device. A router has a million, so this is not done often.
func (w *watcher) readSourced() error {
	start := time.Now()
	found, err := w.sourced()
	if err == nil {
		w.hasSourced, w.scan = found, false
	}
	now := time.Now()
	w.scanAfter = now.Add(max(scanEvery, scanRest*now.Sub(start)))
	return err
}

func (w *watcher) routeMessage(m *message, r *routeMsg) {
	if isTemp(r.Route) {
		return
	}
	if r.oif != w.index || !slices.Contains(mirrored, r.Protocol) {
		// This route may have taken the place of one that is mirrored.
		if m.flags&unix.NLM_F_REPLACE != 0 && w.shadows(r) {
			w.doubt = true
		}
		return
	}
	old, known := w.m.routes[r.Key()]
	if m.typ == unix.RTM_DELROUTE {
		if m.pid == w.pid {
			// We removed it: SetRoute adds another in its place. If the removal were reported, the
			// reader would set the route again, and so on without end. The dump shows if no route
			// has come.
			w.doubt = true
			return
		}
		if known {
			w.goneRoute(r.Key())
			// A second route with the same key may still be there.
			w.doubt = w.doubt || old.Via != r.Via || old.Type != r.Type
		}
		return
	}
	if known && m.flags&unix.NLM_F_REPLACE == 0 && old != r.Route && m.pid != w.pid {
		w.doubt = true // appended: which one counts only a dump tells
		return
	}
	w.setRoute(r.Route)
}

// shadows reports whether a mirrored route has r's destination, table and metric.
func (w *watcher) shadows(r *routeMsg) bool {
	if w.m.dsts[r.Dst] == 0 {
		return false // nearly always, and a router replaces many
	}
	for k := range w.m.routes {
		if k.Dst == r.Dst && k.Table == r.Table && k.Metric == r.Metric {
			return true
		}
	}
	return false
}

func (w *watcher) setLink(l rtnl.Link) {
	if l == w.m.link {
		return
	}
	// A device that goes down loses its IPv4 routes without a message for each. The kernel moves
	// the routes of a device that joins a VRF.
	w.doubt = w.doubt || (w.m.link.Up != l.Up || w.m.link.Master != l.Master) && !l.Gone
	w.m.link = l
	w.emit(rtnl.Event{Kind: rtnl.LinkChange, Link: l})
}

func (w *watcher) setAddr(a rtnl.Addr) {
	if old, ok := w.m.addrs[keyOf(a)]; ok && old == a {
		return
	}
	w.m.addrs[keyOf(a)] = a
	w.emit(rtnl.Event{Kind: rtnl.AddrSet, Addr: a})
}

func (w *watcher) goneAddr(k addrKey) {
	if a, ok := w.m.addrs[k]; ok {
		delete(w.m.addrs, k)
		w.emit(rtnl.Event{Kind: rtnl.AddrGone, Addr: a})
	}
}

func (w *watcher) setRoute(r rtnl.Route) {
	if old, ok := w.m.routes[r.Key()]; ok && old == r {
		return
	}
	w.m.put(r)
	w.emit(rtnl.Event{Kind: rtnl.RouteSet, Route: r})
}

func (w *watcher) goneRoute(k rtnl.Key) {
	if r, ok := w.m.routes[k]; ok {
		w.m.remove(k)
		w.emit(rtnl.Event{Kind: rtnl.RouteGone, Route: r})
	}
}

// emit sends the event of one change if it fits the channel. If not, a Resync follows.
func (w *watcher) emit(ev rtnl.Event) {
	if w.lost {
		return // the Resync will say it
	}
	select {
	case w.events <- ev:
	default:
		w.count.Lagged.Add(1)
		w.lost = true
	}
}

// refresh reads anew what is due, and sends the events of what has changed. What it cannot read, or
// cannot send because the channel is full, stays due.
func (w *watcher) refresh() {
	w.since = time.Time{}
	if w.rules {
		if f, err := w.Device.ruleFields(); err == nil {
			w.ruleFields, w.rules = f, false
		}
	}
	if w.scanDue() {
		w.readSourced()
	}
	if !w.doubt && !w.lost || w.lost && len(w.events) == cap(w.events) {
		return // nothing to do, or no room yet
	}
	s, err := w.read()
	if err != nil {
		return // the next try will do
	}
	if w.lost {
		w.m.replace(s)
		w.doubt, w.lost = false, false
		w.count.Resyncs.Add(1)
		w.events <- rtnl.Event{Kind: rtnl.Resync, Snapshot: &s} // there is room, and we are the only writer
		return
	}
	w.doubt = false
	w.tellDifferences(s)
}

// read takes a snapshot. If the device was removed, the snapshot has its link only.
func (w *watcher) read() (rtnl.Snapshot, error) {
	w.setMu.Lock() // not in the middle of a SetRoute
	defer w.setMu.Unlock()
	gone := w.m.link
	gone.Gone, gone.Up, gone.Running = true, false, false
	if w.m.link.Gone {
		return rtnl.Snapshot{Link: gone}, nil
	}
	s, err := w.Snapshot()
	if _, ok := errors.AsType[netlink.LinkNotFoundError](err); ok {
		return rtnl.Snapshot{Link: gone}, nil
	}
	return s, err
}

func (w *watcher) tellDifferences(s rtnl.Snapshot) {
	w.setLink(s.Link)
	addrs, routes := map[addrKey]bool{}, map[rtnl.Key]bool{}
	for _, a := range s.Addrs {
		addrs[keyOf(a)] = true
		w.setAddr(a)
	}
	for _, r := range s.Routes {
		routes[r.Key()] = true
		w.setRoute(r)
	}
	for k := range w.m.addrs {
		if !addrs[k] {
			w.goneAddr(k)
		}
	}
	for k := range w.m.routes {
		if !routes[k] {
			w.goneRoute(k)
		}
	}
}
