package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/doctor"
	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/internal/lab"
	"ipoibcm/mtu"
	"ipoibcm/provider/ibverbs"
	"ipoibcm/provider/softroce"
	"ipoibcm/tun"
)

// Bounds on what is read of other processes and of their configuration.
const (
	maxManagerFiles = 256
	maxManagerFile  = 64 << 10 // octets
	maxProcesses    = 1 << 16
)

// gather looks at the host. It must leave nothing behind.
func gather(ctx context.Context, s settings) doctor.Facts {
	f := doctor.Facts{
		Name: s.Name, Underlay: s.Underlay, Provider: s.Provider, UDMTU: int(s.UDMTU), GID: s.gid, CMTransport: s.CMTransport,
		NoGSO: !s.Offload.GSO, NoGRO: !s.Offload.GRO, Prefixes: s.prefixes, ControlPath: s.controlPath(),
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		f.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if s.infiniBand() {
		f.InfiniBand = infiniBandFacts(s.Device, s.Port, ib.PKey(s.PKey))
	}
	f.NetAdmin = netAdmin()
	f.Control, f.ControlErr = controlState(f.ControlPath)
	openFacts(ctx, &f, s)
	deviceFacts(&f) // after openFacts, which waits for addresses that are tentative
	rehearse(&f, s.Netns)
	gso, gro := softroce.TestOffloads()
	f.Loopback = !errors.Is(gso, softroce.ErrLoopback) && !errors.Is(gro, softroce.ErrLoopback)
	f.GSOErr, f.GROErr = offloadText(gso), offloadText(gro)
	all, _ := hostnet.Devices() // without them, network devices of RDMA devices are unknown
	f.RDMA = rdmaDevices(all)
	f.IBCM = doctor.No
	if _, err := os.Stat("/sys/module/ib_cm"); err == nil {
		f.IBCM, f.IBCMUsers = doctor.Yes, moduleUsers("/sys/module", "ib_cm")
	}
	f.Managers, f.Files = managers(), managerFiles()
	rehearseDemo(&f)
	localGuard(&f)
	firewall(ctx, &f, s.User)
	memberFacts(ctx, &f, s)
	return f
}

// moduleUsers returns the modules that use module name, directly or not. Users of users come first:
// modprobe can unload the modules in that order.
func moduleUsers(dir, name string) (users []string) {
	seen := map[string]bool{name: true}
	var visit func(string)
	visit = func(m string) {
		held, _ := os.ReadDir(filepath.Join(dir, m, "holders"))
		for _, h := range held { // in the order of their names
			if !seen[h.Name()] {
				seen[h.Name()] = true
				visit(h.Name())
				users = append(users, h.Name())
			}
		}
	}
	visit(name)
	return users
}

// firewall reads the rules of the host's firewall, which nft prints. It also notes as which user run would
// open its sockets: rules may depend on that. runUser is the one that run would go on as, if any.
func firewall(ctx context.Context, f *doctor.Facts, runUser string) {
	name, uid := runUser, os.Geteuid()
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil && name == "" {
		name = u.Username
	}
	if f.User = []any{name, float64(uid)}; runUser != "" { // sockets are opened before the user changes
		f.User = []any{"root", 0.0}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nft", "--json", "list", "ruleset").Output()
	if errors.Is(err, exec.ErrNotFound) {
		f.RulesErr = "nft is not installed"
		return
	}
	if err == nil {
		f.Rules, err = doctor.ParseRuleset(out)
	}
	if err != nil {
		f.RulesErr = fmt.Sprintf("nft list ruleset: %v (root can)", err)
	}
}

// rehearseDemo makes the network of the demo, and removes it.
func rehearseDemo(f *doctor.Facts) {
	if os.Geteuid() != 0 {
		return
	}
	f.Demo = doctor.Yes
	if err := lab.Rehearse(fmt.Sprintf("ipoibcm-%d-doctor-", os.Getpid())); err != nil {
		f.Demo, f.DemoErr = doctor.No, err.Error()
	}
}

// nobodyUID is a user that owns nothing.
const nobodyUID = 65534

// localGuard tries what a local user could do. As user nobodyUID it sends a datagram without content to UDP
// port 4791, over the loopback device. A firewall rule against that makes sending fail with EPERM.
func localGuard(f *doctor.Facts) {
	if os.Geteuid() != 0 {
		f.LocalErr = "cannot be tried: only root can send as somebody else"
		return
	}
	err := hostnet.OwnThread(func() error { // the thread ends, and its user with it
		if err := unix.Setfsuid(nobodyUID); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, nil, 0, &unix.SockaddrInet4{Port: 4791, Addr: [4]byte{127, 0, 0, 1}})
	})
	switch {
	case errors.Is(err, unix.EPERM):
		f.LocalGuard = doctor.Yes
	case err == nil:
		f.LocalGuard = doctor.No
	default:
		f.LocalErr = fmt.Sprintf("cannot be tried over the loopback device: %v", err)
	}
}

func offloadText(err error) string {
	if err == nil || errors.Is(err, softroce.ErrLoopback) {
		return ""
	}
	return err.Error()
}

// deviceFacts reads the underlay.
func deviceFacts(f *doctor.Facts) {
	i, err := hostnet.Underlay(f.Underlay)
	switch {
	case errors.Is(err, hostnet.ErrNotFound):
		f.DeviceErr = "there is no such device"
	case err != nil:
		f.DeviceErr = err.Error()
	default:
		d := &doctor.Device{Up: i.Link.Up, MTU: i.Link.MTU, Driver: i.Driver, SpeedMbps: i.Speed, Features: i.Features,
			RDMA: i.RDMA}
		for _, a := range i.Addrs {
			d.Addrs = append(d.Addrs, doctor.Addr{IP: a.Prefix.Addr(), Tentative: a.Tentative, DADFailed: a.DADFailed})
		}
		f.Device = d
	}
}

// openFacts opens the provider as run does, and closes it again.
func openFacts(ctx context.Context, f *doctor.Facts, s settings) {
	f.Opened = true
	p, _, err := openProvider(ctx, s, 1, new(predecessor), slog.New(slog.DiscardHandler))
	if err != nil {
		f.OpenErr = err.Error()
		if f.PortTaken = errors.Is(err, unix.EADDRINUSE); f.PortTaken {
			f.PortOwner = portOwner(4791)
		}
		return
	}
	f.Open = doctor.Open{GIDs: p.Port().GIDs, QP1: p.MADPort() != nil}
	buffers := map[string]*uint64{
		"socket_recv_buffer_asked": &f.Open.RecvAsked, "socket_recv_buffer": &f.Open.RecvGot,
		"socket_send_buffer_asked": &f.Open.SendAsked, "socket_send_buffer": &f.Open.SendGot,
	}
	p.Counters(func(name string, v uint64) {
		if to := buffers[name]; to != nil {
			*to = v
		}
	})
	if err := p.Close(); err != nil {
		f.OpenErr = err.Error()
	}
}

// rehearse makes the interface and gives it what run gives it, in the namespace that is configured. The
// interface is never set up, and is gone at the end. One that was there before is attached to, and not changed.
func rehearse(f *doctor.Facts, netns string) {
	if netns == "" {
		rehearseHere(f)
		return
	}
	ns, err := hostnet.OpenNamespace(netns)
	if err == nil {
		defer ns.Close()
		err = hostnet.InNamespace(ns, func() error {
			rehearseHere(f)
			return nil
		})
	}
	if err != nil {
		f.TUN, f.TUNErr = doctor.TUNNoNamespace, err.Error()
	}
}

func rehearseHere(f *doctor.Facts) {
	o := tun.Options{Name: f.Name, MTU: mtu.DefaultDevice}
	before, noBefore := hostnet.Lookup(f.Name)
	if noBefore == nil {
		o.MTU = before.MTU // a TUN that somebody made with "ip tuntap" is to stay as it is
	}
	t, err := tun.Open(o)
	switch {
	case errors.Is(err, os.ErrNotExist):
		f.TUN = doctor.TUNNoNode
	case err != nil && interfaceExists(f.Name):
		f.TUN = doctor.TUNBusy
	case errors.Is(err, os.ErrPermission):
		f.TUN = doctor.TUNDenied
	case err != nil:
		f.TUN = doctor.TUNFailed
	}
	if err != nil {
		f.TUNErr = err.Error()
		return
	}
	defer t.Close()
	if noBefore == nil {
		f.TUN = doctor.TUNThere
		return
	}
	refuse := func(what string, err error) {
		switch {
		case err == nil, errors.Is(err, os.ErrNotExist): // no IPv6 in this kernel
		case errors.Is(err, unix.EROFS):
			f.ReadOnly = append(f.ReadOnly, what)
		default:
			f.SettingErrs = append(f.SettingErrs, fmt.Sprintf("%s: %v", what, err))
		}
	}
	d, err := hostnet.Open(t.Index())
	if err != nil {
		refuse("watch it", err)
		return
	}
	refuse("addr_gen_mode", d.DisableAddrGen())
	refuse("accept_ra_mtu=0", d.IgnoreRAMTU())
	if c := udMTU(f.UDMTU); c.most() < mtu.MinIPv6 {
		refuse("disable_ipv6=1", d.DisableIPv6())
	}
	for _, p := range f.Prefixes {
		refuse("address "+p.String(), d.AddAddr(p))
	}
	refuse("end", d.Close())
}

func interfaceExists(name string) bool {
	_, err := hostnet.Lookup(name)
	return err == nil
}

// netAdmin reads whether CAP_NET_ADMIN is effective.
func netAdmin() doctor.Answer {
	var caps [2]unix.CapUserData // of capabilities 0 to 31, and of the others
	if unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]) != nil {
		return doctor.Unknown
	}
	if caps[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0 {
		return doctor.Yes
	}
	return doctor.No
}

