package softroce

import (
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// A destination that gets many packets in a row has a connected socket, in the
// device's network namespace, which says the same to the wire; what that socket
// refuses goes the old way, and a change of the port does away with it.
func TestConnected(t *testing.T) {
	a, b := vethPair(t, 9000, false, nil) // b is in a namespace of its own
	x, y := newEnd(t, a, ib.RC, 16, 4096), newEnd(t, b, ib.RC, 16, 4096)
	connect(x, y)
	send := func(n int) {
		t.Helper()
		for range n {
			_, err := x.qp.PostRecv([]verbs.RecvWR{{ID: 1, SG: x.sge(0, 4096)}})
			must(t, err)
			_, err = y.qp.PostSend([]verbs.SendWR{{ID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, SG: y.sge(0, 100)}})
			must(t, err)
			x.next()
			y.next()
		}
	}
	s := y.qp.path.sender
	fd := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.conn == nil {
			return -1
		}
		return s.conn.fd
	}
	send(connectAfter / 4)
	if fd() >= 0 {
		t.Error("a connected socket for a few packets")
	}
	until(t, "a connected socket", func() bool { send(connectAfter); return fd() >= 0 })
	calls, cut := counter(b, "tx_calls"), counter(b, "tx_connected")
	send(10)
	calls, cut = counter(b, "tx_calls")-calls, counter(b, "tx_connected")-cut
	expect.Equal(t, cut, calls, "number of calls by the connected socket")
	if cut < 10 {
		t.Errorf("%d calls by the connected socket, want at least 10", cut)
	}
	sa, err := unix.Getsockname(fd())
	must(t, err)
	bound := sa.(*unix.SockaddrInet6)
	expect.Equal(t, uint16(bound.Port), s.port, "port that it is bound to")
	expect.Equal(t, ib.GID(bound.Addr), b.Port().GIDs[0], "address that it is bound to")

	// Whatever keeps it from sending: nothing is lost.
	null, err := unix.Open("/dev/null", unix.O_RDWR, 0)
	must(t, err)
	defer unix.Close(null)
	s.mu.Lock()
	must(t, unix.Dup2(null, s.conn.fd))
	s.mu.Unlock()
	send(1)
	expect.Equal(t, counter(b, "tx_connect_lost"), 1, "a socket that fails: tx_connect_lost")
	expect.Equal(t, counter(b, "tx_drop_errors"), 0, "a socket that fails: tx_drop_errors")
	if n := fd(); n >= 0 {
		t.Errorf("a socket that fails: descriptor %d is still connected, want none", n)
	}
	until(t, "another connected socket", func() bool { send(connectAfter); return fd() >= 0 })
	b.refresh()
	if fd() < 0 {
		t.Error("a look at the port without a change closed the connected socket")
	}
	more := *b.port.Load()
	more.GIDs = append(more.GIDs[:len(more.GIDs):len(more.GIDs)], gid("fd00::1"))
	b.port.Store(&more)
	b.refresh()
	if fd() >= 0 {
		t.Error("a connected socket outlived a change of the port")
	}

	// One that is not used is closed, one that is used stays.
	until(t, "a connected socket again", func() bool { send(connectAfter); return fd() >= 0 })
	used, last := 0, time.Now() // times without a longer pause, which a busy machine may make
	until(t, "three times connectIdle in which the connected socket is used", func() bool {
		send(1)
		time.Sleep(connectIdle / 10) // the looks at a real socket are by the real clock
		pause := time.Since(last)
		last = time.Now()
		switch {
		case pause > connectIdle/2:
			used = 0
			send(connectAfter)
		case fd() < 0 && used > 0:
			t.Error("a connected socket in use was closed")
			used = 0
		default:
			used++
		}
		return used >= 30
	})
	until(t, "the end of an idle connected socket", func() bool { return fd() < 0 })

	until(t, "a connected socket once more", func() bool { send(connectAfter); return fd() >= 0 })
	if b.Trim(); fd() >= 0 {
		t.Error("a connected socket after Trim")
	}
	send(1)

	// Class and hop limit are those of the path.
	p, err := b.newPath(verbs.AHAttr{DGID: a.Port().GIDs[0], TrafficClass: 0x48, HopLimit: 7}, false, 1, 2)
	must(t, err)
	own, err := b.inNamespace(func() (int, error) { return p.sender.connect(p, p.class()) })
	must(t, err)
	defer unix.Close(own)
	class, _ := unix.GetsockoptInt(own, unix.IPPROTO_IPV6, unix.IPV6_TCLASS)
	hops, _ := unix.GetsockoptInt(own, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS)
	if class != 0x48 || hops != 7 {
		t.Errorf("traffic class %#x, hop limit %d", class, hops)
	}

	// A path that has no class has the device's.
	b.SetTrafficClass(0x68)
	for _, tt := range []struct{ asked, want uint8 }{{0, 0x68}, {0x48, 0x48}} {
		p, err := b.newPath(verbs.AHAttr{DGID: a.Port().GIDs[0], TrafficClass: tt.asked}, false, 1, 2)
		must(t, err)
		if p.attr.TrafficClass != tt.want {
			t.Errorf("asked for traffic class %#x: %#x, want %#x", tt.asked, p.attr.TrafficClass, tt.want)
		}
		if p.head.TrafficClass != tt.want {
			t.Errorf("asked for traffic class %#x: the ICRC is for %#x, want %#x", tt.asked, p.head.TrafficClass, tt.want)
		}
	}

	// An address that is not ours: an error, and nothing stays open or is closed
	// that is somebody else's.
	before := descriptors(t)
	p.attr.SGID = gid("fd00::77")
	if _, err := b.inNamespace(func() (int, error) { return p.sender.connect(p, p.class()) }); err == nil {
		t.Error("a socket bound to an address that is not there")
	}
	if now := descriptors(t); !slices.Equal(now, before) {
		t.Errorf("descriptors %v, before the failure %v", now, before)
	}
}

// descriptors lists what this process has open.
func descriptors(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestConnectedOff(t *testing.T) {
	for _, tt := range []struct {
		name   string
		f      family
		change func(*Options)
		why    string
	}{
		{"switched off", families[1], func(o *Options) { o.NoConnect = true }, "switched off"},
		{"IPv4", families[0], nil, "for IPv6 only"},
		{"IPv6", families[1], nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := pair(t, tt.f, tt.change)
			checkOffload(t, a.Offloads()[connected], "connected", tt.why)
			x, y := newEnd(t, a, ib.UD, 16, 4096), newEnd(t, b, ib.UD, 16, 4096)
			must(t, x.qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey, QKey: 0x1b}))
			must(t, x.qp.Modify(verbs.QPAttr{State: verbs.StateRTR}))
			must(t, x.qp.Modify(verbs.QPAttr{State: verbs.StateRTS}))
			ah, err := a.CreateAH(verbs.AHAttr{DGID: b.Port().GIDs[0]})
			must(t, err)
			count := func() (n int) {
				for range 2 * connectAfter {
					_, err := x.qp.PostSend([]verbs.SendWR{{ID: 2, Opcode: verbs.Send, Flags: verbs.Signaled, AH: ah, RemoteQPN: y.qp.QPN(), SG: x.sge(0, 100)}})
					must(t, err)
					x.next()
				}
				for _, s := range a.senders {
					s.mu.Lock()
					if s.conn != nil {
						n++
					}
					s.mu.Unlock()
				}
				return n
			}
			if tt.why == "" {
				until(t, "a connected socket", func() bool { return count() == 1 })
			} else if n := count(); n != 0 {
				t.Errorf("%d connected sockets all the same", n)
			}
		})
	}
}
