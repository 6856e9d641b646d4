// Package engine is one RoCEv2 queue pair as a pure machine: requester,
// responder and completer of RC and UC, and UD.
//
// A [QP] does nothing by itself. The caller hands received packets to Receive,
// takes the packets to send from Output, and gets completions through the [Sink].
// A QP reads no clock, takes no lock and starts no goroutine; the caller holds one
// lock per QP. After a batch of Receive, PostSend or Wake calls, call Output until
// it returns 0, and send the packets that it returns. Among them is one ACK for the
// whole batch, unless the ACK waits ([Config.AckWithin]). Deadline returns when Wake
// is due.
//
// A payload is not copied on the way out. On the way in it is copied once, or twice
// if its packet arrives early. Nothing is allocated per packet.
//
// Sources: IBA volume 1 chapter 9, as Linux's rdma_rxe does it. Left out: atomics,
// end-to-end credits (we send 0x1F), SQD, migration. A READ longer than [ReadChunk]
// packets goes out as several.
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
	// unless the QP's own timeout is longer. With a timeout of 67 ms and seven
	// retries a dead peer is known within a second, the first retransmission
	// timeout of TCP (RFC 4755 section 7.1).
	MaxBackoff = 128 * time.Millisecond
	// MinProbe is the shortest time without an ACK after which a packet is sent
	// again as a probe.
	MinProbe = 2 * time.Millisecond
	// probeAnswer bounds how late an ACK can answer a probe: twice the least round
	// trip plus probeAnswer after it.
	probeAnswer = time.Millisecond
	// windowTrip is the longest round trip for which Window is enough. A Window of 256
	// packets of 4096 octets makes 8 Gb/s then.
	windowTrip = time.Millisecond
	// minFlight is how many packets may be in flight however many are lost. lossMemory is
	// how many windows without a loss make up for all losses before.
	minFlight, lossMemory = 16, 8
	// seldomLost is how many packets must have been acknowledged since the last NAK for a
	// lost packet before an ACK that comes after a probe, and covers packets that were not
	// sent again, can show that the probe was in vain (see [QP.overtaken]).
	seldomLost = 64
	// rnrFlight is how many packets are sent at most when the wait after an RNR NAK ends.
	rnrFlight = 4
	// minFlightOctets takes the place of minFlight, if it is less, with a peer that keeps
	// the packets behind a lost one: about as many octets as fill a short queue.
	minFlightOctets = 32 << 10
)

// Config has the properties of a QP that do not change.
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
	// Buffers are for RC packets that arrive early. Nil: each is allocated.
	Buffers Buffers
	Sink    Sink

	// Window bounds the unacknowledged packets of an RC requester. Zero means 128.
	// With a small path MTU the bound is as many packets as make WindowOctets, if that
	// is more. Where the least round trip is n times windowTrip the bound is n times as
	// high, up to MaxWindowOctets.
	Window, WindowOctets, MaxWindowOctets int
	// AckEvery is how many packets go out at most without asking for an
	// acknowledgement. Zero means 16.
	AckEvery int
	// AckWithin is how many RC request packets have to arrive for an ACK to leave at
	// once. With fewer it waits for a message with which it can leave in one call, or
	// for [QP.UrgeAck]. Zero means that it does not wait.
	AckWithin int
	// ECN says which packets leave ECN-capable.
	ECN ECNMode
	// Ahead has the ACKs of an RC QP say that its peer may group packets, see [Group].
	Ahead bool
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
	mtu   int          // path MTU in octets, RC and UC
	count Counters

	sq  sendQueue
	req requester
	rsp responder
}

// New returns a QP in RESET.
func New(cfg Config) *QP {
	cfg.MaxSendSGE = min(max(1, cfg.MaxSendSGE), MaxSGE)
	q := &QP{cfg: cfg, sq: sendQueue{depth: max(1, cfg.SendDepth), maxSGE: cfg.MaxSendSGE, ud: cfg.Transport == ib.UD}}
	q.rsp.queue = cfg.Shared
	return q
}

// QPN returns the QP's number.
func (q *QP) QPN() ib.QPN { return q.cfg.QPN }

