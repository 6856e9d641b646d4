package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/datapath"
	"ipoibcm/fib/fibtest"
	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip/iptest"
)

// A stubProvider is a port and a tap; nothing can be sent through it.
type stubProvider struct {
	verbs.Provider
	tap      chan verbs.Tap
	counters map[string]uint64
}

var gidA = ib.GID(netip.MustParseAddr("fe80::a").As16())

func (p *stubProvider) Caps() verbs.Caps       { return verbs.Caps{Name: "stub", Device: "eth0"} }
func (p *stubProvider) MADPort() verbs.MADPort { return nil }
func (p *stubProvider) SetTap(t verbs.Tap)     { p.tap <- t }
func (p *stubProvider) Port() verbs.Port {
	return verbs.Port{Active: true, GIDs: []ib.GID{gidA}, MTU: ib.MTU4096, UnderlayIf: "eth0", UnderMTU: 9000}
}

func (p *stubProvider) Counters(f func(string, uint64)) {
	f("rx_packets", 7)
	for n, v := range p.counters {
		f(n, v)
	}
}

// A modelKernel answers the agent; it is never told to change anything.
type modelKernel struct {
	kernel
	k *fibtest.Kernel
}

func (m modelKernel) Lookup(q rtnl.Query) (rtnl.Answer, error) { return m.k.Lookup(q) }
func (m modelKernel) Index() int                               { return fibtest.Index }

// newAgent returns an agent whose driver is the test: the machine has an
// address and is up, and no action of it is carried out.
func newAgent(t testing.TB) (*Agent, *stubProvider) { return newAgentOf(t, func(*ipoib.Options) {}) }

// newAgentOf is newAgent with other options of the machine.
func newAgentOf(t testing.TB, set func(*ipoib.Options)) (*Agent, *stubProvider) {
	p := &stubProvider{tap: make(chan verbs.Tap, 16)}
	a := &Agent{
		opt: Options{Provider: p, Name: "ibcm0", Build: "test"}, log: slog.New(slog.DiscardHandler), start: time.Now(),
		loop: new(datapath.Loop), host: new(hostnet.Device),
		conns: map[nexthop.Conn]*conn{}, byQPN: map[ib.QPN]nexthop.Conn{},
		udUse: map[encap.LinkAddr]*ipoib.UDUse{}, groups: map[ib.GID]time.Time{}, queries: make(chan func()),
	}
	a.link = encap.LinkAddr{QPN: 0x48, GID: gidA}
	a.peers = a.newPeers()
	a.members = a.newMembers()
	mo := a.machineOptions(p.Port())
	mo.Rand = rand.New(rand.NewPCG(1, 2))
	set(&mo)
	a.m = ipoib.New(mo)
	a.taps.provider = p
	k := fibtest.New()
	a.kernel = newKernelWorker(modelKernel{k: k}, nil)
	a.m.Step(nil, time.Now(), ipoib.Start{})
	var evs []ipoib.Event
	for _, ev := range slices.Concat(k.Start(), k.AddAddr(netip.MustParsePrefix("10.0.0.1/24")), k.Up(true)) {
		evs = append(evs, ipoib.FIBEvent{Event: ev})
	}
	echo, err := iptest.Echo{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("10.0.0.7")}.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	evs = append(evs, ipoib.Packet{IP: echo}) // to a neighbour that never answers
	for len(evs) > 0 {
		ev := evs[0]
		evs = evs[1:]
		for _, act := range a.m.Step(nil, time.Now(), ev) {
			if f, ok := act.(ipoib.FIBAction); ok {
				done, _ := k.Do(f.Action)
				for _, d := range done {
					evs = append(evs, ipoib.FIBEvent{Event: d})
				}
			}
		}
	}
	return a, p
}

func TestHubTellsALaggardWhatItLost(t *testing.T) {
	var h hub
	s := h.subscribe(time.Time{}, false)
	publish := func(n int) { h.publish(control.Event{Kind: "k", Text: fmt.Sprint(n)}) }
	const over = 5
	for n := range subscriberDepth + over {
		publish(n)
	}
	if h.lost.Load() != over {
		t.Errorf("counted %d lost, want %d", h.lost.Load(), over)
	}
	for n := range 3 { // room for the word about the gap, and for two events
		if e := <-s.ch; e.Text != fmt.Sprint(n) {
			t.Fatalf("event %d is %q: order lost", n, e.Text)
		}
	}
	publish(-1)
	publish(-2)
	publish(-3) // no room again
	var tail []string
	for len(s.ch) > 0 {
		tail = append(tail, (<-s.ch).Text)
	}
	got := strings.Join(tail[len(tail)-3:], "|")
	if want := "5 events lost: this follower is too slow|-1|-2"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	publish(-4)
	if e := <-s.ch; e.Kind != "lost" || !strings.HasPrefix(e.Text, "1 ") {
		t.Errorf("after the second gap: %+v", e)
	}
}

func TestHubIsBoundedAndEnds(t *testing.T) {
	var h hub
	var subs []*subscriber
	for range maxFollowers {
		subs = append(subs, h.subscribe(time.Time{}, false))
	}
	if h.subscribe(time.Time{}, false) != nil {
		t.Errorf("a follower beyond %d", maxFollowers)
	}
	h.unsubscribe(subs[0])
	if subs[0] = h.subscribe(time.Time{}, false); subs[0] == nil {
		t.Error("no room after one left")
	}
	h.close()
	if _, open := <-subs[0].ch; open {
		t.Error("a stream outlives the hub")
	}
	h.unsubscribe(subs[0]) // as its request does, later
	h.publish(control.Event{})
	if h.subscribe(time.Time{}, false) != nil {
		t.Error("a follower of a closed hub")
	}
}

