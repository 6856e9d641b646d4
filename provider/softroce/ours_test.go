package softroce

import (
	"errors"
	"net/netip"
	"testing"
	"time"

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
	for end := time.Now().Add(10 * time.Second); a.count.rxNotOurs.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the packet was not refused; %d packets were taken", a.count.rxPackets.Load())
		}
	}
	if n := a.count.rxPackets.Load(); n != 0 {
		t.Errorf("%d packets were taken, want 0", n)
	}
	s := a.senders4[0]
	must(t, unix.Sendto(s.fd, pkt[at:], 0, sockaddr(false, own, a.opts.udpPort(), 0)))
	for end := time.Now().Add(10 * time.Second); a.count.rxPackets.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a packet of our own was not taken")
		}
	}
}

// Nobody else can bind a port that we send from, also while a connected socket has it.
func TestSourcePortsAreOurs(t *testing.T) {
	for i, f := range families {
		a, _ := pair(t, f, nil)
		senders := a.senders4
		if i == 1 {
			senders = a.senders6
		}
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
		senders[0].cut = &shortcut{fd: fd, path: p}
		again, err := senders[0].connect(p, p.class())
		if err != nil {
			t.Errorf("a further socket of our own: %v", err)
			continue
		}
		unix.Close(again)
	}
}
