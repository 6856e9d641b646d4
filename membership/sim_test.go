package membership

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
)

// A model of etcd as a source meets it: keys under leases, a revision, and a time in which it
// answers nobody.
type simStore struct {
	keys     map[string]time.Time // to when the lease ends
	revision uint64
	answers  bool
}

// A simHost is a host with its source: it is cut off or not, and lists again when it is not any more.
type simHost struct {
	id        string
	live, cut bool
	tr        *Tracker
	seen      uint64    // revision of its list
	listed    bool      // since it was last cut off
	again     time.Time // when it tries again
	next      time.Time // when it renews its lease and asks for a sign of life
}

const (
	simLease = 10 * time.Second
	simTick  = 200 * time.Millisecond
)

// Hosts come and go while etcd answers nobody, or not all of them: no list shrinks while its
// source fails, two live hosts have each other within 5 s of the last fault, and a dead one is on no list
// after its lease and 2 s.
func TestManyHosts(t *testing.T) {
	n, seeds := long.Of(30, 1000), long.Of(4, 1)
	for seed := range uint64(seeds) {
		r := rand.New(rand.NewPCG(seed, 3))
		now := start
		s := &simStore{keys: map[string]time.Time{}, answers: true}
		hosts := make([]*simHost, n)
		for i := range hosts {
			hosts[i] = &simHost{id: fmt.Sprintf("h%04d", i)}
			if i%4 != 0 {
				hosts[i].boot(now, r)
			}
		}
		run := func(d time.Duration) {
			for end := now.Add(d); now.Before(end); now = now.Add(simTick) {
				s.tick(now)
				for _, h := range hosts {
					h.tick(t, s, now, r)
				}
			}
		}
		run(20 * time.Second)
		for range long.Of(8, 4) {
			s.answers = r.IntN(3) > 0
			for _, h := range hosts {
				h.cut = r.IntN(3) == 0
			}
			run(time.Duration(r.IntN(25)) * time.Second)
			for range 1 + r.IntN(n/10) {
				h := hosts[r.IntN(n)]
				if h.live {
					h.live = false
				} else {
					h.boot(now, r)
				}
			}
			run(time.Duration(r.IntN(5)) * time.Second)
			if !s.answers { // another leader gives every lease its full time
				s.answers = true
				for id := range s.keys {
					s.keys[id] = now.Add(simLease)
				}
			}
			for _, h := range hosts {
				h.cut = false
			}
			run(5 * time.Second)
			forKnown(hosts, true, func(h, o *simHost, known bool) {
				if !known {
					t.Fatalf("seed %d: %s does not know %s 5s after the last fault: %q", seed, h.id, o.id, ids(h.tr.Snapshot()))
				}
			})
			run(simLease + 2*time.Second - 5*time.Second)
			forKnown(hosts, false, func(h, o *simHost, known bool) {
				if known {
					t.Fatalf("seed %d: %s knows %s, which died, %v after the last fault", seed, h.id, o.id, simLease+2*time.Second)
				}
			})
		}
	}
}

// forKnown calls f for each host that lives and each host that does or does not: does the first know the second?
func forKnown(hosts []*simHost, live bool, f func(h, o *simHost, known bool)) {
	for _, h := range hosts {
		for _, o := range hosts {
			if h.live && o.live == live {
				f(h, o, find(h.tr.Snapshot().Members, o.id) != nil)
			}
		}
	}
}

func (s *simStore) tick(now time.Time) {
	if !s.answers {
		return // a cluster without a leader ends no lease
	}
	for id, end := range s.keys {
		if now.After(end) {
			delete(s.keys, id)
			s.revision++
		}
	}
}

func (h *simHost) boot(now time.Time, r *rand.Rand) {
	var saved Snapshot
	if h.tr != nil {
		saved = h.tr.Snapshot()
	}
	*h = simHost{id: h.id, live: true, cut: h.cut, tr: NewTracker(Options{Source: "model", Grace: simLease / 2})}
	if len(saved.Members) > 0 && r.IntN(2) == 0 {
		h.tr.Restore(saved)
	}
	h.again = now.Add(time.Duration(r.IntN(1000)) * time.Millisecond)
}

func (h *simHost) tick(t *testing.T, s *simStore, now time.Time, r *rand.Rand) {
	if !h.live {
		return
	}
	before := len(h.tr.Snapshot().Members)
	switch {
	case h.cut || !s.answers:
		if h.listed || !now.Before(h.again) {
			h.tr.Step(now, Failed{errTest})
			h.listed, h.again = false, now.Add(time.Duration(500+r.IntN(1500))*time.Millisecond)
		}
	case !h.listed && now.Before(h.again):
	default:
		if !now.Before(h.next) {
			if _, there := s.keys[h.id]; !there {
				s.revision++
			}
			s.keys[h.id], h.next = now.Add(simLease), now.Add(simLease/3)
			h.tr.Step(now, Current{})
		}
		if !h.listed || h.seen != s.revision {
			h.tr.Step(now, s.list())
			h.listed, h.seen = true, s.revision
		}
	}
	h.tr.Expire(now)
	if after := h.tr.Snapshot(); !after.Failing.IsZero() && len(after.Members) < before {
		t.Fatalf("%s: its source fails, and its list went from %d to %d", h.id, before, len(after.Members))
	}
}

func (s *simStore) list() Listed {
	l := Listed{Revision: s.revision}
	for id := range s.keys {
		l.Members = append(l.Members, Member{ID: id, GIDs: []ib.GID{gid("fe80::1")}})
	}
	return l
}
