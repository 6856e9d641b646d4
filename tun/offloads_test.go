package tun

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/expect"
)

// A joint is two hosts, each with an end of a TUN in a network namespace of its
// own, and packets that go from one to the other as they come out.
type joint struct {
	a, b *File
	ns   netns.NsHandle // of a; the caller is in b's
}

func newJoint(t *testing.T, mtu int, o Options) joint {
	t.Helper()
	var j joint
	for i, f := range []**File{&j.a, &j.b} {
		*f = open(t, o)
		if i == 0 {
			var err error
			if j.ns, err = netns.Get(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { j.ns.Close() })
		}
		l, err := netlink.LinkByIndex((*f).Index())
		if err != nil {
			t.Fatal(err)
		}
		own, _ := netlink.ParseAddr("10.9.0.1/24")
		addr, _ := netlink.ParseAddr(fmt.Sprintf("10.7.0.%d/24", i+1))
		addr6, _ := netlink.ParseAddr(fmt.Sprintf("fd07::%d/64", i+1))
		addr6.Flags = unix.IFA_F_NODAD
		if err := errors.Join(netlink.AddrDel(l, own), netlink.LinkSetMTU(l, mtu), netlink.AddrAdd(l, addr),
			netlink.AddrAdd(l, addr6)); err != nil {
			t.Fatal(err)
		}
	}
	for _, way := range [][2]*File{{j.a, j.b}, {j.b, j.a}} {
		go func() {
			bufs, sizes := buffers(32)
			for {
				n, err := way[0].Read(bufs, sizes)
				if err != nil {
					return
				}
				out := make([][]byte, 0, 32)
				for i := range n {
					if sizes[i] > mtu {
						t.Errorf("a packet of %d octets", sizes[i])
					}
					out = append(out, bufs[i][:sizes[i]])
				}
				way[1].Write(out)
			}
		}()
	}
	return j
}

// A TCP stream arrives as it was sent, with and without GSO packets; with them most of
// it goes in a few.
func TestSegments(t *testing.T) {
	for _, off := range []bool{false, true} {
		for _, mtu := range []int{1280, 1500, 9000, 40000} {
			for _, dst := range []string{"10.7.0.2", "fd07::2"} {
				j := newJoint(t, mtu, Options{NoSegments: off, trial: says(nil, nil)})
				l, err := net.Listen("tcp", net.JoinHostPort(dst, "7"))
				if err != nil {
					t.Fatal(err)
				}
				sent := sha256.Sum256(random(8 << 20))
				done := make(chan error, 1)
				go func() { done <- serve(l, sent) }()
				if err := j.send(l.Addr().String(), random(8<<20)); err != nil {
					t.Error(err)
				}
				if err := <-done; err != nil {
					t.Errorf("off %v, MTU %d, %s: %v", off, mtu, dst, err)
				}
				l.Close()
				for name, f := range map[string]*File{"a": j.a, "b": j.b} {
					checkSegments(t, fmt.Sprintf("off %v, MTU %d, %s, %s", off, mtu, dst, name), f, off, mtu)
				}
				if !off && mtu <= 1500 {
					if a := j.a.Segments(); a.Made < 8*a.Split {
						t.Errorf("MTU %d, %s: %d segments of %d packets, want eight of each at least", mtu, dst, a.Made, a.Split)
					}
					if b := j.b.Segments(); b.Merged < 4*b.Written {
						t.Errorf("MTU %d, %s: %d segments in %d packets, want four in each at least", mtu, dst, b.Merged, b.Written)
					}
				}
				j.a.Close()
				j.b.Close()
			}
		}
	}
}

// checkSegments checks what f counts of GSO packets of a TCP stream.
func checkSegments(t *testing.T, what string, f *File, off bool, mtu int) {
	t.Helper()
	s, sums := f.Segments(), f.Checksums()
	used := s.Split + s.Made + s.Merged + s.Written
	if off {
		expect.Equal(t, used, 0, "%s: number of packets split, made, merged and written", what)
	} else if mtu < mergeBelow { // of packets of 40000 octets no two fit into a GSO packet
		if used == 0 {
			t.Errorf("%s: nothing was split, made, merged or written", what)
		}
	}
	expect.Equal(t, s.Malformed, 0, "%s: Malformed of the segments", what)
	expect.Equal(t, sums.Wrong, 0, "%s: Wrong", what)
	expect.Equal(t, sums.Malformed, 0, "%s: Malformed of the checksums", what)
}

// serve takes one connection, over which octets with this hash must come.
func serve(l net.Listener, want [sha256.Size]byte) error {
	c, err := l.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	h := sha256.New()
	n, err := io.Copy(h, c)
	if err == nil && [sha256.Size]byte(h.Sum(nil)) != want {
		err = fmt.Errorf("other octets, %d of them", n)
	}
	return err
}

