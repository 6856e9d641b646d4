package softroce

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
)

const (
	// routesQuiet is how long we wait after a change of routes before we read
	// them again: changes come in bursts, and there may be thousands of peers.
	routesQuiet = 100 * time.Millisecond
	// minIPv6 is what every link carries whole (RFC 8200 section 5).
	minIPv6 = 1280
)

// A routeMTU is the MTU that the user has given the route to a destination ("ip route add …
// mtu N"), in octets of an IP packet. Our sockets do not let the kernel apply it, because
// the kernel would then apply path MTUs from ICMP messages too.
type routeMTU struct {
	src, dst ib.GID
	mtu      atomic.Int32 // 0: the route has none, and the link's counts
}

// octets returns the MTU, or math.MaxInt32 if the route has none.
func (r *routeMTU) octets() int {
	if mtu := r.mtu.Load(); mtu > 0 {
		return int(mtu)
	}
	return math.MaxInt32
}

// routeMTUs are the MTUs of the routes of paths in use.
type routeMTUs struct {
	dev *Device

	mu    sync.Mutex
	known map[[2]ib.GID]weak.Pointer[routeMTU] // an entry lasts as long as a path uses it
	clean int                                  // above this length known is rid of entries without a path
}

// to returns the MTU of the route to dst, for packets from src.
func (t *routeMTUs) to(src, dst ib.GID) *routeMTU {
	key := [2]ib.GID{src, dst}
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.known[key].Value(); r != nil {
		return r
	}
	r := &routeMTU{src: src, dst: dst}
	r.mtu.Store(t.read(src, dst))
	if t.known[key] = weak.Make(r); len(t.known) > t.clean {
		maps.DeleteFunc(t.known, func(_ [2]ib.GID, p weak.Pointer[routeMTU]) bool { return p.Value() == nil })
		t.clean = 64 + 2*len(t.known)
	}
	return r
}

// read asks the kernel for the MTU, and returns 0 if there is none. With Match the kernel
// returns the route as the user has written it, without a path MTU from ICMP messages.
func (t *routeMTUs) read(src, dst ib.GID) int32 {
	route, err := t.dev.under.routes.Lookup(rtnl.Query{
		Flow: rtnl.Flow{Dst: dst.Addr(), Src: src.Addr()}, OIF: int(t.dev.ifindex.Load()), Match: true})
	if err != nil || !route.OK() || route.MTU <= 0 {
		return 0 // if there is no route, the kernel says so when we send
	}
	mtu := min(route.MTU, math.MaxUint16)
	if !dst.Is4() {
		mtu = max(mtu, minIPv6)
	}
	return int32(mtu)
}

// reread reads all routes again, and reports MTUChange if an MTU has changed.
func (t *routeMTUs) reread() {
	t.mu.Lock()
	var all []*routeMTU
	for _, p := range t.known {
		if r := p.Value(); r != nil {
			all = append(all, r)
		}
	}
	t.mu.Unlock()
	changed := 0
	for _, r := range all {
		now := t.read(r.src, r.dst)
		if was := r.mtu.Swap(now); was != now {
			changed++
			t.dev.log.Debug("MTU of a route changed", "dgid", r.dst, "was", was, "mtu", now)
		}
	}
	if changed > 0 {
		text := fmt.Sprintf("the MTU of the route to %d destinations changed", changed)
		t.dev.log.Info(text)
		t.dev.events.Tell(verbs.Event{Kind: verbs.MTUChange, Text: text})
	}
}

var _ verbs.PathMTUer = (*Device)(nil)

// PathMTU implements [verbs.PathMTUer]: what the link and the route carry.
func (d *Device) PathMTU(dgid ib.GID) ib.MTU {
	port := d.port.Load()
	src := port.gidOf(dgid.Is4())
	if src.IsZero() {
		return port.MTU
	}
	octets := d.routes.to(src, dgid).octets()
	return min(port.MTU, max(ib.MTU256, ib.MTUFromOctets(min(octets, math.MaxUint16)-pathReserve)))
}

// watchRoutes reads the routes of paths again after changes, until the socket is
// closed.
func (m *monitor) watchRoutes() {
	buf := make([]byte, 1<<16)
	for {
		_ = m.routes.SetReadDeadline(time.Time{})
		n, err := m.routes.Read(buf)
		concerns := err != nil || concernsDevice(buf[:n], m.dev.ifindex.Load())
		end := time.Now().Add(routesQuiet)
		for concerns && (err == nil || errors.Is(err, unix.ENOBUFS)) { // ENOBUFS: we missed some, so look
			_ = m.routes.SetReadDeadline(end)
			_, err = m.routes.Read(buf)
		}
		switch {
		case m.dev.closing.Load() || err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
			return
		case concerns:
			m.dev.routes.reread()
		}
	}
}

// concernsDevice reports whether a datagram of netlink has a change of a route that
// may lead through the device with index ifindex. The agent's own routes, of which
// there is one for each peer, do not lead through the underlay.
func concernsDevice(b []byte, ifindex int32) bool {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(native.Uint32(b))
		if n < unix.SizeofNlMsghdr+unix.SizeofRtMsg || n > len(b) {
			return false
		}
		attrs, err := nl.ParseRouteAttr(b[unix.SizeofNlMsghdr+unix.SizeofRtMsg : n])
		other := false
		for _, a := range attrs {
			other = other || a.Attr.Type == unix.RTA_OIF && len(a.Value) == 4 && int32(native.Uint32(a.Value)) != ifindex
		}
		if err != nil || !other {
			return true
		}
		b = b[min(len(b), (n+3)&^3):]
	}
	return false
}
