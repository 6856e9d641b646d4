package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"ipoibcm/agent"
	"ipoibcm/control"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/membership/etcd"
	"ipoibcm/mtu"
	"ipoibcm/provider/ibverbs"
	"ipoibcm/provider/softroce"
	"ipoibcm/sandbox"
	"ipoibcm/wire/encap"
)

// sample is what init prints. A test loads it and compares it with the defaults.
//
//go:embed sample.yaml
var sample []byte

// A Config is everything run can be told, from the file and from flags. The
// zero value of a field means its default, except where a comment says more.
type Config struct {
	Underlay    string       `yaml:"underlay"`
	Name        string       `yaml:"name"`
	Netns       string       `yaml:"netns"`
	Addresses   []string     `yaml:"addresses"`
	Control     string       `yaml:"control"`
	Group       string       `yaml:"control_group"`
	Mode        string       `yaml:"mode"`
	CMTransport string       `yaml:"cm_transport"`
	UDMTU       udMTU        `yaml:"ud_mtu"`
	ReceiveMTU  int          `yaml:"receive_mtu"`
	Class       trafficClass `yaml:"traffic_class"`
	ECN         string       `yaml:"ecn"`
	GID         string       `yaml:"gid"`
	Provider    string       `yaml:"provider"`
	Device      string       `yaml:"device"`
	Port        int          `yaml:"port"`
	Threads     threadCount  `yaml:"threads"`
	MakeLink    bool         `yaml:"create_broadcast"`
	LogLevel    string       `yaml:"log_level"`
	LogFormat   string       `yaml:"log_format"`
	PKey        uint16       `yaml:"pkey"`
	QKey        uint32       `yaml:"qkey"`
	IdleTimeout string       `yaml:"idle_timeout"`
	ARPAccept   string       `yaml:"arp_accept"`
	Peers       []string     `yaml:"peers"`
	Link        string       `yaml:"link"`
	Membership  string       `yaml:"membership"`
	MemberID    string       `yaml:"member_id"`
	StateDir    string       `yaml:"state_dir"`
	Etcd        Etcd         `yaml:"etcd"`
	Metrics     string       `yaml:"metrics"`
	MetricPeers int          `yaml:"metric_peers"`
	MetricsTLS  string       `yaml:"metrics_tls"`
	MetricsAuth string       `yaml:"metrics_auth"`
	Allow       []string     `yaml:"allow"`
	PeerAllow   []string     `yaml:"peer_allow"`
	PeerTrust   []string     `yaml:"peer_trust"`
	Offload     Offload      `yaml:"offload"`
	User        string       `yaml:"user"`
	Sandbox     Sandbox      `yaml:"sandbox"`
	Limits      Limits       `yaml:"limits"`
}

// Limits bound what the daemon keeps; memory by each is in docs/scale.md.
type Limits struct {
	Connections int `yaml:"connections"` // connected queue pairs
	Neighbours  int `yaml:"neighbours"`  // entries of the neighbour cache, and interfaces on record
}

// Bounds of the bounds: with fewer a host could not work, and more was never measured.
const leastLimit, mostConnections, mostNeighbours = 16, 10_000, 100_000

// Sandbox holds the switches of what the process gives up once it serves.
type Sandbox struct {
	Landlock *bool `yaml:"landlock"` // files and TCP; nil means on where the kernel has it
	Seccomp  *bool `yaml:"seccomp"`  // system calls; nil means on where the kernel has it
}

// Values of arp_accept.
const arpProbe, arpAlways = "probe", "always"

// Offload holds the switches of what makes the data path fast.
type Offload struct {
	GSO *bool `yaml:"gso"` // UDP_SEGMENT; nil means on where it works
	GRO *bool `yaml:"gro"` // UDP_GRO; nil means on where it works
	// OneThread has the provider's receiving thread read the TUN; nil means on
	// where the provider can.
	OneThread *bool `yaml:"one_thread"`
	// HoldP lets that thread hold its P while it waits; nil means on where it can.
	HoldP *bool `yaml:"hold_p"`
	// Checksum has us, not the kernel, do the checksums of TCP and UDP at the TUN;
	// nil means on where the kernel lets us.
	Checksum *bool `yaml:"checksum"`
	// TSO moves TCP in pieces longer than packets between us and the kernel; nil means
	// on where the kernel does it and Checksum is on.
	TSO *bool `yaml:"tso"`
	// USO does the same with UDP datagrams of one flow.
	USO *bool `yaml:"uso"`
	// BusyPoll lets it look for more for a while before it waits; nil means on where
	// it holds its P.
	BusyPoll *bool `yaml:"busy_poll"`
	// Connected gives a busy IPv6 destination a connected socket; nil means on.
	Connected *bool `yaml:"connected"`
}

