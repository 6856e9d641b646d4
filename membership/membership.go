// Package membership knows who is on a link whose underlay carries no multicast: the
// hosts that each get a copy of every broadcast.
//
// A [Source] reports [Event]s: a whole list, that its last list is still right, or why it has none. From
// these a [Tracker] makes the list in use, a [Snapshot], which is always the last good list. That list does
// not shrink because a source fails, returns an empty list after one with members, or has a record that
// cannot be parsed.
//
// This package is the pure part: members, their text and JSON forms, and the Tracker. Package
// membership/source asks files and DNS, membership/etcd asks etcd. To be a member has two effects only: the
// host gets copies of our broadcasts, and we ask it first for an address that it publishes. Whether it
// really has the address is decided by address resolution and the CM, as on any link.
package membership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"ipoibcm/ib"
)

// Bounds of a list.
const (
	MaxMembers = 4096 // of one link
	MaxGIDs    = 4    // of one member
	MaxIPs     = 64   // that one member publishes
	maxIDLen   = 253  // octets: a DNS name
	maxByLen   = 512
)

// A Member is one host of the link.
type Member struct {
	ID   string   // unique on the link
	GIDs []ib.GID // where it gets its copies; at least one
	// IPs are addresses on the link that the member publishes as its own. They are hints, and there may
	// be none.
	IPs []netip.Addr
	QPN ib.QPN // of its UD queue pair; zero if not published
	By  string // where it was found: the key, the line, the name that was looked up
}

// check returns what is wrong with m, nil if nothing is.
func (m *Member) check() error {
	switch {
	case !ValidID(m.ID):
		return fmt.Errorf("name %q: want 1 to %d of letters, digits and . : _ -", m.ID, maxIDLen)
	case len(m.GIDs) == 0:
		return fmt.Errorf("%s has no GID", m.ID)
	case len(m.GIDs) > MaxGIDs:
		return fmt.Errorf("%s has %d GIDs, at most %d can be", m.ID, len(m.GIDs), MaxGIDs)
	case len(m.IPs) > MaxIPs:
		return fmt.Errorf("%s publishes %d addresses, at most %d can be", m.ID, len(m.IPs), MaxIPs)
	case !m.QPN.Valid():
		return fmt.Errorf("%s has the QPN %d, which has more than 24 bits", m.ID, uint32(m.QPN))
	}
	for _, g := range m.GIDs {
		if a := g.Addr(); a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() {
			return fmt.Errorf("%s has the GID %v, which no host can have", m.ID, g)
		}
	}
	for _, a := range m.IPs {
		if !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.Zone() != "" || a.Is4In6() {
			return fmt.Errorf("%s publishes the address %v, which no host can have", m.ID, a)
		}
	}
	return nil
}

// ValidID reports whether a member, or a link, can have this name.
func ValidID(s string) bool {
	return len(s) > 0 && len(s) <= maxIDLen && strings.IndexFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("._-:", r))
	}) < 0
}

// Equal reports whether all fields of m and o are equal.
func (m *Member) Equal(o *Member) bool {
	return m.ID == o.ID && m.QPN == o.QPN && m.By == o.By && slices.Equal(m.GIDs, o.GIDs) && slices.Equal(m.IPs, o.IPs)
}

// A Source finds out who is on the link.
type Source interface {
	// Name returns the source as its user wrote it, without secrets.
	Name() string
	// Run calls tell for each event until ctx ends. It goes on after every failure.
	Run(ctx context.Context, tell func(Event))
}

// A Publisher is a Source in which this host can publish a record of itself.
type Publisher interface {
	Source
	// Publish replaces the record of us that others find. It does not block. The source fills in the
	// ID.
	Publish(Member)
}

// An Event is what a Source reports.
type Event interface{ event() }

// Events.
type (
	// Listed is the whole list as it is now.
	Listed struct {
		Members  []Member
		Revision uint64 // of the source; zero if it has none
		Bad      []Bad  // members whose records cannot be parsed
	}
	// Current says that the last list is still the whole list.
	Current struct{}
	// Failed reports that the source has no list at present, and why.
	Failed struct{ Err error }
	// Published reports whether others find us at the source: Err is nil if they do, else the reason why
	// not.
	Published struct{ Err error }
)

