//go:build ibverbs && cgo

package ibverbs

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

const (
	// watchQuiet is how long watch waits after a change before it reads the port: changes come in
	// bursts, and the kernel changes the GID table a little after the address.
	watchQuiet = 20 * time.Millisecond
	// watchAgain is how often watch reads the port without a notice. The kernel announces the
	// removal of a device only to programs that have it open, and only if its driver can release
	// it.
	watchAgain = time.Second
	// dumpRetries bounds how often a list of addresses is read again because it changed meanwhile.
	dumpRetries = 10
)

// A monitor receives notices of changes of links and addresses, in the network namespace in which
// Open was called.
type monitor struct {
	nl     *os.File
	ns     netns.NsHandle
	handle *netlink.Handle
	wake   chan struct{} // something has changed
	done   chan struct{}
}

func newMonitor() (*monitor, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	groups := uint32(unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR)
	m := &monitor{nl: os.NewFile(uintptr(fd), "netlink"), ns: netns.None(), wake: make(chan struct{}, 1),
		done: make(chan struct{})}
	if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err == nil {
		if m.ns, err = netns.Get(); err == nil {
			m.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		}
	}
	if err != nil {
		m.nl.Close()
		m.close()
		return nil, fmt.Errorf("watch links and addresses: %w", err)
	}
	return m, nil
}

// addresses returns, as GIDs, the addresses of a network device that can be used. tentative is true
// if others may become usable soon.
func (m *monitor) addresses(ifindex int) (gids []ib.GID, tentative bool, err error) {
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	for range dumpRetries {
		var list []netlink.Addr
		if list, err = m.handle.AddrList(link, netlink.FAMILY_ALL); errors.Is(err, netlink.ErrDumpInterrupted) {
			continue
		}
		for _, a := range list {
			addr, ok := netip.AddrFromSlice(a.IP)
			switch {
			case !ok || a.Flags&unix.IFA_F_DADFAILED != 0:
			case a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0:
				tentative = true
			default:
				gids = append(gids, ib.GIDFromAddr(addr.Unmap()))
			}
		}
		break
	}
	return gids, tentative, err
}

// notify makes watch read the port.
func (m *monitor) notify() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// listen calls notify after every change, until the socket is closed.
func (m *monitor) listen() {
	buf := make([]byte, 1<<16)
	for {
		_, err := m.nl.Read(buf)
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return
		}
		m.notify()
	}
}

func (m *monitor) stop() {
	close(m.done)
	m.nl.Close()
}

func (m *monitor) close() {
	if m.handle != nil {
		m.handle.Close()
	}
	if m.ns.IsOpen() {
		m.ns.Close()
	}
}

// watch reads the port after every change, and every watchAgain.
func (d *Device) watch() {
	m := d.monitor
	d.wg.Go(m.listen)
	// renew opens sockets, which must be in the namespace of Open. The thread stays locked and ends
	// with this goroutine.
	runtime.LockOSThread()
	if here, err := netns.Get(); err == nil {
		if !here.Equal(m.ns) {
			_ = netns.Set(m.ns)
		}
		_ = here.Close()
	}
	again := time.NewTicker(watchAgain)
	defer again.Stop()
	for {
		select {
		case <-m.done:
			return
		case why := <-d.fatal:
			d.gone(why)
			return
		case <-m.wake:
			select {
			case <-m.done:
				return
			case <-time.After(watchQuiet):
			}
		case <-again.C:
		}
		if !d.present() {
			d.gone("RDMA device " + d.name + " was removed")
			return
		}
		d.refresh()
	}
}

// refresh reads the port and tells the user what has changed.
func (d *Device) refresh() {
	if d.use() != nil {
		return
	}
	defer d.life.RUnlock()
	old := d.state.Load()
	prefer := ib.GID{}
	if len(old.GIDs) > 0 {
		prefer = old.GIDs[0]
	}
	now, err := d.read(prefer)
	if err != nil {
		now = old.unusable()
	}
	d.state.Store(now)
	events := portEvents(&old.Port, &now.Port)
	if len(events) == 0 {
		return
	}
	d.log.Info("port changed", "active", now.Active, "gids", now.GIDs, "mtu", now.MTU.Octets(), "err", err)
	if now.Active {
		d.count.joinErrors.Add(uint64(d.groups.renew()))
	}
	for _, ev := range events {
		d.events.Tell(ev)
	}
}

// gone releases a device that was removed. Its objects return errors from then on; only Close is
// left.
func (d *Device) gone(why string) {
	d.log.Error("the device is gone", "why", why)
	d.state.Store(d.state.Load().unusable())
	d.closeMADs()
	d.async.Close()
	_ = d.teardown()
	d.events.Tell(verbs.Event{Kind: verbs.DeviceFatal, Text: why})
}

// readAsync handles the device's asynchronous events.
func (d *Device) readAsync() {
	conn, err := d.async.SyscallConn()
	if err != nil {
		return
	}
	for {
		var ev C.struct_shim_event
		var rc C.int
		err := conn.Read(func(uintptr) bool {
			rc = C.shim_async_event(d.ctx, &ev)
			return rc != C.int(syscall.EAGAIN)
		})
		if err != nil {
			return
		}
		if rc != 0 {
			d.lost("no events from RDMA device " + d.name + ": " + syscall.Errno(rc).Error())
			return
		}
		d.count.asyncEvents.Add(1)
		d.asyncEvent(int(ev._type), ib.QPN(ev.qpn), ev.cq)
	}
}

func (d *Device) asyncEvent(event int, qpn ib.QPN, h *C.struct_ibv_cq) {
	d.mu.RLock()
	q := d.qps[qpn]
	d.mu.RUnlock()
	switch asyncOf(event) {
	case asyncQPDied:
		if q != nil {
			q.died(asyncStatus(event), "")
			q.flush()
		}
	case asyncComm:
		if q != nil {
			q.commEst()
		}
	case asyncCQDied:
		d.count.cqErrors.Add(1)
		d.mu.RLock()
		users := slices.Collect(maps.Values(d.qps))
		d.mu.RUnlock()
		for _, q := range users {
			if q.sendCQ.is(h) || q.recvCQ.is(h) {
				q.died(verbs.GeneralError, "a completion queue overflowed")
				q.flush()
			}
		}
	case asyncPort:
		d.monitor.notify()
	case asyncRegister:
		d.events.Tell(verbs.Event{Kind: verbs.Reregister, Text: "the subnet manager asks for it"})
		d.monitor.notify()
	case asyncFatal:
		d.lost("RDMA device " + d.name + " was removed")
	}
}

// lost tells watch that the device is gone; watch does the rest.
func (d *Device) lost(why string) {
	select {
	case d.fatal <- why:
	default:
	}
}
