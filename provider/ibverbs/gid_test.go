package ibverbs

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
)

func gid(s string) ib.GID { return ib.GIDFromAddr(netip.MustParseAddr(s)) }

// table is that of a port whose netdev 3 has two addresses of each family, with
// entries that are nobody's business between them.
var table = []gidEntry{
	{gid("fe80::9"), 0, 1, gidRoCE1, 3},
	{gid("10.0.0.1"), 1, 1, gidRoCE2, 3},
	{gid("2001:db8::1"), 2, 1, gidRoCE2, 3},
	{gid("fe80::2"), 3, 1, gidRoCE2, 4}, // a VLAN's
	{gid("fe80::9"), 4, 1, gidRoCE2, 3},
	{gid("fe80::9"), 5, 1, gidRoCE2, 3}, // twice
	{gid("10.0.0.2"), 6, 1, gidRoCE2, 3},
	{ib.GID{}, 7, 1, gidRoCE2, 3},
	{gid("fe80::a"), 8, 1, gidIB, 3},
}

func TestChooseGIDs(t *testing.T) {
	for _, tt := range []struct {
		name         string
		ifindex      int
		only, prefer ib.GID
		want         []ib.GID
	}{
		{"link-local first, IPv4 last", 3, ib.GID{}, ib.GID{},
			[]ib.GID{gid("fe80::9"), gid("2001:db8::1"), gid("10.0.0.1"), gid("10.0.0.2")}},
		{"the one in use stays first", 3, ib.GID{}, gid("10.0.0.2"),
			[]ib.GID{gid("10.0.0.2"), gid("fe80::9"), gid("2001:db8::1"), gid("10.0.0.1")}},
		{"the one in use has gone", 3, ib.GID{}, gid("10.0.0.3"),
			[]ib.GID{gid("fe80::9"), gid("2001:db8::1"), gid("10.0.0.1"), gid("10.0.0.2")}},
		{"only one is wanted", 3, gid("10.0.0.1"), ib.GID{}, []ib.GID{gid("10.0.0.1")}},
		{"only RoCE v2 counts", 3, gid("fe80::a"), ib.GID{}, nil},
		{"another network device", 4, ib.GID{}, ib.GID{}, []ib.GID{gid("fe80::2")}},
		{"none", 5, ib.GID{}, ib.GID{}, nil},
	} {
		if got := chooseGIDs(table, tt.ifindex, tt.only, tt.prefer).gids(); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestWithAddress(t *testing.T) {
	got := withAddress(table, []ib.GID{gid("10.0.0.1"), gid("fe80::2")})
	expect.MustEqual(t, len(got), 2, "length of got")
	expect.Equal(t, got[0].index, 1, "got[0].index")
	expect.Equal(t, got[1].index, 3, "got[1].index")
	if len(table) != 9 {
		t.Error("the table itself has changed")
	}
}

func TestSourceGID(t *testing.T) {
	own := chooseGIDs(table, 3, ib.GID{}, ib.GID{})
	for _, tt := range []struct {
		name     string
		gid, dst ib.GID
		index    int // -1: none
	}{
		{"by address", gid("10.0.0.2"), gid("10.0.0.9"), 6},
		{"by the destination's family, IPv6", ib.GID{}, gid("fe80::1"), 4},
		{"by the destination's family, IPv4", ib.GID{}, gid("10.0.0.9"), 1},
		{"not ours", gid("10.0.0.3"), gid("10.0.0.9"), -1},
	} {
		e, ok := own.source(tt.gid, tt.dst)
		expect.Equal(t, ok, tt.index >= 0, "%s: ok", tt.name)
		if ok {
			expect.Equal(t, e.index, tt.index, "%s: index", tt.name)
		}
	}
	g, ok := own.at(6)
	expect.Equal(t, ok, true, "whether there is a GID at 6")
	expect.Equal(t, g, gid("10.0.0.2"), "GID at 6")
	if g, ok := own.at(8); ok {
		t.Errorf("GID at 8 is %v: it is not for us", g)
	}
}

// TestFind looks for devices and their nodes in a copy of sysfs.
func TestFind(t *testing.T) {
	class := t.TempDir()
	for name, text := range map[string]string{
		"mlx5_0/ports/1/gid_attrs/ndevs/0": "eth0\n", "mlx5_0/ports/1/gid_attrs/ndevs/1": "eth0.5\n",
		"mlx5_0/ports/1/gid_attrs/ndevs/2": "",
		"rxe0/ports/1/gid_attrs/ndevs/0":   "eth1\n",
		"umad0/ibdev":                      "mlx5_0\n", "umad0/port": "1\n", "umad1/ibdev": "mlx5_0\n", "umad1/port": "2\n",
		"umad2/ibdev": "rxe0\n", "umad2/port": "1\n",
	} {
		file := filepath.Join(class, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for netdev, want := range map[string]string{"eth0": "mlx5_0", "eth0.5": "mlx5_0", "eth1": "rxe0", "eth2": "", "": ""} {
		if got := deviceByGIDs(class, netdev); netdev != "" && got != want {
			t.Errorf("device of %s is %q, want %q", netdev, got, want)
		}
	}
	for _, tt := range []struct {
		device string
		port   int
		want   string // "": an error
	}{
		{"mlx5_0", 1, "/dev/infiniband/umad0"}, {"mlx5_0", 2, "/dev/infiniband/umad1"},
		{"rxe0", 1, "/dev/infiniband/umad2"}, {"rxe0", 2, ""},
	} {
		if got, err := findUMAD(class, tt.device, tt.port); got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("umad node of %s port %d: %q, %v; want %q", tt.device, tt.port, got, err, tt.want)
		}
	}
	for device, want := range map[string]string{"rxe0": "eth1", "mlx5_0": "eth0", "rxe1": ""} {
		if got := netdevOf(class, device); got != want {
			t.Errorf("network device of %s is %q, want %q", device, got, want)
		}
	}
	if name, err := findDevice("no such device"); err == nil {
		t.Errorf("a network device that is not there belongs to %s", name)
	}
}
