package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
	"ipoibcm/wire/sums"
)

const (
	rocePort = 4791
	// Smallest values that the kernel believes: net.ipv4.route.min_pmtu, and
	// RFC 8200 section 5.
	lie4, lie6 = 552, 1280
)

// forgedTooBig makes ICMPv6 packet too big or ICMPv4 fragmentation needed, of
// which the victim is to believe that a packet of its own was too large: that
// which it sent from gid to peer, on the UDP port. Nothing of it was overheard.
func forgedTooBig(src, dst, gid, peer netip.Addr, port uint16) []byte {
	udp := binary.BigEndian.AppendUint16(nil, port)
	udp = append(binary.BigEndian.AppendUint16(udp, rocePort), 0x10, 0, 0, 0)
	if gid.Is4() {
		quoted := append(header4(gid, peer, unix.IPPROTO_UDP, 4096), udp...)
		icmp := append([]byte{3, 4, 0, 0, 0, 0, lie4 >> 8, lie4 & 0xff}, quoted...)
		binary.BigEndian.PutUint16(icmp[2:], ^uint16(sums.Internet(0, icmp)))
		return append(header4(src, dst, unix.IPPROTO_ICMP, len(icmp)), icmp...)
	}
	quoted := append(header6(gid, peer, unix.IPPROTO_UDP, 4096), udp...)
	icmp := append([]byte{2, 0, 0, 0, 0, 0, lie6 >> 8, lie6 & 0xff}, append(quoted, make([]byte, 64)...)...)
	pseudo := append(append(src.AsSlice(), dst.AsSlice()...), 0, 0, 0, byte(len(icmp)), 0, 0, 0, unix.IPPROTO_ICMPV6)
	binary.BigEndian.PutUint16(icmp[2:], ^uint16(sums.Internet(0, append(pseudo, icmp...))))
	return append(header6(src, dst, unix.IPPROTO_ICMPV6, len(icmp)), icmp...)
}

func header4(src, dst netip.Addr, proto byte, payload int) []byte {
	h := []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, proto, 0, 0} // DF
	binary.BigEndian.PutUint16(h[2:], uint16(20+payload))
	h = append(append(h, src.AsSlice()...), dst.AsSlice()...)
	binary.BigEndian.PutUint16(h[10:], ^uint16(sums.Internet(0, h)))
	return h
}

func header6(src, dst netip.Addr, proto byte, payload int) []byte {
	h := []byte{0x60, 0, 0, 0, 0, 0, proto, 64}
	binary.BigEndian.PutUint16(h[4:], uint16(payload))
	return append(append(h, src.AsSlice()...), dst.AsSlice()...)
}

// lie has a host of the segment send the victim one forged ICMP message for each
// of the UDP source ports.
func (s *segment) lie(from, victim *host, src, dst, gid, peer netip.Addr, ports ...uint16) {
	s.Helper()
	here, err := from.Link(underlay)
	s.must(err)
	there, err := victim.Link(underlay)
	s.must(err)
	ether := append(append([]byte(nil), there.Attrs().HardwareAddr...), here.Attrs().HardwareAddr...)
	proto := uint16(unix.ETH_P_IPV6)
	if gid.Is4() {
		proto = unix.ETH_P_IP
	}
	ether = binary.BigEndian.AppendUint16(ether, proto)
	s.must(from.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := &unix.SockaddrLinklayer{Ifindex: here.Attrs().Index}
		for _, port := range ports {
			frame := append(ether[:len(ether):len(ether)], forgedTooBig(src, dst, gid, peer, port)...)
			if err := unix.Sendto(fd, frame, 0, to); err != nil {
				return err
			}
		}
		return nil
	}))
}

// pathMTU returns the path MTU to a GID that the kernel has learned, 0 if none.
func (h *host) pathMTU(peer netip.Addr) int {
	h.seg.Helper()
	routes, err := h.Netlink().RouteGetWithOptions(peer.AsSlice(), &netlink.RouteGetOptions{Oif: underlay})
	h.seg.must(err)
	if len(routes) == 0 {
		h.seg.Fatalf("%s has no route to %s", h.Name, peer)
	}
	return routes[0].MTU
}

// fragments returns how many fragments the host has made of its IPv6 packets.
func (h *host) fragments() (n int) {
	h.seg.Helper()
	h.seg.must(h.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "Ip6FragCreates" {
				n, err = strconv.Atoi(f[1])
				return err
			}
		}
		return errors.New("no Ip6FragCreates in /proc/net/snmp6")
	}))
	return n
}

