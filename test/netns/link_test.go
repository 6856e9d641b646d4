package netns

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/lab"
)

func TestThreeHostsOnOneSegment(t *testing.T) {
	parallel(t)
	s, a, b, c := newTrio(t)
	s.start()
	qpn := a.status().Interface.UDQPN
	for _, pair := range [][2]*host{{a, b}, {b, c}, {c, a}} {
		pair[0].connect(pair[1], "RC")
		both(pair[1], func(dst netip.Addr) {
			pair[0].reach(dst)
			pair[0].ping(dst, maxMTU, true) // 4755-5-4 one message, far above the UD MTU
		})
	}
	for _, pair := range [][2]*host{{a, b}, {b, c}, {c, a}} {
		pair[0].paired(pair[1], "RC") // 4755-5-1 4755-2.3-5 both families, two addresses, one connection
	}
	for _, h := range s.hosts { // 4755-2-3, 4391-8-1: the link-local address of RFC 4391
		ll, err := h.LinkLocal(ifName)
		s.must(err)
		gid := h.status().Interface.GID
		// RFC 4391 section 8: fe80::/64, and the low half of the GID with the u bit.
		octets := netip.MustParseAddr(gid).As16()
		copy(octets[:8], []byte{0xfe, 0x80, 0, 0, 0, 0, 0, 0})
		octets[8] |= 0x02
		if want := netip.AddrFrom16(octets); ll != want {
			t.Errorf("%s has %s, want %s of its GID %s", h.Name, ll, want, gid)
		}
		if h != a {
			s.eventually(patience, ll.String()+" answers", func() error {
				_, err := a.Ping(lab.Ping{Dst: ll, Zone: ifName, Timeout: pingWithin})
				return err
			})
		}
	}
	// 4755-2.2-1 4755-3.1-11 one UD QP, as many connected QPs as peers
	st := a.status()
	expect.Equal(t, st.Interface.UDQPN, qpn, "a's UD QPN")
	expect.Equal(t, len(st.Peers), 2, "number of a's peers")
	for _, g := range []string{"239.9.9.9", "ff05::99"} {
		for _, to := range []*host{b, c} {
			if err := a.Multicast(ifName, to.Host, ifName, netip.MustParseAddr(g), 1200, patience); err != nil {
				t.Error(err) // 4755-2.1-3 4755-2-2 4391-2-1 UD carries multicast beside connections
			}
		}
	}
	a.send(c, c.v6, 8<<20)

	c.stop()
	for _, h := range []*host{a, b} {
		s.eventually(patience, h.Name+" knows that c has gone", func() error { // 4755-3.4-2
			conns, err := h.agent.Conns(s.ctx)
			if err == nil && len(conns) != 1 {
				err = fmt.Errorf("%d connections", len(conns))
			}
			return err
		})
	}
	a.paired(b, "RC")
	s.eventually(patience, "a has no route to c", func() error {
		for _, r := range a.hostRoutes() {
			if strings.HasPrefix(r, c.v4.String()+" ") || strings.HasPrefix(r, c.v6.String()+" ") {
				return fmt.Errorf("it has %q", r)
			}
		}
		return nil
	})
}

// A peer that has fallen silent does not keep an agent from stopping: it gets a few
// DREQs, within a second. Meanwhile the others' REQs are refused.
func TestSilentPeerDelaysNoStop(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	s.must(syscall.Kill(b.agent.PID(), syscall.SIGSTOP))
	defer func() { s.must(syscall.Kill(b.agent.PID(), syscall.SIGCONT)) }()
	agent := a.agent
	a.stop()
	if n := strings.Count(agent.LogTail(1000), "sent DREQ"); n < 1 || n > 4 {
		t.Errorf("%d DREQs to a silent peer, want 1 to 4\n%s", n, agent.LogTail(20))
	}
}

