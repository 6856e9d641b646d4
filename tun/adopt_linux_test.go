package tun

import (
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A TUN outlives the File it was made with as long as somebody holds its descriptor, and
// another File reads what has waited meanwhile. Nobody holds it: it goes.
func TestAdopt(t *testing.T) {
	f := open(t, Options{Name: "ibcm7"})
	l, err := netlink.LinkByName("ibcm7")
	if err != nil {
		t.Fatal(err)
	}
	a, _ := netlink.ParseAddr("10.7.0.1/24")
	if err := netlink.AddrAdd(l, a); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMTU(l, 9000); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		t.Fatal(err)
	}
	held := keep(t, f)
	sendUDP(t, "10.7.0.2", 700) // into the queue of the device
	g, err := Adopt(held, Options{Name: "ibcm7"})
	if err != nil {
		t.Fatal(err)
	}
	if g.Index() != l.Attrs().Index {
		t.Errorf("index %d, want %d", g.Index(), l.Attrs().Index)
	}
	if got := g.Checksums().On; got != f.Checksums().On {
		t.Errorf("checksums by us: %v, want %v as before", got, f.Checksums().On)
	}
	if now, err := netlink.LinkByName("ibcm7"); err != nil || now.Attrs().MTU != 9000 {
		t.Errorf("MTU after it was taken over: %v, %v; want 9000", now, err)
	}
	want := 20 + 8 + 700
	for deadline := time.Now().Add(10 * time.Second); ; {
		bufs, sizes := [][]byte{make([]byte, 1<<16)}, make([]int, 1)
		n, err := g.TryRead(bufs, sizes)
		if err != nil {
			t.Fatal(err)
		}
		if n == 1 && sizes[0] == want {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the packet that waited was not read")
		}
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := netlink.LinkByName("ibcm7"); err == nil {
		t.Error("the interface is there though nobody holds it")
	}
}

// What an interface that is taken over shows the kernel to be able to do is not given up because a
// busy machine does not answer its trial in time.
func TestAdoptOnBusyMachine(t *testing.T) {
	f := open(t, Options{Name: "ibcm7"})
	if !f.Checksums().On {
		t.Skipf("no checksums by us on this kernel: %s", f.Checksums().Why)
	}
	held, err := unix.FcntlInt(uintptr(f.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	silent := func() (error, error, error) { return errSilence, errSilence, errSilence }
	g, err := Adopt(held, Options{Name: "ibcm7", trial: silent})
	if err != nil {
		unix.Close(held)
		t.Fatal(err)
	}
	defer g.Close()
	if got := g.Checksums(); !got.On {
		t.Errorf("checksums by us are off: %s", got.Why)
	}
	fresh := open(t, Options{Name: "ibcm8", trial: silent})
	if fresh.Checksums().On {
		t.Error("checksums by us are on at a new interface whose trial nobody answered")
	}
}

// What the kernel has shown to one process the next one need not try: no packet passes meanwhile.
func TestAdoptProven(t *testing.T) {
	f := open(t, Options{Name: "ibcm7"})
	if f.Proven() != trialVersion {
		t.Skip("this kernel does not pass the trial")
	}
	trials := 0
	try := func() (error, error, error) { trials++; return nil, errSilence, nil }
	adopt := func(o Options) *File {
		held, err := unix.FcntlInt(uintptr(f.FD()), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		o.Name, o.trial = "ibcm7", try
		g, err := Adopt(held, o)
		if err != nil {
			unix.Close(held)
			t.Fatal(err)
		}
		t.Cleanup(func() { g.Close() })
		return g
	}
	g := adopt(Options{Proven: f.Proven()})
	if trials != 0 {
		t.Errorf("%d trials of what was proven, want none", trials)
	}
	if got, want := g.Checksums().On, f.Checksums().On; got != want {
		t.Errorf("checksums by us: %v, want %v", got, want)
	}
	if got, want := g.Segments(), f.Segments(); got.On != want.On || got.Why != want.Why {
		t.Errorf("segments: %+v, want %+v", got, want)
	}
	if got := g.Proven(); got != trialVersion {
		t.Errorf("the next process is told %d, want %d", got, trialVersion)
	}
	if other := adopt(Options{Proven: trialVersion + 1}); trials != 1 {
		t.Errorf("%d trials where another one was passed, want 1", trials)
	} else if got := other.Proven(); got != 0 {
		t.Errorf("the next process is told %d after a trial that failed in part, want 0", got)
	}
}

// sendUDP sends a datagram of so many octets.
func sendUDP(t *testing.T, dst string, size int) {
	t.Helper()
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(s)
	to, _ := netlink.ParseAddr(dst + "/32")
	sa := &unix.SockaddrInet4{Port: 9, Addr: [4]byte(to.IP.To4())}
	if err := unix.Sendto(s, make([]byte, size), 0, sa); err != nil {
		t.Fatal(err)
	}
}

// A descriptor that is not the interface we would make is refused, and stays the
// caller's.
func TestAdoptRefused(t *testing.T) {
	f := open(t, Options{Name: "ibcm7"})
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	fresh, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fresh)
	for _, tt := range []struct {
		name string
		fd   int
		o    Options
		want string
	}{
		{"not a TUN", null, Options{Name: "ibcm7"}, "no TUN with an interface"},
		{"no interface yet", fresh, Options{Name: "ibcm7"}, "no TUN with an interface"},
		{"another name", f.FD(), Options{Name: "ibcm8"}, "it is interface ibcm7, want ibcm8"},
		{"other headers", f.FD(), Options{Name: "ibcm7", NoChecksum: f.Checksums().On}, "offload.checksum has changed"},
	} {
		if tt.name == "other headers" && !f.Checksums().On {
			continue // this kernel has one kind only
		}
		if _, err := Adopt(tt.fd, tt.o); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		if _, err := unix.FcntlInt(uintptr(tt.fd), unix.F_GETFD, 0); err != nil {
			t.Errorf("%s: the descriptor was closed: %v", tt.name, err)
		}
	}
}

// keep closes f, whose interface stays with the descriptor that is returned.
func keep(t *testing.T, f *File) int {
	t.Helper()
	held, err := unix.FcntlInt(uintptr(f.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return held
}
