package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
)

// namePrefix begins the names of the namespaces; the process ID follows.
const namePrefix = "ipbench-"

// A pair is two hosts that reach each other by one contender.
type pair struct {
	contender string
	hosts     [2]*lab.Host
	src, dst  netip.Addr // of the first and second host, through the contender
	agents    [2]*lab.Agent
	stops     []func() // called by close, the last one first
}

// close calls the functions of onClose, the last one first.
func (p *pair) close() {
	for i := len(p.stops) - 1; i >= 0; i-- {
		p.stops[i]()
	}
}

// onClose makes close call stop.
func (p *pair) onClose(stop func()) { p.stops = append(p.stops, stop) }

// underlays are the addresses of the two ends of a veth pair.
func underlays(family string) [2]string {
	if family == family4 {
		return [2]string{"192.0.2.1/24", "192.0.2.2/24"}
	}
	return [2]string{"fd00::1/64", "fd00::2/64"}
}

// inners are the addresses behind a tunnel.
func inners(family string) [2]string {
	if family == family4 {
		return [2]string{"10.99.0.1/16", "10.99.0.2/16"}
	}
	return [2]string{"fd99::1/64", "fd99::2/64"}
}

func addr(prefix string) netip.Addr { return netip.MustParsePrefix(prefix).Addr() }

// newPair makes two hosts joined by a veth pair with the MTU of at, and the contender
// between them. It returns when the hosts reach each other.
func (b *bench) newPair(ctx context.Context, contender string, at place) (p *pair, err error) {
	p = &pair{contender: contender, src: addr(inners(at.family)[0]), dst: addr(inners(at.family)[1])}
	defer func() {
		if err != nil {
			p.close()
			err = fmt.Errorf("%s, %v: %w", contender, at, err)
		}
	}()
	if err := p.makeHosts(b); err != nil {
		return nil, err
	}
	if err := lab.Connect(p.hosts[0], "eth0", p.hosts[1], "eth0", at.mtu); err != nil {
		return nil, err
	}
	under := underlays(at.family)
	for i, h := range p.hosts {
		if err := h.AddAddr("eth0", under[i]); err != nil {
			return nil, err
		}
	}
	switch contender {
	case raw:
		p.src, p.dst = addr(under[0]), addr(under[1])
	case vxlan:
		err = p.vxlan(at)
	case wireguard:
		err = p.wireguard(ctx, b, at)
	default:
		err = p.ours(ctx, b, at)
	}
	if err != nil {
		return nil, err
	}
	return p, p.wait(ctx)
}

func (p *pair) makeHosts(b *bench) (err error) {
	for i := range p.hosts {
		if p.hosts[i], err = b.newHost(); err != nil {
			return err
		}
		p.onClose(func() { p.hosts[i].Close() })
	}
	return nil
}

// newHost makes a namespace with a name of its own.
func (b *bench) newHost() (*lab.Host, error) {
	b.hosts++
	return lab.NewHost(fmt.Sprintf("%s%d-%d", namePrefix, os.Getpid(), b.hosts))
}

// wait returns when the second host answers pings and, for RC and UC, the connection that
// carries large packets is up.
func (p *pair) wait(ctx context.Context) error {
	for end := time.Now().Add(10 * time.Second); ; {
		_, err := p.hosts[0].Ping(lab.Ping{Dst: p.dst, Timeout: 200 * time.Millisecond})
		if err == nil {
			break
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		time.Sleep(10 * time.Millisecond)
	}
	if modeOf(p.contender) != oursRC && modeOf(p.contender) != oursUC {
		return nil
	}
	_, err := p.agents[0].WaitConns(ctx, 5*time.Second, connected(modeOf(p.contender)))
	return err
}

// vxlan makes a VXLAN device on each host, which knows the address of the other host only.
func (p *pair) vxlan(at place) error {
	under, inner := underlays(at.family), inners(at.family)
	overhead := 50 // Ethernet, VXLAN, UDP, IPv4
	if at.family == family6 {
		overhead = 70
	}
	for i, h := range p.hosts {
		eth, err := h.Link("eth0")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = "tunnel", at.mtu-overhead
		err = h.Netlink().LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: 42, VtepDevIndex: eth.Attrs().Index,
			SrcAddr: net.IP(addr(under[i]).AsSlice()), Group: net.IP(addr(under[1-i]).AsSlice()), Port: 4789, Learning: true})
		if err != nil {
			return fmt.Errorf("make VXLAN device: %w", err)
		}
		if err := errors.Join(h.AddAddr("tunnel", inner[i]), h.Up("tunnel")); err != nil {
			return err
		}
	}
	return nil
}

// ours starts an agent on each host.
func (p *pair) ours(ctx context.Context, b *bench, at place) error {
	under, inner := underlays(at.family), inners(at.family)
	for i, h := range p.hosts {
		args := []string{"--mode", strings.ToLower(modeOf(p.contender)), "--gid", addr(under[i]).String(),
			"--address", inner[i]}
		if at.family == family4 && at.mtu < 2100 {
			args = append(args, "--ud-mtu", "1444") // the most that such an underlay carries
		}
		a, err := b.startProgram(ctx, b.programOf(p.contender), h, args...)
		if err != nil {
			return err
		}
		p.agents[i] = a
		p.onClose(a.Kill)
	}
	return nil
}

// startAgent starts an agent on eth0 of h.
func (b *bench) startAgent(ctx context.Context, h *lab.Host, args ...string) (*lab.Agent, error) {
	return b.startProgram(ctx, b.program, h, args...)
}

func (b *bench) startProgram(ctx context.Context, program string, h *lab.Host, args ...string) (*lab.Agent, error) {
	name := filepath.Join(b.dir, h.Name)
	return lab.StartAgent(ctx, h, lab.AgentConfig{Program: program, Control: name + ".sock", Log: name + ".log",
		Args: append([]string{"--underlay", "eth0"}, args...)})
}

// established is the state that an agent shows for a connection that carries packets.
const established = "ESTABLISHED"

// connected returns a function that reports whether a connection of the mode is up.
func connected(mode string) func([]control.Conn) bool {
	return func(conns []control.Conn) bool {
		for _, c := range conns {
			if c.Mode == mode && c.State == established {
				return true
			}
		}
		return false
	}
}
