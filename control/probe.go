package control

// An MPAProbe is what "ipoibcmd probe mpa" found out about one connection.
type MPAProbe struct {
	Version int    `json:"version"`
	Role    string `json:"role"` // "initiator" or "responder"
	Local   string `json:"local,omitempty"`
	Remote  string `json:"remote,omitempty"`
	Outcome string `json:"outcome"` // "established", "rejected" or "failed"

	// Frames are the startup frames in the order in which they were sent or received; a fallback has two
	// requests.
	Frames []MPAFrame `json:"frames"`
	// Settled is what the two ends have agreed on; nil unless the outcome is "established".
	Settled *MPASettled `json:"settled,omitempty"`
	// FirstMessage is the peer's first message after the startup frames.
	FirstMessage string `json:"first_message,omitempty"`
	// Terminate is what the peer's Terminate said: layer/type/code and its name.
	Terminate string `json:"terminate,omitempty"`

	Error  string   `json:"error,omitempty"`  // why the outcome is not "established"
	Reason string   `json:"reason,omitempty"` // name of the counter; "segment" for a fault above MPA
	Code   *int     `json:"code,omitempty"`   // MPA error code, layer 2, type 0
	Clause string   `json:"clause,omitempty"` // the rule
	Notes  []string `json:"notes,omitempty"`
	// Counters are those of MPA that are not zero.
	Counters map[string]uint64 `json:"counters,omitempty"`
}

// An MPAFrame is one MPA startup frame.
type MPAFrame struct {
	Sent     bool         `json:"sent"` // by us
	Kind     string       `json:"kind"` // "request" or "reply"
	Revision int          `json:"revision"`
	Markers  bool         `json:"markers"`            // M: the sender wants markers
	CRC      bool         `json:"crc"`                // C: the sender wants CRCs
	Reject   bool         `json:"reject"`             // R
	Enhanced *MPAEnhanced `json:"enhanced,omitempty"` // there if S
	Reserved int          `json:"reserved"`           // the four Res bits
	Private  *MPAPrivate  `json:"private,omitempty"`  // of the ULP
}

// An MPAEnhanced is the enhanced data of a frame (RFC 6581 section 9). A depth
// that is null is left to the ULP (0x3FFF).
type MPAEnhanced struct {
	PeerToPeer bool     `json:"peer_to_peer"` // flag A
	RTR        []string `json:"rtr"`          // flags B, C, D: "send", "write", "read"
	IRD        *int     `json:"ird"`
	ORD        *int     `json:"ord"`
}

// An MPAPrivate is the private data of a ULP.
type MPAPrivate struct {
	Hex     string `json:"hex"`
	Octets  int    `json:"octets"`
	Meaning string `json:"meaning,omitempty"` // empty if it is not known
}

// An MPASettled is what the two ends of a connection have agreed on.
type MPASettled struct {
	Revision    int    `json:"revision"`
	Enhanced    bool   `json:"enhanced"`
	PeerToPeer  bool   `json:"peer_to_peer"`
	RTR         string `json:"rtr"` // kind of indication sent or received, "none"
	IRD         int    `json:"ird"` // of this end
	ORD         int    `json:"ord"`
	SendMarkers bool   `json:"send_markers"`
	RecvMarkers bool   `json:"receive_markers"`
	CRC         bool   `json:"crc"`
	MULPDU      int    `json:"mulpdu"` // largest ULPDU that would be sent, octets
	Fallback    bool   `json:"fallback"`
}

// An RPCProbe is what "ipoibcmd probe rpcrdma" found out about one peer.
type RPCProbe struct {
	Version   int    `json:"version"`
	Peer      string `json:"peer"` // address and port
	Local     string `json:"local,omitempty"`
	Transport string `json:"transport"` // "roce" or "iwarp"
	Outcome   string `json:"outcome"`   // "answered", "refused" (connected, and the program said no) or "failed"

	// Sent and Received are our private data and the peer's: the octets and their meaning.
	Sent     *RPCPrivate `json:"sent,omitempty"`
	Received *RPCPrivate `json:"received,omitempty"`

	// Offered is the version of RPC-over-RDMA of our first message, Agreed the one
	// that was settled on, and Refused the one that the peer does not speak. 0: none.
	Offered int `json:"offered"`
	Agreed  int `json:"agreed"`
	Refused int `json:"refused,omitempty"`

	// SendInline and RecvInline are the inline thresholds in force, in octets: of messages to the peer, and
	// from it.
	SendInline int  `json:"send_inline"`
	RecvInline int  `json:"recv_inline"`
	RemoteInv  bool `json:"remote_invalidation"` // replies may invalidate a handle of their call
	Asked      int  `json:"credits_asked"`
	Granted    int  `json:"credits_granted"`

	// Program is the RPC program whose procedure 0 was called, Status the outcome of that call.
	Program        uint32 `json:"program"`
	ProgramVersion uint32 `json:"program_version"`
	Status         string `json:"status,omitempty"`
	// SetupMS is the time from the REQ or the TCP SYN to a connection.
	SetupMS float64   `json:"setup_ms"`
	NullMS  []float64 `json:"null_ms"` // round-trip times

	Error string `json:"error,omitempty"`
	// Counters are the faults and refusals by reason, without those that are zero.
	Counters map[string]uint64 `json:"counters,omitempty"`
}

// An RPCPrivate is the private data of one end (RFC 8797).
type RPCPrivate struct {
	Hex string `json:"hex"` // the whole field, but for zeros at its end
	// At is the offset of its RFC 8797 message. Negative means that there is none; then the fields below
	// have the defaults.
	At        int  `json:"at"`
	SendSize  int  `json:"send_size"` // octets
	RecvSize  int  `json:"recv_size"` // octets
	RemoteInv bool `json:"remote_invalidation"`
}
