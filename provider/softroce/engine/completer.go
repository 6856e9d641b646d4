package engine

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// receiveAck takes an ACK or a NAK of any kind (IBA volume 1 section 9.7; rxe_comp.c).
func (q *QP) receiveAck(pkt *roce.Packet, now time.Time) DropReason {
	r := &q.req
	psn, s := pkt.BTH.PSN(), pkt.AETH().Syndrome()
	if psn.Before(r.una) || !psn.Before(r.highest) {
		return DropStale // old, or never sent
	}
	if !s.IsACK() && !s.IsRNR() && s != roce.NAKSequence && !isFatal(s) {
		return DropOpcode // reserved, or for reliable datagrams
	}
	if !q.counted(pkt.AETH().MSN()) {
		return DropMSN
	}
	if isFatal(s) {
		return q.receiveFatal(psn, s, now)
	}
	// The PSN that the peer expects only grows: a NAK for less was overtaken.
	if s.IsACK() {
		psn = psn.Add(1)
	} else if psn.Before(r.expected) {
		return DropStale
	}
	if r.expected.Before(psn) {
		r.expected = psn
	}
	q.answered(r.una)
	if !s.IsACK() {
		r.rtt.bound() // what a NAK acknowledges waited for a repair
	}
	switch {
	case s.IsACK():
		q.count.ACKsIn++
		una, flight := r.una, r.highest.Sub(r.una)
		q.ackTo(psn, now)
		q.learnMSN(pkt.AETH().MSN())
		q.ackMissing()
		q.ackSays(pkt.BTH.Reserved(), r.una.Sub(una), flight)
	case s.IsRNR():
		q.count.RNRIn++
		if !r.rnrDeadline.IsZero() {
			return NoDrop // the same RNR NAK again
		}
		q.ackTo(psn, now)
		if q.attr.RNRRetry != 7 {
			if r.rnrLeft == 0 {
				q.failAt(psn, verbs.RNRExceeded)
				return NoDrop
			}
			r.rnrLeft--
		}
		r.retryLeft, r.backoff = q.attr.RetryCount, 0 // the peer is alive
		wait := s.RNRTimer().Duration()
		if most := q.attr.MaxRNRWait; most > 0 {
			wait = min(wait, most)
		}
		r.ackDeadline, r.rnrDeadline = time.Time{}, now.Add(wait)
		r.missing.forget()
		r.limit = min(r.limit, rnrFlight) // each ACK doubles it: no burst into the same full queue
		q.goBack()
	default: // a sequence NAK
		q.count.NAKsIn++
		q.ackTo(psn, now)
		if !r.rnrDeadline.IsZero() {
			return NoDrop // psn is sent again soon anyway
		}
		q.nakSequence(psn, int(pkt.BTH.Reserved()), now)
	}
	return NoDrop
}

// nakSequence handles a sequence NAK: the peer expects psn. gap is how many packets the NAK
// asks for, if the peer keeps the packets behind them; zero asks for all from psn on. If una
// is before psn, responses to a READ were lost, which is requested again too, see [QP.gap].
// A NAK costs a retry if psn is una, or is that of the last NAK since una moved. So a peer
// that gets further while the READ holds una back costs none.
func (q *QP) nakSequence(psn ib.PSN, gap int, now time.Time) {
	r := &q.req
	if psn == r.una || r.nakSeen && psn == r.nakAt {
		if r.retryLeft == 0 {
			q.failAt(r.una, verbs.RetryExceeded)
			return
		}
		r.retryLeft--
	}
	congested := r.missing.congested
	r.missing = missing{keeps: gap > 0}
	r.ours = r.ours || gap > 0
	if !r.nakSeen || psn != r.nakAt {
		congested = q.lost(psn, gap)
	}
	r.nakSeen, r.nakAt, r.sinceNAK = true, psn, 0
	if gap > 0 && psn == r.una && psn.Add(gap).Before(r.highest) {
		if r.next.Before(r.highest) {
			q.seek(r.highest) // the peer has more than we thought
		}
		r.rtt.boundFrom(psn)
		r.missing = missing{next: psn, end: psn.Add(gap), behind: r.highest, asked: true, keeps: true, congested: congested}
		q.arriving(now)
		r.limit = q.flight()
		return
	}
	if psn.Before(r.next) {
		q.seek(psn)
	}
}

