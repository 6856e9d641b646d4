// Package subnet runs the client of subnet administration (package sa) against two
// administrators: the simulated one of internal/simsm on virtual time, and opensm on
// the fabric simulator ibsim. The tests are the same, so that what the other tests
// rest on is what opensm does.
//
// opensm needs no privilege. Where it or ibsim is missing its half is skipped, and
// says so.
package subnet

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/ibsim"
	"ipoibcm/internal/simsm"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// A host is a port with its client, and what the client has told.
type host struct {
	name   string
	client *sa.Client
	told   []sa.Action
	port   func() sa.Port

	sim  *simsm.Host
	real *ibsim.Client
}

// gid is the port's.
func (h *host) gid() ib.GID { return h.port().GID }

// A fabric is a subnet with hosts A to D. opensm is at A too.
type fabric interface {
	host(name string) *host
	// step gives the client of h an event.
	step(h *host, ev sa.Event)
	// run lets time pass until done, or for d, and reports whether done became true.
	run(d time.Duration, done func() bool) bool
	stopSM()
	// startSM starts it anew. Ports are not asked to register again.
	startSM()
	setLink(h *host, up bool)
	// setLoss has that share of MADs lost, and as many come twice, either way.
	setLoss(share float64)
}

// The partitions that a test may have.
const (
	byDefault  = iota // everybody in 0x7fff, which has a broadcast group
	noGroup           // it has none
	mtu4096           // its group's MTU is larger than that of the ports
	partitions        // and another, 0x8001: B and C full members, D limited, A none
)

// both runs a test against both administrators.
func both(t *testing.T, conf int, opt sa.Options, test func(t *testing.T, f fabric)) {
	opt.Spread = -1
	t.Run("simulated", func(t *testing.T) { test(t, newSimulated(conf, opt)) })
	t.Run("opensm", func(t *testing.T) {
		if err := ibsim.Missing(); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
		test(t, newReal(t, conf, opt))
	})
}

// simulated is the fabric of internal/simsm.
type simulated struct {
	world *simsm.World
	hosts map[string]*host
}

func newSimulated(conf int, opt sa.Options) *simulated {
	net := simsm.Options{Partitions: simPartitions(conf), Quiet: true}
	s := &simulated{simsm.NewWorld(4, net, opt), map[string]*host{}}
	for i, h := range s.world.Hosts {
		name := string(rune('A' + i))
		s.hosts[name] = &host{name: name, client: h.Client, port: h.Now, sim: h}
	}
	s.world.Seen = func(h *simsm.Host, a sa.Action) {
		for _, x := range s.hosts {
			if x.sim == h {
				x.told = append(x.told, a)
			}
		}
	}
	return s
}

// simPartitions are those of a test as internal/simsm has them.
func simPartitions(conf int) []simsm.Partition {
	def := simsm.Partition{PKey: ib.DefaultPKey, Group: conf != noGroup, Params: simsm.DefaultParams}
	if conf == mtu4096 {
		def.Params.MTU = ib.MTU4096
	}
	all := []simsm.Partition{def}
	if conf == partitions {
		all = append(all, simsm.Partition{PKey: 0x8001, Group: true, Params: simsm.DefaultParams,
			Full: []ib.GUID{2, 3}, Limited: []ib.GUID{4}})
	}
	return all
}

func (s *simulated) setLoss(share float64)                      { s.world.Loss, s.world.Dup = share, share }
func (s *simulated) host(name string) *host                     { return s.hosts[name] }
func (s *simulated) step(h *host, ev sa.Event)                  { s.world.Step(h.sim, ev) }
func (s *simulated) run(d time.Duration, done func() bool) bool { return s.world.Run(d, done) }
func (s *simulated) stopSM()                                    { s.world.Stop() }
func (s *simulated) startSM()                                   { s.world.Start(s.world.Now) }
func (s *simulated) setLink(h *host, up bool)                   { s.world.SetLink(s.world.Now, h.sim.Port, up) }

