package agent

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/membership"
)

// Members says how the hosts of the link are found.
type Members struct {
	Link   string            // its name
	ID     string            // our name on the link; empty: we are not published
	Source membership.Source // a Publisher if we are published
	// Grace is how long members stay on the list when the source, back after a failure, does not name them.
	Grace time.Duration
	// Saved is the list that a process before kept; zero if there is none. Save keeps a list, and may
	// block; nil means that none is kept.
	Saved membership.Snapshot
	Save  func(membership.Snapshot) error
	// Note says why no list is kept although one should be.
	Note string
}

const (
	// saveEvery is the least time between two writes of the list to disk. A list that has not changed
	// is written every confirmEvery, because after a restart its age counts.
	saveEvery    = 5 * time.Second
	confirmEvery = 10 * time.Minute
	// staleAfter is how long a source fails before status warns of it.
	staleAfter = time.Minute
	// heardLately is how recent a member's last word must be for it to count as reachable.
	heardLately = 5 * time.Minute
	// memberEvents is how many events of the source may wait for the driver.
	memberEvents = 16
)

// members is the list of hosts on the link, kept by the driver.
type members struct {
	o       *Members
	log     func(msg string, args ...any)
	tracker *membership.Tracker
	events  chan membership.Event
	failing bool // the log says that the source fails
	told    membership.Member

	save  chan membership.Snapshot // holds the list that is to be written next
	dirty bool                     // the driver's own: the list has changed since last
	last  time.Time                // when a list was handed over to be written
}

func (a *Agent) newMembers() *members {
	m := &members{o: a.opt.Members, log: a.log.Warn, save: make(chan membership.Snapshot, 1)}
	if m.o == nil {
		m.tracker = membership.NewTracker(membership.Options{Source: staticSource})
		m.tracker.Step(a.start, staticList(a.opt.Peers))
		return m
	}
	m.events = make(chan membership.Event, memberEvents)
	m.tracker = membership.NewTracker(membership.Options{Source: m.o.Source.Name(), Grace: m.o.Grace})
	if len(m.o.Saved.Members) > 0 {
		m.tracker.Restore(m.o.Saved)
	}
	return m
}

// staticSource is the name of the list in the configuration.
const staticSource = "static"

func staticList(peers []ib.GID) membership.Listed {
	var l membership.Listed
	for _, g := range peers {
		l.Members = append(l.Members, membership.Member{ID: g.Addr().String(), GIDs: []ib.GID{g}, By: "peers"})
	}
	return l
}

// copies reports whether broadcasts are copied to members: the underlay has no multicast.
func (a *Agent) copies() bool { return a.opt.Members != nil || len(a.opt.Peers) > 0 }

// memberGIDs returns the GIDs to which broadcasts are copied.
func (a *Agent) memberGIDs() []ib.GID {
	s := a.members.tracker.Snapshot()
	return s.GIDs(a.link.GID, a.allows)
}

func (a *Agent) allows(g ib.GID) bool { return a.opt.Allow.IsEmpty() || a.opt.Allow.Contains(g) }

// run asks the source and writes lists to disk, until ctx ends.
func (m *members) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	if m.o.Save != nil {
		wg.Go(func() { m.write(ctx) })
	}
	m.o.Source.Run(ctx, func(ev membership.Event) {
		select {
		case m.events <- ev:
		case <-ctx.Done():
		}
	})
}