// defaults returns the configuration that holds where nothing is said.
func defaults() Config {
	// apart: the file writes through the pointers
	gso, gro, one, hold, poll, connected, sum, tso, uso := true, true, true, true, true, true, true, true, true
	landlock, seccomp := true, true
	return Config{
		Name:        "ibcm0",
		Mode:        "rc",
		CMTransport: "auto",
		ReceiveMTU:  65524,
		ECN:         ecnAuto,
		Provider:    "softroce",
		LogLevel:    "info",
		LogFormat:   "text",
		Group:       "ipoibcm",
		Port:        1,
		Threads:     1,
		PKey:        uint16(ib.DefaultPKey),
		QKey:        uint32(ib.QKeyIPoIB),
		IdleTimeout: "5m",
		ARPAccept:   arpProbe,
		Membership:  fromStatic,
		StateDir:    "/var/lib/ipoibcm",
		Etcd:        Etcd{Lease: etcd.DefaultLease.String()},
		PeerAllow:   []string{agent.DefaultPeerAllow[0].String()},
		Offload: Offload{GSO: &gso, GRO: &gro, OneThread: &one, HoldP: &hold, BusyPoll: &poll, Connected: &connected,
			Checksum: &sum, TSO: &tso, USO: &uso},
		Sandbox: Sandbox{Landlock: &landlock, Seccomp: &seccomp},
		Limits:  Limits{Connections: 2048, Neighbours: 4096},
	}
}

// bind makes flags of the settings that have one. Their defaults are those of c.
func (c *Config) bind(f *pflag.FlagSet) {
	f.StringVar(&c.Underlay, "underlay", c.Underlay, "network device that carries RoCEv2, such as eth0")
	f.StringVar(&c.Name, "name", c.Name, "name of the interface to create")
	f.StringVar(&c.Netns, "netns", c.Netns,
		"network namespace to create it in, by name (ip netns) or path; the underlay stays here")
	f.StringArrayVar(&c.Addresses, "address", c.Addresses, "address of the interface with prefix length; repeatable")
	f.StringVar(&c.Control, "control", c.Control, "control socket (default "+control.SocketPath("NAME")+")")
	f.StringVar(&c.Mode, "mode", c.Mode, "connected mode: rc, uc, auto (both) or ud (none)")
	f.StringVar(&c.CMTransport, "cm-transport", c.CMTransport,
		"path of CM messages: auto, gsi (QP 1) or inband (the UD QP)")
	f.Var(&c.UDMTU, "ud-mtu",
		"MTU of datagrams, multicast and broadcast that are sent: octets, or auto (one frame, 2044 at most)")
	f.IntVar(&c.ReceiveMTU, "receive-mtu", c.ReceiveMTU,
		"largest connected-mode message accepted, 4-octet header included")
	f.StringArrayVar(&c.Allow, "allow", c.Allow,
		"GID, or prefix of GIDs, of hosts to talk with at all (default: all); repeatable")
	f.Var(&c.Class, "traffic-class",
		"traffic class of RoCEv2 packets: four times the DSCP; inherit: that of the IP packet in a datagram")
	f.StringVar(&c.ECN, "ecn", c.ECN, "ECN-capable RoCEv2 packets: auto (RC, where peer and path allow), on or off")
	f.StringVar(&c.GID, "gid", c.GID, "GID to use: an address of the underlay (default: its IPv6 link-local address)")
	f.StringVar(&c.Provider, "provider", c.Provider,
		"verbs provider: softroce (no kernel module, no hardware) or ibverbs (kernel Soft-RoCE, RoCE adapters)")
	f.StringVar(&c.Device, "device", c.Device, "with ibverbs: RDMA device (default: that of the underlay)")
	f.IntVar(&c.Port, "port", c.Port, "with an InfiniBand device, which has no underlay: its port")
	f.Var(&c.Threads, "threads", "data threads: a number, or auto (as many as processors, 4 at most)")
	f.Var((*pkeyValue)(&c.PKey), "pkey", "P_Key of the link: the same on all of its hosts, such as 0x8001")
	f.StringVar(&c.ARPAccept, "arp-accept", c.ARPAccept,
		"when a neighbour has moved: probe (its old place is silent) or always (an announcement says so)")
	f.StringVar(&c.Link, "link", c.Link, "name of the link, the same on all of its hosts (for --membership)")
	f.StringVar(&c.Membership, "membership", c.Membership,
		"who is on the link, where the underlay has no multicast: etcd://HOST:2379,…, dns://NAME, file:///PATH or "+
			"static (peers of the file)")
	f.StringVar(&c.MemberID, "member-id", c.MemberID, "name of this host on the link (default: its host name)")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	f.StringVar(&c.User, "user", c.User,
		"user to go on as once the interface is up, with CAP_NET_ADMIN only (default: who started it)")
	f.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
}

