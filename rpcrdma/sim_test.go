package rpcrdma

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

var simSeeds = flag.Int("rpcrdma.seeds", 40, "seeds of each simulation; a quarter under the race detector")

// A weather is what a simulated connection has to endure.
type weather struct {
	name     string
	lose     float64 // Sends that disappear
	twist    float64 // Sends of the hostile end with words changed
	hostile  int     // which end that is
	die      float64 // READs and WRITEs at which their end dies
	cut      float64 // rounds in which the connection breaks
	cancel   float64 // rounds in which a call is cancelled
	refuse   float64 // rounds in which no memory can be had
	starve   bool    // the server answers late, and grants little
	noReturn bool    // every call must succeed, and nothing may be violated
}

var weathers = []weather{
	{name: "calm", noReturn: true},
	{name: "starvation", starve: true, noReturn: true},
	{name: "loss", lose: 0.03},
	{name: "cuts", cut: 0.05, cancel: 0.05, refuse: 0.05},
	{name: "death amid chunks", die: 0.05},
	{name: "hostile client", twist: 0.2, hostile: 0},
	{name: "hostile server", twist: 0.2, hostile: 1},
	{name: "everything", lose: 0.01, twist: 0.02, die: 0.01, cut: 0.02, cancel: 0.05, refuse: 0.02, starve: true},
}

// A tally is what has happened in one simulation.
type tally struct {
	calls, good, bad, lives, long, dropped int
	versions                               [3]int
	violations                             int
}

func (a *tally) add(b tally) {
	a.calls, a.good, a.bad, a.lives, a.long, a.dropped = a.calls+b.calls, a.good+b.good, a.bad+b.bad,
		a.lives+b.lives, a.long+b.long, a.dropped+b.dropped
	a.violations += b.violations
	for i := range a.versions {
		a.versions[i] += b.versions[i]
	}
}

// TestSimulation lets a client and a server call each other over one connection
// after the other, whose settings differ, in all weathers. Whatever happens:
// every call ends once; a reply is its call's own; nobody has more calls under
// way than were granted; nobody writes to memory that no call has offered; and
// no memory stays exposed.
func TestSimulation(t *testing.T) {
	seeds := *simSeeds
	if raceDetector {
		seeds = max(1, seeds/4)
	}
	for _, how := range weathers {
		t.Run(how.name, func(t *testing.T) {
			var sum tally
			for seed := range uint64(seeds) {
				s := simulate(t, seed, how)
				sum.add(s.tally)
			}
			t.Logf("%+v", sum)
			switch {
			case sum.good < seeds*10:
				t.Errorf("hardly anything happened: good is %v, want at least %v", sum.good, seeds*10)
			case sum.long < seeds:
				t.Errorf("hardly anything happened: long is %v, want at least %v", sum.long, seeds)
			case sum.versions[1] == 0:
				t.Errorf("hardly anything happened: no run ended with version 1")
			case sum.versions[2] == 0:
				t.Errorf("hardly anything happened: no run ended with version 2")
			}
			if how.noReturn {
				expect.Equal(t, sum.bad, 0, "number of failed calls")
				expect.Equal(t, sum.violations, 0, "number of violations")
			}
			if how.twist > 0.1 && sum.dropped < seeds {
				t.Errorf("hardly anything was refused: %+v", sum)
			}
		})
	}
}

// TestReplay: a seed replays.
func TestReplay(t *testing.T) {
	for seed := range uint64(3) {
		a, b := simulate(t, seed, weathers[7]), simulate(t, seed, weathers[7])
		if a.tally != b.tally || !slices.Equal(a.w.trace, b.w.trace) {
			t.Fatalf("seed %d differs", seed)
		}
	}
}

type simulation struct {
	t      *testing.T
	seed   uint64
	how    weather
	r      *rand.Rand
	now    time.Time
	w      *fabric
	nextID uint64
	asked  [2]map[uint64]ask // calls without Done
	cache  VersionCache
	late   []Serve // calls that the server keeps for a while
	tally
}

// An ask is what a call wants back.
type ask struct {
	reply int
	items []int
}

func simulate(t *testing.T, seed uint64, how weather) *simulation {
	s := &simulation{t: t, seed: seed, how: how, r: rand.New(rand.NewPCG(seed, 7)), now: t0}
	for range 3 {
		s.life()
	}
	return s
}

func (s *simulation) chance(p float64) bool { return p > 0 && s.r.Float64() < p }

// options are those of an end on its next connection.
func (s *simulation) options() Options {
	o := Options{SendSize: 1024 << s.r.IntN(4), RecvSize: 1024 << s.r.IntN(4), Silent: s.chance(0.2),
		RecvInv: s.chance(0.5), SendInv: s.chance(0.5), MixedHandles: s.chance(0.3), Ask: 1 + s.r.IntN(8),
		Grant: 1 + s.r.IntN(8), MaxLong: 1 << 16, MaxCalls: 12, CallTimeout: 20 * time.Second}
	if s.chance(0.3) {
		o.MaxVersion = 1
	}
	return o
}

