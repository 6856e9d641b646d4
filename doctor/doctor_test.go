package doctor

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
)

func gid(s string) ib.GID { return ib.GIDFromAddr(netip.MustParseAddr(s)) }

// fine is a host where nothing is wrong.
func fine() Facts {
	return Facts{
		Kernel: "6.1.0-35-amd64", Name: "ibcm0", Underlay: "eth0", Provider: "softroce", UDMTU: 2044,
		CMTransport: "auto", NetAdmin: Yes, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")},
		ControlPath: "/run/ipoibcm/ibcm0.sock", Device: &Device{Up: true, MTU: 9000, Driver: "veth", SpeedMbps: 10000,
			Addrs:    []Addr{{IP: netip.MustParseAddr("192.0.2.1")}, {IP: netip.MustParseAddr("fe80::1")}},
			Features: []string{"rx-gro", "tx-checksum-ip-generic", "tx-udp-segmentation"}},
		Opened: true, Open: Open{GIDs: []ib.GID{gid("fe80::1"), gid("192.0.2.1")}, QP1: true, RecvAsked: 16,
			RecvGot: 16, SendAsked: 4, SendGot: 4},
		Loopback: true, LocalGuard: Yes, IBCM: No, Demo: Yes, Rules: ruleset(), Members: "dns://link", MemberCount: 2,
	}
}

// unopened says that the provider cannot be opened.
func unopened(f *Facts, why string) { f.OpenErr, f.Open = why, Open{} }

