package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"ipoibcm/agent"
	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/mtu"
	"ipoibcm/provider/ibverbs"
	"ipoibcm/provider/softroce"
	"ipoibcm/sandbox"
	"ipoibcm/wire/encap"
)

// A valueError is a value that a setting cannot have.
type valueError struct {
	key    string // as in the file; one item of a list has its index: peers[0]
	text   string
	absent bool // what the value names is not there now: it may come
}

func (e *valueError) Error() string { return e.text }

func bad(key, format string, args ...any) error {
	return &valueError{key: key, text: fmt.Sprintf(format, args...)}
}

// atLine returns "line N: " for the value that err is about; nothing if lines do not have it.
func atLine(lines map[string]int, err error) string {
	if v := (*valueError)(nil); errors.As(err, &v) && lines[v.key] > 0 {
		return fmt.Sprintf("line %d: ", lines[v.key])
	}
	return ""
}

// refuse returns the error of [bad] if a value is wrong, else nil.
func refuse(wrong bool, key, format string, args ...any) error {
	return errorIf(wrong, bad(key, format, args...))
}

// errorIf returns err if something is wrong, else nil.
func errorIf(wrong bool, err error) error {
	if wrong {
		return err
	}
	return nil
}

// checkGuards checks the settings that guard the metrics, but not the files' contents, which only the
// daemon may be able to read.
func (c *Config) checkGuards() error {
	for _, f := range []struct{ key, path string }{{"metrics_tls", c.MetricsTLS}, {"metrics_auth", c.MetricsAuth}} {
		if err := cmp.Or(
			refuse(f.path != "" && c.Metrics == "", f.key, "%s: there is nothing to guard, because metrics is empty", f.key),
			refuse(f.path != "" && !filepath.IsAbs(f.path), f.key, "%s %q: want an absolute path", f.key, f.path),
		); err != nil {
			return err
		}
	}
	host, _, _ := net.SplitHostPort(c.Metrics)
	a, err := netip.ParseAddr(host)
	return refuse(c.MetricsAuth != "" && c.MetricsTLS == "" && host != "" && (err != nil || !a.IsLoopback()),
		"metrics_auth", "metrics_auth: passwords would go to %s in the clear: set metrics_tls too", c.Metrics)
}

// maxPort is the largest port number (IBA volume 1 section 14.2.5.3).
const maxPort = 255

// infiniBand reports whether the interface is on an InfiniBand port: a device of provider ibverbs is
// configured, and no underlay.
func (c *Config) infiniBand() bool {
	return c.Underlay == "" && c.Device != "" && c.Provider == ibVerbs
}

// networkDevice returns the network device of an RDMA device, "" if it has none. Tests have devices of their
// own.
var networkDevice = ibverbs.NetworkDevice