func TestUnderlays(t *testing.T) {
	parallel(t)
	for _, tt := range []struct {
		name        string
		top         topology
		pathMTU, ud int
	}{
		{"IPv6 1500", topology{mtu: 1500}, 1024, 2044},
		{"IPv6 9000", topology{mtu: 9000}, 4096, 2044},
		{"IPv4 1500", topology{mtu: 1500, ipv4: true, udMTU: 1444}, 1024, 1444},
		{"IPv4 9000", topology{mtu: 9000, ipv4: true}, 4096, 2044},
	} {
		for _, mode := range []string{"RC", "UC", "UD"} {
			t.Run(tt.name+" "+mode, func(t *testing.T) {
				parallel(t)
				s := newSegment(t, tt.top)
				a, b := s.hosts[0], s.hosts[1]
				s.start("--mode", strings.ToLower(mode))
				st := a.status()
				if gid := netip.MustParseAddr(st.Interface.GID); gid.Is4In6() != tt.top.ipv4 {
					t.Errorf("the GID is %s", gid)
				}
				expect.Equal(t, st.Underlay.PathMTU, tt.pathMTU, "path MTU")
				expect.Equal(t, st.Underlay.MTU, tt.top.mtu, "MTU of the underlay")
				both(b, func(dst netip.Addr) { a.waitRoute(patience, dst, tt.ud) }) // 4755-5-3 before any connection
				mtu := tt.ud
				if mode != "UD" {
					mtu = maxMTU
					a.connect(b, mode)
				}
				both(b, func(dst netip.Addr) {
					a.reach(dst)
					a.waitRoute(patience, dst, mtu)
					a.ping(dst, mtu, true)
					a.ping(dst, maxMTU, false)
					a.send(b, dst, 8<<20)
				})
				b.send(a, a.v4, 8<<20)
				for _, c := range a.conns(b) {
					expect.Equal(t, c.Health != nil, mode == "RC", "over %s: a connection has health", mode)
					if c.Health != nil {
						measured(t, *c.Health)
					}
				}
				for _, g := range []string{"239.9.9.9", "ff05::99"} {
					if err := a.Multicast(ifName, b.Host, ifName, netip.MustParseAddr(g), 3000, patience); err != nil {
						t.Error(err) // 4755-2.1-2
					}
				}
			})
		}
	}
}

// measured checks that the health of a connection has what its packets have shown.
func measured(t *testing.T, h control.Health) {
	t.Helper()
	if h.RTTUS <= 0 {
		t.Errorf("RTTUS is %v, want more than 0", h.RTTUS)
	}
	if h.Packets == 0 {
		t.Error("Packets is 0, want more")
	}
	if h.Limit == 0 {
		t.Error("Limit is 0, want more")
	}
	if h.Window < h.Limit {
		t.Errorf("Window is %d, want the limit %d at least", h.Window, h.Limit)
	}
}

// An IPv4 underlay of 1500 octets does not carry the default UD MTU: the agent
// says so and names both remedies.
func TestIPv4UnderlayTooSmall(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{mtu: 1500, ipv4: true})
	err := s.hosts[0].tryRun()
	if err == nil {
		t.Fatal("the agent started")
	}
	if err := containsAll(strings.ToLower(err.Error()), "--ud-mtu 1444", "jumbo"); err != nil {
		t.Error(err)
	}
}

func TestUDOnlyPeerOfConnectedHost(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.run("--mode", "rc")
	b.run("--mode", "ud")
	if l := b.status().Interface.LinkAddr; !strings.HasPrefix(l, "00 ") { // 4755-3.1-9
		t.Errorf("the UD-only host's link-layer address is %q", l)
	}
	if l := a.status().Interface.LinkAddr; !strings.HasPrefix(l, "80 ") { // 4755-3.1-2
		t.Errorf("the RC host's link-layer address is %q", l)
	}
	both(b, a.reach)
	both(a, b.reach)
	both(b, func(dst netip.Addr) {
		a.ping(dst, udMTU, true)
		a.ping(dst, 40000, false) // in fragments
		a.send(b, dst, 4<<20)     // 4755-2-1 4755-2-2
		if mtu := a.routeMTU(dst); mtu != udMTU {
			t.Errorf("the route to %s has MTU %d", dst, mtu)
		}
	})
	for _, h := range s.hosts {
		// 4755-3.1-7 no REQ to flags 0; 4755-3.1-8 flags mean nothing to a UD-only host
		if n := h.counter("ipoib", "req_sent"); n != 0 {
			t.Errorf("%s sent %d REQs", h.Name, n)
		}
		h.noConns()
	}
	p := a.status().Peers
	expect.MustEqual(t, len(p), 1, "length of p")
	expect.Equal(t, p[0].Mode, "UD", "Mode")
	if !strings.HasPrefix(p[0].LinkAddr, "00 ") {
		t.Errorf("%q does not begin with \"00 \"", p[0].LinkAddr)
	}
}

