package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
	"ipoibcm/rtnl"
)

// Addresses of the demo's two hosts on the IPoIB link and below it.
var (
	demoIPv4 = [2]netip.Addr{netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("10.99.0.2")}
	demoIPv6 = [2]netip.Addr{netip.MustParseAddr("fd99::1"), netip.MustParseAddr("fd99::2")}
	demoBase = [2]string{"192.0.2.1/24", "192.0.2.2/24"}
)

const (
	demoIf       = "ibcm0"
	demoUnderlay = "eth0"
	// maxCrossings bounds how often the two ends dial at the same instant.
	maxCrossings = 50
	// patience is how long the demo waits for what takes milliseconds on an idle
	// machine.
	patience = 30 * time.Second
)

// run goes through the steps in order.
func (d *demoRun) run() error {
	for _, s := range []struct {
		name string
		f    func() (string, error)
	}{
		{"two hosts", d.makeHosts},
		{"agents started, RC", func() (string, error) { return d.startAgents("rc") }},
		{"neighbour resolved", d.neighbour},
		{"RC connection established", func() (string, error) { return d.connected("RC") }},
		{"ping, 64 octets, IPv4", func() (string, error) { return d.ping(demoIPv4[1], 64) }},
		{"ping, full MTU, IPv4", func() (string, error) { return d.pingFull(demoIPv4[1]) }},
		{"ping, 64 octets, IPv6", func() (string, error) { return d.ping(demoIPv6[1], 64) }},
		{"ping, full MTU, IPv6", func() (string, error) { return d.pingFull(demoIPv6[1]) }},
		{"MTU per destination in ip route", d.routes},
		{"multicast, IPv4 and IPv6", d.multicast},
		{"TCP a to b, SHA-256 equal", func() (string, error) { return d.hashed(0, 1, demoIPv4) }},
		{"TCP b to a, SHA-256 equal", func() (string, error) { return d.hashed(1, 0, demoIPv6) }},
		{"TCP rate over RC", func() (string, error) { return d.rate(&d.res.RC) }},
		{"both dial at once: one connection", d.crossing},
		{"agents started, UC", func() (string, error) { return d.startAgents("uc") }},
		{"UC connection established", func() (string, error) { return d.establish("UC") }},
		{"ping, full MTU, over UC", func() (string, error) { return d.pingFull(demoIPv4[1]) }},
		{"TCP a to b over UC, SHA-256 equal", func() (string, error) { return d.hashed(0, 1, demoIPv4) }},
		{"TCP rate over UC", func() (string, error) { return d.rate(&d.res.UC) }},
		{"agents started, UD only", func() (string, error) { return d.startAgents("ud") }},
		{"ping over UD, no connection", d.pingUD},
		{"TCP a to b over UD, SHA-256 equal", func() (string, error) { return d.hashed(0, 1, demoIPv4) }},
		{"TCP rate over UD", func() (string, error) { return d.rate(&d.res.UD) }},
		{"agents started, RC again", func() (string, error) { return d.startAgents("rc") }},
		{"one agent killed, restarted", d.restart},
		{"clean teardown", d.teardown},
	} {
		if err := d.step(s.name, s.f); err != nil {
			return err
		}
	}
	return nil
}

