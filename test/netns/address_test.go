package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
)

// wantTooBig checks that a packet was refused because of its size.
func wantTooBig(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("got %v, want EMSGSIZE", err)
	}
}

// What "ip addr add" and "ip addr del" do is followed while the agent runs.
func TestAddressAddedAndRemoved(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	reqs := func() uint64 { return a.counter("ipoib", "req_sent") + b.counter("ipoib", "req_sent") }
	before := reqs()
	for _, tt := range []struct{ ours, theirs string }{
		{"10.9.0.1/24", "10.9.0.9/24"}, // a new subnet
		{"fd09::1/64", "fd09::9/64"},
		{"", "10.0.0.99/24"}, // a second address of the old one
		{"", "fd00::99/64"},
	} {
		if tt.ours != "" {
			s.must(a.AddAddr(ifName, tt.ours))
		}
		s.must(b.AddAddr(ifName, tt.theirs))
		dst := netip.MustParsePrefix(tt.theirs).Addr()
		a.reach(dst)
		a.waitRoute(patience, dst, maxMTU)
		a.ping(dst, maxMTU, true)
		if mtu := a.routeMTU(neighbour(dst)); mtu != udMTU {
			t.Errorf("the connected route of %s has MTU %d", tt.theirs, mtu)
		}
	}
	if n := reqs() - before; n != 0 {
		t.Errorf("%d more REQs for a peer of many addresses", n) // 4755-2.3-5
	}
	for _, gone := range []string{"10.9.0.9/24", "fd09::9/64", "10.0.0.99/24", "fd00::99/64"} {
		dst := netip.MustParsePrefix(gone).Addr()
		s.must(b.DelAddr(ifName, gone))
		s.eventually(patience, "b forgets "+gone, func() error {
			for _, x := range b.status().Interface.Addresses {
				if strings.HasPrefix(x.Prefix, dst.String()+"/") {
					return fmt.Errorf("it still has %s", x.Prefix)
				}
			}
			return nil
		})
		if _, err := a.Ping(lab.Ping{Dst: dst, Timeout: pingWithin}); err == nil {
			t.Errorf("%s still answers pings", dst)
		}
	}
	// Nobody answers for the address that has gone when it is asked for anew.
	a.stop()
	a.run()
	s.must(a.AddAddr(ifName, "10.9.0.1/24"))
	for _, dst := range []string{"10.9.0.9", "10.0.0.99", "fd00::99"} {
		if _, err := a.Ping(lab.Ping{Dst: netip.MustParseAddr(dst), Timeout: pingWithin}); err == nil {
			t.Errorf("%s still answers", dst)
		}
		if e, unresolved := neighOf(a, dst), []string{"", "INCOMPLETE", "FAILED"}; !slices.Contains(unresolved, e) {
			t.Errorf("a's entry for %s is %s, want one of %q", dst, e, unresolved)
		}
	}
	a.reachRouted(b, maxMTU)
}

// probed waits until the agent has made sure of all its addresses: two that ask
// at the same time both lose (RFC 5227 section 2.1.1).
func (h *host) probed() {
	h.seg.Helper()
	h.seg.eventually(patience, h.Name+" has probed its addresses", func() error {
		for _, x := range h.status().Interface.Addresses {
			if x.State != "ok" {
				return fmt.Errorf("%s is %s", x.Prefix, x.State)
			}
		}
		return nil
	})
}

// neighbour returns another address close to a, of no host.
func neighbour(a netip.Addr) netip.Addr {
	b := a.AsSlice()
	b[len(b)-1] ^= 0x40
	n, _ := netip.AddrFromSlice(b)
	return n
}

// neighOf returns the state of a neighbour cache entry, "" if there is none.
func neighOf(h *host, ip string) string {
	var d struct {
		Neighbours []struct{ IP, State string }
	}
	h.seg.must(h.agent.Get(h.seg.ctx, "/v1/neigh", &d))
	for _, n := range d.Neighbours {
		if n.IP == ip {
			return n.State
		}
	}
	return ""
}

// An address that another host has is found out, shown, and not answered for.
// It stays where the user put it.
func TestDuplicateAddress(t *testing.T) {
	parallel(t)
	s, a, b, c := newTrio(t)
	s.start()
	a.connect(b, "RC")
	for _, h := range s.hosts {
		h.probed()
	}
	for _, dup := range []string{b.v4.String() + "/24", b.v6.String() + "/64"} {
		s.must(c.AddAddr(ifName, dup))
		s.eventually(patience, "c finds out that "+dup+" is taken", func() error {
			for _, x := range c.status().Interface.Addresses {
				if x.Prefix == dup && x.State == "duplicate" {
					return nil
				}
			}
			return fmt.Errorf("it has %+v", c.status().Interface.Addresses)
		})
	}
	a.stop()
	a.run()
	a.connect(b, "RC") // it is b that answers
	if n := len(a.conns(c)); n != 0 {
		t.Errorf("a has %d connections to the host with the duplicate", n)
	}
	l, err := c.Link(ifName)
	s.must(err)
	addrs, err := c.Netlink().AddrList(l, netlink.FAMILY_V4)
	s.must(err)
	if !slices.ContainsFunc(addrs, func(x netlink.Addr) bool { return x.IP.String() == b.v4.String() }) {
		t.Error("the agent removed an address that it had not put there")
	}
}

// An agent that says it is up knows the addresses it was given: the first packet
// from any of them is answered.
func TestUpWithAddresses(t *testing.T) {
	parallel(t)
	_, a, b := newPair(t)
	b.run()
	for range 6 {
		a.run()
		have := fmt.Sprint(a.status().Interface.Addresses)
		if err := containsAll(have, a.v4.String()+"/24", a.v6.String()+"/64"); err != nil {
			t.Errorf("as soon as the interface is up: %v", err)
		}
		a.stop()
	}
}

// An address that is there with two prefix lengths is still there when one of
// them goes: it is answered for, and status shows the other length.
func TestAddressWithTwoLengths(t *testing.T) {
	parallel(t)
	s, a, b := startedPair(t)
	// IPv6 has an address on a device once only.
	s.must(b.AddAddr(ifName, b.v4.String()+"/16"))
	s.must(b.DelAddr(ifName, b.v4.String()+"/24"))
	s.eventually(patience, "b has the larger subnet alone", func() error {
		var got []string
		for _, x := range b.status().Interface.Addresses {
			if strings.HasPrefix(x.Prefix, b.v4.String()+"/") {
				got = append(got, x.Prefix)
			}
		}
		if want := []string{b.v4.String() + "/16"}; !slices.Equal(got, want) {
			return fmt.Errorf("status shows %q, want %q", got, want)
		}
		return nil
	})
	a.stop()
	a.run() // it knows nobody
	both(b, a.reach)
	switch got := neighOf(a, b.v4.String()); {
	case got == "":
		t.Error("got is empty")
	case got == "INCOMPLETE":
		t.Error("got is \"INCOMPLETE\", want another")
	case got == "FAILED":
		t.Error("got is \"FAILED\", want another")
	}
}
