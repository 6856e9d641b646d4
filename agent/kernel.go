package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"ipoibcm/fib"
	"ipoibcm/hostnet"
	"ipoibcm/ipoib"
	"ipoibcm/rtnl"
)

// kernelBatch is how many answers of the kernel reach the driver at once.
const kernelBatch = 64

// A kernelWorker carries out what the machine wants of the kernel, beside the
// driver: a kernel that is slow delays only what waits for it. Questions and changes
// have a goroutine each. Neither queue needs a bound of its own, for the machine asks
// once for each destination, host or address, of bounded numbers, and changes each
// route and address once, before it has heard of the outcome.
type kernelWorker struct {
	host    kernel
	asks    *queue
	changes *queue
	done    chan []ipoib.Event
}

// A job is one question or change; it returns what came of it, nil if nobody waits.
type job func() ipoib.Event

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
}

func newKernelWorker(host kernel) *kernelWorker {
	return &kernelWorker{host: host, asks: newQueue(), changes: newQueue(), done: make(chan []ipoib.Event)}
}

// do queues a; it reports false if a is not the kernel's business.
func (k *kernelWorker) do(a fib.Action) bool {
	do := func() ipoib.Event { return ipoib.FIBEvent{Event: k.carryOut(a)} }
	switch a.(type) {
	case fib.Lookup, fib.LookupHost:
		k.asks.push(do)
	case fib.AddRoute, fib.SetRoute, fib.DelRoute, fib.SetRule, fib.FlushExceptions:
		k.changes.push(do)
	default:
		return false
	}
	return true
}

// other finds out whether the host answers for an address that is not the device's.
// Where the kernel cannot be asked it does not.
func (k *kernelWorker) other(a netip.Addr) ipoib.Event {
	is := ipoib.OtherIs{Addr: a}
	route, err := k.host.Lookup(rtnl.Query{Flow: rtnl.Flow{Dst: a}})
	if err != nil {
		return is
	}
	conf, err := k.host.Conf()
	if err != nil {
		return is
	}
	proxies, err := k.host.Proxies()
	if err != nil {
		return is
	}
	is.Answer = conf.Answer(k.host.Index(), a, route, proxies)
	return is
}

// notices tells the machine of sysctls and groups as they change, until ctx ends.
func (k *kernelWorker) notices(ctx context.Context, n *hostnet.Notices) error {
	for {
		got, err := n.Next()
		if err != nil {
			return err
		}
		var events []ipoib.Event
		if conf, err := k.host.Conf(); got.Conf && err == nil {
			events = append(events, ipoib.KernelConf{Conf: conf})
		}
		if groups, err := k.host.Groups(); got.Groups && err == nil {
			events = append(events, ipoib.KernelGroups{Groups: groups})
		}
		select {
		case k.done <- events:
		case <-ctx.Done():
			return nil
		}
	}
}

// run works until ctx ends.
func (k *kernelWorker) run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, q := range []*queue{k.asks, k.changes} {
		wg.Go(func() {
			for {
				batch := q.take(ctx, kernelBatch)
				if batch == nil {
					return
				}
				events := make([]ipoib.Event, 0, len(batch))
				for _, do := range batch {
					if ev := do(); ev != nil {
						events = append(events, ev)
					}
				}
				select {
				case k.done <- events:
				case <-ctx.Done():
					return
				}
			}
		})
	}
	wg.Wait()
}

// carryOut does one action and returns what came of it.
func (k *kernelWorker) carryOut(a fib.Action) fib.Event {
	switch a := a.(type) {
	case fib.Lookup:
		hop, err := fib.Ask(k.host, a.Device, a.Flow)
		return fib.Answered{Flow: a.Flow, NextHop: hop, Err: err}
	case fib.LookupHost:
		hop, err := fib.AskHost(k.host, a.Link, a.Addr, a.ByDSCP)
		return fib.HostAnswered{Addr: a.Addr, NextHop: hop, Err: err}
	case fib.AddRoute:
		err := k.host.AddRoute(a.Route)
		if errors.Is(err, hostnet.ErrExists) {
			return fib.RouteDone{Route: a.Route, Taken: true}
		}
		return fib.RouteDone{Route: a.Route, Err: err}
	case fib.SetRoute:
		return fib.RouteDone{Route: a.Route, Err: k.host.SetRoute(a.Route)}
	case fib.DelRoute:
		err := k.host.DelRoute(a.Route)
		if errors.Is(err, hostnet.ErrNotFound) {
			err = nil
		}
		return fib.RouteDone{Route: a.Route, Removed: true, Err: err}
	case fib.SetRule:
		if a.On {
			return fib.Done{What: "open the table of the multicast route", Err: k.host.AddRule(a.Rule)}
		}
		err := k.host.DelRule(a.Rule)
		if errors.Is(err, hostnet.ErrNotFound) {
			err = nil
		}
		return fib.Done{What: "close the table of the multicast route", Err: err}
	case fib.FlushExceptions:
		return fib.Done{What: "flush the kernel's path MTUs", Err: k.host.FlushExceptions()}
	}
	panic(fmt.Sprintf("agent: unknown action %T", a)) // our bug
}

// nextHop asks the kernel as fib does, on the goroutine of a control request.
func (k *kernelWorker) nextHop(a netip.Addr) (fib.NextHop, error) {
	return fib.Ask(k.host, k.host.Index(), rtnl.Flow{Dst: a})
}

// A queue holds jobs in order for one taker.
type queue struct {
	mu   sync.Mutex
	held []job
	more chan struct{} // holds one token while there may be some
}

func newQueue() *queue { return &queue{more: make(chan struct{}, 1)} }

func (q *queue) push(a job) {
	q.mu.Lock()
	q.held = append(q.held, a)
	q.mu.Unlock()
	select {
	case q.more <- struct{}{}:
	default:
	}
}

// take waits for jobs and returns up to n; nil when ctx ends.
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
		a.setPath(act.Hop, act.Path)
	case fib.DelPath:
		a.delPath(act.Hop)
	case fib.SetDest:
		p := a.paths[act.Hop]
		switch {
		case p == nil: // our bug; packets come up
			a.log.Error("a destination leads to a next hop without a path", "dst", act.Flow.Dst, "hop", act.Hop)
		case act.Fixed:
			a.loop.PinDest(act.Flow, p.dp)
		default:
			a.loop.SetDest(act.Flow, p.dp)
		}
	case fib.DelDest:
		a.loop.DelDest(act.Flow)
	case fib.StaleDest:
		if act.Flow.Dst.IsValid() {
			a.loop.StaleDest(act.Flow)
		} else {
			a.loop.StaleAll()
		}
	case fib.ResetDests:
		a.loop.ResetDests(act.Fields)
	default:
		if !a.kernel.do(act) {
			panic(fmt.Sprintf("agent: unknown action %T", act)) // our bug
		}
	}
}

// kernelDone tells the machine what came of its questions and changes.
func (a *Agent) kernelDone(events []ipoib.Event) {
	for _, ev := range events {
		a.step(ev)
	}
}
