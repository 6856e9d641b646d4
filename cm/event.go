package cm

import (
	"cmp"
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
)

// A Handle names one connection of a [Manager]. The user chooses the handle of each
// Connect, from 1 up and never the same twice. The Manager chooses the handles
// of incoming REQs, which have the top bit set. Zero names no connection.
type Handle uint64

// incoming is the bit that is set in handles that the Manager chose.
const incoming Handle = 1 << 63

// Incoming reports whether h belongs to a REQ that a peer sent.
func (h Handle) Incoming() bool { return h&incoming != 0 }

// An Event is something that happened: one of the types of this file.
type Event interface{ step(*Manager) }

// RecvMAD says that a MAD arrived at QP 1. The Manager does not keep MAD.
type RecvMAD struct{ MAD *verbs.MAD }

// RecvInband says that a MAD arrived in-band: not at QP 1 but on the UD QP of the
// interface, from the UD QP MAD.QPN of MAD.Remote. Answers go back to that QP. Otherwise
// RecvInband is like RecvMAD. The Manager does not keep MAD.
type RecvInband struct{ MAD *verbs.MAD }

// Wake says that the deadline has passed. An early Wake is harmless.
type Wake struct{}

// Listen makes the Manager report REQs for ServiceID at GID with [RequestReceived]. It answers
// REQs that no Listen covers with REJ 8. A second Listen for the same two replaces PrivateData.
type Listen struct {
	ServiceID serviceid.ID
	GID       ib.GID // zero means Options.GID
	// PrivateData goes into the REJs and MRAs with which the Manager by itself answers REQs
	// to this GID (RFC 4755 section 3.2). A REJ that belongs to no listener (reasons 8,
	// 12, 30 and 31) carries it too, but carries none if the listeners of the GID differ
	// in it.
	PrivateData []byte
}

// Unlisten ends a Listen. Connections made through it live on.
type Unlisten struct {
	ServiceID serviceid.ID
	GID       ib.GID // zero means Options.GID
}

// Connect opens a connection: it sends a REQ until the peer answers or MaxRetries are used up.
// A handle that is zero, in use already, or has the top bit set is a bug and panics.
type Connect struct {
	Handle      Handle
	Local       ib.GID // primary local port GID; zero means Options.GID
	Remote      ib.GID
	Inband      ib.QPN // the peer's UD QP, for CM messages in-band; zero means QP 1
	ServiceID   serviceid.ID
	Transport   ib.Transport // RC or UC
	QPN         ib.QPN       // our QP, in INIT with receives posted
	StartingPSN ib.PSN       // first PSN that we *receive*; the peer sends with it
	PathMTU     ib.MTU
	PKey        ib.PKey // zero means ib.DefaultPKey
	SRQ         bool

	// AckTimeout is the local ACK timeout: 2 x packet life time. Zero means 14 (67 ms).
	AckTimeout ib.Timeout
	RetryCount uint8 // 0 to 7, for both QPs
	RNRRetry   uint8 // 0 to 7, for the peer's QP
	// RDMA reads and atomics: what the peer may have outstanding at us, and we at it.
	ResponderResources, InitiatorDepth uint8

	// ResponseTimeout goes into both CM response timeouts. Zero means 17 (0.54 s).
	ResponseTimeout ib.Timeout
	// MaxRetries is how often we send the REQ again, 1 to 15. The REQ asks the peer to use the
	// same number. Zero means Options.MaxRetries.
	MaxRetries uint8

	FlowLabel    uint32 // 20 bits
	TrafficClass uint8
	HopLimit     uint8 // zero means 64
	SL           uint8
	PacketRate   uint8 // 6-bit rate code; zero means 3 (10 Gbit/s)

	// Path is the path to Remote on InfiniBand. If it has a DLID it replaces the five fields
	// above, and the CM messages take it too.
	Path verbs.Path

	// PrivateData is at most 92 octets and goes into the REQ, and into the MRA
	// and REJ that the Manager sends by itself on this connection.
	PrivateData []byte
}

// Ready follows [ReplyReceived] when the QP is in RTS: it sends the RTU.
type Ready struct {
	Handle      Handle
	PrivateData []byte // at most 224 octets
}

// Accept answers a REQ with a REP. The QP must be in RTS already, because the
// peer may send as soon as it has the REP.
type Accept struct {
	Handle      Handle
	QPN         ib.QPN
	StartingPSN ib.PSN // first PSN that we *receive*
	SRQ         bool
	RNRRetry    uint8      // for the peer's QP; 7 is for ever (IBA volume 1 section 9.7.5.2)
	AckDelay    ib.Timeout // target ACK delay; lets the peer lengthen its ACK timeout
	// As in Connect. The Manager does not lower them to what the REQ offered.
	ResponderResources, InitiatorDepth uint8
	PrivateData                        []byte // at most 196 octets
}