// ackMissing is called after an ACK. If the ACK is for the packets that were sent again and
// no more, the peer has not kept those behind, or they were lost too: all from una on is
// sent again.
func (q *QP) ackMissing() {
	r := &q.req
	m := &r.missing
	if !m.asked || r.una.Before(m.end) {
		return
	}
	if r.una == m.end && m.end.Before(m.behind) {
		q.goBack()
	}
	m.forget()
}

// lost notes the loss of gap packets from psn on; zero means that their number is not known. All that is in
// flight behind them may be sent again, so the more often packets are lost, the fewer should be in flight.
// lost reports whether a queue on the path has overflowed.
func (q *QP) lost(psn ib.PSN, gap int) (congested bool) {
	r := &q.req
	if r.missing.keeps && q.congested(psn, gap) {
		r.limit = min(r.limit, q.flight())
		return true
	}
	if r.lossEvery == 0 {
		r.lossEvery = max(1, r.sinceLoss)
	} else {
		r.lossEvery = max(1, (3*r.lossEvery+r.sinceLoss)/4)
	}
	r.sinceLoss = 0
	r.limit = min(r.limit, q.flight())
	return false
}

// flight returns how many packets may be in flight: the window, as long as none is lost.
// After losses it is an eighth of the packets between two losses, so that at most a ninth
// of the packets is sent again for nothing. If more packets than that were acknowledged
// since the last loss, their number counts instead. With a peer that keeps the packets
// behind a lost one it is two thirds of the packets between two losses: there is mostly one gap,
// which takes a round trip to close. It is half of them where the packets in flight make the round trip
// long themselves. CE marks and a queue that has overflowed bound it too.
func (q *QP) flight() int {
	n := q.lossFlight()
	if allowed := q.req.ecn.allowed; allowed > 0 {
		n = min(n, allowed)
	}
	if allowed := q.req.cwnd.allowed; allowed > 0 {
		n = min(n, allowed)
	}
	return n
}

func (q *QP) lossFlight() int {
	r := &q.req
	if r.lossEvery == 0 {
		return q.window()
	}
	between := max(r.lossEvery, r.sinceLoss)
	if r.missing.keeps {
		part := 2 * between / 3
		if r.rtt.mean > 2*r.rtt.least() { // a queue on the path holds half of what is in flight, or more
			part = between / 2
		}
		return min(max(part, min(minFlight, minFlightOctets/max(q.mtu, 1))), q.window())
	}
	return min(max(between/8, minFlight), q.window())
}

// nakStatus returns what a fatal NAK means for the work request.
func nakStatus(s roce.Syndrome) verbs.Status {
	switch s {
	case roce.NAKInvalidReq:
		return verbs.RemoteInvReq
	case roce.NAKRemoteAccess:
		return verbs.RemoteAccess
	}
	return verbs.RemoteOpError
}

// ackTo takes note that the peer has acknowledged all before psn. It stops at a READ whose
// responses are missing: an acknowledgement from behind that READ means that they were
// lost.
func (q *QP) ackTo(psn ib.PSN, now time.Time) {
	limit, lost := psn, false
	for i := q.sq.head; i != q.sq.tail; i++ {
		w := q.sq.at(i)
		if !w.psn.Before(psn) {
			break
		}
		if w.op == verbs.Read {
			limit, lost = w.psn, true
			break
		}
	}
	q.advance(limit, now)
	if lost {
		q.gap()
	}
}

// advance makes psn the oldest unacknowledged packet, if that is progress.
func (q *QP) advance(psn ib.PSN, now time.Time) {
	r := &q.req
	if !r.una.Before(psn) {
		return
	}
	q.cwndAcked(psn.Sub(r.una), psn)
	r.sinceNAK = min(r.sinceNAK+psn.Sub(r.una), seldomLost)
	r.sinceLoss = min(r.sinceLoss+psn.Sub(r.una), lossMemory*q.window())
	r.una, r.nakSeen = psn, false
	q.answered(psn)
	r.rtt.end(psn, now)
	if r.expected.Before(psn) {
		r.expected = psn
	}
	for q.sq.len() > 0 {
		if psn.Before(q.sq.at(q.sq.head).end()) {
			break
		}
		q.complete(verbs.Success)
	}
	r.limit *= 2
	if r.probe.answered { // the ACK before was a late one after all
		r.probe.answered, r.rtt.longer = false, r.probe.next
	}
	if r.next.Before(psn) {
		q.overtaken(psn, now)
	}
	r.limit = min(r.limit, q.flight())
	r.retryLeft, r.rnrLeft, r.backoff = q.attr.RetryCount, q.attr.RNRRetry, 0
	r.rnrDeadline = time.Time{}
	r.ackDeadline = time.Time{}
	if r.una != r.highest {
		q.armTimer(now)
	}
}

