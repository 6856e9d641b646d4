package hostnet

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"ipoibcm/rtnl"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// SetRoute gives one of the kernel's own routes of the device other metrics. The caller passes a
// Route of an Event or Snapshot with other MTU and AdvMSS; the rest is kept. If the route is not
// there, it is added.
//
// SetRoute does not use the kernel's own replace. That replaces the first route with this
// destination and metric, whatever its device, so a correction of our fe80::/64 or ff00::/8 could
// remove another interface's route. At no moment do packets take the next best route. For IPv4 the
// new route is added before the old one is removed. For IPv6, where two routes cannot differ in
// metrics alone, a stand-in serves meanwhile. Neither the stand-in nor the removal is reported as
// an Event.
func (d *Device) SetRoute(r rtnl.Route) error {
	d.setMu.Lock()
	defer d.setMu.Unlock()
	r = normal(r)
	err := d.route(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r)
	if err == nil || !errors.Is(err, unix.EEXIST) {
		return wrapRoute("add", r, err)
	}
	if r.Dst.Addr().Is4() {
		if err := d.append(r); err != nil {
			return wrapRoute("replace", r, err)
		}
	} else {
		defer d.standIn(r, betterThan(r.Metric))()
	}
	old := r
	old.Protocol = 0 // any: the route there may not be ours yet
	if err := d.route(unix.RTM_DELROUTE, 0, old); err != nil && !isAbsent(err) {
		return wrapRoute("replace", r, err)
	}
	// For IPv4 the kernel removed the first such route of the device: the old one, or the new one
	// if only another device's route was there before. In that case this adds the new one again.
	return wrapRoute("replace", r, d.append(r))
}

// append adds r behind other routes with its destination and metric. It is no error if the route
// is there already: for IPv6 the kernel may have added one meanwhile that differs only in metrics.
func (d *Device) append(r rtnl.Route) error {
	err := d.route(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, r)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// betterThan returns the metric of a stand-in for an IPv6 route with this metric: one less, so the
// kernel prefers the stand-in to that route, and to no route that it preferred before. If one less
// is 0 or hostMetric, which a stand-in cannot have, it returns tempMetric.
func betterThan(metric uint32) uint32 {
	if metric <= 1 || metric-1 == hostMetric { // zero stands for the default
		return tempMetric
	}
	return metric - 1
}

// standIn adds a route like r with another metric and our protocol, and returns a function that
// removes that route.
func (d *Device) standIn(r rtnl.Route, metric uint32) (remove func()) {
	r.Metric, r.Protocol = metric, rtnl.Protocol
	if d.route(unix.RTM_NEWROUTE, unix.NLM_F_CREATE, r) != nil {
		return func() {}
	}
	return func() { d.route(unix.RTM_DELROUTE, 0, r) }
}

// AddRoute adds a route of ours: its protocol is [rtnl.Protocol]. If a route of ours with the same
// Key is there, it gets r's metrics, and there is a route at every moment. The error is ErrExists
// if somebody else's route to the same destination is in the same table with this metric, or with
// any metric if the kernel uses it. That route is left as it is.
func (d *Device) AddRoute(r rtnl.Route) error {
	d.setMu.Lock()
	defer d.setMu.Unlock()
	r.Protocol = rtnl.Protocol
	r = normal(r)
	if d.taken(r) {
		return ErrExists
	}
	err := d.route(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r)
	if !errors.Is(err, unix.EEXIST) {
		return wrapRoute("add", r, err)
	}
	defer d.standIn(r, tempMetric)()
	if err := d.route(unix.RTM_DELROUTE, 0, r); isAbsent(err) {
		return ErrExists // the kernel removes by protocol too, so it is not ours
	} else if err != nil {
		return wrapRoute("replace", r, err)
	}
	err = d.route(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r)
	if errors.Is(err, unix.EEXIST) {
		return ErrExists // it stood below ours
	}
	return wrapRoute("replace", r, err)
}

// taken reports whether the kernel sends packets to r's destination by somebody else's route to
// the same destination. Its metric may differ from r's; NLM_F_EXCL would not find it then.
func (d *Device) taken(r rtnl.Route) bool {
	q := rtnl.Query{Flow: rtnl.Flow{Dst: r.Dst.Addr()}}
	if r.Table != rtnl.TableMain {
		q.OIF = d.index // the kernel looks into the table of a VRF only for its devices
	}
	m, ok := d.match(q)
	return ok && m.Dst == r.Dst && m.Table == r.Table && m.Protocol != rtnl.Protocol
}

// match returns the route that the kernel takes for q, as it stands in its table.
func (d *Device) match(q rtnl.Query) (m routeMsg, ok bool) {
	l := d.look
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.ask(q, unix.RTM_F_FIB_MATCH); err != nil {
		return m, false
	}
	msg, _, ok := nextMessage(l.in[:]) // ask has left it there
	if !ok {
		return m, false
	}
	m, err := parseRoute(msg.data)
	return m, err == nil
}

// DelRoute removes the route with r's Key and protocol, never one of another protocol. The error
// is ErrNotFound if it is not there.
func (d *Device) DelRoute(r rtnl.Route) error {
	d.setMu.Lock()
	defer d.setMu.Unlock()
	r = normal(r)
	err := d.route(unix.RTM_DELROUTE, 0, r)
	if isAbsent(err) {
		return ErrNotFound
	}
	return wrapRoute("remove", r, err)
}

func isAbsent(err error) bool { return errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) }

