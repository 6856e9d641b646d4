// Package control holds the types of the local control API and their JSON.
//
// The agent serves them over HTTP on a UNIX socket; the command line is one of
// the clients, curl is another. Everything but [PathReload] is read-only. The schema has one
// version number, [Version], which every document carries; fields are added
// without raising it, and never change meaning.
//
// Durations are in milliseconds (fields ending in MS), sizes in octets, times
// in RFC 3339 with UTC. Addresses, GIDs and numbers with a customary base are
// strings as the rdma tools print them.
package control

import (
	"path"
	"time"
)

// Version is the version of the JSON schema.
const Version = 2 // 2: a Route has next_hop where it had prefix and gateway

// The paths of the API, all GET.
const (
	// PathStatus takes ?peer=&limit=&after=, which choose from its peers. PathConns, PathNeigh and
	// PathRoutes take them too, for their lists ([Page]).
	PathStatus  = "/v1/status"
	PathConns   = "/v1/conns"
	PathNeigh   = "/v1/neigh"
	PathRoutes  = "/v1/routes"
	PathGroups  = "/v1/groups"
	PathStats   = "/v1/stats"
	PathMembers = "/v1/members"
	PathExplain = "/v1/explain" // ?ip=ADDRESS
	// PathEvents takes ?since=DURATION. The answer is newline-delimited Events, past ones first, until the
	// client leaves.
	PathEvents     = "/v1/events"
	PathCapture    = "/v1/capture"     // ?snap=OCTETS: pcapng, until the client leaves
	PathPeerStatus = "/v1/peer/status" // ?ip=ADDRESS: of another host's agent, over the fabric
	PathPeerPing   = "/v1/peer/ping"   // ?ip=ADDRESS&count=N&size=OCTETS
	PathPeerEvents = "/v1/peer/events" // ?ip=ADDRESS&after=NUMBER
	// PathRuntime returns what the process uses after two garbage collections, when free memory has gone
	// back to the kernel.
	PathRuntime = "/v1/runtime"
	PathMetrics = "/metrics" // Prometheus text
)

// An Offload is one way to let the kernel, or one thread, do more at a time.
type Offload struct {
	Name string `json:"name"` // "gso", "gro", "hold_p", "busy_poll", "connected", "one_thread", "checksum", "tso", "uso", "steering", "queues"
	What string `json:"what"`
	On   bool   `json:"on"`
	Why  string `json:"why,omitempty"` // why it is off, or what is doubtful
	Uses uint64 `json:"uses"`          // how often it was used: batches sent, chains received, packets and so on
}

// SocketDir is where the sockets of agents are unless configured otherwise.
const SocketDir = "/run/ipoibcm"

// SocketPath returns the default control socket of interface name.
func SocketPath(name string) string { return path.Join(SocketDir, name+".sock") }

// An Error is the body of every answer that is not 200.
type Error struct {
	Version int    `json:"version"`
	Error   string `json:"error"`          // what went wrong, a sentence for people
	Hint    string `json:"hint,omitempty"` // what to do next
	// Rejected: another host was to be asked, and answered with a REJ. So the underlay carries packets both ways.
	Rejected bool `json:"rejected,omitempty"`
}

// A Runtime is what the agent's process uses. Asking for it costs two garbage
// collections: it is for finding leaks, not for watching.
type Runtime struct {
	Version     int    `json:"version"`
	Goroutines  int    `json:"goroutines"`
	Descriptors int    `json:"descriptors"`  // open files, sockets included
	HeapOctets  uint64 `json:"heap_octets"`  // live on the heap
	HeapObjects uint64 `json:"heap_objects"` // live on the heap
}

// A Status is the state of the whole interface, on one screen.
type Status struct {
	Version   int       `json:"version"`
	Interface Interface `json:"interface"`
	Underlay  Underlay  `json:"underlay"`
	Peers     []Peer    `json:"peers"`
	Warnings  []string  `json:"warnings,omitempty"` // what an operator should look at
	// Protections are what the process has given up since it began to serve.
	Protections []Protection `json:"protections,omitempty"`
	// Limited says what is left out and why, in the status of another host's agent.
	Limited string `json:"limited,omitempty"`
	Next    string `json:"next,omitempty"` // key of the last element, where a page ends before the list does
}

// A Protection is one part of the agent's sandbox.
type Protection struct {
	Name   string `json:"name"` // "user", "capabilities", "no_new_privs", "landlock" or "seccomp"
	On     bool   `json:"on"`
	Detail string `json:"detail"` // what it is, or why it is off
}

