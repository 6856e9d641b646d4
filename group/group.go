// Package group decides which InfiniBand multicast groups the interface is joined
// to, and why (RFC 4391 sections 4, 5 and 10; RFC 4755 section 2.1).
//
// A [Machine] turns events (the device got an address, the kernel sent a report) into actions (join
// this MGID, leave that one). It joins nothing itself. It always wants broadcast, 224.0.0.1 and
// ff02::1, and a solicited-node group for each IPv6 address. The other groups are those that IGMP
// and MLD reports and the kernel's list name. The data path reads the [Table] that the Machine
// publishes.
//
// Missing: source filters (a group is joined for all sources), multicast routing
// (RFC 4391 section 11), and subnet administration: package ipoib does that.
package group

import (
	"cmp"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"ipoibcm/ib"
	"ipoibcm/wire/ip"
)

// Options configures a Machine. The zero value is ready to use.
type Options struct {
	PKey  ib.PKey // zero means 0xffff
	Scope uint8   // scope nibble of every MGID; zero means 2, link-local

	// Underlay4 is the one IPv4 group that carries all groups if the underlay is IPv4. Zero
	// means 239.192.p.q with p.q the P_Key.
	Underlay4 netip.Addr

	// Peers are the hosts that each get their own copy of a multicast packet by unicast, on
	// underlays without multicast. An empty list means that there is multicast, unless Copies
	// is set: then nobody is known yet.
	Peers  []ib.GID
	Copies bool

	// MaxGroups bounds the groups joined for reports and the kernel's list.
	// Zero means 1024, negative none at all.
	MaxGroups int

	Log *slog.Logger // failed joins and refusals; nil discards them
}

func (o *Options) maxGroups() int { return max(0, cmp.Or(o.MaxGroups, 1024)) }

// An Event is an input of [Machine.Step].
type Event interface{ step(*Machine) }

// Events.
type (
	// Up says that there is a UD QP, and which GID it has. Before it, the machine joins nothing. A
	// further Up says that there is a new QP, which is not attached to any group yet.
	Up struct{ GID ib.GID }
	// Down says that the QP is about to be destroyed: the machine leaves all groups.
	Down struct{}
	// AddAddr says that the device has an address. Broadcast is its subnet
	// broadcast; the zero Addr means all ones in the host part.
	AddAddr struct {
		Prefix    netip.Prefix
		Broadcast netip.Addr
	}
	// DelAddr says that the device lost an address.
	DelAddr struct{ Prefix netip.Prefix }
	// Report holds the group records of an IGMP or MLD report on the TUN.
	Report struct{ Changes []ip.Change }
	// Kernel is the kernel's complete list of the device's groups. Nobody on the host
	// wants a group that is not in the list.
	Kernel struct{ Groups []netip.Addr }
	// SetPeers replaces Options.Peers and Options.Copies.
	SetPeers struct {
		Peers  []ib.GID
		Copies bool
	}
	// JoinFailed says that a [Join] did not work. The machine tries it again later.
	JoinFailed struct {
		MGID ib.GID
		Err  error
	}
	// Wake says that the deadline has passed.
	Wake struct{}
)

func (ev Up) step(m *Machine)         { m.start(ev.GID) }
func (Down) step(m *Machine)          { m.stop() }
func (ev AddAddr) step(m *Machine)    { m.addAddr(ev) }
func (ev DelAddr) step(m *Machine)    { m.delAddr(ev.Prefix) }
func (ev Kernel) step(m *Machine)     { m.kernel(ev.Groups) }
func (ev JoinFailed) step(m *Machine) { m.joinFailed(ev) }
func (Wake) step(m *Machine)          { m.wake() }

func (ev Report) step(m *Machine) {
	for _, c := range ev.Changes {
		m.report(c)
	}
}

func (ev SetPeers) step(m *Machine) {
	m.changeUnderlay(func() { m.setPeers(ev.Peers, ev.Copies) })
}

// An Action is something the driver must do.
type Action interface{ action() }

// Actions.
type (
	// Join attaches the UD QP to an MGID. If that fails, the driver answers with JoinFailed.
	Join struct{ MGID ib.GID }
	// Leave detaches the UD QP from an MGID.
	Leave struct{ MGID ib.GID }
	// Publish hands the data path a new table. If a Step returns it, it is the last action.
	Publish struct{ Table *Table }
)

func (Join) action()    {}
func (Leave) action()   {}
func (Publish) action() {}

// A Reason is why a group is joined; a group may have several.
type Reason uint8

// Reasons.
const (
	Always     Reason = 1 << iota // broadcast, 224.0.0.1, ff02::1
	ForAddress                    // solicited-node group of an address
	Reported                      // an IGMP or MLD report asked for it
	InKernel                      // the kernel's list has it
)

// A Group is one joined IP group, as `show groups` prints it.
type Group struct {
	IP      netip.Addr // 255.255.255.255 stands for broadcast
	MGID    ib.GID     // by RFC 4391, whatever the underlay
	Reasons Reason
	Refs    int       // addresses that need the group (ForAddress)
	Since   time.Time // when the first reason came
	Joined  bool      // Join was issued and has not failed since; false while down or if peers get copies
}

// Names returns the names of the reasons in a fixed order.
func (r Reason) Names() (names []string) {
	for i, name := range []string{"always", "address", "report", "kernel"} {
		if r&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// String prints the names: "address+report".
func (r Reason) String() string { return strings.Join(r.Names(), "+") }
