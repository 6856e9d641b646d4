package cm

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
)

// host is a Manager and a plain user of it: it accepts every REQ, moves its QPs
// at once, and knows what it was told.
type host struct {
	name string
	gid  ib.GID
	m    *Manager
	next ib.QPN
	last Handle
	up   map[Handle]Params
	held map[ib.QPN]Handle // QPNs not yet released
	done map[Handle]string // how a handle ended
}

// pair is two hosts and the network between them, on virtual time.
type pair struct {
	t     *testing.T
	r     *rand.Rand
	now   time.Time
	hosts [2]*host
	queue []flight
	seq   int
	// Chances of each MAD.
	loss, dup float64
	maxDelay  time.Duration
	steps     int
}

type flight struct {
	at  time.Time
	seq int
	to  int
	mad *verbs.MAD
}

func newPair(t *testing.T, seed uint64, loss, dup float64, maxDelay time.Duration) *pair {
	p := &pair{t: t, r: rand.New(rand.NewPCG(seed, 1)), now: time.Unix(1000, 0), loss: loss, dup: dup, maxDelay: maxDelay}
	for i, gid := range []ib.GID{gidA, gidB} {
		h := &host{name: string(rune('A' + i)), gid: gid, next: ib.QPN(i+1) << 16, up: map[Handle]Params{},
			held: map[ib.QPN]Handle{}, done: map[Handle]string{}}
		h.m = New(Options{GID: gid, CAGUID: ib.GUID(gid[15]), Rand: rand.NewPCG(seed, uint64(i)+2)})
		p.hosts[i] = h
		p.step(i, Listen{ServiceID: service(i)})
	}
	return p
}

func service(i int) serviceid.ID { return serviceid.New(serviceid.RFC, ib.QPN(0x0a+i)) }

func (h *host) newQPN(handle Handle) ib.QPN {
	h.next++
	h.held[h.next] = handle
	return h.next
}

func (p *pair) connect(i int) Handle {
	h := p.hosts[i]
	h.last++
	p.step(i, Connect{Handle: h.last, Remote: p.hosts[1-i].gid, ServiceID: service(1 - i), QPN: h.newQPN(h.last),
		StartingPSN: ib.PSN(p.r.Uint32() & 0xffffff), PathMTU: ib.MTU1024})
	return h.last
}

// step carries out what a host's Manager wants.
func (p *pair) step(i int, ev Event) {
	if p.steps++; p.steps > 100000 {
		p.t.Fatal("it never gets quiet")
	}
	h := p.hosts[i]
	for _, a := range h.m.Step(nil, p.now, ev) {
		switch a := a.(type) {
		case SendMAD:
			n := 1
			if p.r.Float64() < p.dup {
				n = 2
			}
			for range n {
				if p.r.Float64() >= p.loss {
					p.seq++
					p.queue = append(p.queue,
						flight{p.now.Add(time.Millisecond + time.Duration(p.r.Int64N(int64(p.maxDelay)))), p.seq, 1 - i, a.MAD})
				}
			}
		case RequestReceived:
			p.step(i, Accept{Handle: a.Handle, QPN: h.newQPN(a.Handle), StartingPSN: ib.PSN(p.r.Uint32() & 0xffffff),
				RNRRetry: 7})
		case ReplyReceived:
			p.step(i, Ready{Handle: a.Handle})
		case Established:
			if h.done[a.Handle] != "" {
				p.t.Errorf("%s: %v up after %s", h.name, a.Handle, h.done[a.Handle])
			}
			h.up[a.Handle] = a.Params
		case Failed:
			p.ended(h, a.Handle, "failed: "+a.Cause.String())
		case Disconnected:
			p.ended(h, a.Handle, "down: "+a.By.String())
		case Released:
			if h.held[a.QPN] != a.Handle {
				p.t.Errorf("%s: QPN %v of %v released, held by %v", h.name, a.QPN, a.Handle, h.held[a.QPN])
			}
			delete(h.held, a.QPN)
		}
	}
}

func (p *pair) ended(h *host, handle Handle, how string) {
	if was := h.done[handle]; was != "" {
		p.t.Errorf("%s: %v ended twice: %s, %s", h.name, handle, was, how)
	}
	h.done[handle] = how
	delete(h.up, handle)
}

// run lets time pass until nothing is in flight and nobody has a deadline, or
// until a time.
func (p *pair) run(until time.Time) {
	for {
		var at time.Time
		earlier := func(t time.Time) {
			if !t.IsZero() && (at.IsZero() || t.Before(at)) {
				at = t
			}
		}
		for i := range p.hosts {
			earlier(p.hosts[i].m.Deadline())
		}
		for _, f := range p.queue {
			earlier(f.at)
		}
		if at.IsZero() || !until.IsZero() && at.After(until) {
			if !until.IsZero() {
				p.now = until
			}
			return
		}
		p.now = at
		slices.SortFunc(p.queue, func(a, b flight) int {
			if c := a.at.Compare(b.at); c != 0 {
				return c
			}
			return a.seq - b.seq
		})
		for len(p.queue) > 0 && !p.queue[0].at.After(p.now) {
			f := p.queue[0]
			p.queue = p.queue[1:]
			in := *f.mad
			in.Remote, in.Local = f.mad.Local, f.mad.Remote
			p.step(f.to, RecvMAD{&in})
		}
		for i := range p.hosts {
			p.step(i, Wake{})
		}
	}
}

