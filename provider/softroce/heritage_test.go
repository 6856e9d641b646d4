package softroce

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// named returns a UD end of d with QPN n.
func named(t *testing.T, d *Device, n ib.QPN) *end {
	t.Helper()
	c, err := d.CreateCQ(64)
	must(t, err)
	q, err := d.CreateQP(verbs.QPInit{Transport: ib.UD, QPN: n, SendCQ: c, RecvCQ: c, SendDepth: 16, RecvDepth: 16, MaxSendSGE: 2, MaxRecvSGE: 2})
	must(t, err)
	r, err := d.Alloc(32 * 4096)
	must(t, err)
	return (&end{TB: t, d: d, cq: c.(*cq), qp: q.(*qp), region: r}).datagram()
}

// send sends a datagram of size octets to y and waits until it has left.
func (e *end) send(y *end, size int) {
	e.Helper()
	ah, err := e.d.CreateAH(verbs.AHAttr{SGID: e.d.Port().GIDs[0], DGID: y.d.Port().GIDs[0]})
	must(e, err)
	defer ah.Destroy()
	_, err = e.qp.PostSend([]verbs.SendWR{{ID: 1, Opcode: verbs.Send, Flags: verbs.Signaled, SG: e.sge(0, size),
		AH: ah, RemoteQPN: y.qp.QPN(), RemoteQKey: 0x1b}})
	must(e, err)
	if wc := e.next(); wc.Status != verbs.Success {
		e.Fatalf("sending: %v", wc.Status)
	}
}

// meet sends a datagram to y, which receives it: from then on nothing is lost because MAC addresses are not known.
func (e *end) meet(y *end) {
	e.Helper()
	_, err := y.qp.PostRecv([]verbs.RecvWR{{SG: y.sge(0, 4096)}})
	must(e, err)
	e.send(y, 50)
	y.next()
}

// What arrives between two processes waits at the sockets: the next one receives it under
// the QPN of the one before, and groups stay joined.
func TestHandOver(t *testing.T) {
	for _, f := range []struct {
		name     string
		v4       bool
		from, to int // threads
	}{
		{"IPv4", true, 1, 1}, {"IPv6", false, 1, 1}, {"more threads, IPv4", true, 1, 3}, {"more threads, IPv6", false, 2, 4},
		{"fewer threads", false, 4, 1},
	} {
		t.Run(f.name, func(t *testing.T) {
			a, b := vethPair(t, 9000, f.v4, func(o *Options) { o.Threads = f.from })
			x, y := newEnd(t, a, ib.UD, 16, 4096).datagram(), newEnd(t, b, ib.UD, 16, 4096).datagram()
			group := gid("ff12:401b:ffff::1")
			if f.v4 {
				group = gid("::ffff:239.192.255.255")
			}
			must(t, x.qp.AttachMulticast(group))
			qpn := x.qp.QPN()
			y.meet(x)
			fds, err := a.Freeze()
			must(t, err)
			if _, err := a.Freeze(); !errors.Is(err, verbs.ErrClosed) {
				t.Errorf("a second time: %v, want ErrClosed", err)
			}
			y.send(x, 100)
			x.send(y, 100) // sending goes on
			must(t, a.Close())
			y.send(x, 200)
			o := a.opts
			o.Sockets, o.Threads = fds, f.to
			next := open(t, o)
			for _, fd := range fds {
				if fd >= 0 {
					t.Errorf("socket %d was not taken into use", fd)
				}
			}
			if got := next.Threads(); got != f.to {
				t.Errorf("%d threads, want %d: %s", got, f.to, next.Steering().Why)
			}
			z := named(t, next, qpn)
			must(t, z.qp.AttachMulticast(group)) // the socket is a member already
			_, err = z.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: z.sge(0, 4096)}, {ID: 2, SG: z.sge(1, 4096)}})
			must(t, err)
			time.Sleep(20 * time.Millisecond) // no goroutine reads, so none can say that it has not
			if got := counter(next, "rx_packets"); got != 0 {
				t.Errorf("%d packets received before Begin, want none", got)
			}
			next.Begin()
			next.Begin()
			for i, want := range []int{100, 200} {
				if wc := z.next(); wc.Status != verbs.Success || wc.ByteLen != want+verbs.GRHLen {
					t.Errorf("datagram %d: %v, %d octets; want %d", i, wc.Status, wc.ByteLen, want+verbs.GRHLen)
				}
			}
			last := newEndOn(t, next, f.to-1, ib.RC, 16, 4096)
			peer := newEnd(t, b, ib.RC, 16, 4096)
			connect(last, peer)
			_, err = last.qp.PostRecv([]verbs.RecvWR{{SG: last.sge(0, 4096)}})
			must(t, err)
			_, err = peer.qp.PostSend([]verbs.SendWR{{Flags: verbs.Signaled, SG: peer.sge(0, 4096)}})
			must(t, err)
			if wc := last.next(); wc.Status != verbs.Success {
				t.Errorf("to the last thread: %v", wc.Status)
			}
			if n := counter(next, "rx_other_thread"); n != 0 {
				t.Errorf("%d packets came to another thread than that of their queue pair", n)
			}
		})
	}
}

// A socket that is not what Open would open is closed, and another opened.
func TestSocketsThatDoNotSuit(t *testing.T) {
	own(t)
	stray := func(domain, typ int) int {
		fd, err := unix.Socket(domain, typ|unix.SOCK_CLOEXEC, 0)
		must(t, err)
		return fd
	}
	elsewhere := stray(unix.AF_INET, unix.SOCK_DGRAM)
	must(t, unix.BindToDevice(elsewhere, "lo"))
	must(t, unix.Bind(elsewhere, &unix.SockaddrInet4{Port: 5000}))
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	fds := []int{null, stray(unix.AF_INET6, unix.SOCK_STREAM), stray(unix.AF_INET, unix.SOCK_DGRAM), elsewhere}
	d := open(t, Options{Underlay: "lo", GID: gid("127.0.0.1"), Sockets: fds})
	for _, fd := range fds {
		if fd >= 0 {
			t.Errorf("socket %d was kept", fd)
		}
	}
	if d.adopted {
		t.Error("a socket was taken into use")
	}
}

// A QPN can be asked for once, and only one that a queue pair can have.
func TestWantedQPN(t *testing.T) {
	own(t)
	d := open(t, Options{Underlay: "lo", GID: gid("127.0.0.1")})
	e := named(t, d, 0x123456)
	if got := e.qp.QPN(); got != 0x123456 {
		t.Errorf("QPN %v, want 0x123456", got)
	}
	c, err := d.CreateCQ(4)
	must(t, err)
	for _, n := range []ib.QPN{0x123456, 1, ib.QPNMulticast, 1 << 24} {
		if _, err := d.CreateQP(verbs.QPInit{Transport: ib.UD, QPN: n, SendCQ: c, RecvCQ: c, SendDepth: 4, RecvDepth: 4, MaxSendSGE: 1, MaxRecvSGE: 1}); !errors.Is(err, verbs.ErrInvalid) {
			t.Errorf("QPN %v: %v, want ErrInvalid", n, err)
		}
	}
}