func (Listed) event()    {}
func (Current) event()   {}
func (Failed) event()    {}
func (Published) event() {}

// A Bad is a member on the list whose record cannot be parsed.
type Bad struct {
	ID  string
	Err error
}

// A Snapshot is the list in use.
type Snapshot struct {
	Source   string
	Members  []Member  // by ID
	Revision uint64    // of the source; zero if it has none
	At       time.Time // when the list was last known to be right; zero: never
	Saved    bool      // the list is from before the start, and the source has not confirmed it yet
	Failing  time.Time // since when the source fails; zero if it does not
	Err      error     // why the source fails, or what of the list cannot be used
	// Published is set if others find us at the source. Unpublished is the reason if they do not.
	Published   bool
	Unpublished error
	// Held are members that the source does not name any more. They stay for a while, because the
	// source had failed before.
	Held []string
}

// errEmpty is the failure of a source that returns an empty list after one with members.
var errEmpty = errors.New("the source names nobody any more; its last list stays, and a restart without " +
	"state_dir takes an empty one")

// Options configures a Tracker.
type Options struct {
	Source string // its name
	// Grace is how long the Tracker keeps members that are missing from the first list after a failure of
	// the source: they too may be about to return. Zero means that it drops them at once.
	Grace time.Duration
}

// A Tracker keeps the list in use. It is not safe for concurrent use.
type Tracker struct {
	o    Options
	now  Snapshot
	held map[string]time.Time // members that are missing, and when each is dropped
	last []Member             // the last list of the source, without held members
	back time.Time            // until when members that are missing are held
	// returned is set if the source works again after a failure, and has reported no list since. A member
	// that the next list lacks may be about to return. A member that the next list has and a later one
	// lacks is gone.
	returned bool

	failures, refused uint64
}

// NewTracker returns a Tracker with an empty list.
func NewTracker(o Options) *Tracker {
	return &Tracker{o: o, now: Snapshot{Source: o.Source}, held: map[string]time.Time{}}
}

// Restore sets the list to one that was saved before the start.
func (t *Tracker) Restore(s Snapshot) {
	t.now.Members, t.now.Revision, t.now.At, t.now.Saved = bounded(s.Members), s.Revision, s.At, true
	t.last = t.now.Members
	t.now.Failing = s.At // since then it is not known to be right
}

// Snapshot returns the list. The caller must not change it.
func (t *Tracker) Snapshot() Snapshot { return t.now }

// Failures returns how many times the source has failed.
func (t *Tracker) Failures() uint64 { return t.failures }

// Refused returns how many records of members could not be used, counted in each list.
func (t *Tracker) Refused() uint64 { return t.refused }

// Step applies ev at time now and reports whether the list has changed.
func (t *Tracker) Step(now time.Time, ev Event) (changed bool) {
	switch ev := ev.(type) {
	case Listed:
		if err := ev.useless(); err != nil && len(t.now.Members) > 0 {
			t.refused += uint64(len(ev.Members))
			t.fail(now, err)
			return false
		}
		return t.listed(now, ev)
	case Current:
		if t.now.At.IsZero() || t.now.Saved {
			return false // no source has given a list yet that could be current
		}
		t.good(now)
		return t.Expire(now)
	case Failed:
		t.fail(now, ev.Err)
	case Published:
		t.now.Published, t.now.Unpublished = ev.Err == nil, ev.Err
	default:
		panic(fmt.Sprintf("membership: unknown event %T", ev)) // our bug
	}
	return false
}

// useless returns an error if the list has no member that can be used. A record that cannot be read stands
// for the member that had it before.
func (l Listed) useless() error {
	if len(l.Bad) > 0 {
		return nil
	}
	err := errEmpty
	for _, m := range l.Members {
		bad := m.check()
		if bad == nil {
			return nil
		}
		err = fmt.Errorf("the source names nobody who can be used; its last list stays: %w", bad)
	}
	return err
}

func (t *Tracker) fail(now time.Time, err error) {
	t.failures++
	if t.now.Failing.IsZero() {
		t.now.Failing = now
	}
	t.now.Err = err
}

// good notes that the source works. After a failure, members that the next list lacks are held for a while.
func (t *Tracker) good(now time.Time) {
	if !t.now.Failing.IsZero() {
		t.back, t.returned = now.Add(t.o.Grace), true
		for id := range t.held {
			t.held[id] = t.back
		}
		t.now.Failing, t.now.Err = time.Time{}, nil
	}
	t.now.At, t.now.Saved = now, false
}