// Where the kernel does not take a GSO packet, its packets go one by one, as they were,
// and no more are put together.
func TestMergeRefused(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	// A datagram longer than the buffer does not pass.
	if err := unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_SNDBUF, 4096); err != nil {
		t.Fatal(err)
	}
	f := &File{fd: fds[0], ended: -1}
	f.csum.on = true
	f.tso.on.Store(true)
	// A File writes without telling the scheduler, which a TUN does not mind. This
	// socket blocks until its reader has run, and a collection would wait for both.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	for _, v6 := range []bool{false, true} {
		var bufs, want, got [][]byte
		for i := range 20 {
			flags := byte(tcpACK)
			if i == 19 {
				flags |= tcpPSH
			}
			p := tcp(v6, 12, uint32(1000*i), uint16(i), flags, random(1000))
			bufs, want = append(bufs, p), append(want, bytes.Clone(p))
		}
		f.tso.noMerge.Store(false)
		done, started := make(chan error, 1), make(chan struct{})
		go func() {
			close(started)
			var err error
			got, err = receiveEach(fds[1], len(want))
			done <- err
		}()
		<-started // on a P of its own
		n, err := f.Write(bufs)
		e := <-done
		expect.Equal(t, n, len(want), "v6 %v: n", v6)
		if err != nil {
			t.Errorf("v6 %v: err is %v, want nil", v6, err)
		}
		expect.Equal(t, e, nil, "v6 %v: e", v6)
		if !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("v6 %v: other packets arrived", v6)
		}
		if s := f.Segments(); s.Why == "" || s.Merged+s.Written != 0 {
			t.Errorf("v6 %v: %+v", v6, s)
		}
	}
	// An empty one is refused, wherever it stands.
	done := make(chan int, 1)
	go func() {
		n, _, _ := unix.Recvfrom(fds[1], make([]byte, 4096), 0)
		done <- n
	}()
	if n, err := f.Write([][]byte{row(1, 1000)[0], {}}); n != 1 || err != unix.EINVAL {
		t.Errorf("with an empty packet: %d written (%v)", n, err)
	}
	if n := <-done; n != vnetLen+1052 {
		t.Errorf("%d octets arrived", n)
	}
	unix.Close(fds[1])
	if n, err := f.Write([][]byte{tcp(false, 0, 0, 0, tcpACK, random(1000)),
		tcp(false, 0, 1000, 1, tcpACK, random(1000))}); n != 0 || err == nil {
		t.Errorf("nobody there: %d written (%v)", n, err)
	}
	unix.Close(fds[0])
}

// receiveEach receives n packets, each by itself and with its checksum complete.
func receiveEach(fd, n int) (got [][]byte, err error) {
	for range n {
		b := make([]byte, 32768)
		octets, _, err := unix.Recvfrom(fd, b, 0)
		if err != nil || octets < vnetLen {
			return got, fmt.Errorf("%d octets, %w", octets, err)
		}
		h, p := [vnetLen]byte(b), b[vnetLen:octets]
		var c csums
		if h[1] != 0 || !c.complete(&h, p) {
			return got, fmt.Errorf("header %x", h)
		}
		got = append(got, p)
	}
	return got, nil
}

// While the interface is down nothing is taken, and nothing else is concluded.
func TestMergeWhileDown(t *testing.T) {
	f := open(t, Options{trial: says(nil, nil)})
	l, err := netlink.LinkByIndex(f.Index())
	if err != nil {
		t.Fatal(err)
	}
	for _, up := range []bool{false, true} {
		set := netlink.LinkSetDown
		if up {
			set = netlink.LinkSetUp
		}
		if err := set(l); err != nil {
			t.Fatal(err)
		}
		n, err := f.Write(row(5, 1000))
		if want := map[bool]int{true: 5}[up]; n != want || (err == nil) != up {
			t.Errorf("up %v: %d written (%v)", up, n, err)
		}
		if s := f.Segments(); s.Why != "" || (s.Merged == 5) != up {
			t.Errorf("up %v: %+v", up, s)
		}
	}
}

// GSO packets are switched off and on while a stream goes on: nothing of it is lost, and what is
// switched off is not used any more.
func TestGSOSwitchedLive(t *testing.T) {
	j := newJoint(t, 1500, Options{trial: says(nil, nil)})
	defer j.a.Close()
	defer j.b.Close()
	sent := sha256.Sum256(random(8 << 20))
	stream := func() (split, written uint64) {
		t.Helper()
		a, b := j.a.Segments(), j.b.Segments()
		l, err := net.Listen("tcp", "10.7.0.2:7")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		done := make(chan error, 1)
		go func() { done <- serve(l, sent) }()
		if err := j.send(l.Addr().String(), random(8<<20)); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		return j.a.Segments().Split - a.Split, j.b.Segments().Written - b.Written
	}
	set := func(on bool) {
		for _, f := range []*File{j.a, j.b} {
			f.SetGSO(on, on)
			for name, got := range map[string]bool{"TCP": f.Segments().On, "UDP": f.Datagrams().On} {
				if got != on {
					t.Errorf("%s in GSO packets: %v, want %v", name, got, on)
				}
			}
		}
	}
	if split, written := stream(); split == 0 || written == 0 {
		t.Errorf("at first: %d GSO packets from the kernel, %d to it, want some", split, written)
	}
	set(false)
	if why := j.a.Segments().Why; why != switchedOff {
		t.Errorf("off because %q, want %q", why, switchedOff)
	}
	if split, written := stream(); split != 0 || written != 0 {
		t.Errorf("switched off: %d GSO packets from the kernel, %d to it, want none", split, written)
	}
	set(true)
	if split, written := stream(); split == 0 || written == 0 {
		t.Errorf("on again: %d GSO packets from the kernel, %d to it, want some", split, written)
	}
}

// send sends b over TCP from a.
func (j joint) send(to string, b []byte) error {
	return j.inside(func() error {
		c, err := net.DialTimeout("tcp", to, patience)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		_, err = c.Write(b)
		return err
	})
}

// inside runs f in the network namespace of a.
func (j joint) inside(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not given back: the thread ends with the goroutine
		if err := netns.Set(j.ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}