// life is one connection, from its beginning to its end.
func (s *simulation) life() {
	client, server := s.options(), s.options()
	if client.MaxVersion != 1 {
		client.Start = s.cache.Start("server", s.now)
	}
	if s.chance(0.7) {
		client.Program = 100003
	}
	client.XID = XID(s.r.Uint32())
	w := pair(s.t, client, server)
	w.rand, w.now, w.delay = s.r, s.now, time.Duration(1+s.r.IntN(50))*time.Millisecond
	s.w, s.late = w, nil
	w.trace = append(w.trace, fmt.Sprintf("seed %d, %s, life %d", s.seed, s.how.name, s.lives))
	for i, e := range w.ends {
		s.asked[i] = map[uint64]ask{}
		e.segment = []int{0, 0, 3000, 5000}[s.r.IntN(4)]
		e.fixed = e.opts.MixedHandles && s.chance(0.5)
		e.program = func(a Serve) Event { return s.serve(i, a) }
		e.notify = func(a Action) { s.watch(i, a) }
	}
	w.lose = func(*end, *Header) bool { return s.chance(s.how.lose) }
	w.twist = func(from *end, data []byte) []byte {
		if from == w.ends[s.how.hostile] && s.chance(s.how.twist) {
			for range 1 + s.r.IntN(2) {
				i := s.r.IntN(len(data)/4) * 4
				if s.r.IntN(2) == 0 {
					i = s.r.IntN(min(len(data)/4, 24)) * 4 // the header
				}
				copy(data[i:], words([]uint32{0, 1, 2, 3, 4, 5, 6, 65, 1 << 31, 0xffffffff, w.nextHandle,
					s.r.Uint32()}[s.r.IntN(12)]))
			}
		}
		return data
	}
	w.connect()
	w.server().step(PeerReady{})
	for range 12 {
		s.round()
		if w.down {
			break
		}
	}
	for range 60 { // what is under way comes to its end
		if w.down || len(s.asked[0])+len(s.asked[1]) == 0 {
			break
		}
		s.answerLate(len(s.late))
		w.run(time.Second)
	}
	w.cut(w.client())
	s.nothingLeft(w)
	for _, l := range w.client().learned {
		s.cache.Learn("server", w.now, l)
	}
	if i := w.client().Info(); i.Settled {
		s.versions[i.Version]++
	}
	s.violations += w.violations
	s.now = w.now.Add(time.Second)
	s.lives++
}

// nothingLeft checks that no end of w waits for anything, and counts what was dropped.
func (s *simulation) nothingLeft(w *fabric) {
	for i, e := range w.ends {
		switch {
		case len(s.asked[i]) > 0:
			w.Fatalf("seed %d: asked[i] has %v elements, want 0", s.seed, len(s.asked[i]))
		case len(e.calls) > 0:
			w.Fatalf("seed %d: calls has %v elements, want 0", s.seed, len(e.calls))
		case len(e.served) > 0:
			w.Fatalf("seed %d: served has %v elements, want 0", s.seed, len(e.served))
		case !e.Deadline().IsZero():
			w.Fatalf("seed %d: Deadline.IsZero is false, want true", s.seed)
		}
		for r := ReasonShort; r <= ReasonWrongInv; r++ {
			s.dropped += int(e.Counters()[r])
			if s.how.noReturn && r != ReasonVersion {
				expect.MustEqual(w, e.Counters()[r], 0, "seed %d: what %s has counted as %v", s.seed, e.name, r)
			}
		}
	}
}

// round is a while of a connection.
func (s *simulation) round() {
	for range s.r.IntN(4) {
		s.call(0)
	}
	if s.chance(0.5) && s.w.server().answered {
		s.call(1)
	}
	if s.how.starve {
		s.w.server().step(SetGrant{s.r.IntN(3)})
	}
	e := s.w.ends[s.r.IntN(2)]
	if s.chance(s.how.cancel) && len(e.calls) > 0 {
		e.step(Cancel{e.calls[s.r.IntN(len(e.calls))].req.ID})
	}
	e.refuse = s.chance(s.how.refuse)
	s.w.run(time.Duration(s.r.IntN(200)) * time.Millisecond)
	s.answerLate(s.r.IntN(3))
	if s.chance(s.how.cut) {
		s.w.cut(e)
	}
}

