// Package simsm is a simulated InfiniBand subnet as far as subnet administration shows
// it: ports with LIDs and partitions, and a subnet manager that answers requests about
// groups, paths and notices. It can be slow, lose MADs, be busy, stop, and start anew,
// when it has forgotten all members and may or may not ask the ports to register again.
//
// It answers as opensm does where ports can see a difference; test/subnet runs the same
// tests against both. It is pure: callers pass it MADs with the time, and [Subnet.Take]
// returns MADs when they are due. There is no data plane.
//
// It is for tests.
package simsm

import (
	"cmp"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/sa"
	wire "ipoibcm/wire/sa"
)

// Prefix is the subnet prefix of all ports.
const Prefix uint64 = 0xfe80000000000000

// smLID is the LID of the subnet manager's own port.
const smLID ib.LID = 1

// A Partition is a partition in the subnet manager's configuration.
type Partition struct {
	PKey ib.PKey // the membership bit does not matter
	// Group makes an IPoIB broadcast group with Params, which stays without members.
	Group  bool
	Params sa.Params
	// Full and Limited are the members. If both are nil every port is a full member.
	Full, Limited []ib.GUID
}

// member returns the P_Key of a port in p. ok is false if the port is no member.
func (p Partition) member(g ib.GUID) (key ib.PKey, ok bool) {
	switch {
	case p.Full == nil && p.Limited == nil, slices.Contains(p.Full, g):
		return p.PKey | ib.PKeyFull, true
	case slices.Contains(p.Limited, g):
		return p.PKey &^ ib.PKeyFull, true
	}
	return 0, false
}

// Options say what the subnet is like and how it behaves. Seed and Partitions are for New; the
// others may be changed while it runs.
type Options struct {
	Seed uint64
	// Partitions are those of the subnet manager. Nil means P_Key 0x7fff for all ports,
	// with a broadcast group as opensm makes it.
	Partitions []Partition
	// Delay is how long an answer takes. Zero means 100 µs. Jitter is the most
	// that is added to Delay at random, so that answers change places.
	Delay, Jitter time.Duration
	// Loss, Dup and Busy are the shares, 0 to 1, of MADs that are lost, of MADs to ports
	// that arrive twice, and of requests that are answered BUSY.
	Loss, Dup, Busy float64
	// Quiet keeps the subnet manager from asking clients to register again when it starts.
	Quiet bool
	// NoSendOnlyFull makes the administrator report that it does not know
	// SendOnlyFullMember.
	NoSendOnlyFull bool
}

// A Stats counts what happened.
type Stats struct{ Received, Answered, Lost, Busy, Reports uint64 }

// A Port is an end of the subnet.
type Port struct {
	GUID  ib.GUID
	LID   ib.LID
	PKeys []ib.PKey
	MTU   ib.MTU
	Up    bool

	subnet *Subnet
}

// GID returns the port's GID: the subnet prefix and the GUID.
func (p *Port) GID() ib.GID { return gid(p.GUID) }

func gid(g ib.GUID) (out ib.GID) {
	binary.BigEndian.PutUint64(out[:], Prefix)
	binary.BigEndian.PutUint64(out[8:], uint64(g))
	return out
}

// Now returns the state of the port as its driver would report it.
func (p *Port) Now() sa.Port {
	return sa.Port{Active: p.Up, LID: p.LID, SMLID: smLID, GID: p.GID(), SubnetTimeout: 14}
}

// A Delivery is an event for the client at a port.
type Delivery struct {
	To    *Port
	Event sa.Event
	due   time.Time
}

// A Subnet is ports and a subnet manager. It is not safe for concurrent use.
type Subnet struct {
	Options
	Stats Stats

	ports   []*Port
	nextLID ib.LID
	rnd     *rand.Rand
	inbox   []Delivery // MADs and events under way, by time

	running bool
	groups  []*group
	firstML ib.LID // lowest MLID of a group; another one after each start
	informs []inform
	reports []*report
	lastTID uint64
}

// New returns a subnet whose manager runs.
func New(opt Options) *Subnet {
	if opt.Partitions == nil {
		opt.Partitions = []Partition{{PKey: ib.DefaultPKey, Group: true, Params: DefaultParams}}
	}
	s := &Subnet{Options: opt, rnd: rand.New(rand.NewPCG(opt.Seed, 3)), nextLID: smLID + 1, firstML: 0xc000}
	s.start()
	return s
}

// DefaultParams are the parameters of opensm's broadcast group.
var DefaultParams = sa.Params{QKey: ib.QKeyIPoIB, MTU: ib.MTU2048, Rate: ib.Rate10G}

// AddPort attaches a port, whose link is up.
func (s *Subnet) AddPort(guid ib.GUID) *Port {
	p := &Port{GUID: guid, LID: s.nextLID, MTU: ib.MTU2048, Up: true, subnet: s}
	s.nextLID++
	for _, part := range s.Partitions {
		if key, ok := part.member(guid); ok {
			p.PKeys = append(p.PKeys, key)
		}
	}
	s.ports = append(s.ports, p)
	return p
}

// Stop ends the subnet manager. It forgets groups, subscriptions and reports.
func (s *Subnet) Stop() { s.running, s.groups, s.informs, s.reports = false, nil, nil, nil }

// Start starts the subnet manager anew. Groups have other MLIDs than before.
func (s *Subnet) Start(now time.Time) {
	s.Stop()
	s.firstML += 0x10
	s.start()
	for _, p := range s.ports {
		if p.Up && !s.Quiet {
			s.post(now, p, sa.Reregister{})
		}
	}
}