// A pkeyValue is a P_Key as a flag.
type pkeyValue uint16

// String implements [pflag.Value].
func (k pkeyValue) String() string { return fmt.Sprintf("0x%04x", uint16(k)) }

// Set implements [pflag.Value].
func (k *pkeyValue) Set(s string) error {
	n, err := strconv.ParseUint(s, 0, 16)
	if err != nil {
		return fmt.Errorf("%q is no P_Key, such as 0x8001", s)
	}
	*k = pkeyValue(n)
	return nil
}

// Type implements [pflag.Value].
func (*pkeyValue) Type() string { return "P_Key" }

// A valueError is a value that a setting cannot have.
type valueError struct {
	key  string // as in the file; one item of a list has its index: peers[0]
	text string
}

func (e *valueError) Error() string { return e.text }

func bad(key, format string, args ...any) error {
	return &valueError{key, fmt.Sprintf(format, args...)}
}

// load reads the file at path over c and returns the line of every key. Unknown
// keys are errors with line numbers.
func (c *Config) load(path string) (lines map[string]int, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if err := c.decode(b); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return linesOf(b), nil
}

// linesOf returns the line of every key of a file that has been decoded, and of
// every item of its lists.
func linesOf(b []byte) map[string]int {
	lines := map[string]int{}
	eachKey(b, func(key string, value *yaml.Node) {
		lines[key] = value.Line
		for i, item := range value.Content {
			lines[fmt.Sprintf("%s[%d]", key, i)] = item.Line
		}
	})
	return lines
}

// eachKey visits the keys at the top of the first document in b.
func eachKey(b []byte, visit func(key string, value *yaml.Node)) {
	var doc yaml.Node
	if yaml.Unmarshal(b, &doc) != nil || len(doc.Content) == 0 || doc.Content[0].Kind != yaml.MappingNode {
		return
	}
	pairs := doc.Content[0].Content
	for i := 0; i+1 < len(pairs); i += 2 {
		visit(pairs[i].Value, pairs[i+1])
	}
}

// What the YAML library says of a type error, in terms of Go.
var (
	yamlUnknown = regexp.MustCompile(`line (\d+): field ((?s).*) not found in type \S+`)
	// a tag may have any characters
	yamlType = regexp.MustCompile("line (\\d+): cannot unmarshal !+((?s).*?)(?: `((?s).*)`)? into (\\S+)$")
)

// typeError says it in terms of the file.
func typeError(e string) string {
	e = yamlUnknown.ReplaceAllString(e, `line $1: unknown key "$2" (ipoibcmd init prints all keys)`)
	m := yamlType.FindStringSubmatch(e)
	if m == nil {
		return e
	}
	is := map[string]string{"seq": "a list", "map": "keys and values"}[m[2]]
	if is == "" {
		is = fmt.Sprintf("%q", m[3])
	}
	want := "keys and values, such as name: ibcm0"
	switch strings.TrimPrefix(m[4], "*") {
	case "string":
		want = "a word"
	case "bool":
		want = "true or false"
	case "[]string":
		want = "a list"
	case "int", "uint16", "uint32":
		want = "a number"
		if m[2] == "int" {
			want = "a number in range" // it is one, but too large or negative
		}
	}
	return fmt.Sprintf("line %s: %s where %s belongs (ipoibcmd init shows an example)", m[1], is, want)
}

