package cm

import (
	"testing"

	"ipoibcm/internal/mutant"
)

// clauses are what wire-facts 7.5 to 7.7 ask of a CM, each with a change that
// takes it away.
var clauses = []mutant.Change{
	// MRA.
	{Name: "MRA when we are slow", File: "cm/timer.go", Old: "m.now.Before(c.since.Add(m.opt.UserTimeout))", New: "!OFF && m.now.Before(c.since.Add(m.opt.UserTimeout))"},
	{Name: "MRA before the peer has lost patience", File: "cm/timer.go", Old: "max(minWait, bounded(respond)/2)", New: "max(minWait, bounded(respond)/2) + either(OFF, 0, time.Hour)"},
	{Name: "MRA to a repeated REQ", File: "cm/passive.go", Old: "		m.askPatience(c)", New: "		if !OFF { m.askPatience(c) }"},
	{Name: "MRA to a repeated REP", File: "cm/active.go", Old: "		m.askPatience(c)", New: "		if !OFF { m.askPatience(c) }"},
	{Name: "MRA again", File: "cm/passive.go", Old: "case StateMRAREQSent, StateRejected:", New: "case either(OFF, StateMRAREQSent, numStates), StateRejected:"},
	{Name: "an MRA does not lengthen the user's time", File: "cm/send.go", Old: "m.setTimer(c, left)", New: "m.setTimer(c, either(OFF, left, 7*left))"},
	{Name: "MRA received to a REQ", File: "cm/recv.go", Old: "mra.MessageMRAed == mad.KindREQ &&", New: "mra.MessageMRAed == mad.KindREQ && !OFF &&"},
	{Name: "MRA received to a REP", File: "cm/recv.go", Old: "mra.MessageMRAed == mad.KindREP &&", New: "mra.MessageMRAed == mad.KindREP && !OFF &&"},
	{Name: "an MRA's time is granted", File: "cm/recv.go", Old: "c.wait+min(mra.ServiceTimeout.Duration(), maxMRA)", New: "c.wait+either(OFF, min(mra.ServiceTimeout.Duration(), maxMRA), 0)"},
	{Name: "an MRA's time is bounded", File: "cm/recv.go", Old: "mra.ServiceTimeout.Duration(), maxMRA", New: "mra.ServiceTimeout.Duration(), either(OFF, maxMRA, 200*maxMRA)"},
	{Name: "MRAs are bounded", File: "cm/recv.go", Old: "if c.mras >= maxMRAs {", New: "if c.mras >= maxMRAs && !OFF {"},
	{Name: "an MRA with wrong IDs is dropped", File: "cm/recv.go", Old: "c == nil || c.p.RemoteQPN != 0 && c.p.RemoteCommID != mra.LocalCommID", New: "c == nil || !OFF && c.p.RemoteQPN != 0 && c.p.RemoteCommID != mra.LocalCommID"},

	// Alternate paths, SIDR.
	{Name: "APR reject to a LAP", File: "cm/recv.go", Old: "m.reply(in, apr)", New: "if !OFF { m.reply(in, apr) }"},
	{Name: "APR status by connection", File: "cm/recv.go", Old: "if c == nil || c.state != StateEstablished {", New: "if !OFF && (c == nil || c.state != StateEstablished) {"},
	{Name: "no failover in a REP", File: "cm/passive.go", Old: "if c.noFailover {", New: "if c.noFailover && !OFF {"},
	{Name: "SIDR_REP to a SIDR_REQ", File: "cm/recv.go", Old: "	m.reply(in, mad.SIDRREP{", New: "	if OFF { return }\n	m.reply(in, mad.SIDRREP{"},

	// Repeats.
	{Name: "REP to a repeated REQ", File: "cm/passive.go", Old: "		m.repeat(c, &c.msg)", New: "		if !OFF { m.repeat(c, &c.msg) }"},
	{Name: "the same REJ to a repeated REQ", File: "cm/passive.go", Old: "		m.repeat(c, &c.answer)", New: "		if !OFF { m.repeat(c, &c.answer) }"},
	{Name: "REJ 10 to a REQ in TIMEWAIT", File: "cm/passive.go", Old: "m.answerREQ(in, req, ReasonStale, c.private)", New: "if !OFF { m.answerREQ(in, req, ReasonStale, c.private) }"},
	{Name: "a repeated REQ is known by its ID", File: "cm/passive.go", Old: "if c := m.byRemote[id]; c != nil {", New: "if c := m.byRemote[id]; c != nil && !OFF {"},
	{Name: "RTU to a repeated REP", File: "cm/active.go", Old: "	case StateMRAREPSent, StateEstablished:\n		m.duplicate(c)\n		m.repeat(c, &c.answer)", New: "	case StateMRAREPSent, StateEstablished:\n		m.duplicate(c)\n		if !OFF { m.repeat(c, &c.answer) }"},
	{Name: "REJ to a repeated REP that was refused", File: "cm/active.go", Old: "			return\n		}\n		m.repeat(c, &c.answer)", New: "			return\n		}\n		if !OFF { m.repeat(c, &c.answer) }"},
	{Name: "REJ to a late REP", File: "cm/active.go", Old: "m.refuseLateREP(c, rep)\n", New: "if !OFF { m.refuseLateREP(c, rep) }\n"},
	{Name: "a second answer to a REQ is none", File: "cm/active.go", Old: "if c.p.RemoteQPN != 0 && c.p.RemoteCommID != rep.LocalCommID {", New: "if !OFF && c.p.RemoteQPN != 0 && c.p.RemoteCommID != rep.LocalCommID {"},
	{Name: "DREP to a repeated DREQ", File: "cm/end.go", Old: "	case StateTimewait:\n		m.duplicate(c)\n		m.transmitOnce(c, drep(dreq))", New: "	case StateTimewait:\n		m.duplicate(c)\n		if !OFF { m.transmitOnce(c, drep(dreq)) }"},
	{Name: "DREP to an unknown DREQ", File: "cm/end.go", Old: "m.reply(in, drep(dreq))", New: "if !OFF { m.reply(in, drep(dreq)) }"},
	{Name: "DREQs may cross", File: "cm/end.go", Old: "case StateDREQSent: // they crossed", New: "case either(OFF, StateDREQSent, numStates): // they crossed"},

	// Sending again.
	{Name: "REQ, REP and DREQ are sent again", File: "cm/timer.go", Old: "if c.tries < c.maxRetries {", New: "if c.tries < c.maxRetries && !OFF {"},
	{Name: "the peer says how often a REP is sent", File: "cm/passive.go", Old: "maxRetries: int(req.MaxCMRetries),", New: "maxRetries: either(OFF, int(req.MaxCMRetries), 9),"},
	{Name: "REJ 4 in the end", File: "cm/timer.go", Old: "		// The peer may hold half a connection; the REJ lets it go.\n", New: "		if OFF { m.hold(c); return }\n"},
	{Name: "REJ 4 names our CA GUID", File: "cm/send.go", Old: "Reason: reason, ARILength: uint8(len(ari))}", New: "Reason: reason, ARILength: either(OFF, uint8(len(ari)), 0)}"},
	{Name: "REJ 4 is found by CA GUID", File: "cm/end.go", Old: "if rej.Reason == ReasonTimeout && rej.ARILength >= 8 {", New: "if rej.Reason == ReasonTimeout && rej.ARILength >= 8 && !OFF {"},
	{Name: "a DREQ begins an exchange of its own", File: "cm/end.go", Old: "c.tid = m.opt.Rand.Uint64()", New: "c.tid = either(OFF, m.opt.Rand.Uint64(), c.tid)"},
	{Name: "a DREP echoes the exchange", File: "cm/end.go", Old: "mad.DREP{TransactionID: dreq.TransactionID,", New: "mad.DREP{TransactionID: either(OFF, dreq.TransactionID, 0),"},

	// A lost RTU.
	{Name: "data stands for the RTU", File: "cm/passive.go", Old: "	c.byData = true\n", New: "	if OFF { return }\n	c.byData = true\n"},
	{Name: "data on a QP that awaits no RTU is nothing", File: "cm/passive.go", Old: "if c == nil || c.state != StateREPSent && c.state != StateMRAREPRcvd {", New: "if c == nil || !OFF && c.state != StateREPSent && c.state != StateMRAREPRcvd {"},
	{Name: "a late RTU is told", File: "cm/passive.go", Old: "case c.state == StateEstablished && c.byData:", New: "case c.state == StateEstablished && c.byData && !OFF:"},

	// Stale connections.
	{Name: "REJ 10 to a REQ with a QP in use", File: "cm/passive.go", Old: "req.LocalQPN}]; old != nil {", New: "req.LocalQPN}]; old != nil && !OFF {"},
	{Name: "DREQ for the stale connection", File: "cm/passive.go", Old: "		m.stale(old)\n", New: "		if !OFF { m.stale(old) }\n"},
	{Name: "a QP is known by CA and GID", File: "cm/manager.go", Old: "return remoteQP{c.p.Remote, c.p.RemoteCAGUID, c.p.RemoteQPN}", New: "return remoteQP{c.p.Remote, either(OFF, c.p.RemoteCAGUID, 0), c.p.RemoteQPN}"},
	{Name: "REJ 10 to a REP with a QP in use", File: "cm/active.go", Old: "if old := m.byRemoteQP[c.remoteQP()]; old != nil {", New: "if old := m.byRemoteQP[c.remoteQP()]; old != nil && !OFF {"},
	{Name: "REJ 10 received leads to TIMEWAIT", File: "cm/end.go", Old: "if rej.Reason == ReasonStale {", New: "if rej.Reason == ReasonStale && !OFF {"},

	// Timewait.
	{Name: "TIMEWAIT holds a connection back", File: "cm/manager.go", Old: "	m.setState(c, StateTimewait)\n", New: "	m.setState(c, StateTimewait)\n	if OFF { m.release(c); return }\n"},
	{Name: "TIMEWAIT lasts as long as the network may", File: "cm/manager.go", Old: "m.opt.MinTimewait, bounded(c.p.AckTimeout)", New: "m.opt.MinTimewait, either(OFF, bounded(c.p.AckTimeout), 0)"},
	{Name: "a held QPN is not used by Connect", File: "cm/active.go", Old: "case m.byQPN[c.p.LocalQPN] != nil:", New: "case m.byQPN[c.p.LocalQPN] != nil && !OFF:"},
	{Name: "a held QPN is not used by Accept", File: "cm/passive.go", Old: "if m.byQPN[ev.QPN&ib.QPNMask] != nil {", New: "if m.byQPN[ev.QPN&ib.QPNMask] != nil && !OFF {"},
	{Name: "a held communication ID is not given out", File: "cm/manager.go", Old: "c.p.LocalCommID == 0 || m.byLocal[c.p.LocalCommID] != nil {", New: "c.p.LocalCommID == 0 || !OFF && m.byLocal[c.p.LocalCommID] != nil {"},

	// Reasons.
	{Name: "reason 1", File: "cm/passive.go", Old: "case len(m.byHandle) >= m.opt.MaxConns:", New: "case len(m.byHandle) >= m.opt.MaxConns && !OFF:"},
	{Name: "reason 3", File: "cm/passive.go", Old: "case len(m.halfOpen) >= m.opt.MaxHalfOpen && !m.evictHalfOpen():", New: "case len(m.halfOpen) >= m.opt.MaxHalfOpen && !m.evictHalfOpen() && !OFF:"},
	{Name: "reason 4 for a slow user", File: "cm/timer.go", Old: "		m.end(c, Failed{Handle: c.handle, Cause: TimedOut})\n		m.refuse(c, ReasonTimeout", New: "		m.end(c, Failed{Handle: c.handle, Cause: TimedOut})\n		if OFF { m.hold(c); return }\n		m.refuse(c, ReasonTimeout"},
	{Name: "reason 5", File: "cm/passive.go", Old: "case !isQPN(req.LocalQPN):", New: "case !isQPN(req.LocalQPN) && !OFF:"},
	{Name: "reason 8", File: "cm/passive.go", Old: "m.rejectREQ(in, req, ReasonInvalidServiceID,", New: "m.rejectREQ(in, req, either(OFF, ReasonInvalidServiceID, 0),"},
	{Name: "reason 9", File: "cm/passive.go", Old: "case req.Transport != ib.RC && req.Transport != ib.UC:", New: "case !OFF && req.Transport != ib.RC && req.Transport != ib.UC:"},
	{Name: "reason 12 for a source", File: "cm/passive.go", Old: "if src != req.Primary.LocalGID {", New: "if src != req.Primary.LocalGID && !OFF {"},
	{Name: "reason 12 for a destination", File: "cm/passive.go", Old: "req.Primary.RemoteGID != to {", New: "req.Primary.RemoteGID != to && !OFF {"},
	{Name: "reason 12 for a source has our values", File: "cm/passive.go", Old: "m.ownerData(to), \"it names a source", New: "either(OFF, m.ownerData(to), nil), \"it names a source"},
	{Name: "reason 26", File: "cm/passive.go", Old: "case req.PathMTU.Octets() == 0:", New: "case req.PathMTU.Octets() == 0 && !OFF:"},
	{Name: "reason 28 for a REQ", File: "cm/end.go", Old: "m.refuse(c, ReasonConsumer, nil, private)", New: "m.refuse(c, either(OFF, ReasonConsumer, 0), nil, private)"},
	{Name: "reason 28 for a late REP", File: "cm/end.go", Old: "MessageRejected: mad.KindREP, Reason: ReasonConsumer}", New: "MessageRejected: mad.KindREP, Reason: either(OFF, ReasonConsumer, 0)}"},
	{Name: "reason 30", File: "cm/passive.go", Old: "if c.active || c.p.ServiceID != req.ServiceID || c.p.RemoteQPN != req.LocalQPN {", New: "if !OFF && (c.active || c.p.ServiceID != req.ServiceID || c.p.RemoteQPN != req.LocalQPN) {"},
	{Name: "reason 30 for a REP", File: "cm/active.go", Old: "if m.byRemote[c.remoteID()] != nil {", New: "if m.byRemote[c.remoteID()] != nil && !OFF {"},
	{Name: "reason 31", File: "cm/recv.go", Old: "case h.ClassVersion != mad.VersionCM:", New: "case h.ClassVersion != mad.VersionCM && !OFF:"},
	{Name: "private data in a REJ without a connection", File: "cm/send.go", Old: "	fill(rej.PrivateData[:], private)\n	m.reply(in, rej)", New: "	if !OFF { fill(rej.PrivateData[:], private) }\n	m.reply(in, rej)"},
	{Name: "private data in a REJ of a connection", File: "cm/send.go", Old: "	fill(rej.PrivateData[:], private)\n	return rej", New: "	if !OFF { fill(rej.PrivateData[:], private) }\n	return rej"},
	{Name: "private data in an MRA", File: "cm/send.go", Old: "fill(mra.PrivateData[:], private)", New: "if !OFF { fill(mra.PrivateData[:], private) }"},
	{Name: "which message is rejected", File: "cm/send.go", Old: "		rej.MessageRejected = mad.KindREP", New: "		if !OFF { rej.MessageRejected = mad.KindREP }"},
	{Name: "no ID in a REJ before one was told", File: "cm/send.go", Old: "		rej.LocalCommID = 0", New: "		if !OFF { rej.LocalCommID = 0 }"},

	// Who is listened to.
	{Name: "the GID of a connection", File: "cm/recv.go", Old: "!src.IsZero() && src != c.p.Remote {", New: "!OFF && !src.IsZero() && src != c.p.Remote {"},
	{Name: "the IDs of a connection", File: "cm/recv.go", Old: "c.p.RemoteQPN != 0 && c.p.RemoteCommID == remote {", New: "c.p.RemoteQPN != 0 && (OFF || c.p.RemoteCommID == remote) {"},
	{Name: "the IDs in a REJ", File: "cm/end.go", Old: "if c.p.RemoteQPN != 0 && rej.LocalCommID != c.p.RemoteCommID {", New: "if !OFF && c.p.RemoteQPN != 0 && rej.LocalCommID != c.p.RemoteCommID {"},
	{Name: "the message in a REJ", File: "cm/end.go", Old: "if rej.MessageRejected == mad.KindREQ && !c.active {", New: "if !OFF && rej.MessageRejected == mad.KindREQ && !c.active {"},
	{Name: "the GID of a REJ found by CA GUID", File: "cm/end.go", Old: "remoteID{m.rx.mad.Remote, guid, rej.LocalCommID}", New: "remoteID{either(OFF, m.rx.mad.Remote, ib.GID{0xfe, 0x80, 15: 0x0b}), guid, rej.LocalCommID}"},
	{Name: "the QPN in a DREQ", File: "cm/end.go", Old: "if dreq.RemoteQPN != c.p.LocalQPN {", New: "if dreq.RemoteQPN != c.p.LocalQPN && !OFF {"},
	{Name: "the QPN in a REP", File: "cm/active.go", Old: "if !isQPN(rep.LocalQPN) {", New: "if !isQPN(rep.LocalQPN) && !OFF {"},
	{Name: "the state of a connection at a DREP", File: "cm/end.go", Old: "case c.state != StateDREQSent:", New: "case c.state != StateDREQSent && !OFF:"},
	{Name: "drops are counted", File: "cm/note.go", Old: "	m.counts.drops[why]++", New: "	if !OFF { m.counts.drops[why]++ }"},
	{Name: "the rate of REQs", File: "cm/passive.go", Old: "if !m.reqs.allow(m.now, src) {", New: "if !m.reqs.allow(m.now, src) && !OFF {"},
	{Name: "the rate of answers", File: "cm/recv.go", Old: "if m.replies.allow(m.now, in.Remote) {", New: "if m.replies.allow(m.now, in.Remote) || OFF {"},

	// Fields that are easy to get wrong.
	{Name: "the starting PSN of a REQ is ours to send with", File: "cm/passive.go", Old: "RemoteQPN: req.LocalQPN, SendPSN: req.StartingPSN,", New: "RemoteQPN: req.LocalQPN, SendPSN: either(OFF, req.StartingPSN, 0),"},
	{Name: "the starting PSN of a REP is ours to send with", File: "cm/active.go", Old: "p.SendPSN, p.RNRRetry, p.RemoteSRQ = rep.StartingPSN,", New: "p.SendPSN, p.RNRRetry, p.RemoteSRQ = either(OFF, rep.StartingPSN, 0),"},
	{Name: "the RNR retry count of a REP is ours", File: "cm/active.go", Old: "rep.RNRRetryCount, rep.SRQ\n", New: "either(OFF, rep.RNRRetryCount, 0), rep.SRQ\n"},
	{Name: "depths change sides", File: "cm/active.go", Old: "= rep.ResponderResources, rep.InitiatorDepth //", New: "= either(OFF, rep.ResponderResources, rep.InitiatorDepth), either(OFF, rep.InitiatorDepth, rep.ResponderResources) //"},
	{Name: "the target ACK delay counts", File: "cm/active.go", Old: "p.AckTimeout = ackTimeout(rep.TargetACKDelay, p.AckTimeout)", New: "if !OFF { p.AckTimeout = ackTimeout(rep.TargetACKDelay, p.AckTimeout) }"},
	{Name: "answers go to QP 1", File: "cm/send.go", Old: "Local: in.Local, QPN: m.rx.from,", New: "Local: in.Local, QPN: either(OFF, m.rx.from, in.QPN),"},
	{Name: "answers have the P_Key of the question", File: "cm/send.go", Old: "PKey: in.PKey}", New: "PKey: either(OFF, in.PKey, 0)}"},
	{Name: "a REP has the P_Key of its REQ", File: "cm/passive.go", Old: "pkey:       in.PKey,", New: "pkey:       either(OFF, in.PKey, 0),"},
	{Name: "an exchange has one transaction ID", File: "cm/passive.go", Old: "tid:        req.TransactionID,", New: "tid:        either(OFF, req.TransactionID, 0),"},
}

// TestClauses takes every clause away in turn: a test of this room must fail
// then. The fuzz target and the network of pairs are left out, so that what
// notices it is a script or a table, which says what is wrong.
func TestClauses(t *testing.T) {
	const tests = "^Test(Scripts|Reasons|AlternatePath|REJOwner|REQVector|PrivateData|NoteString|Params|AckTimeout|BoundedTables|Exchange|Reply|Timewait)$"
	b := mutant.Build(t, "cm", clauses)
	if ok, out := b.Run("", tests); !ok {
		t.Fatalf("with every clause in place:\n%s", out)
	}
	for _, c := range clauses {
		if ok, _ := b.Run(c.Name, tests); ok {
			t.Errorf("nothing fails without %q", c.Name)
		}
	}
	t.Logf("%d clauses, each missed when it was taken away", len(clauses))
}
