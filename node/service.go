package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Bounds of the service.
const (
	maxPods     = 1000             // attachments at a time
	maxStarting = 8                // agents that start at the same time; others wait
	startWithin = 20 * time.Second // patience with an agent that starts
	stopWithin  = 3 * time.Second  // patience with an agent that says goodbye
	lookEvery   = 2 * time.Second  // between looks for pods that vanished and agents that died
	pollEvery   = 20 * time.Millisecond
	maxBackoff  = 30 * time.Second // longest wait before the next try to start an agent that did not start
	maxBody     = 1 << 20          // octets of a request
)

// Options configures a service. The zero value is ready to use, by root.
type Options struct {
	Program string // of agents; empty: this one
	Dir     string // of records; empty: [Dir]
	Socket  string // empty: [SocketPath]
	Log     *slog.Logger
}

// A Service owns the attachments of a host.
type Service struct {
	opt      Options
	log      *slog.Logger
	starting chan struct{} // holds one token for each agent that starts
	look     chan struct{}

	mu   sync.Mutex
	pods map[Key]*pod
}

// Run serves until ctx ends. Agents and interfaces stay, and the next service finds them. Run calls ready
// once requests are answered.
func Run(ctx context.Context, opt Options, ready func()) error {
	opt.Dir, opt.Socket = cmp.Or(opt.Dir, Dir), cmp.Or(opt.Socket, SocketPath)
	if opt.Program == "" {
		var err error
		if opt.Program, err = os.Executable(); err != nil {
			return err
		}
	}
	s := &Service{opt: opt, log: cmp.Or(opt.Log, slog.New(slog.DiscardHandler)), pods: map[Key]*pod{},
		starting: make(chan struct{}, maxStarting), look: make(chan struct{}, 1)}
	if err := os.MkdirAll(s.opt.Dir, 0o700); err != nil {
		return err
	}
	l, err := listen(s.opt.Socket)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := s.adopt(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	wg.Go(func() { stop(s.serve(ctx, l)) })
	wg.Go(func() { s.supervise(ctx) })
	ready()
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// listen opens the service's socket, for root alone. It replaces a socket that nobody answers on.
func listen(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("%s: a service answers there already", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() == os.ModeSocket {
		os.Remove(path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// adopt takes over what an earlier service left. If that service was interrupted while it attached a pod,
// adopt detaches the pod: the plugin got no answer that it was attached.
func (s *Service) adopt() error {
	pods, err := s.load()
	if err != nil {
		return err
	}
	agents := agentsOf(s.opt.Dir)
	for _, p := range pods {
		if a, ok := agents[s.configPath(p.Key)]; ok && !p.proc.alive() {
			p.proc = a
		}
		if p.Ready {
			s.pods[p.Key] = p
			continue
		}
		s.log.Warn("an attachment was interrupted, and is undone", "container", p.ContainerID, "interface", p.IfName)
		if err := s.detach(p); err != nil {
			return err
		}
	}
	s.log.Info("attachments taken over", "count", len(s.pods))
	return nil
}

// wake has supervise look now.
func (s *Service) wake() {
	select {
	case s.look <- struct{}{}:
	default:
	}
}

// supervise ends what belongs to pods that vanished, and starts new agents for those that died.
func (s *Service) supervise(ctx context.Context) {
	for tick := time.NewTicker(lookEvery); ; {
		var wg sync.WaitGroup
		for _, p := range s.all() {
			if p.mu.TryLock() { // else another goroutine changes the pod
				wg.Go(func() {
					defer p.mu.Unlock()
					s.mend(ctx, p)
				})
			}
		}
		wg.Wait()
		select {
		case <-tick.C:
		case <-s.look:
		case <-ctx.Done():
			tick.Stop()
			return
		}
	}
}

// all returns the attachments as they are now.
func (s *Service) all() []*pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.pods))
}

// mend ends an attachment if attaching was interrupted or its network namespace has gone. If only its agent
// has ended, mend starts another. The caller holds p.mu.
func (s *Service) mend(ctx context.Context, p *pod) {
	log := s.log.With("container", p.ContainerID, "interface", p.IfName)
	switch {
	case p.gone:
	case !p.Ready, p.vanished():
		log.Info("an attachment ends: it was interrupted, or its network namespace has gone")
		if err := s.drop(p); err != nil {
			log.Error("an attachment cannot be undone; it is tried again", "err", err)
		}
	case p.proc.alive():
		p.failures = 0
	case time.Now().After(p.again):
		log.Warn("an agent has ended: another one starts")
		if err := s.inTurn(ctx, func() error { return s.restart(ctx, p) }); err != nil {
			p.failures++
			p.again = time.Now().Add(min(maxBackoff, time.Second<<min(p.failures, 10)))
			log.Error("an agent does not start; it is tried again", "err", err)
		}
	}
}

// restart starts an agent for a pod whose last one died.
func (s *Service) restart(ctx context.Context, p *pod) error {
	if !isUp(p.underlay()) { // the device that is up stays, and so does its GID
		if err := s.underlay(p); err != nil {
			return err
		}
	}
	if err := s.start(ctx, p); err != nil {
		return errors.Join(err, p.proc.end(stopWithin))
	}
	return nil
}

// inTurn waits for one of the maxStarting tokens, and has it while start runs. If ctx ends first, start does
// not run.
func (s *Service) inTurn(ctx context.Context, start func() error) error {
	select {
	case s.starting <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.starting }()
	return start()
}

// add attaches a pod. With an error it leaves nothing behind, unless detaching failed too.
func (s *Service) add(ctx context.Context, a Attachment) error {
	if a.ContainerID == "" || a.IfName == "" || a.Netns == "" || a.Master == "" {
		return errors.New("the request lacks container, interface, namespace or master")
	}
	p := &pod{record: record{Attachment: a}}
	if err := p.identify(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s.mu.Lock()
	_, taken := s.pods[a.Key]
	full := len(s.pods) >= maxPods
	if !taken && !full {
		s.pods[a.Key] = p
	}
	s.mu.Unlock()
	if taken {
		return fmt.Errorf("container %s has interface %s already", a.ContainerID, a.IfName)
	}
	if full {
		return fmt.Errorf("there are %d attachments, and no more can be", maxPods)
	}
	err := s.save(p)
	if err == nil {
		err = s.inTurn(ctx, func() error { return s.attach(ctx, p) })
	}
	if err != nil {
		return errors.Join(err, s.drop(p))
	}
	s.log.Info("attached", "container", a.ContainerID, "interface", a.IfName, "addresses", a.Addresses)
	return nil
}

// drop detaches p and forgets it. The caller holds p.mu.
func (s *Service) drop(p *pod) error {
	if p.gone {
		return nil
	}
	if err := s.detach(p); err != nil {
		return err
	}
	p.gone = true
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, p.Key)
	return nil
}

// delete ends the attachment of k, if there is one.
func (s *Service) delete(k Key) error {
	p := s.pod(k)
	if p == nil {
		return nil
	}
	p.mu.Lock() // waits for an addition that is under way
	defer p.mu.Unlock()
	if err := s.drop(p); err != nil {
		return err
	}
	s.log.Info("detached", "container", k.ContainerID, "interface", k.IfName)
	return nil
}

func (s *Service) pod(k Key) *pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pods[k]
}

// check returns an error that says what is wrong with an attachment.
func (s *Service) check(k Key) error {
	p := s.pod(k)
	if p == nil {
		return fmt.Errorf("container %s has no interface %s here", k.ContainerID, k.IfName)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.gone:
		return fmt.Errorf("container %s has no interface %s any more", k.ContainerID, k.IfName)
	case p.vanished():
		return fmt.Errorf("network namespace %s is not the one that was attached", p.Netns)
	case !p.proc.alive():
		return errors.New("its agent does not run")
	}
	return lacks(&p.Attachment)
}

// collect ends the attachments of a network that are not valid any more.
func (s *Service) collect(gc GC) error {
	var errs []error
	for _, p := range s.all() {
		if p.Network == gc.Network && !slices.Contains(gc.Valid, p.Key) {
			errs = append(errs, s.delete(p.Key))
		}
	}
	return errors.Join(errs...)
}

// status returns the state of the service, and an error if it could not attach to master.
func (s *Service) status(master string) (Status, error) {
	pods := s.all()
	st := Status{Attachments: len(pods)}
	for _, p := range pods {
		if p.mu.TryLock() {
			if p.proc.alive() {
				st.Running++
			}
			p.mu.Unlock()
		}
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return st, err
	}
	if master != "" && !isUp(master) {
		return st, fmt.Errorf("master %s is not there, or down", master)
	}
	return st, nil
}
