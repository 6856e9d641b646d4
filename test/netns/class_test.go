package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// With traffic_class every RoCEv2 packet of a host has it, whatever its transport and
// family; those of a host without have none.
func TestTrafficClass(t *testing.T) {
	parallel(t)
	const class = 26 << 2
	for _, tt := range []struct {
		mode string
		ipv4 bool
	}{{"rc", false}, {"uc", true}, {"ud", false}} {
		t.Run(fmt.Sprintf("%s, IPv4 %v", tt.mode, tt.ipv4), func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{ipv4: tt.ipv4})
			a, b := s.hosts[0], s.hosts[1]
			fd := b.packetSocket()
			a.run("--mode", tt.mode, "--traffic-class", fmt.Sprint(class))
			b.run("--mode", tt.mode)
			a.reach(b.v4)
			if tt.mode != "ud" {
				a.connect(b, map[string]string{"rc": "RC", "uc": "UC"}[tt.mode])
			}
			a.ping(b.v6, 1400, false)
			b.ping(a.v4, 1400, false)
			own := map[netip.Addr]uint8{}
			for _, h := range s.hosts {
				own[netip.MustParseAddr(h.status().Interface.GID).Unmap()] = map[bool]uint8{true: class}[h == a]
			}
			seen := map[uint8]int{}
			frame := make([]byte, 1<<16)
			for {
				n, err := unix.Read(fd, frame)
				if errors.Is(err, unix.EAGAIN) {
					break
				}
				s.must(err)
				if n < etherLen {
					continue
				}
				h, _, err := rocetest.ParseIP(frame[etherLen:n])
				if err != nil {
					continue // not RoCEv2
				}
				want, ok := own[h.Src.Unmap()]
				if !ok {
					t.Errorf("a packet from %v", h.Src)
				}
				if h.TrafficClass &^= ip.ECNMask; h.TrafficClass != want {
					t.Errorf("a packet from %v has traffic class %d, want %d", h.Src, h.TrafficClass, want)
				}
				seen[h.TrafficClass]++
			}
			for _, c := range []uint8{0, class} {
				if seen[c] < 4 {
					t.Errorf("%d packets with traffic class %d: this shows nothing", seen[c], c)
				}
			}
		})
	}
}

// A traffic class that is reloaded is that of datagrams at once, and of a connection once it is made
// anew.
func TestTrafficClassReloaded(t *testing.T) {
	parallel(t)
	const class = 26 << 2
	s, a, b := newPair(t)
	fd := b.packetSocket()
	a.runFile("")
	b.run()
	a.connect(b, "RC")
	gid := netip.MustParseAddr(a.status().Interface.GID)
	// seen returns how many packets of a's have which class since the last time, by whether they are UD.
	seen := func() (ud, rc map[uint8]int) {
		ud, rc = map[uint8]int{}, map[uint8]int{}
		frame := make([]byte, 1<<16)
		for {
			n, err := unix.Read(fd, frame)
			if errors.Is(err, unix.EAGAIN) {
				return ud, rc
			}
			s.must(err)
			if n < etherLen {
				continue
			}
			h, rest, err := rocetest.ParseIP(frame[etherLen:n])
			if err != nil || h.Src != gid {
				continue
			}
			to := rc
			if t, _ := roce.BTH(rest).Opcode().Transport(); t == ib.UD {
				to = ud
			}
			to[h.TrafficClass&^ip.ECNMask]++
		}
	}
	a.ping(b.v4, 1400, false)
	if ud, rc := seen(); ud[class]+rc[class] != 0 || rc[0] == 0 {
		t.Errorf("classes of datagrams %v and of the connection %v, want 0 only", ud, rc)
	}
	a.rewrite(a.settings(fmt.Sprintf("traffic_class: %d\n", class)))
	if out := a.reload(0); !strings.Contains(out, "for new connections") {
		t.Errorf("reload: %s", out)
	}
	seen()
	a.ping(b.v4, 1400, false)
	s.must(a.Multicast(ifName, b.Host, ifName, netip.MustParseAddr("239.9.9.9"), 1200, patience))
	switch ud, rc := seen(); {
	case rc[0] == 0:
		t.Error("rc[0] is 0, want more")
	case ud[class] == 0:
		t.Error("ud[class] is 0, want more")
	case ud[0] != 0:
		t.Errorf("ud[0] is %v, want 0", ud[0])
	}
	b.stop()
	b.run()
	a.connect(b, "RC")
	seen()
	a.ping(b.v4, 1400, false)
	if _, rc := seen(); rc[class] == 0 || rc[0] != 0 {
		t.Errorf("a new connection has classes %v, want %d", rc, class)
	}
}

// With traffic_class inherit a datagram has the DSCP of the packet in it, and all else,
// a connection's packets too, the number behind it. The bits of ECN are another matter.
func TestInheritedClass(t *testing.T) {
	parallel(t)
	const class, voice = 26 << 2, 46 << 2
	for _, tt := range []struct {
		mode string
		ipv4 bool
		want uint8
	}{{"ud", false, voice}, {"ud", true, voice}, {"rc", false, class}} {
		t.Run(fmt.Sprintf("%s, IPv4 %v", tt.mode, tt.ipv4), func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{ipv4: tt.ipv4})
			a, b := s.hosts[0], s.hosts[1]
			a.run("--mode", tt.mode, "--traffic-class", fmt.Sprint("inherit/", class))
			b.run("--mode", tt.mode)
			a.reach(b.v4)
			if tt.mode != "ud" {
				a.connect(b, "RC")
			}
			fd := b.packetSocket()
			var out int
			s.must(a.Do(func() (err error) {
				out, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
				return err
			}))
			defer unix.Close(out)
			s.must(unix.SetsockoptInt(out, unix.IPPROTO_IP, unix.IP_TOS, voice|1))
			const octets = 777 // of data: nothing else is as long
			classes := map[uint8]int{}
			s.eventually(patience, "four datagrams", func() error {
				s.must(unix.Sendto(out, make([]byte, octets), 0, &unix.SockaddrInet4{Port: 9, Addr: b.v4.As4()}))
				time.Sleep(10 * time.Millisecond) // or several leave in one call, and are one frame here
				for _, h := range headersOf(s, fd, octets) {
					classes[h.TrafficClass&^ip.ECNMask]++
				}
				if n := classes[tt.want]; n < 4 {
					return fmt.Errorf("%d with traffic class %d: %v", n, tt.want, classes)
				}
				return nil
			})
			if len(classes) != 1 {
				t.Errorf("traffic classes %v, want only %d", classes, tt.want)
			}
		})
	}
}

// headersOf reads what came to a packet socket and returns the headers of the RoCEv2
// packets that carry at least octets, and not many more.
func headersOf(s *segment, fd, octets int) (found []roce.IPHeader) {
	frame := make([]byte, 1<<16)
	for {
		n, err := unix.Read(fd, frame)
		if errors.Is(err, unix.EAGAIN) {
			return found
		}
		s.must(err)
		if n < octets || n > octets+200 {
			continue
		}
		if h, _, err := rocetest.ParseIP(frame[etherLen:n]); err == nil {
			found = append(found, h)
		}
	}
}