// An Interface is the network interface the agent provides.
type Interface struct {
	Name string `json:"name"`
	// Netns is the network namespace of the interface, if that is not the agent's: its name, or
	// net:[INODE].
	Netns string `json:"netns,omitempty"`
	// State is "up", "down", "underlay down" or "no link", and "starting" until the kernel has the first
	// routes.
	State string `json:"state"`
	Mode  string `json:"mode"`   // policy: rc, uc, auto or ud
	MTU   int    `json:"mtu"`    // device MTU
	UDMTU int    `json:"ud_mtu"` // largest datagram sent, octets of IP
	// UDAccept is the largest datagram that the interface receives, octets of IP. 0 means ud_mtu: an older
	// agent has no such field.
	UDAccept       int       `json:"ud_accepted,omitempty"`
	ReceiveMTU     int       `json:"receive_mtu"` // offered, encapsulation header included
	Threads        int       `json:"threads"`     // data threads
	GID            string    `json:"gid"`
	UDQPN          string    `json:"ud_qpn"`
	LinkAddr       string    `json:"link_addr"` // 20 octets: flags, QPN, GID
	PKey           string    `json:"pkey"`
	QKey           string    `json:"qkey"`
	CMTransport    string    `json:"cm_transport"` // policy: auto, gsi or inband
	CMPaths        []string  `json:"cm_paths"`     // paths that CM messages can take: gsi (QP 1), inband
	BroadcastGroup string    `json:"broadcast_group"`
	Addresses      []Address `json:"addresses"`
	PID            int       `json:"pid"`
	Since          time.Time `json:"since"`
	UptimeMS       int64     `json:"uptime_ms"`
	Build          string    `json:"build"`
}

// An Address is one of the interface's own.
type Address struct {
	Prefix string `json:"prefix"`
	State  string `json:"state"` // "ok", "probing" or "duplicate"
}

// An Underlay is what carries the packets.
type Underlay struct {
	Provider string   `json:"provider"`
	Device   string   `json:"device"`
	MTU      int      `json:"mtu"`
	PathMTU  int      `json:"path_mtu"` // IB path MTU of RC and UC
	GIDs     []string `json:"gids"`
	Active   bool     `json:"active"`
	Notes    []string `json:"notes,omitempty"` // offloads and limits in force
	// Offloads are the offloads of the provider and of the TUN, as they are now.
	Offloads []Offload `json:"offloads,omitempty"`
	// Subnet is the state of an InfiniBand port; absent on Ethernet.
	Subnet *Subnet `json:"subnet,omitempty"`
}

// A Subnet is the state of an InfiniBand port and of its subnet administrator.
type Subnet struct {
	LID         int    `json:"lid"`
	SMLID       int    `json:"sm_lid"` // of the subnet manager; 0: none has been here
	GRHRequired bool   `json:"grh_required"`
	Admin       string `json:"admin"`         // "no subnet manager", "asking" or "ready"
	Joined      bool   `json:"joined"`        // the broadcast group is joined; else there is no link
	Why         string `json:"why,omitempty"` // why it is not joined
	MLID        int    `json:"mlid,omitempty"`
	SL          int    `json:"sl"`
	Rate        string `json:"rate,omitempty"`
	Paths       int    `json:"paths"`  // known paths to other ports
	Shared      bool   `json:"shared"` // the kernel has an interface of its own on the port: groups are not left
}

// A Peer is one neighbour interface: a link-layer address.
type Peer struct {
	LinkAddr  string   `json:"link_addr"`
	GID       string   `json:"gid"`
	UDQPN     string   `json:"ud_qpn"`
	Addresses []string `json:"addresses"`
	Class     string   `json:"class"` // "rfc", "legacy", "ud" or "unknown"
	Mode      string   `json:"mode"`  // RC, UC or UD: what unicast to it uses now
	MTU       int      `json:"mtu"`
	State     string   `json:"state"`             // of the connection, or "ud"
	CMPath    string   `json:"cm_path,omitempty"` // of its CM messages: "gsi" or "inband"
	AgeMS     int64    `json:"age_ms"`
	TxPackets uint64   `json:"tx_packets"`
	TxOctets  uint64   `json:"tx_octets"`
	RxPackets uint64   `json:"rx_packets"`
	RxOctets  uint64   `json:"rx_octets"`
}

