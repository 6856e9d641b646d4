package tun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/expect"
	"ipoibcm/wire/ip"
)

// datagram is a UDP packet with that payload and a checksum.
func datagram(v6 bool, port, id uint16, payload []byte) []byte {
	head := 28
	if v6 {
		head = 48
	}
	p := make([]byte, head+len(payload))
	copy(p[head:], payload)
	u := p[head-8:]
	binary.BigEndian.PutUint16(u, 1000)
	binary.BigEndian.PutUint16(u[2:], port)
	binary.BigEndian.PutUint16(u[4:], uint16(len(u)))
	if v6 {
		p[0], p[6], p[7], p[23], p[39] = 0x60, protoUDP, 64, 2, 1
		binary.BigEndian.PutUint16(p[4:], uint16(len(u)))
	} else {
		copy(p, []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, protoUDP, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1})
		binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
		binary.BigEndian.PutUint16(p[4:], id)
		binary.BigEndian.PutUint16(p[10:], ip.Checksum(p[:20]))
	}
	s, _ := findSum(p) // it is UDP; a checksum that is wrong would not be merged
	binary.BigEndian.PutUint16(u[6:], ^uint16(ip.Sum(s.sum, u)))
	return p
}

// findSum is find for a packet whose checksum is yet to be made.
func findSum(p []byte) (segment, bool) {
	at := len(p) - int(binary.BigEndian.Uint16(p[len(p)-len(udpOf(p))+4:])) + udpSum
	p[at] = 1 // not none
	s, ok := find(p)
	p[at] = 0
	return s, ok
}

func udpOf(p []byte) []byte {
	if p[0]>>4 == 4 {
		return p[20:]
	}
	return p[40:]
}

// What is put together and then split is what it was, and only what belongs together is.
func TestDatagramsTogether(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	noise := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	for _, v6 := range []bool{false, true} {
		first := datagram(v6, 9, 7, noise(100))
		change := func(f func(p []byte)) []byte {
			p := datagram(v6, 9, 8, noise(100))
			f(p)
			return p
		}
		for _, tt := range []struct {
			name string
			p    []byte
			want bool
		}{
			{"the same flow and length", datagram(v6, 9, 8, noise(100)), true},
			{"a shorter one", datagram(v6, 9, 8, noise(5)), true},
			{"a longer one", datagram(v6, 9, 8, noise(101)), false},
			{"an empty one", datagram(v6, 9, 8, nil), false},
			{"another port", datagram(v6, 10, 8, noise(100)), false},
			{"a wrong checksum", change(func(p []byte) { p[len(p)-1] ^= 1 }), false},
			{"another version", datagram(!v6, 9, 8, noise(100)), false},
			{"TCP", tcp(v6, 0, 1, 1, tcpACK, noise(100)), false},
			{"another hop limit", change(func(p []byte) {
				if v6 {
					p[7]--
				} else {
					p[8]--
				}
			}), false},
			{"another mark of congestion", change(func(p []byte) { ip.SetCE(p) }), false},
		} {
			var m datagrams
			s, _ := find(first)
			if !m.begin(bytes.Clone(first), s, true) {
				t.Fatal("the first packet is refused")
			}
			if got := m.add(tt.p); got != tt.want {
				t.Errorf("v6 %v, %s: taken %v, want %v", v6, tt.name, got, tt.want)
			}
		}
		rowOfDatagrams(t, v6, noise)
	}
}

// rowOfDatagrams puts twenty datagrams together and takes them apart again.
func rowOfDatagrams(t *testing.T, v6 bool, noise func(int) []byte) {
	t.Helper()
	var m datagrams
	var in [][]byte
	for i := range 20 {
		n := 100
		if i == 19 {
			n = 33
		}
		in = append(in, datagram(v6, 9, uint16(i), noise(n)))
	}
	whole := bytes.Clone(in[0])
	if !m.begin(whole, segment{}, false) {
		t.Fatal("the first packet is refused")
	}
	for _, p := range in[1:] {
		if !m.add(p) {
			t.Fatal("a packet in a row is refused")
		}
	}
	if m.add(datagram(v6, 9, 20, noise(33))) {
		t.Error("a packet is taken after a shorter one")
	}
	var h [vnetLen]byte
	m.finish(&h)
	for _, p := range in[1:] {
		whole = append(whole, p[m.seg.head:]...)
	}
	var s tso
	bufs, sizes := buffers(32)
	n := s.take(&h, copy(bufs[0], whole), bufs, sizes)
	if n != len(in) {
		t.Fatalf("v6 %v: %d packets, want %d", v6, n, len(in))
	}
	for i, want := range in {
		if got := bufs[i][:sizes[i]]; !bytes.Equal(got, want) {
			t.Errorf("v6 %v: packet %d is\n%x, want\n%x", v6, i, got, want)
		}
	}
}