// Transport returns RC, UC or UD.
func (q *QP) Transport() ib.Transport { return q.cfg.Transport }

// State returns the state.
func (q *QP) State() verbs.QPState { return q.state }

// Attr returns the attributes of all transitions so far.
func (q *QP) Attr() verbs.QPAttr { return q.attr }

// Path returns the path of RC and UC packets.
func (q *QP) Path() *verbs.AHAttr { return &q.attr.Path }

// Counters returns the counters; the caller reads them under the QP's lock.
func (q *QP) Counters() *Counters { return &q.count }

// Modify moves the QP to attr.State. Any state may go to RESET or ERR. Otherwise the
// order is RESET, INIT, RTR, RTS; any other step returns ErrState. On the way to ERR
// all outstanding work requests complete: UC and UD requests whose packets have all
// left with Success, all others with WRFlushError. RESET drops them without completion.
func (q *QP) Modify(attr *verbs.QPAttr, now time.Time) error {
	switch attr.State {
	case verbs.StateReset:
		q.Close()
		return nil
	case verbs.StateError:
		if q.state != verbs.StateError {
			q.enterError()
		}
		return nil
	case verbs.StateInit, verbs.StateRTR, verbs.StateRTS:
		if q.state != attr.State-1 {
			return verbs.ErrState
		}
	default:
		return verbs.ErrInvalid
	}
	switch attr.State {
	case verbs.StateInit:
		q.attr.PKey, q.attr.QKey, q.attr.Access = attr.PKey, attr.QKey, attr.Access
	case verbs.StateRTR:
		if q.cfg.Transport != ib.UD {
			if attr.PathMTU.Octets() == 0 || !attr.DestQPN.Valid() || attr.MaxDestRDAtomic > MaxRDAtomic {
				return verbs.ErrInvalid
			}
			q.attr.Path, q.attr.PathMTU, q.attr.DestQPN = attr.Path, attr.PathMTU, attr.DestQPN
			q.attr.RQPSN = attr.RQPSN & ib.PSNMask
			q.attr.MaxDestRDAtomic, q.attr.MinRNRTimer = attr.MaxDestRDAtomic, attr.MinRNRTimer
			q.mtu = attr.PathMTU.Octets()
			q.rsp.epsn = q.attr.RQPSN
		}
	case verbs.StateRTS:
		if attr.MaxRDAtomic > MaxRDAtomic {
			return verbs.ErrInvalid
		}
		q.attr.SQPSN = attr.SQPSN & ib.PSNMask
		q.attr.Timeout, q.attr.RetryCount = attr.Timeout&31, min(attr.RetryCount, 7)
		q.attr.RNRRetry, q.attr.MaxRDAtomic = min(attr.RNRRetry, 7), attr.MaxRDAtomic
		q.attr.MaxRNRWait = attr.MaxRNRWait
		q.req.start(q)
	}
	q.state, q.attr.State = attr.State, attr.State
	return nil
}

// PostSend posts wrs in order; see [verbs.QP]. Packets come out of Output.
func (q *QP) PostSend(wrs []verbs.SendWR, now time.Time) (int, error) {
	if q.state != verbs.StateRTS && q.state != verbs.StateError {
		return 0, verbs.ErrState
	}
	for i := range wrs {
		wr := &wrs[i]
		n, err := q.checkSend(wr)
		if err != nil {
			return i, err
		}
		if q.state == verbs.StateError {
			q.sendDone(wr.ID, wr.Opcode, 0, verbs.WRFlushError)
			continue
		}
		if q.sq.len() >= q.sq.depth {
			return i, verbs.ErrQueueFull
		}
		q.req.postWR(q, wr, n)
	}
	return len(wrs), nil
}