// settle does what data on the QPs does in the end: if all RTUs and the last REJ
// of the passive side were lost, the active one is up alone; its QP runs out of
// retries and its user hangs up.
func (p *pair) settle() {
	for i, h := range p.hosts {
		for _, c := range slices.Sorted(maps.Keys(h.up)) {
			peer := p.hosts[1-i].m.byQPN[h.up[c].RemoteQPN]
			if peer != nil && peer.state == StateEstablished {
				continue
			}
			if c.Incoming() {
				p.t.Errorf("%s: the passive side of %v is up alone", h.name, c)
			}
			p.step(i, Disconnect{Handle: c})
		}
	}
	p.run(time.Time{})
}

// agree checks that both hold the same connections, with the same numbers.
func (p *pair) agree() {
	a, b := p.hosts[0], p.hosts[1]
	if len(a.up) != len(b.up) {
		p.t.Errorf("%d connections here, %d there", len(a.up), len(b.up))
	}
	for h, x := range a.up {
		found := false
		for _, y := range b.up {
			if x.LocalQPN != y.RemoteQPN {
				continue
			}
			found = true
			expect.Equal(p.t, x.RemoteQPN, y.LocalQPN, "%v: x's RemoteQPN", h)
			expect.Equal(p.t, x.SendPSN, y.RecvPSN, "%v: x's SendPSN", h)
			expect.Equal(p.t, x.RecvPSN, y.SendPSN, "%v: x's RecvPSN", h)
			expect.Equal(p.t, x.LocalCommID, y.RemoteCommID, "%v: x's LocalCommID", h)
			expect.Equal(p.t, x.RemoteCommID, y.LocalCommID, "%v: x's RemoteCommID", h)
		}
		if !found {
			p.t.Errorf("%v is up on one side only", h)
		}
	}
}

// TestPair lets two hosts open and close connections over networks of every
// kind, until it is quiet.
func TestPair(t *testing.T) {
	for _, tt := range []struct {
		name      string
		loss, dup float64
		delay     time.Duration
		allUp     bool
	}{
		{"perfect", 0, 0, time.Millisecond, true},
		{"duplicating", 0, 0.5, 50 * time.Millisecond, true},
		{"reordering", 0, 0.3, 2 * time.Second, false},
		{"losing a little", 0.1, 0.1, 20 * time.Millisecond, true},
		{"losing half", 0.5, 0.1, 300 * time.Millisecond, false},
		{"losing nearly all", 0.9, 0, 20 * time.Millisecond, false},
		{"losing all", 1, 0, time.Millisecond, false},
	} {
		for seed := range uint64(40) {
			t.Run(fmt.Sprintf("%s/%d", tt.name, seed), func(t *testing.T) {
				p := newPair(t, seed, tt.loss, tt.dup, tt.delay)
				for n := range 6 { // REQs of both, crossing
					p.connect(n % 2)
					if n == 3 {
						p.run(p.now.Add(100 * time.Millisecond))
					}
				}
				p.run(time.Time{})
				p.settle()
				p.agree() // 4755-3.2-1 4755-3.2-4 4755-3.2-7 4755-3.2-8 4755-3.2-10
				if n := len(p.hosts[0].up); tt.allUp && n != 6 {
					t.Errorf("%d of 6 connections", n)
				}
				// Cancel some that are new, tear the others down from either side or both.
				p.loss = min(p.loss, 0.5)
				p.step(0, Cancel{p.connect(0)})
				p.connect(1)
				for i, h := range p.hosts {
					for _, c := range slices.Sorted(maps.Keys(h.up)) {
						if p.r.IntN(3) != i {
							p.step(i, Disconnect{Handle: c})
						}
					}
				}
				p.run(time.Time{})
				for i, h := range p.hosts { // those that came up meanwhile
					for _, c := range slices.Sorted(maps.Keys(h.up)) {
						p.step(i, Disconnect{Handle: c})
					}
				}
				p.run(time.Time{})
				for _, h := range p.hosts {
					if len(h.up)+len(h.held)+len(h.m.Conns()) != 0 { // 4755-3.4-1 4755-3.4-2
						t.Errorf("%s: left up %v, QPNs %v, on record %+v", h.name, h.up, h.held, h.m.Conns())
					}
				}
			})
		}
	}
}

// TestReplay: one seed, one sequence of actions.
func TestReplay(t *testing.T) {
	trace := func() (out []string) {
		p := newPair(t, 7, 0.3, 0.3, 500*time.Millisecond)
		for n := range 8 {
			p.connect(n % 2)
		}
		for range 400 {
			for _, f := range p.queue {
				out = append(out, fmt.Sprintf("%v %d %x", f.at, f.to, f.mad.Data))
			}
			p.run(p.now.Add(50 * time.Millisecond))
		}
		return out
	}
	if a, b := trace(), trace(); !slices.Equal(a, b) {
		t.Errorf("two runs of one seed differ: %d and %d MADs", len(a), len(b))
	}
}
