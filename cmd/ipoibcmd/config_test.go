package main

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
)

// good returns the defaults with what has none.
func good() Config {
	c := defaults()
	c.Underlay = "eth0"
	return c
}

// decodeText sets c from the text of a file.
func decodeText(c *Config, text []byte) error {
	top, err := parse(text)
	if err != nil {
		return err
	}
	return c.decode(top, map[string]int{})
}

func TestSampleIsTheDefaults(t *testing.T) {
	var got Config
	if err := decodeText(&got, sample); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(good(), got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("sample.yaml differs from the defaults (-defaults +sample):\n%s", diff)
	}
	if _, err := got.settings(); err != nil {
		t.Errorf("sample.yaml: %v", err)
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		if key := f.Tag.Get("yaml"); !strings.Contains(string(sample), "\n"+key+":") {
			t.Errorf("sample.yaml does not show %s", key)
		}
	}
}

func TestStrictYAML(t *testing.T) {
	for _, tt := range []struct {
		name, in, want string
	}{
		{"unknown key", "underlay: eth0\nmodes: rc\n", `line 2: unknown key "modes" (ipoibcmd init prints all keys)`},
		{"unknown key below another", "underlay: eth0\noffload:\n  lro: true\n", `line 3: unknown key "lro"`},
		{"two unknown keys", "a: 1\nb: 2\n",
			`line 1: unknown key "a" (ipoibcmd init prints all keys); line 2: unknown key "b"`},
		{"a word for a number", "underlay: eth0\n\nud_mtu: big\n", `line 3: "big" where a number belongs`},
		{"a number too large", "pkey: 0x10000\n", `line 1: "0x10000" where a number in range belongs`},
		{"a list for a word", "name: [a, b]\n", "line 1: a list where a word belongs"},
		{"a word for keys", "000\n", `line 1: "000" where keys and values`},
		{"a word for a switch", "offload: {gso: maybe}\n", `line 1: "maybe" where true or false belongs`},
		{"a UD MTU of nothing", "underlay: eth0\nud_mtu: 0\n", "line 2: ud_mtu 0: must be auto, or 576"},
		{"a traffic class in words", "underlay: eth0\ntraffic_class: inherit104\n",
			`line 2: traffic_class: "inherit104" is neither`},
		{"a traffic class in a list", "underlay: eth0\ntraffic_class: [104]\n", `line 2: traffic_class: "" is neither`},
		{"no threads", "underlay: eth0\nthreads: 0\n", "line 2: threads 0: must be auto, or 1 to 64"},
		{"half a thread", "underlay: eth0\nthreads: 1.5\n", `line 2: "1.5" where a whole number belongs`},
		{"a word for threads", "underlay: eth0\nthreads: many\n", `line 2: "many" where a number belongs`},
		{"a fraction", "underlay: eth0\nud_mtu: 2044.5\n", `line 2: "2044.5" where a whole number belongs`},
		{"a fraction of a peer", "mode: rc\nmetric_peers: 0.9\n", `line 2: "0.9" where a whole number belongs`},
		{"a fraction of a port", "mode: rc\nport: 1.5\n", `line 2: "1.5" where a whole number belongs`},
		{"a fraction below another", "limits: {connections: 16.9}\n", `line 1: "16.9" where a whole number belongs`},
		{"a fraction that is merged", "limits:\n  <<: {neighbours: 16.9}\n", `line 2: "16.9" where a whole number belongs`},
		{"an unknown key that is merged", "offload:\n  <<: [{gso: true}, {lro: true}]\n", `line 2: unknown key "lro"`},
		{"a power", "pkey: 1e3\n", `line 1: "1e3" where a whole number belongs`},
		{"a Q_Key too large", "mode: rc\nqkey: 0x123456789\n", "line 2: qkey: want a whole number up to 0xffffffff"},
		{"a fraction of a Q_Key", "qkey: 1234567.5\n", "line 1: qkey: want a whole number"},
		{"a key twice", "name: a\nname: b\n", "line 2: mapping key \"name\" already defined at line 1"},
		{"no YAML", "name: \"a\n", "line 2"},
		{"a second document", "name: a\n---\nname: b\n", "more than one YAML document"},
	} {
		c := defaults()
		if err := decodeText(&c, []byte(tt.in)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %q gives %v, want %q", tt.name, tt.in, err, tt.want)
		}
	}
	for _, in := range []string{"", "# nothing\n", "{}\n", "port: 1\n<<: {port: 1.5}\n",
		"limits: {}\n<<: {limits: &l {<<: *l}}\n"} {
		c := defaults()
		if err := decodeText(&c, []byte(in)); err != nil {
			t.Errorf("%q: %v", in, err)
		}
		if diff := cmp.Diff(defaults(), c, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%q changes the defaults:\n%s", in, diff)
		}
	}
}

