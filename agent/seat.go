package agent

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netns"

	"ipoibcm/hostnet"
	"ipoibcm/mtu"
	"ipoibcm/tun"
)

// A seat is the network namespace that the interface is in, with the device and the notices that watch it
// there. The provider's sockets stay in the agent's own namespace, wherever the interface goes.
type seat struct {
	host    *hostnet.Device
	notices *hostnet.Notices
	netns   string   // name of the namespace; empty: it is the agent's own
	name    string   // name of the interface there
	notes   []string // settings that the kernel refused
}

// openTUN makes the interface, in the namespace that is configured.
func (a *Agent) openTUN() error {
	open := func() (err error) {
		o := tun.Options{Name: a.opt.Name, MTU: mtu.DefaultDevice, NoChecksum: a.opt.NoChecksum,
			NoSegments: a.opt.NoSegments, NoDatagrams: a.opt.NoDatagrams,
			Queues: a.threads() > 1, Proven: a.before().Proven}
		if a.tun = a.adoptTUN(o); a.tun != nil {
			a.openQueues()
			return nil
		}
		a.tun, err = tun.Open(o)
		for until := time.Now().Add(releasedWithin); a.legacy.refused && isThere(err) && time.Now().Before(until); {
			time.Sleep(10 * time.Millisecond) // until the store has closed the TUN
			a.tun, err = tun.Open(o)
		}
		if o.Queues && a.opt.FewerThreads && errors.Is(err, errBusy) {
			o.Queues = false // it may exist already with one queue, and no process has it
			if there, no := tun.Open(o); no == nil {
				a.tun, err = there, nil
			}
		}
		if err == nil {
			a.openQueues()
		}
		return err
	}
	if a.opt.Netns == "" {
		return explainTUN(a.opt.Name, open())
	}
	ns, err := hostnet.OpenNamespace(a.opt.Netns)
	if err != nil {
		return fmt.Errorf("%w (ip netns list shows those that have a name)", err)
	}
	defer ns.Close()
	if err := hostnet.InNamespace(ns, open); errors.Is(err, hostnet.ErrEnter) {
		return explainNamespace(err)
	} else {
		return explainTUN(a.opt.Name, err)
	}
}

// isThere reports whether TUNSETIFF may have failed because the interface exists. It fails with EINVAL if the
// interface has several queues and is opened as one with a single queue.
func isThere(err error) bool { return errors.Is(err, errBusy) || errors.Is(err, syscall.EINVAL) }

func explainNamespace(err error) error {
	if errors.Is(err, hostnet.ErrEnter) && errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("%w (CAP_SYS_ADMIN is needed: run as root)", err)
	}
	return err
}

// openHost sets up the device and begins to watch it.
func (a *Agent) openHost() error {
	s, err := a.sit(true, a.m.Status().IPv6)
	if err != nil {
		return err
	}
	a.seat, a.host = s, s.host
	a.kernel = newKernelWorker(s.host, s.notices)
	a.logRefused()
	return nil
}

// logRefused logs which settings of the interface the kernel refused. status shows them too.
func (a *Agent) logRefused() {
	for _, n := range a.seat.notes {
		a.log.Warn("a setting of the interface cannot be made", "name", a.seat.name, "note", n)
	}
}

// sit finds the interface, gives it settings and addresses, sets it up if up is set, and begins to watch it. ipv6
// says whether the link is large enough for IPv6. sit runs beside the driver, too.
// The watch begins last, so that what it sees first is complete. Else somebody who finds the interface up
// could use an address that we do not know yet, or that the kernel has not finished.
func (a *Agent) sit(up, ipv6 bool) (s seat, err error) {
	ns, name, err := a.place()
	if err != nil {
		return s, err
	}
	defer ns.Close()
	s.name, s.netns = name, hostnet.NamespaceName(ns)
	if s.notes, err = a.prepare(ns, name, up, ipv6); err != nil {
		return s, explainNamespace(err)
	}
	if s.host, err = hostnet.OpenIn(ns, name); err != nil {
		return s, fmt.Errorf("watch %s: %w", name, err)
	}
	if s.notices, err = s.host.Notices(); err != nil {
		return s, errors.Join(fmt.Errorf("watch %s: %w", name, err), s.host.Close())
	}
	return s, nil
}

// place returns the namespace that the interface is in, and its name there.
func (a *Agent) place() (ns netns.NsHandle, name string, err error) {
	fd, name, err := a.tun.Namespace()
	if !errors.Is(err, errors.ErrUnsupported) {
		return netns.NsHandle(fd), name, err
	}
	// An old kernel cannot say: the interface is where it was made.
	ns, err = hostnet.OpenNamespace(cmp.Or(a.opt.Netns, "/proc/thread-self/ns/net"))
	return ns, a.tun.Name(), err
}

