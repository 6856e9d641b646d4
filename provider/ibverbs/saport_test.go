package ibverbs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// saMADs are what is sent, and the header that the kernel is to see.
var saMADs = []struct {
	name string
	mad  SAMAD
	want umadHeader
}{
	{"by LID", SAMAD{LID: 3, SL: 2, QPN: 1, QKey: ib.QKeyGSI},
		umadHeader{agent: 7, timeout: 800, length: 320, qpn: 1, qkey: ib.QKeyGSI, lid: 3, sl: 2}},
	{"with a GRH, in a partition", SAMAD{LID: 3, QPN: 1, QKey: ib.QKeyGSI, PKey: 0x8001, GID: gid("fe80::1"),
		FlowLabel: 5, TrafficClass: 6},
		umadHeader{agent: 7, timeout: 800, length: 320, qpn: 1, qkey: ib.QKeyGSI, lid: 3, grh: true, hops: 64, class: 6,
			gid: gid("fe80::1"), flow: 5, pkeyIdx: 2}},
}

// TestSAPort speaks to a port as ib_umad does.
func TestSAPort(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	kernel := os.NewFile(uintptr(fds[1]), "kernel")
	defer kernel.Close()
	keys := []ib.PKey{0xffff, 0, 0x8001}
	p := newSAPort(os.NewFile(uintptr(fds[0]), "umad"), 7, func() []ib.PKey { return keys })

	buf := make([]byte, 1000)
	for _, tt := range saMADs {
		tt.mad.Data = [verbs.MADLen]byte{1, 3, 2, 1}
		if err := p.SendSubnet(&tt.mad, 800*time.Millisecond); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		kernel.SetReadDeadline(time.Now().Add(10 * time.Second))
		n, err := kernel.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		var got umadHeader
		if err := got.UnmarshalBinary(buf[:n]); err != nil || got != tt.want {
			t.Errorf("%s: the kernel is told %+v (%v), want %+v", tt.name, got, err, tt.want)
		}
		if data := buf[umadHeaderLen:n]; string(data) != string(tt.mad.Data[:]) {
			t.Errorf("%s: the kernel is given the MAD %x", tt.name, data)
		}
		// And back: what the kernel has written comes out as it went in.
		got.timeout = 0
		got.put(buf[:umadHeaderLen])
		if _, err := kernel.Write(buf[:n]); err != nil {
			t.Fatal(err)
		}
		back, want := <-p.SubnetMADs(), tt.mad
		want.PKey = keys[tt.want.pkeyIdx]
		if *back != want {
			t.Errorf("%s: received %+v, want %+v", tt.name, back, want)
		}
	}
	if err := p.SendSubnet(&SAMAD{LID: 3, QPN: 1, PKey: 0x8005}, time.Second); err == nil {
		t.Error("a MAD was sent in a partition that the port is not in")
	}

	// A question that nobody has answered comes back with a status.
	late := umadHeader{agent: 7, status: uint32(unix.ETIMEDOUT), length: 320}
	late.put(buf[:umadHeaderLen])
	if _, err := kernel.Write(buf[:umadHeaderLen+verbs.MADLen]); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); p.Dropped() == 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if n := p.Dropped(); n != 1 {
		t.Errorf("%d dropped, want the one that had a status", n)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, open := <-p.SubnetMADs(); open {
		t.Error("something came in")
	}
}

// TestIBPorts reads a tree as the kernel has it, with a hole in the P_Key table.
func TestIBPorts(t *testing.T) {
	class := t.TempDir()
	for name, text := range map[string]string{
		"mlx5_0/ports/1/link_layer": "InfiniBand", "mlx5_0/ports/1/state": "4: ACTIVE", "mlx5_0/ports/1/lid": "0x12",
		"mlx5_0/ports/1/sm_lid": "0x1",
		"mlx5_0/ports/1/sm_sl":  "3", "mlx5_0/ports/1/rate": "10 Gb/sec (4X SDR)",
		"mlx5_0/ports/1/gids/0":  "fe80:0000:0000:0000:0002:c903:0000:1234",
		"mlx5_0/ports/1/pkeys/0": "0xffff", "mlx5_0/ports/1/pkeys/1": "0x0000", "mlx5_0/ports/1/pkeys/2": "0x8001",
		"mlx5_0/ports/1/pkeys/3":    "0x0000",
		"mlx5_0/ports/2/link_layer": "Ethernet", "mlx5_0/ports/2/state": "4: ACTIVE",
	} {
		file := filepath.Join(class, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := ibPorts(class, "mlx5_0")
	if len(got) != 1 {
		t.Fatalf("%d ports, want the one that is InfiniBand: %+v", len(got), got)
	}
	p := got[0]
	if want := []ib.PKey{0xffff, 0, 0x8001}; !slices.Equal(p.PKeys, want) {
		t.Errorf("P_Keys %v, want %v", p.PKeys, want)
	}
	p.PKeys = nil
	want := IBPort{Device: "mlx5_0", Port: 1, State: "ACTIVE", LID: 0x12, SMLID: 1, SMSL: 3,
		GID: gid("fe80::2:c903:0:1234"), Rate: "10 Gb/sec (4X SDR)"}
	if fmt.Sprintf("%+v", p) != fmt.Sprintf("%+v", want) {
		t.Errorf("got %+v, want %+v", p, want)
	}
}
