package neigh

// A Drop is the reason why the Table dropped a packet, a frame, a claim or an own address.
type Drop uint8

// Reasons to drop. The first group concerns packets that wait for a next hop, the
// second frames from the fabric, our own addresses and questions to the driver.
const (
	DropQueuePackets Drop = iota // the neighbour's queue held MaxQueuedPackets
	DropQueueOctets              // ... or MaxQueuedOctets
	DropQueueTotal               // MaxTotalOctets wait for all neighbours
	DropUnresolved               // nobody answered
	DropHeldDown                 // nobody answered a moment ago
	DropTableFull                // MaxNeighbors entries, all in use
	DropNoSource                 // no own address of that family to ask from
	DropNotUnicast               // the next hop is no address that a neighbour can have
	DropOwnAddress               // the next hop is our own address
	DropForgotten                // ForgetLink or Flush while waiting

	DropMalformed    // not decodable, wrong checksum, hop limit not 255, ...
	DropReflected    // our own link-layer address as sender
	DropSpoofed      // link-layer address and packet source differ
	DropBadSender    // sender's IP or link-layer address is not a unicast one
	DropNotForUs     // query for another host
	DropDuplicate    // query for an own address that is duplicate
	DropUnsolicited  // answer for a neighbour we have no entry for
	DropNoLinkAddr   // answer without the link-layer address we asked for
	DropNotOverride  // advertisement that may not change what we know
	DropLocked       // claim for a neighbour that has just moved, or whose move another claim is testing
	DropStillThere   // claim for a neighbour that still answers at its known link-layer address
	DropChallenges   // claim for a neighbour while maxChallenges others are being asked
	DropRateSource   // more than SourceRate requests per second
	DropRateAll      // more than RequestRate requests per second
	DropLearnFull    // no room to remember the host that asked; it was answered
	DropOwnAddrsFull // more than MaxAddrs own addresses
	DropAskFull      // too many queries for addresses that are not on the device
	numDrops
)

var dropNames = [numDrops]string{
	DropQueuePackets: "queue_packets",
	DropQueueOctets:  "queue_octets",
	DropQueueTotal:   "queue_total",
	DropUnresolved:   "unresolved",
	DropHeldDown:     "held_down",
	DropTableFull:    "table_full",
	DropNoSource:     "no_source",
	DropNotUnicast:   "not_unicast",
	DropOwnAddress:   "own_address",
	DropForgotten:    "forgotten",
	DropMalformed:    "malformed",
	DropReflected:    "reflected",
	DropSpoofed:      "spoofed",
	DropBadSender:    "bad_sender",
	DropNotForUs:     "not_for_us",
	DropDuplicate:    "duplicate",
	DropUnsolicited:  "unsolicited",
	DropNoLinkAddr:   "no_link_addr",
	DropNotOverride:  "not_override",
	DropLocked:       "locked",
	DropStillThere:   "still_there",
	DropChallenges:   "challenges",
	DropRateSource:   "rate_source",
	DropRateAll:      "rate_all",
	DropLearnFull:    "learn_full",
	DropOwnAddrsFull: "own_addrs_full",
	DropAskFull:      "ask_full",
}

// String prints the reason as metrics and tables name it.
func (d Drop) String() string {
	if d < numDrops {
		return dropNames[d]
	}
	return "unknown"
}

// Counters count since the Table was made.
type Counters struct {
	Queries      uint64 `name:"queries"`       // ARP requests and NS for resolution, to the broadcast-GID or by a hint
	Hinted       uint64 `name:"hinted"`        // queries and probes that went where a hint says
	Probes       uint64 `name:"probes"`        // ARP requests and NS that ask known neighbours whether they are there
	DADProbes    uint64 `name:"dad_probes"`    // ARP requests and NS that look for duplicates
	Announces    uint64 `name:"announces"`     // gratuitous ARP and unsolicited NA sent
	Answers      uint64 `name:"answers"`       // ARP replies and NA sent in answer to queries
	OtherAnswers uint64 `name:"other_answers"` // of these, for addresses that are not on the device
	RecvQueries  uint64 `name:"recv_queries"`  // ARP requests and NS received, good or bad
	RecvAnswers  uint64 `name:"recv_answers"`  // ARP replies and NA received, good or bad
	Resolved     uint64 `name:"resolved"`      // neighbours that became known
	Changed      uint64 `name:"changed"`       // changes of a neighbour's link-layer address
	Challenges   uint64 `name:"challenges"`    // claims that a neighbour moved, after which its old place was asked
	Failed       uint64 `name:"failed"`        // resolutions without an answer
	Expired      uint64 `name:"expired"`       // neighbours that are no longer known
	Evicted      uint64 `name:"evicted"`       // entries, known or not, that made room
	Conflicts    uint64 `name:"conflicts"`     // claims of our verified addresses by others
	Duplicates   uint64 `name:"duplicates"`    // own addresses found to be duplicate
	Drops        drops  `name:"drop_"`
}

// drops are counters by Drop.
type drops [numDrops]uint64

// Name returns the name of counter d.
func (*drops) Name(d int) string { return Drop(d).String() }
