package explore

import (
	"crypto/sha256"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"ipoibcm/internal/simsm"
	"ipoibcm/ipoib"
	wire "ipoibcm/wire/sa"
)

// What can happen next in a subnet.
const (
	inArrive  op = iota // item
	inLose              // item
	inTimer             // of a host, or of the subnet manager
	inStop              // the subnet manager
	inStart             // it starts anew, with a word to all, or quietly
	inMove              // the P_Key of a host
	inRelabel           // a host
	inJoin              // host a
	inLeave             // host a
	inSend              // host b
	inLink              // of a host goes down, or up again
	inRecover           // nothing goes wrong any more
)

// choices lists what can happen next.
func (w *subnetWorld) choices() (cs []choice) {
	for i, it := range w.items {
		if w.overtakes(i) {
			continue
		}
		cs = append(cs, choice{inArrive, uint8(i)})
		if w.left.losses > 0 && it.mad != nil {
			cs = append(cs, choice{inLose, uint8(i)})
		}
	}
	cs = w.passing(cs)
	add := func(left int, o op, n int) {
		for i := range n {
			if left > 0 {
				cs = append(cs, choice{o, uint8(i)})
			}
		}
	}
	if w.sub.Running() {
		add(w.left.stops, inStop, 1)
	}
	add(w.left.starts, inStart, 1)
	if w.left.quiet > 0 {
		cs = append(cs, choice{inStart, 1})
	}
	add(w.left.moves, inMove, 2)
	add(w.left.relabels, inRelabel, 2)
	add(w.left.flaps, inLink, 2)
	for i, p := range w.sub.Ports() {
		if !p.Up && w.left.flaps == 0 {
			cs = append(cs, choice{inLink, uint8(i)})
		}
	}
	if w.hosts[0].joined {
		add(w.left.leaves, inLeave, 1)
	} else {
		add(w.left.joins, inJoin, 1)
	}
	add(w.left.sends, inSend, 1)
	return cs
}

// overtakes says that item i would arrive before another that was sent before it the same way:
// a path of InfiniBand keeps the order of datagrams.
func (w *subnetWorld) overtakes(i int) bool {
	return slices.ContainsFunc(w.items[:i], func(o madItem) bool {
		it := w.items[i]
		return o.host == it.host && o.up == it.up && (o.mad == nil) == (it.mad == nil)
	})
}

// passing adds the choices in which time goes by until the next timer: not as far as a
// refresh, and no further than a MAD may be late.
func (w *subnetWorld) passing(cs []choice) []choice {
	next, who := w.due()
	if who < 0 || next.Sub(w.now) > refresh/2 || w.left.timers == 0 {
		return cs
	}
	delays := 0
	for _, it := range w.items {
		switch {
		case next.Sub(it.sent) > lateBy:
			return cs
		case !it.slow && next.After(w.now):
			delays++
		}
	}
	if delays > w.left.delays {
		return cs
	}
	return append(cs, choice{inTimer, uint8(who)})
}

// apply lets c happen.
func (w *subnetWorld) apply(c choice) {
	i := int(c.arg)
	switch c.op {
	case inArrive:
		w.sayf("%s arrives", w.items[i].words(w))
		w.arrive(i)
	case inLose:
		w.sayf("%s is lost", w.items[i].words(w))
		w.left.losses--
		w.items = slices.Delete(w.items, i, i+1)
	case inTimer:
		at, _ := w.due()
		w.left.timers--
		w.passTo(at)
		w.sayf("a timer expires, of %d", i)
		w.expire(i)
	case inStop, inStart, inRelabel:
		w.manager(c.op, i)
	case inMove:
		w.sayf("the P_Key of %s moves", w.hosts[i].name())
		w.left.moves--
		w.step(i, ipoib.PortChanged{Port: w.sub.Ports()[i].Now(), Reregister: true, Moved: true})
	case inJoin:
		w.sayf("a joins the group")
		w.left.joins--
		w.join(0, true)
	case inLeave:
		w.sayf("a leaves the group")
		w.left.leaves--
		w.join(0, false)
	case inSend:
		w.sayf("b sends to the group")
		w.left.sends--
		w.output(1, theGroup)
	case inLink:
		p := w.sub.Ports()[i]
		w.sayf("the link of %s is up: %v", w.hosts[i].name(), !p.Up)
		w.left.flaps = max(0, w.left.flaps-1)
		w.sub.SetLink(w.now, p, !p.Up)
	case inRecover:
		w.sayf("from then on nothing goes wrong")
		w.recover()
	}
	w.collect()
}

