package softroce

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// localUser opens a UDP socket bound to an address and port, as anybody on the host can.
func localUser(t *testing.T, from netip.Addr, port uint16) (int, error) {
	t.Helper()
	v6, family := from.Is6(), unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	return fd, unix.Bind(fd, sockaddr(v6, from, port, 1)) // the loopback device
}

// A packet from our own GID that none of our sockets has sent is refused, whatever is
// in it; one that we have sent ourselves is not.
func TestOwnGIDIsNotBelievedOfOthers(t *testing.T) {
	a, _ := pair(t, families[0], nil)
	own := netip.MustParseAddr(families[0].a)
	fd, err := localUser(t, own, 0)
	must(t, err)
	pkt := roce.IPHeader{Src: own, Dst: own, HopLimit: 64}.Append(nil, roce.BTHLen+roce.ICRCLen)
	at := len(pkt)
	pkt = append(pkt, make([]byte, roce.BTHLen+roce.ICRCLen)...)
	roce.PutBTH(pkt[at:], roce.BTHFields{Opcode: roce.CNP, PKey: ib.DefaultPKey, DestQPN: 17})
	must(t, unix.Sendto(fd, pkt[at:], 0, sockaddr(false, own, a.opts.udpPort(), 0)))
	until(t, "a packet refused", func() bool { return a.count.rxNotOurs.Load() > 0 })
	if n := a.threads[0].count.rxPackets.Load(); n != 0 {
		t.Errorf("%d packets were taken, want 0", n)
	}
	s := a.sendersOf(false)[0]
	must(t, unix.Sendto(s.fd, pkt[at:], 0, sockaddr(false, own, a.opts.udpPort(), 0)))
	until(t, "a packet of our own taken", func() bool { return a.threads[0].count.rxPackets.Load() > 0 })
}

// Nobody else can bind a port that we send from, also while a connected socket has it.
func TestSourcePortsAreOurs(t *testing.T) {
	for i, f := range families {
		a, _ := pair(t, f, nil)
		senders := a.sendersOf(i == 1)
		all := netip.IPv4Unspecified()
		if i == 1 {
			all = netip.IPv6Unspecified()
		}
		for _, s := range senders {
			if _, err := localUser(t, all, s.port); !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("%s: bind port %d of ours: got %v, want EADDRINUSE", f.name, s.port, err)
			}
		}
		if i == 0 {
			continue // connected sockets are IPv6 only
		}
		p, err := a.newPath(verbs.AHAttr{SGID: gid(f.a), DGID: gid(f.b)}, false, 17, 18)
		must(t, err)
		fd, err := senders[0].connect(p, p.class())
		must(t, err)
		for _, from := range []netip.Addr{all, netip.MustParseAddr(f.a)} {
			if _, err := localUser(t, from, senders[0].port); !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("bind port %d of ours and %v beside a connected socket: got %v, want EADDRINUSE", senders[0].port, from, err)
			}
		}
		senders[0].conn = &connectedSocket{fd: fd, path: p}
		again, err := senders[0].connect(p, p.class())
		if err != nil {
			t.Errorf("a further socket of our own: %v", err)
			continue
		}
		unix.Close(again)
	}
}

// Nobody pays for a family that no peer has: its source ports have sockets once something is to
// be sent by them, and are ours from then on.
func TestSourcePortsOfTheOtherFamily(t *testing.T) {
	own(t)
	d := open(t, Options{Underlay: "lo"})
	opened := func(all []*sender) (n int) {
		for _, s := range all {
			s.mu.Lock()
			if s.fd >= 0 {
				n++
			}
			s.mu.Unlock()
		}
		return n
	}
	first, other, to, mine := d.sendersOf(true), d.sendersOf(false), gid("127.0.0.2"), gid("127.0.0.1")
	if d.firstGID.Is4() { // a kernel without IPv6
		t.Skip("the loopback device has no IPv6")
	}
	if got := opened(first); got != len(first) {
		t.Errorf("%d of %d source ports of the GID's family have sockets, want all", got, len(first))
	}
	if got := opened(other); got != 0 {
		t.Errorf("%d source ports of the other family have sockets, want none", got)
	}
	p, err := d.newPath(verbs.AHAttr{DGID: to}, false, 17, 18)
	must(t, err)
	if got := opened(other); got != 1 {
		t.Errorf("%d source ports of the other family have sockets after one path was made, want 1", got)
	}
	if d.forgesUs(mine, p.sender.port) {
		t.Errorf("port %d is taken for somebody else's", p.sender.port)
	}
	if !d.forgesUs(mine, p.sender.port^1) {
		t.Errorf("port %d is taken for ours", p.sender.port^1)
	}
	if _, err := localUser(t, netip.IPv4Unspecified(), p.sender.port); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("bind port %d of ours: got %v, want EADDRINUSE", p.sender.port, err)
	}
	again, err := d.newPath(verbs.AHAttr{DGID: to}, false, 17, 18)
	must(t, err)
	if again.sender.fd != p.sender.fd {
		t.Errorf("the same flow once more has socket %d, want %d", again.sender.fd, p.sender.fd)
	}
	must(t, d.Close())
	if got := opened(other) + opened(first); got != 0 {
		t.Errorf("%d sockets after Close, want none", got)
	}
	if err := other[0].open(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("a socket after Close: %v, want ErrClosed", err)
	}
}