// RemoveOurs removes every route of the device whose protocol is [rtnl.Protocol], in every table,
// and every such rule that names the device or that we made. It returns how many it removed. It is
// for the exit, and for the start after a crash. The error is ErrNotFound if the device has gone,
// with its routes.
func (d *Device) RemoveOurs() (int, error) {
	removed, err := d.removeRules()
	if err != nil {
		return removed, err
	}
	for _, family := range families {
		routes, err := d.dumpRoutes(family, rtnl.Protocol, 0)
		if err != nil {
			return removed, fmt.Errorf("read routes: %w", err)
		}
		n, err := removeAll(routes, d.DelRoute) // stand-ins that a crash left too
		if removed += n; err != nil {
			return removed, err
		}
	}
	return removed, nil
}

// removeAll removes each of list and returns how many were there. It stops at the first error.
func removeAll[T any](list []T, remove func(T) error) (removed int, err error) {
	for _, v := range list {
		if err := remove(v); err == nil {
			removed++
		} else if !errors.Is(err, ErrNotFound) {
			return removed, err
		}
	}
	return removed, nil
}

// FlushExceptions makes the kernel forget the path MTUs that it has learned of destinations through
// the device. For IPv6 it removes each. For IPv4 there is only net.ipv4.route.flush, which flushes
// those of the whole namespace. It is used only if the device has such a path MTU.
func (d *Device) FlushExceptions() error {
	routes, err := d.dumpRoutes(unix.AF_INET, 0, unix.RTM_F_CLONED)
	if err != nil {
		return fmt.Errorf("read route exceptions: %w", err)
	}
	var flush error
	if len(routes) > 0 {
		flush = d.writeSysctl("ipv4/route/flush", "1")
	}
	routes, err = d.dumpRoutes(unix.AF_INET6, 0, unix.RTM_F_CLONED)
	if err != nil {
		return errors.Join(flush, fmt.Errorf("read route exceptions: %w", err))
	}
	for _, r := range routes {
		body := appendRoute(nil, r, d.index, true)
		binary.NativeEndian.PutUint32(body[8:], unix.RTM_F_CLONED)
		if err := d.request(unix.RTM_DELROUTE, 0, body); err != nil && !isAbsent(err) {
			return errors.Join(flush, wrapRoute("remove exception", r, err))
		}
	}
	return flush
}

// normal replaces zero fields of r by the values that they stand for.
func normal(r rtnl.Route) rtnl.Route {
	r.Protocol = cmp.Or(r.Protocol, rtnl.Protocol)
	r.Type, r.Table = cmp.Or(r.Type, rtnl.Unicast), cmp.Or(r.Table, rtnl.TableMain)
	if r.Dst.Addr().Is6() {
		r.Scope, r.Metric = 0, cmp.Or(r.Metric, hostMetric)
	} else if r.Scope == 0 && !r.Via.IsValid() {
		r.Scope = rtnl.ScopeLink // the kernel refuses an on-link route of wider scope
	}
	r.Dst = r.Dst.Masked()
	return r
}

func (d *Device) route(typ, flags int, r rtnl.Route) error {
	return d.request(typ, flags, appendRoute(nil, r, d.index, typ == unix.RTM_DELROUTE))
}

// request sends one request and waits for its acknowledgement.
func (d *Device) request(typ, flags int, body []byte) error {
	req := nl.NewNetlinkRequest(typ, flags|unix.NLM_F_ACK)
	req.AddRawData(body)
	return d.execute(req, 0, func([]byte) {})
}

func wrapRoute(what string, r rtnl.Route, err error) error {
	return wrap(err, "%s route %v", what, r)
}

// Groups returns the multicast groups that the kernel has joined on the device. Solicited-node
// groups are not among them: the kernel joins none on a NOARP device.
func (d *Device) Groups() (groups []netip.Addr, err error) {
	err = d.inNamespace(func() error {
		v4, err := os.ReadFile("/proc/thread-self/net/igmp")
		if err != nil && !os.IsNotExist(err) {
			return err
		}
		v6, err := os.ReadFile("/proc/thread-self/net/igmp6")
		if err != nil && !os.IsNotExist(err) { // IPv6 may be off
			return err
		}
		groups = append(parseIGMP(string(v4), d.index), parseIGMP6(string(v6), d.index)...)
		return nil
	})
	return groups, wrap(err, "read multicast groups")
}

// parseIGMP reads /proc/net/igmp. It has a line per device, and below it an indented line per
// group, which begins with the address as a number in the host's octet order.
func parseIGMP(text string, index int) (groups []netip.Addr) {
	ours := false
	for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
		fields := strings.Fields(sc.Text())
		if len(fields) == 0 {
			continue
		}
		if !strings.HasPrefix(sc.Text(), "\t") {
			n, err := strconv.Atoi(fields[0])
			ours = err == nil && n == index
			continue
		}
		if v, err := strconv.ParseUint(fields[0], 16, 32); ours && err == nil {
			var b [4]byte
			binary.NativeEndian.PutUint32(b[:], uint32(v))
			groups = append(groups, netip.AddrFrom4(b))
		}
	}
	return groups
}

// parseIGMP6 reads /proc/net/igmp6. It has a line per group: index, device, group in hexadecimal.
func parseIGMP6(text string, index int) (groups []netip.Addr) {
	for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
		fields := strings.Fields(sc.Text())
		if len(fields) < 3 || fields[0] != strconv.Itoa(index) {
			continue
		}
		if b, err := hex.DecodeString(fields[2]); err == nil && len(b) == 16 {
			groups = append(groups, netip.AddrFrom16([16]byte(b)))
		}
	}
	return groups
}