// badValues are configurations with one value that cannot be, and what is said of it.
var badValues = []struct {
	name   string
	change func(*Config)
	want   string // key, value and remedy
}{
	{"no underlay", func(c *Config) { c.Underlay = "" }, "no underlay: give --underlay DEVICE"},
	{"empty name", func(c *Config) { c.Name = "" }, `name "": an interface name has 1 to 15 characters`},
	{"long name", func(c *Config) { c.Name = "ibcm0123456789ab" }, `name "ibcm0123456789ab"`},
	{"slash in name", func(c *Config) { c.Name = "a/b" }, `name "a/b"`},
	{"dots", func(c *Config) { c.Name = ".." }, `name ".."`},
	{"pattern", func(c *Config) { c.Name = "ib%d" }, `name "ib%d"`},
	{"ARP accept", func(c *Config) { c.ARPAccept = "never" }, `arp_accept "never": must be probe or always`},
	{"CM transport", func(c *Config) { c.CMTransport = "qp1" }, `cm_transport "qp1": must be auto, gsi or inband`},
	{"service ID", func(c *Config) { c.ServiceID = "0x10" }, `service_id "0x10": must be rfc4755 (0x01 first) or linux`},
	{"ECN in the traffic class", func(c *Config) { c.Class = 105 },
		"traffic_class 105: must be four times a DSCP, 0 to 252"},
	{"traffic class too large", func(c *Config) { c.Class = 256 }, "traffic_class 256"},
	{"ECN beside an inherited class", func(c *Config) { c.Class = inheritClass + 105 },
		"traffic_class inherit/105: must be four times a DSCP"},
	{"inheritance of ibverbs", func(c *Config) { c.Class, c.Provider = inheritClass, ibVerbs },
		"traffic_class inherit: only provider softroce"},
	{"ECN in other words", func(c *Config) { c.ECN = "yes" }, `ecn "yes": must be auto, on or off`},
	{"ECN of ibverbs", func(c *Config) { c.ECN, c.Provider = "on", ibVerbs }, "ecn on: only provider softroce"},
	{"traffic class below zero", func(c *Config) { c.Class = -4 }, "traffic_class -4"},
	{"traffic class of ibverbs", func(c *Config) { c.Class, c.Provider = 104, ibVerbs },
		"traffic_class 104: only provider softroce"},
	{"mode", func(c *Config) { c.Mode = "RC" }, `mode "RC": must be rc, uc, auto or ud`},
	{"fewer than no threads", func(c *Config) { c.Threads = -1 }, "threads -1: must be auto, or 1 to 64"},
	{"too many threads", func(c *Config) { c.Threads = 65 }, "threads 65: must be auto, or 1 to 64"},
	{"threads of ibverbs", func(c *Config) { c.Provider, c.Threads = ibVerbs, 2 },
		"threads 2: only provider softroce has several"},
	{"UD MTU too small", func(c *Config) { c.UDMTU = 575 }, "ud_mtu 575: must be auto, or 576 to 4092"},
	{"UD MTU too large", func(c *Config) { c.UDMTU = 4093 }, "ud_mtu 4093"},
	{"Receive MTU too small", func(c *Config) { c.ReceiveMTU = 1283 }, "receive_mtu 1283: must be 1284 to 65524"},
	{"Receive MTU too large", func(c *Config) { c.ReceiveMTU = 65525 }, "receive_mtu 65525"},
	{"Receive MTU below the UD MTU", func(c *Config) { c.UDMTU, c.ReceiveMTU = 4092, 2048 },
		"receive_mtu 2048: must be at least ud_mtu and 4 more, 4096"},
	{"no Q_Key", func(c *Config) { c.QKey = 0 }, "qkey 0"},
	{"name of sysctls", func(c *Config) { c.Name = "all" }, `name "all"`},
	{"long path", func(c *Config) { c.Control = "/" + strings.Repeat("x", 107) }, "at most 107 characters"},
	{"IPv6 on a small link", func(c *Config) { c.UDMTU, c.Addresses = 1279, []string{"fd00::1/64"} },
		`address "fd00::1/64": there is no IPv6 on a link whose ud_mtu, 1279 here, is below 1280`},
	{"limited broadcast", func(c *Config) { c.Addresses = []string{"255.255.255.255/32"} },
		`address "255.255.255.255/32"`},
	{"no GID", func(c *Config) { c.GID = "::" }, "gid: :: is no address of a host"},
	{"a group", func(c *Config) { c.Peers = []string{"ff02::1"} }, "peers: ff02::1 is no address of a host"},
	{"partition 0", func(c *Config) { c.PKey = 0x8000 }, "pkey 0x8000: partition 0"},
	{"limited member", func(c *Config) { c.PKey = 0x7fff },
		"pkey 0x7fff: a limited member, which not all could talk to: must be 0x8001 to 0xffff, such as 0xffff"},
	{"no prefix length", func(c *Config) { c.Addresses = []string{"10.0.0.1"} },
		`address "10.0.0.1": want an address with prefix length`},
	{"multicast address", func(c *Config) { c.Addresses = []string{"224.0.0.1/24"} },
		`address "224.0.0.1/24": not an address an interface can have`},
	{"loopback", func(c *Config) { c.Addresses = []string{"10.0.0.1/24", "::1/128"} }, `address "::1/128"`},
	{"nothing", func(c *Config) { c.Addresses = []string{"0.0.0.0/0"} }, `address "0.0.0.0/0"`},
	{"mapped", func(c *Config) { c.Addresses = []string{"::ffff:10.0.0.1/120"} }, `address "::ffff:10.0.0.1/120"`},
	{"gid", func(c *Config) { c.GID = "eth0" }, "gid: "},
	{"too many peers", func(c *Config) { c.Peers = slices.Repeat([]string{"fe80::1"}, group.MaxPeers+1) },
		fmt.Sprintf("peers: %d are given, at most %d can be", group.MaxPeers+1, group.MaxPeers)},
	{"peers", func(c *Config) { c.Peers = []string{"fe80::1", "host"} }, "peers: "},
	{"peer_allow", func(c *Config) { c.PeerAllow = []string{"fe80::/10", "all"} }, `peer_allow "all": want GIDs`},
	{"peer_trust", func(c *Config) { c.PeerTrust = []string{"fe80::1", "host"} }, `peer_trust "host": want GIDs`},
	{"too few connections", func(c *Config) { c.Limits.Connections = 15 }, "limits.connections 15: must be 16 to 10000"},
	{"too many neighbours", func(c *Config) { c.Limits.Neighbours = 100_001 },
		"limits.neighbours 100001: must be 16 to 100000"},
	{"allow", func(c *Config) { c.Allow = []string{"fe80::/10", "all"} }, `allow "all": want GIDs`},
	{"a peer that is not allowed", func(c *Config) { c.Allow, c.Peers = []string{"fe80::1"}, []string{"fe80::2"} },
		"fe80::2 is not in allow"},
	{"peer_trust with a zone", func(c *Config) { c.PeerTrust = []string{"fe80::1%eth0"} },
		`peer_trust "fe80::1%eth0": want GIDs`},
	{"log format", func(c *Config) { c.LogFormat = "xml" }, `log_format "xml": must be text or json`},
	{"metrics_tls", func(c *Config) { c.MetricsTLS = "/etc/x.pem" }, "nothing to guard, because metrics is empty"},
	{"metrics_tls", func(c *Config) { c.Metrics, c.MetricsTLS = ":9755", "x.pem" }, `"x.pem": want an absolute path`},
	{"metrics_auth", func(c *Config) { c.Metrics, c.MetricsAuth = "192.0.2.1:9755", "/etc/x" },
		"in the clear: set metrics_tls too"},
	{"metrics", func(c *Config) { c.Metrics = "9755" }, `metrics "9755": want an address with port`},
	{"metric peers", func(c *Config) { c.MetricPeers = 1001 }, "metric_peers 1001: must be 0 to 1000"},
	{"log level", func(c *Config) { c.LogLevel = "loud" }, `log_level "loud": must be debug, info, warn or error`},
	{"idle without a unit", func(c *Config) { c.IdleTimeout = "300" }, `idle_timeout "300": want a duration such as 5m`},
	{"negative idle", func(c *Config) { c.IdleTimeout = "-1s" }, `idle_timeout "-1s"`},
}