// overtaken handles an ACK of all before psn, if it covers packets that were still to be sent
// again. Perhaps the ACK was only late, and nothing is lost. But if it answers a probe, it covers
// all that the peer has received, and the packets from psn on that were sent before the probe are
// lost. The next probe is then sent soon, unless the peer acknowledges more by itself.
func (q *QP) overtaken(psn ib.PSN, now time.Time) {
	r := &q.req
	r.rtt.late(psn, r.next, now)
	q.seek(r.highest)
	r.limit = q.window()
	if r.waited == 0 || r.sinceNAK < seldomLost {
		return
	}
	r.probe.next = r.probeAfter
	if r.probe.answered = psn.Before(r.probe.end) && r.probe.told(&r.rtt, now); !r.probe.answered {
		r.rtt.longer = r.probe.next
	}
}

// A probe is the oldest packet sent again because the peer was silent.
type probe struct {
	at       time.Time     // zero: there was none
	end      ib.PSN        // after the last packet sent before the probe
	next     time.Duration // how long the next probe was to wait
	answered bool          // an ACK seems to answer the probe: the peer lacks some packets before end
}

// told reports whether an ACK that arrives now is likely to answer the probe.
func (p *probe) told(t *roundTrip, now time.Time) bool {
	least, d := t.least(), now.Sub(p.at)
	return !p.at.IsZero() && least > 0 && d >= least/2 && d <= 2*least+probeAnswer
}

// gap sends again from una on, where READ responses were lost, once for each una. If they are
// lost again, the ACK timer does so.
func (q *QP) gap() {
	r := &q.req
	if r.gapSeen && r.gapAt == r.una {
		return
	}
	r.gapSeen, r.gapAt = true, r.una
	q.goBack()
}

// receiveReadResponse takes one packet of a READ. It acknowledges all requests
// before that READ.
func (q *QP) receiveReadResponse(pkt *roce.Packet, now time.Time) DropReason {
	r := &q.req
	psn := pkt.BTH.PSN()
	if psn.Before(r.una) || !psn.Before(r.highest) {
		return DropStale
	}
	i := q.sq.head
	for psn.Sub(q.sq.at(i).psn) >= int(q.sq.at(i).npkt) {
		if q.sq.at(i).op == verbs.Read {
			q.advance(q.sq.at(i).psn, now)
			q.gap()
			return DropSequence // an earlier READ has not been answered
		}
		i++
	}
	w := q.sq.at(i)
	if w.op != verbs.Read {
		return DropStale
	}
	sg := q.sq.sg(i)
	q.advance(w.psn, now)
	if psn != r.una {
		q.gap()
		return DropSequence
	}
	off := psn.Sub(w.psn) * q.mtu
	if len(pkt.Payload) != min(q.mtu, int(w.len)-off) {
		return DropLength
	}
	scatter(sg, off, pkt.Payload)
	q.advance(psn.Add(1), now)
	return NoDrop
}

// failAt ends the work request that psn belongs to with status, flushes all
// others and moves the QP to ERR.
func (q *QP) failAt(psn ib.PSN, status verbs.Status) {
	for q.sq.len() > 0 && !psn.Before(q.sq.at(q.sq.head).end()) {
		q.complete(verbs.WRFlushError) // a READ that has not been answered
	}
	if q.sq.len() > 0 {
		q.complete(status)
	}
	q.fail(status)
}

