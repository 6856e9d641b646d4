package tun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/expect"
)

// open makes a TUN that is up, with an address, in a namespace of its own.
func open(t testing.TB, o Options) *File {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to make a network namespace")
	}
	runtime.LockOSThread() // not given back: the thread ends with the test
	ns, err := netns.New()
	if err != nil {
		t.Skipf("cannot make a network namespace: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
	f, err := Open(o)
	if err != nil {
		t.Skipf("cannot open a TUN: %v", err)
	}
	t.Cleanup(func() { f.Close() })
	l, err := netlink.LinkByIndex(f.Index())
	if err != nil {
		t.Fatal(err)
	}
	a, _ := netlink.ParseAddr("10.9.0.1/24")
	netlink.LinkSetIP6AddrGenMode(l, 1)
	if err := netlink.AddrAdd(l, a); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		t.Fatal(err)
	}
	return f
}

func dial(t testing.TB) net.Conn {
	t.Helper()
	c, err := net.Dial("udp4", "10.9.0.2:9")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func buffers(n int) (bufs [][]byte, sizes []int) {
	for range n {
		bufs = append(bufs, make([]byte, 65536))
	}
	return bufs, make([]int, n)
}

// readIP reads batches until it has n UDP packets over IPv4; it returns them and
// the size of the largest batch.
func readIP(t *testing.T, f *File, n int) (got [][]byte, most int) {
	t.Helper()
	bufs, sizes := buffers(8)
	for len(got) < n {
		k, err := f.Read(bufs, sizes)
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, k)
		for i := range k {
			if p := bufs[i][:sizes[i]]; p[0]>>4 == 4 && p[9] == 17 {
				got = append(got, bytes.Clone(p))
			}
		}
	}
	return got, most
}

// readUDP is readIP, with the payloads only.
func readUDP(t *testing.T, f *File, n int) (got [][]byte, most int) {
	t.Helper()
	got, most = readIP(t, f, n)
	for i := range got {
		got[i] = got[i][28:]
	}
	return got, most
}

func TestOpen(t *testing.T) {
	f := open(t, Options{})
	l, err := netlink.LinkByName(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	expect.Equal(t, l.Attrs().MTU, MaxMTU, "%s: MTU", f.Name())
	expect.Equal(t, f.Index(), l.Attrs().Index, "%s: Index", f.Name())
	if !strings.HasPrefix(f.Name(), "tun") {
		t.Errorf("the name is %q, want it to begin with tun", f.Name())
	}
	g, err := Open(Options{Name: "ibcm%d", MTU: 1500})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	switch l, err := netlink.LinkByName("ibcm0"); {
	case err != nil:
		t.Errorf("%s: err is %v, want nil", g.Name(), err)
	case l.Attrs().MTU != 1500:
		t.Errorf("%s: Attrs.MTU is %v, want 1500", g.Name(), l.Attrs().MTU)
	case g.Name() != "ibcm0":
		t.Errorf("%s: Name is %q, want \"ibcm0\"", g.Name(), g.Name())
	}
	for _, o := range []Options{{MTU: MaxMTU + 1}, {MTU: -1}, {Name: "a-name-that-is-too-long"}, {Name: "ibcm0"}} {
		if h, err := Open(o); err == nil {
			h.Close()
			t.Errorf("opened %+v", o)
		}
	}
}

func TestReadBatch(t *testing.T) {
	f := open(t, Options{})
	c := dial(t)
	want := []int{1, 100, 65492, 1500, 65492} // 65492 + 28 is the MTU
	for i, n := range want {
		if _, err := c.Write(bytes.Repeat([]byte{byte(i)}, n)); err != nil {
			t.Fatal(err)
		}
	}
	got, most := readUDP(t, f, len(want))
	if most < len(want) {
		t.Errorf("largest batch %d, want all %d at once", most, len(want))
	}
	for i, n := range want {
		expect.MustEqual(t, len(got[i]), n, "packet %d: length of got[i]", i)
		expect.Equal(t, got[i][0], byte(i), "packet %d: got[i][0]", i)
		expect.Equal(t, got[i][n-1], byte(i), "packet %d: got[i][n-1]", i)
	}
}

func TestWriteBatch(t *testing.T) {
	f := open(t, Options{})
	l, err := net.ListenPacket("udp4", "10.9.0.1:7")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	good, bad := udp(65492), []byte{0x45, 0, 0}
	n, err := f.Write([][]byte{good, bad, nil, udp(3)})
	if n != 2 || err == nil {
		// The kernel takes what is shorter than an IP header as long as its first
		// octet names a version.
		t.Logf("took %d, %v", n, err)
	}
	if n < 2 || err == nil {
		t.Errorf("took %d (%v), want the good ones and an error", n, err)
	}
	b := make([]byte, 65536)
	for _, want := range []int{65492, 3} {
		l.SetReadDeadline(time.Now().Add(patience))
		if n, _, err := l.ReadFrom(b); n != want || err != nil {
			t.Errorf("received %d (%v), want %d", n, err, want)
		}
	}
}

// udp is a datagram of n octets from 10.9.0.2:9 to 10.9.0.1:7, without a
// checksum.
func udp(n int) []byte {
	b := make([]byte, 28+n)
	copy(b, []byte{0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1, 0, 9, 0, 7})
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[24:], uint16(8+n))
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum))
	return b
}