func (t *Tracker) listed(now time.Time, ev Listed) bool {
	t.good(now)
	t.now.Revision, t.now.Err = ev.Revision, nil
	list := slices.Clone(ev.Members)
	for _, b := range ev.Bad {
		t.refused++
		t.now.Err = fmt.Errorf("%s: %w", b.ID, b.Err)
		if !ValidID(b.ID) { // whoever may write to the cluster chose it
			t.now.Err = fmt.Errorf("%q: %w", b.ID, b.Err)
		}
		if old := find(t.now.Members, b.ID); old != nil {
			list = append(list, *old)
		}
	}
	list = slices.DeleteFunc(list, func(m Member) bool {
		err := m.check()
		if err != nil {
			t.refused++
			t.now.Err = err
		}
		return err != nil
	})
	if len(list) > MaxMembers {
		t.refused += uint64(len(list) - MaxMembers)
		t.now.Err = fmt.Errorf("%d members, at most %d can be: the last by name are left out", len(list), MaxMembers)
	}
	t.last = bounded(list)
	for _, m := range t.now.Members {
		_, held := t.held[m.ID]
		if find(t.last, m.ID) == nil && !held && t.returned && now.Before(t.back) {
			t.held[m.ID] = t.back
		}
	}
	t.returned = false
	return t.settle(now)
}

// Expire drops the members that have been missing for long enough. The driver calls it every second or so.
func (t *Tracker) Expire(now time.Time) (changed bool) {
	if len(t.held) == 0 || !t.now.Failing.IsZero() { // no member goes while the source fails
		return false
	}
	return t.settle(now)
}

// settle makes the list from the members that the source names and those that are held. It reports whether
// the list has changed.
func (t *Tracker) settle(now time.Time) bool {
	list := slices.Clone(t.last)
	t.now.Held = nil
	for id, until := range t.held {
		old := find(t.now.Members, id)
		if old == nil || find(t.last, id) != nil || !now.Before(until) {
			delete(t.held, id)
			continue
		}
		list = append(list, *old)
		t.now.Held = append(t.now.Held, id)
	}
	slices.Sort(t.now.Held)
	list = bounded(list)
	if slices.EqualFunc(list, t.now.Members, func(a, b Member) bool { return a.Equal(&b) }) {
		return false
	}
	t.now.Members = list
	return true
}

// bounded returns a list sorted by ID, with one member for each ID and MaxMembers at most.
func bounded(list []Member) []Member {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	list = slices.CompactFunc(list, func(a, b Member) bool { return a.ID == b.ID })
	return list[:min(len(list), MaxMembers)]
}

// find returns the member of a sorted list that has the ID id, nil if there is none.
func find(list []Member, id string) *Member {
	i, ok := slices.BinarySearchFunc(list, id, func(m Member, id string) int { return cmp.Compare(m.ID, id) })
	if !ok {
		return nil
	}
	return &list[i]
}

// GIDs returns the GIDs of all members, each once, in the order of the list. It leaves out the GID except,
// and those for which allow returns false.
func (s *Snapshot) GIDs(except ib.GID, allow func(ib.GID) bool) []ib.GID {
	seen := map[ib.GID]bool{except: true}
	var out []ib.GID
	for _, m := range s.Members {
		for _, g := range m.GIDs {
			if !seen[g] && allow(g) {
				seen[g] = true
				out = append(out, g)
			}
		}
	}
	return out
}

// Hints returns for each published address the first GID of the member that publishes it. If several
// members publish the same address, the first by name counts; Claims returns all.
func (s *Snapshot) Hints() map[netip.Addr]ib.GID {
	out := map[netip.Addr]ib.GID{}
	for _, m := range s.Members {
		for _, a := range m.IPs {
			if _, taken := out[a]; !taken {
				out[a] = m.GIDs[0]
			}
		}
	}
	return out
}

// Claims returns the members that publish an address.
func (s *Snapshot) Claims(a netip.Addr) (out []Member) {
	for _, m := range s.Members {
		if slices.Contains(m.IPs, a) {
			out = append(out, m)
		}
	}
	return out
}