func TestEveryBadValueIsNamed(t *testing.T) {
	for _, tt := range badValues {
		c := good()
		tt.change(&c)
		if _, err := c.settings(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestGIDPrefix(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"fe80::1", "fe80::1/128"},
		{"fe80::1/10", "fe80::/10"},
		{"192.0.2.1", "192.0.2.1/32"},
		{"::ffff:192.0.2.1", "192.0.2.1/32"},
		{"::ffff:192.0.2.1/120", "192.0.2.0/24"},
		{"192.0.2.1/24", "192.0.2.0/24"},
		{"fe80::1%eth0", ""},
		{"host", ""},
		{"", ""},
	} {
		got, ok := gidPrefix(tt.in)
		if ok != (tt.want != "") {
			t.Errorf("%q: taken %v, want %v", tt.in, ok, tt.want != "")
		} else if ok && got.String() != tt.want {
			t.Errorf("%q: %v, want %v", tt.in, got, tt.want)
		}
	}
}

func TestSettings(t *testing.T) {
	c := good()
	c.Addresses = []string{"10.0.0.1/24", "fd00::1/64"}
	c.GID, c.Peers = "192.0.2.1", []string{"fe80::1", "192.0.2.2"}
	c.IdleTimeout, c.LogLevel = "90s", "debug"
	s, err := c.settings()
	if err != nil {
		t.Fatal(err)
	}
	expect.Equal(t, len(s.prefixes), 2, "length of prefixes")
	expect.Equal(t, s.gid.Is4(), true, "Is4")
	expect.Equal(t, len(s.peers), 2, "length of peers")
	expect.Equal(t, s.idle, 90*time.Second, "idle")
	if s.level >= 0 {
		t.Errorf("level is %v, want less than 0", s.level)
	}
	if want, _ := ib.ParseGID("::ffff:192.0.2.1"); s.gid != want {
		t.Errorf("gid %v, want %v", s.gid, want)
	}
	for _, tt := range []struct{ name, control, want string }{
		{"ibcm0", "", "/run/ipoibcm/ibcm0.sock"}, {"ibcm0", "/tmp/x", "/tmp/x"},
	} {
		c.Name, c.Control = tt.name, tt.control
		if got := c.controlPath(); got != tt.want {
			t.Errorf("control socket of %q %q: %s, want %s", tt.name, tt.control, got, tt.want)
		}
	}
}

// configured merges a file with flags of run.
func configured(file string, args ...string) (s settings, err error) {
	flags := defaults()
	cmd := &cobra.Command{Use: "run", RunE: func(cmd *cobra.Command, _ []string) (err error) {
		s, err = configure(cmd, &flags, file)
		return err
	}}
	flags.bind(cmd.Flags())
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	err = cmd.Execute()
	return s, err
}

// What a flag overrides in the file must be right too, and what is wrong only beside the flag is
// not: the file by itself is good then.
func TestOverriddenValuesAreChecked(t *testing.T) {
	for _, tt := range []struct{ name, text, args, want string }{
		{"a word", "underlay: eth1\nmode: fast\n", "--mode=rc", `line 2: mode "fast"`},
		{"it says why", "underlay: eth1\nmode: fast\n", "--mode=rc", "a flag wins over it"},
		{"a number", "pkey: 0x0123\n", "--underlay=eth1 --pkey=0x8123", "line 1: pkey 0x0123"},
		{"an item of a list", "underlay: eth1\naddresses:\n- 10.0.0.1/24\n- 10.0.0.2\n", "--address=10.0.0.3/24",
			`line 4: address "10.0.0.2"`},
		{"the first of two", "underlay: eth1\nlog_level: loud\nmode: fast\n", "--mode=rc --log-level=info",
			`line 3: mode "fast"`},
		{"the second of two", "underlay: eth1\nlog_level: loud\nmode: uc\n", "--mode=rc --log-level=info",
			`line 2: log_level "loud"`},
		{"behind one that is wrong beside the flag", "underlay: eth1\nprovider: ibverbs\ndevice: rxe0\nlog_level: loud\n",
			"--provider=softroce --device= --log-level=info", `line 4: log_level "loud"`},
		{"wrong beside the flag alone", "underlay: eth1\nprovider: ibverbs\ndevice: rxe0\n", "--provider=softroce --device=", ""},
		{"too large for another flag", "underlay: eth1\nud_mtu: 2044\n", "--ud-mtu=1444 --receive-mtu=2000", ""},
		{"right", "underlay: eth1\nmode: uc\n", "--mode=rc", ""},
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(tt.text), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := configured(file, strings.Fields(tt.args)...)
		switch {
		case tt.want == "":
			if err != nil {
				t.Errorf("%s: %v, want no error", tt.name, err)
			}
		case err == nil:
			t.Errorf("%s: no error, want %q", tt.name, tt.want)
		case !strings.Contains(err.Error(), tt.want):
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestFlagsOverrideTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	text := "underlay: eth1\nname: ib7\nmode: uc\nud_mtu: 1444\naddresses: [10.0.0.1/24]\npkey: 0x8123\noffload: " +
		"{gso: false}\n"
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	var got Config
	merge := func(args ...string) error {
		s, err := configured(file, args...)
		got = s.Config
		return err
	}

	if err := merge(); err != nil {
		t.Fatal(err)
	}
	want := good()
	want.Underlay, want.Name, want.Mode, want.UDMTU, want.Addresses, want.PKey = "eth1", "ib7", "uc", 1444,
		[]string{"10.0.0.1/24"}, 0x8123
	// the one not named keeps its default
	want.Offload = Offload{GSO: false, GRO: true, OneThread: true, HoldP: true, BusyPoll: true, Connected: true,
		Checksum: true, TSO: true, USO: true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("file alone (-want +got):\n%s", diff)
	}

	err := merge("--underlay=eth2", "--name=ib8", "--mode=rc", "--ud-mtu=2044", "--receive-mtu=9000", "--gid=fe80::1",
		"--log-level=warn",
		"--control=/tmp/c", "--provider=ibverbs", "--device=rxe0", "--threads=auto", "--cm-transport=inband", "--arp-accept=always",
		"--address=10.0.1.1/24", "--address=fd00::1/64")
	if err != nil {
		t.Fatal(err)
	}
	want.Underlay, want.Name, want.Mode, want.UDMTU, want.ReceiveMTU = "eth2", "ib8", "rc", 2044, 9000
	want.GID, want.LogLevel, want.Control, want.Provider = "fe80::1", "warn", "/tmp/c", "ibverbs"
	want.Device, want.Threads = "rxe0", 0
	want.CMTransport = "inband"
	want.ARPAccept = "always"
	want.Addresses = []string{"10.0.1.1/24", "fd00::1/64"} // instead of the file's
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("every flag (-want +got):\n%s", diff)
	}

	if err := merge("--mode=fast"); err == nil || !strings.Contains(err.Error(), `mode "fast"`) {
		t.Errorf("a bad flag over a good file: %v", err)
	}
	if err := os.WriteFile(file, []byte("nmae: ib7\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := merge(); err == nil || !strings.Contains(err.Error(), file+": line 1: unknown key \"nmae\"") {
		t.Errorf("a bad file: %v", err)
	}
	file += ".none"
	if err := merge(); err == nil || !strings.Contains(err.Error(), "read configuration: open "+file) {
		t.Errorf("no file: %v", err)
	}
}

func TestEveryFlagIsAKey(t *testing.T) {
	keys := map[string]bool{}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Config]()) {
		keys[f.Tag.Get("yaml")] = true
	}
	run := newRun()
	for _, name := range []string{"underlay", "name", "address", "control", "mode", "cm-transport", "ud-mtu",
		"receive-mtu", "gid", "provider", "device", "config", "log-level", "arp-accept"} {
		if run.Flags().Lookup(name) == nil {
			t.Errorf("run has no --%s", name)
		}
		key := strings.ReplaceAll(name, "-", "_")
		if name == "address" {
			key = "addresses"
		}
		if !keys[key] && name != "config" {
			t.Errorf("--%s has no key %s", name, key)
		}
	}
}

// A bad value of the file is named with its line, one of a flag without.
func TestBadValuesHaveTheirLine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	os.WriteFile(file,
		[]byte(
			"underlay: eth0\n# above\nud_mtu: 100\naddresses:\n  - 10.0.0.1/24\n  - 10.0.0.2\npeers: [fe80::1,\n  "+
				"here]\nmode: fast\n"), 0o600)
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"number", []string{"--mode=rc"}, file + ": line 3: ud_mtu 100"},
		{"word", nil, file + `: line 9: mode "fast"`},
		{"item of a list", []string{"--mode=rc", "--ud-mtu=2044"}, file + `: line 6: address "10.0.0.2"`},
		{"item of a short list", []string{"--mode=rc", "--ud-mtu=2044", "--address=10.0.0.1/24"}, file + ": line 8: peers: "},
		{"flag over the file", []string{"--mode=faster"}, `ipoibcmd run: mode "faster"`},
		{"item of a flag", []string{"--mode=rc", "--ud-mtu=2044", "--address=10.0.0.1"}, `ipoibcmd run: address "10.0.0.1"`},
	} {
		status, _, stderr := command(t, append([]string{"run", "--config", file}, tt.args...)...)
		if status != exitConfig || !strings.Contains(stderr, tt.want) {
			t.Errorf("%s: status %d, %q, want %d and %q", tt.name, status, stderr, exitConfig, tt.want)
		}
	}
}

