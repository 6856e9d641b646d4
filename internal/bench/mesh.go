package main

import (
	"cmp"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
	wg "ipoibcm/internal/wireguard"
)

// namePrefix begins the names of the namespaces; the process ID follows.
const namePrefix = "ipbench-"

// The hosts of a mesh.
const (
	meshSender    = iota
	meshPeer      // receives the sender's load; the way to it may be narrow
	meshBystander // receives other packets of the sender
	meshHosts
	// meshTarget receives from three senders, in a mesh of four hosts.
	meshTarget = meshHosts
)

// A meshKind describes a mesh.
type meshKind struct {
	at   place
	size int // how many hosts it has
	// veth makes a veth pair join the two hosts, in the place of a bridge.
	veth bool
	// traffic is the family of the addresses in the tunnel. Empty means the underlay's.
	traffic string
	// hop is the size of the largest RoCEv2 packet that reaches a host, in octets. Larger ones are
	// dropped without ICMP, as by a router whose ICMP messages are filtered. Zero sets no limit.
	hop int
	// path is the name of the one of [paths] that lies between the bridge and the peer. Empty means none.
	path string
	// threads is the number of data threads of the sender. Zero leaves it to the agent.
	threads int
}

// A mesh is several hosts that reach each other by one contender. They are on one bridge, or two hosts
// are joined by a veth pair. Stress is measured on meshes with a bridge: a bottleneck is one port of the
// bridge, or one class of the sender's own device.
type mesh struct {
	meshKind
	contender string
	bridge    *lab.Host // nil if a veth pair joins the hosts
	hosts     []*lab.Host
	agents    []*lab.Agent
	addrs     []netip.Addr // through the contender
	stops     []func()     // called by close, the last one first
}

// close calls the functions of onClose, the last one first.
func (m *mesh) close() {
	for _, stop := range slices.Backward(m.stops) {
		stop()
	}
}

// onClose makes close call stop.
func (m *mesh) onClose(stop func()) { m.stops = append(m.stops, stop) }

// key returns the key of a series that was measured on m.
func (m *mesh) key(test, variant string) Key { return m.at.key(test, variant, m.contender) }

// underlay and inner return the address of host i on the underlay, and in the tunnel.
func (m *mesh) underlay(i int) string {
	return hostAddr(m.at.family, i, "192.0.2.%d/24", "fd00::%d/64")
}
func (m *mesh) inner(i int) string {
	return hostAddr(cmp.Or(m.traffic, m.at.family), i, "10.99.0.%d/16", "fd99::%d/64")
}

func hostAddr(family string, i int, format4, format6 string) string {
	if family == family4 {
		return fmt.Sprintf(format4, i+1)
	}
	return fmt.Sprintf(format6, i+1)
}

func addr(prefix string) netip.Addr { return netip.MustParsePrefix(prefix).Addr() }

// newMesh makes the hosts, what joins them, and the contender. It returns once the sender
// reaches the others.
func (b *bench) newMesh(ctx context.Context, contender string, kind meshKind) (_ *mesh, err error) {
	m := &mesh{meshKind: kind, contender: contender}
	defer func() {
		if err != nil {
			m.close()
			err = fmt.Errorf("%s, %v: %w", contender, m.at, err)
		}
	}()
	if err := m.makeHosts(b); err != nil {
		return nil, err
	}
	for i, h := range m.hosts {
		m.addrs[i] = addr(m.inner(i))
		if contender == raw {
			m.addrs[i] = addr(m.underlay(i))
		}
		if err := h.AddAddr("eth0", m.underlay(i)); err != nil {
			return nil, err
		}
		if m.hop > 0 {
			if err := h.Swallow("eth0", m.bridge, fmt.Sprintf("port%d", i), m.hop); err != nil {
				return nil, err
			}
		}
	}
	if m.path != "" {
		if err := m.lay(); err != nil {
			return nil, err
		}
	}
	switch contender {
	case raw:
	case vxlan:
		err = m.vxlan()
	case wireguard:
		err = m.wireguard(ctx, b)
	default:
		err = m.ours(ctx, b)
	}
	if err != nil {
		return nil, err
	}
	return m, m.wait(ctx)
}

// makeHosts makes the hosts and joins them.
func (m *mesh) makeHosts(b *bench) (err error) {
	m.hosts, m.agents, m.addrs = make([]*lab.Host, m.size), make([]*lab.Agent, m.size), make([]netip.Addr, m.size)
	for i := range m.hosts {
		if m.hosts[i], err = m.newHost(b); err != nil {
			return err
		}
	}
	if m.veth {
		return lab.Connect(m.hosts[0], "eth0", m.hosts[1], "eth0", m.at.mtu)
	}
	if m.bridge, err = m.newHost(b); err != nil {
		return err
	}
	return lab.Segment(m.bridge, m.hosts, m.at.mtu)
}

// newHost makes a namespace with a name of its own and the TCP of the run, which ends with the mesh.
func (m *mesh) newHost(b *bench) (*lab.Host, error) {
	b.hosts++
	h, err := lab.NewHost(fmt.Sprintf("%s%d-%d", namePrefix, os.Getpid(), b.hosts))
	if err != nil {
		return nil, err
	}
	m.onClose(func() { h.Close() })
	if b.tcp != "" {
		err = h.Sysctl(tcpControl, b.tcp)
	}
	return h, err
}

