package hostnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"ipoibcm/rtnl"

	"golang.org/x/sys/unix"
)

// groupPoll is how often the groups are read on kernels that send no notification of them (before
// 6.14).
const groupPoll = time.Second

// noticeSettle is how long Next waits for more notifications: a change of "all" causes one for
// every device.
const noticeSettle = 5 * time.Millisecond

// Conf reads the sysctls of the device that say whether it forwards packets and answers for other
// hosts.
func (d *Device) Conf() (c rtnl.Conf, err error) {
	l, err := d.linkNow()
	if err != nil {
		return c, err
	}
	name := l.Attrs().Name
	read := func(family, device, key string) int {
		b, e := os.ReadFile(filepath.Join("/proc/sys/net", family, "conf", device, key))
		if errors.Is(e, os.ErrNotExist) {
			return 0 // IPv6 is off, or the kernel is built without it
		}
		n, e2 := strconv.Atoi(strings.TrimSpace(string(b)))
		err = errors.Join(err, e, e2)
		return n
	}
	inner := d.inNamespace(func() error {
		both := func(family, key string) int { return max(read(family, "all", key), read(family, name, key)) }
		c = rtnl.Conf{
			ARPIgnore: both("ipv4", "arp_ignore"),
			Forward4:  read("ipv4", name, "forwarding") != 0,
			Forward6:  read("ipv6", name, "forwarding") != 0,
			ProxyARP:  both("ipv4", "proxy_arp") != 0,
			ProxyND:   both("ipv6", "proxy_ndp") != 0,
		}
		return err
	})
	return c, wrap(inner, "read sysctls of %s", name)
}

// A Notice says what may have changed.
type Notice struct {
	Conf   bool // the result of [Device.Conf]; the kernel sends nothing if arp_ignore changes
	Groups bool // the result of [Device.Groups]
}

// Notices waits for changes that [Device.Events] does not report: those of sysctls (RTM_NEWNETCONF)
// and of multicast groups. A program can join a group without a packet on the link: a link-local
// IPv4 group, where net.ipv4.igmp_link_local_mcast_reports is 0. If the kernel sends no
// notification of groups, Notices reads them once a second.
type Notices struct {
	d      *Device
	closed atomic.Bool
	sub    *subscription
	begun  bool
	poll   bool
	groups []netip.Addr // as last read, where they are polled
}

// Notices begins to wait. The first Next returns at once, with both fields set.
func (d *Device) Notices() (*Notices, error) {
	n := &Notices{d: d}
	err := d.inNamespace(func() (err error) {
		n.sub, err = subscribe(1<<14, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("wait for changes of sysctls and groups: %w", err)
	}
	n.poll = n.sub.join(unix.RTNLGRP_IPV4_MCADDR, unix.RTNLGRP_IPV6_MCADDR) != nil
	return n, nil
}

// Close ends Next.
func (n *Notices) Close() error {
	n.closed.Store(true)
	return n.sub.close()
}

// Next waits for a change of this device. After Close the error is os.ErrClosed.
func (n *Notices) Next() (got Notice, err error) {
	if !n.begun {
		n.begun = true
		return Notice{Conf: true, Groups: true}, nil
	}
	wait := time.Duration(0)
	for {
		if n.poll {
			wait = groupPoll
		}
		if got != (Notice{}) {
			wait = noticeSettle
		}
		err := n.sub.receive(wait, 1, func(b []byte) { n.parse(&got, b) })
		switch {
		case n.closed.Load():
			return got, os.ErrClosed
		case err == nil:
		case errors.Is(err, unix.EAGAIN) && got != (Notice{}):
			return got, nil
		case errors.Is(err, unix.EAGAIN):
			groups, err := n.d.Groups()
			if err == nil && !slices.Equal(groups, n.groups) {
				n.groups, got.Groups = groups, true
				return got, nil
			}
		case errors.Is(err, unix.ENOBUFS):
			got = Notice{Conf: true, Groups: true}
		default:
			return got, err
		}
	}
}

// parse adds to got what the messages in b say about the device.
func (n *Notices) parse(got *Notice, b []byte) {
	msgs, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		n.d.count.Malformed.Add(1)
		*got = Notice{Conf: true, Groups: true} // better once too often
		return
	}
	for i := range msgs {
		conf, groups := readNotice(&msgs[i], n.d.index)
		got.Conf = got.Conf || conf
		got.Groups = got.Groups || groups
	}
}

// readNotice reports whether a message is about the sysctls, or about the groups, of the device
// with this index.
func readNotice(m *syscall.NetlinkMessage, index int) (conf, groups bool) {
	const netconfHeader = 4  // struct netconfmsg, padded
	const netconfIfindex = 1 // NETCONFA_IFINDEX
	const allDevices = -1    // NETCONFA_IFINDEX_ALL
	switch m.Header.Type {
	case unix.RTM_NEWMULTICAST, unix.RTM_DELMULTICAST:
		return false, len(m.Data) >= unix.SizeofIfAddrmsg && u32(m.Data[4:]) == index
	case unix.RTM_NEWNETCONF:
		err := eachAttr(m.Data[min(netconfHeader, len(m.Data)):], func(typ int, v []byte) {
			if i := int(int32(u32(v))); typ == netconfIfindex && len(v) == 4 {
				conf = conf || i == index || i == allDevices
			}
		})
		return conf || err != nil, false
	}
	return false, false
}