// A Conn is one IB connection.
type Conn struct {
	Peer           string `json:"peer"` // link-layer address
	Mode           string `json:"mode"`
	State          string `json:"state"`
	Role           string `json:"role"` // "active" or "passive"
	ServiceID      string `json:"service_id"`
	LocalQPN       string `json:"local_qpn"`
	RemoteQPN      string `json:"remote_qpn"`
	CMPath         string `json:"cm_path"` // of CM messages: "gsi" or "inband"
	LocalCommID    string `json:"local_comm_id"`
	RemoteCommID   string `json:"remote_comm_id"`
	MTU            int    `json:"mtu"`
	PeerReceiveMTU int    `json:"peer_receive_mtu"`
	PathMTU        int    `json:"path_mtu"`
	Direction      string `json:"direction"` // "both", "send" or "receive"
	AgeMS          int64  `json:"age_ms"`
	IdleMS         int64  `json:"idle_ms"`
	TxPackets      uint64 `json:"tx_packets"`
	TxOctets       uint64 `json:"tx_octets"`
	TxQueued       int    `json:"tx_queued"`        // packets posted and not yet completed
	TxQueuedOctets int    `json:"tx_queued_octets"` // octets of these packets
	TxQueuedLimit  int    `json:"tx_queued_limit"`  // octets that may be posted: what leaves within milliseconds
	TxBacklog      int    `json:"tx_backlog"`       // packets that wait to be posted, by flow
	TxOverflow     uint64 `json:"tx_overflow"`      // packets dropped because too much waited
	TxLate         uint64 `json:"tx_late"`          // packets dropped because they waited for too long (CoDel)
	TxMarked       uint64 `json:"tx_marked"`        // packets that got a CE mark instead
	RxPackets      uint64 `json:"rx_packets"`
	RxOctets       uint64 `json:"rx_octets"`
	Crossing       string `json:"crossing,omitempty"` // verdict, if REQs crossed
	Why            string `json:"why"`                // what the connection is there for, and what will end it
	// Health is the state of an RC connection as a sender. It is absent for UC, and where the provider
	// does not say.
	Health *Health `json:"health,omitempty"`
}

// Health is what a sender over RC sees of its path.
type Health struct {
	RTTUS       float64 `json:"rtt_us"` // from a packet to its ACK, smoothed; 0: not known yet
	RTTSpreadUS float64 `json:"rtt_spread_us"`
	InFlight    int     `json:"in_flight"` // packets not acknowledged
	Limit       int     `json:"limit"`     // packets that may be in flight now: fewer than window where packets are lost
	Window      int     `json:"window"`
	Packets     uint64  `json:"packets"` // sent, ACKs included
	Retransmits uint64  `json:"retransmits"`
	Timeouts    uint64  `json:"timeouts"`  // of the ACK timer
	Probes      uint64  `json:"probes"`    // packets sent again before that timer expired, to probe for a loss
	NotReady    uint64  `json:"not_ready"` // RNR NAKs that came
}

// Conns answers PathConns.
type Conns struct {
	Version int    `json:"version"`
	Conns   []Conn `json:"conns"`
	Next    string `json:"next,omitempty"` // key of the last element, where a page ends before the list does
}

// A Neighbour is one entry of the ARP and ND cache.
type Neighbour struct {
	IP       string `json:"ip"`
	LinkAddr string `json:"link_addr,omitempty"`
	State    string `json:"state"` // as RFC 4861: INCOMPLETE, REACHABLE, STALE, DELAY, PROBE; FAILED
	AgeMS    int64  `json:"age_ms"`
	Queued   int    `json:"queued"` // packets waiting for the answer
}

// Neighbours answers PathNeigh.
type Neighbours struct {
	Version    int         `json:"version"`
	Neighbours []Neighbour `json:"neighbours"`
	Next       string      `json:"next,omitempty"` // key of the last element, where a page ends before the list does
}

// A Route is one entry of the table packets are sent by.
type Route struct {
	NextHop      string `json:"next_hop"`
	Kind         string `json:"kind"`         // "connection", "ud", "multicast", "resolve" or "drop"
	Destinations int    `json:"destinations"` // destinations in use that lead to it
	Peer         string `json:"peer,omitempty"`
	MTU          int    `json:"mtu"`
	Kernel       bool   `json:"kernel"`        // a host route of ours in the kernel shows this MTU
	Why          string `json:"why,omitempty"` // why the kernel has no such route, if one is wanted
}

