package hostnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// next returns the next notice, or a zero one if there is none for d.
func next(t *testing.T, notices <-chan Notice, d time.Duration) Notice {
	t.Helper()
	select {
	case n := <-notices:
		return n
	case <-time.After(d):
		return Notice{}
	}
}

// watchNotices has a goroutine wait for notices, which ends with the test.
func watchNotices(t *testing.T, n *Notices) <-chan Notice {
	out := make(chan Notice, 64)
	ended := make(chan error)
	go func() {
		for {
			got, err := n.Next()
			if err != nil {
				ended <- err
				return
			}
			out <- got
		}
	}()
	t.Cleanup(func() {
		n.Close()
		if err := <-ended; !errors.Is(err, os.ErrClosed) {
			t.Errorf("after Close: %v, want %v", err, os.ErrClosed)
		}
	})
	return out
}

// Sysctls that say what the host answers for are told of and read, by device and
// by "all"; those of other devices are not told.
func TestConf(t *testing.T) {
	inNetns(t)
	newVeth(t, "v0", "v1")
	d := openUp(t, newTUN(t, "ibcm0"))
	n, err := d.Notices()
	if err != nil {
		t.Fatal(err)
	}
	notices := watchNotices(t, n)
	if got, want := next(t, notices, patience), (Notice{Conf: true, Groups: true}); got != want {
		t.Errorf("first %+v, want %+v", got, want)
	}
	for next(t, notices, 100*time.Millisecond) != (Notice{}) { // the device has only just come up
	}
	set := func(path, value string) {
		t.Helper()
		if err := d.writeSysctl(path, value); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		path string
		read func() bool
	}{
		{"ipv6/conf/ibcm0/forwarding", func() bool { c, _ := d.Conf(); return c.Forward6 }},
		{"ipv6/conf/all/forwarding", func() bool { c, _ := d.Conf(); return c.Forward6 }},
		{"ipv4/conf/ibcm0/forwarding", func() bool { c, _ := d.Conf(); return c.Forward4 }},
		{"ipv4/conf/ibcm0/proxy_arp", func() bool { c, _ := d.Conf(); return c.ProxyARP }},
		{"ipv4/conf/all/proxy_arp", func() bool { c, _ := d.Conf(); return c.ProxyARP }},
		{"ipv6/conf/ibcm0/proxy_ndp", func() bool { c, _ := d.Conf(); return c.ProxyND }},
	} {
		for _, on := range []bool{true, false} {
			value := map[bool]string{true: "1", false: "0"}[on]
			set(tt.path, value)
			if got := next(t, notices, patience); !got.Conf {
				t.Errorf("%s=%s: no notice", tt.path, value)
			}
			if got := tt.read(); got != on {
				t.Errorf("%s=%s: read as %v", tt.path, value, got)
			}
		}
	}
	set("ipv4/conf/all/arp_ignore", "1")
	if c, err := d.Conf(); c.ARPIgnore != 1 || err != nil {
		t.Errorf("arp_ignore %d, %v, want 1", c.ARPIgnore, err)
	}
	// A notice of what was set before may come late; one of another device comes each time.
	for try := 0; ; try++ {
		for next(t, notices, 100*time.Millisecond) != (Notice{}) {
		}
		set("ipv6/conf/v0/forwarding", fmt.Sprint(1-try%2))
		got := next(t, notices, 100*time.Millisecond)
		if got == (Notice{}) {
			break
		}
		if try == 10 {
			t.Fatalf("another device: %+v each time, want nothing", got)
		}
	}
}

// A group of 224.0.0.0/24 that a program joins without an IGMP report is told of,
// with the kernel's notifications and without, and when it leaves.
func TestSilentGroups(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	if err := d.writeSysctl("ipv4/igmp_link_local_mcast_reports", "0"); err != nil {
		t.Fatal(err)
	}
	for _, poll := range []bool{false, true} {
		n, err := d.Notices()
		if err != nil {
			t.Fatal(err)
		}
		if n.poll && !poll {
			t.Log("this kernel does not tell of groups")
		}
		if poll { // as if it did not
			n.poll = true
			n.sub.raw.Control(func(fd uintptr) {
				for _, g := range []int{unix.RTNLGRP_IPV4_MCADDR, unix.RTNLGRP_IPV6_MCADDR} {
					unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, unix.NETLINK_DROP_MEMBERSHIP, g)
				}
			})
		}
		notices := watchNotices(t, n)
		for next(t, notices, 1200*time.Millisecond) != (Notice{}) {
		}
		group := netip.MustParseAddr("224.0.0.251")
		c, err := net.ListenMulticastUDP("udp4", &net.Interface{Index: d.Index()},
			&net.UDPAddr{IP: group.AsSlice(), Port: 5353})
		if err != nil {
			t.Fatal(err)
		}
		for _, joined := range []bool{true, false} {
			if !joined {
				c.Close()
			}
			if got := next(t, notices, patience); !got.Groups {
				t.Errorf("poll %v, joined %v: no notice", poll, joined)
			}
			groups, err := d.Groups()
			if got := slices.Contains(groups, group); got != joined || err != nil {
				t.Errorf("poll %v: %v in the list %v (%v), want %v", poll, group, got, err, joined)
			}
		}
	}
}

// FuzzNotice reads arbitrary octets as the body of a notification.
func FuzzNotice(f *testing.F) {
	f.Add(uint16(unix.RTM_NEWNETCONF), []byte{10, 0, 0, 0, 8, 0, 1, 0, 3, 0, 0, 0})
	f.Add(uint16(unix.RTM_NEWMULTICAST), []byte{2, 32, 0, 0, 3, 0, 0, 0})
	f.Fuzz(func(t *testing.T, typ uint16, body []byte) {
		m := syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: typ}, Data: body}
		conf, groups := readNotice(&m, 3)
		if conf && groups {
			t.Fatal("both in one message")
		}
		b := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
		b = binary.NativeEndian.AppendUint16(b, typ)
		b = append(append(b, make([]byte, unix.SizeofNlMsghdr-len(b))...), body...)
		n, got := Notices{d: &Device{index: 3}}, Notice{}
		n.parse(&got, append(b, make([]byte, -len(b)&3)...))
		if want := (Notice{Conf: conf, Groups: groups}); got != want {
			t.Fatalf("a datagram of one message says %+v, the message %+v", got, want)
		}
		n.parse(&got, body)
	})
}
