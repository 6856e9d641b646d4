package cm

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/timerheap"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// A Manager is the communication manager of one port: all its connections.
// It is not safe for concurrent use.
type Manager struct {
	opt       Options
	listeners []Listen

	// Every connection is in byHandle and byLocal until it is released, in timers while it has
	// a deadline, and in each other map while it has the key of that map. A passive connection in
	// StateRejected is not in byRemoteQP.
	byHandle   map[Handle]*conn
	byLocal    map[mad.CommID]*conn // our communication ID
	byRemote   map[remoteID]*conn
	byRemoteQP map[remoteQP]*conn
	byQPN      map[ib.QPN]*conn // our QPN
	timers     timerheap.Heap[conn, *conn]

	lastIncoming Handle
	lastSeq      uint64
	halfOpen     []*conn // passive, not yet established, oldest first
	leaving      int     // in StateDREQSent
	rejected     []*conn // passive ones in StateRejected, oldest first

	reqs, replies limiter
	counts        counts

	// These are set during a Step only.
	dst []Action
	now time.Time
	rx  received // the MAD at hand
}

// A remoteID identifies a connection by the peer's GID, CA GUID and communication ID. The GID is
// included so that another port cannot reach the connection by naming the peer's GUID.
type remoteID struct {
	gid    ib.GID
	guid   ib.GUID
	commID mad.CommID
}

// A remoteQP is a QP of a peer. A second connection with the same one shows that the first may be
// stale.
type remoteQP struct {
	gid  ib.GID
	guid ib.GUID
	qpn  ib.QPN
}

// A conn is one connection.
type conn struct {
	handle Handle
	p      Params
	since  time.Time
	asked  time.Time // when its REQ came, if it is passive

	active     bool
	state      State
	ended      bool // the user knows of the end
	byData     bool
	noFailover bool    // the REQ asked for an alternate path
	pkey       ib.PKey // of its MADs

	tid     uint64
	private []byte // for the MRAs and REJs that we send by ourselves
	// patience is how long the user may leave the peer's REQ or REP unanswered before the peer
	// gets an MRA.
	patience time.Duration
	doubted  time.Time // when the peer was last challenged

	// msg is what we sent last. It is sent again when the peer repeats its own message. If it asks for an
	// answer, it is sent again when the deadline passes too; tries is how often it was.
	msg        [verbs.MADLen]byte
	wait       time.Duration // per try
	tries      int
	maxRetries int
	mras       int // MRAs that the peer sent

	deadline time.Time
	seq      uint64 // orders connections with one deadline
	timerheap.Slot
}

