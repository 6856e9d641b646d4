package ibverbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// TestUMADHeader compares with struct ib_user_mad_hdr octet by octet.
func TestUMADHeader(t *testing.T) {
	h := umadHeader{agent: 3, timeout: 0x205, length: 320, qpn: 1, qkey: ib.QKeyGSI, lid: 0x1234, sl: 7, grh: true,
		gidIdx: 5, hops: 64, class: 9,
		gid: gid("10.0.0.1"), flow: 0xabcde, pkeyIdx: 2}
	want := make([]byte, 64)
	want[0], want[16], want[17] = 3, 0x40, 1           // in the host's order
	copy(want[20:], []byte{0, 0, 0, 1, 0x80, 1, 0, 0}) // in the network's
	want[8], want[9] = 5, 2
	want[28], want[29], want[30], want[35] = 0x12, 0x34, 7, 9
	want[32], want[33], want[34], want[56] = 1, 5, 64, 2
	want[53], want[54], want[55] = 0xa, 0xbc, 0xde
	copy(want[46:], []byte{0xff, 0xff, 10, 0, 0, 1})
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the order of octets here is not the one the test knows")
	}
	got := bytes.Repeat([]byte{0xee}, 64)
	if h.put(got); !bytes.Equal(got, want) {
		t.Errorf("\n got %x\nwant %x", got, want)
	}
}

func FuzzUMADHeader(f *testing.F) {
	whole := make([]byte, umadHeaderLen)
	(&umadHeader{agent: 1, qpn: 1, qkey: ib.QKeyGSI, grh: true, gid: gid("fe80::1")}).put(whole)
	f.Add(whole)
	f.Add(whole[:63])
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b umadHeader
		if a.UnmarshalBinary(in) != nil {
			return
		}
		var out [umadHeaderLen]byte
		a.put(out[:])
		if err := b.UnmarshalBinary(out[:]); err != nil || a != b {
			t.Fatalf("round trip: %+v, then %+v (%v)\n in %x", a, b, err, in)
		}
	})
}

// TestMADPort speaks to a port as ib_umad does.
func TestMADPort(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	kernel := os.NewFile(uintptr(fds[1]), "kernel")
	defer kernel.Close()
	own := chooseGIDs(table, 3, ib.GID{}, ib.GID{})
	keys := []ib.PKey{0xffff, 0x8005}
	m := newMADPort(os.NewFile(uintptr(fds[0]), "umad"), 7, false, func() gidTable { return own },
		func() []ib.PKey { return keys }, [4]uint64{}, slog.New(slog.DiscardHandler))
	defer m.close()

	sendMADs(t, m, kernel)
	receiveMADs(t, m, kernel)
	floodMADs(t, m, kernel)
	m.close()
	if err := m.SendMAD(&verbs.MAD{Remote: gid("10.0.0.9")}); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("sent after close: %v", err)
	}
	for range m.MADs() { // it is closed, so this ends
	}
}

// sendMADs: the GID and P_Key indexes that the kernel is given.
func sendMADs(t *testing.T, m *madPort, kernel *os.File) {
	t.Helper()
	buf := make([]byte, 1000)
	for _, tt := range []struct {
		name         string
		mad          verbs.MAD
		index, pkeys int
	}{
		{"the family's default", verbs.MAD{Remote: gid("10.0.0.9"), QPN: 1}, 1, 0},
		{"an address of ours, another P_Key", verbs.MAD{Remote: gid("10.0.0.9"), Local: gid("10.0.0.2"), QPN: 1,
			PKey: 0x8005}, 6, 1},
		{"IPv6", verbs.MAD{Remote: gid("fe80::1"), QPN: 0x12345}, 4, 0},
	} {
		tt.mad.Data = [verbs.MADLen]byte{1, 7, 2, 3}
		if err := m.SendMAD(&tt.mad); err != nil {
			t.Fatal(err)
		}
		kernel.SetReadDeadline(time.Now().Add(10 * time.Second))
		n, err := kernel.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		var h umadHeader
		if err := h.UnmarshalBinary(buf[:n]); err != nil {
			t.Fatal(err)
		}
		want := umadHeader{agent: 7, length: 320, qpn: tt.mad.QPN, qkey: ib.QKeyGSI, grh: true, gidIdx: uint8(tt.index),
			hops: 64, gid: tt.mad.Remote, pkeyIdx: uint16(tt.pkeys)}
		if h != want || !bytes.Equal(buf[umadHeaderLen:n], tt.mad.Data[:]) {
			t.Errorf("%s:\n got %+v\nwant %+v", tt.name, h, want)
		}
	}
	if err := m.SendMAD(&verbs.MAD{Remote: gid("10.0.0.9"), Local: gid("10.0.0.3")}); err != nil {
		t.Fatal(err) // an address that is not ours: refused, but later
	}
}

