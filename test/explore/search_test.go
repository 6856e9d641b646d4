package explore

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// A print tells states apart.
type print [16]byte

// prints are two of one state: with what may still go wrong, and without.
type prints struct{ full, core print }

// print prints a state.
func (w *world) print() prints {
	p := printer{b: make([]byte, 0, 4096), now: w.now, writers: w.t.writers}
	conns := make([]names, len(w.nodes))
	for i, n := range w.nodes {
		p.machine(n.f)
		p.uint(uint64(n.boot))
		for _, q := range n.qps {
			p.name(&p.conn, uint64(q.conn))
			p.printQPN(q.qpn)
			p.printQPN(q.dest)
			p.b = append(p.b, bit(q.rts)|bit(q.broken)<<1)
		}
		for j := range w.nodes {
			p.b = append(p.b, byte(n.paths[j].Kind), n.got[j][0], n.got[j][1])
			p.name(&p.conn, uint64(n.paths[j].Conn))
		}
		var seen [][2]uint64
		for k, v := range n.seen {
			seen = append(seen, [2]uint64{k, uint64(v)})
		}
		slices.SortFunc(seen, func(a, b [2]uint64) int { return slices.Compare(a[:], b[:]) })
		for _, m := range seen {
			p.name(&p.comm, m[0])
			p.uint(m[1])
		}
		conns[i] = p.conn
	}
	w.printItems(&p, conns)
	for _, v := range w.verdicts {
		p.name(&p.comm, uint64(v.loser))
		p.name(&p.comm, uint64(v.winner))
	}
	core := sha256.Sum256(p.b)
	for i := range w.wants {
		p.b = append(p.b, bit(w.wants[i])|bit(w.sent[i])<<1)
	}
	p.b = append(p.b, byte(w.left.losses), byte(w.left.repeats), byte(w.left.delays), byte(w.left.restarts),
		bit(w.mishaps), bit(w.restarted))
	full := sha256.Sum256(p.b)
	return prints{print(full[:16]), print(core[:16])}
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// printItems prints what is in flight, in an order that does not depend on age.
func (w *world) printItems(p *printer, conns []names) {
	rest := p.b
	var all [][]byte
	for i := range w.items {
		it := &w.items[i]
		p.b = []byte{byte(it.kind), byte(it.from), byte(it.to), bit(it.slow)}
		if it.slow {
			p.time(it.sent)
		}
		p.time(it.notYet)
		switch it.kind {
		case itemMAD:
			p.message((*[verbs.MADLen]byte)(&it.mad.Data))
			p.b = append(p.b, bit(it.mad.QPN != ib.QPNGSI))
		case itemData:
			p.printQPN(it.qpn)
			p.printQPN(it.src)
			p.name(&p.psn, uint64(it.psn))
			p.b = append(p.b, it.tag)
		default:
			p.name(&conns[it.to], uint64(it.conn))
		}
		all = append(all, p.b)
	}
	p.b = rest
	slices.SortFunc(all, bytes.Compare)
	for _, b := range all {
		p.octets(b)
	}
}

// An op is what can happen next.
type op uint8

const (
	opSend    op = iota // pair's packet
	opArrive            // item
	opLose              // item
	opKeep              // item: it arrives, and a copy stays in flight
	opTimer             // of a node
	opPass              // time, until something in flight can be
	opRestart           // node and how
)

type choice struct {
	op  op
	arg uint8
}

// How a host restarts.
const (
	sameQPN     = iota
	newQPN      // and announces it
	newQPNquiet // the announcements are lost
	restarts
)

// choices lists what can happen next.
func (w *world) choices() (cs []choice) {
	for i, waiting := range w.wants {
		if waiting {
			cs = append(cs, choice{opSend, uint8(i)})
		}
	}
	for i, it := range w.items {
		if w.now.Before(it.notYet) {
			continue
		}
		cs = append(cs, choice{opArrive, uint8(i)})
		if w.left.losses > 0 && (it.kind == itemMAD || it.kind == itemData && it.uc) {
			cs = append(cs, choice{opLose, uint8(i)})
		}
		if w.left.repeats > 0 && it.kind == itemMAD {
			cs = append(cs, choice{opKeep, uint8(i)})
		}
	}
	cs = w.passing(cs)
	for i := range w.nodes {
		for how := range restarts {
			if w.left.restarts > 0 {
				cs = append(cs, choice{opRestart, uint8(i*restarts + how)})
			}
		}
	}
	return cs
}

// passing adds the choices in which time goes by: until the next timer, or one
// due within the same millisecond.
func (w *world) passing(cs []choice) []choice {
	next, who := w.nextTimer()
	if who >= 0 && next.Sub(w.now) > far/2 {
		who = -1
	}
	for _, it := range w.items {
		if w.now.Before(it.notYet) && (who < 0 || it.notYet.Before(next)) {
			next, who = it.notYet, len(w.nodes)
		}
	}
	if who < 0 || !w.mayPass(next) {
		return cs
	}
	if who == len(w.nodes) {
		return append(cs, choice{opPass, 0})
	}
	for i, n := range w.nodes {
		if d := n.f.Deadline(); !d.IsZero() && d.Sub(next) <= time.Millisecond {
			cs = append(cs, choice{opTimer, uint8(i)})
		}
	}
	return cs
}

// mayPass reports whether everything in flight may still be there at t.
func (w *world) mayPass(t time.Time) bool {
	delays := 0
	for _, it := range w.items {
		switch {
		case w.now.Before(it.notYet):
			continue
		case it.kind == itemDead, t.Sub(it.sent) > maxDelay:
			return false
		case !it.slow && t.After(w.now):
			delays++
		}
	}
	return delays <= w.left.delays
}

// passTo moves the clock; what is in flight is late from then on.
func (w *world) passTo(t time.Time) {
	if !t.After(w.now) {
		return
	}
	for i := range w.items {
		if it := &w.items[i]; !it.slow && !w.now.Before(it.notYet) {
			it.slow = true
			w.left.delays--
			w.mishaps = true
		}
	}
	w.sayf("   %v pass", t.Sub(w.now).Round(time.Millisecond))
	w.now = t
}

// apply lets c happen.
func (w *world) apply(c choice) {
	switch c.op {
	case opSend:
		p := w.pairs[c.arg]
		w.sayf("%s gets its packet for %s", w.nodes[p[0]].name(), w.nodes[p[1]].name())
		w.wants[c.arg], w.sent[c.arg] = false, true
		w.send(p[0], p[1], 1)
	case opArrive:
		w.sayf("%s arrives", w.items[c.arg].words(w))
		w.arrive(int(c.arg), false)
	case opLose:
		w.sayf("%s is lost", w.items[c.arg].words(w))
		w.left.losses--
		w.mishaps = true
		w.items = slices.Delete(w.items, int(c.arg), int(c.arg)+1)
	case opKeep:
		w.sayf("%s arrives, and a copy stays in flight", w.items[c.arg].words(w))
		w.left.repeats--
		w.arrive(int(c.arg), true)
	case opTimer:
		n := w.nodes[c.arg]
		w.passTo(n.f.Deadline())
		w.sayf("a timer of %s expires", n.name())
		w.step(int(c.arg), ipoib.Wake{})
	case opPass:
		next := w.now.Add(far)
		for _, it := range w.items {
			if w.now.Before(it.notYet) && it.notYet.Before(next) {
				next = it.notYet
			}
		}
		w.passTo(next)
	case opRestart:
		w.restart(int(c.arg)/restarts, int(c.arg)%restarts)
	}
	w.check()
}

func (w *world) restart(i, how int) {
	n := w.node(i)
	w.sayf("%s restarts%s", n.name(), [...]string{"", " with a new UD QPN",
		" with a new UD QPN, which nobody hears of"}[how])
	w.left.restarts--
	w.mishaps, w.restarted = true, true
	w.items = slices.DeleteFunc(w.items, func(it item) bool {
		return it.to == i && (it.kind == itemQP || it.kind == itemDead)
	})
	if how != sameQPN {
		n.former = n.link.QPN
		n.link.QPN += 0x40 * ib.QPN(n.boot) // larger than any other's
	}
	n.got = [3][2]uint8{}
	w.start(i, how != newQPNquiet)
	for j, p := range w.pairs {
		if p[0] == i {
			w.wants[j] = true
		}
	}
}

// words names an item.
func (it *item) words(w *world) string {
	what := ""
	switch it.kind {
	case itemMAD:
		what = it.msg.Attr().String()
		switch m := it.msg.(type) {
		case mad.REQ:
			what += fmt.Sprintf(" %v", m.LocalCommID)
		case mad.REP:
			what += fmt.Sprintf(" %v for %v", m.LocalCommID, m.RemoteCommID)
		case mad.REJ:
			what += fmt.Sprintf(" %d of %v", m.Reason, m.RemoteCommID)
		}
	case itemData:
		what = fmt.Sprintf("data to QPN %v", it.qpn)
	case itemQP:
		return fmt.Sprintf("%s's queue pair %v", w.nodes[it.to].name(), it.qpn)
	case itemDead:
		return fmt.Sprintf("%s's queue pair of connection %d breaks: its retries", w.nodes[it.to].name(), it.conn)
	}
	return fmt.Sprintf("%s from %s to %s", what, w.nodes[it.from].name(), w.nodes[it.to].name())
}

// A memory knows how long states take to recover.
type memory struct {
	mu sync.Mutex
	m  map[print]rest
}

// A rest is how long it takes until all can send, and until nothing is left over.
type rest struct{ up, clean time.Duration }

func (k *memory) rest(p print) (rest, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d, ok := k.m[p]
	return d, ok
}

func (k *memory) add(ps []print, at []time.Time, up, clean time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, p := range ps {
		k.m[p] = rest{max(0, up.Sub(at[i])), clean.Sub(at[i])}
	}
}

// A result is what a search found.
type result struct {
	states, transitions, depth int
	complete                   bool          // the bound on the number of states did not cut it short
	slowest                    time.Duration // until all could send again
	failure                    string        // with its trace
}

// A step leads to a state.
type step struct {
	parent int32
	choice choice
}

// An open is a state to go on from.
type open struct {
	id int32
	w  *world
}

// A found is a state that a worker came to.
type found struct {
	step
	w     *world
	p     prints
	again bool
}

// search looks at every state of s, nearest first, up to most of them. It adds
// what machines and fabric hold in them to cores.
func (s *setup) search(most int, cores map[print]bool) (r result) {
	workers := make([]*tools, runtime.GOMAXPROCS(0))
	for i := range workers {
		workers[i] = newTools()
	}
	first := s.begin(workers[0])
	seen := map[print]bool{first.print().full: true}
	known := &memory{m: map[print]rest{}}
	steps := []step{{-1, choice{}}}
	frontier := []open{{0, first}}
	var slowest atomic.Int64
	for ; len(frontier) > 0; r.depth++ {
		var next []open
		for block := range slices.Chunk(frontier, 4096) {
			out := make([][]found, len(workers))
			var wg sync.WaitGroup
			for i, t := range workers {
				wg.Go(func() {
					for j := i; j < len(block); j += len(workers) {
						out[i] = block[j].expand(t, out[i], seen, known, &slowest)
						block[j].w = nil
					}
				})
			}
			wg.Wait()
			for _, fs := range out {
				for _, f := range fs {
					r.transitions++
					switch {
					case f.again || seen[f.p.full]:
						continue
					case f.w.failure != "":
						r.failure = s.trace(append(steps, f.step), f.w.failure)
						return r
					}
					seen[f.p.full], cores[f.p.core] = true, true
					steps = append(steps, f.step)
					next = append(next, open{int32(len(steps) - 1), f.w})
				}
			}
			if len(steps) >= most {
				r.states, r.slowest = len(steps), time.Duration(slowest.Load())
				return r
			}
		}
		frontier = next
	}
	r.complete = true
	r.states, r.slowest = len(steps), time.Duration(slowest.Load())
	return r
}

// expand checks that a state recovers and appends what it can lead to.
func (o open) expand(t *tools, out []found, seen map[print]bool, known *memory, slowest *atomic.Int64) []found {
	w := o.w
	w.t = t
	calm := w.fork()
	took := int64(calm.recover(known))
	for old := slowest.Load(); took > old && !slowest.CompareAndSwap(old, took); old = slowest.Load() {
	}
	if calm.failure != "" {
		return append(out, found{step: step{o.id, choice{opPass, 0xff}}, w: calm})
	}
	for _, c := range w.choices() {
		f := found{step: step{o.id, c}, w: w.fork()}
		f.w.apply(c)
		if f.w.failure == "" {
			f.p = f.w.print()
			if f.again = seen[f.p.full]; f.again {
				f.w = nil
			}
		}
		out = append(out, f)
	}
	return out
}

// choicesTo returns those that lead to the last of steps.
func choicesTo(steps []step) []choice {
	var path []choice
	for i := int32(len(steps) - 1); i > 0; i = steps[i].parent {
		path = append(path, steps[i].choice)
	}
	slices.Reverse(path)
	return path
}

// trace tells in words how the last of steps is reached.
func (s *setup) trace(steps []step, failure string) string {
	path := choicesTo(steps)
	var b strings.Builder
	fmt.Fprintf(&b, "%s: after %d steps: %s\n", s.name, len(path), failure)
	w := s.begin(newTools())
	for i, n := range w.nodes {
		fmt.Fprintf(&b, "%s is %v, mode %v\n", n.name(), n.link, s.hosts[i].mode)
	}
	w.log = func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	for i, c := range path {
		if c.arg == 0xff {
			b.WriteString("from then on nothing is lost, and all send to each other\n")
			w.recover(&memory{m: map[print]rest{}})
			break
		}
		fmt.Fprintf(&b, "%2d ", i+1)
		w.apply(c)
	}
	return b.String()
}

// describe tells what connections there are.
func (w *world) describe() string {
	var parts []string
	for _, n := range w.nodes {
		for _, c := range n.f.Conns() {
			parts = append(parts, fmt.Sprintf("%s has connection %d to %v in %s", n.name(), c.Conn, c.Peer, c.State))
		}
		parts = append(parts, fmt.Sprintf("%s holds %d communication IDs, got %v", n.name(), n.f.CommIDs(), n.got))
	}
	return strings.Join(parts, "; ")
}