func (d *demoRun) makeHosts() (string, error) {
	for i := range d.host {
		h, err := lab.NewHost(d.prefix + string(rune('a'+i)))
		if err != nil {
			return "", err
		}
		d.host[i] = h
		if d.opt.ipv4 {
			if err := h.Sysctl("net/ipv6/conf/default/addr_gen_mode", "1"); err != nil {
				return "", err
			}
		}
	}
	if err := lab.Connect(d.host[0], demoUnderlay, d.host[1], demoUnderlay, d.opt.mtu); err != nil {
		return "", err
	}
	for i, h := range d.host {
		if err := h.AddAddr(demoUnderlay, demoBase[i]); err != nil {
			return "", err
		}
		// The demo takes the interface down and up; its addresses should stay.
		if err := h.Sysctl("net/ipv6/conf/default/keep_addr_on_down", "1"); err != nil {
			return "", err
		}
	}
	if !d.opt.ipv4 {
		if err := d.awaitLinkLocal(); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("namespaces %s and %s", d.host[0].Name, d.host[1].Name), nil
}

// awaitLinkLocal waits until both ends of the pair have their IPv6 link-local address,
// which the kernel makes when it has noticed the carrier: on a slow machine seconds
// later. An agent that starts before takes the IPv4 address for its GID, and would not
// meet one that starts after.
func (d *demoRun) awaitLinkLocal() (err error) {
	for end := time.Now().Add(patience); time.Now().Before(end) && d.ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		if _, err = d.host[0].LinkLocal(demoUnderlay); err != nil {
			continue
		}
		if _, err = d.host[1].LinkLocal(demoUnderlay); err == nil {
			return nil
		}
	}
	return errors.Join(err, d.ctx.Err())
}

