// Package sim runs whole interfaces on the simulated fabric: hosts made of the
// ipoib machine, a simulated provider with the real RC, UC and UD engine, and
// stand-ins for kernel, agent and data path. Everything happens on one virtual
// clock, one goroutine and one seed; a failure says how to run the seed again.
//
// While a simulation runs, every packet and every step is checked against what
// must never happen; once the network is quiet the hosts are compared with each
// other. What is checked stands in check_test.go.
package sim

import (
	"encoding/binary"
	"flag"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/internal/simfabric"
	"ipoibcm/internal/simsm"
	"ipoibcm/wire/encap"
)

var seedsFlag = flag.Float64("sim.seeds", 1, "run this many times the usual number of seeds")

// seeds runs body for n seeds, fewer when that would take long, more if asked for.
func seeds(t *testing.T, n int, body func(w *world)) {
	t.Helper()
	share := *seedsFlag * long.Of(0.05, 0.5)
	if raceDetector {
		share /= 10
	}
	simfabric.Seeds(t, max(1, int(float64(n)*share)),
		func(t *testing.T, seed uint64) { body(newWorld(t, seed, simfabric.Options{})) })
}

// A world is one simulation.
type world struct {
	t       testing.TB
	f       *simfabric.Fabric
	r       *rand.Rand
	hosts   []*host
	packets map[uint64]*packet
	lastID  uint64
	ends    map[end]*conn // every connected QP there ever was
	trace   []string
	dups    bool              // the network has repeated packets
	tally   map[string]uint64 // what happened, machines' counters included; nil: not asked for
	steps   uint64            // of all machines
	digest  uint64            // of all events and actions
	fault   fault             // of the first host
	stormy  bool              // every 16th datagram's source is looked up as one that sends many
	ring    int               // hosts up to so far apart keep talking; 0: all with all

	subnet      *simsm.Subnet // of which hosts are ports; nil: Ethernet
	subnetTimer simfabric.Timer
}

// An end names a queue pair on the fabric.
type end struct {
	gid ib.GID
	qpn ib.QPN
}

func newWorld(t testing.TB, seed uint64, opts simfabric.Options) *world {
	f := simfabric.New(seed, opts)
	return &world{t: t, f: f, r: f.Rand(), packets: map[uint64]*packet{}, ends: map[end]*conn{}}
}

const maxTrace = 150

// tell keeps a line for the case that something fails.
func (w *world) tell(format string, args ...any) {
	if len(w.trace) >= 2*maxTrace {
		w.trace = append(w.trace[:0], w.trace[maxTrace:]...)
	}
	w.trace = append(w.trace, fmt.Sprintf("%12v ", w.f.Now().Sub(epoch))+fmt.Sprintf(format, args...))
}

var epoch = simfabric.New(0, simfabric.Options{}).Now()

// fatalf ends the simulation with what happened last.
func (w *world) fatalf(format string, args ...any) {
	text := fmt.Sprintf("seed %d at %v: %s", w.f.Seed(), w.f.Now().Sub(epoch), fmt.Sprintf(format, args...))
	if w.t == nil {
		panic(&violation{text, w.before()})
	}
	w.t.Helper()
	w.t.Logf("what came before:\n%s", w.before())
	w.t.Fatal(text)
}

// before says what happened last, and how things are now.
func (w *world) before() string {
	var b strings.Builder
	for _, l := range w.trace[max(0, len(w.trace)-maxTrace):] {
		fmt.Fprintln(&b, l)
	}
	for _, h := range w.hosts {
		fmt.Fprintf(&b, "%v\n", h)
	}
	return b.String()
}

// A violation is the end of a simulation that no test waits for: it runs beside
// others, or is meant to fail.
type violation struct{ text, before string }

// try runs body on a world of its own and returns what ended it before its time:
// nil if nothing did. A panic of the code under test is a violation too.
func try(seed uint64, body func(w *world)) (v *violation) {
	w := newWorld(nil, seed, simfabric.Options{})
	defer func() {
		switch r := recover().(type) {
		case nil:
		case *violation:
			v = r
		default:
			v = &violation{fmt.Sprintf("seed %d at %v: panic: %v", seed, w.f.Now().Sub(epoch), r),
				w.before() + string(debug.Stack())}
		}
	}()
	body(w)
	return nil
}

// count adds n to a line of the tally.
func (w *world) count(name string, n uint64) {
	if w.tally != nil {
		w.tally[name] += n
	}
}

// run lets d go by.
func (w *world) run(d time.Duration) { w.f.RunFor(d) }

// upTo returns a random time below d.
func (w *world) upTo(d time.Duration) time.Duration { return time.Duration(w.r.Int64N(int64(d))) }

// oneOf returns one of what it is given.
func oneOf[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// chance is true with probability p.
func (w *world) chance(p float64) bool { return w.r.Float64() < p }

// heal makes the network perfect.
func (w *world) heal() {
	w.f.Options = simfabric.Options{Delay: w.f.Delay}
	w.f.Filter = w.filter()
	w.f.Partition()
	w.healSubnet()
	for _, h := range w.hosts {
		if !h.dead {
			h.port.SetActive(true)
		}
	}
	w.tell("the network is perfect")
}

// A packet is one IP packet of the workload. Its octets follow from it.
type packet struct {
	id       uint64
	from, to *host          // to is nil for groups
	link     encap.LinkAddr // where from believed dst to be
	src, dst netip.Addr
	size     int
	df       bool
	ipid     uint16
	at       time.Time

	refused   bool // its sender answered it with ICMP
	posts     int  // first octets of it, posted on a QP
	conn      *conn
	delivered int
	gotAt     time.Time
}

func (p *packet) String() string {
	return fmt.Sprintf("packet %d of %d octets from %v to %v", p.id, p.size, p.src, p.dst)
}

// proto is for experiments (RFC 3692): the interface takes it for data.
const proto = 253

// octets returns the whole IP packet.
func (p *packet) octets() []byte {
	b := make([]byte, p.size)
	head := headerLen(p.dst)
	if p.dst.Is4() {
		b[0], b[8], b[9] = 0x45, 64, proto
		binary.BigEndian.PutUint16(b[2:], uint16(p.size))
		binary.BigEndian.PutUint16(b[4:], p.ipid)
		if p.df {
			b[6] = 0x40
		}
		copy(b[12:], p.src.AsSlice())
		copy(b[16:], p.dst.AsSlice())
		binary.BigEndian.PutUint16(b[10:], checksum(b[:20]))
	} else {
		b[0], b[6], b[7] = 0x60, proto, 64
		binary.BigEndian.PutUint16(b[4:], uint16(p.size-head))
		copy(b[8:], p.src.AsSlice())
		copy(b[24:], p.dst.AsSlice())
	}
	fill(b[head:], p.id)
	return b
}

// fill writes the content of packet id: its number, then octets that follow
// from it.
func fill(b []byte, id uint64) {
	binary.BigEndian.PutUint64(b, id)
	x := id*0x9e3779b97f4a7c15 + 1
	for b = b[8:]; len(b) >= 8; b = b[8:] {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(b, x)
	}
	for i := range b {
		b[i] = byte(x >> (8 * i))
	}
}

func headerLen(a netip.Addr) int {
	if a.Is4() {
		return 20
	}
	return 40
}

func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

var hashSeed = maphash.MakeSeed()

func hash(b []byte) uint64 { return maphash.Bytes(hashSeed, b) }