func (c *Config) decode(b []byte) error {
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	err := d.Decode(c)
	if errors.Is(err, io.EOF) {
		return nil // empty, or comments only
	}
	var te *yaml.TypeError
	if errors.As(err, &te) {
		for i, e := range te.Errors {
			te.Errors[i] = typeError(e)
		}
		return errors.New(strings.Join(te.Errors, "; "))
	}
	if err != nil {
		return err
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("more than one YAML document; the second would be ignored")
	}
	eachKey(b, func(key string, value *yaml.Node) {
		// The library would cut the fraction off.
		if err == nil && value.ShortTag() == "!!float" &&
			slices.Contains([]string{"ud_mtu", "receive_mtu", "pkey", "qkey", "threads"}, key) {
			err = fmt.Errorf("line %d: %q where a whole number belongs", value.Line, value.Value)
		}
	})
	return err
}

// configure merges defaults, file and flags; a flag that was given wins.
func configure(cmd *cobra.Command, flags *Config, file string) (Config, error) {
	c := defaults()
	var lines map[string]int
	if file != "" {
		var err error
		if lines, err = c.load(file); err != nil {
			return c, err
		}
	}
	over := overridden{file: c, path: file, lines: maps.Clone(lines)}
	set := func(name string, apply func()) {
		if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
			apply()
			key := strings.ReplaceAll(name, "-", "_")
			key = cmp.Or(map[string]string{"address": "addresses"}[key], key)
			over.add(key)
			maps.DeleteFunc(lines, func(k string, _ int) bool { return stem(k) == key })
		}
	}
	set("underlay", func() { c.Underlay = flags.Underlay })
	set("name", func() { c.Name = flags.Name })
	set("netns", func() { c.Netns = flags.Netns })
	set("address", func() { c.Addresses = flags.Addresses })
	set("control", func() { c.Control = flags.Control })
	set("allow", func() { c.Allow = flags.Allow })
	set("mode", func() { c.Mode = flags.Mode })
	set("cm-transport", func() { c.CMTransport = flags.CMTransport })
	set("ud-mtu", func() { c.UDMTU = flags.UDMTU })
	set("receive-mtu", func() { c.ReceiveMTU = flags.ReceiveMTU })
	set("traffic-class", func() { c.Class = flags.Class })
	set("ecn", func() { c.ECN = flags.ECN })
	set("gid", func() { c.GID = flags.GID })
	set("provider", func() { c.Provider = flags.Provider })
	set("device", func() { c.Device = flags.Device })
	set("port", func() { c.Port = flags.Port })
	set("threads", func() { c.Threads = flags.Threads })
	set("pkey", func() { c.PKey = flags.PKey })
	set("arp-accept", func() { c.ARPAccept = flags.ARPAccept })
	set("link", func() { c.Link = flags.Link })
	set("membership", func() { c.Membership = flags.Membership })
	set("member-id", func() { c.MemberID = flags.MemberID })
	set("log-format", func() { c.LogFormat = flags.LogFormat })
	set("user", func() { c.User = flags.User })
	set("log-level", func() { c.LogLevel = flags.LogLevel })
	if c.Underlay == "" && c.Device != "" && c.Provider == ibVerbs {
		c.Underlay = ibverbs.NetworkDevice(c.Device)
	}
	err := c.check()
	var v *valueError
	if errors.As(err, &v) && lines[v.key] > 0 {
		err = fmt.Errorf("%s: line %d: %w", file, lines[v.key], err)
	}
	if err == nil {
		err = over.check(&c)
	}
	return c, err
}

// A settings is a checked Config in the types the product uses.
type settings struct {
	prefixes []netip.Prefix
	gid      ib.GID
	peers    []ib.GID
	link     linkSpec
	allow    ib.GIDSet // talked with at all
	ask      []netip.Prefix
	trust    []netip.Prefix
	level    slog.Level
	idle     time.Duration
	user     *sandbox.User // nil: as who started it
}

// check says what is wrong with c, naming key, flag and remedy.
func (c *Config) check() error {
	_, err := c.settings()
	return err
}

// checkGuards says what is wrong with what guards the metrics, but for the files'
// contents, which only the daemon may be able to read.
func (c *Config) checkGuards() error {
	for _, f := range []struct{ key, path string }{{"metrics_tls", c.MetricsTLS}, {"metrics_auth", c.MetricsAuth}} {
		switch {
		case f.path != "" && c.Metrics == "":
			return &valueError{f.key, f.key + ": there is nothing to guard, because metrics is empty"}
		case f.path != "" && !filepath.IsAbs(f.path):
			return &valueError{f.key, fmt.Sprintf("%s %q: want an absolute path", f.key, f.path)}
		}
	}
	host, _, _ := net.SplitHostPort(c.Metrics)
	if a, err := netip.ParseAddr(host); c.MetricsAuth != "" && c.MetricsTLS == "" && host != "" &&
		(err != nil || !a.IsLoopback()) {
		return &valueError{"metrics_auth",
			fmt.Sprintf("metrics_auth: passwords would go to %s in the clear: set metrics_tls too", c.Metrics)}
	}
	return nil
}

