// Package engine is one RoCEv2 queue pair as a pure machine: requester,
// responder and completer of RC and UC, and UD.
//
// A [QP] is driven by whoever holds it: packets go into Receive, packets to be
// sent come out of Output, completions go to the [Sink]. It reads no clock,
// takes no lock and starts nothing; one lock per QP, held by the caller, is
// enough. After a batch of Receive, PostSend or Wake calls, call Output until it
// returns 0 and send what it gave; acknowledgements come out there too, one for
// the whole batch. Deadline says when Wake is due.
//
// No payload is copied on the way out, and one time on the way in. Nothing is
// allocated per packet.
//
// Sources: IBA volume 1 as far as the wire facts show it (WF 9, 10), which
// follow rdma_rxe. Left out: atomics, end-to-end credits (we send 0x1F), SQD,
// migration. A READ longer than [ReadChunk] packets goes out as several.
package engine

import (
	"cmp"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// Bounds that do not depend on configuration.
const (
	// MaxMessage is the largest RC or UC message in octets.
	MaxMessage = 1 << 30
	// ReadChunk is the number of response packets asked for by one READ request.
	ReadChunk = 64
	// MaxRDAtomic bounds READs outstanding in either direction.
	MaxRDAtomic = 16
	// MaxBackoff is the longest retransmit timeout that backing off leads to,
	// unless the QP's own timeout is longer.
	MaxBackoff = 500 * time.Millisecond
)

// Config says what a QP is made of. It is fixed for the life of the QP.
type Config struct {
	QPN        ib.QPN
	Transport  ib.Transport // RC, UC or UD
	SendDepth  int
	RecvDepth  int // ignored with Shared
	MaxSendSGE int // at most MaxSGE; zero means 1
	MaxRecvSGE int // at most MaxSGE; zero means 1
	// Shared is the shared receive queue, nil for a queue of its own.
	Shared RecvQueue
	Memory Memory // nil: peers can reach no memory
	Sink   Sink

	// Window bounds the unacknowledged packets of an RC requester. Zero means 128.
	Window int
	// AckEvery is how many packets go out at most without asking for an
	// acknowledgement. Zero means 16.
	AckEvery int
	// MaxUDPayload is the largest UD payload in octets. Zero means 4096.
	MaxUDPayload int
}

func (c *Config) window() int       { return cmp.Or(c.Window, 128) }
func (c *Config) ackEvery() int     { return cmp.Or(c.AckEvery, 16) }
func (c *Config) maxUDPayload() int { return cmp.Or(c.MaxUDPayload, 4096) }

// A QP is one queue pair. Nothing in it may be used by two goroutines at once.
type QP struct {
	cfg   Config
	state verbs.QPState
	attr  verbs.QPAttr // merged from all transitions
	count Counters
}

// New returns a QP in RESET.
func New(cfg Config) *QP {
	return &QP{cfg: cfg}
}

// QPN returns the QP's number.
func (q *QP) QPN() ib.QPN { return q.cfg.QPN }

// Transport returns RC, UC or UD.
func (q *QP) Transport() ib.Transport { return q.cfg.Transport }

// State returns the state.
func (q *QP) State() verbs.QPState { return q.state }

// Attr returns the attributes of all transitions so far.
func (q *QP) Attr() verbs.QPAttr { return q.attr }

// Path returns where RC and UC packets go.
func (q *QP) Path() *verbs.AHAttr { return &q.attr.Path }

// Counters returns the counters; the caller reads them under the QP's lock.
func (q *QP) Counters() *Counters { return &q.count }

// Modify moves the QP to attr.State. Going to ERR completes everything
// outstanding with WRFlushError. Going to RESET forgets it without completion.
func (q *QP) Modify(attr *verbs.QPAttr, now time.Time) error { return verbs.ErrNotSupported }

// PostSend posts wrs in order; see [verbs.QP]. Packets come out of Output.
func (q *QP) PostSend(wrs []verbs.SendWR, now time.Time) (int, error) {
	return 0, verbs.ErrNotSupported
}

// PostRecv posts wrs in order to the QP's own receive queue.
func (q *QP) PostRecv(wrs []verbs.RecvWR) (int, error) { return 0, verbs.ErrNotSupported }

// Receive takes one packet, whose ICRC was checked. It keeps neither pkt nor
// from. What it returns is already counted.
func (q *QP) Receive(pkt *roce.Packet, from *Source, now time.Time) DropReason { return DropState }

// Output fills pkts with packets to send now and returns how many. Zero means
// that there is nothing to send until something else happens. Runs of packets of
// one message have equal length but for its first and last.
func (q *QP) Output(pkts []Packet, now time.Time) int { return 0 }

// Deadline says when Wake is due; zero means never.
func (q *QP) Deadline() time.Time { return time.Time{} }

// Wake runs the timers that are due. Early calls do no harm. Call Output after.
func (q *QP) Wake(now time.Time) {}

// Close ends the QP without completing anything. Every later call finds RESET.
func (q *QP) Close() {}