// fromAsker heads a MAD that asks us.
var fromAsker = umadHeader{agent: 7, qpn: 0x77, grh: true, gid: gid("10.0.0.9"), gidIdx: 6, pkeyIdx: 1}

// inMAD is what the kernel hands up: h, and tail octets of a MAD.
func inMAD(h umadHeader, tail int) []byte {
	b := make([]byte, umadHeaderLen+tail)
	h.put(b)
	copy(b[umadHeaderLen:], []byte{1, 7, 2, 3})
	return b
}

// receiveMADs: of four that cannot be and one that can, the one comes in.
func receiveMADs(t *testing.T, m *madPort, kernel *os.File) {
	t.Helper()
	from := fromAsker
	bad, noGRH := from, from
	bad.status, noGRH.grh = uint32(unix.ETIMEDOUT), false
	for _, b := range [][]byte{inMAD(bad, 256), inMAD(noGRH, 256), inMAD(from, 24), []byte("short"), inMAD(from, 256)} {
		if _, err := kernel.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case d := <-m.MADs():
		expect.Equal(t, d.Remote, from.gid, "Remote")
		expect.Equal(t, d.Local, gid("10.0.0.2"), "Local")
		expect.Equal(t, d.QPN, 0x77, "QPN")
		expect.Equal(t, d.PKey, 0x8005, "PKey")
		expect.Equal(t, d.Data[3], 3, "Data[3]")
	case <-time.After(10 * time.Second):
		t.Fatal("nothing comes in")
	}
	// What counts a MAD that was sent does so when the write is over, on its goroutine.
	for end := time.Now().Add(10 * time.Second); m.sent.Load()+m.refused.Load() < 4 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	expect.Equal(t, m.dropped.Load(), 4, "dropped")
	expect.Equal(t, m.refused.Load(), 1, "refused")
	expect.Equal(t, m.sent.Load(), 3, "sent")
}

// floodMADs: of a flood of those that ask some are turned away, and the port stays up.
func floodMADs(t *testing.T, m *madPort, kernel *os.File) {
	t.Helper()
	for range 500 {
		b := inMAD(fromAsker, 256)
		if _, err := kernel.Write(b); errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	end := time.Now().Add(10 * time.Second)
	for m.flood.Load() == 0 && time.Now().Before(end) {
		time.Sleep(time.Millisecond)
	}
	if m.flood.Load() == 0 {
		t.Error("nothing of a flood was turned away")
	}
}

// TestOpenMADs opens what is no umad node.
func TestOpenMADs(t *testing.T) {
	for _, node := range []string{"/dev/null", "/no/such/node"} {
		if m, err := openMADs(node, false, nil, nil, [4]uint64{}, nil); err == nil {
			m.close()
			t.Errorf("%s is a umad node", node)
		}
	}
	switch r := umadRequest(cmClass, cmVersion, 1<<cmMethod); {
	case r[4] != 1<<cmMethod && r[4+longLen-1] != 1<<cmMethod:
		t.Errorf("registration is %x", r)
	case r[20] != 1:
		t.Errorf("r[20] is %v, want 1", r[20])
	case r[21] != cmClass:
		t.Errorf("r[21] is %v, want %v", r[21], cmClass)
	case r[22] != cmVersion:
		t.Errorf("r[22] is %v, want %v", r[22], cmVersion)
	}
}
