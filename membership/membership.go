// Package membership knows who is on a link whose underlay carries no multicast: the
// hosts that each get a copy of every broadcast.
//
// A [Source] tells what it finds as [Event]s: a whole list, that the last one is still
// right, or why there is none. A [Tracker] makes of those the list that counts, a
// [Snapshot]: always the last good one. A source that fails, that answers nothing after it had
// answered something, or one of whose records cannot be read, shrinks no list.
//
// This package is the pure part: members, their text and JSON forms, and the Tracker.
// Package membership/source asks files and DNS, membership/etcd asks etcd. Who is on the
// list is believed in one respect only: they get copies of our broadcasts, and an address they
// publish is asked of them first. Whether they are who they say is for address resolution
// and the CM, as on any link.
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
	// IPs are addresses on the link that it publishes as its own: hints, which may be
	// none.
	IPs []netip.Addr
	QPN ib.QPN // of its UD queue pair; zero if not published
	By  string // who says so: the key, the line, the name that was looked up
}

// check says what is wrong with m.
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

// Equal reports whether m and o say the same.
func (m *Member) Equal(o *Member) bool {
	return m.ID == o.ID && m.QPN == o.QPN && m.By == o.By && slices.Equal(m.GIDs, o.GIDs) && slices.Equal(m.IPs, o.IPs)
}

// A Source finds out who is on the link.
type Source interface {
	// Name is the source as its user wrote it, without secrets.
	Name() string
	// Run tells events until ctx ends. It goes on after every failure.
	Run(ctx context.Context, tell func(Event))
}

// A Publisher is a Source to which we can say that we are on the link too.
type Publisher interface {
	Source
	// Publish replaces what others are to find of us. It waits for nothing. Its ID is the source's
	// to know.
	Publish(Member)
}

// An Event is what a source tells.
type Event interface{ event() }

// Events.
type (
	// Listed is the whole list as it is now.
	Listed struct {
		Members  []Member
		Revision uint64 // of the source; zero if it has none
		Bad      []Bad  // members whose records cannot be read
	}
	// Current says that the last list is still the whole list.
	Current struct{}
	// Failed says that the source cannot say who is there.
	Failed struct{ Err error }
	// Published says whether others find us there, and if not why.
	Published struct{ Err error }
)

func (Listed) event()    {}
func (Current) event()   {}
func (Failed) event()    {}
func (Published) event() {}

// A Bad member is there, and what it says of itself cannot be read.
type Bad struct {
	ID  string
	Err error
}

// A Snapshot is the list that counts.
type Snapshot struct {
	Source   string
	Members  []Member  // by ID
	Revision uint64    // of the source; zero if it has none
	Changed  time.Time // when Members were last others
	At       time.Time // when the list was last known to be right; zero: never
	Saved    bool      // it is of before the start, and no source has confirmed it since
	Failing  time.Time // since when the source fails; zero if it does not
	Err      error     // why, or what of the list cannot be used
	// Published says that others find us there; Unpublished why they do not.
	Published   bool
	Unpublished error
	// Held are members that the source does not name any more, and that stay for a
	// while because it had failed before.
	Held []string
}

// errEmpty is the failure of a source that knew somebody and knows nobody any more.
var errEmpty = errors.New("the source names nobody any more; its last list stays, and a restart without " +
	"state_dir takes an empty one")

// Options configures a Tracker.
type Options struct {
	Source string // its name
	// Grace is how long members stay that are missing when the source is back after a
	// failure: they may be on their way back too. Zero means that they go at once.
	Grace time.Duration
}

// A Tracker keeps the list that counts. It is not safe for concurrent use.
type Tracker struct {
	o    Options
	now  Snapshot
	held map[string]time.Time // members that are missing, and when they go
	last []Member             // the list without those
	back time.Time            // until when those who are missing are held
	// returned says that no list has come since the source failed: who is missing in
	// the next may be on his way back. Who is in that and goes later is gone.
	returned bool

	failures, refused uint64
}

// NewTracker returns a Tracker with an empty list.
func NewTracker(o Options) *Tracker {
	return &Tracker{o: o, now: Snapshot{Source: o.Source}, held: map[string]time.Time{}}
}

// Restore takes a list of before the start.
func (t *Tracker) Restore(s Snapshot) {
	t.now.Members, t.now.Revision, t.now.At, t.now.Changed, t.now.Saved = bounded(s.Members), s.Revision, s.At,
		s.Changed, true
	t.last = t.now.Members
	t.now.Failing = s.At // it is not known to be right since
}

// Snapshot returns the list. The caller must not change it.
func (t *Tracker) Snapshot() Snapshot { return t.now }

// Failures counts what failed, and Refused the members that could not be used.
func (t *Tracker) Failures() uint64 { return t.failures }

// Refused counts the records of members that could not be used.
func (t *Tracker) Refused() uint64 { return t.refused }

// Step takes an event at time now and reports whether the list has changed.
func (t *Tracker) Step(now time.Time, ev Event) (changed bool) {
	switch ev := ev.(type) {
	case Listed:
		if len(ev.Members)+len(ev.Bad) == 0 && len(t.now.Members) > 0 {
			t.fail(now, errEmpty)
			return false
		}
		return t.listed(now, ev)
	case Current:
		if t.now.At.IsZero() || t.now.Saved {
			return false // of what list?
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

func (t *Tracker) fail(now time.Time, err error) {
	t.failures++
	if t.now.Failing.IsZero() {
		t.now.Failing = now
	}
	t.now.Err = err
}

// good notes that the source works. What is missing right after it did not work is held for
// a while.
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

// Expire lets those go that have been missing for long enough. The driver calls it
// every second or so.
func (t *Tracker) Expire(now time.Time) (changed bool) {
	if len(t.held) == 0 || !t.now.Failing.IsZero() { // nobody goes while the source fails
		return false
	}
	return t.settle(now)
}

// settle makes the list of those who are named and those who are held.
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
	t.now.Members, t.now.Changed = list, now
	return true
}

// bounded sorts a list, and leaves out what is there twice or too much.
func bounded(list []Member) []Member {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	list = slices.CompactFunc(list, func(a, b Member) bool { return a.ID == b.ID })
	return list[:min(len(list), MaxMembers)]
}

// find returns the member of a sorted list, nil if it is not there.
func find(list []Member, id string) *Member {
	i, ok := slices.BinarySearchFunc(list, id, func(m Member, id string) int { return cmp.Compare(m.ID, id) })
	if !ok {
		return nil
	}
	return &list[i]
}

// GIDs returns the GIDs of all members, each once, those of except and those that
// allow refuses left out. They come in the order of the list.
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

// Hints returns at which GID each published address is. Where two members publish one
// the first by name counts; Claims shows all.
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
