// Package doctor decides from what was found on a host whether "ipoibcmd run"
// would work there, and what to do where it would not.
//
// Facts go in, named checks with remedies come out. It looks at nothing itself:
// whoever gathers the [Facts] does.
package doctor

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/mtu"
)

// The checks, in the order in which they are reported.
const (
	Kernel       = "kernel"
	TUN          = "tun"
	Capabilities = "capabilities"
	Settings     = "settings"
	Control      = "control"
	Underlay     = "underlay"
	Address      = "address"
	GID          = "gid"
	MTU          = "mtu"
	Port         = "port"
	Provider     = "provider"
	Buffers      = "buffers"
	GSO          = "gso"
	GRO          = "gro"
	Link         = "link"
	RDMADevices  = "rdma"
	CM           = "cm"
	Managers     = "managers"
	Firewall     = "firewall"
	LocalUsers   = "local"
	MemberList   = "members"
	Demo         = "demo"
)

// Examine returns one check for each name.
func Examine(f Facts) control.Doctor {
	e := &exam{f: &f, out: control.Doctor{Version: control.Version, OK: true}}
	for _, c := range []struct {
		name string
		look func() control.Check
	}{
		{Kernel, e.kernel}, {TUN, e.tun}, {Capabilities, e.capabilities}, {Settings, e.settings}, {Control, e.control},
		{Underlay, e.underlay}, {Address, e.address}, {GID, e.gid}, {MTU, e.mtu}, {Port, e.port}, {Provider, e.provider},
		{Buffers, e.buffers}, {GSO, e.gso}, {GRO, e.gro}, {Link, e.link}, {RDMADevices, e.rdma}, {CM, e.cm},
		{Managers, e.managers}, {Firewall, e.firewall}, {LocalUsers, e.localUsers}, {MemberList, e.members}, {Demo, e.demo},
	} {
		e.add(c.name, c.look())
	}
	return e.out
}

// An exam is one Examine or ExaminePeer under way.
type exam struct {
	f      *Facts
	out    control.Doctor
	usable []ib.GID // GIDs of the underlay, in order of preference
}

func (e *exam) add(name string, c control.Check) {
	c.Name = name
	e.out.OK = e.out.OK && c.Status != control.CheckFail
	e.out.Checks = append(e.out.Checks, c)
}

func okay(format string, args ...any) control.Check {
	return control.Check{Status: control.CheckOK, Detail: fmt.Sprintf(format, args...)}
}

func skip(format string, args ...any) control.Check {
	return control.Check{Status: control.CheckSkipped, Detail: fmt.Sprintf(format, args...)}
}

