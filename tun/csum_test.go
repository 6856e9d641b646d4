package tun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/expect"
	"ipoibcm/wire/ip"
)

// packet makes a TCP or UDP packet of n octets of payload whose checksum is right.
func packet(v6 bool, proto byte, n int) []byte {
	head := map[byte]int{6: 20, 17: 8}[proto]
	seg := make([]byte, head+n)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	for i := range seg {
		seg[i] = byte(r.Uint32())
	}
	binary.BigEndian.PutUint16(seg, 9)
	binary.BigEndian.PutUint16(seg[2:], 7)
	at := 16
	if proto == 17 {
		at = 6
		binary.BigEndian.PutUint16(seg[4:], uint16(len(seg)))
	} else {
		seg[12] = 5 << 4
	}
	clear(seg[at : at+2])
	var b []byte
	if v6 {
		b = append(b, 0x60, 0, 0, 0, byte(len(seg)>>8), byte(len(seg)), proto, 64)
		src, dst := netip.MustParseAddr("fd09::2").As16(), netip.MustParseAddr("fd09::1").As16()
		b = append(append(b, src[:]...), dst[:]...)
		binary.BigEndian.PutUint16(seg[at:], ip.Checksum6(netip.AddrFrom16(src), netip.AddrFrom16(dst), proto, seg))
		b = append(b, seg...)
	} else {
		b = append(udp(0)[:20:20], seg...)
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		b[9], b[10], b[11] = proto, 0, 0
		binary.BigEndian.PutUint16(b[10:], ip.Checksum(b[:20]))
		pseudo := append(bytes.Clone(b[12:20]), 0, proto, byte(len(seg)>>8), byte(len(seg)))
		binary.BigEndian.PutUint16(b[20+at:], ^uint16(ip.Sum(ip.Sum(0, pseudo), seg)))
	}
	return b
}

// What verify calls right is right, what it calls wrong is wrong, and what it does
// not understand it leaves alone.
func TestVerify(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, proto := range []byte{6, 17} {
			for _, n := range []int{0, 1, 2, 999, 1000, 1448, 65400, 65443} {
				p := packet(v6, proto, n)
				if valid, ok := verify(p); !valid || !ok {
					t.Errorf("v6 %v, protocol %d, %d octets: valid %v, looked at %v", v6, proto, n, valid, ok)
				}
				for _, at := range []int{len(p) - 1, len(p) - n/2 - 1, len(p) - n - 1} {
					p[at] ^= 0x10
					switch valid, ok := verify(p); {
					case valid:
						t.Errorf("v6 %v, protocol %d, %d octets, octet %d changed: valid is true", v6, proto, n, at)
					case !ok && at >= len(p)-n:
						t.Errorf("v6 %v, protocol %d, %d octets: octet %d changed, and not seen", v6, proto, n, at)
					}
					p[at] ^= 0x10
				}
			}
		}
	}
	for name, change := range map[string]func(p []byte) []byte{
		"more fragments":     func(p []byte) []byte { p[6] = 0x20; return p },
		"a later fragment":   func(p []byte) []byte { p[7] = 1; return p },
		"octets behind it":   func(p []byte) []byte { return append(p, 0) },
		"cut off":            func(p []byte) []byte { return p[:len(p)-1] },
		"no checksum":        func(p []byte) []byte { p[26], p[27] = 0, 0; return p },
		"another protocol":   func(p []byte) []byte { p[9] = 132; return p },
		"a UDP length apart": func(p []byte) []byte { p[25]--; return p },
		"IHL behind the end": func(p []byte) []byte { p = p[:30]; p[0] = 0x4f; p[3] = 30; p[2] = 0; return p },
		"IHL of 4":           func(p []byte) []byte { p[0] = 0x44; return p },
		"version 5":          func(p []byte) []byte { p[0] = 0x55; return p },
	} {
		if valid, ok := verify(change(packet(false, 17, 600))); valid || ok {
			t.Errorf("%s: valid %v, looked at %v", name, valid, ok)
		}
	}
}