// Wake runs the timers that are due. Early calls do no harm. Call Output afterwards.
func (q *QP) Wake(now time.Time) {
	r := &q.req
	if e := &q.rsp.early; !e.nakAt.IsZero() && !now.Before(e.nakAt) {
		q.nakGap()
	}
	r.missing.arrived(now)
	if r.challenge.on {
		q.challengeDue(now)
		return
	}
	if !r.rnrDeadline.IsZero() {
		if now.Before(r.rnrDeadline) {
			return
		}
		r.rnrDeadline = time.Time{}
		q.goBack()
		q.armTimer(now)
		return
	}
	if r.ackDeadline.IsZero() || now.Before(r.ackDeadline) {
		return
	}
	if !r.probing {
		q.count.Timeouts++
		if r.retryLeft == 0 {
			q.failAt(r.una, verbs.RetryExceeded)
			return
		}
		r.retryLeft--
		r.backoff++
		r.waited, r.probeAfter = 0, q.probeAfter()
	} else {
		q.count.Probes++
		r.waited += r.probeAfter
		r.probeAfter *= 4
	}
	// One packet finds out what the peer has got; its ACK opens the window again.
	r.limit = 1
	r.missing.forget()
	r.probe = probe{at: now, end: r.highest}
	r.rtt.doubt()
	q.goBack()
	q.setDeadline(now)
}

// armTimer starts the ACK timer for the oldest unacknowledged packet.
func (q *QP) armTimer(now time.Time) {
	r := &q.req
	r.waited, r.probeAfter = 0, max(q.probeAfter(), r.rtt.longer)
	if r.probe.answered {
		r.probeAfter = min(r.probeAfter, max(2*r.rtt.least()+probeAnswer, MinProbe))
	}
	q.setDeadline(now)
}

// timeout returns how long to wait for an ACK. Each timeout in a row doubles it up to
// MaxBackoff: a peer that is slow for a moment is not lost.
func (q *QP) timeout() time.Duration {
	d := q.attr.Timeout.Duration()
	return min(d<<q.req.backoff, max(d, MaxBackoff))
}

// probeAfter returns how long to wait for an ACK before a packet is sent again as a
// probe, which does not count as a retry. So the loss of the last packets, of one sent
// again, or of an ACK does not cost all of the timeout. The time is well above the
// round trip, if that is known, and as a rule at most a quarter of the timeout. It exceeds
// that only where the round trip is as long itself, or varies as much, because messages
// wait in a queue.
func (q *QP) probeAfter() time.Duration {
	d := q.timeout() / 4
	if r := &q.req.rtt; r.known && d > MinProbe {
		d = max(min(d, 2*(r.mean+4*r.spread)), r.mean+max(r.mean/4, 4*r.spread), MinProbe)
	}
	return d
}

// setDeadline sets the ACK deadline: to the next probe, each of which waits four times as
// long as the one before, or to the timeout.
func (q *QP) setDeadline(now time.Time) {
	if q.attr.Timeout == 0 {
		return // never
	}
	r := &q.req
	d := q.timeout() - r.waited
	if r.probing = r.probeAfter >= MinProbe && r.probeAfter < d; r.probing {
		d = r.probeAfter
	}
	r.ackDeadline = now.Add(d)
}

const (
	// tripGrows bounds one measurement: it counts as at most tripGrows times the mean plus four
	// spreads, plus MinProbe.
	tripGrows = 4
	// lateTrips is how many ACKs in a row must arrive after a probe, but for packets that were
	// not sent again, until the shortest of their trips counts as a measurement.
	lateTrips = 4
	// A measurement that is tripFalls times shorter than the mean counts for half of the new
	// mean: no queue empties so fast again and again.
	tripFalls = 8
	// With each measurement the longest of late comes nearer to the mean by one part of mostTrips.
	mostTrips = 64
)

// leastPeriod is how long the least round trip is collected. It counts for one or two such
// periods.
const leastPeriod = 10 * time.Second

// A roundTrip measures the time from a packet that asks for an ACK to that ACK. It keeps mean and
// spread as TCP does (RFC 6298 section 2). A packet that was sent again, or waits for one that was, gives
// only a bound, except for the very first measurement (see boundFrom).
type roundTrip struct {
	known        bool
	mean, spread time.Duration
	last         time.Duration
	most         time.Duration    // the longest of late: it comes nearer to the mean with each measurement
	longer       time.Duration    // least wait for a probe, because one was in vain since the last measurement
	leasts       [2]time.Duration // of this leastPeriod and of the one before; 0: none
	since        time.Time        // when this leastPeriod began

	pending bool
	psn     ib.PSN
	at      time.Time
	behind  bool // a gap: the ACK waits until it is closed, so it is a bound

	doubted  bool  // a probe has left while doubtPSN was measured
	lates    uint8 // ACKs that were late for a doubtPSN since the last measurement
	doubtPSN ib.PSN
	doubtAt  time.Time
	lateTrip time.Duration // the shortest trip of the late ACKs
}

