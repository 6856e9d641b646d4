package sa

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/lru"
	"ipoibcm/timerheap"
	wire "ipoibcm/wire/sa"
)

// Options configures a Client. Only Rand must be set.
type Options struct {
	// Refresh is the interval at which the Client joins groups and subscribes to notices again,
	// minus a random part of up to a tenth. Zero means 2 minutes, negative means never.
	Refresh time.Duration
	// Spread is the longest delay between a change and the first MAD. The delay is random, so that
	// not all ports of a subnet send at once. Zero means 100 ms, negative means no delay.
	Spread time.Duration
	// PathLife is how long the Client keeps a path that it found. Zero means 10 minutes.
	PathLife time.Duration
	// FailedLife is how long the Client remembers that there is no path. Zero means 1 s.
	FailedLife time.Duration
	// QueryTimeout bounds the time from a Query to its answer. Zero means 8 s.
	QueryTimeout time.Duration

	MaxTries    int // per question. Zero means 4
	MaxBusy     int // BUSY answers in a row to one question. Zero means 5
	MaxInFlight int // questions on their way. Zero means 8
	MaxGroups   int // Zero means 1024
	MaxPaths    int // kept and in question. Zero means 4096

	Rand rand.Source // source of transaction IDs and jitter; must be set
}

// Bounds that are not configurable.
const (
	maxRedirects = 4  // redirects of one question
	maxTraps     = 16 // traps subscribed to
)

// A State is what the Client knows of the administrator.
type State uint8

// States.
const (
	StateDown   State = iota // the port has no subnet manager
	StateAsking              // the administrator has not answered yet, or no longer does
	StateReady
)

// String prints s as status shows it.
func (s State) String() string {
	return [...]string{"no subnet manager", "asking", "ready"}[min(s, StateReady)]
}

// A Client is a port's client of subnet administration. It is not safe for
// concurrent use.
type Client struct {
	opt   Options
	port  Port
	state State
	since time.Time
	admin Address // to which questions are sent
	info  wire.ClassPortInfo
	heard time.Time // the last answer

	probe    *task
	groups   map[ib.GID]*group
	order    []*group // in the order of their first Join
	paths    map[PathKey]*path
	used     lru.List[path, *path] // all paths
	traps    []*subscription
	queue    []*task // tasks that wait to be sent, oldest first
	byTID    map[uint32]*task
	timers   timerheap.Heap[task, *task]
	lastSeq  uint64
	counters counts

	// During a Step only.
	dst []Action
	now time.Time
}

// New returns a Client of a port that has no subnet manager yet.
func New(opt Options) *Client {
	if opt.Rand == nil {
		panic("sa: Options.Rand is needed")
	}
	opt.Refresh = cmp.Or(opt.Refresh, 2*time.Minute)
	opt.Spread = max(0, cmp.Or(opt.Spread, 100*time.Millisecond))
	opt.PathLife = cmp.Or(opt.PathLife, 10*time.Minute)
	opt.FailedLife = cmp.Or(opt.FailedLife, time.Second)
	opt.QueryTimeout = cmp.Or(opt.QueryTimeout, 8*time.Second)
	opt.MaxTries = max(1, cmp.Or(opt.MaxTries, 4))
	opt.MaxBusy = max(1, cmp.Or(opt.MaxBusy, 5))
	opt.MaxInFlight = max(1, cmp.Or(opt.MaxInFlight, 8))
	opt.MaxGroups = cmp.Or(opt.MaxGroups, 1024)
	opt.MaxPaths = cmp.Or(opt.MaxPaths, 4096)
	c := &Client{opt: opt, groups: map[ib.GID]*group{}, paths: map[PathKey]*path{}, byTID: map[uint32]*task{}}
	c.probe = c.newTask(kindProbe)
	return c
}

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (c *Client) Step(dst []Action, now time.Time, ev Event) []Action {
	c.dst, c.now = dst, now
	ev.step(c)
	c.pump()
	dst, c.dst = c.dst, nil
	return dst
}

// reregister handles the event Reregister.
func (c *Client) reregister() {
	c.counters.reregisters++
	if c.state != StateDown {
		c.begin()
	}
}