// write writes lists as they come.
func (m *members) write(ctx context.Context) {
	for {
		select {
		case s := <-m.save:
			if err := m.o.Save(s); err != nil {
				m.log("the list of members cannot be kept on disk", "err", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// memberEvent handles an event of the source.
func (a *Agent) memberEvent(ev membership.Event) {
	m := a.members
	changed := m.tracker.Step(time.Now(), ev)
	s := m.tracker.Snapshot()
	switch failing := !s.Failing.IsZero() && s.Err != nil; {
	case failing && !m.failing:
		a.log.Warn("members: the source fails, the last list stays", "source", s.Source, "members", len(s.Members),
			"err", s.Err)
		a.hub.publish(a.event("agent", "members", fmt.Sprintf("%s fails: %v", s.Source, s.Err)))
		m.failing = true
	case !failing && m.failing && s.Failing.IsZero():
		a.log.Info("members: the source is back", "source", s.Source, "members", len(s.Members))
		m.failing = false
	}
	if changed {
		a.membersChanged()
	}
}

// memberTick is called every second.
func (a *Agent) memberTick() {
	m := a.members
	if m.o == nil {
		return
	}
	now := time.Now()
	if m.tracker.Expire(now) {
		a.membersChanged()
	}
	a.publishSelf()
	s := m.tracker.Snapshot()
	if m.o.Save == nil || s.At.IsZero() || s.Saved {
		return
	}
	if since := now.Sub(m.last); m.dirty && since >= saveEvery || since >= confirmEvery {
		m.dirty, m.last = false, now
		select {
		case <-m.save: // an older list, which the disk was too slow for
		default:
		}
		m.save <- s
	}
}

// membersChanged passes the present list of members to the machine.
func (a *Agent) membersChanged() {
	s := a.members.tracker.Snapshot()
	a.members.dirty = true
	a.step(ipoib.SetMembers{Peers: a.memberGIDs(), Copies: a.copies(), Hints: a.hints(&s)})
}

// hints returns the GID of each published address, without those of members that we do not talk with.
func (a *Agent) hints(s *membership.Snapshot) map[netip.Addr]ib.GID {
	h := s.Hints()
	for ip, g := range h {
		if !a.allows(g) {
			delete(h, ip)
		}
	}
	return h
}

// setPeers replaces the list of the configuration.
func (a *Agent) setPeers(peers []ib.GID) {
	if a.members.o == nil {
		a.members.tracker = membership.NewTracker(membership.Options{Source: staticSource})
		a.members.tracker.Step(time.Now(), staticList(peers))
	}
	a.membersChanged()
}

// publishSelf publishes our GID, UD QPN and the addresses of the interface, if they have changed.
func (a *Agent) publishSelf() {
	if a.members.o == nil || a.members.o.ID == "" {
		return
	}
	p, ok := a.members.o.Source.(membership.Publisher)
	if !ok {
		return
	}
	self := membership.Member{ID: a.members.o.ID, GIDs: []ib.GID{a.link.GID}, QPN: a.link.QPN}
	for _, ad := range a.m.Status().Addrs {
		if ip := ad.Prefix.Addr(); !ad.Duplicate && len(self.IPs) < membership.MaxIPs {
			self.IPs = append(self.IPs, ip)
		}
	}
	if self.Equal(&a.members.told) {
		return
	}
	a.members.told = self
	p.Publish(self)
}

// A memberList is what the driver knows of the members at one moment.
type memberList struct {
	control.Members
	list  []membership.Member // never changed: a new list is another
	heard map[ib.GID]time.Time
	self  ib.GID
	allow ib.GIDSet
}

// viewMembers answers PathMembers.
func (a *Agent) viewMembers(ctx context.Context) (control.Members, error) {
	l, err := ask(ctx, a, a.memberList)
	if err != nil {
		return l.Members, err
	}
	return l.view(time.Now()), nil
}

// memberList runs on the driver's goroutine.
func (a *Agent) memberList() memberList {
	s, now := a.members.tracker.Snapshot(), time.Now()
	out := control.Members{Version: control.Version, Source: s.Source, Copies: a.copies(), Revision: s.Revision,
		Members: []control.Member{}, Held: s.Held,
		Failures: a.members.tracker.Failures(), Refused: a.members.tracker.Refused(), Published: s.Published,
		Error: textOf(s.Err), Unpublished: textOf(s.Unpublished), Known: true}
	if m := a.members.o; m != nil {
		out.Link, out.ID, out.Note = m.Link, m.ID, m.Note
		out.AgeMS, out.Saved, out.FailingMS = since(now, s.At), s.Saved, since(now, s.Failing)
		out.Known = !s.At.IsZero()
	}
	return memberList{Members: out, list: s.Members, heard: a.m.Heard(), self: a.link.GID, allow: a.opt.Allow}
}

// textOf is the text of err; empty without one.
func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// view is the document of l.
func (l *memberList) view(now time.Time) control.Members {
	out := l.Members
	for _, m := range l.list {
		v := control.Member{ID: m.ID, By: m.By, GIDs: []string{}, IPs: []string{}}
		if m.QPN != 0 {
			v.UDQPN = m.QPN.String()
		}
		var at time.Time
		for _, g := range m.GIDs {
			v.GIDs = append(v.GIDs, g.String())
			if g == l.self {
				v.State = control.MemberSelf
			} else if !l.allow.IsEmpty() && !l.allow.Contains(g) && v.State == "" {
				v.State = control.MemberRefused
			}
			if t := l.heard[g]; t.After(at) {
				at = t
			}
		}
		for _, ip := range m.IPs {
			v.IPs = append(v.IPs, ip.String())
		}
		v.Heard, v.HeardMS = !at.IsZero(), since(now, at)
		switch {
		case v.State != "":
		case !v.Heard:
			v.State = control.MemberSilent
		case now.Sub(at) <= heardLately:
			v.State = control.MemberHeard
		default:
			v.State = control.MemberQuiet
		}
		out.Members = append(out.Members, v)
	}
	return out
}

// memberWarning returns what an operator should look at in the list; empty: nothing.
func (a *Agent) memberWarning() string {
	if a.members.o == nil {
		return ""
	}
	s, now := a.members.tracker.Snapshot(), time.Now()
	why := ""
	if s.Err != nil {
		why = ": " + s.Err.Error()
	}
	switch {
	case s.Unpublished != nil:
		return fmt.Sprintf("other hosts do not find us in %s: %v", s.Source, s.Unpublished)
	case s.At.IsZero() && now.Sub(a.start) > staleAfter:
		return fmt.Sprintf("nobody on the link is known: %s has not answered yet%s", s.Source, why)
	case !s.Failing.IsZero() && now.Sub(s.Failing) > staleAfter && now.Sub(a.start) > staleAfter:
		return fmt.Sprintf("the list of members is %v old: %s fails%s", now.Sub(s.At).Round(time.Second), s.Source, why)
	case s.Failing.IsZero() && s.Err != nil:
		return fmt.Sprintf("not all of the list of members can be used%s", why)
	}
	return ""
}

// claims returns lines that say who publishes an address, for explain.
func (a *Agent) claims(ip netip.Addr) (lines []string) {
	s := a.members.tracker.Snapshot()
	claims := s.Claims(ip)
	for i, m := range claims {
		if i == 4 {
			lines = append(lines, fmt.Sprintf("so do %d more", len(claims)-i))
			break
		}
		lines = append(lines, fmt.Sprintf("%s publishes %v at %v (%s)", m.ID, ip, m.GIDs[0], m.By))
	}
	switch {
	case len(claims) > 1:
		lines = append(lines, fmt.Sprintf("%d members publish it: %s is asked first", len(claims), claims[0].ID))
	case len(claims) == 1 && !slices.Contains(claims[0].GIDs, a.link.GID):
		lines = append(lines, fmt.Sprintf("address resolution asks %s first, and everybody if it does not answer",
			claims[0].ID))
	}
	return lines
}
