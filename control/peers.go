package control

// Bounds of PathPeerPing.
const (
	MaxPings    = 100   // calls that one request may ask for
	MaxPingSize = 16384 // octets of one call, to be returned
)

// A PeerPath says how another host's agent was asked over the fabric
// (RPC-over-RDMA; package peerrpc).
type PeerPath struct {
	IP  string `json:"ip"`  // as it was asked for
	GID string `json:"gid"` // where it was asked
	// Via says how the GID is known: "neighbour" (the cache has it now),
	// "remembered" (it had it once), or "as given" (the address is taken for a GID).
	Via     string  `json:"via"`
	Class   string  `json:"class,omitempty"` // of a neighbour: "rfc", "legacy" or "unknown"
	RPCRDMA int     `json:"rpcrdma"`         // version of RPC-over-RDMA
	SetupMS float64 `json:"setup_ms"`        // REQ to RTU
}

// A PeerStatus is the status of another host's agent.
type PeerStatus struct {
	Version int      `json:"version"`
	Path    PeerPath `json:"path"`
	Status  Status   `json:"status"`
}

// A PeerPing has the times of calls to another host's agent: of NULL, or of ECHO with Size octets, which
// the agent returned unchanged.
type PeerPing struct {
	Version int       `json:"version"`
	Path    PeerPath  `json:"path"`
	Size    int       `json:"size,omitempty"`
	MS      []float64 `json:"ms"` // round-trip times
}

// PeerEvents are events of another host's agent.
type PeerEvents struct {
	Version int      `json:"version"`
	Path    PeerPath `json:"path"`
	Last    uint64   `json:"last"` // number of the last one, for ?after=
	Events  []Event  `json:"events"`
}