func TestComplete(t *testing.T) {
	header := func(start, at uint16) (h [vnetLen]byte) {
		h[0] = vnetNeedsCsum
		binary.NativeEndian.PutUint16(h[6:], start)
		binary.NativeEndian.PutUint16(h[8:], at)
		return h
	}
	var c csums
	for _, n := range []int{0, 1, 500, 65400} {
		want := packet(true, 17, n)
		p := bytes.Clone(want)
		// As the kernel leaves it: the sum of the pseudo-header.
		var pseudo [40]byte
		copy(pseudo[:], p[8:40])
		binary.BigEndian.PutUint16(pseudo[34:], uint16(len(p)-40))
		pseudo[39] = 17
		binary.BigEndian.PutUint16(p[46:], uint16(ip.Sum(0, pseudo[:])))
		h := header(40, 6)
		if !c.complete(&h, p) || !bytes.Equal(p, want) {
			t.Errorf("%d octets: checksum %x, want %x", n, p[46:48], want[46:48])
		}
	}
	// All ones in the sum: no zero in the field, which would mean that there is none.
	h, p := header(0, 2), []byte{0xff, 0xfe, 0, 1}
	expect.MustEqual(t, c.complete(&h, p), true, "complete(&h, p)")
	expect.Equal(t, p[2], 0xff, "p[2]")
	expect.Equal(t, p[3], 0xff, "p[3]")
	for _, at := range [][2]uint16{{0, 3}, {3, 0}, {4, 0}, {65535, 65535}, {0, 65535}} {
		h := header(at[0], at[1])
		before := bytes.Clone(p)
		if c.complete(&h, p) || !bytes.Equal(p, before) {
			t.Errorf("cover from %d, field at %d in a packet of 4 octets", at[0], at[1])
		}
	}
	expect.Equal(t, c.completed.Load(), 5, "completed")
	expect.Equal(t, c.malformed.Load(), 5, "malformed")
}

// The kernel's packets come with the checksums it would have given them, and it
// takes ours, unless they are wrong.
func TestChecksums(t *testing.T) {
	for _, off := range []bool{false, true} {
		f := open(t, Options{NoChecksum: off})
		c := dial(t)
		sizes := []int{1, 2, 3, 100, 1501, 65492}
		for i, n := range sizes {
			c.Write(bytes.Repeat([]byte{byte(i + 1)}, n))
		}
		for i, p := range packets(t, f, len(sizes)) {
			if valid, ok := verify(p); !valid || !ok {
				t.Errorf("off %v, %d octets: valid %v, looked at %v", off, sizes[i], valid, ok)
			}
		}
		l, err := net.ListenPacket("udp4", "10.9.0.1:7")
		if err != nil {
			t.Fatal(err)
		}
		good, small := packet(false, 17, 65000), packet(false, 17, 40)
		wrong, wrongSmall := bytes.Clone(good), bytes.Clone(small)
		wrong[30000]++
		wrongSmall[40]++
		if n, err := f.Write([][]byte{wrong, wrongSmall, good, small, udp(700)}); n != 5 || err != nil {
			t.Errorf("took %d (%v)", n, err)
		}
		b := make([]byte, 65536)
		for _, want := range []int{65000, 40, 700} {
			l.SetReadDeadline(time.Now().Add(patience))
			if n, _, err := l.ReadFrom(b); n != want || err != nil {
				t.Errorf("off %v: received %d (%v), want %d", off, n, err, want)
			}
		}
		l.Close()
		s := f.Checksums()
		want := Checksums{On: true, Completed: s.Completed, Verified: 1, Wrong: 1}
		if off {
			want = Checksums{Why: "switched off"}
		} else if s.Completed < uint64(len(sizes)) {
			t.Errorf("%d completed, want %d at least", s.Completed, len(sizes))
		}
		if s != want {
			t.Errorf("%+v, want %+v", s, want)
		}
	}
}

// packets reads n UDP packets over IPv4.
func packets(t *testing.T, f *File, n int) [][]byte {
	t.Helper()
	got, _ := readIP(t, f, n)
	return got
}