// manager has the subnet manager do something of its own.
func (w *subnetWorld) manager(o op, i int) {
	switch {
	case o == inStop:
		w.sayf("the subnet manager stops")
		w.left.stops--
		w.sub.Stop()
	case o == inRelabel:
		w.sayf("%s gets another LID, and all are asked to register again", w.hosts[i].name())
		w.left.relabels--
		w.sub.Relabel(w.now, w.sub.Ports()[i])
		w.sub.Start(w.now)
	case i == 1:
		w.sayf("the subnet manager starts anew without a word")
		w.left.quiet--
		w.sub.Quiet = true
		w.sub.Start(w.now)
		w.sub.Quiet, w.unsaid = false, true
	default:
		w.sayf("the subnet manager starts anew")
		w.left.starts--
		w.sub.Start(w.now)
		w.unsaid = false
	}
}

// passTo moves the clock; what is on its way is late from then on.
func (w *subnetWorld) passTo(t time.Time) {
	if !t.After(w.now) {
		return
	}
	for i := range w.items {
		if it := &w.items[i]; !it.slow {
			it.slow = true
			w.left.delays--
		}
	}
	w.sayf("   %v pass", t.Sub(w.now).Round(time.Millisecond))
	w.now = t
}

// words names an item.
func (it *madItem) words(w *subnetWorld) string {
	name := w.hosts[it.host].name()
	if it.mad == nil {
		return fmt.Sprintf("%T for %s", it.ev, name)
	}
	var m wire.Message
	if err := m.UnmarshalBinary(it.mad.Data[:]); err != nil {
		return err.Error()
	}
	dir := "to "
	if it.up {
		dir = "from "
	}
	return fmt.Sprintf("%v %v %v %s%s", m.Method, m.Status, m.Record, dir, name)
}

// print prints a state.
func (w *subnetWorld) print() prints {
	p := printer{b: make([]byte, 0, 8192), now: w.now, writers: w.t.writers}
	for i, h := range w.hosts {
		p.machine(h.f)
		p.seen = map[unsafe.Pointer]int{}
		p.value(&h.paths)
		p.value(&h.at)
		p.b = append(p.b, bit(h.joined), bit(w.sub.Ports()[i].Up))
	}
	p.seen = map[unsafe.Pointer]int{}
	p.writers.of(reflect.TypeFor[simsm.Subnet]())(&p, unsafe.Pointer(w.sub))
	w.printItems(&p)
	p.b = append(p.b, bit(w.unsaid))
	core := sha256.Sum256(p.b)
	p.b = fmt.Append(p.b, w.left)
	full := sha256.Sum256(p.b)
	return prints{print(full[:16]), print(core[:16])}
}

// printItems prints what is on its way: of each host and direction in its order, since a path keeps it.
func (w *subnetWorld) printItems(p *printer) {
	rest := p.b
	var all [][]byte
	for i := range w.items {
		it := &w.items[i]
		p.b = []byte{byte(it.host), bit(it.up), bit(it.mad != nil), bit(it.slow)}
		if it.slow {
			p.time(it.sent)
		}
		if it.mad == nil {
			p.octets(fmt.Appendf(nil, "%T", it.ev))
		} else {
			var m wire.Message
			if err := m.UnmarshalBinary(it.mad.Data[:]); err != nil {
				panic(err)
			}
			p.name(&p.tid, m.TransactionID)
			m.TransactionID = 0
			b, _ := m.AppendBinary(nil)
			p.octets(b)
		}
		all = append(all, p.b)
	}
	p.b = rest
	way := func(b []byte) string { return string(b[:3]) }
	slices.SortStableFunc(all, func(a, b []byte) int { return strings.Compare(way(a), way(b)) })
	for _, b := range all {
		p.octets(b)
	}
}