// examinations are the cases of TestExamine.
var examinations = []struct {
	name   string
	change func(f *Facts)
	check  string
	status string
	says   string // in detail or remedy
}{
	{"nothing", func(*Facts) {}, GID, control.CheckOK, "fe80::1, chosen by address"},
	{"kernel", func(*Facts) {}, Kernel, control.CheckOK, "Linux 6.1.0-35-amd64; 5.10 is the oldest"},
	{"the oldest kernel", func(f *Facts) { f.Kernel = "5.10.0-35-amd64" }, Kernel, control.CheckOK,
		"Linux 5.10.0-35-amd64"},
	{"a kernel that is almost good enough", func(f *Facts) { f.Kernel = "5.9.16" }, Kernel, control.CheckWarn,
		"than the oldest that is tested, 5.10"},
	{"an older kernel", func(f *Facts) { f.Kernel = "4.19.0-27-amd64" }, Kernel, control.CheckWarn, "no UDP_GRO"},
	{"a kernel without a version", func(f *Facts) { f.Kernel = "" }, Kernel, control.CheckSkipped, "cannot be read"},
	{"no node", func(f *Facts) { f.TUN, f.TUNErr = TUNNoNode, "x" }, TUN, control.CheckFail, "modprobe tun"},
	{"denied", func(f *Facts) { f.TUN, f.TUNErr = TUNDenied, "x" }, TUN, control.CheckFail, "CAP_NET_ADMIN"},
	{"a TUN that was made before", func(f *Facts) { f.TUN = TUNThere }, TUN, control.CheckOK, "run uses it"},
	{"name in use", func(f *Facts) { f.TUN = TUNBusy }, TUN, control.CheckFail, "--name"},
	{"TUN fails", func(f *Facts) { f.TUN, f.TUNErr = TUNFailed, "out of memory" }, TUN, control.CheckFail,
		"out of memory"},
	{"no capability", func(f *Facts) { f.NetAdmin = No }, Capabilities, control.CheckFail, "root"},
	{"capability unknown", func(f *Facts) { f.NetAdmin = Unknown }, Capabilities, control.CheckSkipped, ""},
	{"no such namespace", func(f *Facts) { f.TUN, f.TUNErr = TUNNoNamespace, "no such file" }, TUN,
		control.CheckFail, "ip netns"},
	{"settings refused", func(f *Facts) { f.SettingErrs = []string{"address fd00::1/64: permission denied"} },
		Settings, control.CheckFail, "disable_ipv6"},
	{"settings that run goes without", func(f *Facts) { f.ReadOnly = []string{"accept_ra_mtu=0"} }, Settings,
		control.CheckWarn, "/proc/sys"},
	{"same prefix", func(f *Facts) {
		f.Device.Addrs = append(f.Device.Addrs, Addr{IP: netip.MustParseAddr("10.0.0.9")})
	}, Settings, control.CheckWarn, "two routes"},
	{"an agent there", func(f *Facts) { f.Control = ControlServed }, Control, control.CheckFail, "ipoibcmd status"},
	{"no directory", func(f *Facts) { f.Control, f.ControlErr = ControlFailed, "read-only" }, Control,
		control.CheckFail, "read-only"},
	{"no device", func(f *Facts) { f.Device = nil; unopened(f, "x") }, Underlay, control.CheckFail, "ipoibcmd devices"},
	{"down", func(f *Facts) {
		f.Device.Up = false
		unopened(f, "x")
	}, Underlay, control.CheckFail, "ip link set eth0 up"},
	{"no address", func(f *Facts) { f.Device.Addrs = nil; unopened(f, "x") }, Address, control.CheckFail, "ip addr add"},
	{"tentative only", func(f *Facts) {
		f.Device.Addrs = []Addr{{IP: netip.MustParseAddr("fe80::1"), Tentative: true}}
		unopened(f, "x")
	}, Address, control.CheckFail, "fe80::1 is tentative"},
	{"a duplicate", func(f *Facts) {
		f.Device.Addrs = []Addr{{IP: netip.MustParseAddr("fe80::1"), DADFailed: true}}
		unopened(f, "x")
	}, Address, control.CheckFail, "duplicate"},
	{"became usable", func(f *Facts) { f.Device.Addrs[1].Tentative = true }, Address, control.CheckOK, "fe80::1"},
	{"another GID", func(f *Facts) { f.GID = gid("fe80::2"); unopened(f, "x") }, GID, control.CheckFail, "fe80::1"},
	{"its second GID", func(f *Facts) { f.GID = gid("192.0.2.1") }, GID, control.CheckOK, "as configured"},
	{"IPv4, MTU 1500", func(f *Facts) {
		f.Device.MTU, f.Device.Addrs, f.Open.GIDs = 1500, f.Device.Addrs[:1], f.Open.GIDs[1:]
	}, MTU, control.CheckFail, "--ud-mtu 1444"},
	{"IPv6, MTU 1500", func(f *Facts) { f.Device.MTU = 1500 }, MTU, control.CheckWarn, "fragments"},
	{"IPv6, MTU 1500, remedy", func(f *Facts) { f.Device.MTU = 1500 }, MTU, control.CheckWarn, "--ud-mtu 1424"},
	{"UD MTU below IPv6's", func(f *Facts) { f.UDMTU = 1000 }, MTU, control.CheckWarn, "1280 or more"},
	{"MTU 300", func(f *Facts) { f.Device.MTU, f.UDMTU = 300, 576 }, MTU, control.CheckFail, "too small"},
	{"taken by rxe", func(f *Facts) {
		f.Device.RDMA, f.PortTaken = "rxe0", true
		unopened(f, "x")
	}, Port, control.CheckFail, "rdma link delete rxe0"},
	{"taken by a process", func(f *Facts) {
		f.PortOwner, f.PortTaken = "ipoibcmd, process 7", true
		unopened(f, "x")
	}, Port, control.CheckFail, "ipoibcmd, process 7"},
	{"an adapter that does RoCE", func(f *Facts) { f.Device.RDMA = "mlx5_0" }, Port, control.CheckWarn, "ibverbs"},
	{"something else", func(f *Facts) { unopened(f, "strange") }, Provider, control.CheckFail, "strange"},
	{"never opened", func(f *Facts) { f.Opened = false }, Provider, control.CheckFail, "not opened"},
	{"small buffers", func(f *Facts) { f.Open.RecvGot = 2 }, Buffers, control.CheckWarn, "net.core.rmem_max=16"},
	{"small send buffers", func(f *Facts) { f.Open.SendGot = 2 }, Buffers, control.CheckWarn, "net.core.wmem_max=4"},
	{"no GSO", func(f *Facts) { f.GSOErr = "EIO" }, GSO, control.CheckWarn, "offload.gso: false"},
	{"no GRO", func(f *Facts) { f.GROErr = "EIO" }, GRO, control.CheckWarn, "offload.gro: false"},
	{"GSO off", func(f *Facts) { f.GSOErr, f.NoGSO = "EIO", true }, GSO, control.CheckOK, "switched off"},
	{"not tried", func(f *Facts) { f.Loopback = false }, GSO, control.CheckOK, "not tried"},
	{"no checksums", func(f *Facts) { f.Device.Features = []string{"rx-gro"} }, Link, control.CheckWarn,
		"ethtool -K eth0 tx on"},
	{"features unknown", func(f *Facts) { f.Device.Features = nil }, Link, control.CheckSkipped, "10000 Mb/s"},
	{"verbs without devices", func(f *Facts) { f.Provider = "ibverbs" }, RDMADevices, control.CheckFail, "type rxe"},
	{"verbs without nodes", func(f *Facts) {
		f.Provider, f.RDMA = "ibverbs",
			[]control.RDMADevice{{Name: "rxe0", Missing: []string{"uverbs"}}}
	}, RDMADevices, control.CheckFail, "ib_uverbs"},
	{"verbs with nodes", func(f *Facts) {
		f.Provider, f.RDMA = "ibverbs", []control.RDMADevice{{Name: "rxe0", NetDevs: []string{"eth0"},
			Nodes: []string{"/dev/infiniband/uverbs0"}, Missing: []string{"issm"}}}
	}, RDMADevices, control.CheckOK, "rxe0 on eth0 (/dev/infiniband/uverbs0)"},
	{"verbs and buffers", func(f *Facts) {
		f.Provider, f.Open.RecvAsked, f.RDMA = "ibverbs", 0,
			[]control.RDMADevice{{Name: "rxe0"}}
	}, Buffers, control.CheckSkipped, ""},
	{"class 7 taken", func(f *Facts) { f.Open.QP1, f.IBCM = false, Yes }, CM, control.CheckWarn, "in-band"},
	{"class 7 taken, and how to free it", func(f *Facts) {
		f.Open.QP1, f.IBCM, f.IBCMUsers = false, Yes, []string{"rdma_ucm", "rdma_cm"}
	}, CM, control.CheckWarn, "modprobe -r rdma_ucm rdma_cm ib_cm"},
	{"class 7 taken, gsi", func(f *Facts) { f.Open.QP1, f.CMTransport = false, "gsi" }, CM, control.CheckFail,
		"cm_transport auto"},
	{"class 7 taken, in-band", func(f *Facts) { f.Open.QP1, f.CMTransport = false, "inband" }, CM,
		control.CheckOK, "as configured"},
	{"ib_cm beside softroce", func(f *Facts) { f.IBCM = Yes }, CM, control.CheckOK, "does not matter"},
	{"a firewall", func(f *Facts) { f.Rules = ruleset(`{"drop": null}`) }, Firewall, control.CheckFail,
		"iifname eth0 udp dport 4791 accept"},
	{"a firewall for some", func(f *Facts) { f.Rules = ruleset(saddr, `{"drop": null}`) }, Firewall,
		control.CheckWarn, "may drop"},
	{"rules that cannot be read", func(f *Facts) { f.Rules, f.RulesErr = nil, "nft is not installed" }, Firewall,
		control.CheckSkipped, "not installed"},
	{"members answer", func(f *Facts) { f.Members, f.MemberCount = "dns://x", 7 }, MemberList,
		control.CheckOK, "7 hosts"},
	{"members do not answer", func(f *Facts) { f.Members, f.MembersErr = "dns://x", "no answer" }, MemberList,
		control.CheckWarn, "no answer"},
	{"no source of members", func(f *Facts) { f.Members = "" }, MemberList, control.CheckSkipped, "no source"},
	{"users may send", func(f *Facts) { f.LocalGuard = No }, LocalUsers, control.CheckWarn, "docs/security.md"},
	{"users may not send", func(f *Facts) { f.LocalGuard = Yes }, LocalUsers, control.CheckOK, "4791"},
	{"users not tried", func(f *Facts) { f.LocalGuard, f.LocalErr = Unknown, "not root" }, LocalUsers,
		control.CheckSkipped, "not root"},
	{"NetworkManager", func(f *Facts) { f.Managers = []string{"NetworkManager"} }, Managers, control.CheckWarn,
		"unmanaged-devices+=interface-name:ibcm0"},
	{"NetworkManager, told", func(f *Facts) {
		f.Managers = []string{"NetworkManager"}
		f.Files = []File{{"/etc/NetworkManager/conf.d/x.conf",
			"[keyfile]\nunmanaged-devices=mac:00:11:22:33:44:55;interface-name:ibcm*\n"}}
	}, Managers, control.CheckOK, "leave ibcm0 alone"},
	{"networkd, nothing matches", func(f *Facts) {
		f.Managers = []string{"systemd-network"}
		f.Files = []File{{"/etc/systemd/network/10-e.network", "[Match]\nName=eth*\n[Network]\nDHCP=yes\n"}}
	}, Managers, control.CheckOK, "leave"},
	{"networkd takes all", func(f *Facts) {
		f.Managers = []string{"systemd-network"}
		f.Files = []File{{"/etc/systemd/network/99-all.network", "[Match]\nName=*\n"}}
	}, Managers, control.CheckWarn, "99-all.network"},
	{"dhcpcd", func(f *Facts) { f.Managers = []string{"dhcpcd"} }, Managers, control.CheckWarn, "dhcpcd"},
	{"demo works", func(*Facts) {}, Demo, control.CheckOK, "veth pair"},
	{"demo without veth", func(f *Facts) { f.Demo, f.DemoErr = No, "veth: operation not supported" }, Demo,
		control.CheckWarn, "modprobe veth"},
	{"demo, why", func(f *Facts) { f.Demo, f.DemoErr = No, "veth: operation not supported" }, Demo,
		control.CheckWarn, "pair between them: veth: operation not supported"},
	{"demo, not root", func(f *Facts) { f.Demo = Unknown }, Demo, control.CheckSkipped, "needs root"},
}