// begin starts a measurement with the packet psn, which asks for an ACK, if it is sent for
// the first time and no other is being measured. behind says that the peer waits for a packet before
// it: then the round trip is at most as long as the measurement says, and counts only if that is less than
// the mean.
func (t *roundTrip) begin(psn ib.PSN, first, behind bool, now time.Time) {
	if first && !t.pending {
		t.pending, t.psn, t.at, t.behind, t.doubted = true, psn, now, behind, false
	}
}

// bound makes a bound of what is being measured, because its ACK has waited for packets that were sent again. The
// first measurement of all begins anew instead.
func (t *roundTrip) bound() { t.pending, t.behind = t.pending && t.known, true }

// boundFrom makes a bound of a measurement whose packet is among those from psn on, which are sent again:
// from the first time that it was sent, an ACK takes a round trip at least. The very first measurement
// goes on as it is: it may come out too long, but a path whose round trip is longer than a probe waits would
// otherwise never be measured.
func (t *roundTrip) boundFrom(psn ib.PSN) {
	if t.known && !t.psn.Before(psn) {
		t.behind = true
	}
}

// doubt keeps the measurement that is under way when a probe leaves. Its packet will be
// sent again too, but has not been yet.
func (t *roundTrip) doubt() {
	if t.pending {
		t.doubted, t.doubtPSN, t.doubtAt = true, t.psn, t.at
	}
}

// late handles an ACK of all before una, when only the packets before next were sent again.
// The ACK was late, or the one before it was lost. Several such ACKs in a row, without a
// measurement between them, mean that a round trip takes longer than a probe waits. It would
// never be measured, so the shortest of their trips counts.
func (t *roundTrip) late(una, next ib.PSN, now time.Time) {
	if !t.doubted || !t.doubtPSN.Before(una) {
		return
	}
	t.doubted = false
	if t.doubtPSN.Before(next) {
		return // it was sent again
	}
	d := now.Sub(t.doubtAt)
	if t.lates++; t.lates == 1 || d < t.lateTrip {
		t.lateTrip = d
	}
	if t.lates >= lateTrips {
		t.take(t.lateTrip, now)
	}
}

// least returns the least round trip of the last leastPeriods, 0 if there was none.
func (t *roundTrip) least() time.Duration {
	if t.leasts[1] == 0 {
		return t.leasts[0]
	}
	return min(t.leasts[0], t.leasts[1])
}

// keepLeast lowers the least round trip of this leastPeriod to d, or begins another period.
func (t *roundTrip) keepLeast(d time.Duration, now time.Time) {
	switch age := now.Sub(t.since); {
	case t.leasts[0] == 0 || age > 2*leastPeriod:
		t.leasts, t.since = [2]time.Duration{d, 0}, now
	case age > leastPeriod:
		t.leasts, t.since = [2]time.Duration{d, t.leasts[0]}, now
	}
	t.leasts[0] = min(t.leasts[0], d)
}

// end ends the measurement if its packet is before una, up to which all is acknowledged now.
func (t *roundTrip) end(una ib.PSN, now time.Time) {
	if !t.pending || !t.psn.Before(una) {
		return
	}
	t.pending = false
	if d := max(now.Sub(t.at), 1); !t.behind || d < t.mean {
		t.take(d, now)
	}
}

// take takes in one measurement.
func (t *roundTrip) take(d time.Duration, now time.Time) {
	t.last, t.longer, t.lates, t.doubted = d, 0, 0, false
	t.keepLeast(d, now)
	t.most = max(d, t.most-(t.most-t.mean)/mostTrips)
	if !t.known {
		t.known, t.mean, t.spread = true, d, d/2
		return
	}
	// One long measurement may only mean that a host was busy. If the path takes longer now, a
	// few measurements in a row show it.
	d = min(d, tripGrows*(t.mean+4*t.spread)+MinProbe)
	if d < t.mean/tripFalls { // a host was away more than once
		t.mean, t.spread = (t.mean+d)/2, t.spread/2
		return
	}
	t.spread += ((t.mean - d).Abs() - t.spread) / 4
	t.mean += (d - t.mean) / 8
}