// A victim is a host whose agent is lied to about the path to its peer.
type victim struct {
	*host
	peer          *host
	liar          *host
	gid, peerGID  netip.Addr
	source        netip.Addr   // of the ICMP messages
	targets       []netip.Addr // own addresses that they go to
	octetsPerSend int64
}

// newVictim knows of both hosts what the liar needs: their GIDs. They are IPv4
// addresses or link-local ones.
func newVictim(s *segment, ipv4 bool) *victim {
	s.Helper()
	v := &victim{host: s.hosts[0], peer: s.hosts[1], liar: s.hosts[2], octetsPerSend: 8 << 20}
	gid := func(h *host) netip.Addr {
		if ipv4 {
			return netip.AddrFrom4([4]byte{192, 168, 7, byte(h.i + 1)})
		}
		a, err := h.LinkLocal(underlay)
		s.must(err)
		return a
	}
	v.gid, v.peerGID, v.source = gid(v.host), gid(v.peer), gid(v.liar)
	v.targets = []netip.Addr{v.gid}
	if !ipv4 {
		global := netip.MustParseAddr("2001:db8::1")
		s.must(v.AddAddr(underlay, global.String()+"/64"))
		v.targets = append(v.targets, global)
	}
	return v
}

// useGlobal gives both hosts global GIDs, and returns the arguments that say so.
func (v *victim) useGlobal() (mine, theirs []string) {
	v.seg.Helper()
	v.gid, v.peerGID = v.targets[1], netip.MustParseAddr("2001:db8::2")
	v.seg.must(v.peer.AddAddr(underlay, v.peerGID.String()+"/64"))
	return []string{"--gid", v.gid.String()}, []string{"--gid", v.peerGID.String()}
}

// everyPort has the liar quote packets of every UDP source port that softroce
// takes, and of the RoCE port itself.
func (v *victim) everyPort() {
	v.seg.Helper()
	ports := []uint16{rocePort}
	for p := 0xc000; p <= 0xffff; p++ {
		ports = append(ports, uint16(p))
	}
	for _, to := range v.targets {
		v.seg.lie(v.liar, v.host, v.source, to, v.gid, v.peerGID, ports...)
	}
}

// unharmed sends by TCP, and fails unless that takes packets of the full path MTU
// and none of them is refused or cut up.
func (v *victim) unharmed(when string) {
	v.seg.Helper()
	refused, cut := v.counter("softroce", "tx_drop_too_big"), v.fragments()
	// What was sent again for want of a processor says nothing of the path MTU.
	first := func() uint64 {
		return v.counter("softroce", "rc_packets_out") - v.counter("softroce", "rc_retransmits")
	}
	packets, messages := first(), v.counter("datapath", "tx_conn")
	octets := v.send(v.peer, v.peer.v4, v.octetsPerSend).Octets
	if got := v.counter("softroce", "tx_drop_too_big") - refused; got != 0 {
		v.seg.Errorf("%s: %d packets were refused as too big, want 0", when, got)
	}
	if got := v.fragments() - cut; got != 0 {
		v.seg.Errorf("%s: %d fragments of IPv6, want 0", when, got)
	}
	// The last packet of each message is a shorter one, and TCP has short messages on a busy machine.
	messages = v.counter("datapath", "tx_conn") - messages
	if sent := first() - packets; sent > uint64(octets)*3/2/4096+messages {
		v.seg.Errorf("%s: %d packets for %d octets in %d messages, want packets of 4096", when, sent, octets, messages)
	}
}

// TestForgedPathMTU: nobody on the link makes the kernel believe in a smaller path
// MTU to a peer by quoting RoCE packets that it never saw, whatever source port it
// guesses and whichever address of the host it writes to.
func TestForgedPathMTU(t *testing.T) {
	parallel(t)
	for _, tt := range []struct {
		name         string
		ipv4, global bool
	}{{name: "IPv6, link-local GIDs"}, {name: "IPv6, global GIDs", global: true}, {name: "IPv4", ipv4: true}} {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{hosts: 3, ipv4: tt.ipv4})
			v := newVictim(s, tt.ipv4)
			var mine, theirs []string
			if tt.global {
				mine, theirs = v.useGlobal()
			}
			v.run(mine...)
			v.peer.run(theirs...)
			v.connect(v.peer, "RC")
			v.unharmed("before")
			v.everyPort()
			if got := v.pathMTU(v.peerGID); got != 0 {
				t.Errorf("the kernel has learned a path MTU of %d from a forged message", got)
			}
			v.unharmed("after")
			v.paired(v.peer, "RC")
		})
	}
}