// prepare gives the device its settings and addresses, and with up brings its link up. Some settings are
// optional; notes say which of these failed.
func (a *Agent) prepare(ns netns.NsHandle, name string, up, ipv6 bool) (notes []string, err error) {
	d, err := hostnet.OpenIn(ns, name)
	if err != nil {
		return nil, fmt.Errorf("configure %s: %w", name, err)
	}
	defer d.Close()
	for _, step := range []struct {
		what string
		do   func() error
		lack string // what happens without it where /proc/sys is read-only; empty: that is an error
		set  string // the setting of the namespace that the device inherits
	}{
		{"set addr_gen_mode", d.DisableAddrGen, "", ""},
		{"set accept_ra_mtu", d.IgnoreRAMTU, "an MTU in router advertisements lowers that of IPv6",
			"net.ipv6.conf.default.accept_ra_mtu=0"},
		{"set disable_ipv6", func() error {
			if ipv6 {
				return nil
			}
			return d.DisableIPv6() // RFC 4391 section 7
		}, "IPv6 packets are sent in vain, because the link is too small for them",
			"net.ipv6.conf.default.disable_ipv6=1"},
	} {
		err := step.do()
		switch {
		case err == nil, errors.Is(err, os.ErrNotExist): // no IPv6 in this kernel
		case errors.Is(err, syscall.EROFS) && step.lack != "":
			notes = append(notes,
				fmt.Sprintf("/proc/sys is read-only, so %s: mount it writable (systemd: ProtectKernelTunables=no), "+
					"or set %s in this network namespace and restart", step.lack, step.set))
		default:
			return nil, fmt.Errorf("%s: %s: %w", name, step.what, err)
		}
	}
	if err := a.tidy(d); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if up {
		if err := d.SetUp(true); err != nil {
			return nil, fmt.Errorf("%s: set up: %w", name, err)
		}
	}
	for _, p := range a.live.prefixes() {
		if err := d.AddAddr(p); err != nil {
			return nil, fmt.Errorf("%s: add %s: %w", name, p, err)
		}
	}
	for _, p := range a.live.prefixes() {
		if up && !d.WaitAddr(p.Addr(), addrWithin) {
			a.log.Warn("the kernel has not made an address usable, going on", "prefix", p, "after", addrWithin)
		}
	}
	return notes, nil
}

// setUpIPv6 makes the settings of IPv6 again, after the kernel has forgotten them, and puts the configured
// addresses back. It removes a link-local address that the kernel has made up meanwhile.
func (a *Agent) setUpIPv6() {
	host := a.kernel.host
	do := []func() error{host.DisableAddrGen, host.IgnoreRAMTU, host.RemoveGenerated}
	for _, p := range a.live.prefixes() {
		if p.Addr().Is6() {
			do = append(do, func() error { return host.AddAddr(p) })
		}
	}
	for _, f := range do {
		if err := f(); err != nil && !errors.Is(err, syscall.EROFS) { // status shows that
			a.log.Warn("cannot set IPv6 up again", "name", a.opt.Name, "err", err)
		}
	}
}

// follow goes on in the namespace that the interface was moved into. Like any device, the interface arrives
// there down and without addresses. follow puts back the configured ones, and whoever moved the interface
// sets it up.
func (a *Agent) follow() {
	var s seat
	var err error
	ipv6 := a.m.Status().IPv6
	a.kernel.change(func() {
		if s, err = a.sit(false, ipv6); err == nil {
			err = a.kernel.replace(s.host, s.notices)
		}
	}, func() { a.followed(s, err) })
}

// followed handles the outcome of follow. The driver tries again after a failure.
func (a *Agent) followed(s seat, err error) {
	if s.notices != nil {
		a.seat, a.host = s, s.host
	}
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, os.ErrClosed):
		return // it was removed, and the data path ends with it
	case err != nil && a.lost == err.Error():
	case err != nil:
		a.lost = err.Error()
		a.log.Error("the interface is in another network namespace, and cannot be followed", "name", a.opt.Name, "err", err)
	default:
		a.lost = ""
		where := cmp.Or(s.netns, "the agent's own")
		a.log.Info("the interface was moved to another network namespace", "name", s.name, "netns", where)
		a.hub.publish(a.event("agent", "moved", s.name+" is in network namespace "+where))
		a.logRefused()
	}
}
