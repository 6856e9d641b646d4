package hostnet

import (
	"errors"
	"fmt"
	"ipoibcm/counters"
	"ipoibcm/rtnl"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// requestTimeout bounds one netlink request or dump.
const requestTimeout = 10 * time.Second

// dumpTries bounds how often a dump is tried while the kernel reports that its tables changed
// meanwhile. The result of the last try is used; the events that follow correct it.
const dumpTries = 10

const (
	// tempMetric is the usual metric of a stand-in: a route that serves while another is replaced.
	// It is worse than any metric in use. betterThan gives a stand-in for IPv6 another one. A
	// stand-in has protocol [rtnl.Protocol], and is in no Event or Snapshot.
	tempMetric = 0xfffffff0
	// hostMetric is the metric of our routes for IPv6, the kernel's default. An IPv6 route of ours
	// with another metric is a stand-in.
	hostMetric = 1024
)

// A Device is one network device, watched.
type Device struct {
	index int
	ns    netns.NsHandle
	h     *netlink.Handle
	req   *nl.SocketHandle // for routes and dumps, strict checking on
	pid   uint32           // netlink's port of req: the kernel names it in messages about our own changes
	setMu sync.Mutex       // one change of routes at a time: they share tempMetric
	look  *Resolver

	rulesMu sync.Mutex
	rules   map[rtnl.Rule]bool // the rules that AddRule made

	sub    *subscription
	events chan rtnl.Event
	ended  sync.WaitGroup
	once   sync.Once
	closed atomic.Bool

	count Counts[atomic.Uint64]
}

// Open starts to watch the device with this interface index in the network
// namespace of the calling thread. The first event is a Resync, the second Rules.
func Open(ifindex int) (_ *Device, err error) {
	d := &Device{index: ifindex, ns: netns.None(), rules: map[rtnl.Rule]bool{}, events: make(chan rtnl.Event, EventBound)}
	defer func() {
		if err != nil {
			d.closeSockets()
		}
	}()
	runtime.LockOSThread() // the sockets and the handle must be of one namespace
	defer runtime.UnlockOSThread()
	if d.ns, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("get network namespace: %w", err)
	}
	if d.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	d.req = &nl.SocketHandle{Socket: s}
	if d.pid, err = s.GetPid(); err != nil {
		return nil, fmt.Errorf("netlink port: %w", err)
	}
	tv := unix.NsecToTimeval(requestTimeout.Nanoseconds())
	s.SetReceiveTimeout(&tv)
	s.SetSendTimeout(&tv)
	// Strict checking lets the kernel filter dumps by device. An old kernel
	// without it sends everything, which we filter anyway.
	unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	if d.look, err = OpenResolver(); err != nil {
		return nil, err
	}
	if d.sub, err = subscribe(maxEvent, groups...); err != nil {
		return nil, err
	}
	d.sub.setBuffer(1 << 20)
	snap, err := d.Snapshot()
	if err != nil {
		return nil, err
	}
	w := watcher{Device: d, batch: make([]netip.Prefix, 0, eventBatch)}
	if err := w.readFields(); err != nil {
		return nil, err
	}
	w.m.replace(snap)
	d.count.Resyncs.Add(1)
	d.events <- rtnl.Event{Kind: rtnl.Resync, Snapshot: &snap}
	d.events <- rtnl.Event{Kind: rtnl.Rules, Fields: w.told}
	d.ended.Go(w.watch)
	return d, nil
}

// Close ends the watch and closes Events. It leaves routes and addresses alone.
func (d *Device) Close() error {
	d.once.Do(func() {
		d.closed.Store(true)
		d.sub.close()
		d.ended.Wait()
		close(d.events)
		d.closeSockets()
	})
	return nil
}

func (d *Device) closeSockets() {
	if d.sub != nil && !d.closed.Load() {
		d.sub.close()
	}
	if d.req != nil {
		d.req.Socket.Close()
	}
	d.look.Close()
	if d.h != nil {
		d.h.Close()
	}
	if d.ns.IsOpen() {
		d.ns.Close()
	}
}

// Events returns the one channel of changes of addresses, of the link, and of the routes through
// the device, in every table, that the kernel or we made. Rerouted and Rules events report
// everything else that may give packets another next hop. The channel is bounded. When its reader
// lags, one Resync replaces the events that did not fit, and one Rerouted of all destinations
// replaces several Rerouted ones. Close closes the channel.
func (d *Device) Events() <-chan rtnl.Event { return d.events }

// Index returns the interface index.
func (d *Device) Index() int { return d.index }