// controlState returns whether run could listen at path, and the reason if it could not. It makes nothing
// there.
func controlState(path string) (doctor.ControlState, string) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return doctor.ControlServed, ""
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() != os.ModeSocket {
		return doctor.ControlFailed, "there is something else"
	}
	if len(path) >= len(unix.RawSockaddrUnix{}.Path) {
		return doctor.ControlFailed, "the path is too long for a socket"
	}
	dir := filepath.Dir(path)
	for { // run makes the directories that are missing
		st, err := os.Stat(dir)
		switch {
		case errors.Is(err, os.ErrNotExist) && dir != filepath.Dir(dir):
			dir = filepath.Dir(dir)
			continue
		case err != nil:
			return doctor.ControlFailed, err.Error()
		case !st.IsDir():
			return doctor.ControlFailed, dir + " is no directory"
		}
		if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
			return doctor.ControlFailed, fmt.Sprintf("%s: %v", dir, err)
		}
		return doctor.ControlFree, ""
	}
}

// portOwner returns the name and PID of the process that has a UDP port. It returns "" if it finds none,
// because the kernel itself has the port, or a process that we cannot see.
func portOwner(port uint16) string {
	sockets := map[string]bool{}
	for _, file := range []string{"udp", "udp6"} {
		b, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			w := strings.Fields(line)
			if len(w) > 9 && strings.HasSuffix(w[1], fmt.Sprintf(":%04X", port)) {
				sockets["socket:["+w[9]+"]"] = true
			}
		}
	}
	for dir, comm := range processes {
		fds, _ := os.ReadDir(dir + "/fd")
		for _, fd := range fds {
			if to, err := os.Readlink(dir + "/fd/" + fd.Name()); err == nil && sockets[to] {
				return fmt.Sprintf("%s, process %s", comm, filepath.Base(dir))
			}
		}
	}
	return ""
}

