package agent

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/internal/expect"
	"ipoibcm/ipoib"
	"ipoibcm/rtnl"
)

// A stuckKernel answers nothing before it is released, as one whose rtnl lock somebody
// holds.
type stuckKernel struct{ released chan struct{} }

var errReleased = errors.New("released")

func (k stuckKernel) wait() error {
	<-k.released
	return errReleased
}

func (k stuckKernel) Lookup(rtnl.Query) (rtnl.Answer, error) { return rtnl.Answer{}, k.wait() }
func (k stuckKernel) AddRoute(rtnl.Route) error              { return k.wait() }
func (k stuckKernel) SetRoute(rtnl.Route) error              { return k.wait() }
func (k stuckKernel) DelRoute(rtnl.Route) error              { return k.wait() }
func (k stuckKernel) AddRule(rtnl.Rule) error                { return k.wait() }
func (k stuckKernel) DelRule(rtnl.Rule) error                { return k.wait() }
func (k stuckKernel) FlushExceptions() error                 { return k.wait() }
func (k stuckKernel) Proxies() ([]netip.Addr, error)         { return nil, k.wait() }
func (k stuckKernel) Conf() (rtnl.Conf, error)               { return rtnl.Conf{}, k.wait() }
func (k stuckKernel) Groups() ([]netip.Addr, error)          { return nil, k.wait() }
func (k stuckKernel) Index() int                             { return 7 }
func (k stuckKernel) AddAddr(netip.Prefix) error             { return k.wait() }
func (k stuckKernel) DelAddr(netip.Prefix) error             { return k.wait() }
func (k stuckKernel) DisableAddrGen() error                  { return k.wait() }
func (k stuckKernel) IgnoreRAMTU() error                     { return k.wait() }
func (k stuckKernel) RemoveGenerated() error                 { return k.wait() }
func (k stuckKernel) RemoveOurs() (int, error)               { return 0, k.wait() }
func (k stuckKernel) Close() error                           { return nil }

// Requests to the kernel never run on the driver's goroutine: with a kernel that does not
// answer the driver goes on, with each action that wants something of it and with other
// events, and what came of them arrives once it answers.
func TestDriverDoesNotWaitForKernel(t *testing.T) {
	a, _ := newAgent(t)
	stuck := stuckKernel{make(chan struct{})}
	a.kernel = newKernelWorker(stuck, nil)
	prefix, addr := netip.MustParsePrefix("10.0.0.9/24"), netip.MustParseAddr("10.0.0.9")
	route := rtnl.Route{Dst: netip.MustParsePrefix("10.0.0.9/32"), Protocol: rtnl.Protocol}
	told := []ipoib.Action{
		ipoib.FIBAction{Action: fib.Lookup{Flow: rtnl.Flow{Dst: addr}}},
		ipoib.FIBAction{Action: fib.SetRoute{Old: route, New: route, Ask: true, Host: addr}},
		ipoib.FIBAction{Action: fib.SetRule{New: rtnl.Rule{Priority: 1}}},
		ipoib.FIBAction{Action: fib.FlushExceptions{}},
		ipoib.AskOther{Addr: addr},
	}
	ready := false
	untold := []ipoib.Action{ipoib.AddAddr{Prefix: prefix}, ipoib.RemoveAddr{Prefix: prefix}, ipoib.SetUpIPv6{}}

	ctx := t.Context()
	go a.kernel.run(ctx)
	for _, act := range append(told, untold...) {
		did := make(chan struct{})
		go func() { a.do(act); close(did) }()
		select {
		case <-did:
		case <-time.After(10 * time.Second):
			close(stuck.released)
			t.Fatalf("%T: the driver waits for the kernel", act)
		}
	}
	a.announce(func() { ready = true })
	asked := make(chan struct{})
	go func() { a.queries <- func() { close(asked) } }()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	a.turn(ctx.Done(), timer, nil, &inputs{kernel: a.kernel.done})
	select {
	case <-asked:
	default:
		t.Error("with the kernel busy the driver was woken by something else than a query")
	}

	expect.Equal(t, a.statusHead(nil).Interface.State, "starting", "State before the kernel has the first routes")
	close(stuck.released)
	for got, changes := 0, 0; got < len(told) || !ready; {
		select {
		case out := <-a.kernel.done:
			got += len(out.events)
			for _, ev := range out.events {
				if fe, ok := ev.(ipoib.FIBEvent); ok {
					if _, ok := fe.Event.(fib.Done); ok {
						changes++
					}
				}
			}
			for _, then := range out.then {
				then()
			}
			if ready && changes != 3 {
				t.Errorf("ready after %d changes of the kernel's tables, want 3", changes)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%d outcomes arrived of %d; ready: %v", got, len(told), ready)
		}
	}
	expect.Equal(t, a.statusHead(nil).Interface.State, "up", "State after that")
}
