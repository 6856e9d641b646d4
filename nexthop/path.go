package nexthop

import "ipoibcm/wire/encap"

// A Conn is the handle of one connected queue pair. No handle is used twice. Zero means none.
type Conn uint32

// A PathKind says how a next hop is reached.
type PathKind uint8

// Kinds of paths.
const (
	PathMiss  PathKind = iota // packets are handed up to the machine
	PathConn                  // on connection Conn
	PathUD                    // to Link over the UD QP
	PathGroup                 // to MGID Link.GID over the UD QP
	PathDrop                  // packets are counted and dropped
)

// String prints k in a word.
func (k PathKind) String() string {
	return [...]string{"miss", "conn", "ud", "group", "drop", "?"}[min(k, PathDrop+1)]
}

// A Path is how the data path reaches a next hop. A packet larger than MTU octets (IP, without the encapsulation
// header) is handed up. The zero Path means that the next hop is not known.
type Path struct {
	Kind PathKind
	Conn Conn           // PathConn
	Link encap.LinkAddr // PathUD, PathGroup; PathConn: the peer
	MTU  int
	// UDMTU, for PathConn: packets of at most that many octets may go to Link over the UD QP instead. Zero: none.
	UDMTU int
}