// Users who may only look leave places to others.
func TestHubLeavesPlaces(t *testing.T) {
	var h hub
	first := h.subscribe(time.Time{}, true)
	for range maxMemberFollowers - 1 {
		h.subscribe(time.Time{}, true)
	}
	if h.subscribe(time.Time{}, true) != nil {
		t.Errorf("a member beyond %d follows", maxMemberFollowers)
	}
	for range maxFollowers - maxMemberFollowers {
		if h.subscribe(time.Time{}, false) == nil {
			t.Fatal("members left no place")
		}
	}
	for range 2 { // only the first time counts
		h.unsubscribe(first)
	}
	if h.subscribe(time.Time{}, true) == nil {
		t.Error("a place is not free again")
	}
	if h.subscribe(time.Time{}, true) != nil {
		t.Error("one that has left twice left two places")
	}
}

func TestWarnsOfTrouble(t *testing.T) {
	for _, tt := range []struct {
		name     string
		counters map[string]uint64
		receive  int
		want     string
	}{
		{"nothing", nil, 65524, ""},
		{"UC on a good path", map[string]uint64{"uc_packets_in": 99000, "uc_drop_sequence": 1000}, 65524, ""},
		{"UC on a bad one", map[string]uint64{"uc_packets_in": 900, "uc_drop_sequence": 300}, 65524,
			"of 1200 packets that came over UC 300 were useless"},
		{"too few to say", map[string]uint64{"uc_packets_in": 90, "uc_drop_sequence": 30}, 65524, ""},
		{"short messages already", map[string]uint64{"uc_packets_in": 900, "uc_drop_sequence": 300}, 8196, ""},
		{"RC is no matter", map[string]uint64{"rc_packets_in": 900, "rc_drop_sequence": 300}, 65524, ""},
		{"a flood", map[string]uint64{"mads_drop_flood": 5}, 65524, "5 ARP, ND and CM packets were refused"},
	} {
		a, p := newAgent(t)
		p.counters = tt.counters
		got := strings.Join(a.warnings(ipoib.Status{ReceiveMTU: tt.receive}, a.providerCounters(), true, nil), "\n")
		if tt.want == "" {
			expect.Equal(t, got, "", "%s: warnings", tt.name)
		}
		if !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s: the warnings are %q, want them to begin with %q", tt.name, got, tt.want)
		}
	}
}

func TestNotesBecomeEvents(t *testing.T) {
	a, _ := newAgent(t)
	s := a.hub.subscribe(time.Time{}, false)
	a.note(ipoib.Note{Kind: ipoib.NoteCMSent, Peer: encap.LinkAddr{QPN: 2, GID: gidA}, Conn: 3, Text: "REQ"})
	e := <-s.ch
	switch {
	case e.Part != "cm":
		t.Errorf("a message sent: Part is %v, want \"cm\"", e.Part)
	case e.Out == nil:
		t.Error("a message sent: Out is nil")
	case !*e.Out:
		t.Error("a message sent: Out is false, want true")
	case e.Fields["conn"] != "3":
		t.Errorf("a message sent: Fields[\"conn\"] is %v, want \"3\"", e.Fields["conn"])
	case e.Peer == "":
		t.Error("a message sent: Peer is empty")
	case e.Version != control.Version:
		t.Errorf("a message sent: Version is %v, want %v", e.Version, control.Version)
	}
	a.note(ipoib.Note{Kind: ipoib.NoteNeigh, Addr: netip.MustParseAddr("10.0.0.2"), Text: "resolved"})
	switch e = <-s.ch; {
	case e.Part != "neigh":
		t.Errorf("a decision: Part is %v, want \"neigh\"", e.Part)
	case e.Out != nil:
		t.Errorf("a decision: Out is %v, want nil", e.Out)
	case e.Fields["ip"] != "10.0.0.2":
		t.Errorf("a decision: Fields[\"ip\"] is %v, want \"10.0.0.2\"", e.Fields["ip"])
	case e.Peer != "":
		t.Errorf("a decision: Peer is %v, want \"\"", e.Peer)
	}
	for k, part := range noteParts {
		if part == "" {
			t.Errorf("notes of kind %s belong to no part", k)
		}
	}
}

func TestTUNErrorsSayWhatToDo(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{
		{os.ErrNotExist, "/dev/net/tun"},
		{os.ErrPermission, "CAP_NET_ADMIN"},
		{fmt.Errorf("TUNSETIFF: %w", syscall.EBUSY), "choose another --name"},
		{fmt.Errorf("create TUN: %w", syscall.EINVAL), "is no TUN"},
	} {
		if got := explainTUN("ibcm0", tt.err).Error(); !strings.Contains(got, tt.want) {
			t.Errorf("%v: %q does not speak of %q", tt.err, got, tt.want)
		}
	}
	odd := errors.New("odd")
	if explainTUN("ibcm0", odd) != odd {
		t.Error("an error nobody knows was changed")
	}
}

// A device that is lost for good ends the agent, and says why.
func TestLostDeviceEndsTheAgent(t *testing.T) {
	a, _ := newAgent(t)
	ctx, end := context.WithCancelCause(t.Context())
	a.end = end
	a.verbsEvent(verbs.Event{Kind: verbs.DeviceFatal, Text: "RDMA device rxe0 was removed"})
	want := "the device is lost: RDMA device rxe0 was removed"
	if err := context.Cause(ctx); err == nil || err.Error() != want {
		t.Errorf("ended with %v, want %q", err, want)
	}
}