// wantRemedy checks that a check says what to do.
func wantRemedy(t *testing.T, what string, c control.Check) {
	t.Helper()
	if c.Remedy == "" {
		t.Errorf("%s: %s is %s (%s) and has no remedy", what, c.Name, c.Status, c.Detail)
	}
}

// wantCheck checks the status of a check, and its detail and remedy for a text.
func wantCheck(t *testing.T, what string, c control.Check, status, says string) {
	t.Helper()
	expect.Equal(t, c.Status, status, "%s: %s", what, c.Name)
	if !strings.Contains(c.Detail+" "+c.Remedy, says) {
		t.Errorf("%s: %s says %q and %q, want %q", what, c.Name, c.Detail, c.Remedy, says)
	}
}

// Each finding changes what fine says of one check, or of those named.
func TestExamine(t *testing.T) {
	for _, tt := range examinations {
		f := fine()
		tt.change(&f)
		d := Examine(f)
		ok := true
		for _, c := range d.Checks {
			ok = ok && c.Status != control.CheckFail
			if c.Status == control.CheckWarn || c.Status == control.CheckFail && c.Name != Provider {
				wantRemedy(t, tt.name, c)
			}
			if c.Name == tt.check {
				wantCheck(t, tt.name, c, tt.status, tt.says)
			} else if c.Status == control.CheckFail {
				t.Errorf("%s: %s fails too: %+v", tt.name, c.Name, c)
			}
		}
		switch {
		case len(d.Checks) != 22:
			t.Errorf("%s: Checks has %v elements, want 22", tt.name, len(d.Checks))
		case d.OK != ok:
			t.Errorf("%s: OK is %v, want %v", tt.name, d.OK, ok)
		case d.OK == (tt.status == control.CheckFail):
			t.Errorf("%s: OK %v beside a check of status %v", tt.name, d.OK, tt.status)
		case d.Version != control.Version:
			t.Errorf("%s: Version is %v, want %v", tt.name, d.Version, control.Version)
		}
	}
}