// Nonsense before a GSO packet of UDP is noticed, whatever it is.
func FuzzDatagrams(f *testing.F) {
	whole := datagram(false, 9, 1, make([]byte, 300))
	f.Add([]byte{1, 5, 28, 0, 100, 0, 20, 0, 6, 0}, whole)
	f.Add([]byte{1, 5, 48, 0, 100, 0, 40, 0, 6, 0}, datagram(true, 9, 1, make([]byte, 300)))
	f.Add([]byte{1, 5, 48, 0, 1, 0, 40, 0, 6, 0}, []byte{0x60})
	f.Fuzz(func(t *testing.T, hdr, p []byte) {
		if len(hdr) < vnetLen || len(p) == 0 || len(p) > maxTotal {
			return
		}
		h := [vnetLen]byte(hdr)
		h[1] = vnetUDP
		l, ok := asLarge(&h, bytes.Clone(p))
		if !ok {
			return
		}
		buf, octets := make([]byte, maxTotal+1), 0
		for i := 0; l.more(); i++ {
			n := l.next(buf)
			if n < l.head || n > l.head+l.size {
				t.Fatalf("packet %d has %d octets, want %d at most", i, n, l.head+l.size)
			}
			octets += n - l.head
		}
		if want := len(p) - l.head; octets != want {
			t.Errorf("%d octets of payload, want %d", octets, want)
		}
	})
}

// UDP arrives one datagram at a time, as it was sent, with and without GSO packets; with
// them most of it crosses the TUN in a few.
func TestDatagrams(t *testing.T) {
	for _, off := range []bool{false, true} {
		for _, dst := range []string{"10.7.0.2", "fd07::2"} {
			j := newJoint(t, 1500, Options{NoDatagrams: off, trial: says(nil, nil)})
			in, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(dst)})
			if err != nil {
				t.Fatal(err)
			}
			in.SetReadBuffer(1 << 20)
			j.wait(t, in)
			in.SetReadDeadline(time.Now().Add(patience))
			base := j.a.Datagrams().Split
			const calls, each, size = 40, 10, 700
			sent := make(chan error, 1)
			go func() { sent <- j.datagrams(in.LocalAddr().(*net.UDPAddr), calls, each, size) }()
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 65536)
			for i := range calls * each {
				n, err := in.Read(buf)
				if err != nil {
					t.Fatalf("off %v, %s, datagram %d: %v", off, dst, i, err)
				}
				expect.MustEqual(t, n, size, "off %v, %s: length of datagram %d", off, dst, i)
				expect.MustEqual(t, int(binary.BigEndian.Uint32(buf)), i, "off %v, %s: number of datagram %d", off, dst, i)
			}
			in.Close()
			a, b := j.a.Datagrams(), j.b.Datagrams()
			if off && a.Split+b.Written != 0 {
				t.Errorf("%s: %d split and %d written, want none", dst, a.Split, b.Written)
			}
			if n := a.Split - base; !off && n != calls {
				t.Errorf("%s: %d split, want %d", dst, n, calls)
			}
			if !off {
				checkMerged(t, dst, b.Merged, b.Written)
			}
			if n := j.a.Segments().Malformed + j.b.Checksums().Wrong; n != 0 {
				t.Errorf("%s: %d packets were malformed or wrong, want none", dst, n)
			}
			j.a.Close()
			j.b.Close()
		}
	}
}

// checkMerged checks that datagrams came together in GSO packets.
func checkMerged(t *testing.T, dst string, datagrams, packets uint64) {
	t.Helper()
	if packets == 0 {
		t.Fatalf("%s: no GSO packet, want some", dst)
	}
	if datagrams < 4*packets {
		t.Errorf("%s: %d datagrams in %d GSO packets, want four in each at least", dst, datagrams, packets)
	}
}