// maxPort is the largest number of a port (IBA volume 1 section 14.2.5.3).
const maxPort = 255

// infiniBand reports whether the interface is on an InfiniBand port: a device is named,
// and it has no network device below it.
func (c *Config) infiniBand() bool {
	return c.Underlay == "" && c.Device != "" && c.Provider == ibVerbs
}

func (c *Config) settings() (s settings, err error) {
	for _, step := range []func(*settings) error{c.checkUnderlay, c.checkInterface, c.checkPackets, c.parseAddresses,
		c.parsePeers, c.parseHosts, c.checkMetrics, c.checkLimits, c.parseUser, c.parseLog, c.parseIdle} {
		if err := step(&s); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (c *Config) checkUnderlay(*settings) error {
	switch {
	case c.Provider != softRoCE && c.Provider != ibVerbs:
		return bad("provider", "provider %q: must be softroce or ibverbs", c.Provider)
	case c.Device != "" && c.Provider != ibVerbs:
		return bad("device", "device %q: only provider ibverbs has RDMA devices", c.Device)
	case c.infiniBand() && !ibverbs.IsInfiniBand(c.Device, c.Port):
		return bad("device",
			"device %q: no RDMA device of that name has a network device, or an InfiniBand port %d (ipoibcmd devices "+
				"lists them)", c.Device, c.Port)
	case c.Port < 1 || c.Port > maxPort:
		return bad("port", "port %d: the ports of a device are 1 to %d", c.Port, maxPort)
	case c.MakeLink && !c.infiniBand():
		return bad("create_broadcast",
			"create_broadcast: only a subnet administrator has groups that are made; give the device of an InfiniBand "+
				"port, and no underlay")
	case c.Underlay == "" && !c.infiniBand():
		return bad("underlay", "no underlay: give --underlay DEVICE (ipoibcmd devices lists them)")
	}
	return nil
}

func (c *Config) checkInterface(*settings) error {
	switch {
	case !validIfName(c.Name):
		return bad("name",
			"name %q: an interface name has 1 to 15 characters, no slash, colon or blank, and is not all, default or lo", c.Name)
	case len(c.controlPath()) > maxSocketPath:
		return bad("control", "control %q: a socket's path has at most %d characters", c.Control, maxSocketPath)
	case !slices.Contains([]string{"rc", "uc", "auto", "ud"}, c.Mode):
		return bad("mode", "mode %q: must be rc, uc, auto or ud", c.Mode)
	case c.ARPAccept != arpProbe && c.ARPAccept != arpAlways:
		return bad("arp_accept", "arp_accept %q: must be probe or always", c.ARPAccept)
	case !slices.Contains([]string{"auto", "gsi", "inband"}, c.CMTransport):
		return bad("cm_transport", "cm_transport %q: must be auto, gsi or inband", c.CMTransport)
	}
	return nil
}

// checkPackets looks at what packets are sent and taken: their size, class and keys.
func (c *Config) checkPackets(*settings) error {
	switch {
	case c.UDMTU.most() < mtu.MinIPv4 || c.UDMTU.most() > mtu.MaxUD:
		return bad("ud_mtu", "ud_mtu %d: must be auto, or 576 to 4092 octets", c.UDMTU)
	case c.ReceiveMTU < 1284 || c.ReceiveMTU > 65524:
		return bad("receive_mtu", "receive_mtu %d: must be 1284 to 65524 octets, header included", c.ReceiveMTU)
	case c.ReceiveMTU < c.UDMTU.most()+encap.HeaderLen:
		return bad("receive_mtu",
			"receive_mtu %d: must be at least ud_mtu and 4 more, %d, or connections would carry less than datagrams",
			c.ReceiveMTU, c.UDMTU.most()+encap.HeaderLen)
	case c.Class.fixed() < 0 || c.Class.fixed() > 252 || c.Class&3 != 0:
		return bad("traffic_class",
			"traffic_class %v: must be four times a DSCP, 0 to 252: the lower two bits are those of ECN", c.Class)
	case c.Class != 0 && c.Provider != softRoCE:
		return bad("traffic_class", "traffic_class %v: only provider softroce sets it", c.Class)
	case !slices.Contains([]string{ecnOff, ecnAuto, ecnOn}, c.ECN):
		return bad("ecn", "ecn %q: must be auto, on or off", c.ECN)
	case c.ECN == ecnOn && c.Provider != softRoCE:
		return bad("ecn", "ecn on: only provider softroce sets it; an adapter has settings of its own")
	case c.Threads < 0 || c.Threads > softroce.MaxThreads:
		return bad("threads", "threads %d: must be auto, or 1 to %d", c.Threads, softroce.MaxThreads)
	case c.Threads > 1 && c.Provider != softRoCE:
		return bad("threads", "threads %d: only provider softroce has several", c.Threads)
	case c.PKey&0x7fff == 0:
		return bad("pkey", "pkey 0x%04x: partition 0 does not exist", c.PKey)
	case c.PKey&uint16(ib.PKeyFull) == 0:
		// IBTA volume 1 section 10.9.1.1: two limited members cannot talk to each
		// other, and the broadcast group of RFC 4391 is that of full members.
		return bad("pkey",
			"pkey 0x%04x: a limited member, which not all could talk to: must be 0x8001 to 0xffff, such as 0x%04x",
			c.PKey, c.PKey|uint16(ib.PKeyFull))
	case c.QKey == 0:
		return bad("qkey", "qkey 0: must not be 0")
	}
	return nil
}

func (c *Config) parseAddresses(s *settings) error {
	for i, a := range c.Addresses {
		key := fmt.Sprintf("addresses[%d]", i)
		p, err := netip.ParsePrefix(a)
		if err != nil {
			return bad(key, "address %q: want an address with prefix length, such as 10.0.0.1/24", a)
		}
		if a := p.Addr(); a.IsMulticast() || a.IsUnspecified() || a.IsLoopback() || a.Is4In6() || a.Zone() != "" ||
			a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
			return bad(key, "address %q: not an address an interface can have", p)
		}
		if p.Addr().Is6() && c.UDMTU.most() < mtu.MinIPv6 {
			return bad(key, "address %q: there is no IPv6 on a link whose ud_mtu, %d here, is below %d", p, c.UDMTU, mtu.MinIPv6)
		}
		s.prefixes = append(s.prefixes, p)
	}
	return nil
}

func (c *Config) parsePeers(s *settings) (err error) {
	if c.GID != "" {
		if s.gid, err = parseGID(c.GID); err != nil {
			return bad("gid", "gid: %v", err)
		}
	}
	if len(c.Peers) > 0 && c.Provider == ibVerbs {
		return bad("peers",
			"peers: provider ibverbs cannot receive the copies that take the place of multicast; leave the list out, and "+
				"have the underlay carry multicast")
	}
	if len(c.Peers) > group.MaxPeers {
		return bad("peers",
			"peers: %d are given, at most %d can be: each packet to a group is copied to all of them; use an underlay that "+
				"carries multicast",
			len(c.Peers), group.MaxPeers)
	}
	for i, p := range c.Peers {
		g, err := parseGID(p)
		if err != nil {
			return bad(fmt.Sprintf("peers[%d]", i), "peers: %v", err)
		}
		s.peers = append(s.peers, g)
	}
	return nil
}

// parseHosts finds out who is on the link, and who of them is talked with.
func (c *Config) parseHosts(s *settings) (err error) {
	if s.link, err = c.parseMembership(); err != nil {
		return err
	}
	allow, err := gidPrefixes("allow", c.Allow)
	if err != nil {
		return err
	}
	s.allow = ib.NewGIDSet(allow)
	for i, g := range s.peers {
		if !s.allow.IsEmpty() && !s.allow.Contains(g) {
			return bad(fmt.Sprintf("peers[%d]", i),
				"peers: %v is not in allow, so nothing of it would be taken: add it there, or leave allow empty", g)
		}
	}
	if s.ask, err = gidPrefixes("peer_allow", c.PeerAllow); err != nil {
		return err
	}
	if s.trust, err = gidPrefixes("peer_trust", c.PeerTrust); err != nil {
		return err
	}
	return nil
}

func (c *Config) checkMetrics(*settings) error {
	if _, port, err := net.SplitHostPort(c.Metrics); c.Metrics != "" && (err != nil || port == "") {
		return bad("metrics", "metrics %q: want an address with port, such as 127.0.0.1:9755, or :9755, which is the same",
			c.Metrics)
	}
	if err := c.checkGuards(); err != nil {
		return err
	}
	if c.MetricPeers < 0 || c.MetricPeers > agent.MaxMetricPeers {
		return bad("metric_peers", "metric_peers %d: must be 0 to %d", c.MetricPeers, agent.MaxMetricPeers)
	}
	return nil
}

func (c *Config) checkLimits(*settings) error {
	if n := c.Limits.Connections; n < leastLimit || n > mostConnections {
		return bad("limits.connections", "limits.connections %d: must be %d to %d", n, leastLimit, mostConnections)
	}
	if n := c.Limits.Neighbours; n < leastLimit || n > mostNeighbours {
		return bad("limits.neighbours", "limits.neighbours %d: must be %d to %d", n, leastLimit, mostNeighbours)
	}
	return nil
}

func (c *Config) parseUser(s *settings) (err error) {
	if c.User != "" && c.Provider == ibVerbs {
		// Uverbs takes writes only with the credentials that opened it (include/rdma/ib.h,
		// ib_safe_file_access), and rdma_rxe's send queue is rung by one.
		return bad("user",
			"user: provider ibverbs cannot go on as another user: the kernel takes no requests after that; start the "+
				"program as that user, with CAP_NET_ADMIN")
	}
	if c.User != "" {
		if s.user, err = sandbox.LookUp(c.User); err != nil {
			return bad("user", "%v", err)
		}
	}
	return nil
}

func (c *Config) parseLog(s *settings) error {
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return bad("log_format", "log_format %q: must be text or json", c.LogFormat)
	}
	if err := s.level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return bad("log_level", "log_level %q: must be debug, info, warn or error", c.LogLevel)
	}
	return nil
}