// patience bounds waits for what takes milliseconds on an idle machine.
const patience = time.Minute

// sleeps reports whether a thread of the process waits in a system call, other than for Go's scheduler.
func sleeps(t *testing.T, tid int) bool {
	t.Helper()
	call, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/syscall", tid))
	if err != nil {
		t.Fatal(err)
	}
	number, _, _ := strings.Cut(strings.TrimSpace(string(call)), " ")
	return number != "running" && number != fmt.Sprint(unix.SYS_FUTEX)
}

func TestCloseEndsRead(t *testing.T) {
	f := open(t, Options{})
	bufs, sizes := buffers(1)
	got, thread := make(chan error), make(chan int, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		for {
			if _, err := f.Read(bufs, sizes); err != nil {
				got <- err
				return
			}
		}
	}()
	tid := <-thread
	within(t, "Read sleeps", func() bool { return sleeps(t, tid) })
	f.Close()
	select {
	case err := <-got:
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("Read ended with %v", err)
		}
	case <-time.After(patience):
		t.Fatal("Read still blocks")
	}
	if _, err := f.Write([][]byte{udp(1)}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Write after Close: %v", err)
	}
	if _, err := netlink.LinkByName(f.Name()); err == nil {
		t.Error("the interface is still there")
	}
}

// A wait ends although there is nothing to read: waitMax says why.
func TestWaitsEnd(t *testing.T) {
	f := open(t, Options{})
	ended := make(chan error, 1)
	go func() {
		for range 2 { // what the kernel has to say of its own may be there
			if err := f.wait(); err != nil {
				ended <- err
			}
		}
		ended <- nil
	}()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * waitMax * time.Millisecond):
		t.Errorf("two waits for nothing took more than %d ms, want about %d", 20*waitMax, 2*waitMax)
	}
}

func TestNoAllocs(t *testing.T) {
	f := open(t, Options{})
	c := dial(t)
	bufs, sizes := buffers(4)
	p, out := make([]byte, 1000), [][]byte{udp(10), udp(1000)}
	n := testing.AllocsPerRun(200, func() {
		c.Write(p)
		f.Read(bufs, sizes)
		f.Write(out)
	})
	if n > 0 {
		t.Errorf("%v allocations per batch, want 0", n)
	}
}

// BenchmarkWake is the time from a packet's transmission to its reader having
// run, when the reader sleeps.
func BenchmarkWake(b *testing.B) {
	f := open(b, Options{})
	c := dial(b)
	got := make(chan struct{}, 1)
	go func() {
		bufs, sizes := buffers(8)
		for {
			n, err := f.Read(bufs, sizes)
			if err != nil {
				return
			}
			for i := range n {
				if bufs[i][9] == 17 {
					got <- struct{}{}
				}
			}
		}
	}()
	time.Sleep(20 * time.Millisecond)
	p := make([]byte, 100)
	for b.Loop() {
		c.Write(p)
		<-got
	}
	f.Close()
}

// BenchmarkRead is the cost of a packet when there are always more.
func BenchmarkRead(b *testing.B) {
	for _, size := range []int{60, 65520} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			f := open(b, Options{})
			c := dial(b)
			bufs, sizes := buffers(32)
			p := make([]byte, size-28)
			b.SetBytes(int64(size))
			for i := 0; i < b.N; {
				b.StopTimer()
				for range 32 {
					c.Write(p)
				}
				b.StartTimer()
				n, err := f.Read(bufs, sizes)
				if err != nil {
					b.Fatal(err)
				}
				i += n
			}
		})
	}
}

// BenchmarkWrite is the cost of a packet that the kernel takes in, without anybody
// who waits for it.
func BenchmarkWrite(b *testing.B) {
	for _, size := range []int{60, 65520} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			f := open(b, Options{})
			pkts := make([][]byte, 32)
			for i := range pkts {
				pkts[i] = udp(size - 28)
			}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for i := 0; i < b.N; i += len(pkts) {
				if n, err := f.Write(pkts); err != nil || n != len(pkts) {
					b.Fatalf("%d written: %v", n, err)
				}
			}
		})
	}
}

// What the kernel says it can is read whole: TUNGETFEATURES writes 32 bits.
func TestKernelFeatures(t *testing.T) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no /dev/net/tun: %v", err)
	}
	defer unix.Close(fd)
	got, err := features(fd)
	if want := uint32(unix.IFF_TUN | unix.IFF_VNET_HDR); err != nil || got&want != want {
		t.Errorf("features %#x (%v), want those of %#x", got, err, want)
	}
}