func warn(remedy, format string, args ...any) control.Check {
	return control.Check{Status: control.CheckWarn, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

func fail(remedy, format string, args ...any) control.Check {
	return control.Check{Status: control.CheckFail, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

// failed reports whether one of these checks fails.
func (e *exam) failed(names ...string) bool {
	return slices.ContainsFunc(e.out.Checks, func(c control.Check) bool {
		return c.Status == control.CheckFail && slices.Contains(names, c.Name)
	})
}

func (e *exam) tun() control.Check {
	f := e.f
	switch f.TUN {
	case TUNOK:
		return okay("/dev/net/tun makes interface %s", f.Name)
	case TUNThere:
		return okay("TUN %s is there already, and no process has it: run uses it", f.Name)
	case TUNNoNode:
		return fail("modprobe tun; in a container, give it the device /dev/net/tun", "there is no /dev/net/tun: %s", f.TUNErr)
	case TUNDenied:
		return fail("run as root, or with CAP_NET_ADMIN; in a container, allow the device /dev/net/tun",
			"the kernel refuses: %s", f.TUNErr)
	case TUNBusy:
		return fail("choose another --name, or stop what has it (ip link show "+f.Name+")",
			"there is an interface %s already", f.Name)
	case TUNNoNamespace:
		return fail("ip netns list shows those that have a name; entering one needs CAP_SYS_ADMIN", "%s", f.TUNErr)
	}
	return fail("look at the kernel's log: dmesg", "%s", f.TUNErr)
}

func (e *exam) capabilities() control.Check {
	switch e.f.NetAdmin {
	case Yes:
		return okay("CAP_NET_ADMIN")
	case No:
		return fail("run as root, or give the service AmbientCapabilities=CAP_NET_ADMIN", "CAP_NET_ADMIN is missing")
	}
	return skip("cannot be read")
}

func (e *exam) settings() control.Check {
	var twice netip.Prefix
	if e.f.Device != nil {
		twice, _ = overlap(e.f.Prefixes, e.f.Device.Addrs)
	}
	switch errs := e.f.SettingErrs; {
	case e.f.TUN == TUNThere:
		return skip("they are not tried on an interface that is there already")
	case e.f.TUN != TUNOK:
		return skip("there is no interface to try them on")
	case len(errs) > 0:
		return fail("for IPv6 addresses, net.ipv6.conf.all.disable_ipv6 must be 0",
			"the kernel refuses settings of the interface: %s", strings.Join(errs, "; "))
	case len(e.f.ReadOnly) > 0:
		return warn("mount /proc/sys writable (systemd: ProtectKernelTunables=no), or have the interface "+
			"inherit it: set net.ipv6.conf.default."+
			strings.Join(e.f.ReadOnly, " and net.ipv6.conf.default.")+" in its network namespace before",
			"/proc/sys is read-only: the interface would go without %s", strings.Join(e.f.ReadOnly, " and "))
	case twice.IsValid():
		return warn("another prefix for the interface",
			"%s has an address in %v too: the kernel will have two routes to it", e.f.Underlay, twice)
	}
	return okay("the interface takes its settings%s", list(" and ", e.f.Prefixes))
}

func list[T fmt.Stringer](lead string, vs []T) string {
	if len(vs) == 0 {
		return ""
	}
	var s []string
	for _, v := range vs {
		s = append(s, v.String())
	}
	return lead + strings.Join(s, ", ")
}

// members says whether the source of members answers. Starting does not wait for it.
func (e *exam) members() control.Check {
	f := e.f
	switch {
	case f.Members == "":
		return skip("the configuration has no source of members to ask")
	case f.MembersErr != "":
		return warn("run starts without it, and goes by the list that it had before; docs/cluster.md says "+
			"what the source needs",
			"%s: %s", f.Members, f.MembersErr)
	}
	return okay("%s names %d hosts", f.Members, f.MemberCount)
}

func (e *exam) control() control.Check {
	f := e.f
	switch f.Control {
	case ControlFree:
		return okay("%s can be made", f.ControlPath)
	case ControlServed:
		return fail("ipoibcmd status shows it; stop it, or choose another --name or --control",
			"an agent serves %s already", f.ControlPath)
	}
	return fail("choose another --control, or make its directory writable", "%s: %s", f.ControlPath, f.ControlErr)
}

func (e *exam) underlay() control.Check {
	f := e.f
	switch {
	case f.InfiniBand != nil:
		return infiniBand(f.InfiniBand)
	case f.Device == nil:
		return fail("ipoibcmd devices lists what could serve", "%s: %s", f.Underlay, f.DeviceErr)
	case !f.Device.Up:
		return fail("ip link set "+f.Underlay+" up", "%s is down", f.Underlay)
	}
	return okay("%s is up, driver %s, MTU %d", f.Underlay, cmp.Or(f.Device.Driver, "unknown"), f.Device.MTU)
}

// infiniBand looks at the port that stands for an underlay.
func infiniBand(p *InfiniBandPort) control.Check {
	switch {
	case p.State != "ACTIVE":
		return fail("is there a cable, and a subnet manager? ipoibcmd devices shows the port", "port %d of %s is %s",
			p.Port, p.Device, cmp.Or(p.State, "unknown"))
	case p.SMLID == 0:
		return fail("have a subnet manager run, such as opensm", "port %d of %s has no subnet manager", p.Port, p.Device)
	case p.PKey.Index(p.PKeys) < 0:
		return fail("have the subnet manager make the port a member (partitions.conf), or choose another pkey",
			"port %d of %s is in partitions %v, and not in %v", p.Port, p.Device, p.PKeys, p.PKey)
	}
	return okay("port %d of %s is an active InfiniBand port, LID %d, subnet manager at LID %d, GID %v; never tried "+
		"on an adapter", p.Port, p.Device, p.LID, p.SMLID, p.GID)
}

// gidInUse returns the GID that the configuration names, else the one that the underlay leads to; zero if
// there is neither.
func (e *exam) gidInUse() ib.GID {
	if e.f.GID.IsZero() && len(e.usable) > 0 {
		return e.usable[0]
	}
	return e.f.GID
}

// address looks for addresses that can be GIDs: IPv6 before IPv4, link-local
// before others.
func (e *exam) address() control.Check {
	f := e.f
	if f.Device == nil {
		return skip("there is no underlay")
	}
	var v6, v4 []ib.GID
	var not []string
	for _, a := range f.Device.Addrs {
		g := ib.GIDFromAddr(a.IP)
		switch {
		case a.DADFailed:
			not = append(not, a.IP.String()+" is a duplicate")
		case a.Tentative:
			not = append(not, a.IP.String()+" is tentative")
		case a.IP.Is4():
			v4 = append(v4, g)
		case a.IP.IsLinkLocalUnicast():
			v6 = slices.Insert(v6, 0, g)
		default:
			v6 = append(v6, g)
		}
	}
	if e.usable = append(v6, v4...); f.opened() {
		e.usable = f.Open.GIDs // addresses may have become usable meanwhile
	}
	why := ""
	if len(not) > 0 {
		why = " (" + strings.Join(not, ", ") + ")"
	}
	switch {
	case len(e.usable) == 0 && !f.Device.Up:
		return skip("%s is down", f.Underlay)
	case len(e.usable) == 0:
		return fail("give "+f.Underlay+" an address: ip addr add 192.0.2.1/24 dev "+f.Underlay+
			", or let it have its IPv6 link-local one",
			"%s has no usable address%s", f.Underlay, why)
	case f.Device.Up && len(v6) == 0 && len(not) > 0 && !f.opened():
		return warn("wait for duplicate address detection, or give one of two hosts another address",
			"only%s is usable%s", list(" ", e.usable), why)
	}
	return okay("%s has%s%s", f.Underlay, list(" ", e.usable), why)
}

// opened reports whether the provider was opened without an error, so that Open holds.
func (f *Facts) opened() bool { return f.Opened && f.OpenErr == "" }

func (e *exam) gid() control.Check {
	f := e.f
	switch {
	case len(e.usable) == 0:
		return skip("there is no usable address")
	case f.GID.IsZero():
		return okay("%v, chosen by address", e.usable[0])
	case slices.Contains(e.usable, f.GID), f.opened(): // a loopback device has more addresses than it lists
		return okay("%v, as configured", f.GID)
	}
	return fail("leave gid empty, or use one of"+list(" ", e.usable), "%v is not a usable address of %s",
		f.GID, f.Underlay)
}

func (e *exam) mtu() control.Check {
	f, gid := e.f, e.gidInUse()
	if f.Device == nil || gid.IsZero() {
		return skip("it depends on underlay and GID")
	}
	plan, err := mtu.PlanUD(f.UDMTU, mtu.Link{Underlay: f.Device.MTU, IPv4: gid.Is4()})
	path := mtu.PathMTU(f.Device.MTU)
	switch {
	case err != nil:
		remedy := fmt.Sprintf("ip link set %s mtu 9000, or --ud-mtu %d on every host of the link", f.Underlay,
			mtu.LargestUD(f.Device.MTU, gid.Is4()))
		return fail(remedy, "%v", err)
	case path == 0:
		return fail("ip link set "+f.Underlay+" mtu 1500", "an underlay MTU of %d is too small for any IB path MTU",
			f.Device.MTU)
	case plan.Fragmented || !plan.IPv6:
		remedy := "jumbo frames on the underlay (MTU 4200 or more)"
		if n := mtu.LargestUD(f.Device.MTU, gid.Is4()); plan.Fragmented && n >= mtu.MinIPv6 {
			remedy += fmt.Sprintf(", or --ud-mtu %d on every host of the link: UD is several times as fast without fragments", n)
		}
		if !plan.IPv6 {
			remedy = "a UD MTU of 1280 or more"
		}
		return warn(remedy, "UD MTU %d on an underlay of %d: %s", plan.MTU, f.Device.MTU, strings.Join(plan.Notes, "; "))
	}
	return okay("UD MTU %d and IB path MTU %d fit the underlay's %d", plan.MTU, path.Octets(), f.Device.MTU)
}

func (e *exam) port() control.Check {
	f := e.f
	rdma := ""
	if f.Device != nil {
		rdma = f.Device.RDMA
	}
	switch {
	case f.PortTaken:
		remedy := "stop it, or give both agents their own --gid"
		if strings.HasPrefix(rdma, "rxe") || rdma != "" && f.PortOwner == "" {
			remedy = "rdma link delete " + rdma + ", or another underlay"
		}
		return fail(remedy, "UDP port 4791 is taken by %s", owner(f.PortOwner, rdma))
	case f.InfiniBand != nil:
		return skip("an InfiniBand port needs no UDP")
	case !f.opened():
		return skip("the provider could not be opened so far")
	case f.Provider == "softroce" && rdma != "" && !strings.HasPrefix(rdma, "rxe"):
		return warn("--provider ibverbs, or another underlay",
			"the adapter of %s does RoCE itself (%s): it may take packets to UDP port 4791 before the kernel sees "+
				"them", f.Underlay, rdma)
	}
	return okay("UDP port 4791 is free on %s", f.Underlay)
}

func owner(who, rdma string) string {
	switch {
	case who != "":
		return who
	case rdma != "":
		return "the kernel, for RDMA device " + rdma
	}
	return "the kernel or a process that cannot be seen from here"
}

// provider fails if opening the provider failed for a reason that no earlier check has.
func (e *exam) provider() control.Check {
	f := e.f
	switch {
	case f.opened():
		return okay("%s opens", f.Provider)
	case e.failed(Underlay, Address, GID, MTU, Port):
		return skip("%s cannot be opened for the reason above", f.Provider)
	case !f.Opened:
		return fail("", "%s was not opened", f.Provider)
	}
	return fail("", "%s", f.OpenErr)
}

func (e *exam) buffers() control.Check {
	o := &e.f.Open
	var little, sysctl []string
	for _, b := range []struct {
		what, sysctl string
		asked, got   uint64
	}{{"receive", "net.core.rmem_max", o.RecvAsked, o.RecvGot}, {"send", "net.core.wmem_max", o.SendAsked, o.SendGot}} {
		if b.got < b.asked {
			little = append(little, fmt.Sprintf("%s buffer %d of %d octets", b.what, b.got, b.asked))
			sysctl = append(sysctl, fmt.Sprintf("sysctl -w %s=%d", b.sysctl, b.asked))
		}
	}
	switch {
	case !e.f.opened() || o.RecvAsked == 0:
		return skip("there are no sockets to ask")
	case len(little) > 0:
		return warn(strings.Join(sysctl, "; "), "the kernel gives less than asked: %s", strings.Join(little, ", "))
	}
	return okay("sockets have %d octets to receive and %d to send", o.RecvGot, o.SendGot)
}

func (e *exam) gso() control.Check {
	return e.offload("UDP_SEGMENT", "offload.gso", e.f.NoGSO, e.f.GSOErr)
}

func (e *exam) gro() control.Check { return e.offload("UDP_GRO", "offload.gro", e.f.NoGRO, e.f.GROErr) }

func (e *exam) offload(option, key string, off bool, err string) control.Check {
	switch {
	case e.f.Provider != "softroce":
		return skip("%s does not use it", e.f.Provider)
	case off:
		return okay("switched off by %s", key)
	case err != "":
		return warn(key+": false", "%s does not work, packets are handled one by one: %s", option, err)
	case !e.f.Loopback:
		return okay("the kernel has %s (not tried with packets: the loopback device is down, or a firewall closes it)",
			option)
	}
	return okay("%s works", option)
}

// link looks at the offloads that make an underlay fast. A kernel refuses UDP_SEGMENT on a device without
// checksum offload.
func (e *exam) link() control.Check {
	d := e.f.Device
	if d == nil {
		return skip("there is no underlay")
	}
	speed := "speed unknown"
	if d.SpeedMbps > 0 {
		speed = fmt.Sprintf("%d Mb/s", d.SpeedMbps)
	}
	if d.Features == nil {
		return skip("%s; its offloads cannot be read", speed)
	}
	on := func(name string) string {
		if slices.Contains(d.Features, name) {
			return name + " on"
		}
		return name + " off (done in software)"
	}
	detail := fmt.Sprintf("%s, %s, %s", speed, on("tx-udp-segmentation"), on("rx-gro"))
	if !slices.ContainsFunc(d.Features, func(s string) bool { return strings.HasPrefix(s, "tx-checksum-") }) {
		return warn("ethtool -K "+e.f.Underlay+" tx on, or offload.gso: false",
			"%s, checksum offload off: the kernel refuses UDP_SEGMENT", detail)
	}
	return okay("%s", detail)
}

func (e *exam) rdma() control.Check {
	f := e.f
	var parts, missing []string
	for _, r := range f.RDMA {
		parts = append(parts, fmt.Sprintf("%s on %s (%s)", r.Name, cmp.Or(strings.Join(r.NetDevs, ", "), "unknown"),
			cmp.Or(strings.Join(r.Nodes, ", "), "unknown")))
		if slices.Contains(r.Missing, "uverbs") {
			missing = append(missing, r.Name)
		}
	}
	switch {
	case len(f.RDMA) == 0 && f.Provider == "softroce":
		return okay("none, and softroce needs none")
	case len(f.RDMA) == 0:
		return fail("rdma link add rxe0 type rxe netdev "+f.Underlay+
			", or an adapter; or --provider softroce", "there is no RDMA device")
	case f.Provider == "softroce":
		return okay("%s; softroce uses none", strings.Join(parts, ", "))
	case len(missing) > 0:
		return fail("modprobe ib_uverbs; in a container, give it /dev/infiniband", "no uverbs node for %s",
			strings.Join(missing, ", "))
	}
	return okay("%s", strings.Join(parts, ", "))
}

// cm says how CM messages will travel.
func (e *exam) cm() control.Check {
	f := e.f
	const taken = "QP 1 cannot be had: the kernel's ib_cm owns CM messages"
	unload := "unload ib_cm and what uses it: modprobe -r " + strings.Join(append(slices.Clone(f.IBCMUsers), "ib_cm"), " ")
	loaded := ""
	if f.IBCM == Yes {
		loaded = " (ib_cm is loaded, and does not matter here)"
	}
	switch {
	case !f.opened():
		return skip("the provider could not be opened")
	case f.CMTransport == "inband":
		return okay("in-band, as configured: only ipoibcmd understands that")
	case f.Open.QP1 && f.CMTransport == "gsi":
		return okay("QP 1 only, as configured%s", loaded)
	case f.Open.QP1:
		return okay("QP 1 is ours%s", loaded)
	case f.CMTransport == "gsi":
		return fail("cm_transport auto, or "+unload, "%s", taken)
	}
	return warn("to meet other implementations, "+unload,
		"%s; messages travel in-band, which only ipoibcmd understands", taken)
}

// firewall says whether rules of this host drop packets that come from peers or go to them.
func (e *exam) firewall() control.Check {
	f := e.f
	switch {
	case f.Rules == nil:
		return skip("the rules of this host cannot be read: %s", cmp.Or(f.RulesErr, "unknown"))
	case f.Provider != "softroce":
		return skip("adapters pass by the rules of this host")
	}
	gid := e.gidInUse()
	const remedy = "let UDP port 4791 pass on the underlay, to this host and from it: nft add rule inet filter " +
		"input iifname %s udp dport 4791 accept, and the like for output"
	worst, text := VerdictAccept, ""
	for _, hook := range []string{"input", "output"} {
		v, why := f.Rules.Verdict(RoCEPacket{Hook: hook, Device: f.Underlay, IPv6: !gid.Is4(), User: f.User})
		if v > worst {
			worst, text = v, fmt.Sprintf("%s, by %s", hook, why)
		}
	}
	switch worst {
	case VerdictDrop:
		return fail(fmt.Sprintf(remedy, f.Underlay),
			"the firewall of this host drops RoCEv2 (UDP port 4791) on %s", text)
	case VerdictMaybe:
		return warn(fmt.Sprintf(remedy, f.Underlay),
			"the firewall of this host may drop RoCEv2 (UDP port 4791) on %s", text)
	}
	return okay("rules of this host let RoCEv2 (UDP port 4791) pass")
}

// localUsers says whether a user of this host can send RoCEv2 packets as the host.
func (e *exam) localUsers() control.Check {
	f := e.f
	switch {
	case f.Provider != "softroce":
		return skip("%s does not receive by sockets", f.Provider)
	case f.LocalGuard == Yes:
		return okay("the kernel lets no other user send to UDP port 4791")
	case f.LocalGuard == No:
		return warn("where users of this host are not trusted: the nftables rule in docs/security.md",
			"every user of this host can send packets to UDP port 4791 of peers, which take them for this host's")
	}
	return skip("%s", cmp.Or(f.LocalErr, "unknown"))
}

// demo says whether "ipoibcmd demo" would work too. run does not depend on it.
func (e *exam) demo() control.Check {
	f := e.f
	switch {
	case f.TUN == TUNNoNode || f.TUN == TUNDenied:
		return skip("demo needs /dev/net/tun too")
	case f.Demo == Unknown:
		return skip("demo needs root: it makes network namespaces")
	case f.Demo == No:
		return warn("only demo needs it: root with CAP_SYS_ADMIN, a writable /run/netns and /proc/sys, and the "+
			"kernel's veth (modprobe veth)",
			"demo cannot make its network namespaces or the veth pair between them: %s", f.DemoErr)
	}
	return okay("network namespaces and a veth pair between them can be made")
}

// overlap returns the first of our prefixes that contains an address of the underlay. Link-local addresses
// do not count.
func overlap(ps []netip.Prefix, addrs []Addr) (netip.Prefix, bool) {
	for _, p := range ps {
		if slices.ContainsFunc(addrs, func(a Addr) bool { return p.Contains(a.IP) && !a.IP.IsLinkLocalUnicast() }) {
			return p, true
		}
	}
	return netip.Prefix{}, false
}
