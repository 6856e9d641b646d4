package ibverbs

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"log/slog"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// The GIDs of an InfiniBand port are those of its own table, of its own kind.
func TestChooseIB(t *testing.T) {
	all := []gidEntry{
		{gid: gid("fe80::1"), port: 1, kind: gidIB},
		{gid: gid("fe80::2"), port: 2, kind: gidIB},
		{gid: gid("fec0::1"), index: 1, port: 1, kind: gidIB},
		{gid: gid("fe80::3"), index: 2, port: 1, kind: gidRoCE2},
		{index: 3, port: 1, kind: gidIB},
	}
	for _, tt := range []struct {
		name string
		port int
		only ib.GID
		want []ib.GID
	}{
		{"in the order of the table", 1, ib.GID{}, []ib.GID{gid("fe80::1"), gid("fec0::1")}},
		{"the other port", 2, ib.GID{}, []ib.GID{gid("fe80::2")}},
		{"one that was asked for", 1, gid("fec0::1"), []ib.GID{gid("fec0::1")}},
		{"one that is not there", 1, gid("fec0::9"), nil},
	} {
		if got := chooseIB(all, tt.port, tt.only).gids(); !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

// Each change of an InfiniBand port is told by its own event, and nothing else is.
func TestInfiniBandEvents(t *testing.T) {
	base := verbs.Port{InfiniBand: true, Active: true, GIDs: []ib.GID{gid("fe80::1")}, LID: 4, SMLID: 1,
		PKeys: []ib.PKey{0xffff}, MTU: ib.MTU2048}
	for _, tt := range []struct {
		name   string
		change func(*verbs.Port)
		want   []verbs.EventKind
	}{
		{"nothing", func(*verbs.Port) {}, nil},
		{"down", func(p *verbs.Port) { p.Active = false }, []verbs.EventKind{verbs.PortError}},
		{"another LID", func(p *verbs.Port) { p.LID = 5 }, []verbs.EventKind{verbs.LIDChange}},
		{"another subnet manager", func(p *verbs.Port) { p.SMLID = 9 }, []verbs.EventKind{verbs.SMChange}},
		{"another SL of it", func(p *verbs.Port) { p.SMSL = 2 }, []verbs.EventKind{verbs.SMChange}},
		{"a P_Key goes", func(p *verbs.Port) { p.PKeys = nil }, []verbs.EventKind{verbs.PKeyChange}},
		{"another subnet prefix", func(p *verbs.Port) { p.GIDs = []ib.GID{gid("fec0::1")} },
			[]verbs.EventKind{verbs.GIDChange}},
		{"another MTU", func(p *verbs.Port) { p.MTU = ib.MTU4096 }, []verbs.EventKind{verbs.MTUChange}},
	} {
		now := base
		tt.change(&now)
		var got []verbs.EventKind
		for _, ev := range portEvents(&base, &now) {
			got = append(got, ev.Kind)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
	if got := asyncOf(evReregister); got != asyncRegister {
		t.Errorf("client reregister: got action %d, want %d", got, asyncRegister)
	}
}

// The kernel's own IPoIB interfaces, by port and partition.
func TestKernelIPoIB(t *testing.T) {
	dir := t.TempDir()
	for name, files := range map[string]map[string]string{
		"ib0":      {"type": "32", "dev_port": "0x0", "pkey": "0xffff"},
		"ib0.8001": {"type": "32", "dev_port": "0x0", "pkey": "0x8001"},
		"ib1":      {"type": "32", "dev_port": "0x1", "pkey": "0xffff"},
		"eth0":     {"type": "1", "dev_port": "0"},
	} {
		d := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Join(d, "device/infiniband/mlx5_0"), 0o755); err != nil {
			t.Fatal(err)
		}
		for f, text := range files {
			if err := os.WriteFile(filepath.Join(d, f), []byte(text+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tt := range []struct {
		device string
		port   int
		pkey   ib.PKey
		want   []string
	}{
		{"mlx5_0", 1, 0xffff, []string{"ib0"}},
		{"mlx5_0", 1, 0x7fff, []string{"ib0"}}, // membership does not matter
		{"mlx5_0", 1, 0x8001, []string{"ib0.8001"}},
		{"mlx5_0", 2, 0xffff, []string{"ib1"}},
		{"mlx5_0", 2, 0x8001, nil},
		{"mlx5_1", 1, 0xffff, nil},
	} {
		if got := kernelIPoIB(dir, tt.device, tt.port, tt.pkey); !slices.Equal(got, tt.want) {
			t.Errorf("%s port %d, P_Key %v: got %v, want %v", tt.device, tt.port, tt.pkey, got, tt.want)
		}
	}
}

// CM messages of an InfiniBand port go by LID, SL and, where the path has one, GRH; what
// comes in says the way back.
func TestMADPortOnInfiniBand(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	kernel := os.NewFile(uintptr(fds[1]), "kernel")
	defer kernel.Close()
	own := gidTable{{gid: gid("fe80::a"), port: 1, kind: gidIB}}
	m := newMADPort(os.NewFile(uintptr(fds[0]), "umad"), 7, true, func() gidTable { return own },
		func() []ib.PKey { return []ib.PKey{0xffff, 0x8005} }, [4]uint64{}, slog.New(slog.DiscardHandler))
	defer m.close()
	buf := make([]byte, 1000)
	for _, tt := range []struct {
		name string
		path verbs.Path
		want umadHeader // to the kernel
	}{
		{"by LID", verbs.Path{DLID: 6, SL: 3}, umadHeader{lid: 6, sl: 3}},
		{"with a GRH", verbs.Path{DLID: 6, SL: 3, GRH: true, HopLimit: 9, TrafficClass: 5, FlowLabel: 4},
			umadHeader{lid: 6, sl: 3, grh: true, gid: gid("fe80::b"), hops: 9, class: 5, flow: 4}},
	} {
		out := verbs.MAD{Remote: gid("fe80::b"), QPN: 1, PKey: 0x8005, Path: tt.path, Data: [verbs.MADLen]byte{1, 7, 2, 3}}
		if err := m.SendMAD(&out); err != nil {
			t.Fatal(err)
		}
		kernel.SetReadDeadline(time.Now().Add(10 * time.Second))
		n, err := kernel.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		var got umadHeader
		tt.want.agent, tt.want.qpn, tt.want.qkey, tt.want.length, tt.want.pkeyIdx = 7, 1, ib.QKeyGSI, 320, 1
		if err := got.UnmarshalBinary(buf[:n]); err != nil || got != tt.want {
			t.Errorf("%s: the kernel is told %+v (%v)\nwant %+v", tt.name, got, err, tt.want)
		}
		if _, err := kernel.Write(buf[:n]); err != nil { // as if the peer answered
			t.Fatal(err)
		}
		in := <-m.MADs()
		want := tt.path
		want.SGID = gid("fe80::a")
		if tt.path.GRH {
			want.DGID = gid("fe80::b")
		}
		if in.Path != want {
			t.Errorf("%s: the way back is %+v\nwant %+v", tt.name, in.Path, want)
		}
		if in.Remote != want.DGID {
			t.Errorf("%s: it comes from %v, want %v", tt.name, in.Remote, want.DGID)
		}
		if in.PKey != 0x8005 {
			t.Errorf("%s: P_Key %v, want 0x8005", tt.name, in.PKey)
		}
	}
}
