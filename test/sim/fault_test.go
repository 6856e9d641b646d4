package sim

import (
	"net/netip"
	"strings"
	"testing"

	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/mad"
)

// A fault is what an agent does wrong, so that the checks can be seen to fail.
type fault uint8

// faults are caught in an ordinary storm, and the check that does it says this.
var faults = []struct {
	name  string
	fault fault
	want  []string // any of these
}{
	{"sends on another peer's connection", sendsElsewhere, []string{"goes to the wrong host"}},
	{"gives packets to another host's kernel", deliversElsewhere, []string{"arrived at the wrong host"}},
	{"ignores the Receive MTU", ignoresMTU, []string{"octets at most", "of MTU "}},
	{"receives less than it offers", offersMore, []string{"octets at most"}},
	{"sends multicast on connections", groupsOnConn, []string{"a packet for 239.1.2.3 on connection",
		"a packet for ff05::1:3 on connection", "a packet for 10.0.0.255 on connection",
		"a packet for 255.255.255.255 on connection"}},
	{"leaks QPs", leaksQPs, []string{"QPs for the UD QP"}},
	{"leaks buffers", leaksBuffers, []string{"buffers are registered"}},
	{"leaks timers", leaksTimers, []string{"timers are set", "woken again and again"}},
	{"forgets its timer", neverWakes, []string{"after the network has healed", "communication IDs"}},
	{"queues without bound", queuesAll, []string{"octets wait for"}},
	{"drops without counting", dropsSilently, []string{"packets came in"}},
	{"sends twice", repeats, []string{"is sent 2 times"}},
	{"damages octets", changesOctets, []string{"arrived changed", "that nobody sent", "which nobody sent",
		"quotes a packet"}},
	{"forgets a path", forgetsPaths, []string{"the data path has"}},
	{"cannot explain", forgetsWhy, []string{"no reason"}},
	{"never hangs up", keepsConns, []string{"to say goodbye", "which has stopped", "left over"}},
}

// TestFaults: whatever one of four hosts does wrong is noticed, and what is
// noticed comes again with the seed.
func TestFaults(t *testing.T) {
	const most = 40 // seeds until it must be seen
	for _, tt := range faults {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			body := func(w *world) {
				w.fault = tt.fault
				tempest(w, 4)
			}
			for seed := range uint64(most) {
				v := try(seed+1, body)
				if v == nil {
					continue
				}
				seen := false
				for _, s := range tt.want {
					seen = seen || strings.Contains(v.text, s)
				}
				if !seen {
					t.Fatalf("caught as something else: %s\n%s", v.text, v.before)
				}
				t.Logf("%s", v.text)
				if again := try(seed+1, body); again == nil || again.text != v.text {
					t.Errorf("the seed does not replay: %+v", again)
				}
				return
			}
			t.Errorf("%d seeds, and nothing was noticed", most)
		})
	}
}

// TestFleet: a seed that fails stops the fleet, and the command that replays it
// is printed.
func TestFleet(t *testing.T) {
	f := fleet{hosts: 4, seeds: seedsUpTo(10), fault: changesOctets}
	f.run()
	if f.failed == nil || f.runs >= 10 {
		t.Fatalf("%d runs with a broken host, and nothing failed", f.runs)
	}
	want := "go test ./test/sim -run '^TestSize$' -sim.hosts=4 -sim.seed="
	if got := f.replay(); !strings.HasPrefix(got, want) || strings.HasSuffix(got, "=0") {
		t.Errorf("replay with %q, want %q and the seed", got, want)
	}
}

const (
	none              fault = iota
	sendsElsewhere          // on the connection of another peer
	deliversElsewhere       // to the kernel of another host
	ignoresMTU              // posts packets of any size
	groupsOnConn            // multicast and broadcast too
	offersMore              // its receive buffers are half of what it says
	leaksQPs
	leaksBuffers
	leaksTimers
	neverWakes
	queuesAll     // without bound
	dropsSilently // what waited for a connection
	repeats       // every packet
	changesOctets // of every frame
	forgetsPaths  // to connections
	forgetsWhy    // explains nothing
	keepsConns    // takes no notice of DREQ
)

// wrong is the path that a broken agent takes.
func (h *host) wrong(path nexthop.Path) nexthop.Path {
	other := func() {
		for id, c := range h.conns { // the smallest: maps have no order
			if id != path.Conn && c.up() && (path.Kind != nexthop.PathConn || id < path.Conn) {
				path.Kind, path.Conn = nexthop.PathConn, id
			}
		}
	}
	switch {
	case h.cfg.fault == ignoresMTU:
		path.MTU = 1 << 16
	case h.cfg.fault == sendsElsewhere && path.Kind == nexthop.PathConn,
		h.cfg.fault == groupsOnConn && path.Kind == nexthop.PathGroup:
		other()
	}
	return path
}

// swallows reports whether a broken machine keeps a to itself.
func (h *host) swallows(a ipoib.Action) bool {
	_, data := a.(ipoib.SendConn)
	return data && h.cfg.fault == dropsSilently
}

// deaf reports whether a broken agent does not hear m.
func (h *host) deaf(m *verbs.MAD) bool {
	hd, _, err := mad.Parse(m.Data[:])
	return h.cfg.fault == keepsConns && err == nil && hd.Attr == mad.AttrDREQ
}

// explain is what h says about a, which a broken agent does not.
func (h *host) explain(a netip.Addr) ipoib.Explanation {
	hop := must(nexthop.Ask(h.tables, h.tables.Link, rtnl.Flow{Dst: a}))
	e := h.m.Explain(a, hop)
	if h.cfg.fault == forgetsWhy {
		e.Reasons = nil
	}
	return e
}

// spoil makes an interface of opt that a broken agent has configured.
func (c config) spoil(opt *ipoib.Options) {
	if c.fault == queuesAll {
		opt.QueuePackets, opt.Neigh.MaxQueuedPackets, opt.Neigh.MaxQueuedOctets = 1<<20, 1<<20, 1<<30
	}
}

// ring is how large a receive buffer is, in octets.
func (c config) ring() int {
	if c.fault == offersMore {
		return c.receiveMTU() / 2
	}
	return c.receiveMTU()
}
