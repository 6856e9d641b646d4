package hostnet

import (
	"errors"
	"ipoibcm/rtnl"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// settle is how long the watch waits for quiet before it reads everything anew.
const settle = 20 * time.Millisecond

// A mirror is what the reader of Events has been told. Only watch touches it.
type mirror struct {
	link   rtnl.Link
	addrs  map[netip.Prefix]rtnl.Addr
	routes map[rtnl.Key]rtnl.Route
}

func (m *mirror) replace(s rtnl.Snapshot) {
	m.link, m.addrs, m.routes = s.Link, map[netip.Prefix]rtnl.Addr{}, map[rtnl.Key]rtnl.Route{}
	for _, a := range s.Addrs {
		m.addrs[a.Prefix] = a
	}
	for _, r := range s.Routes {
		m.routes[r.Key()] = r
	}
}

// A watcher is the state of one watch. A doubt is anything after which the
// single events do not tell the whole truth: then everything is read anew.
type watcher struct {
	*Device
	doubt bool // read anew and tell the differences
	lost  bool // read anew and tell everything
}

// watch turns netlink messages into events until the socket is closed.
func (d *Device) watch() {
	w := watcher{Device: d}
	for {
		var wait unix.Timeval
		if w.doubt || w.lost {
			wait = unix.NsecToTimeval(settle.Nanoseconds())
		}
		d.sub.SetReceiveTimeout(&wait)
		msgs, _, err := d.sub.Receive()
		switch {
		case d.closed.Load():
			return
		case errors.Is(err, unix.EAGAIN):
			w.refresh()
		case errors.Is(err, unix.ENOBUFS):
			d.overflows.Add(1)
			w.lost = true
		case errors.Is(err, unix.EINTR):
		case err != nil:
			d.malformed.Add(1)
			w.lost = true
			time.Sleep(settle) // an error that stays must not spin
		}
		for i := range msgs {
			w.message(&msgs[i])
		}
	}
}

func (w *watcher) message(m *syscall.NetlinkMessage) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		w.linkMessage(m)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		a, index, err := parseAddr(m.Data)
		if err != nil {
			w.malformed.Add(1)
			w.doubt = true
			return
		}
		if index != w.index {
			return
		}
		if m.Header.Type == unix.RTM_NEWADDR {
			w.setAddr(a)
			return
		}
		w.goneAddr(a.Prefix)
		w.doubt = true // routes with this source go, on some kernels silently
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, err := parseRoute(m.Data)
		if err != nil {
			w.malformed.Add(1)
			w.doubt = true
			return
		}
		w.routeMessage(m, &r)
	}
}

func (w *watcher) linkMessage(m *syscall.NetlinkMessage) {
	if len(m.Data) < unix.SizeofIfInfomsg || u32(m.Data[4:]) != w.index || m.Data[0] != unix.AF_UNSPEC {
		return
	}
	l := w.m.link
	if m.Header.Type == unix.RTM_DELLINK {
		l.Gone, l.Up, l.Running = true, false, false
	} else {
		nl, err := netlink.LinkDeserialize(nil, m.Data)
		if err != nil {
			w.malformed.Add(1)
			return
		}
		l = linkOf(nl)
	}
	w.setLink(l)
}

func (w *watcher) routeMessage(m *syscall.NetlinkMessage, r *routeMsg) {
	if r.exception || isTemp(r.Route) {
		return
	}
	old, known := w.m.routes[r.Key()]
	switch {
	case r.hops != nil:
		if r.through(w.index) {
			w.multipath.Add(1)
			w.doubt = true
		} else if m.Header.Flags&unix.NLM_F_REPLACE != 0 && w.shadows(r) {
			w.doubt = true
		}
	case r.oif != w.index:
		// A route of another device may have taken the place of ours.
		if m.Header.Flags&unix.NLM_F_REPLACE != 0 && w.shadows(r) {
			w.doubt = true
		}
	case m.Header.Type == unix.RTM_DELROUTE:
		if m.Header.Pid == w.pid {
			// Our own: SetRoute puts another in its place, which follows. To
			// tell of the removal would make the reader set the route again,
			// and so on without end. The dump tells if none has come.
			w.doubt = true
			return
		}
		if known {
			w.goneRoute(r.Key())
			// A second one with the same key may be there still.
			w.doubt = w.doubt || old.Via != r.Via || old.Type != r.Type
		}
	default:
		if known && m.Header.Flags&unix.NLM_F_REPLACE == 0 && old != r.Route && m.Header.Pid != w.pid {
			w.doubt = true // appended: which one counts only a dump tells
			return
		}
		w.setRoute(r.Route)
	}
}

// shadows reports whether a route of ours has r's destination, table and metric.
func (w *watcher) shadows(r *routeMsg) bool {
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
	// A device that goes down loses its IPv4 routes without a message each.
	w.doubt = w.doubt || w.m.link.Up != l.Up && !l.Gone
	w.m.link = l
	w.emit(rtnl.Event{Kind: rtnl.LinkChange, Link: l})
}

func (w *watcher) setAddr(a rtnl.Addr) {
	if old, ok := w.m.addrs[a.Prefix]; ok && old == a {
		return
	}
	w.m.addrs[a.Prefix] = a
	w.emit(rtnl.Event{Kind: rtnl.AddrSet, Addr: a})
}

func (w *watcher) goneAddr(p netip.Prefix) {
	if a, ok := w.m.addrs[p]; ok {
		delete(w.m.addrs, p)
		w.emit(rtnl.Event{Kind: rtnl.AddrGone, Addr: a})
	}
}

func (w *watcher) setRoute(r rtnl.Route) {
	if old, ok := w.m.routes[r.Key()]; ok && old == r {
		return
	}
	w.m.routes[r.Key()] = r
	w.emit(rtnl.Event{Kind: rtnl.RouteSet, Route: r})
}

func (w *watcher) goneRoute(k rtnl.Key) {
	if r, ok := w.m.routes[k]; ok {
		delete(w.m.routes, k)
		w.emit(rtnl.Event{Kind: rtnl.RouteGone, Route: r})
	}
}

// emit tells one change, if the reader keeps up.
func (w *watcher) emit(ev rtnl.Event) {
	if w.lost {
		return // the Resync will say it
	}
	select {
	case w.events <- ev:
	default:
		w.lagged.Add(1)
		w.lost = true
	}
}

// refresh reads everything and tells what differs, or all of it.
func (w *watcher) refresh() {
	if w.m.link.Gone {
		w.doubt = false
		return
	}
	if w.lost && len(w.events) == cap(w.events) {
		return // no room yet
	}
	w.setMu.Lock() // not in the middle of a SetRoute
	s, err := w.Snapshot()
	w.setMu.Unlock()
	if err != nil {
		return // the device is going, or the next try will do
	}
	if w.lost {
		w.m.replace(s)
		w.doubt, w.lost = false, false
		w.resyncs.Add(1)
		w.events <- rtnl.Event{Kind: rtnl.Resync, Snapshot: &s} // there is room, and we are the only writer
		return
	}
	w.doubt = false
	w.setLink(s.Link)
	addrs, routes := map[netip.Prefix]bool{}, map[rtnl.Key]bool{}
	for _, a := range s.Addrs {
		addrs[a.Prefix] = true
		w.setAddr(a)
	}
	for _, r := range s.Routes {
		routes[r.Key()] = true
		w.setRoute(r)
	}
	for p := range w.m.addrs {
		if !addrs[p] {
			w.goneAddr(p)
		}
	}
	for k := range w.m.routes {
		if !routes[k] {
			w.goneRoute(k)
		}
	}
}