// call makes a call of some shape. Its arguments say what it wants back.
func (s *simulation) call(i int) {
	e := s.w.ends[i]
	if s.w.down || len(e.calls) >= 11 {
		return
	}
	s.nextID++
	size := func() int { return []int{0, 100, 900, 3000, 4100, 20000}[s.r.IntN(6)] + s.r.IntN(50) }
	args := 16 + size()
	a := ask{reply: size()}
	sub := Submit{ID: s.nextID}
	small := i == 1 && e.version == 1 // RFC 8167: no chunks
	if small {
		args, a.reply = 16+s.r.IntN(400), s.r.IntN(400)
	} else if s.chance(0.3) {
		for range 1 + s.r.IntN(2) {
			n := 1 + size()
			a.items = append(a.items, n)
			sub.Results = append(sub.Results, n+s.r.IntN(100))
		}
	}
	sub.MaxReply = 24 + a.reply
	if small && sub.MaxReply < 500 {
		sub.MaxReply = 500
	}
	sub.Payload = rpc(args)
	items := [2]int{}
	copy(items[:], a.items)
	binary.BigEndian.PutUint64(sub.Payload[40:], s.nextID)
	binary.BigEndian.PutUint32(sub.Payload[48:], uint32(a.reply))
	binary.BigEndian.PutUint16(sub.Payload[52:], uint16(items[0]))
	binary.BigEndian.PutUint16(sub.Payload[54:], uint16(items[1]))
	if rest := len(sub.Payload) - 56; rest > 100 && s.chance(0.5) {
		sub.Reduce = []Span{{56, rest &^ 3}}
	}
	s.asked[i][s.nextID] = a
	s.calls++
	e.step(sub)
}

// replyTo is what a call with that ID gets back, and where its items are.
func replyTo(id uint64, reply int, items []int) (payload []byte, spans []Span) {
	payload = (&RPCReply{}).Append(nil)
	fill := func(n int, salt byte) {
		for i := range n {
			payload = append(payload, byte(id)+byte(i)*3+salt)
		}
	}
	for k, n := range items {
		if n > 0 {
			spans = append(spans, Span{len(payload), n})
			fill(n, byte(k+1))
			payload = append(payload, make([]byte, roundUp(n)-n)...)
		}
	}
	fill(reply, 0)
	return payload, spans
}

func (s *simulation) serve(i int, a Serve) Event {
	if i == 1 && (s.how.starve || s.chance(0.1)) && len(s.w.server().serves) > 1 {
		a.Payload = slices.Clone(a.Payload)
		s.late = append(s.late, a)
		return nil
	}
	return s.reply(i, a)
}

func (s *simulation) answerLate(n int) {
	for range min(n, len(s.late)) {
		k := s.r.IntN(len(s.late))
		a := s.late[k]
		s.late = slices.Delete(s.late, k, k+1)
		s.w.server().step(s.reply(1, a))
	}
}

// reply is the program of both ends.
func (s *simulation) reply(i int, a Serve) Event {
	c, args, err := ParseRPCCall(a.Payload)
	if err != nil || len(args) < 16 {
		if s.how.noReturn && err != nil {
			s.w.Fatalf("seed %d: %v", s.seed, err)
		}
		return Answer{ID: a.ID, Payload: (&RPCReply{XID: c.XID, Status: RPCGarbageArgs}).Append(nil)} // also NULL
	}
	if s.how.twist == 0 && !bytes.Equal(args[16:], rpc(len(args))[40+16:]) {
		s.w.Fatalf("seed %d: a call was damaged", s.seed)
	}
	want := int(binary.BigEndian.Uint32(args[8:]))
	items := []int{int(binary.BigEndian.Uint16(args[12:])), int(binary.BigEndian.Uint16(args[14:]))}
	if want > 1<<16 {
		return CannotAnswer{a.ID, want}
	}
	payload, spans := replyTo(binary.BigEndian.Uint64(args), want, items)
	return Answer{ID: a.ID, Payload: payload, Reduce: spans}
}

// watch sees every action.
func (s *simulation) watch(i int, a Action) {
	e := s.w.ends[i]
	if n := e.flight(); n > max(e.opts.ask(), 1) || len(e.served) > e.opts.grant() {
		s.w.Fatalf("seed %d: %s: %d calls, %d served", s.seed, e.name, n, len(e.served))
	}
	switch a := a.(type) {
	case Read, Write:
		if s.chance(s.how.die) {
			s.w.cut(e)
		}
	case Send:
		if h, _, _ := ParseHeader(a.Data); h.Proc == ProcNOMSG {
			s.long++
		}
	case Done:
		want, open := s.asked[i][a.ID]
		if !open {
			s.w.Fatalf("seed %d: call %d ended twice", s.seed, a.ID)
		}
		delete(s.asked[i], a.ID)
		if a.Err != nil {
			s.bad++
			if s.how.noReturn {
				s.w.Fatalf("seed %d: call %d: %v", s.seed, a.ID, a.Err)
			}
			return
		}
		s.good++
		if s.how.twist > 0 {
			return // the octets may be anything
		}
		payload, spans := replyTo(a.ID, want.reply, want.items)
		for k, span := range spans {
			if !bytes.Equal(a.Results[k], payload[span.Offset:][:span.Len]) {
				s.w.Fatalf("seed %d: call %d: result %d has %d octets, want %d", s.seed, a.ID, k, len(a.Results[k]), span.Len)
			}
		}
		if rest := without(payload, spans); !bytes.Equal(a.Payload[4:], rest[4:]) {
			s.w.Fatalf("seed %d: call %d: a reply of %d octets, want %d", s.seed, a.ID, len(a.Payload), len(rest))
		}
	case Close:
		if s.how.noReturn && a.Err.Reason != ReasonNoVersion {
			s.w.Fatalf("seed %d: %s closes: %v", s.seed, e.name, a.Err)
		}
	}
}
