package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"ipoibcm/wire/roce"
)

// With traffic_class every RoCEv2 packet of a host has it, whatever its transport and
// family; those of a host without have none.
func TestTrafficClass(t *testing.T) {
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
				h, _, err := roce.ParseIP(frame[etherLen:n])
				if err != nil {
					continue // not RoCEv2
				}
				want, ok := own[h.Src.Unmap()]
				if !ok {
					t.Errorf("a packet from %v", h.Src)
				}
				if h.TrafficClass != want {
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