// wait returns when the other hosts with an address answer pings and, for RC and UC, the connection of the
// sender that carries large packets is up.
func (m *mesh) wait(ctx context.Context) error {
	for _, to := range m.addrs[meshPeer:] {
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			_, err := m.hosts[meshSender].Ping(lab.Ping{Dst: to, Timeout: 200 * time.Millisecond})
			if err == nil {
				break
			}
			if time.Now().After(end) || ctx.Err() != nil {
				return errors.Join(err, ctx.Err())
			}
		}
	}
	mode := modeOf(m.contender)
	if mode != oursRC && mode != oursUC {
		return nil
	}
	_, err := m.agents[meshSender].WaitConns(ctx, 5*time.Second, connected(mode))
	return err
}

// connected returns a function that reports whether a connection of the mode is up.
func connected(mode string) func([]control.Conn) bool {
	return func(conns []control.Conn) bool {
		return slices.ContainsFunc(conns, func(c control.Conn) bool {
			return c.Mode == mode && c.State == lab.Established
		})
	}
}

// device returns the name of the device through which the contender's packets leave, on every host. It
// is empty for wireguard-go, whose device has another name on each host.
func (m *mesh) device() string {
	switch m.contender {
	case raw:
		return "eth0"
	case vxlan:
		return "tunnel"
	case wireguard:
		return ""
	}
	return "ibcm0"
}

// others returns the indices of all hosts but i.
func (m *mesh) others(i int) (list []int) {
	for k := range m.hosts {
		if k != i {
			list = append(list, k)
		}
	}
	return list
}

// vxlan makes a VXLAN device on each host. The device sends frames for unknown addresses to all
// other hosts.
func (m *mesh) vxlan() error {
	overhead := 50 // Ethernet, VXLAN, UDP, IPv4
	if m.at.family == family6 {
		overhead = 70
	}
	for i, h := range m.hosts {
		eth, err := h.Link("eth0")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = "tunnel", m.at.mtu-overhead
		v := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: 42, VtepDevIndex: eth.Attrs().Index, Port: 4789, Learning: true,
			SrcAddr: net.IP(addr(m.underlay(i)).AsSlice())}
		if err := h.Netlink().LinkAdd(v); err != nil {
			return fmt.Errorf("make VXLAN device: %w", err)
		}
		for _, k := range m.others(i) {
			err := h.Netlink().NeighAppend(&netlink.Neigh{LinkIndex: v.Index, Family: unix.AF_BRIDGE,
				State: netlink.NUD_PERMANENT, Flags: netlink.NTF_SELF, IP: net.IP(addr(m.underlay(k)).AsSlice()),
				HardwareAddr: make(net.HardwareAddr, 6)})
			if err != nil {
				return fmt.Errorf("default entry of VXLAN: %w", err)
			}
		}
		if err := errors.Join(h.AddAddr("tunnel", m.inner(i)), h.Up("tunnel")); err != nil {
			return err
		}
	}
	return nil
}

// wireguard starts a wireguard-go on each host, with all others as peers. The MTU is
// the underlay's less 80 octets, the overhead over IPv6.
func (m *mesh) wireguard(ctx context.Context, b *bench) (err error) {
	keys := make([]*ecdh.PrivateKey, len(m.hosts))
	for i := range keys {
		if keys[i], err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
			return err
		}
	}
	for i, h := range m.hosts {
		name := fmt.Sprintf("wgb%d", b.hosts-len(m.hosts)+1+i) // its control socket is visible to all namespaces
		if err := m.startWireguard(b, h, name); err != nil {
			return err
		}
		var peers []wg.Peer
		for _, k := range m.others(i) {
			inner := addr(m.inner(k))
			peers = append(peers, wg.Peer{Key: keys[k].PublicKey(), Endpoint: netip.AddrPortFrom(addr(m.underlay(k)), wg.Port),
				Allowed: netip.PrefixFrom(inner, inner.BitLen())})
		}
		if err := wg.Configure(ctx, wg.Socket(name), keys[i], peers...); err != nil {
			return err
		}
		if err := errors.Join(h.SetMTU(name, m.at.mtu-80), h.AddAddr(name, m.inner(i)), h.Up(name)); err != nil {
			return err
		}
	}
	return nil
}

func (m *mesh) startWireguard(b *bench, h *lab.Host, name string) error {
	log, err := os.Create(filepath.Join(b.dir, h.Name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	c := exec.Command(b.wireguard, "-f", name)
	c.Stdout, c.Stderr = log, log
	if err := h.Start(c); err != nil {
		return fmt.Errorf("start wireguard-go: %w", err)
	}
	m.onClose(func() {
		c.Process.Kill()
		c.Wait()
		os.Remove(wg.Socket(name))
	})
	return nil
}

// ours starts an agent on each host.
func (m *mesh) ours(ctx context.Context, b *bench) error {
	for i := range m.hosts {
		args := []string{"--mode", strings.ToLower(modeOf(m.contender)), "--gid", addr(m.underlay(i)).String(),
			"--address", m.inner(i)}
		if m.at.family == family4 && m.at.mtu < 2100 {
			args = append(args, "--ud-mtu", "1444") // the most that such an underlay carries
		}
		if i == meshSender && m.threads > 0 { // older programs do not know the setting
			args = append(args, "--threads", strconv.Itoa(m.threads))
		}
		if err := m.startAgent(ctx, b, i, args...); err != nil {
			return err
		}
	}
	return nil
}

// startAgent starts an agent on eth0 of host i. It ends with the mesh.
func (m *mesh) startAgent(ctx context.Context, b *bench, i int, args ...string) (err error) {
	name := filepath.Join(b.dir, m.hosts[i].Name)
	m.agents[i], err = lab.StartAgent(ctx, m.hosts[i], lab.AgentConfig{Program: b.programOf(m.contender),
		Control: name + ".sock", Log: name + ".log", Args: append([]string{"--underlay", "eth0"}, args...)})
	if err == nil {
		m.onClose(m.agents[i].Kill)
	}
	return err
}
