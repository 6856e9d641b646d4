package main

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
	wg "ipoibcm/internal/wireguard"
)

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
	at    place
	hosts int
	// hop is the size of the largest RoCEv2 packet that reaches a host, in octets. Larger ones are
	// dropped without ICMP, as by a router whose ICMP messages are filtered. Zero sets no limit.
	hop int
	// path is the name of the one of [paths] that lies between the bridge and the peer. Empty means none.
	path string
	// threads is the number of data threads of the sender. Zero leaves it to the agent.
	threads int
}

// A mesh is several hosts on one bridge that reach each other by one contender. Stress is
// measured on meshes: a bottleneck is one port of the bridge, or one class of the sender's
// own device.
type mesh struct {
	pair   // for its contender and its functions on close; its hosts are not used
	at     place
	bridge *lab.Host
	hosts  []*lab.Host
	agents []*lab.Agent
	addrs  []netip.Addr // through the contender
}

// meshAddr returns the address of host i: in the tunnel if inner is set, else on the underlay.
func meshAddr(at place, i int, inner bool) string {
	switch {
	case at.family == family4 && inner:
		return fmt.Sprintf("10.99.0.%d/16", i+1)
	case at.family == family4:
		return fmt.Sprintf("192.0.2.%d/24", i+1)
	case inner:
		return fmt.Sprintf("fd99::%d/64", i+1)
	}
	return fmt.Sprintf("fd00::%d/64", i+1)
}

// newMesh makes the hosts, the bridge and the contender. It returns once the sender
// reaches the others.
func (b *bench) newMesh(ctx context.Context, contender string, kind meshKind) (m *mesh, err error) {
	at, n := kind.at, kind.hosts
	m = &mesh{pair: pair{contender: contender}, at: at,
		hosts: make([]*lab.Host, n), agents: make([]*lab.Agent, n), addrs: make([]netip.Addr, n)}
	defer func() {
		if err != nil {
			m.close()
			err = fmt.Errorf("%s, %v: %w", contender, at, err)
		}
	}()
	for i := range n + 1 {
		h, err := b.newHost()
		if err != nil {
			return nil, err
		}
		m.onClose(func() { h.Close() })
		if i == n {
			m.bridge = h
		} else {
			m.hosts[i] = h
		}
	}
	if err := lab.Segment(m.bridge, m.hosts, at.mtu); err != nil {
		return nil, err
	}
	for i, h := range m.hosts {
		m.addrs[i] = addr(meshAddr(at, i, contender != raw))
		if err := h.AddAddr("eth0", meshAddr(at, i, false)); err != nil {
			return nil, err
		}
		if kind.hop > 0 {
			if err := h.Swallow("eth0", m.bridge, fmt.Sprintf("port%d", i), kind.hop); err != nil {
				return nil, err
			}
		}
	}
	if kind.path != "" {
		if err := m.lay(kind.path); err != nil {
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
		err = m.ours(ctx, b, kind.threads)
	}
	if err != nil {
		return nil, err
	}
	return m, m.wait(ctx)
}

// wait returns when the other hosts answer pings and, for RC and UC, a connection of the sender is up.
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
	if m.contender != oursRC && m.contender != oursUC {
		return nil
	}
	_, err := m.agents[meshSender].WaitConns(ctx, 5*time.Second, connected(m.contender))
	return err
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
			SrcAddr: net.IP(addr(meshAddr(m.at, i, false)).AsSlice())}
		if err := h.Netlink().LinkAdd(v); err != nil {
			return fmt.Errorf("make VXLAN device: %w", err)
		}
		l, err := h.Link("tunnel")
		if err != nil {
			return err
		}
		for _, k := range m.others(i) {
			err := h.Netlink().NeighAppend(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_BRIDGE,
				State: netlink.NUD_PERMANENT, Flags: netlink.NTF_SELF, IP: net.IP(addr(meshAddr(m.at, k, false)).AsSlice()),
				HardwareAddr: make(net.HardwareAddr, 6)})
			if err != nil {
				return fmt.Errorf("default entry of VXLAN: %w", err)
			}
		}
		if err := errors.Join(h.AddAddr("tunnel", meshAddr(m.at, i, true)), h.Up("tunnel")); err != nil {
			return err
		}
	}
	return nil
}

// wireguard starts a wireguard-go on each host, with all others as peers.
func (m *mesh) wireguard(ctx context.Context, b *bench) error {
	keys := make([]*ecdh.PrivateKey, len(m.hosts))
	for i := range keys {
		var err error
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
			inner := addr(meshAddr(m.at, k, true))
			peers = append(peers, wg.Peer{Key: keys[k].PublicKey(),
				Endpoint: netip.AddrPortFrom(addr(meshAddr(m.at, k, false)), wg.Port),
				Allowed:  netip.PrefixFrom(inner, inner.BitLen())})
		}
		err := wg.Configure(ctx, wg.Socket(name), keys[i], peers...)
		if err != nil {
			return err
		}
		if err := errors.Join(h.SetMTU(name, m.at.mtu-80), h.AddAddr(name, meshAddr(m.at, i, true)), h.Up(name)); err != nil {
			return err
		}
	}
	return nil
}

// ours starts an agent on each host. The sender's agent has that many data threads, if threads is not zero.
func (m *mesh) ours(ctx context.Context, b *bench, threads int) error {
	for i, h := range m.hosts {
		args := []string{"--mode", strings.ToLower(m.contender), "--gid", addr(meshAddr(m.at, i, false)).String(),
			"--address", meshAddr(m.at, i, true)}
		if i == meshSender && threads > 0 { // older programs do not know the setting
			args = append(args, "--threads", strconv.Itoa(threads))
		}
		a, err := b.startAgent(ctx, h, args...)
		if err != nil {
			return err
		}
		m.agents[i] = a
		m.onClose(a.Kill)
	}
	return nil
}