// real is the fabric of opensm and ibsim.
type real struct {
	t     *testing.T
	sim   *ibsim.Fabric
	conf  string
	hosts map[string]*host
	order []*host
	inbox chan received
	loss  float64
	luck  *rand.Rand
}

type received struct {
	host *host
	mad  *sa.MAD
}

// partitionsConf are those of a test as opensm has them.
var partitionsConf = map[int]string{
	noGroup: "Default=0x7fff : ALL=full ;\n",
	mtu4096: "Default=0x7fff, ipoib, mtu=5, rate=7 : ALL=full ;\n",
	partitions: "Default=0x7fff, ipoib : ALL=full ;\n" +
		"other=0x8001, ipoib, defmember=full : 0x2c90000b00001, 0x2c90000c00001 ;\n" +
		"other=0x8001 : 0x2c90000d00001=limited ;\n",
}

func newReal(t *testing.T, conf int, opt sa.Options) *real {
	text := partitionsConf[conf]
	r := &real{t: t, sim: ibsim.Start(t, text), conf: text, hosts: map[string]*host{}, inbox: make(chan received, 64),
		luck: rand.New(rand.NewPCG(1, 2))}
	for i, name := range []string{"A", "B", "C", "D"} {
		c, err := r.sim.Dial("host" + name)
		if err != nil {
			t.Fatal(err)
		}
		opt.Rand = rand.NewPCG(uint64(time.Now().UnixNano()), uint64(i))
		h := &host{name: name, client: sa.New(opt), real: c}
		h.port = func() sa.Port {
			p, err := c.Port()
			if err != nil {
				t.Fatal(err)
			}
			p.SubnetTimeout = 14
			return p
		}
		r.hosts[name] = h
		r.order = append(r.order, h)
		ended := receiveAll(c, func(m *sa.MAD) { r.inbox <- received{h, m} })
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			for {
				select {
				case <-r.inbox:
				case <-ended:
					return
				}
			}
		})
		r.step(h, sa.SetPort{Port: h.port()})
	}
	return r
}

// receiveAll gives f what c receives until c is closed; then the channel is closed.
func receiveAll(c *ibsim.Client, f func(*sa.MAD)) <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			m, err := c.Receive()
			switch {
			case err == ibsim.ErrUndelivered: // as if it were lost
			case err != nil:
				return
			default:
				f(m)
			}
		}
	}()
	return ended
}

func (r *real) host(name string) *host { return r.hosts[name] }

func (r *real) step(h *host, ev sa.Event) {
	for _, a := range h.client.Step(nil, time.Now(), ev) {
		if m, ok := a.(sa.SendMAD); ok {
			for range r.copies() {
				if err := h.real.Send(m.MAD); err != nil {
					r.t.Fatal(err)
				}
			}
			continue
		}
		h.told = append(h.told, a)
	}
}

func (r *real) run(d time.Duration, done func() bool) bool {
	end := time.Now().Add(d)
	for done == nil || !done() {
		next := end
		for _, h := range r.order {
			if due := h.client.Deadline(); !due.IsZero() && due.Before(next) {
				next = due
			}
		}
		select {
		case in := <-r.inbox:
			for range r.copies() {
				r.step(in.host, sa.RecvMAD{MAD: in.mad})
			}
			continue
		case <-time.After(time.Until(next)):
		}
		if !time.Now().Before(end) {
			return done != nil && done()
		}
		for _, h := range r.order {
			r.step(h, sa.Wake{})
		}
	}
	return true
}

func (r *real) setLoss(share float64) { r.loss = share }

// copies is how often a MAD arrives.
func (r *real) copies() int {
	switch x := r.luck.Float64(); {
	case x < r.loss:
		return 0
	case x < 2*r.loss:
		return 2
	}
	return 1
}

func (r *real) stopSM() { r.sim.StopSM() }

func (r *real) startSM() {
	if err := r.sim.StartSM(r.conf); err != nil {
		r.t.Fatal(err)
	}
}

func (r *real) setLink(h *host, up bool) {
	if err := r.sim.SetLink("host"+h.name, up); err != nil {
		r.t.Fatal(err)
	}
}

// What tests ask for.