// searchSubnet looks at every state of s, nearest first, up to most of them.
func (s *subnetSetup) search(most int) (r result) {
	workers := make([]*tools, runtime.GOMAXPROCS(0))
	for i := range workers {
		workers[i] = newTools()
	}
	first := s.begin(workers[0])
	p := first.print()
	seen, cores := map[print]bool{p.full: true}, map[print]bool{}
	steps := []step{{-1, choice{}}}
	type state struct {
		id int32
		w  *subnetWorld
		p  prints
	}
	for frontier := []state{{0, first, p}}; len(frontier) > 0; r.depth++ {
		var next []state
		for block := range slices.Chunk(frontier, 512) {
			calm := make([]bool, len(block))
			for i := range block {
				calm[i] = cores[block[i].p.core]
				cores[block[i].p.core] = true
			}
			out := make([][]subnetFound, len(block))
			var wg sync.WaitGroup
			for i, t := range workers {
				wg.Go(func() {
					for j := i; j < len(block); j += len(workers) {
						out[j] = block[j].w.expand(t, block[j].id, !calm[j])
						block[j].w = nil
					}
				})
			}
			wg.Wait()
			for _, fs := range out {
				for _, f := range fs {
					r.transitions++
					if f.w.failure != "" {
						r.failure = s.trace(append(steps, f.step), f.w.failure)
						return r
					}
					if seen[f.p.full] {
						continue
					}
					seen[f.p.full] = true
					steps = append(steps, f.step)
					next = append(next, state{int32(len(steps) - 1), f.w, f.p})
				}
			}
			if r.states = len(steps); r.states >= most {
				return r
			}
		}
		frontier = next
	}
	r.complete = true
	return r
}

// A subnetFound is a state that a worker came to.
type subnetFound struct {
	step
	w *subnetWorld
	p prints
}

// expand appends what a state can lead to, and checks that it recovers.
func (w *subnetWorld) expand(t *tools, id int32, recovers bool) (out []subnetFound) {
	w.t = t
	if recovers {
		calm := w.fork()
		calm.recover()
		if calm.failure != "" {
			return []subnetFound{{step: step{id, choice{inRecover, 0}}, w: calm}}
		}
	}
	for _, c := range w.choices() {
		f := subnetFound{step: step{id, c}, w: w.fork()}
		f.w.apply(c)
		if f.w.failure == "" {
			f.p = f.w.print()
		}
		out = append(out, f)
	}
	return out
}

// trace tells in words how the last of steps is reached.
func (s *subnetSetup) trace(steps []step, failure string) string {
	path := choicesTo(steps)
	var b strings.Builder
	fmt.Fprintf(&b, "%s: after %d steps: %s\n", s.name, len(path), failure)
	w := s.begin(newTools())
	w.log = func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	for i, c := range path {
		fmt.Fprintf(&b, "%2d ", i+1)
		w.apply(c)
	}
	return b.String()
}

// record prints what an interface holds, by what type it is.
func (ws writers) record(t reflect.Type) writer {
	return func(p *printer, x unsafe.Pointer) {
		v := reflect.NewAt(t, x).Elem().Elem()
		if !v.IsValid() {
			p.uint(0)
			return
		}
		p.octets([]byte(v.Type().String()))
		c := reflect.New(v.Type())
		c.Elem().Set(v)
		ws.of(v.Type())(p, c.UnsafePointer())
	}
}

// value prints what x points to.
func (p *printer) value(x any) {
	v := reflect.ValueOf(x)
	p.writers.of(v.Type().Elem())(p, v.UnsafePointer())
}

// unprintedSubnet are the fields of a subnet and its clients that do not decide what happens
// next, as unprinted are those of connections.
var unprintedSubnet = map[string]string{
	"ipoib.fabric.opt":      "fixed, but for what sa.Client.port says",
	"ipoib.fabric.unused":   "an index of paths",
	"ipoib.fabric.sendOnly": "an index of groups; never full",
	"ipoib.mcGroup.Links":   "a place in sendOnly",
	"ipoib.portPath.Links":  "a place in unused",
	"sa.Client.opt":         "fixed",
	"sa.Client.since":       "shown only",
	"sa.Client.byTID":       "an index of the tasks",
	"sa.Client.timers":      "an index of the tasks",
	"sa.Client.lastSeq":     "numbers only",
	"sa.Client.counters":    "statistics",
	"sa.Client.dst":         "of the last Step",
	"sa.Client.now":         "of the last Step",
	"sa.task.tid":           "msg has it",
	"sa.task.seq":           "numbers only",
	"simsm.Subnet.Options":  "fixed",
	"simsm.Subnet.Stats":    "statistics",
	"simsm.Subnet.rnd":      "nothing is left to chance",
	"simsm.Subnet.inbox":    "taken at once",
	"simsm.Subnet.lastTID":  "numbers only",
	"simsm.Port.subnet":     "whose it is",
}

func init() {
	for name, why := range unprintedSubnet {
		unprinted[name] = why
	}
	deadlines["sa.task"] = "deadline"
}