// Where the trial has to wait for the processor TCP comes in GSO packets as well:
// whatever the host's congestion control makes of a long round trip.
func TestTrialIsSlow(t *testing.T) {
	open(t, Options{}) // skips where there are no rights
	defer func(was func()) { trialPause = was }(trialPause)
	trialPause = func() { time.Sleep(200 * time.Millisecond) }
	sums, segments, datagrams := tryHeaders()
	expect.Equal(t, sums, nil, "sums")
	expect.Equal(t, segments, nil, "segments")
	expect.Equal(t, datagrams, nil, "datagrams")
}

// The trial works here, leaves nothing behind, and what it says is obeyed.
func TestTrial(t *testing.T) {
	f := open(t, Options{}) // skips where there are no rights
	checksums := f.Checksums()
	expect.Equal(t, checksums.On, true, "On of checksums after the trial")
	expect.Equal(t, checksums.Why, "", "Why of checksums after the trial")
	segments := f.Segments()
	expect.Equal(t, segments.On, true, "On of segments after the trial")
	expect.Equal(t, segments.Why, "", "Why of segments after the trial")
	datagrams := f.Datagrams()
	expect.Equal(t, datagrams.On, true, "On of datagrams after the trial")
	expect.Equal(t, datagrams.Why, "", "Why of datagrams after the trial")
	start := time.Now()
	switch sums, segments, datagrams := tryHeaders(); {
	case sums != nil:
		t.Errorf("sums is %v, want nil", sums)
	case segments != nil:
		t.Errorf("segments is %v, want nil", segments)
	case datagrams != nil:
		t.Errorf("datagrams is %v, want nil", datagrams)
	}
	t.Logf("the trial took %v", time.Since(start))
	if links, err := net.Interfaces(); err != nil || len(links) != 2 { // lo and f
		t.Errorf("interfaces after the trial: %v (%v)", links, err)
	}
	const eperm = "not tried, because a network namespace for the test cannot be made: operation not permitted"
	notTried := fmt.Errorf("%w: %w", errNotTried, unix.EPERM)
	for name, tt := range map[string]struct {
		o        Options
		sums     Checksums
		segments Segments
	}{
		"neither works": {Options{trial: says(errors.New("no good"), errors.New("too bad"))},
			Checksums{Why: "its test failed: no good"}, Segments{Why: "needs checksums by us: its test failed: no good"}},
		"segments do not": {Options{trial: says(nil, errors.New("too bad"))}, Checksums{On: true},
			Segments{Why: "its test failed: too bad"}},
		"not tried": {Options{trial: says(notTried, notTried)}, Checksums{On: true, Why: eperm},
			Segments{On: true, Why: eperm}},
		"checksums switched off": {Options{NoChecksum: true}, Checksums{Why: "switched off"},
			Segments{Why: "needs checksums by us: switched off"}},
		"segments switched off": {Options{NoSegments: true, trial: says(nil, nil)}, Checksums{On: true},
			Segments{Why: "switched off"}},
		"both switched off": {Options{NoSegments: true, NoChecksum: true}, Checksums{Why: "switched off"},
			Segments{Why: "switched off"}},
	} {
		g, err := Open(tt.o)
		if err != nil {
			t.Fatal(err)
		}
		expect.Equal(t, g.Checksums(), tt.sums, "%s: checksums", name)
		expect.Equal(t, g.Segments(), tt.segments, "%s: segments", name)
		if tt.o.NoDatagrams == tt.o.NoSegments {
			d := g.Datagrams()
			expect.Equal(t, d.On, tt.segments.On, "%s: On of datagrams", name)
			expect.Equal(t, d.Why, tt.segments.Why, "%s: Why of datagrams", name)
		}
		g.Close()
	}
}

// says is a trial that ends so, for datagrams as for segments.
func says(sums, segments error) func() (error, error, error) {
	return func() (error, error, error) { return sums, segments, segments }
}

