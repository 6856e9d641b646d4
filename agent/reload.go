package agent

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/verbs"
)

// Live are the settings that can change while the agent runs. They have the same meaning as in Options.
type Live struct {
	Prefixes             []netip.Prefix
	Mode                 ipoib.Mode
	ReceiveMTU           int // at most what Options had
	Idle                 time.Duration
	Peers                []ib.GID
	Allow                ib.GIDSet
	PeerAllow, PeerTrust []netip.Prefix

	ARPAlways               bool
	MaxConns, MaxNeighbours int
	TrafficClass            uint8 // of the provider's packets
	InheritClass            bool
	Offloads                map[string]bool // by name: those of the provider, and "tso" and "uso" of the TUN
}

// A Plan is what a configuration file changes about the running settings.
type Plan struct {
	File    string
	Changes []control.Change // if one of them takes a restart, none takes effect
	Live    Live             // all of the settings, those that stay included
	Done    func()           // called once the changes are in force
}

// liveSettings holds the live settings that not only the driver reads.
type liveSettings struct {
	reloading sync.Mutex                     // one at a time
	now       atomic.Pointer[[]netip.Prefix] // the addresses of the interface
}

func (l *liveSettings) setPrefixes(p []netip.Prefix) { l.now.Store(&p) }

// prefixes returns the addresses in force; none before setPrefixes was called.
func (l *liveSettings) prefixes() []netip.Prefix {
	if now := l.now.Load(); now != nil {
		return *now
	}
	return nil
}

// reload reads the configuration anew and applies its changes. It only reports them if check is set or if
// one of them needs a restart. Nothing is changed before the whole configuration has been read.
func (a *Agent) reload(ctx context.Context, check bool) (control.Reload, error) {
	a.live.reloading.Lock()
	defer a.live.reloading.Unlock()
	out := control.Reload{Version: control.Version, Changes: []control.Change{}}
	plan, err := a.opt.Reload()
	if err != nil {
		return out, err
	}
	out.File = plan.File
	out.Changes = append(out.Changes, plan.Changes...)
	out.Refused = slices.ContainsFunc(plan.Changes,
		func(c control.Change) bool { return c.Effect == control.EffectRestart })
	if check || out.Refused || len(plan.Changes) == 0 {
		return out, nil
	}
	a.service.tell(reloading())
	defer a.service.tell(notifyReady)
	_, err = ask(ctx, a, func() struct{} {
		a.apply(plan.Live)
		return struct{}{}
	})
	if err != nil {
		return out, err
	}
	if p, ok := a.opt.Provider.(verbs.Tuner); ok {
		for name, on := range plan.Live.Offloads { // not on the driver, because trying one may take a second
			p.SetOffload(name, on)
		}
	}
	plan.Done()
	out.Applied = true
	for _, c := range plan.Changes {
		a.log.Info("setting changed", "key", c.Key, "from", c.From, "to", c.To, "effect", c.Effect)
	}
	a.hub.publish(a.event("agent", "reloaded", fmt.Sprintf("%d settings changed", len(plan.Changes))))
	return out, nil
}

// apply puts settings in force. It runs on the driver's goroutine.
func (a *Agent) apply(l Live) {
	old := a.live.prefixes()
	a.live.setPrefixes(l.Prefixes)
	a.peers.SetAskers(l.PeerAllow, l.PeerTrust)
	for _, p := range l.Prefixes { // new ones first: the kernel keeps secondary addresses
		if !slices.Contains(old, p) {
			a.do(ipoib.AddAddr{Prefix: p})
		}
	}
	for _, p := range old {
		if !slices.Contains(l.Prefixes, p) {
			a.do(ipoib.RemoveAddr{Prefix: p})
		}
	}
	copies := a.copies()
	a.opt.Mode, a.opt.ReceiveMTU, a.opt.Idle, a.opt.Peers, a.opt.Allow = l.Mode, l.ReceiveMTU, l.Idle, l.Peers, l.Allow
	var err error
	if !copies {
		err = a.takeCopies(a.link.GID)
	} else if !a.copies() {
		err = a.loop.UDQP().DetachMulticast(a.link.GID)
	}
	if err != nil {
		a.log.Warn("settings changed", "err", err)
	}
	a.link.Flags = l.Mode.Flags()
	a.loop.SetAllow(l.Allow)
	a.opt.ARPAlways, a.opt.MaxConns, a.opt.MaxNeighbours = l.ARPAlways, l.MaxConns, l.MaxNeighbours
	a.step(ipoib.Reconfigure{Mode: l.Mode, ReceiveMTU: l.ReceiveMTU, Idle: l.Idle, Allow: l.Allow,
		AcceptAlways: l.ARPAlways, MaxConns: a.opt.maxConns(), MaxPeers: a.opt.maxNeighbours()})
	a.setPeers(l.Peers)
	a.tune(l)
}

// tune puts the traffic class, the offloads of the TUN and InheritClass in force.
func (a *Agent) tune(l Live) {
	if p, ok := a.opt.Provider.(verbs.Tuner); ok {
		p.SetTrafficClass(l.TrafficClass)
	}
	a.tun.SetGSO(l.Offloads["tso"], l.Offloads["uso"])
	a.opt.NoSegments, a.opt.NoDatagrams = !l.Offloads["tso"], !l.Offloads["uso"] // keep a.opt as the TUN is now
	a.loop.SetInheritClass(l.InheritClass)
	if a.opt.TrafficClass != l.TrafficClass {
		a.opt.TrafficClass = l.TrafficClass
		a.readdress() // datagrams have the new class at once, connections once they are made anew
	}
}

// hangups reloads whenever a signal asks for it, until ctx ends.
func (a *Agent) hangups(ctx context.Context) {
	for {
		select {
		case <-a.opt.Hangup:
			got, err := a.reload(ctx, false)
			switch {
			case err != nil:
				a.log.Error("nothing was changed", "err", err)
			case got.Refused:
				for _, c := range got.Changes {
					if c.Effect == control.EffectRestart {
						a.log.Error("nothing was changed: a setting takes a restart", "key", c.Key, "from", c.From, "to", c.To,
							"why", c.Why)
					}
				}
			case !got.Applied:
				a.log.Info("the configuration is as before", "file", got.File)
			}
		case <-ctx.Done():
			return
		}
	}
}

// serveReload answers PathReload.
func (a *Agent) serveReload(r *http.Request) (got control.Reload, err error) {
	if a.opt.Reload == nil {
		return got, refusal{http.StatusConflict, "the agent has no configuration file: all of its settings are flags",
			"restart it with --config FILE"}
	}
	if got, err = a.reload(r.Context(), r.URL.Query().Get("check") != ""); err != nil {
		return got, refusal{http.StatusConflict, err.Error(), "nothing was changed"}
	}
	return got, nil
}
