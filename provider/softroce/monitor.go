package softroce

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"ipoibcm/hostnet"
	"ipoibcm/verbs"
)

const (
	// monitorQuiet is how long netlink must be silent before we look: changes come
	// in bursts.
	monitorQuiet = 20 * time.Millisecond
	// monitorMost is how long we wait for that at most.
	monitorMost = 250 * time.Millisecond
	// If the sockets cannot be opened again, the next try follows after reopenFirst.
	// The wait doubles with each failure, up to reopenMax.
	reopenFirst, reopenMax = 50 * time.Millisecond, 5 * time.Second
)

// A monitor is notified of changes of links, addresses and routes.
type monitor struct {
	dev *Device
	nl  *os.File // netlink socket, read through the poller so that Close ends it
	ns  netns.NsHandle

	routes *os.File // like nl, for routes, which may change much oftener

	broken bool // the sockets are bound to a network device that is gone
}

// newMonitor opens a monitor. After an error its result is there for close only.
func newMonitor(d *Device) (m *monitor, err error) {
	m = &monitor{dev: d, ns: netns.None()}
	if m.nl, err = subscribe("netlink", unix.RTMGRP_LINK|unix.RTMGRP_IPV4_IFADDR|unix.RTMGRP_IPV6_IFADDR); err != nil {
		return m, err
	}
	if m.ns, err = netns.Get(); err != nil {
		return m, fmt.Errorf("find network namespace: %w", err)
	}
	m.routes, err = subscribe("routes", unix.RTMGRP_IPV4_ROUTE|unix.RTMGRP_IPV6_ROUTE)
	return m, err
}

// subscribe opens a netlink socket that is notified of changes by groups, which what names.
func subscribe(what string, groups uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("subscribe to %s: %w", what, err)
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// run calls refresh after every burst of changes, and from time to time while m.broken is set,
// until the socket is closed. It enters the network namespace in which Open was called, because
// refresh may open sockets.
func (m *monitor) run() {
	_ = hostnet.OwnThread(func() error {
		if here, err := netns.Get(); err == nil {
			if !here.Equal(m.ns) {
				_ = netns.Set(m.ns) // a process without that right is in it anyway
			}
			_ = here.Close()
		}
		m.watch()
		return nil
	})
}

func (m *monitor) watch() {
	buf, wait := make([]byte, 1<<16), reopenFirst
	for {
		again, next := time.Time{}, reopenFirst
		if m.broken {
			again, next = time.Now().Add(wait), min(2*wait, reopenMax)
		}
		wait = next
		_ = m.nl.SetReadDeadline(again)
		_, err := m.nl.Read(buf)
		end := time.Now().Add(monitorMost)
		for err == nil || errors.Is(err, unix.ENOBUFS) { // ENOBUFS: we missed some, so look
			quiet := time.Now().Add(monitorQuiet)
			if quiet.After(end) {
				quiet = end
			}
			_ = m.nl.SetReadDeadline(quiet)
			_, err = m.nl.Read(buf)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || m.dev.closing.Load() {
			return
		}
		m.dev.refresh()
	}
}

func (m *monitor) close() {
	_ = m.nl.Close()
	_ = m.routes.Close()
	_ = m.ns.Close()
}

// refresh reads the state of the underlay and reports to the user, by events, what has
// changed. If the device was replaced, it opens the sockets again.
func (d *Device) refresh() {
	old := d.port.Load()
	now, link, err := d.under.read(d.firstGID)
	if err != nil && !errors.Is(err, errTentative) {
		gone := *old
		gone.Active, gone.GIDs = false, nil
		now = &gone
	}
	why, reopened := "", false
	if link != nil && (int32(link.Attrs().Index) != d.ifindex.Load() || d.monitor.broken) && now.Active {
		// The device was removed and made anew: our sockets are bound to nothing.
		d.ifindex.Store(int32(link.Attrs().Index))
		err := d.reopen()
		if d.monitor.broken, reopened = err != nil, err == nil; err != nil {
			d.count.reopenFailed.Add(1)
			d.log.Warn("underlay was replaced, sockets cannot be opened again yet", "error", err)
			now.Active, why = false, fmt.Sprintf("underlay %s was replaced, and its sockets cannot be opened again yet: %v", d.opts.Underlay, err)
		}
	}
	d.port.Store(now)
	moved := !slices.Equal(now.GIDs, old.GIDs)
	if now.Active != old.Active || moved {
		d.disconnectAll()
	}
	if now.Active && (!old.Active || reopened || moved) {
		d.groups.rejoin()
	}
	switch {
	case now.Active == old.Active:
	case now.Active:
		d.log.Info("port up", "gids", now.GIDs)
		d.events.Tell(verbs.Event{Kind: verbs.PortActive, Text: "underlay " + d.opts.Underlay + " is usable"})
	default:
		d.log.Warn("port down", "gids", now.GIDs)
		text := cmp.Or(why, "underlay "+d.opts.Underlay+" is down")
		if len(now.GIDs) == 0 {
			text = "underlay " + d.opts.Underlay + " has no usable address"
		}
		d.events.Tell(verbs.Event{Kind: verbs.PortError, Text: text})
	}
	if moved {
		d.log.Info("GIDs changed", "gids", now.GIDs)
		d.events.Tell(verbs.Event{Kind: verbs.GIDChange, Text: fmt.Sprint(now.GIDs)})
	}
	if now.UnderMTU != old.UnderMTU {
		d.log.Info("underlay MTU changed", "mtu", now.UnderMTU)
		d.events.Tell(verbs.Event{Kind: verbs.MTUChange, Text: fmt.Sprintf("underlay MTU %d", now.UnderMTU)})
	}
	d.routes.reread() // when a device goes down the kernel removes its routes without a message
}