// A packet that is routed on has its checksum when it leaves again.
func TestForwarded(t *testing.T) {
	for _, off := range []bool{false, true} {
		f := open(t, Options{})
		g, err := Open(Options{NoChecksum: off})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		l, err := netlink.LinkByIndex(g.Index())
		if err != nil {
			t.Fatal(err)
		}
		a, _ := netlink.ParseAddr("10.10.0.1/24")
		if err := errors.Join(netlink.AddrAdd(l, a), netlink.LinkSetUp(l),
			os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)); err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{600, 20001, 65400} {
			p := packet(false, 17, n)
			copy(p[16:], []byte{10, 10, 0, 2})
			clear(p[10:12])
			binary.BigEndian.PutUint16(p[10:], ip.Checksum(p[:20]))
			clear(p[26:28])
			s, _ := find(append(bytes.Clone(p[:26]), append([]byte{1, 1}, p[28:]...)...))
			binary.BigEndian.PutUint16(p[26:], ^uint16(ip.Sum(s.sum, p[20:])))
			if valid, ok := verify(p); !valid || !ok {
				t.Fatalf("the test's packet of %d octets: valid %v, looked at %v", n, valid, ok)
			}
			if _, err := f.Write([][]byte{p}); err != nil {
				t.Fatal(err)
			}
			got := packets(t, g, 1)[0]
			switch valid, ok := verify(got); {
			case !valid:
				t.Errorf("off %v, %d octets: valid is false", off, n)
			case !ok:
				t.Errorf("off %v, %d octets: ok is false", off, n)
			case !bytes.Equal(got[28:], p[28:]):
				t.Errorf("off %v, %d octets: got[28:] is %x, want %x", off, n, got[28:], p[28:])
			}
		}
		if v := f.Checksums().Verified; v != 3 {
			t.Errorf("%d verified, want 3", v)
		}
	}
}

func FuzzVerify(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		for _, proto := range []byte{6, 17} {
			p := packet(v6, proto, 33)
			f.Add(p, uint16(20), uint16(6))
			f.Add(p[:25], uint16(len(p)), uint16(0))
			f.Add(packet(v6, proto, checkFrom), uint16(0), uint16(0))
		}
	}
	f.Fuzz(func(t *testing.T, p []byte, start, at uint16) {
		if len(p) == 0 {
			return // the kernel gives no such packet, and takes none
		}
		if valid, ok := verify(p); valid && !ok {
			t.Error("valid, but not looked at")
		}
		var c csums
		var h [vnetLen]byte
		before := bytes.Clone(p)
		if s, right := c.look(p); right {
			if s.mark(&h, p); !c.complete(&h, p) {
				t.Error("marked, and cannot be completed")
			}
		}
		if h[0] != 0 {
			valid, ok := verify(p)
			expect.Equal(t, ok, true, "marked and completed: whether it was looked at")
			expect.Equal(t, valid, true, "marked and completed: whether the checksum is right")
			// zero and all ones are the same checksum
			s, _ := find(before)
			copy(before[s.at:], p[s.at:s.at+2])
		}
		if !bytes.Equal(before, p) {
			t.Error("changed outside the checksum")
		}
		h = [vnetLen]byte{vnetNeedsCsum}
		binary.NativeEndian.PutUint16(h[6:], start)
		binary.NativeEndian.PutUint16(h[8:], at)
		if done := c.complete(&h, p); done != (int(start)+int(at)+2 <= len(p)) {
			t.Errorf("complete: %v", done)
		}
	})
}

// What the trial waits for may come while the runtime sends signals.
func TestReceiveAllInterrupted(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	patience := unix.Timeval{Sec: 5}
	if err := unix.SetsockoptTimeval(fds[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience); err != nil {
		t.Fatal(err)
	}
	got, tid, done := make([]byte, 10), make(chan int, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with this goroutine
		tid <- unix.Gettid()
		_, err := receiveAll(fds[0], got)
		done <- err
	}()
	reading := <-tid
	for i := range got {
		time.Sleep(time.Millisecond)
		if err := unix.Tgkill(unix.Getpid(), reading, unix.SIGURG); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Write(fds[1], []byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err != nil || got[9] != 9 {
		t.Errorf("% x, %v, want ten octets", got, err)
	}
}