// Reject answers a REQ or a REP with a REJ. Repeats of that message get the same REJ again. After
// ReplyReceived the handle ends with Failed; after RequestReceived no Failed follows.
type Reject struct {
	Handle      Handle
	Reason      Reason
	ARI         []byte // additional reject information, at most 72 octets
	PrivateData []byte // at most 148 octets
}

// Defer answers a REQ or a REP with an MRA: the user needs up to Timeout more to answer. The
// Manager waits for the user that long, but at most 60 s and at least UserTimeout.
type Defer struct {
	Handle      Handle
	Timeout     ib.Timeout
	PrivateData []byte // at most 222 octets
}

// Cancel abandons an outstanding REQ at once and sends nothing. For some seconds, at most 10, a REP
// that still arrives gets REJ 28. In other states Cancel does the same as Disconnect.
type Cancel struct{ Handle Handle }

// Disconnect ends a connection in any state: with a DREQ if it is up, else with a REJ. The handle
// ends with Disconnected if the connection was up, else with Failed.
type Disconnect struct {
	Handle Handle
	// PrivateData goes into the DREQ (at most 220 octets; docs/ambiguities.md leaves it
	// zero there) or into the REJ (148). For the REJ nil means that of Connect or Listen.
	PrivateData []byte
}

// DataOnQP says that a packet arrived on a local QP. The packet stands for an RTU that
// was lost (communication established).
type DataOnQP struct{ QPN ib.QPN }

// SetMaxConns changes Options.MaxConns; zero means 4096. Connections above a lower bound stay.
type SetMaxConns struct{ MaxConns int }

func (ev RecvMAD) step(m *Manager)     { m.recv(ev.MAD, ib.QPNGSI) }
func (ev RecvInband) step(m *Manager)  { m.recv(ev.MAD, ev.MAD.QPN) }
func (Wake) step(m *Manager)           { m.wake() }
func (ev SetMaxConns) step(m *Manager) { m.opt.MaxConns = cmp.Or(ev.MaxConns, 4096) }
func (ev Listen) step(m *Manager)      { m.listen(ev) }
func (ev Unlisten) step(m *Manager)    { m.unlisten(ev) }
func (ev Connect) step(m *Manager)     { m.connect(ev) }
func (ev Ready) step(m *Manager)       { m.ready(ev) }
func (ev Accept) step(m *Manager)      { m.accept(ev) }
func (ev Reject) step(m *Manager)      { m.reject(ev) }
func (ev Defer) step(m *Manager)       { m.postpone(ev) }
func (ev Cancel) step(m *Manager)      { m.cancel(ev) }
func (ev Disconnect) step(m *Manager)  { m.disconnect(ev) }
func (ev DataOnQP) step(m *Manager)    { m.data(ev) }

// Options configures a Manager. GID, CAGUID and Rand are needed. For all other fields zero
// means a default.
type Options struct {
	GID    ib.GID  // the port's default GID
	CAGUID ib.GUID // peers find duplicates and stale connections by it
	// Rand gives communication IDs and transaction IDs. It must be
	// unpredictable where peers are not trusted.
	Rand interface{ Uint64() uint64 }

	// MaxRetries is how often an unanswered message is sent again. Zero means 7,
	// negative means never, at most 15.
	MaxRetries int
	// UserTimeout bounds how long the user may leave a REQ or REP unanswered.
	// Zero means 10 s.
	UserTimeout time.Duration
	// MinTimewait is the least time for which TIMEWAIT and REJECTED hold a QPN and
	// communication ID back. Zero means 1 s.
	MinTimewait time.Duration

	// MaxConns bounds the connections, timewait included. Zero means 4096. At the bound the
	// rejected REQ whose REJ has been kept longest makes room. Without such a REQ a new REQ gets
	// REJ 1, and a Connect ends with Failed.
	MaxConns int
	// MaxHalfOpen bounds the incoming connections that are not yet established. Zero
	// means 256. At the bound a new REQ replaces the oldest one if that is at least a second
	// old; otherwise the new REQ gets REJ 3.
	MaxHalfOpen int
	// REQsPerSecond is how many REQs one source GID may send; twice that in a
	// burst. Zero means 64, negative means no limit.
	REQsPerSecond int
	// RepliesPerSecond is how many REJs, DREPs and other answers without a
	// connection one source GID may cause. Zero means 64, negative means no limit.
	RepliesPerSecond int
}
