package simsm

import (
	"math/rand/v2"
	"time"

	"ipoibcm/ib"
	"ipoibcm/sa"
)

// A World is a subnet with clients at its ports, on virtual time. One seed decides
// everything.
type World struct {
	*Subnet
	Now   time.Time
	Hosts []*Host
	// Seen, if not nil, is called with every action of a client but SendMAD.
	Seen func(h *Host, a sa.Action)
}

// A Host is a port with its client.
type Host struct {
	*Port
	Client *sa.Client
}

// NewWorld returns a subnet with n hosts, whose ports have GUIDs from 1 up.
func NewWorld(n int, opt Options, clients sa.Options) *World {
	w := &World{Subnet: New(opt), Now: time.Unix(1000, 0)}
	for i := range n {
		c := clients
		c.Rand = rand.NewPCG(opt.Seed, uint64(i))
		w.Hosts = append(w.Hosts, &Host{w.AddPort(ib.GUID(i + 1)), sa.New(c)})
	}
	for _, h := range w.Hosts {
		w.Step(h, sa.SetPort{Port: h.Port.Now()})
	}
	return w
}

// Step gives the client of h an event, and gives the subnet the MADs that the client
// sends.
func (w *World) Step(h *Host, ev sa.Event) {
	for _, a := range h.Client.Step(nil, w.Now, ev) {
		if m, ok := a.(sa.SendMAD); ok {
			w.Send(w.Now, h.Port, m.MAD)
			continue
		}
		if w.Seen != nil {
			w.Seen(h, a)
		}
	}
}

// Run lets time pass until done returns true, but no longer than d. It reports whether
// done returned true. If done is nil, time passes for d.
func (w *World) Run(d time.Duration, done func() bool) bool {
	end := w.Now.Add(d)
	for done == nil || !done() {
		next := w.Due()
		for _, h := range w.Hosts {
			if due := h.Client.Deadline(); !due.IsZero() && (next.IsZero() || due.Before(next)) {
				next = due
			}
		}
		if next.IsZero() || next.After(end) {
			w.Now = end
			return done != nil && done()
		}
		if next.After(w.Now) {
			w.Now = next
		}
		for _, dl := range w.Take(w.Now) {
			for _, h := range w.Hosts {
				if h.Port == dl.To {
					w.Step(h, dl.Event)
				}
			}
		}
		for _, h := range w.Hosts {
			if due := h.Client.Deadline(); !due.IsZero() && !due.After(w.Now) {
				w.Step(h, sa.Wake{})
			}
		}
	}
	return true
}