// Values below another key, and those of several interfaces, have their line too: the last that counts.
func TestDeepValuesHaveTheirLine(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"limits", "underlay: eth0\n\nlimits:\n  # few\n  connections: 4\n", "line 5: limits.connections 4"},
		{"etcd", "underlay: eth0\nlink: a\nmembership: etcd://h\netcd: {ca: /x,\n  lease: 1s}\n",
			`line 5: etcd.lease "1s"`},
		{"merged", "underlay: eth0\nlimits:\n  <<: {connections: 4,\n    neighbours: 4}\n  connections: 16\n",
			"line 4: limits.neighbours 4"},
		{"an interface", ibEth0 + "\nmode: rc\ninterfaces:\n- name: a\n\n- name: b\n  mode: fast\n",
			`line 9: interfaces[1]: mode "fast"`},
		{"an interface in braces", ibEth0 + "interfaces:\n\n- {name: a, limits: {neighbours: 4}}\n",
			"line 5: interfaces[0]: limits.neighbours 4"},
		{"what is of all interfaces", ibEth0 + "\n# all\nmode: fast\ninterfaces:\n- name: a\n",
			`line 5: interfaces[0]: mode "fast"`},
		{"a name twice", ibEth0 + "interfaces:\n- name: a\n\n- name: a\n", `line 6: interfaces[1]: name "a" is that of`},
		{"an alias", ibEth0 + "interfaces:\n- &a {name: a, qkey: 0}\n- *a\n", "line 4: interfaces[0]: qkey 0"},
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		status, _, stderr := command(t, "run", "--config", file)
		if want := file + ": " + tt.want; status != exitConfig || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %q, want %d and %q", tt.name, status, stderr, exitConfig, want)
		}
	}
}

// What a flag says gets into the configuration.
func TestEveryFlagCounts(t *testing.T) {
	of := func(name, value string) Config {
		flags, cmd := defaults(), &cobra.Command{}
		flags.bind(cmd.Flags())
		if name != "" {
			if err := cmd.Flags().Set(name, value); err != nil {
				t.Fatalf("--%s %s: %v", name, value, err)
			}
		}
		s, _ := configure(cmd, &flags, "") // the value need be no good one
		return s.Config
	}
	plain, flags := of("", ""), defaults()
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.bind(set)
	set.VisitAll(func(f *pflag.Flag) {
		value := "1234"
		switch f.Value.Type() {
		case "class":
			value = "12"
		case "bool":
			value = map[bool]string{true: "false", false: "true"}[f.DefValue == "true"]
		}
		if reflect.DeepEqual(of(f.Name, value), plain) {
			t.Errorf("--%s %s changes nothing", f.Name, value)
		}
	})
}