// settings checks c. Its error says what is wrong with c, with key, flag and remedy. Without an underlay, the
// network device of an ibverbs device is the underlay.
func (c *Config) settings() (s settings, err error) {
	s.Config = *c
	c = &s.Config
	if c.infiniBand() {
		c.Underlay = networkDevice(c.Device)
	}
	for _, step := range []func(*settings) error{c.checkUnderlay, c.checkInterface, c.checkPackets, c.parseAddresses,
		c.parsePeers, c.parseHosts, c.checkMetrics, c.checkLimits, c.parseUser, c.parseLog, c.parseIdle} {
		if err := step(&s); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (c *Config) checkUnderlay(*settings) error {
	return cmp.Or(
		refuse(c.Provider != softRoCE && c.Provider != ibVerbs, "provider",
			"provider %q: must be softroce or ibverbs", c.Provider),
		refuse(c.Device != "" && c.Provider != ibVerbs, "device",
			"device %q: only provider ibverbs has RDMA devices", c.Device),
		errorIf(c.infiniBand() && !ibverbs.IsInfiniBand(c.Device, c.Port), &valueError{key: "device", absent: true,
			text: fmt.Sprintf("device %q: no RDMA device of that name has a network device, or an InfiniBand port %d "+
				"(ipoibcmd devices lists them)", c.Device, c.Port)}),
		refuse(c.Port < 1 || c.Port > maxPort, "port", "port %d: the ports of a device are 1 to %d", c.Port, maxPort),
		refuse(c.MakeLink && !c.infiniBand(), "create_broadcast",
			"create_broadcast: only a subnet administrator has groups that are made; give the device of an InfiniBand "+
				"port, and no underlay"),
		refuse(c.Underlay == "" && !c.infiniBand(), "underlay",
			"no underlay: give --underlay DEVICE (ipoibcmd devices lists them)"),
	)
}

func (c *Config) checkInterface(s *settings) error {
	var noMode, noCM error
	s.mode, noMode = ipoib.ParseMode(c.Mode)
	s.cm, noCM = ipoib.ParseCMTransport(c.CMTransport)
	return cmp.Or(
		refuse(!validIfName(c.Name), "name",
			"name %q: an interface name has 1 to 15 characters, no slash, colon or blank, and is not all, default or lo",
			c.Name),
		refuse(len(c.controlPath()) > maxSocketPath, "control",
			"control %q: a socket's path has at most %d characters", c.Control, maxSocketPath),
		refuse(noMode != nil, "mode", "mode %q: must be rc, uc, auto or ud", c.Mode),
		refuse(c.ARPAccept != arpProbe && c.ARPAccept != arpAlways, "arp_accept",
			"arp_accept %q: must be probe or always", c.ARPAccept),
		refuse(noCM != nil, "cm_transport", "cm_transport %q: must be auto, gsi or inband", c.CMTransport),
		refuse(c.ServiceID != idRFC && c.ServiceID != idLinux, "service_id",
			"service_id %q: must be rfc4755 (0x01 first) or linux (0x10 first)", c.ServiceID),
	)
}

// checkPackets checks the settings of packets that are sent and taken: their size, class and keys.
func (c *Config) checkPackets(*settings) error {
	datagram := c.UDMTU.most() + encap.HeaderLen
	_, knownECN := ecnModes[c.ECN]
	return cmp.Or(
		refuse(c.UDMTU.most() < mtu.MinIPv4 || c.UDMTU.most() > mtu.MaxUD, "ud_mtu",
			"ud_mtu %d: must be auto, or 576 to 4092 octets", c.UDMTU),
		refuse(c.ReceiveMTU < 1284 || c.ReceiveMTU > 65524, "receive_mtu",
			"receive_mtu %d: must be 1284 to 65524 octets, header included", c.ReceiveMTU),
		refuse(c.ReceiveMTU < datagram, "receive_mtu",
			"receive_mtu %d: must be at least ud_mtu and 4 more, %d, or connections would carry less than datagrams",
			c.ReceiveMTU, datagram),
		refuse(c.Class.fixed() < 0 || c.Class.fixed() > 252 || c.Class&3 != 0, "traffic_class",
			"traffic_class %v: must be four times a DSCP, 0 to 252: the lower two bits are those of ECN", c.Class),
		refuse(c.Class != 0 && c.Provider != softRoCE, "traffic_class",
			"traffic_class %v: only provider softroce sets it", c.Class),
		refuse(!knownECN, "ecn", "ecn %q: must be auto, on or off", c.ECN),
		refuse(c.ECN == ecnOn && c.Provider != softRoCE, "ecn",
			"ecn on: only provider softroce sets it; an adapter has settings of its own"),
		refuse(c.Threads < 0 || c.Threads > softroce.MaxThreads, "threads",
			"threads %d: must be auto, or 1 to %d", c.Threads, softroce.MaxThreads),
		refuse(c.Threads > 1 && c.Provider != softRoCE, "threads",
			"threads %d: only provider softroce has several", c.Threads),
		refuse(c.PKey&0x7fff == 0, "pkey", "pkey 0x%04x: partition 0 does not exist", c.PKey),
		// IBTA volume 1 section 10.9.1.1: two limited members cannot talk to each
		// other, and the broadcast group of RFC 4391 is that of full members.
		refuse(c.PKey&uint16(ib.PKeyFull) == 0, "pkey",
			"pkey 0x%04x: a limited member, which not all could talk to: must be 0x8001 to 0xffff, such as 0x%04x",
			c.PKey, c.PKey|uint16(ib.PKeyFull)),
		refuse(c.QKey == 0, "qkey", "qkey 0: must not be 0"),
	)
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
	if err := cmp.Or(
		refuse(len(c.Peers) > 0 && c.Provider == ibVerbs, "peers",
			"peers: provider ibverbs cannot receive the copies that take the place of multicast; leave the list out, and "+
				"have the underlay carry multicast"),
		refuse(len(c.Peers) > group.MaxPeers, "peers",
			"peers: %d are given, at most %d can be: each packet to a group is copied to all of them; use an underlay that "+
				"carries multicast", len(c.Peers), group.MaxPeers),
	); err != nil {
		return err
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

// parseHosts parses membership, allow, peer_allow and peer_trust, and checks that allow has all peers.
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
	s.trust, err = gidPrefixes("peer_trust", c.PeerTrust)
	return err
}

func (c *Config) checkMetrics(*settings) error {
	_, port, err := net.SplitHostPort(c.Metrics)
	return cmp.Or(
		refuse(c.Metrics != "" && (err != nil || port == ""), "metrics",
			"metrics %q: want an address with port, such as 127.0.0.1:9755, or :9755, which is the same", c.Metrics),
		c.checkGuards(),
		refuse(c.MetricPeers < 0 || c.MetricPeers > agent.MaxMetricPeers, "metric_peers",
			"metric_peers %d: must be 0 to %d", c.MetricPeers, agent.MaxMetricPeers),
	)
}

func (c *Config) checkLimits(*settings) error {
	conns, neighbours := c.Limits.Connections, c.Limits.Neighbours
	return cmp.Or(
		refuse(conns < leastLimit || conns > mostConnections, "limits.connections",
			"limits.connections %d: must be %d to %d", conns, leastLimit, mostConnections),
		refuse(neighbours < leastLimit || neighbours > mostNeighbours, "limits.neighbours",
			"limits.neighbours %d: must be %d to %d", neighbours, leastLimit, mostNeighbours),
	)
}

func (c *Config) parseUser(s *settings) (err error) {
	if c.User == "" {
		return nil
	}
	if c.Provider == ibVerbs {
		// uverbs takes writes only with the credentials that opened the file (include/rdma/ib.h,
		// ib_safe_file_access), and rdma_rxe learns by a write that there is something to send.
		return bad("user",
			"user: provider ibverbs cannot go on as another user: the kernel takes no requests after that; start the "+
				"program as that user, with CAP_NET_ADMIN")
	}
	if s.user, err = sandbox.LookUp(c.User); err != nil {
		return &valueError{key: "user", text: err.Error(), absent: true}
	}
	return nil
}

func (c *Config) parseLog(s *settings) error {
	noLevel := s.level.UnmarshalText([]byte(c.LogLevel))
	return cmp.Or(
		refuse(c.LogFormat != "text" && c.LogFormat != "json", "log_format",
			"log_format %q: must be text or json", c.LogFormat),
		refuse(noLevel != nil, "log_level", "log_level %q: must be debug, info, warn or error", c.LogLevel),
	)
}

func (c *Config) parseIdle(s *settings) (err error) {
	s.idle, err = time.ParseDuration(c.IdleTimeout)
	return refuse(err != nil || s.idle < 0, "idle_timeout",
		"idle_timeout %q: want a duration such as 5m; 0 means connections stay", c.IdleTimeout)
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

// gidPrefixes parses the setting key, a list of GIDs and prefixes of GIDs.
func gidPrefixes(key string, texts []string) (out []netip.Prefix, err error) {
	if len(texts) > maxGIDPrefixes {
		return nil, bad(key, "%s: %d are given, at most %d can be: use shorter prefixes", key, len(texts), maxGIDPrefixes)
	}
	for i, text := range texts {
		p, ok := gidPrefix(text)
		if !ok {
			return nil, bad(fmt.Sprintf("%s[%d]", key, i),
				"%s %q: want GIDs or prefixes of them, such as fe80::1, fe80::/10 or 192.0.2.0/24", key, text)
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