func (s *Subnet) start() {
	s.running = true
	for _, part := range s.Partitions {
		if part.Group {
			g := s.newGroup(broadcast(part.PKey), part.PKey|ib.PKeyFull, part.Params)
			g.record.LifeSelector, g.record.Life, g.record.Scope, g.fixed = wire.Exactly, 18, 2, true
		}
	}
}

func broadcast(p ib.PKey) ib.GID {
	p |= ib.PKeyFull
	return ib.GID{0: 0xff, 1: 0x12, 2: 0x40, 3: 0x1b, 4: byte(p >> 8), 5: byte(p), 12: 0xff, 13: 0xff, 14: 0xff, 15: 0xff}
}

// SetLink brings the link of a port down or up. The client at the port gets SetPort. A
// subnet manager that runs sends notices, and ends the memberships of a port that is
// down.
func (s *Subnet) SetLink(now time.Time, p *Port, up bool) {
	if p.Up == up {
		return
	}
	p.Up = up
	s.post(now, p, sa.SetPort{Port: p.Now()})
	if !s.running {
		return
	}
	if up {
		s.notify(now, wire.TrapGIDInService, p.GID())
		return
	}
	for _, g := range slices.Clone(s.groups) {
		g.leave(p.GID(), 15)
		s.reap(now, g)
	}
	s.informs = slices.DeleteFunc(s.informs, func(i inform) bool { return i.port == p })
	s.notify(now, wire.TrapGIDOutOfService, p.GID())
}

// Relabel gives a port another LID, as a subnet manager may after a merge.
func (s *Subnet) Relabel(now time.Time, p *Port) {
	p.LID = s.nextLID
	s.nextLID++
	s.post(now, p, sa.SetPort{Port: p.Now()})
}

// Members returns the join state of each member of a group, by GID; nil if the group does not exist.
func (s *Subnet) Members(mgid ib.GID) map[ib.GID]wire.JoinState {
	if g := s.find(mgid); g != nil {
		return g.members
	}
	return nil
}

// Subscribed reports whether a port has subscribed to a trap.
func (s *Subnet) Subscribed(p *Port, trap wire.Trap) bool {
	return slices.Contains(s.informs, inform{p, trap})
}

// Groups returns the MGIDs of all groups, the oldest first.
func (s *Subnet) Groups() (all []ib.GID) {
	for _, g := range s.groups {
		all = append(all, g.record.MGID)
	}
	return all
}

// post delivers ev to p after the delay.
func (s *Subnet) post(now time.Time, p *Port, ev sa.Event) {
	d := cmp.Or(s.Delay, 100*time.Microsecond)
	if s.Jitter > 0 {
		d += time.Duration(s.rnd.Int64N(int64(s.Jitter)))
	}
	s.inbox = append(s.inbox, Delivery{p, ev, now.Add(d)})
	slices.SortStableFunc(s.inbox, func(a, b Delivery) int { return a.due.Compare(b.due) })
}

// lucky draws whether an event with the probability p happens.
func (s *Subnet) lucky(p float64) bool { return p > 0 && s.rnd.Float64() < p }

// Due returns when Take has something to do; zero means never.
func (s *Subnet) Due() time.Time {
	var due time.Time
	if len(s.inbox) > 0 {
		due = s.inbox[0].due
	}
	for _, r := range s.reports {
		if due.IsZero() || r.again.Before(due) {
			due = r.again
		}
	}
	return due
}

// Take returns the deliveries that are due. It also repeats the reports that are due.
func (s *Subnet) Take(now time.Time) (out []Delivery) {
	s.Repeat(now)
	n := 0
	for n < len(s.inbox) && !s.inbox[n].due.After(now) {
		n++
	}
	out = slices.Clone(s.inbox[:n])
	s.inbox = slices.Delete(s.inbox, 0, n)
	return out
}

// Drain returns all deliveries, due or not. It is for a caller that decides itself when they
// arrive.
func (s *Subnet) Drain() []Delivery {
	out := s.inbox
	s.inbox = nil
	return out
}

// Ports returns the ports in the order in which they were attached.
func (s *Subnet) Ports() []*Port { return s.ports }

// Running reports whether the subnet manager runs.
func (s *Subnet) Running() bool { return s.running }

// Send sends a MAD from the client at p. The MAD is lost if it is not addressed to the
// subnet manager, if that does not run, or if the link of p is down.
func (s *Subnet) Send(now time.Time, p *Port, m *sa.MAD) {
	toUs := m.Peer.LID == smLID && m.Peer.QPN == ib.QPNGSI && m.Peer.QKey == ib.QKeyGSI
	if !s.running || !p.Up || !toUs || s.lucky(s.Loss) {
		s.Stats.Lost++
		return
	}
	var q wire.Message
	if q.UnmarshalBinary(m.Data[:]) != nil {
		return
	}
	s.Stats.Received++
	if q.Method == wire.MethodReportResp {
		s.reports = slices.DeleteFunc(s.reports, func(r *report) bool { return r.msg.TransactionID == q.TransactionID })
		return
	}
	if a, ok := s.answer(now, p, q); ok {
		s.Stats.Answered++
		s.sendTo(now, p, a)
	}
}

// sendTo sends a MAD to the client at p, unless it is lost.
func (s *Subnet) sendTo(now time.Time, p *Port, m wire.Message) {
	if !p.Up || s.lucky(s.Loss) {
		s.Stats.Lost++
		return
	}
	for range 2 {
		out := &sa.MAD{Peer: sa.Address{LID: smLID, QPN: ib.QPNGSI}}
		m.AppendBinary(out.Data[:0]) // the error is always nil
		s.post(now, p, sa.RecvMAD{MAD: out})
		if !s.lucky(s.Dup) {
			return
		}
	}
}