// Snapshot reads the link, its addresses and those of its routes that the kernel or we made. It
// sends no event.
func (d *Device) Snapshot() (rtnl.Snapshot, error) {
	var s rtnl.Snapshot
	l, err := d.linkNow()
	if err != nil {
		return s, err
	}
	s.Link = linkOf(l)

	req := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	body := nl.NewIfAddrmsg(unix.AF_UNSPEC)
	body.Index = uint32(d.index)
	req.AddData(body)
	err = d.dump(req, unix.RTM_NEWADDR, func() { s.Addrs = nil }, func(b []byte) {
		if a, index, err := parseAddr(b); err != nil {
			d.count.Malformed.Add(1)
		} else if index == d.index {
			s.Addrs = append(s.Addrs, a)
		}
	})
	if err != nil {
		return s, fmt.Errorf("read addresses of %s: %w", s.Link.Name, err)
	}

	for _, family := range families {
		for _, proto := range mirrored {
			routes, err := d.dumpRoutes(family, proto, 0)
			if err != nil {
				return s, fmt.Errorf("read routes of %s: %w", s.Link.Name, err)
			}
			s.Routes = append(s.Routes, slices.DeleteFunc(routes, isTemp)...)
		}
	}
	return s, nil
}

var families = []byte{unix.AF_INET, unix.AF_INET6}

// mirrored are the protocols of the routes in Events and Snapshots. A router may have a million
// other routes through the device. Lookup finds out which of them a packet takes.
var mirrored = []uint8{rtnl.ProtoKernel, rtnl.Protocol}

// dumpRoutes reads the device's routes of one family and protocol (zero: any), or its exceptions
// with flags RTM_F_CLONED. Since Linux 4.20 the kernel leaves out other routes; an older one sends
// all, and dumpRoutes leaves them out. Of several routes with the same Key the first counts, as in
// the kernel. Stand-ins are included.
func (d *Device) dumpRoutes(family, proto uint8, flags uint32) (routes []rtnl.Route, err error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
	req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Protocol: proto, Flags: flags}})
	req.AddRawData(appendAttr32(nil, unix.RTA_OIF, d.index))
	var seen map[rtnl.Key]bool
	reset := func() { routes, seen = nil, map[rtnl.Key]bool{} }
	err = d.dump(req, unix.RTM_NEWROUTE, reset, func(b []byte) {
		m, err := parseRoute(b)
		switch {
		case err != nil:
			d.count.Malformed.Add(1)
		case m.oif != d.index || m.exception != (flags&unix.RTM_F_CLONED != 0):
		case proto != 0 && m.Protocol != proto:
		case !seen[m.Key()]:
			seen[m.Key()] = true
			routes = append(routes, m.Route)
		}
	})
	return routes, err
}

// isTemp reports whether r stands in for another.
func isTemp(r rtnl.Route) bool {
	return r.Protocol == rtnl.Protocol && (r.Metric == tempMetric || r.Dst.Addr().Is6() && r.Metric != hostMetric)
}

// dump runs a dump, and repeats it if the kernel's tables changed meanwhile, up to dumpTries times
// in all. reset forgets the results of an earlier try.
func (d *Device) dump(req *nl.NetlinkRequest, typ uint16, reset func(), f func([]byte)) error {
	for try := 1; ; try++ {
		reset()
		err := d.execute(req, typ, f)
		switch {
		case !errors.Is(err, nl.ErrDumpInterrupted):
			return err
		case try == dumpTries:
			return nil
		}
		d.count.DumpRetries.Add(1)
	}
}

func (d *Device) execute(req *nl.NetlinkRequest, typ uint16, f func([]byte)) error {
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: d.req}
	return req.ExecuteIter(unix.NETLINK_ROUTE, typ, func(b []byte) bool {
		f(b)
		return true
	})
}

// wrap says what failed; nil stays nil.
func wrap(err error, what string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(what, args...), err)
}

// linkNow reads the link.
func (d *Device) linkNow() (netlink.Link, error) {
	l, err := d.h.LinkByIndex(d.index)
	return l, wrap(err, "read link %d", d.index)
}

// SetUp sets the device up or down.
func (d *Device) SetUp(up bool) error {
	set := d.h.LinkSetDown
	if up {
		set = d.h.LinkSetUp
	}
	return wrap(set(d.link()), "set device %d up %v", d.index, up)
}

// SetMTU sets the device MTU in octets.
func (d *Device) SetMTU(mtu int) error {
	return wrap(d.h.LinkSetMTU(d.link(), mtu), "set MTU of device %d to %d", d.index, mtu)
}