func TestNetworkd(t *testing.T) {
	file := func(name, text string) File { return File{"/etc/systemd/network/" + name, text} }
	for _, tt := range []struct {
		name  string
		files []File
		want  string
	}{
		{"by name", []File{file("a.network", "[Match]\nName=ibcm0 eth0\n")}, "a.network"},
		{"unmanaged", []File{file("a.network", "[Match]\nName=ibcm0\n[Link]\nUnmanaged=yes\n")}, ""},
		{"unmanaged first", []File{file("b.network", "[Match]\nName=*\n"),
			file("a.network", "[Match]\nName=ibcm*\n[Link]\nUnmanaged=true\n")}, ""},
		{"unmanaged too late", []File{file("a.network", "[Match]\nName=*\n"),
			file("b.network", "[Match]\nName=ibcm*\n[Link]\nUnmanaged=true\n")}, "a.network"},
		{"all but ours", []File{file("a.network", "[Match]\nName=!ibcm*\n")}, ""},
		{"all but others", []File{file("a.network", "[Match]\nName=!eth*\n")}, "a.network"},
		{"by driver", []File{file("a.network", "[Match]\nName=*\nDriver=virtio_net\n")}, ""},
		{"by type", []File{file("a.network", "[Match]\nName=*\nType=ether\n")}, ""},
		{"comments", []File{file("a.network", "# Name=ibcm0\n[Match]\n;Name=ibcm0\nName = eth0\n")}, ""},
		{"no match section", []File{file("a.network", "[Network]\nDHCP=yes\n")}, ""},
		{"another kind of file", []File{{"/etc/NetworkManager/conf.d/a.conf", "[Match]\nName=*\n"}}, ""},
	} {
		got := networkdTakes(tt.files, "ibcm0")
		if got != tt.want && got != "/etc/systemd/network/"+tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestNetworkManager(t *testing.T) {
	for _, tt := range []struct {
		text string
		want bool
	}{
		{"[keyfile]\nunmanaged-devices=interface-name:ibcm0\n", true},
		{"[keyfile]\nunmanaged-devices = interface-name:tun*; interface-name:ibcm* \n", true},
		{"[keyfile]\nunmanaged-devices=*\n", true},
		{"[keyfile]\nunmanaged-devices+=interface-name:ibcm*\n", true},
		{"[keyfile]\nunmanaged-devices=*,except:interface-name:ibcm*\n", false},
		{"[keyfile]\nunmanaged-devices=interface-name:ibcm0\nunmanaged-devices-=interface-name:ibcm0\n", false},
		{"[keyfile]\nunmanaged-devices=interface-name:ibcm0\nunmanaged-devices=interface-name:eth0\n", false},
		{"[keyfile]\n#unmanaged-devices=interface-name:ibcm0\n", false},
		{"[keyfile]\nunmanaged-devices=interface-name:eth0\n", false},
		{"", false},
	} {
		if got := nmLeaves([]File{{"/etc/NetworkManager/conf.d/a.conf", tt.text}}, "ibcm0"); got != tt.want {
			t.Errorf("%q: %v", tt.text, got)
		}
	}
}

// The file of the package is understood, and what NetworkManager reads later counts more.
func TestNetworkManagerOrder(t *testing.T) {
	own, err := os.ReadFile("../packaging/NetworkManager/90-ipoibcm.conf")
	if err != nil {
		t.Fatal(err)
	}
	const replaces, adds = "[keyfile]\nunmanaged-devices=interface-name:eth0\n", "[keyfile]\nunmanaged-devices+=interface-name:eth0\n"
	packaged := File{"/usr/lib/NetworkManager/conf.d/90-ipoibcm.conf", string(own)}
	for _, tt := range []struct {
		path, text string
		want       bool
	}{
		{"/etc/NetworkManager/conf.d/other.conf", replaces, false},
		{"/etc/NetworkManager/conf.d/other.conf", adds, true},
		{"/etc/NetworkManager/NetworkManager.conf", replaces, false},
		{"/run/NetworkManager/conf.d/a.conf", replaces, false},
		{"/usr/lib/NetworkManager/conf.d/99.conf", replaces, false},
		{"/usr/lib/NetworkManager/conf.d/10.conf", replaces, true},
		{"/etc/NetworkManager/conf.d/90-ipoibcm.conf", "", false},
		{"/etc/systemd/network/a.network", replaces, true},
	} {
		for _, files := range [][]File{{packaged, {tt.path, tt.text}}, {{tt.path, tt.text}, packaged}} {
			if got := nmLeaves(files, "ibcm0"); got != tt.want {
				t.Errorf("with %s, %q: %v", tt.path, tt.text, got)
			}
		}
	}
}

// Facts can be anything: there is one check of each name, and nothing panics.
func TestExamineAnything(t *testing.T) {
	for _, f := range []Facts{{}, {Device: &Device{}}, {Opened: true, Device: &Device{Up: true}},
		{CMTransport: "gsi", Opened: true}} {
		d := Examine(f)
		var names []string
		for _, c := range d.Checks {
			names = append(names, c.Name)
		}
		slices.Sort(names)
		if len(slices.Compact(names)) != 22 || d.OK {
			t.Errorf("%+v: ok %v, %v", f, d.OK, names)
		}
	}
}
