package cm

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// An Action is something that the driver must do or report: one of the types of this file.
type Action interface{ isAction() }

// SendMAD asks the driver to send a MAD once: to QP 1 if MAD.QPN is ib.QPNGSI, else in-band
// to the UD QP MAD.QPN. The driver may keep MAD.
type SendMAD struct{ MAD *verbs.MAD }

// Params are the parameters of a connection that the two sides have sent each other, seen from
// our side: everything that QP transitions need.
type Params struct {
	Local, Remote ib.GID
	// CMQPN is the QP of the peer to which we send CM messages: QP 1, or its UD QP if they
	// travel in-band. It is the QP that the peer's last message came from, if we did not drop it.
	CMQPN     ib.QPN
	ServiceID serviceid.ID
	Transport ib.Transport
	PKey      ib.PKey
	PathMTU   ib.MTU

	LocalQPN  ib.QPN // 0 until Accept
	RemoteQPN ib.QPN // 0 until the REP
	RecvPSN   ib.PSN // RQ PSN: ours
	SendPSN   ib.PSN // SQ PSN: the peer's starting PSN (IBA volume 1 section 12.7, Starting PSN)

	AckTimeout ib.Timeout // for our QP; if the REQ was ours, lengthened by the peer's target ACK delay
	RetryCount uint8      // for our QP
	RNRRetry   uint8      // for our QP
	// RDMA reads and atomics that the peer may have outstanding at us, and we at it.
	ResponderResources, InitiatorDepth uint8
	RemoteSRQ                          bool

	FlowLabel    uint32
	TrafficClass uint8
	HopLimit     uint8
	SL           uint8
	// Path is the path to the peer on InfiniBand: that of Connect, or the one that the peer's
	// REQ describes. Zero on Ethernet.
	Path verbs.Path

	LocalCommID, RemoteCommID mad.CommID
	RemoteCAGUID              ib.GUID

	// PrivateData is that of the peer's REQ (92 octets) or REP (196). A [ConnInfo] of an
	// established connection has none.
	PrivateData []byte
}

// RequestReceived says that a peer asks for a connection to a service ID we
// listen on. The user answers with Accept, Reject or Defer.
type RequestReceived struct {
	Handle Handle
	Params
}

// ReplyReceived says that the peer accepted our REQ. The user moves its QP to
// RTS and sends Ready, or Reject.
type ReplyReceived struct {
	Handle Handle
	Params
}

// Established says that the connection is up: we have sent the RTU, or the peer's RTU or data came.
type Established struct {
	Handle Handle
	Params
	Active bool // the REQ was ours
	ByData bool // a packet stood for the RTU
	// RTUPrivateData is the private data of the RTU (224 octets); nil if Active or ByData.
	RTUPrivateData []byte
}

// LateRTU says that the RTU of a connection that data had established came after all.
type LateRTU struct {
	Handle      Handle
	PrivateData []byte
}

// A Cause says why a connection failed.
type Cause uint8

// Causes of failure.
const (
	Rejected  Cause = iota // the peer sent a REJ: see Reason, ARI, PrivateData
	Refused                // the user's Reject, or the Manager by itself: see Reason
	TimedOut               // peer or user (UserTimeout) did not answer, or a half-open connection made room
	Cancelled              // the user's Cancel, or its Disconnect before the connection was up
	NoRoom                 // MaxConns are reached; nothing was sent
)

// String names c.
func (c Cause) String() string {
	return [...]string{"rejected", "refused", "timed out", "cancelled", "no room"}[min(c, NoRoom)]
}

// Failed says that a connection will not come up.
type Failed struct {
	Handle      Handle
	Cause       Cause
	Reason      Reason // of Rejected and Refused
	ARI         []byte // Rejected: as long as the peer said
	PrivateData []byte // Rejected: the peer's, 148 octets
}

// A Side says who ended a connection.
type Side uint8

// Who ended a connection.
const (
	ByUser  Side = iota // the user's Disconnect, whether or not the peer answered
	ByPeer              // the peer's DREQ or REJ
	ByStale             // the peer has lost the connection
)

// String names s.
func (s Side) String() string { return [...]string{"user", "peer", "stale"}[min(s, ByStale)] }

// Disconnected says that a connection has ended that was up, or that the peer ended with a
// DREQ or DREP before. The user stops posting to its QP.
type Disconnected struct {
	Handle Handle
	By     Side
	Reason Reason // the peer's, if it sent a REJ; else 0
}

// Released says that connection Handle does not hold QPN any more: timewait is over, or was not
// needed. It is the last action about Handle.
type Released struct {
	Handle Handle
	QPN    ib.QPN
}

// A Dir is the direction of the message that a Note is about.
type Dir uint8

// Directions.
const (
	Decided Dir = iota // nothing was sent or received
	Sent
	Received
)

// String prints "-", "tx" or "rx".
func (d Dir) String() string { return [...]string{"-", "tx", "rx"}[min(d, Received)] }

// A Note tells people about one message or decision. Fields that do not apply are zero.
type Note struct {
	Dir       Dir
	Message   string // "REQ"; "" if Decided
	Handle    Handle
	Remote    ib.GID
	ServiceID serviceid.ID
	// LocalCommID is ours and RemoteCommID the peer's, in both directions.
	LocalCommID, RemoteCommID mad.CommID
	QPN                       ib.QPN // that the message names; if Decided, our QPN
	Reason                    Reason // of a REJ
	Repeat                    bool   // sent again, or received again
	Inband                    bool   // not by QP 1
	Drop                      Drop   // why the message or event was dropped; 0 if it was not
	State                     State  // of the connection when the Note was written
	Text                      string
}

func (SendMAD) isAction()         {}
func (RequestReceived) isAction() {}
func (ReplyReceived) isAction()   {}
func (Established) isAction()     {}
func (LateRTU) isAction()         {}
func (Failed) isAction()          {}
func (Disconnected) isAction()    {}
func (Released) isAction()        {}
func (Note) isAction()            {}

// A ConnInfo is one connection as it is now.
type ConnInfo struct {
	Handle Handle
	State  State
	Active bool
	Since  time.Time // when State was entered
	Params
}