// victims runs f for a victim of each family of underlay.
func victims(t *testing.T, f func(t *testing.T, v *victim)) {
	for _, ipv4 := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv4 %v", ipv4), func(t *testing.T) {
			parallel(t)
			f(t, newVictim(newSegment(t, topology{hosts: 3, ipv4: ipv4}), ipv4))
		})
	}
}

// TestPathMTUInTheKernel: a path MTU that the kernel has learned before the agent
// starts, or from another program's socket, does not matter to it.
func TestPathMTUInTheKernel(t *testing.T) {
	parallel(t)
	victims(t, func(t *testing.T, v *victim) {
		v.gullible()
		v.run()
		v.peer.run()
		v.connect(v.peer, "RC")
		v.unharmed("RC")
		v.stop()
		v.run("--mode", "ud")
		v.reach(v.peer.v4)
		cut := v.fragments()
		v.ping(v.peer.v4, udMTU, true)
		if got := v.fragments() - cut; got != 0 {
			t.Errorf("a UD frame of %d octets on an underlay of 9000 became %d fragments", udMTU, got)
		}
		if got := v.counter("softroce", "tx_drop_too_big"); got != 0 {
			t.Errorf("%d packets were refused as too big, want 0", got)
		}
		if got := v.pathMTU(v.peerGID); got == 0 {
			t.Error("the kernel has forgotten the path MTU; the test shows nothing")
		}
	})
}

// gullible has the kernel learn a small path MTU to the peer, through a socket
// that takes part in path MTU discovery as sockets do by default.
func (v *victim) gullible() {
	v.seg.Helper()
	const port = 33333
	var fd int
	v.seg.must(v.Do(func() (err error) {
		family, addr := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: port})
		if v.gid.Is4() {
			family, addr = unix.AF_INET, &unix.SockaddrInet4{Port: port}
		}
		if fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
			err = unix.Bind(fd, addr)
		}
		return err
	}))
	defer unix.Close(fd)
	v.seg.eventually(patience, "the kernel believes", func() error {
		// One frame may be lost: a device that has just come up has no queue yet.
		v.seg.lie(v.liar, v.host, v.source, v.gid, v.gid, v.peerGID, port)
		if v.pathMTU(v.peerGID) == 0 {
			return errors.New("no path MTU")
		}
		return nil
	})
}

// TestUnderlayRouteMTU: the mtu that a user gives the route to a peer on the underlay
// is that of connections in both directions, and status says so when packets of
// before were larger.
func TestUnderlayRouteMTU(t *testing.T) {
	parallel(t)
	victims(t, func(t *testing.T, v *victim) {
		s, a, b := v.seg, v.host, v.peer
		s.must(a.underlayRoute(v.peerGID, 2200))
		s.start()
		for _, first := range []*host{b, a} { // b knows nothing of the route
			second := a
			if first == a {
				second = b
			}
			mine, _ := first.connect(second, "RC")
			if mine.PathMTU != 2048 {
				t.Errorf("the connection that %s asked for has path MTU %d, want 2048", first.Name, mine.PathMTU)
			}
			first.send(second, second.v4, 4<<20)
			second.stop()
			first.noConns()
			second.run()
		}
		if n := a.counter("softroce", "tx_drop_too_big"); n != 0 {
			t.Errorf("%d packets were too big, want 0", n)
		}

		a.connect(b, "RC")
		s.must(a.underlayRoute(v.peerGID, 1400))
		large := func() { a.Ping(lab.Ping{Dst: b.v4, Size: 20000, Timeout: 20 * time.Millisecond}) }
		s.eventually(patience, "status has a remedy for packets that are too big", func() error {
			large()
			return containsAll(strings.Join(a.status().Warnings, "\n"), "ip route get")
		})
		// What was too big can be a packet that the peer had already, sent again because its ACK was
		// late: then the connection lasts until there are others.
		s.eventually(patience, "the connection has path MTU 1024", func() error {
			large()
			for _, c := range a.conns(b) {
				if c.PathMTU == 1024 {
					return nil
				}
			}
			return errors.New("it has another")
		})
		a.send(b, b.v4, 4<<20)
	})
}

// underlayRoute gives the route to a peer's GID an MTU.
func (h *host) underlayRoute(dst netip.Addr, mtu int) error {
	l, err := h.Link(underlay)
	if err != nil {
		return err
	}
	ip := dst.AsSlice()
	peer := &net.IPNet{IP: ip, Mask: net.CIDRMask(8*len(ip), 8*len(ip))}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: peer, MTU: mtu}
	if dst.Is4() {
		r.Scope = netlink.SCOPE_LINK
	}
	return h.Netlink().RouteReplace(r)
}
