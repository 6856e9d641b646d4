package netns

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/wireguard"
)

// tunnelled joins the hosts of a segment by WireGuard tunnels over their underlay, and
// returns the name of each host's. Host i has fd77::(i+1) in the tunnel.
func (s *segment) tunnelled() (names []string) {
	s.Helper()
	cache := os.Getenv("IPOIBCM_TOOLS")
	if cache == "" {
		cache = "../../.cache"
	}
	ctx, cancel := context.WithTimeout(s.ctx, 2*time.Minute)
	defer cancel()
	program, err := wireguard.Build(ctx, cache)
	if err != nil {
		s.Skipf("wireguard-go cannot be had: %v", err)
	}
	var keys []*ecdh.PrivateKey
	for range s.hosts {
		k, err := ecdh.X25519().GenerateKey(rand.Reader)
		s.must(err)
		keys = append(keys, k)
	}
	for i, h := range s.hosts {
		name := fmt.Sprintf("wgn%d%c", serial.Add(1)+int64(os.Getpid())<<8&0xffffff00, 'a'+i)
		names = append(names, name)
		h.daemon(program, "-f", name)
		s.Cleanup(func() { os.Remove(wireguard.Socket(name)) })
		under, err := s.hosts[1-i].LinkLocal(underlay)
		s.must(err)
		l, err := h.Link(underlay)
		s.must(err)
		inner := netip.MustParseAddr(fmt.Sprintf("fd77::%d", 2-i))
		s.must(wireguard.Configure(ctx, wireguard.Socket(name), keys[i], wireguard.Peer{Key: keys[1-i].PublicKey(),
			Endpoint: netip.AddrPortFrom(under.WithZone(fmt.Sprint(l.Attrs().Index)), wireguard.Port),
			Allowed:  netip.PrefixFrom(inner, 128)}))
		s.must(h.SetMTU(name, s.mtu-80))
		s.must(h.AddAddr(name, fmt.Sprintf("fd77::%d/64", i+1)))
		s.must(h.Up(name))
	}
	return names
}

// The underlay is a WireGuard tunnel, as docs/secured-underlay.md has it: connections of
// the full MTU, IB path MTU and UD fragments that fit the tunnel without being told, and
// nothing of ours outside of it.
func TestOverWireGuard(t *testing.T) {
	parallel(t)
	for _, tt := range []struct{ mtu, pathMTU int }{{9000, 4096}, {1500, 1024}} {
		t.Run(fmt.Sprint("underlay ", tt.mtu), func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{mtu: tt.mtu})
			names := s.tunnelled()
			outside := s.countOutside(s.hosts[1])
			a, b := s.hosts[0], s.hosts[1]
			for i, h := range s.hosts {
				args := h.config(fmt.Sprintf("peers: [\"fd77::%d\"]\n", 2-i))
				h.run(append(args, "--underlay", names[i], "--gid", fmt.Sprintf("fd77::%d", i+1))...)
			}
			st := b.status().Underlay
			if st.MTU != tt.mtu-80 {
				t.Errorf("the underlay has MTU %d, want %d", st.MTU, tt.mtu-80)
			}
			if st.PathMTU != tt.pathMTU {
				t.Errorf("the IB path MTU is %d, want %d", st.PathMTU, tt.pathMTU)
			}
			a.reach(b.v4)
			a.ping(b.v4, udMTU, true) // over UD, or the connection by now
			a.connect(b, "RC")
			a.reachFull(b, maxMTU)
			r := a.send(b, b.v4, 16<<20) // compares hashes
			t.Logf("16 MiB in %v", r.Duration.Round(time.Millisecond))
			b.send(a, a.v6, 4<<20)
			for _, h := range s.hosts {
				if n := h.counter("softroce", "tx_drop_too_big"); n != 0 {
					t.Errorf("%s: %d packets were larger than the tunnel", h.Name, n)
				}
			}
			if n := outside(); n != 0 {
				t.Errorf("%d packets of RoCEv2 were seen outside of the tunnel", n)
			}
		})
	}
}

// countOutside counts packets that come in on the underlay itself and are RoCEv2.
func (s *segment) countOutside(h *host) func() int {
	s.Helper()
	l, err := h.Link(underlay)
	s.must(err)
	fd := -1
	s.must(h.Do(func() (err error) {
		const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // network order
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err == nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Attrs().Index})
		}
		return err
	}))
	s.Cleanup(func() { unix.Close(fd) })
	return func() (found int) {
		buf, seen := make([]byte, 64), 0
		for {
			n, err := unix.Read(fd, buf)
			if err != nil {
				if seen == 0 {
					s.Errorf("no packet at all was seen on the underlay (%v)", err)
				}
				return found
			}
			seen++
			if n >= 48 && buf[0]>>4 == 6 && buf[6] == unix.IPPROTO_UDP && int(buf[42])<<8|int(buf[43]) == 4791 {
				found++
			}
		}
	}
}
