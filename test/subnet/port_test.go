package subnet

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/ibsim"
	"ipoibcm/internal/simsm"
	"ipoibcm/provider/softroce"
	"ipoibcm/sa"
	"ipoibcm/verbs"
)

// An ibPort is a provider whose port is InfiniBand as far as an agent sees: LIDs, P_Keys and a
// subnet administrator are those of a manager, and packets are softroce's.
type ibPort struct {
	*softroce.Device
	sm     manager
	name   string
	mads   chan *verbs.SubnetMAD
	events chan verbs.Event
	stop   chan struct{}
	ended  chan struct{}

	mu    sync.Mutex
	now   sa.Port
	keys  []ib.PKey
	unset bool // the manager's view is not asked for: tests say what the port is like
}

// A manager is a subnet with its manager, in real time. Its hosts have names, as in fabric.
type manager interface {
	port(host string) (sa.Port, []ib.PKey, error)
	send(host string, m *sa.MAD) error
	// hear has what comes for a host given to these functions.
	hear(host string, mad func(*sa.MAD), reregister func()) error
	stopSM()
	startSM(asks bool) // ports are asked to register again, or not
	setLink(host string, up bool)
}

// newPort makes a port of an open device.
func newPort(dev *softroce.Device, sm manager, name string) (*ibPort, error) {
	p := &ibPort{Device: dev, sm: sm, name: name,
		mads: make(chan *verbs.SubnetMAD, 64), events: make(chan verbs.Event, 64),
		stop: make(chan struct{}), ended: make(chan struct{})}
	var err error
	if p.now, p.keys, err = sm.port(name); err != nil {
		return nil, err
	}
	go p.watch()
	return p, sm.hear(name, p.recv, func() { p.tell(verbs.Reregister, "the subnet manager asks for it") })
}

func (p *ibPort) recv(m *sa.MAD) {
	from := m.Peer
	select {
	case p.mads <- &verbs.SubnetMAD{LID: from.LID, SL: from.SL, QPN: from.QPN, QKey: from.QKey, PKey: from.PKey,
		Data: m.Data}:
	default: // lost
	}
}

func (p *ibPort) tell(kind verbs.EventKind, text string) {
	select {
	case p.events <- verbs.Event{Kind: kind, Text: text}:
	default:
	}
}

// watch tells of changes of the port, as a driver does.
func (p *ibPort) watch() {
	defer close(p.ended)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-p.stop:
			return
		case ev, ok := <-p.Device.Events():
			if !ok {
				return
			}
			p.events <- ev
		case <-tick.C:
			if now, keys, err := p.sm.port(p.name); err == nil {
				p.change(now, keys, false)
			}
		}
	}
}

// change makes the port be like this. One that a test has changed stays so.
func (p *ibPort) change(now sa.Port, keys []ib.PKey, test bool) {
	p.mu.Lock()
	if p.unset && !test {
		keys = p.keys
	}
	p.unset = p.unset || test
	was, had := p.now, p.keys
	p.now, p.keys = now, keys
	p.mu.Unlock()
	for _, e := range []struct {
		kind    verbs.EventKind
		changed bool
	}{
		{verbs.PortActive, now.Active && !was.Active}, {verbs.PortError, !now.Active && was.Active},
		{verbs.LIDChange, now.LID != was.LID}, {verbs.SMChange, now.SMLID != was.SMLID},
		{verbs.PKeyChange, !slices.Equal(keys, had)},
	} {
		if e.changed {
			p.tell(e.kind, "")
		}
	}
}

// setKeys gives the port another P_Key table.
func (p *ibPort) setKeys(keys ...ib.PKey) {
	p.mu.Lock()
	now := p.now
	p.mu.Unlock()
	p.change(now, keys, true)
}

// Port implements [verbs.Provider].
func (p *ibPort) Port() verbs.Port {
	out := p.Device.Port()
	p.mu.Lock()
	defer p.mu.Unlock()
	out.InfiniBand, out.LID, out.SMLID, out.SMSL = true, p.now.LID, p.now.SMLID, p.now.SMSL
	out.Active = out.Active && p.now.Active
	out.SubnetTimeout, out.PKeys, out.MTU = 14, slices.Clone(p.keys), ib.MTU2048
	return out
}

// Events implements [verbs.Provider].
func (p *ibPort) Events() <-chan verbs.Event { return p.events }

// SubnetPort implements [verbs.SubnetProvider].
func (p *ibPort) SubnetPort() verbs.SubnetPort { return p }

// SubnetMADs implements [verbs.SubnetPort].
func (p *ibPort) SubnetMADs() <-chan *verbs.SubnetMAD { return p.mads }

// Reports implements [verbs.SubnetPort].
func (p *ibPort) Reports() bool { return true }

// SendSubnet implements [verbs.SubnetPort].
func (p *ibPort) SendSubnet(m *verbs.SubnetMAD, _ time.Duration) error {
	to := sa.Address{LID: m.LID, SL: m.SL, QPN: m.QPN, QKey: m.QKey, PKey: m.PKey}
	return p.sm.send(p.name, &sa.MAD{Peer: to, Data: m.Data})
}

// key returns the port's own key of a partition.
func (p *ibPort) key(k ib.PKey) (ib.PKey, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, own := range p.keys {
		if (own^k)&^ib.PKeyFull == 0 {
			return own, nil
		}
	}
	return 0, fmt.Errorf("%w: the port has no P_Key %v", verbs.ErrInvalid, k)
}