// startAgents ends the agents there are and starts new ones in this mode.
func (d *demoRun) startAgents(mode string) (string, error) {
	if err := d.stopAgents(); err != nil {
		return "", err
	}
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for i := range d.host {
		wg.Go(func() { errs[i] = d.startAgent(i, mode, false) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return "", err
	}
	d.startCapture()
	s, err := d.agent[0].Status(d.ctx)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("GID %s, UD QPN %s, UD MTU %d", s.Interface.GID, s.Interface.UDQPN, s.Interface.UDMTU), nil
}

func (d *demoRun) startAgent(i int, mode string, detached bool) (err error) {
	args := []string{"--underlay", demoUnderlay, "--name", demoIf, "--mode", mode,
		"--address", demoIPv4[i].String() + "/24", "--address", demoIPv6[i].String() + "/64"}
	if d.opt.ipv4 {
		args = append(args, "--gid", strings.TrimSuffix(demoBase[i], "/24"))
	}
	d.agent[i], err = lab.StartAgent(d.ctx, d.host[i], lab.AgentConfig{Program: d.opt.executable,
		Control: d.path(i, ".sock"), Log: d.path(i, ".log"), Args: args, Detached: detached})
	return err
}

func (d *demoRun) stopAgents() error {
	d.stopCapture()
	var errs [2]error
	var wg sync.WaitGroup
	for i, a := range d.agent {
		if a != nil {
			wg.Go(func() { errs[i] = a.Stop(patience) })
		}
	}
	wg.Wait()
	d.agent = [2]*lab.Agent{}
	return errors.Join(errs[:]...)
}

// neighbour sends the first packet of all: it has to wait for ARP.
func (d *demoRun) neighbour() (string, error) {
	rtt, err := d.firstPing(demoIPv4[1])
	if err != nil {
		return "", err
	}
	var n control.Neighbours
	if err := d.agent[0].Get(d.ctx, control.PathNeigh, &n); err != nil {
		return "", err
	}
	for _, e := range n.Neighbours {
		if e.IP == demoIPv4[1].String() && e.LinkAddr != "" {
			return fmt.Sprintf("%s is at %s; first ping %v", e.IP, e.LinkAddr, rtt.Round(10*time.Microsecond)), nil
		}
	}
	return "", fmt.Errorf("a's neighbour cache does not have %s", demoIPv4[1])
}

// firstPing repeats a ping until it is answered, at most for patience: after their start the agents may not
// have found each other yet.
func (d *demoRun) firstPing(dst netip.Addr) (rtt time.Duration, err error) {
	for end := time.Now().Add(patience); time.Now().Before(end) && d.ctx.Err() == nil; {
		if rtt, err = d.host[0].Ping(lab.Ping{Dst: dst, Timeout: 200 * time.Millisecond}); err == nil {
			return rtt, nil
		}
	}
	return 0, err
}

// establish sends a packet and waits for the connection it gives rise to.
func (d *demoRun) establish(mode string) (string, error) {
	if _, err := d.firstPing(demoIPv4[1]); err != nil {
		return "", err
	}
	return d.connected(mode)
}

// connected waits until both ends have exactly one connection and agree on it.
func (d *demoRun) connected(mode string) (string, error) {
	a, b, err := d.onePair(mode)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("service ID %s, QPNs %s and %s, MTU %d", a.ServiceID, a.LocalQPN, b.LocalQPN, a.MTU), nil
}

// onePair waits until both ends have exactly one connection and agree on it. A failed attempt is repeated
// only for another packet, so onePair sends one every second meanwhile.
func (d *demoRun) onePair(mode string) (a, b control.Conn, err error) {
	ctx, stop := context.WithCancel(d.ctx)
	var pinging sync.WaitGroup
	pinging.Go(func() {
		for again := time.NewTicker(time.Second); ; {
			select {
			case <-again.C:
				_, _ = d.host[0].Ping(lab.Ping{Dst: demoIPv4[1], Timeout: 500 * time.Millisecond})
			case <-ctx.Done():
				again.Stop()
				return
			}
		}
	})
	defer pinging.Wait()
	defer stop()
	one := func(c []control.Conn) bool { return len(c) == 1 && c[0].Mode == mode }
	ca, err := d.agent[0].WaitConns(d.ctx, patience, one)
	if err != nil {
		return a, b, err
	}
	cb, err := d.agent[1].WaitConns(d.ctx, patience, one)
	if err != nil {
		return a, b, err
	}
	a, b = ca[0], cb[0]
	if a.LocalQPN != b.RemoteQPN || a.RemoteQPN != b.LocalQPN || a.MTU != b.MTU {
		return a, b, fmt.Errorf("the ends disagree: a has QPNs %s-%s, MTU %d; b %s-%s, MTU %d", a.LocalQPN, a.RemoteQPN,
			a.MTU, b.LocalQPN, b.RemoteQPN, b.MTU)
	}
	return a, b, nil
}

func (d *demoRun) ping(dst netip.Addr, size int) (string, error) {
	rtt, err := d.host[0].Ping(lab.Ping{Dst: dst, Size: size, DF: true})
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d octets, %v", size, rtt.Round(time.Microsecond)), nil
}

// pingFull sends the largest packet the connection takes.
func (d *demoRun) pingFull(dst netip.Addr) (string, error) {
	conns, err := d.agent[0].Conns(d.ctx)
	if err != nil {
		return "", err
	}
	if len(conns) != 1 {
		return "", fmt.Errorf("%d connections, not one", len(conns))
	}
	if _, err := d.routeShows(0, dst, conns[0].MTU); err != nil {
		return "", err
	}
	return d.ping(dst, conns[0].MTU)
}

// routeShows waits until the kernel of host i has the route to dst with this MTU. An agent changes the
// route some time after a connection is up.
func (d *demoRun) routeShows(i int, dst netip.Addr, mtu int) (text string, err error) {
	got := 0
	for end := time.Now().Add(patience); time.Now().Before(end) && d.ctx.Err() == nil; time.Sleep(time.Millisecond) {
		if got, text, err = d.host[i].RouteTo(dst); err != nil || got == mtu {
			return text, err
		}
	}
	return "", fmt.Errorf("route %q in %s does not have the connection's MTU %d", text, d.host[i].Name, mtu)
}

// pingUD pings over IPv4, and over IPv6 with a packet of the UD MTU. It fails if an agent has a connection.
func (d *demoRun) pingUD() (string, error) {
	if _, err := d.firstPing(demoIPv4[1]); err != nil {
		return "", err
	}
	detail, err := d.ping(demoIPv6[1], d.opt.udMTU())
	if err != nil {
		return "", err
	}
	for _, a := range d.agent {
		if conns, err := a.Conns(d.ctx); err != nil || len(conns) != 0 {
			return "", fmt.Errorf("%d connections in UD-only mode (%v)", len(conns), err)
		}
	}
	return detail, nil
}

// routes asks the kernels' routing tables.
func (d *demoRun) routes() (string, error) {
	var said []string
	for i := range d.host {
		conns, err := d.agent[i].Conns(d.ctx)
		if err != nil {
			return "", err
		}
		if len(conns) != 1 {
			return "", fmt.Errorf("%d connections, not one", len(conns))
		}
		for _, dst := range []netip.Addr{demoIPv4[1-i], demoIPv6[1-i]} {
			text, err := d.routeShows(i, dst, conns[0].MTU)
			if err != nil {
				return "", err
			}
			if i == 0 {
				said = append(said, text)
			}
		}
	}
	return strings.Join(said, "; "), nil
}

func (d *demoRun) multicast() (string, error) {
	for _, g := range []string{"239.1.2.3", "ff05::1234"} {
		if err := d.host[0].Multicast(demoIf, d.host[1], demoIf, netip.MustParseAddr(g), 1000, patience); err != nil {
			return "", err
		}
	}
	var groups control.Groups
	if err := d.agent[1].Get(d.ctx, control.PathGroups, &groups); err != nil {
		return "", err
	}
	return fmt.Sprintf("239.1.2.3 and ff05::1234 arrived; b has joined %d groups", len(groups.Groups)), nil
}

func (d *demoRun) hashed(from, to int, addrs [2]netip.Addr) (string, error) {
	d.stopCapture()
	ctx, cancel := context.WithTimeout(d.ctx, 4*patience)
	defer cancel()
	t, err := d.host[from].Send(ctx, d.host[to], addrs[to], int64(d.opt.transfer)<<20, 0)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d MiB in %v, SHA-256 %x…, MSS %d", t.Octets>>20, t.Duration.Round(time.Millisecond),
		t.SHA256[:4], t.MSS), nil
}

// rate measures one TCP stream.
func (d *demoRun) rate(r *demoRate) (string, error) {
	d.stopCapture()
	ctx, cancel := context.WithTimeout(d.ctx, d.opt.duration+patience)
	defer cancel()
	t, err := d.host[0].Send(ctx, d.host[1], demoIPv4[1], 0, d.opt.duration)
	if err != nil {
		return "", err
	}
	mtu, _, err := d.host[0].RouteTo(demoIPv4[1])
	if err != nil {
		return "", err
	}
	*r = demoRate{Mbps: float64(int(t.Mbps()*10)) / 10, MTU: mtu}
	return fmt.Sprintf("%.2f Gb/s for %v at MTU %d, MSS %d", t.Mbps()/1000, t.Duration.Round(10*time.Millisecond),
		mtu, t.MSS), nil
}

// crossing makes both ends dial at the same instant until their REQs have
// crossed, and looks at what is left each time: exactly one connection.
func (d *demoRun) crossing() (string, error) {
	d.startCapture()
	before, err := d.crossings()
	if err != nil {
		return "", err
	}
	for try := 1; try <= maxCrossings && d.ctx.Err() == nil; try++ {
		if err := d.bounce(); err != nil {
			return "", err
		}
		var wg sync.WaitGroup
		start := make(chan struct{})
		for i := range d.host {
			wg.Go(func() {
				<-start
				d.host[i].Ping(lab.Ping{Dst: demoIPv4[1-i], Timeout: time.Second})
			})
		}
		close(start)
		wg.Wait()
		a, _, err := d.onePair("RC")
		if err != nil {
			return "", fmt.Errorf("try %d: %w", try, err)
		}
		now, err := d.crossings()
		if err != nil {
			return "", err
		}
		if now > before {
			return fmt.Sprintf("REQs crossed at try %d; %s", try, d.verdict(a)), nil
		}
	}
	return "", fmt.Errorf("the REQs did not cross in %d tries, though each left exactly one connection", maxCrossings)
}

// bounce takes both interfaces down and up, so that no connection is left.
func (d *demoRun) bounce() error {
	for _, h := range d.host {
		if err := h.Down(demoIf); err != nil {
			return err
		}
	}
	for _, a := range d.agent {
		if _, err := a.WaitConns(d.ctx, patience, func(c []control.Conn) bool { return len(c) == 0 }); err != nil {
			return err
		}
	}
	for i, h := range d.host {
		if err := h.Up(demoIf); err != nil {
			return err
		}
		if err := d.waitUp(i); err != nil {
			return err
		}
	}
	return nil
}

func (d *demoRun) waitUp(i int) error {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		s, err := d.agent[i].Status(d.ctx)
		if err != nil {
			return err
		}
		if s.Interface.State == "up" {
			return nil
		}
	}
	return errors.New("the interface did not come up again")
}