// DisableAddrGen sets addr_gen_mode none: the kernel makes no link-local address.
func (d *Device) DisableAddrGen() error {
	const none = 1 // IN6_ADDR_GEN_MODE_NONE
	return wrap(d.h.LinkSetIP6AddrGenMode(d.link(), none), "set addr_gen_mode of device %d", d.index)
}

// link returns a link for the library's calls, which use its index only.
func (d *Device) link() netlink.Link {
	return &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: d.index}}
}

// IgnoreRAMTU sets accept_ra_mtu 0: the kernel ignores the MTU option of an RA.
func (d *Device) IgnoreRAMTU() error { return d.SetSysctl("ipv6", "accept_ra_mtu", "0") }

// DisableIPv6 sets disable_ipv6: the device takes no IPv6 address or packet.
func (d *Device) DisableIPv6() error { return d.SetSysctl("ipv6", "disable_ipv6", "1") }

// SetSysctl writes value to net/<family>/conf/<device>/<key>, family "ipv4" or "ipv6", unless it
// is there already.
func (d *Device) SetSysctl(family, key, value string) error {
	l, err := d.linkNow()
	if err != nil {
		return err
	}
	return d.writeSysctl(filepath.Join(family, "conf", l.Attrs().Name, key), value)
}

// writeSysctl writes a file below /proc/sys/net, which shows the namespace of
// the thread that opens it.
func (d *Device) writeSysctl(path, value string) error {
	path = filepath.Join("/proc/sys/net", path)
	return wrap(d.inNamespace(func() error {
		if b, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(b)) == value {
			return nil // which is no error where /proc/sys is read-only
		}
		return os.WriteFile(path, []byte(value), 0)
	}), "set sysctl")
}

// inNamespace runs f in the device's network namespace.
func (d *Device) inNamespace(f func() error) error { return InNamespace(d.ns, f) }

// AddAddr puts an address with its prefix length on the device. It is no error if the address is
// there already. For IPv6, AddAddr asks the kernel to do no DAD. The kernel does none on a TUN
// anyway, but without that flag it would call the address tentative until a work queue runs, and
// send from another address meanwhile. See [Device.WaitAddr].
func (d *Device) AddAddr(p netip.Prefix) error {
	a := addrFor(p)
	if p.Addr().Is6() {
		a.Flags |= unix.IFA_F_NODAD
	}
	err := d.h.AddrAdd(d.link(), a)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return wrap(err, "add address %v", p)
}

// RemoveGenerated removes the link-local address that the kernel generated for the device.
func (d *Device) RemoveGenerated() error {
	s, err := d.Snapshot()
	if err != nil {
		return err
	}
	for _, a := range s.Addrs {
		if a.Generated && a.Prefix.Addr().IsLinkLocalUnicast() {
			if err := d.DelAddr(a.Prefix); err != nil && !errors.Is(err, ErrNotFound) {
				return err
			}
		}
	}
	return nil
}

// WaitAddr waits, for at most patience, until the kernel receives packets to an address that
// AddAddr put on the device. It reports whether the kernel does. For IPv6 a work queue of the
// kernel has to run first.
func (d *Device) WaitAddr(a netip.Addr, patience time.Duration) bool {
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if routes, err := d.h.RouteGet(a.AsSlice()); err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// DelAddr removes an address. The error is ErrNotFound if it is not there.
func (d *Device) DelAddr(p netip.Prefix) error {
	err := d.h.AddrDel(d.link(), addrFor(p))
	if errors.Is(err, unix.EADDRNOTAVAIL) {
		return ErrNotFound
	}
	return wrap(err, "remove address %v", p)
}

func addrFor(p netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{
		IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen()),
	}}
}

// Counts are what went wrong with a device and was repaired; C is uint64 or atomic.Uint64.
type Counts[C any] struct {
	Resyncs     C `name:"resyncs"`      // snapshots delivered, the first included
	Overflows   C `name:"overflows"`    // the netlink socket overran (ENOBUFS)
	Lagged      C `name:"lagged"`       // the reader of Events was too slow
	Merged      C `name:"merged"`       // Rerouted events that were merged into one of all destinations
	DumpRetries C `name:"dump_retries"` // dumps that the kernel called interrupted
	Malformed   C `name:"malformed"`    // netlink messages that could not be read
	Waits       C `name:"waits"`        // times that the kernel was waited for to finish what it had told of
}

// Counters are the values of the counts at one time.
type Counters = Counts[uint64]

// Counters returns the counts so far.
func (d *Device) Counters() (sum Counters) {
	counters.Add(&sum, &d.count)
	return sum
}