// CreateQP implements [verbs.Provider].
func (p *ibPort) CreateQP(init verbs.QPInit) (verbs.QP, error) {
	q, err := p.Device.CreateQP(init)
	if err != nil {
		return nil, err
	}
	return &ibQP{QP: q, port: p}, nil
}

// An ibQP goes by the port's table of P_Keys, and is attached to groups by MLID.
type ibQP struct {
	verbs.QP
	port *ibPort
}

var _ verbs.GroupQP = (*ibQP)(nil)

// Modify implements [verbs.QP].
func (q *ibQP) Modify(attr verbs.QPAttr) error {
	if attr.State == verbs.StateInit {
		k, err := q.port.key(attr.PKey)
		if err != nil {
			return err
		}
		attr.PKey = k
	}
	return q.QP.Modify(attr)
}

// AttachGroup implements [verbs.GroupQP].
func (q *ibQP) AttachGroup(mgid ib.GID, _ ib.LID) error { return q.AttachMulticast(mgid) }

// DetachGroup implements [verbs.GroupQP].
func (q *ibQP) DetachGroup(mgid ib.GID, _ ib.LID) error { return q.DetachMulticast(mgid) }

// Close implements [verbs.Provider].
func (p *ibPort) Close() error {
	close(p.stop)
	err := p.Device.Close()
	<-p.ended
	return err
}

// liveSim is internal/simsm in real time.
type liveSim struct {
	mu    sync.Mutex
	net   *simsm.Subnet
	ports map[string]*simsm.Port
	heard map[*simsm.Port]heard
}

type heard struct {
	mad        func(*sa.MAD)
	reregister func()
}

func newLiveSim(t *testing.T, conf int) *liveSim {
	s := &liveSim{net: simsm.New(simsm.Options{Seed: rand.Uint64(), Partitions: simPartitions(conf)}),
		ports: map[string]*simsm.Port{}, heard: map[*simsm.Port]heard{}}
	for i, name := range []string{"A", "B", "C", "D"} {
		s.ports[name] = s.net.AddPort(ib.GUID(i + 1))
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				s.deliver()
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-ended })
	return s
}

func (s *liveSim) deliver() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.net.Take(time.Now()) {
		h, ok := s.heard[d.To]
		if !ok {
			continue
		}
		switch ev := d.Event.(type) {
		case sa.RecvMAD:
			h.mad(ev.MAD)
		case sa.Reregister:
			h.reregister()
		}
	}
}

func (s *liveSim) port(host string) (sa.Port, []ib.PKey, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.ports[host]
	return p.Now(), slices.Clone(p.PKeys), nil
}

func (s *liveSim) send(host string, m *sa.MAD) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.net.Send(time.Now(), s.ports[host], m)
	return nil
}

func (s *liveSim) hear(host string, mad func(*sa.MAD), reregister func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard[s.ports[host]] = heard{mad, reregister}
	return nil
}

func (s *liveSim) stopSM() { s.do(s.net.Stop) }

func (s *liveSim) startSM(asks bool) {
	s.do(func() { s.net.Quiet = !asks; s.net.Start(time.Now()) })
}

func (s *liveSim) setLink(host string, up bool) {
	s.do(func() { s.net.SetLink(time.Now(), s.ports[host], up) })
}

func (s *liveSim) do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// liveReal is opensm on ibsim.
type liveReal struct {
	t    *testing.T
	sim  *ibsim.Fabric
	conf string

	mu      sync.Mutex
	clients map[string]*ibsim.Client
	again   []func()
}

func newLiveReal(t *testing.T, conf int) *liveReal {
	text := partitionsConf[conf]
	return &liveReal{t: t, sim: ibsim.Start(t, text), conf: text, clients: map[string]*ibsim.Client{}}
}

func (r *liveReal) client(host string) (*ibsim.Client, error) {
	if c := r.clients[host]; c != nil {
		return c, nil
	}
	c, err := r.sim.Dial("host" + host)
	if err == nil {
		r.clients[host] = c
	}
	return c, err
}

func (r *liveReal) port(host string) (p sa.Port, keys []ib.PKey, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.client(host)
	if err != nil {
		return p, nil, err
	}
	if p, err = c.Port(); err == nil {
		keys, err = c.PKeys()
	}
	return p, keys, err
}

func (r *liveReal) send(host string, m *sa.MAD) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.client(host)
	if err != nil {
		return err
	}
	return c.Send(m)
}

func (r *liveReal) hear(host string, mad func(*sa.MAD), reregister func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.client(host)
	if err != nil {
		return err
	}
	r.again = append(r.again, reregister)
	ended := receiveAll(c, mad)
	r.t.Cleanup(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if err := c.Close(); err != nil {
			r.t.Error(err)
		}
		<-ended
	})
	return nil
}

func (r *liveReal) stopSM() { r.sim.StopSM() }

// startSM tells ports what opensm sets a bit of their PortInfo for, which the simulator
// keeps to itself.
func (r *liveReal) startSM(asks bool) {
	if err := r.sim.StartSM(r.conf); err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.again {
		if asks {
			f()
		}
	}
}

func (r *liveReal) setLink(host string, up bool) {
	if err := r.sim.SetLink("host"+host, up); err != nil {
		r.t.Fatal(err)
	}
}