// Hosts of every policy live on one segment, twice each: each pair uses what
// both have.
func TestModeMatrix(t *testing.T) {
	parallel(t)
	modes := []string{"rc", "uc", "auto", "ud", "rc", "uc", "auto", "ud"}
	s := newSegment(t, topology{hosts: len(modes)})
	for i, h := range s.hosts {
		h.run("--mode", modes[i])
	}
	common := func(x, y string) string {
		has := func(m, t string) bool { return m == t || m == "auto" && t != "ud" }
		switch {
		case has(x, "rc") && has(y, "rc"):
			return "RC"
		case has(x, "uc") && has(y, "uc"):
			return "UC"
		}
		return "UD"
	}
	for i, h := range s.hosts {
		for j, p := range s.hosts[:i] {
			want := common(modes[i], modes[j]) // 4755-3.1-15 4755-1-1 4755-1-2
			mtu := maxMTU
			if want == "UD" {
				mtu = udMTU
				h.reach(p.v4)
				if n := len(h.conns(p)) + len(p.conns(h)); n != 0 {
					t.Errorf("%s with %s: %d connections", modes[i], modes[j], n)
				}
			} else {
				h.connect(p, want)
			}
			both(p, func(dst netip.Addr) { // 4755-7-1
				h.reach(dst)
				h.waitRoute(patience, dst, mtu)
				h.ping(dst, mtu, true)
			})
			both(h, func(dst netip.Addr) {
				p.reach(dst)
				p.ping(dst, mtu, true)
			})
		}
	}
	for _, pair := range [][2]int{{0, 6}, {1, 5}, {2, 5}, {3, 4}} {
		from, to := s.hosts[pair[0]], s.hosts[pair[1]]
		from.send(to, to.v4, 4<<20)
	}
}

// Receive MTU 9000 against 65524 is a connection of 8996, and the kernel knows;
// the third host is not affected.
func TestReceiveMTUMismatch(t *testing.T) {
	parallel(t)
	_, a, b, c := newTrio(t)
	a.run()
	b.run("--receive-mtu", "9000")
	c.run()
	mine, theirs := a.connect(b, "RC")
	// 4755-5.1-1 4755-5.1-5 4755-5.1-6
	expect.Equal(t, mine.MTU, 8996, "a: MTU")
	expect.Equal(t, mine.PeerReceiveMTU, 9000, "a: PeerReceiveMTU")
	expect.Equal(t, theirs.PeerReceiveMTU, 65524, "a: PeerReceiveMTU")
	a.connect(c, "RC")
	for _, pair := range [][2]*host{{a, b}, {b, a}} {
		from := pair[0]
		both(pair[1], func(dst netip.Addr) {
			from.reach(dst)
			from.waitRoute(patience, dst, 8996)
			from.ping(dst, 8996, true)
			from.ping(dst, maxMTU, false) // 4755-7.2-1 fragments
			for _, size := range []int{8997, maxMTU} {
				_, err := from.Ping(lab.Ping{Dst: dst, Size: size, DF: true})
				wantTooBig(t, err)
			}
			for size := 60; size <= 8996; size += 893 {
				from.ping(dst, size, true) // 4755-5.1-3 every size up to the limit
			}
		})
	}
	a.reachFull(c, maxMTU) // 4755-7.2-1 whole to another peer
	if got := a.send(b, b.v4, 8<<20).MSS; got > 8996-40 {
		t.Errorf("MSS %d to a peer of MTU 8996", got)
	}
	routes := a.hostRoutes()
	for _, want := range []string{"10.0.0.2 mtu 8996", "10.0.0.3 mtu 65520", "fd00::2 mtu 8996", "fd00::3 mtu 65520"} {
		if err := containsAll(strings.Join(routes, "\n"), want); err != nil {
			t.Error(err)
		}
	}
}

// waitCarrier waits until the interface has a carrier, or has none.
func (h *host) waitCarrier(on bool) {
	h.seg.Helper()
	h.seg.eventually(patience, fmt.Sprintf("carrier of %s: %v", ifName, on), func() error {
		l, err := h.Link(ifName)
		if err == nil && l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 != on {
			err = fmt.Errorf("flags %#x", l.Attrs().RawFlags)
		}
		return err
	})
}