// Routes answers PathRoutes.
type Routes struct {
	Version      int     `json:"version"`
	Destinations int     `json:"destinations"` // destinations in use, of all next hops
	Routes       []Route `json:"routes"`
	Next         string  `json:"next,omitempty"` // key of the last element, where a page ends before the list does
}

// A Group is one MGID the interface has joined.
type Group struct {
	MGID    string   `json:"mgid"`
	Groups  []string `json:"groups"` // the IP groups that map to it
	Reasons []string `json:"reasons"`
	AgeMS   int64    `json:"age_ms"`
}

// Groups answers PathGroups.
type Groups struct {
	Version int     `json:"version"`
	Groups  []Group `json:"groups"`
}

// A Counter is one counter of one part of the agent.
type Counter struct {
	Part  string `json:"part"` // "cm", "neigh", "datapath", "softroce", …
	Name  string `json:"name"`
	Value uint64 `json:"value"`
}

// Stats answers PathStats.
type Stats struct {
	Version  int       `json:"version"`
	Counters []Counter `json:"counters"`
}

// An Explanation answers PathExplain: the way that a packet to IP takes, and why.
type Explanation struct {
	Version  int      `json:"version"`
	IP       string   `json:"ip"`
	NextHop  string   `json:"next_hop,omitempty"`
	Peer     string   `json:"peer,omitempty"`
	Class    string   `json:"class,omitempty"`
	Mode     string   `json:"mode,omitempty"`
	CMPath   string   `json:"cm_path,omitempty"` // of CM messages to Peer
	MTU      int      `json:"mtu,omitempty"`
	LastREJ  string   `json:"last_rej,omitempty"`
	Crossing string   `json:"crossing,omitempty"`
	Outcome  string   `json:"outcome"` // of a packet sent now: sent, unknown, elsewhere or dropped
	Why      []string `json:"why"`     // one sentence per decision, in order
}

// An Event is one line of PathEvents: a CM message, or a decision.
type Event struct {
	Version int               `json:"version"`
	Time    time.Time         `json:"time"`
	Part    string            `json:"part"`           // "cm", "neigh", "conn", "mtu", "group", "agent"
	Kind    string            `json:"kind"`           // "REQ", "REJ", "resolved", "crossing", …
	Peer    string            `json:"peer,omitempty"` // GID or link-layer address
	Out     *bool             `json:"out,omitempty"`  // direction, for messages
	Text    string            `json:"text"`
	Fields  map[string]string `json:"fields,omitempty"`
}

// Devices is the output of "devices --json"; it needs no agent.
type Devices struct {
	Version   int              `json:"version"`
	Underlays []UnderlayDevice `json:"underlays"`
	RDMA      []RDMADevice     `json:"rdma"`
	Notes     []string         `json:"notes,omitempty"`
}

// An UnderlayDevice is a network device that softroce could run on.
type UnderlayDevice struct {
	Name      string          `json:"name"`
	Driver    string          `json:"driver,omitempty"`
	Up        bool            `json:"up"`
	MTU       int             `json:"mtu"`
	PathMTU   int             `json:"path_mtu"` // IB path MTU that fits
	SpeedMbps int             `json:"speed_mbps,omitempty"`
	Addresses []string        `json:"addresses"`
	Features  map[string]bool `json:"features,omitempty"` // ethtool names
	RDMA      string          `json:"rdma,omitempty"`     // RDMA device on it
}

// An RDMADevice is a device of the RDMA subsystem.
type RDMADevice struct {
	Name    string   `json:"name"`
	NetDevs []string `json:"netdevs"`
	Nodes   []string `json:"nodes"`   // character devices
	Missing []string `json:"missing"` // nodes that should be there
	// Ports are those whose link layer is InfiniBand.
	Ports []InfiniBandPort `json:"infiniband_ports,omitempty"`
}

// An InfiniBandPort is what the kernel says of a port of an InfiniBand fabric.
type InfiniBandPort struct {
	Port  int      `json:"port"`
	State string   `json:"state"` // "ACTIVE"
	LID   int      `json:"lid"`
	SMLID int      `json:"sm_lid"` // of the subnet manager; 0: none has been here
	GID   string   `json:"gid"`
	PKeys []string `json:"pkeys"`
	Rate  string   `json:"rate"` // "10 Gb/sec (4X SDR)"
}