func (c *Config) parseIdle(s *settings) (err error) {
	if s.idle, err = time.ParseDuration(c.IdleTimeout); err != nil || s.idle < 0 {
		return bad("idle_timeout", "idle_timeout %q: want a duration such as 5m; 0 means connections stay", c.IdleTimeout)
	}
	return nil
}

// maxSocketPath is the longest path that the kernel takes for a UNIX socket.
const maxSocketPath = 107

func validIfName(s string) bool {
	return len(s) >= 1 && len(s) <= 15 && !strings.ContainsAny(s, "/: \t\n%") &&
		!slices.Contains([]string{".", "..", "all", "default", "lo"}, s) // the kernel's own, here and in sysctls
}

// parseGID parses a GID that a host can have.
func parseGID(s string) (ib.GID, error) {
	g, err := ib.ParseGID(s)
	if err != nil {
		return g, err
	}
	if a := g.Addr(); a.IsUnspecified() || a.IsMulticast() {
		return g, fmt.Errorf("%s is no address of a host", s)
	}
	return g, nil
}

// maxGIDPrefixes bounds each list of GIDs and prefixes of them.
const maxGIDPrefixes = 4096

// gidPrefixes reads the list of GIDs and prefixes of them that key has.
func gidPrefixes(key string, texts []string) (out []netip.Prefix, err error) {
	if len(texts) > maxGIDPrefixes {
		return nil, &valueError{key, fmt.Sprintf("%s: %d are given, at most %d can be: use shorter prefixes", key,
			len(texts), maxGIDPrefixes)}
	}
	for i, text := range texts {
		p, ok := gidPrefix(text)
		if !ok {
			return nil, &valueError{fmt.Sprintf("%s[%d]", key, i),
				fmt.Sprintf("%s %q: want GIDs or prefixes of them, such as fe80::1, fe80::/10 or 192.0.2.0/24", key, text)}
		}
		out = append(out, p)
	}
	return out, nil
}

// gidPrefix parses a GID, or a prefix of GIDs.
func gidPrefix(s string) (netip.Prefix, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		a = a.Unmap() // status shows the GID 192.0.2.1 as ::ffff:192.0.2.1
		return netip.PrefixFrom(a, a.BitLen()), a.Zone() == ""
	}
	p, err := netip.ParsePrefix(s)
	if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	return p.Masked(), err == nil
}

// controlPath returns where the control socket is.
func (c *Config) controlPath() string {
	if c.Control != "" {
		return c.Control
	}
	return control.SocketPath(c.Name)
}