// finish lifts MaxInFlight, so that Step, in StateReady, sends at once all MADs in the queue: the
// Deletes that end memberships and the Sets that end subscriptions. If a group is to be left and
// its Set has no answer yet, finish does not wait for the answer, because it would come too late.
func (c *Client) finish() {
	c.opt.MaxInFlight = math.MaxInt
	for _, g := range c.order {
		if g.want == 0 && g.task.status == sent && g.task.msg.Method == wire.MethodSet {
			g.unheard()
			c.enqueue(g.task)
		}
	}
}

// Deadline returns when the driver must send Wake; zero means never.
func (c *Client) Deadline() time.Time {
	if t := c.timers.First(); t != nil {
		return t.deadline
	}
	return time.Time{}
}

func (c *Client) act(a Action) { c.dst = append(c.dst, a) }

func (c *Client) setState(s State) {
	if c.state != s {
		c.state, c.since = s, c.now
		c.act(StateChanged{s})
	}
}

// setPort handles the event SetPort.
func (c *Client) setPort(p Port) {
	old := c.port
	p.SubnetTimeout = cmp.Or(p.SubnetTimeout, 18)
	if c.port = p; p == old {
		return
	}
	switch {
	case !p.usable():
		c.down()
	case !old.usable(), p.LID != old.LID, p.SMLID != old.SMLID, p.SMSL != old.SMSL, p.GID != old.GID,
		p.GRHRequired != old.GRHRequired:
		c.begin()
	}
}

// begin starts anew: it forgets the paths, and asks the administrator at the subnet manager's
// address after a random delay.
func (c *Client) begin() {
	c.ask()
	c.flush()
	if d := c.jitter(c.opt.Spread); d > 0 {
		c.pause(c.probe, d)
	}
}

// ask starts the probe, which repeats the question for the ClassPortInfo until the administrator
// answers; all other questions wait.
func (c *Client) ask() {
	c.setState(StateAsking)
	c.atManager()
	c.recall()
	c.probe.succeeded()
	c.enqueue(c.probe)
}

// atManager sets the administrator's address to that of the subnet manager.
func (c *Client) atManager() {
	c.admin = Address{LID: c.port.SMLID, SL: c.port.SMSL, QPN: ib.QPNGSI, QKey: ib.QKeyGSI}
	if c.port.GRHRequired {
		c.admin.GID = c.port.wellKnown()
	}
}

// recall queues all unanswered questions again, oldest first.
func (c *Client) recall() {
	byAge := slices.SortedFunc(slices.Values(c.timers.All()), func(a, b *task) int { return cmp.Compare(a.seq, b.seq) })
	for _, t := range byAge {
		if t.status != sent || t == c.probe {
			continue
		}
		if t.kind == kindGroup && t.msg.Method == wire.MethodSet {
			t.group.unheard()
		}
		c.enqueue(t)
	}
}

// renewAll asks for every group and subscription again.
func (c *Client) renewAll() {
	for _, g := range c.order {
		c.renew(g)
	}
	for _, s := range c.traps {
		c.due(s.task)
	}
}

// down handles the loss of the subnet manager.
func (c *Client) down() {
	if c.state == StateDown {
		return
	}
	c.setState(StateDown)
	c.stop(c.probe)
	c.info = wire.ClassPortInfo{}
	c.recall()
	c.flush()
	for _, p := range c.used.Values() { // flush has left those in question only
		c.pathFailed(p, NoAdmin, 0)
	}
	for _, g := range slices.Clone(c.order) {
		if g.want == 0 { // the administrator removes an absent port from its groups by itself
			c.remove(g)
		} else {
			c.renew(g)
		}
	}
}

// probed handles the answer to the question for the ClassPortInfo.
func (c *Client) probed(info wire.ClassPortInfo) {
	c.info = info
	if c.state == StateReady {
		return
	}
	c.setState(StateReady)
	c.stop(c.probe)
	// The administrator may be another one than before, or may have started anew. In both cases, as
	// a rule, the first try of the probe has no answer. If it has one, the administrator only
	// missed a question before, and the paths stay valid.
	c.renewAll()
	if c.probe.tries > 0 {
		c.flush()
	}
}

// patience returns how long to wait for the answer to one try.
func (c *Client) patience(t *task) time.Duration {
	if t == c.probe {
		return min(probeWait<<min(t.tries, 8), maxProbeWait)
	}
	d := c.info.ResponseTime.Duration() + 2*c.port.SubnetTimeout.Duration()
	return min(max(d, minWait), maxWait)
}

// jitter returns a random time below d, zero if d is not positive.
func (c *Client) jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return time.Duration(c.opt.Rand.Uint64() % uint64(d))
}