// managers returns the names of processes that configure interfaces.
func managers() (names []string) {
	for _, comm := range processes {
		if slices.Contains(doctor.ManagerNames, comm) && !slices.Contains(names, comm) {
			names = append(names, comm)
		}
	}
	slices.Sort(names)
	return names
}

// processes yields the directory and the name of every process.
func processes(yield func(dir, comm string) bool) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs[:min(len(dirs), maxProcesses)] {
		comm, err := os.ReadFile(dir + "/comm")
		if err == nil && !yield(dir, strings.TrimSpace(string(comm))) {
			return
		}
	}
}

// managerFiles reads the configuration files of NetworkManager and systemd-networkd.
func managerFiles() (files []doctor.File) {
	for _, pattern := range []string{
		"/etc/NetworkManager/NetworkManager.conf", "/etc/NetworkManager/conf.d/*.conf", "/run/NetworkManager/conf.d/*.conf",
		"/usr/lib/NetworkManager/conf.d/*.conf", "/etc/systemd/network/*.network", "/run/systemd/network/*.network",
		"/usr/lib/systemd/network/*.network",
	} {
		paths, _ := filepath.Glob(pattern)
		for _, p := range paths {
			st, err := os.Stat(p)
			if len(files) >= maxManagerFiles || err != nil || st.Size() > maxManagerFile {
				continue
			}
			if b, err := os.ReadFile(p); err == nil {
				files = append(files, doctor.File{Path: p, Text: string(b)})
			}
		}
	}
	return files
}

// infiniBandFacts reads what the kernel says of an InfiniBand port.
func infiniBandFacts(device string, port int, pkey ib.PKey) *doctor.InfiniBandPort {
	out := &doctor.InfiniBandPort{Device: device, Port: port, PKey: pkey}
	for _, p := range ibverbs.IBPorts(device) {
		if p.Port == port {
			out.State, out.LID, out.SMLID, out.GID, out.PKeys = p.State, p.LID, p.SMLID, p.GID, p.PKeys
		}
	}
	return out
}
