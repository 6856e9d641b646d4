package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"

	"ipoibcm/fib"
	"ipoibcm/hostnet"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
)

// kernelBatch is how many answers of the kernel reach the driver at once, at most.
const kernelBatch = 64

// A kernelWorker carries out what the machine wants of the kernel, beside the driver: a slow kernel delays
// only what waits for it. Questions and changes have a goroutine each. Neither queue needs a bound of its
// own. Until the machine has heard of the outcome, it asks only once for each destination, host or address,
// whose numbers are bounded, and changes each route and address only once.
type kernelWorker struct {
	// mu guards host and notices. The goroutine of changes replaces both when the interface is moved
	// into another namespace. That goroutine needs no lock to read them.
	mu      sync.RWMutex
	host    kernel
	notices *hostnet.Notices
	ended   bool

	asks    *queue
	changes *queue
	done    chan outcome
}

// A job is one question or change. do carries it out and returns the outcome; nil if nobody waits for one. If
// then is not nil, the driver calls it when the machine has the outcomes of this job and of all jobs before
// it in the queue.
type job struct {
	do   func() ipoib.Event
	then func()
}

// An outcome is the events that a batch of jobs, or a notice, led to, and the then functions of the jobs.
type outcome struct {
	events []ipoib.Event
	then   []func()
}

// A kernel is what the worker needs of a hostnet.Device.
type kernel interface {
	Lookup(rtnl.Query) (rtnl.Answer, error)
	AddRoute(rtnl.Route) error
	SetRoute(rtnl.Route) error
	DelRoute(rtnl.Route) error
	AddRule(rtnl.Rule) error
	DelRule(rtnl.Rule) error
	FlushExceptions() error
	Proxies() ([]netip.Addr, error)
	Conf() (rtnl.Conf, error)
	Groups() ([]netip.Addr, error)
	Index() int

	AddAddr(netip.Prefix) error
	DelAddr(netip.Prefix) error
	DisableAddrGen() error
	IgnoreRAMTU() error
	RemoveGenerated() error
	RemoveOurs() (int, error)
	Close() error
}

func newKernelWorker(host kernel, n *hostnet.Notices) *kernelWorker {
	return &kernelWorker{host: host, notices: n, asks: newQueue(), changes: newQueue(), done: make(chan outcome)}
}

// replace puts another device in the place of the present one, which it closes. Only the goroutine of
// changes may call it.
func (k *kernelWorker) replace(host kernel, n *hostnet.Notices) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.host
	err := k.notices.Close()
	if k.host, k.notices = host, n; k.ended {
		err = errors.Join(err, n.Close())
	}
	return errors.Join(err, old.Close())
}

// endNotices ends watch for good, even if another device comes.
func (k *kernelWorker) endNotices() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = true
	return k.notices.Close()
}

// do queues an action.
func (k *kernelWorker) do(a fib.Action) {
	do := job{do: func() ipoib.Event { return ipoib.FIBEvent{Event: k.carryOut(a)} }}
	if _, asks := a.(fib.Lookup); asks {
		k.asks.push(do)
	} else {
		k.changes.push(do)
	}
}

// change queues f, which changes the kernel. The machine does not wait for the outcome. then is as in a job.
func (k *kernelWorker) change(f, then func()) {
	k.changes.push(job{then: then, do: func() ipoib.Event {
		f()
		return nil
	}})
}

// other finds out whether the host answers neighbours that ask for an address that is not the device's. If
// the kernel cannot be asked, the host does not answer.
func (k *kernelWorker) other(a netip.Addr) ipoib.Event {
	is := ipoib.OtherIs{Addr: a}
	route, errRoute := k.host.Lookup(rtnl.Query{Flow: rtnl.Flow{Dst: a}})
	conf, errConf := k.host.Conf()
	proxies, errProxies := k.host.Proxies()
	if errors.Join(errRoute, errConf, errProxies) == nil {
		is.Answer = conf.Answer(k.host.Index(), a, route, proxies)
	}
	return is
}

// watch passes changes of sysctls and groups to the machine, until endNotices is called or ctx ends.
func (k *kernelWorker) watch(ctx context.Context) error {
	for {
		k.mu.RLock()
		n, ended := k.notices, k.ended
		k.mu.RUnlock()
		if ended {
			return nil
		}
		got, err := n.Next()
		switch {
		case errors.Is(err, os.ErrClosed):
			continue // replace has put in others, or endNotices was called
		case err != nil:
			return err
		}
		select {
		case k.done <- outcome{events: k.noticed(got)}:
		case <-ctx.Done():
			return nil
		}
	}
}

// noticed reads from the kernel what has changed according to got, and returns it as events.
func (k *kernelWorker) noticed(got hostnet.Notice) (events []ipoib.Event) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if conf, err := k.host.Conf(); got.Conf && err == nil {
		events = append(events, ipoib.KernelConf{Conf: conf})
	}
	if groups, err := k.host.Groups(); got.Groups && err == nil {
		events = append(events, ipoib.KernelGroups{Groups: groups})
	}
	return events
}