// checkSend returns the length of the message in octets, or ErrInvalid if q cannot
// send wr.
func (q *QP) checkSend(wr *verbs.SendWR) (int, error) {
	if len(wr.SG) > q.cfg.MaxSendSGE {
		return 0, verbs.ErrInvalid
	}
	n := 0
	for k := range wr.SG {
		n += len(wr.SG[k].Buf)
	}
	ok := n <= MaxMessage
	switch q.cfg.Transport {
	case ib.RC:
		ok = ok && wr.Opcode <= verbs.Read && (wr.Opcode != verbs.Read || q.attr.MaxRDAtomic > 0 || q.state == verbs.StateError)
	case ib.UC:
		ok = ok && wr.Opcode < verbs.Read && wr.Opcode != verbs.SendInv
	default:
		ok = n <= q.cfg.maxUDPayload() && wr.Opcode <= verbs.SendImm && wr.AH != nil && wr.RemoteQPN.Valid()
	}
	if !ok {
		return 0, verbs.ErrInvalid
	}
	return n, nil
}

// PostRecv posts wrs in order to the QP's own receive queue.
func (q *QP) PostRecv(wrs []verbs.RecvWR) (int, error) {
	if q.cfg.Shared != nil {
		return 0, verbs.ErrInvalid
	}
	if q.state == verbs.StateReset {
		return 0, verbs.ErrState
	}
	if q.rsp.ring == nil {
		q.rsp.ring = NewRecvRing(q.cfg.RecvDepth, q.cfg.MaxRecvSGE)
		q.rsp.queue = q.rsp.ring
	}
	for i := range wrs {
		if q.state == verbs.StateError {
			q.recvDone(verbs.WC{ID: wrs[i].ID, Status: verbs.WRFlushError, Opcode: verbs.Recv})
			continue
		}
		if err := q.rsp.ring.Post(&wrs[i]); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

// Receive takes one packet, whose ICRC the caller has checked. It keeps neither pkt
// nor from. It counts the packet by the reason that it returns. For a duplicate it
// returns NoDrop.
func (q *QP) Receive(pkt *roce.Packet, from *Source, now time.Time) DropReason {
	r := q.receive(pkt, from, now)
	if r == NoDrop {
		q.count.PacketsIn++
		q.count.OctetsIn += uint64(len(pkt.Payload))
	} else if r != duplicate {
		q.count.Drops[r]++
	} else {
		q.count.Duplicates++
		r = NoDrop
	}
	return r
}

// duplicate is what receive and the functions that it calls return for a packet that
// was taken before.
const duplicate = NumDropReasons

func (q *QP) receive(pkt *roce.Packet, from *Source, now time.Time) DropReason {
	switch {
	case q.state != verbs.StateRTR && q.state != verbs.StateRTS:
		return DropState
	case !pkt.BTH.PKey().Match(q.attr.PKey):
		return DropPKey
	}
	if pkt.Op == roce.CNP {
		return q.receiveCNP(from, now)
	}
	if t, ok := pkt.Op.Transport(); !ok || t != q.cfg.Transport {
		return DropOpcode
	}
	if q.cfg.Transport == ib.UD {
		return q.receiveUD(pkt, from)
	}
	// A packet's addresses must be the connection's (IBA volume 1 section 9.6).
	if from.Src != q.attr.Path.DGID || (from.Dst != q.attr.Path.SGID && !q.attr.Path.SGID.IsZero()) {
		return DropSource
	}
	// Only the peer knows the PSN that the requests to an RC queue pair begin with.
	if !q.rsp.commEst && (q.cfg.Transport == ib.UC || !pkt.Op.IsResponse() && pkt.BTH.PSN() == q.rsp.epsn) {
		q.rsp.commEst = true
		q.cfg.Sink.Event(verbs.Event{Kind: verbs.CommEst, QPN: q.cfg.QPN})
	}
	switch {
	case q.cfg.Transport == ib.UC:
		return q.receiveUC(pkt, from.ECN, now)
	case !pkt.Op.IsResponse():
		return q.receiveRequest(pkt, from.ECN, now)
	case q.state != verbs.StateRTS:
		return DropStale
	case pkt.Op.IsAck():
		return q.receiveAck(pkt, now)
	case pkt.Op.IsReadResponse():
		return q.receiveReadResponse(pkt, now)
	}
	return DropOpcode // atomics
}

// Output fills pkts with packets to send now and returns how many. Zero means that
// there is nothing to send before the next call of another method. All packets of a
// message but the first and the last have the same length.
func (q *QP) Output(pkts []Packet, now time.Time) int {
	if q.cfg.Transport != ib.RC {
		return q.outputUnreliable(pkts)
	}
	n := 0
	if len(pkts) > 0 && q.nextCNP(&pkts[0]) {
		n = 1
	}
	for n < len(pkts) && q.nextResponse(&pkts[n]) {
		n++
	}
	first := n
	for q.state == verbs.StateRTS && n < len(pkts) && q.nextRequest(&pkts[n], now) {
		n++
	}
	if n > first && q.req.ackDeadline.IsZero() {
		q.armTimer(now)
	}
	if n < len(pkts) && q.nextAck(&pkts[n], pkts[first:n]) {
		n++
	}
	return n
}

// Deadline returns when Wake is due; zero means never.
func (q *QP) Deadline() time.Time {
	d := q.req.ackDeadline
	if q.req.challenge.on {
		d = q.req.challenge.deadline
	} else if !q.req.rnrDeadline.IsZero() {
		d = q.req.rnrDeadline // no ACK is awaited meanwhile
	}
	for _, at := range [...]time.Time{q.rsp.early.nakAt, q.req.missing.arrives} {
		if !at.IsZero() && (d.IsZero() || at.Before(d)) {
			d = at
		}
	}
	return d
}

// window returns how many packets may be unacknowledged: more than what is configured only on a long path, and
// then no more than a receiver like this one keeps behind a lost packet.
func (q *QP) window() int {
	w := max(q.cfg.window(), q.cfg.WindowOctets/max(q.mtu, 1))
	if least := q.req.rtt.least(); least > windowTrip {
		w = max(w, min(int(int64(w)*int64(least)/int64(windowTrip)), q.cfg.MaxWindowOctets/max(q.mtu, 1), earlyPackets))
	}
	return w
}

// Close ends the QP without completing anything. It is then in RESET. A shared receive queue has back the work
// request of a message that is not complete.
func (q *QP) Close() {
	q.sq.reset()
	q.dropEarly()
	if q.rsp.have && q.cfg.Shared != nil {
		q.cfg.Shared.Return(&q.rsp.wqe)
	}
	q.req = requester{}
	q.rsp = responder{queue: q.cfg.Shared}
	q.state, q.attr, q.mtu = verbs.StateReset, verbs.QPAttr{}, 0
}

// fail moves the QP to ERR after an error, and reports QPFatal with status to the Sink.
func (q *QP) fail(status verbs.Status) {
	q.enterError()
	q.cfg.Sink.Event(verbs.Event{Kind: verbs.QPFatal, QPN: q.cfg.QPN, Status: status})
}

// enterError moves the QP to ERR and completes all outstanding work requests: first
// sends, then receives, each oldest first. A NAK that tells the peer why is still sent.
func (q *QP) enterError() {
	q.state, q.attr.State = verbs.StateError, verbs.StateError
	if q.cfg.Transport != ib.RC {
		q.completeSent()
	}
	for q.sq.len() > 0 {
		q.complete(verbs.WRFlushError)
	}
	q.req.ackDeadline, q.req.rnrDeadline, q.req.challenge = time.Time{}, time.Time{}, challenge{}

	r := &q.rsp
	r.ackPending, r.reads = false, nil
	q.dropEarly()
	for r.have || r.ring != nil && r.ring.Pop(&r.wqe) {
		r.have = false
		q.recvDone(verbs.WC{ID: r.wqe.ID, Status: verbs.WRFlushError, Opcode: verbs.Recv})
	}
	q.sq.reset()
}

func (q *QP) sendDone(id uint64, op verbs.Opcode, n int, status verbs.Status) {
	q.cfg.Sink.SendDone(verbs.WC{ID: id, Status: status, Opcode: op, QPN: q.cfg.QPN, ByteLen: n})
}

func (q *QP) recvDone(wc verbs.WC) {
	wc.QPN = q.cfg.QPN
	q.cfg.Sink.RecvDone(wc)
}