// crossings is the number of crossings that either agent has counted.
func (d *demoRun) crossings() (uint64, error) {
	var sum uint64
	for _, a := range d.agent {
		n, err := a.Counter(d.ctx, "ipoib", "crossings_seen")
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// verdict returns a text with the end whose REQ won: host a if it is active in the surviving connection,
// else host b.
func (d *demoRun) verdict(a control.Conn) string {
	sa, errA := d.agent[0].Status(d.ctx)
	sb, errB := d.agent[1].Status(d.ctx)
	if errA != nil || errB != nil {
		return "one connection"
	}
	winner := either(a.Role == "active", "a", "b")
	return fmt.Sprintf("one connection, the REQ of %s won: %s against %s", winner, sa.Interface.LinkAddr,
		sb.Interface.LinkAddr)
}

// restart kills one agent without warning, and measures the time until packets pass again.
func (d *demoRun) restart() (string, error) {
	if _, err := d.establish("RC"); err != nil {
		return "", err
	}
	d.agent[1].Kill()
	d.agent[1] = nil
	start := time.Now()
	if err := d.startAgent(1, "rc", false); err != nil {
		return "", err
	}
	up := time.Since(start)
	if _, err := d.firstPing(demoIPv4[1]); err != nil {
		return "", fmt.Errorf("no traffic after the restart: %w", err)
	}
	back := time.Since(start)
	if _, _, err := d.onePair("RC"); err != nil {
		return "", err
	}
	return fmt.Sprintf("traffic back %v after the restart, of which the start took %v", back.Round(time.Millisecond),
		up.Round(time.Millisecond)), nil
}

// teardown stops b, and checks that a has neither a connection nor a host route left. Then it stops a, and
// checks that both interfaces are gone. With --keep it starts both agents once more.
func (d *demoRun) teardown() (string, error) {
	if err := d.agent[1].Stop(patience); err != nil {
		return "", err
	}
	d.agent[1] = nil
	if _, err := d.agent[0].WaitConns(d.ctx, patience, func(c []control.Conn) bool { return len(c) == 0 }); err != nil {
		return "", fmt.Errorf("after b's DREQ: %w", err)
	}
	if routes, err := d.host[0].HostRoutes(demoIf, rtnl.Protocol); err != nil || len(routes) != 0 {
		return "", fmt.Errorf("host routes are left: %v (%v)", routes, err)
	}
	if err := d.stopAgents(); err != nil {
		return "", err
	}
	for _, h := range d.host {
		if _, err := h.Link(demoIf); err == nil {
			return "", fmt.Errorf("%s is still in %s", demoIf, h.Name)
		}
	}
	detail := "connections, routes and interfaces are gone"
	if d.opt.keep {
		for i := range d.host {
			if err := d.startAgent(i, "rc", true); err != nil {
				return "", err
			}
		}
		detail += "; two fresh agents started to be kept"
	}
	return detail, nil
}

func (d *demoRun) sayKept() {
	fmt.Fprintf(stdout, "\nKept. Try:\n")
	for i, h := range d.host {
		fmt.Fprintf(stdout, "  ip netns exec %s %s status --control %s\n", h.Name, d.opt.executable, d.path(i, ".sock"))
	}
	fmt.Fprintf(stdout,
		"  ip netns exec %s ping %s\nTo end it:\n  kill %d %d; ip netns delete %s; ip netns delete %s; rm -r %s\n",
		d.host[0].Name, demoIPv4[1], d.agent[0].PID(), d.agent[1].PID(), d.host[0].Name, d.host[1].Name, d.dir)
}
