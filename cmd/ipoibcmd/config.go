package main

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"ipoibcm/agent"
	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/membership/etcd"
	"ipoibcm/sandbox"
)

// sample is what init prints. A test loads it and compares it with the defaults.
//
//go:embed sample.yaml
var sample []byte

// A Config has the settings of run, from the file and from flags. A setting that neither gives has its
// value from defaults.
type Config struct {
	Underlay    string       `yaml:"underlay"`
	Name        string       `yaml:"name"`
	Netns       string       `yaml:"netns"`
	Addresses   []string     `yaml:"addresses"`
	Control     string       `yaml:"control"`
	Group       string       `yaml:"control_group"`
	Mode        string       `yaml:"mode"`
	CMTransport string       `yaml:"cm_transport"`
	ServiceID   string       `yaml:"service_id"`
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
	QKey        qKey         `yaml:"qkey"`
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

// Limits bound what the daemon keeps. docs/scale.md says how much memory each takes.
type Limits struct {
	Connections int `yaml:"connections"` // connected queue pairs
	Neighbours  int `yaml:"neighbours"`  // entries of the neighbour cache, and interfaces on record
}

// Bounds of Limits: with fewer a host could not work, and more was never measured.
const leastLimit, mostConnections, mostNeighbours = 16, 10_000, 100_000

// Sandbox holds the switches of what the process gives up once it serves.
type Sandbox struct {
	Landlock bool `yaml:"landlock"` // files and TCP, where the kernel has it
	Seccomp  bool `yaml:"seccomp"`  // system calls, where the kernel has it
}

// Values of service_id: the form of the service ID that an unknown peer is asked for first.
const idRFC, idLinux = "rfc4755", "linux"

// Values of arp_accept.
const arpProbe, arpAlways = "probe", "always"

// Offload holds the switches of what makes the data path fast.
type Offload struct {
	GSO bool `yaml:"gso"` // UDP_SEGMENT, where it works
	GRO bool `yaml:"gro"` // UDP_GRO, where it works
	// OneThread has the provider's receiving thread read the TUN, where the provider can.
	OneThread bool `yaml:"one_thread"`
	// HoldP lets the provider's receiving thread hold its P while it waits, where the thread can.
	HoldP bool `yaml:"hold_p"`
	// Checksum has us, not the kernel, do the checksums of TCP and UDP at the TUN, where the kernel lets us.
	Checksum bool `yaml:"checksum"`
	// TSO exchanges TCP segments longer than packets with the kernel, where the kernel can do that and
	// Checksum is on.
	TSO bool `yaml:"tso"`
	// USO does the same as TSO with UDP datagrams of one flow.
	USO bool `yaml:"uso"`
	// BusyPoll lets the receiving thread look for more packets for a while before it waits, where it holds
	// its P.
	BusyPoll bool `yaml:"busy_poll"`
	// Connected gives a busy IPv6 destination a connected socket.
	Connected bool `yaml:"connected"`
}

// defaults returns the configuration without file and flags.
func defaults() Config {
	return Config{
		Name:        "ibcm0",
		Mode:        "rc",
		CMTransport: "auto",
		ServiceID:   idRFC,
		ReceiveMTU:  65524,
		ECN:         ecnAuto,
		Provider:    "softroce",
		LogLevel:    "info",
		LogFormat:   "text",
		Group:       "ipoibcm",
		Port:        1,
		Threads:     0, // auto
		PKey:        uint16(ib.DefaultPKey),
		QKey:        qKey(ib.QKeyIPoIB),
		IdleTimeout: "5m",
		ARPAccept:   arpProbe,
		Membership:  fromStatic,
		StateDir:    "/var/lib/ipoibcm",
		Etcd:        Etcd{Lease: etcd.DefaultLease.String()},
		PeerAllow:   []string{agent.DefaultPeerAllow[0].String()},
		Offload: Offload{GSO: true, GRO: true, OneThread: true, HoldP: true, BusyPoll: true, Connected: true,
			Checksum: true, TSO: true, USO: true},
		Sandbox: Sandbox{Landlock: true, Seccomp: true},
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
	f.Var(&c.Threads, "threads", "data threads: a number, or auto (as many as processors, 4 at most, but 1 on two)")
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

// configure merges defaults, file and flags, and checks the result. A flag that was given wins over the
// file.
func configure(cmd *cobra.Command, flags *Config, file string) (settings, error) {
	c := defaults()
	var lines map[string]int
	if file != "" {
		var err error
		if lines, err = c.load(file); err != nil {
			return settings{}, err
		}
	}
	over := overridden{file: c, path: file, lines: lines}
	var given []string // settings that flags set
	cmd.Flags().Visit(func(f *pflag.Flag) {
		key := strings.ReplaceAll(f.Name, "-", "_")
		key = cmp.Or(map[string]string{"address": "addresses"}[key], key)
		given = append(given, key)
		over.add(key)
	})
	c.take(flags, given)
	s, err := c.settings()
	var v *valueError
	if at := atLine(lines, err); at != "" && errors.As(err, &v) && !slices.Contains(given, stem(v.key)) {
		err = fmt.Errorf("%s: %s%w", file, at, err)
	}
	if err == nil {
		err = over.check(&c)
	}
	return s, err
}

// take sets the settings keys, as the file names them, to those of from. Names of other things are no matter.
func (c *Config) take(from *Config, keys []string) {
	to := reflect.ValueOf(c).Elem()
	for i := range to.NumField() {
		if slices.Contains(keys, to.Type().Field(i).Tag.Get("yaml")) {
			to.Field(i).Set(reflect.ValueOf(from).Elem().Field(i))
		}
	}
}

// A settings is a checked Config, with values in the types the product uses.
type settings struct {
	Config
	prefixes []netip.Prefix
	gid      ib.GID
	peers    []ib.GID
	link     linkSpec
	allow    ib.GIDSet // hosts to talk with; empty: all
	ask      []netip.Prefix
	trust    []netip.Prefix
	level    slog.Level
	idle     time.Duration
	user     *sandbox.User // nil: as who started it
	mode     ipoib.Mode
	cm       ipoib.CMTransport
}

// controlPath returns where the control socket is.
func (c *Config) controlPath() string {
	if c.Control != "" {
		return c.Control
	}
	return control.SocketPath(c.Name)
}