var broadcast = mgid(0xffff, 0xffffffff)

// mgid returns an IPv4 MGID of link-local scope (RFC 4391 section 4).
func mgid(p ib.PKey, low uint32) ib.GID {
	return ib.GID{0: 0xff, 1: 0x12, 2: 0x40, 3: 0x1b, 4: byte(p >> 8), 5: byte(p),
		12: byte(low >> 24), 13: byte(low >> 16), 14: byte(low >> 8), 15: byte(low)}
}

func join(g ib.GID, how wire.JoinState) sa.Join {
	return sa.Join{MGID: g, PKey: ib.DefaultPKey, State: how}
}

func create(g ib.GID, how wire.JoinState) sa.Join {
	return sa.Join{MGID: g, PKey: ib.DefaultPKey, State: how, Create: true, Params: simsm.DefaultParams}
}

// soon is the longest that a test waits for what happens in milliseconds, as a rule.
const soon = 10 * time.Second

// outcome gives h an event and returns the first action that it is told then.
func outcome(t *testing.T, f fabric, h *host, ev sa.Event) sa.Action {
	t.Helper()
	h.told = nil
	f.step(h, ev)
	return next(t, f, h)
}

// next returns the next action that h is told, StateChanged and Flushed aside.
func next(t *testing.T, f fabric, h *host) (a sa.Action) {
	t.Helper()
	f.run(soon, func() bool {
		for len(h.told) > 0 {
			a, h.told = h.told[0], h.told[1:]
			switch a.(type) {
			case sa.StateChanged, sa.Flushed:
			default:
				return true
			}
		}
		a = nil
		return false
	})
	return a
}

// expectJoined is outcome for a join that succeeds.
func expectJoined(t *testing.T, f fabric, h *host, ev sa.Join) wire.MCMemberRecord {
	t.Helper()
	a := outcome(t, f, h, ev)
	j, ok := a.(sa.Joined)
	if !ok {
		t.Fatalf("host %s joins %v: got %s, want Joined", h.name, ev.MGID, text(a))
	}
	return j.Group
}

// expectRefused is outcome for a join that fails.
func expectRefused(t *testing.T, f fabric, h *host, ev sa.Join, want wire.Status, noGroup bool) {
	t.Helper()
	a := outcome(t, f, h, ev)
	j, ok := a.(sa.JoinFailed)
	if !ok {
		t.Fatalf("host %s joins %v: got %s, want JoinFailed", h.name, ev.MGID, text(a))
	}
	if j.Status != want {
		t.Errorf("host %s joins %v: status: got %v, want %v", h.name, ev.MGID, j.Status, want)
	}
	if j.NoGroup != noGroup {
		t.Errorf("host %s joins %v: no group: got %v, want %v", h.name, ev.MGID, j.NoGroup, noGroup)
	}
	expectLeft(t, f, h, ev.MGID)
}

func expectLeft(t *testing.T, f fabric, h *host, g ib.GID) {
	t.Helper()
	if a := outcome(t, f, h, sa.Leave{MGID: g}); a != (sa.Left{MGID: g}) {
		t.Fatalf("host %s leaves %v: got %s, want Left", h.name, g, text(a))
	}
}

// ask is outcome for a path.
func ask(t *testing.T, f fabric, h *host, dgid ib.GID, p ib.PKey) (verbs.Path, wire.Status) {
	t.Helper()
	switch a := outcome(t, f, h, sa.Query{PathKey: sa.PathKey{DGID: dgid, PKey: p}}).(type) {
	case sa.PathFound:
		return a.Path, 0
	case sa.PathFailed:
		if a.Cause != sa.Refused {
			t.Fatalf("host %s: path to %v: %v", h.name, dgid, a.Cause)
		}
		return verbs.Path{}, a.Status
	default:
		t.Fatalf("host %s: path to %v: got %s", h.name, dgid, text(a))
		return verbs.Path{}, 0
	}
}

func text(a sa.Action) string {
	if a == nil {
		return "nothing"
	}
	return fmt.Sprintf("%T %+v", a, a)
}