// run works until ctx ends.
func (k *kernelWorker) run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { k.work(ctx, k.changes, func(do func() ipoib.Event) ipoib.Event { return do() }) })
	wg.Go(func() {
		k.work(ctx, k.asks, func(do func() ipoib.Event) ipoib.Event {
			k.mu.RLock()
			defer k.mu.RUnlock()
			return do()
		})
	})
	wg.Wait()
}

// work carries out the jobs of one queue, each by do, until ctx ends.
func (k *kernelWorker) work(ctx context.Context, q *queue, do func(func() ipoib.Event) ipoib.Event) {
	for {
		batch := q.take(ctx, kernelBatch)
		if batch == nil {
			return
		}
		out := outcome{events: make([]ipoib.Event, 0, len(batch))}
		for _, j := range batch {
			if ev := do(j.do); ev != nil {
				out.events = append(out.events, ev)
			}
			if j.then != nil {
				out.then = append(out.then, j.then)
			}
		}
		select {
		case k.done <- out:
		case <-ctx.Done():
			return
		}
	}
}

// carryOut carries out one action and returns its outcome.
func (k *kernelWorker) carryOut(a fib.Action) fib.Event {
	var err error
	switch a := a.(type) {
	case fib.Lookup:
		hop, err := nexthop.Ask(k.host, a.Link, a.Flow)
		return fib.Answered{Lookup: a, NextHop: hop, Err: err}
	case fib.SetRoute:
		return fib.Done{Action: a, Outcome: nexthop.Change(a).Do(k.host)}
	case fib.SetRule:
		if a.Old != (rtnl.Rule{}) {
			err = k.host.DelRule(a.Old)
		}
		if (err == nil || errors.Is(err, hostnet.ErrNotFound)) && a.New != (rtnl.Rule{}) {
			err = k.host.AddRule(a.New)
		}
		if errors.Is(err, hostnet.ErrNotFound) {
			err = nil
		}
	case fib.FlushExceptions:
		err = k.host.FlushExceptions()
	default:
		panic(fmt.Sprintf("agent: unknown action %T", a)) // our bug
	}
	return fib.Done{Action: a, Outcome: nexthop.Outcome{Err: err}}
}

// nextHop asks the kernel for a next hop as for package fib, on the goroutine of a control request.
func (a *Agent) nextHop(ctx context.Context, ip netip.Addr) (nexthop.Hop, error) {
	link, err := ask(ctx, a, a.m.Device)
	if err != nil {
		return nexthop.Hop{}, err
	}
	k := a.kernel
	k.mu.RLock()
	defer k.mu.RUnlock()
	return nexthop.Ask(k.host, link, rtnl.Flow{Dst: ip})
}

// A queue holds jobs in order for one taker.
type queue struct {
	mu   sync.Mutex
	held []job
	more chan struct{} // holds one token while there may be jobs
}

func newQueue() *queue { return &queue{more: make(chan struct{}, 1)} }

func (q *queue) push(a job) {
	q.mu.Lock()
	q.held = append(q.held, a)
	q.mu.Unlock()
	wake(q.more)
}

// wake puts a token into a channel that holds one, unless there is one already.
func wake(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// take waits for jobs and returns up to n of them; nil when ctx ends.
func (q *queue) take(ctx context.Context, n int) (batch []job) {
	for {
		q.mu.Lock()
		n := min(n, len(q.held))
		batch = append(batch, q.held[:n]...)
		q.held = slices.Delete(q.held, 0, n)
		q.mu.Unlock()
		if len(batch) > 0 {
			return batch
		}
		select {
		case <-q.more:
		case <-ctx.Done():
			return nil
		}
	}
}

// doFIB carries out what fib decided: on the data path here, in the kernel beside
// the driver.
func (a *Agent) doFIB(act fib.Action) {
	switch act := act.(type) {
	case fib.SetPath:
		if act.Path == (nexthop.Path{}) {
			a.delPath(act.Hop)
		} else {
			a.setPath(act.Hop, act.Path)
		}
	case fib.SetDest:
		p := a.paths[act.Hop]
		switch {
		case !act.Hop.IsValid():
			a.loop.DelDest(act.Flow)
		case p == nil: // our bug; packets come up
			a.log.Error("a destination leads to a next hop without a path", "dst", act.Flow.Dst, "hop", act.Hop)
		default:
			a.loop.SetDest(act.Flow, p.dp)
		}
	case fib.StaleDest:
		if act.Flow.Dst.IsValid() {
			a.loop.StaleDest(act.Flow)
		} else {
			a.loop.StaleAll()
		}
	case fib.ResetDests:
		a.loop.ResetDests(act.Fields)
	default:
		a.kernel.do(act)
	}
}

// kernelDone passes the outcomes of questions and changes to the machine.
func (a *Agent) kernelDone(out outcome) {
	for _, ev := range out.events {
		a.step(ev)
	}
	for _, then := range out.then {
		then()
	}
}
