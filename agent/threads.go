package agent

import (
	"context"
	"fmt"
	"log/slog"

	"ipoibcm/verbs"
)

// threads returns how many data threads the provider has.
func (a *Agent) threads() int {
	if p, ok := a.opt.Provider.(verbs.Threader); ok {
		return p.Threads()
	}
	return 1
}

// openQueues opens a queue of the TUN for each data thread from the second on, in the namespace that the
// interface is in. If a queue cannot be opened, there are fewer threads.
func (a *Agent) openQueues() {
	threads := a.threads()
	for i := 1; i < threads; i++ {
		q, err := a.tun.Queue()
		if err != nil {
			level := slog.LevelWarn
			if a.opt.FewerThreads {
				level = slog.LevelInfo
			}
			a.log.Log(context.Background(), level, "fewer data threads than asked for", "threads", i, "asked", threads, "err", err)
			a.whyFewer = fmt.Sprintf("%d of %d threads: %v", i, threads, err)
			return
		}
		a.queues = append(a.queues, q)
	}
}

// threadOffloads returns what brings packets to their data thread. It returns nil if there is one thread and
// no more were asked for.
func (a *Agent) threadOffloads() []verbs.Offload {
	p, ok := a.opt.Provider.(verbs.Threader)
	if !ok {
		return nil
	}
	in := p.Steering()
	if p.Threads() == 1 && in.Why == verbs.OneThread {
		return nil
	}
	out := verbs.Offload{Name: "queues", What: "packets from the TUN to the thread of their connection", Why: a.whyFewer,
		On: a.loop.Threads() > 1, Uses: a.loop.Counters().TxOtherThread}
	if out.On && out.Why == "" {
		out.Why = "the kernel goes by flows: uses are packets that came to another thread, and were posted by it"
	}
	return []verbs.Offload{in, out}
}
