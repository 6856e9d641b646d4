package doctor

import (
	"net/netip"

	"ipoibcm/ib"
)

// An InfiniBandPort is what the kernel says of one, and the partition that is wanted.
type InfiniBandPort struct {
	Device     string
	Port       int
	State      string // "ACTIVE"
	LID, SMLID ib.LID // of the subnet manager; zero: none has been here
	GID        ib.GID
	PKeys      []ib.PKey
	PKey       ib.PKey
}

// Facts are what was found on a host, for a configuration that run would take.
// An error text is empty where there was no error.
type Facts struct {
	// What run was told.
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
	SettingErrs []string // its settings and addresses that the kernel refused
	ReadOnly    []string // sysctls of it, such as accept_ra_mtu=0, that a read-only /proc/sys keeps from being set

	// Where the hosts of the link are found, asked once; Members is empty for a list in
	// the configuration, and for multicast.
	Members     string
	MembersErr  string
	MemberCount int

	ControlPath string
	Control     ControlState
	ControlErr  string

	Device    *Device // the underlay; nil if there is no such device
	DeviceErr string
	// InfiniBand is the port that run was told of in place of an underlay; nil: none.
	InfiniBand *InfiniBandPort

	// The provider, opened as run opens it.
	Opened    bool // it was tried
	OpenErr   string
	PortTaken bool   // the error is that UDP port 4791 is
	PortOwner string // by whom, as far as that can be seen
	Open      Open   // where OpenErr is empty

	// Self-tests of the kernel's UDP offloads, on the loopback device.
	GSOErr, GROErr string
	Loopback       bool // it is up: the tests sent packets

	// A rehearsal of what a local user could do: send to UDP port 4791 as this host. Yes
	// means that the kernel refuses; Unknown that it was not tried, and LocalErr why.
	LocalGuard Answer
	LocalErr   string

	// Rules are those of the host's firewall; nil, and RulesErr says why, if they cannot
	// be read. User is who runs the daemon: the name and the number.
	Rules    *Ruleset
	RulesErr string
	User     []any

	RDMA []RDMA
	IBCM Answer // the module ib_cm is loaded
	// IBCMUsers are the modules that hold it, in an order in which they can be unloaded.
	IBCMUsers []string

	// A rehearsal of the network that demo makes: namespaces joined by a veth pair.
	Demo    Answer // Unknown: not root, so it was not tried
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
	SpeedMbps int // 0 if unknown
	Addrs     []Addr
	Features  []string // ethtool features that are on; nil if unknown
	RDMA      string   // RDMA device on it
}

// An Addr is one address of the underlay.
type Addr struct {
	IP                   netip.Addr
	Tentative, DADFailed bool
}

// Open is what the open provider says.
type Open struct {
	GIDs                                   []ib.GID // the first is the default
	QP1                                    bool     // to be had
	RecvAsked, RecvGot, SendAsked, SendGot uint64   // octets of socket buffer; 0 if it has none
}

// An RDMA is one RDMA device.
type RDMA struct {
	Name           string
	NetDevs        []string
	Nodes, Missing []string // character devices
}

// A File is a configuration file of a manager.
type File struct{ Path, Text string }
