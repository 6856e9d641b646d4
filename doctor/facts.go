package doctor

import (
	"net/netip"

	"ipoibcm/control"
	"ipoibcm/ib"
)

// An InfiniBandPort is the state of a port as the kernel reports it, and the P_Key of the configuration.
type InfiniBandPort struct {
	Device     string
	Port       int
	State      string // "ACTIVE"
	LID, SMLID ib.LID // SMLID is the subnet manager's; zero: none has been here
	GID        ib.GID
	PKeys      []ib.PKey
	PKey       ib.PKey
}

// Facts are what was found on a host, for a configuration that run would accept. An error text is empty
// where there was no error.
type Facts struct {
	// From the configuration of run.
	Name, Underlay, Provider string
	UDMTU                    int    // zero: what one frame of the underlay carries
	GID                      ib.GID // zero: the default
	CMTransport              string
	NoGSO, NoGRO             bool // switched off
	Prefixes                 []netip.Prefix

	Kernel   string // what uname calls its release
	NetAdmin Answer // the capability CAP_NET_ADMIN is effective

	// A rehearsal: the interface is made as run makes it, but never set up.
	TUN         TUNState
	TUNErr      string
	SettingErrs []string // settings and addresses of the interface that the kernel refused
	ReadOnly    []string // sysctls of the interface, such as accept_ra_mtu=0: /proc/sys is read-only

	// The source of members, which was asked once. Members is its name; empty for a list in the
	// configuration, and for multicast.
	Members     string
	MembersErr  string
	MemberCount int

	ControlPath string
	Control     ControlState
	ControlErr  string

	Device    *Device // the underlay; nil if there is no such device
	DeviceErr string
	// InfiniBand is the port that the configuration has in place of an underlay; nil if there is none.
	InfiniBand *InfiniBandPort

	// The provider, opened as run opens it.
	Opened    bool // opening was tried
	OpenErr   string
	PortTaken bool   // OpenErr is that UDP port 4791 is taken
	PortOwner string // the process that has that port, as far as that can be seen
	Open      Open   // holds if the provider was opened and OpenErr is empty

	// Self-tests of the kernel's UDP offloads, on the loopback device.
	GSOErr, GROErr string
	Loopback       bool // the loopback device is up: the tests sent packets

	// A rehearsal of what a local user could do: send to UDP port 4791 as this host. Yes means that the
	// kernel refuses. Unknown means that it was not tried; LocalErr says why.
	LocalGuard Answer
	LocalErr   string

	// Rules are the rules of the host's firewall. If they cannot be read, Rules is nil and RulesErr says
	// why. User is the name and the uid of the user as whom the daemon opens its sockets: root if `user` is
	// configured.
	Rules    *Ruleset
	RulesErr string
	User     []any

	RDMA []control.RDMADevice
	IBCM Answer // the module ib_cm is loaded
	// IBCMUsers are the modules that use ib_cm, in an order in which they can be unloaded.
	IBCMUsers []string

	// A rehearsal of the network that demo makes: namespaces joined by a veth pair.
	Demo    Answer // Unknown: it was not tried, because we are not root
	DemoErr string

	// What would touch the interface.
	Managers []string // names of processes
	Files    []File   // configuration of the managers
}

// An Answer is yes, no, or not known.
type Answer uint8

// Answers.
const (
	Unknown Answer = iota
	Yes
	No
)

// A TUNState says how far making the interface got.
type TUNState uint8

// States of the rehearsal.
const (
	TUNOK          TUNState = iota
	TUNThere                // there is a TUN of that name already, and no process has it
	TUNNoNode               // /dev/net/tun is not there
	TUNDenied               // the kernel does not let us
	TUNBusy                 // there is an interface of that name
	TUNNoNamespace          // the network namespace cannot be entered
	TUNFailed               // another error
)

// A ControlState says whether the control socket can be made.
type ControlState uint8

// States of the control socket.
const (
	ControlFree   ControlState = iota
	ControlServed              // an agent answers there
	ControlFailed              // ControlErr says why it cannot be made
)

// A Device is the underlay.
type Device struct {
	Up        bool
	MTU       int // octets
	Driver    string
	SpeedMbps int // 0: unknown
	Addrs     []Addr
	Features  []string // ethtool features that are on; nil if unknown
	RDMA      string   // RDMA device on it
}

// An Addr is one address of the underlay.
type Addr struct {
	IP                   netip.Addr
	Tentative, DADFailed bool
}

// Open is what the provider says once it is open.
type Open struct {
	GIDs                                   []ib.GID // the first is the default
	QP1                                    bool     // QP 1 can be had
	RecvAsked, RecvGot, SendAsked, SendGot uint64   // octets of socket buffer; 0 if it has none
}

// A File is a configuration file of a manager.
type File struct{ Path, Text string }