// When the underlay goes, status and the interface's carrier say so; when it comes back,
// so do carrier and traffic.
func TestUnderlayDownAndUp(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	s.must(a.AddAddr(underlay, "192.168.7.1/24")) // stays when the link goes down, and is no GID of this link
	s.start()
	a.connect(b, "RC")
	for range 2 {
		s.must(a.Down(underlay))
		a.waitState("underlay down")
		a.waitCarrier(false)
		st := a.status()
		if len(st.Warnings) == 0 {
			t.Error("status without the underlay has no warnings")
		}
		expect.Equal(t, st.Underlay.Active, false, "status without the underlay: Active")
		if _, err := a.Ping(lab.Ping{Dst: b.v4, Timeout: 50 * time.Millisecond}); err == nil {
			t.Error("a ping crossed an underlay that is down")
		}
		s.must(a.Up(underlay))
		a.waitState("up")
		a.waitCarrier(true)
		a.connect(b, "RC")
		a.reachFull(b, maxMTU)
		a.send(b, b.v4, 4<<20)
	}
}

// When the underlay's address is replaced by another, the host is reached under
// the new one, without a restart, and sends from it.
func TestUnderlayAddressChanged(t *testing.T) {
	parallel(t)
	s, a, b, c := newTrio(t)
	a.run()
	b.run()
	c.run("--mode", "ud")
	meet := func() {
		a.connect(b, "RC")
		both(b, func(dst netip.Addr) {
			a.reach(dst)
			c.reach(dst)
		})
	}
	meet()
	old, err := b.LinkLocal(underlay)
	s.must(err)
	for _, now := range []string{"fe80::b1", "fe80::b2", old.String()} {
		s.must(b.AddAddr(underlay, now+"/64"))
		s.must(b.DelAddr(underlay, old.String()+"/64"))
		old = netip.MustParseAddr(now)
		s.eventually(patience, "b's GID is "+now, func() error {
			if got := b.status().Interface.GID; got != now {
				return fmt.Errorf("it is %s", got)
			}
			return nil
		})
		b.waitState("up")
		meet()
	}
	// Another address beside it changes nothing.
	before := a.link()
	s.must(a.AddAddr(underlay, "fe80::1/64"))
	time.Sleep(300 * time.Millisecond)
	if now := a.link(); now != before {
		t.Errorf("link-layer address %s became %s, though its GID is there still", before, now)
	}
}

// Status follows the underlay's MTU: what it says of fragments, and that an
// IPv4 underlay has become too small.
func TestUnderlayMTUChanged(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{ipv4: true})
	a, b := s.hosts[0], s.hosts[1]
	s.start()
	a.connect(b, "RC")
	if w := a.status().Warnings; len(w) != 0 {
		t.Errorf("warnings at the start: %q", w)
	}
	s.must(a.SetMTU(underlay, 1500))
	s.must(b.SetMTU(underlay, 1500))
	s.eventually(patience, "a warns of the small underlay", func() error {
		w := strings.Join(a.status().Warnings, "\n")
		return containsAll(w, "UD MTU 2044", "1444")
	})
	a.connect(b, "RC")
	s.must(a.SetMTU(underlay, 9000))
	s.must(b.SetMTU(underlay, 9000))
	s.eventually(patience, "a is content again", func() error {
		if st := a.status(); len(st.Warnings) != 0 || st.Underlay.PathMTU != 4096 {
			return fmt.Errorf("%q, path MTU %d", st.Warnings, st.Underlay.PathMTU)
		}
		return nil
	})
	both(b, func(dst netip.Addr) { a.reach(dst) })
}

// A link too small for IPv6 has none: the kernel is not left to send what
// would be dropped.
func TestNoIPv6OnSmallLink(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	for _, h := range s.hosts {
		var err error
		h.agent, err = lab.StartAgent(s.ctx, h.Host,
			lab.AgentConfig{Program: program, Control: h.path(".sock"), Log: h.path(".log"),
				Args: []string{"--underlay", underlay, "--ud-mtu", "1000", "--address", h.v4.String() + "/24"}})
		s.must(err)
	}
	a, b := s.hosts[0], s.hosts[1]
	a.connect(b, "RC")
	a.waitRoute(patience, b.v4, maxMTU)
	a.ping(b.v4, maxMTU, true)
	if _, err := a.LinkLocal(ifName); err == nil {
		t.Error("the interface has an IPv6 address")
	}
	if err := a.AddAddr(ifName, "fd00::99/64"); err == nil {
		t.Error("the kernel took an IPv6 address")
	}
}