// wait returns when datagrams arrive: addresses may take a moment.
func (j joint) wait(t *testing.T, in *net.UDPConn) {
	t.Helper()
	buf := make([]byte, 10)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if err := j.datagrams(in.LocalAddr().(*net.UDPAddr), 1, 1, 5); err != nil {
			t.Fatal(err)
		}
		in.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		if n, err := in.Read(buf); err == nil && n == 5 {
			for err == nil { // those that were late
				_, err = in.Read(buf)
			}
			return
		}
	}
	t.Fatal("no datagram arrives")
}

// datagrams sends from a, several in each call.
func (j joint) datagrams(to *net.UDPAddr, calls, each, size int) error {
	return j.inside(func() error {
		c, err := net.DialUDP("udp", nil, to)
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
		})
		for i := 0; err == nil && i < calls; i++ {
			b := make([]byte, each*size)
			for k := range each {
				binary.BigEndian.PutUint32(b[k*size:], uint32(i*each+k))
			}
			_, err = c.Write(b)
			time.Sleep(time.Millisecond) // so that no queue is full
		}
		return err
	})
}

// Where the kernel does not take a GSO packet of UDP, its datagrams go one by one, as
// they were, and no more are put together. TCP is not concerned.
func TestDatagramsRefused(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	// A datagram longer than the buffer does not pass.
	if err := unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_SNDBUF, 4096); err != nil {
		t.Fatal(err)
	}
	f := &File{fd: fds[0], ended: -1}
	f.csum.on = true
	f.tso.on.Store(true)
	f.uso.on.Store(true)
	var bufs, want, got [][]byte
	for i := range 20 {
		p := datagram(false, 9, uint16(i), random(1000))
		bufs, want = append(bufs, p), append(want, bytes.Clone(p))
	}
	for len(bufs) > 0 {
		n, e := f.write(bufs)
		if e != 0 || n != 1 {
			t.Fatalf("%d written, %v, want one", n, e)
		}
		bufs = bufs[1:]
		b := make([]byte, 32768)
		k, _, err := unix.Recvfrom(fds[1], b, 0)
		if err != nil {
			t.Fatal(err)
		}
		h, p := [vnetLen]byte(b), b[vnetLen:k]
		var c csums
		expect.MustEqual(t, h[1], 0, "GSO type")
		if !c.complete(&h, p) {
			t.Fatalf("header %x makes no sense", h)
		}
		got = append(got, p)
	}
	unix.Close(fds[0])
	if !slices.EqualFunc(got, want, bytes.Equal) {
		t.Error("other packets arrived")
	}
	if d := f.Datagrams(); d.Why == "" || d.Written != 0 {
		t.Errorf("%d written, why %q, want none and a reason", d.Written, d.Why)
	}
	if f.tso.noMerge.Load() {
		t.Error("TCP is not put together any more either")
	}
}

// Nothing is allocated for a GSO packet of UDP, in either direction.
func TestDatagramsNoAllocs(t *testing.T) {
	f := open(t, Options{trial: says(nil, nil)})
	var h [vnetLen]byte
	copy(h[:], []byte{1, vnetUDP})
	binary.NativeEndian.PutUint16(h[4:], 1000)
	binary.NativeEndian.PutUint16(h[6:], 20)
	binary.NativeEndian.PutUint16(h[8:], udpSum)
	whole := datagram(false, 9, 1, random(20000))
	bufs, sizes := buffers(32)
	if n := testing.AllocsPerRun(100, func() {
		if n := f.tso.take(&h, copy(bufs[0], whole), bufs, sizes); n != 20 {
			t.Fatal(fmt.Sprint(n, " packets, want 20"))
		}
	}); n > 0 {
		t.Errorf("%v allocations for one from the kernel, want 0", n)
	}
	in := make([][]byte, 32)
	for i := range in {
		in[i] = datagram(false, 9, uint16(i), random(200))
	}
	out := make([][]byte, len(in))
	for i := range out {
		out[i] = make([]byte, len(in[i]))
	}
	n := testing.AllocsPerRun(100, func() {
		for i := range out {
			copy(out[i], in[i])
		}
		if n, err := f.Write(out); n != len(out) || err != nil {
			t.Fatal(n, err)
		}
	})
	switch d := f.Datagrams(); {
	case n > 0:
		t.Errorf("n is %v, want 0", n)
	case d.Written == 0:
		t.Errorf("0 GSO packets were written, want some")
	case d.Merged != 32*d.Written:
		t.Errorf("Merged is %v, want %v", d.Merged, 32*d.Written)
	}
}