// New returns a Manager without connections or listeners.
func New(opt Options) *Manager {
	if opt.Rand == nil {
		panic("cm: Options.Rand is needed")
	}
	opt.MaxRetries = min(max(0, cmp.Or(opt.MaxRetries, 7)), 15)
	opt.UserTimeout = cmp.Or(opt.UserTimeout, 10*time.Second)
	opt.MinTimewait = cmp.Or(opt.MinTimewait, time.Second)
	opt.MaxConns = cmp.Or(opt.MaxConns, 4096)
	opt.MaxHalfOpen = cmp.Or(opt.MaxHalfOpen, 256)
	return &Manager{
		opt:        opt,
		byHandle:   make(map[Handle]*conn),
		byLocal:    make(map[mad.CommID]*conn),
		byRemote:   make(map[remoteID]*conn),
		byRemoteQP: make(map[remoteQP]*conn),
		byQPN:      make(map[ib.QPN]*conn),
		reqs:       newLimiter(cmp.Or(opt.REQsPerSecond, 64)),
		replies:    newLimiter(cmp.Or(opt.RepliesPerSecond, 64)),
	}
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (m *Manager) Step(dst []Action, now time.Time, ev Event) []Action {
	m.dst, m.now = dst, now
	ev.step(m)
	dst, m.dst = m.dst, nil
	return dst
}

// Deadline returns when the driver must send Wake; zero means never.
func (m *Manager) Deadline() time.Time {
	if c := m.timers.First(); c != nil {
		return c.deadline
	}
	return time.Time{}
}

// Conn returns the connection that h names, if there is one.
func (m *Manager) Conn(h Handle) (ConnInfo, bool) {
	c := m.byHandle[h]
	if c == nil {
		return ConnInfo{}, false
	}
	return ConnInfo{Handle: c.handle, State: c.state, Active: c.active, Since: c.since, Params: c.p}, true
}

// Conns lists the connections, those in TIMEWAIT and REJECTED included, by handle.
func (m *Manager) Conns() []ConnInfo {
	out := make([]ConnInfo, 0, len(m.byHandle))
	for _, h := range slices.Sorted(maps.Keys(m.byHandle)) {
		i, _ := m.Conn(h)
		out = append(out, i)
	}
	return out
}

// Len returns how many connections Conns lists.
func (m *Manager) Len() int { return len(m.byHandle) }

// Disconnecting returns how many connections wait for a DREP.
func (m *Manager) Disconnecting() int { return m.leaving }

func (m *Manager) act(a Action) { m.dst = append(m.dst, a) }

func (m *Manager) listen(ev Listen) {
	ev.GID = m.local(ev.GID)
	ev.PrivateData = slices.Clone(ev.PrivateData)
	if l := m.listener(ev.ServiceID, ev.GID); l != nil {
		*l = ev
		return
	}
	m.listeners = append(m.listeners, ev)
}

func (m *Manager) unlisten(ev Unlisten) {
	ev.GID = m.local(ev.GID)
	m.listeners = slices.DeleteFunc(m.listeners, func(l Listen) bool {
		return l.ServiceID == ev.ServiceID && l.GID == ev.GID
	})
}

// local returns g, or the default GID if g is zero.
func (m *Manager) local(g ib.GID) ib.GID {
	if g.IsZero() {
		return m.opt.GID
	}
	return g
}

// user returns connection h for an event of the user named what. If the connection has ended, or is
// in none of states, user counts the event and returns nil. Without states any state will do.
func (m *Manager) user(h Handle, what string, states ...State) *conn {
	c := m.byHandle[h]
	if c == nil || c.ended || len(states) > 0 && !slices.Contains(states, c.state) {
		m.counts.drops[DropStaleHandle]++
		m.note(c, Note{Handle: h, Drop: DropStaleHandle, Text: what + ": the connection cannot take it any more"})
		return nil
	}
	return c
}

// add puts a new connection on record with a communication ID of its own
// (4755-3.2-7). The caller has checked MaxConns.
func (m *Manager) add(c *conn) {
	for c.p.LocalCommID == 0 || m.byLocal[c.p.LocalCommID] != nil {
		c.p.LocalCommID = mad.CommID(m.opt.Rand.Uint64())
	}
	m.lastSeq++
	c.seq, c.since = m.lastSeq, m.now
	m.byHandle[c.handle] = c
	m.byLocal[c.p.LocalCommID] = c
	m.indexRemote(c)
	m.indexQPN(c)
}

func (c *conn) remoteID() remoteID {
	return remoteID{c.p.Remote, c.p.RemoteCAGUID, c.p.RemoteCommID}
}

func (c *conn) remoteQP() remoteQP {
	return remoteQP{c.p.Remote, c.p.RemoteCAGUID, c.p.RemoteQPN}
}

// indexRemote indexes c by the IDs and the QPN that the peer named.
func (m *Manager) indexRemote(c *conn) {
	if c.p.RemoteQPN != 0 { // it comes in the same message as the communication ID
		m.byRemote[c.remoteID()] = c
		m.byRemoteQP[c.remoteQP()] = c
	}
}

func (m *Manager) indexQPN(c *conn) {
	if c.p.LocalQPN != 0 {
		m.byQPN[c.p.LocalQPN] = c
	}
}

// forgetRemoteQP lets the peer use its QP for another connection.
func (m *Manager) forgetRemoteQP(c *conn) {
	if m.byRemoteQP[c.remoteQP()] == c {
		delete(m.byRemoteQP, c.remoteQP())
	}
}

// isHalfOpen reports whether c counts against MaxHalfOpen.
func (c *conn) isHalfOpen() bool {
	switch c.state {
	case StateREQRcvd, StateMRAREQSent, StateREPSent, StateMRAREPRcvd:
		return true
	}
	return false
}

func (m *Manager) setState(c *conn, s State) {
	was := c.isHalfOpen()
	if c.state == StateDREQSent {
		m.leaving--
	}
	c.state, c.since = s, m.now
	if c.state == StateDREQSent {
		m.leaving++
	}
	switch is := c.isHalfOpen(); {
	case is && !was:
		m.halfOpen = append(m.halfOpen, c)
	case was && !is:
		m.halfOpen = slices.DeleteFunc(m.halfOpen, func(o *conn) bool { return o == c })
	}
}

// evictHalfOpen gives up the oldest half-open connection, unless it is younger than halfOpenAge.
// It reports whether there is room now.
func (m *Manager) evictHalfOpen() bool {
	if len(m.halfOpen) == 0 || m.now.Sub(m.halfOpen[0].asked) < halfOpenAge {
		return false
	}
	m.counts.evictedHalfOpen++
	m.timeOut(m.halfOpen[0], "it makes room for a REQ that is newer")
	return true
}

// makeRoom releases the passive connection whose REJ has been kept longest, if there are MaxConns
// connections. Anybody can cause a REJ with one REQ, and must not keep others out in this way.
// A repeat of that REQ then counts as a new one.
func (m *Manager) makeRoom() {
	if len(m.byHandle) >= m.opt.MaxConns && len(m.rejected) > 0 {
		m.counts.evicted++
		m.release(m.rejected[0])
	}
}

// setTimer makes c due after d.
func (m *Manager) setTimer(c *conn, d time.Duration) {
	c.deadline = m.now.Add(d)
	m.timers.Set(c)
}

// end tells the user how c ended, once.
func (m *Manager) end(c *conn, a Action) {
	if !c.ended {
		c.ended = true
		m.act(a)
	}
}

// timewait holds the QPN and both communication IDs of c back until no packet of
// c can be in the network any more (IBA 12.9.8.4).
func (m *Manager) timewait(c *conn) {
	m.setState(c, StateTimewait)
	m.setTimer(c, max(m.opt.MinTimewait, bounded(c.p.AckTimeout)))
}

// over tells the user how c ended, once, and lets c enter timewait.
func (m *Manager) over(c *conn, a Action) {
	m.end(c, a)
	m.timewait(c)
}

// release forgets c and gives its QPN back.
func (m *Manager) release(c *conn) {
	m.setState(c, StateIdle)
	m.timers.Stop(c)
	delete(m.byHandle, c.handle)
	delete(m.byLocal, c.p.LocalCommID)
	if m.byRemote[c.remoteID()] == c {
		delete(m.byRemote, c.remoteID())
	}
	m.forgetRemoteQP(c)
	// No other connection has this QPN: Connect and Accept refuse a QPN that is held.
	delete(m.byQPN, c.p.LocalQPN)
	m.rejected = slices.DeleteFunc(m.rejected, func(x *conn) bool { return x == c })
	if c.p.LocalQPN != 0 {
		m.act(Released{Handle: c.handle, QPN: c.p.LocalQPN})
	}
}

// listener returns the listener for a service ID at a GID, or nil.
func (m *Manager) listener(id serviceid.ID, gid ib.GID) *Listen {
	for i := range m.listeners {
		if l := &m.listeners[i]; l.ServiceID == id && l.GID == gid {
			return l
		}
	}
	return nil
}

// ownerData returns the private data of a REJ at gid that belongs to no listener. RFC 4755
// section 3.2 wants the UD QPN in every REJ. ownerData has it if all listeners at gid are of one
// interface, that is, have the same private data; otherwise it returns nil.
func (m *Manager) ownerData(gid ib.GID) (data []byte) {
	found := false
	for _, l := range m.listeners {
		if l.GID != gid {
			continue
		}
		if found && !slices.Equal(l.PrivateData, data) {
			return nil
		}
		found, data = true, l.PrivateData
	}
	return data
}
