package cm

// A Drop is a reason why a received MAD or an event changed nothing.
type Drop uint8

// Reasons to drop.
const (
	NotDropped      Drop = iota
	DropMalformed        // not a MAD, or a field with an impossible value
	DropClass            // management class, or its version
	DropMethod           // not Send
	DropAttribute        // no message of the CM
	DropSource           // its GID or UD QP is not that of the connection
	DropREQRate          // REQsPerSecond
	DropReplyRate        // RepliesPerSecond: the answer was not sent
	DropUnknownConn      // no connection with these communication IDs
	DropState            // the connection is in no state to take it
	DropDREQQPN          // a DREQ that names another QPN than ours
	DropMRALimit         // more than maxMRAs for one connection
	DropStaleHandle      // an event of the user for a handle that is dead or in another state
	numDrops
)

var dropNames = [numDrops]string{"", "malformed", "class", "method", "attribute", "source", "req_rate",
	"reply_rate", "unknown_conn", "state", "dreq_qpn", "mra_limit", "stale_handle"}

// String names d as the counters do.
func (d Drop) String() string { return dropNames[min(d, DropStaleHandle)] }
