package ipoib

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/simsm"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	wire "ipoibcm/wire/sa"
)

// An ibNode is a host's port in the world's subnet. What it sends goes where the
// LID of its path leads, and nowhere where there was no path.
type ibNode struct {
	port  *simsm.Port
	grh   bool
	paths map[ib.GID]verbs.Path // as UsePath told
	at    map[ib.GID]ib.LID     // where the UD QP is attached
	qkey  ib.QKey
}

func (p *ibNode) now() sa.Port {
	s := p.port.Now()
	s.GRHRequired = p.grh
	return s
}

func (p *ibNode) boot(o *Fabric) *Fabric {
	p.paths, p.at, p.qkey = map[ib.GID]verbs.Path{}, map[ib.GID]ib.LID{}, ib.QKeyIPoIB
	var out Fabric
	if o != nil {
		out = *o
	}
	out.Port = p.now()
	return &out
}

// newSubnet returns a world whose hosts are ports of an InfiniBand subnet.
func newSubnet(t testing.TB, seed uint64, opt simsm.Options) *world {
	w := newWorld(t, seed)
	opt.Seed = seed
	w.subnet = simsm.New(opt)
	return w
}

// port adds a host at a port of the subnet.
func (w *world) port(i int, grh bool, opt Options) *node {
	opt.Link = encap.LinkAddr{QPN: ib.QPN(0x100 + i), GID: gid(i)}
	opt.PathMTU = ib.MTU2048
	n := &node{w: w, name: string(rune('a' + i - 1)), opt: opt, joined: map[ib.GID]bool{},
		ib: &ibNode{port: w.subnet.AddPort(ib.GUID(i)), grh: grh}}
	w.nodes = append(w.nodes, n)
	n.boot()
	n.addAddr("10.0.0." + string(rune('0'+i)) + "/24")
	n.addAddr("fd00::" + string(rune('0'+i)) + "/64")
	return n
}

// deliverSubnet hands out what the subnet manager says by now.
func (w *world) deliverSubnet() {
	for _, d := range w.subnet.Take(w.now) {
		i := slices.IndexFunc(w.nodes, func(n *node) bool { return n.ib != nil && n.ib.port == d.To })
		switch n := w.nodes[i]; ev := d.Event.(type) {
		case sa.RecvMAD:
			n.step(RecvSubnet{MAD: ev.MAD})
		case sa.Reregister:
			n.step(PortChanged{Port: n.ib.now(), Reregister: true})
		case sa.SetPort:
			n.step(PortChanged{Port: n.ib.now()})
			n.step(UnderlayChanged{Link: n.opt.Link, PathMTU: ib.MTU2048, Active: n.ib.port.Up})
		}
	}
}

// checkWay fails where a packet leaves for a port without saying how it gets there.
func (n *node) checkWay(attr verbs.AHAttr, to ib.GID) {
	n.w.t.Helper()
	if attr.LID == 0 {
		n.w.Fatalf("%s: packet to %v without a LID", n.name, to)
	}
	if n.ib.grh && !attr.GRH {
		n.w.Fatalf("%s: packet to %v without a GRH, which the port needs", n.name, to)
	}
}

// sendSubnetUD carries a datagram by the LID of the path to its port or group.
func (n *node) sendSubnetUD(a SendUD) {
	w := n.w
	dst := a.Link.GID
	if !a.MGID.IsZero() {
		dst = a.MGID
		n.onGroup++
	}
	path, ok := n.ib.paths[dst]
	if !ok {
		w.Fatalf("%s: a datagram to %v leaves before its path is known", n.name, dst)
	}
	n.checkWay(path.AH(), dst)
	from := n.link()
	if !path.GRH {
		from.GID = ib.GID{} // the receiver does not hear it
	}
	for _, to := range w.nodes {
		if to == n || !to.ib.port.Up || !n.ib.port.Up {
			continue
		}
		if a.MGID.IsZero() && to.ib.port.LID == path.DLID && to.opt.Link.QPN == a.Link.QPN {
			w.send(func() { to.recvUD(from, to.opt.Link.GID, a.Frame) }, to, true)
		}
		sends := w.subnet.Members(dst)[n.opt.Link.GID] != 0
		if _, in := w.subnet.Members(dst)[to.opt.Link.GID]; in && sends && to.ib.at[dst] == path.DLID && !a.MGID.IsZero() {
			w.send(func() {
				if to.joined[dst] {
					to.recvUD(from, dst, a.Frame)
				}
			}, to, true)
		}
	}
}

// trouble is what may be wrong with a subnet.
var trouble = []struct {
	name string
	opt  simsm.Options
	grh  bool
	up   time.Duration // within which the interface is up
}{
	{"by LIDs alone", simsm.Options{}, false, 500 * time.Millisecond},
	{"a GRH is required", simsm.Options{}, true, 500 * time.Millisecond},
	{"MADs are lost and come twice", simsm.Options{Loss: 0.3, Dup: 0.2, Jitter: 20 * time.Millisecond}, true, time.Minute},
	{"it is busy", simsm.Options{Busy: 0.5}, false, time.Minute},
	{"it is slow", simsm.Options{Delay: 300 * time.Millisecond}, true, 5 * time.Second},
}

// Two hosts on a subnet: nothing leaves before the broadcast group is joined and the
// path is known (the world sees to that); then all is as on Ethernet, by real LIDs:
// 4391-5-1, 4391-9.1.2-2, 4755-3.1-14.
func TestSubnet(t *testing.T) {
	for _, tt := range trouble {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(5) {
				w := newSubnet(t, seed, tt.opt)
				a, b := w.port(1, tt.grh, Options{}), w.port(2, tt.grh, Options{})
				if a.f.Status().Up {
					w.Fatalf("up before the broadcast group was joined")
				}
				w.run(tt.up)
				for _, n := range w.nodes {
					if !n.f.Status().Up {
						w.Fatalf("%s is not up after %v: %+v", n.name, tt.up, n.f.Fabric())
					}
				}
				w.run(3 * time.Second) // announcements
				var p, q []byte
				for range 4 {
					p, q = a.ping("10.0.0.2", 9000, true), b.ping("fd00::1", 100, true)
					w.run(20 * time.Second)
				}
				w.settle()
				x, _ := w.agree(a, b)
				if x.MTU != 65520 {
					w.Fatalf("MTU %d, want 65520", x.MTU)
				}
				if got := b.got(p); got != 1 {
					w.Fatalf("b got %d packets, want 1", got)
				}
				if got := a.got(q); got != 1 {
					w.Fatalf("a got %d packets, want 1", got)
				}
				path := a.ib.paths[b.opt.Link.GID]
				expect.MustEqual(w, path.DLID, b.ib.port.LID, "DLID")
				expect.MustEqual(w, path.GRH, tt.grh, "GRH")
				expect.MustEqual(w, path.Life, 18, "Life")
				for _, req := range append(a.reqs, b.reqs...) {
					switch r := req.Primary; {
					case r.LocalLID == 0:
						w.Fatalf("LocalLID is 0, want more")
					case r.LocalLID == ib.PermissiveLID:
						w.Fatalf("LocalLID is %v, want another than %v", r.LocalLID, ib.PermissiveLID)
					case !r.SubnetLocal:
						w.Fatalf("SubnetLocal is false, want true")
					case r.LocalACKTimeout != 19:
						w.Fatalf("LocalACKTimeout is %v, want 19", r.LocalACKTimeout)
					}
				}
			}
		})
	}
}

// Without a subnet manager the interface says so and asks now and then; when one comes
// it is up within two seconds.
func TestNoSubnetManager(t *testing.T) {
	w := newSubnet(t, 1, simsm.Options{})
	w.subnet.Stop()
	a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
	w.run(time.Minute)
	asked := a.counter("sa_tx_info")
	w.run(10 * time.Minute)
	if n := a.counter("sa_tx_info") - asked; n == 0 || n > 1200 {
		t.Errorf("%d questions in ten minutes, want some, and not more than two a second", n)
	}
	s := a.f.Fabric()
	if s.Admin.State != sa.StateAsking {
		t.Errorf("administrator is %q, want %q", s.Admin.State, sa.StateAsking)
	}
	if s.Joined {
		t.Error("the broadcast group is joined, and there is nobody who could say so")
	}
	if a.f.Status().Up {
		t.Error("the interface is up without a broadcast group")
	}
	a.output(mustEcho("10.0.0.1", "10.0.0.2", 100))
	if got := a.counter("drop_interface_down"); got != 1 {
		t.Errorf("%d packets were dropped, want 1", got)
	}
	w.subnet.Start(w.now)
	w.run(2 * time.Second)
	expect.MustEqual(w, a.f.Status().Up, true, "a's Up two seconds after the subnet manager came")
	expect.MustEqual(w, b.f.Status().Up, true, "b's Up two seconds after the subnet manager came")
	w.run(3 * time.Second)
	p := a.ping("10.0.0.2", 100, true)
	w.settle()
	if got := b.got(p); got != 1 {
		t.Errorf("b got %d packets, want 1", got)
	}
}

// A port that no subnet manager has configured is shown as such.
func TestPortWithoutSubnetManager(t *testing.T) {
	w := newSubnet(t, 1, simsm.Options{})
	a := w.port(1, true, Options{})
	port := a.ib.now()
	port.SMLID = 0
	a.step(PortChanged{Port: port})
	w.run(time.Second)
	if s := a.f.Fabric(); s.Admin.State != sa.StateDown {
		t.Errorf("administrator is %q, want %q", s.Admin.State, sa.StateDown)
	}
	told := slices.ContainsFunc(a.notes, func(n Note) bool { return n.Report == NoSubnetManager })
	if !told {
		t.Error("nobody was told")
	}
}

// The subnet manager starts anew and has forgotten everybody, with other MLIDs: members
// are back within two seconds of its word, and connections never notice.
func TestReregister(t *testing.T) {
	w := newSubnet(t, 3, simsm.Options{})
	a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
	w.run(4 * time.Second)
	a.ping("10.0.0.2", 9000, true)
	w.settle()
	before, _ := w.agree(a, b)
	broadcast := a.f.broadcastMGID()
	was := a.ib.at[broadcast]
	a.neighbourGroups(t)
	w.subnet.Start(w.now)
	w.run(2 * time.Second)
	for _, n := range w.nodes {
		for mgid := range n.joined {
			if n.ib.at[mgid] == 0 || w.subnet.Members(mgid)[n.opt.Link.GID]&wire.FullMember == 0 {
				w.Fatalf("%s is no member of %v again", n.name, mgid)
			}
		}
	}
	if now := a.ib.at[broadcast]; now == was || now != a.ib.paths[broadcast].DLID {
		w.Fatalf("the UD QP is attached at MLID %#x, it was %#x before; the path leads to %#x", now, was,
			a.ib.paths[broadcast].DLID)
	}
	p := a.ping("10.0.0.2", 9000, true)
	w.settle()
	after, _ := w.agree(a, b)
	if after.Conn != before.Conn {
		w.Fatalf("connection %d, want that of before, %d", after.Conn, before.Conn)
	}
	if got := b.got(p); got != 1 {
		w.Fatalf("b got %d packets, want 1", got)
	}
}

// neighbourGroups checks that a has joined more than the broadcast group.
func (n *node) neighbourGroups(t *testing.T) {
	t.Helper()
	if got := len(slices.Collect(maps.Keys(n.joined))); got < 4 {
		t.Errorf("%s has joined %d groups, want broadcast, 224.0.0.1, ff02::1 and solicited-node groups", n.name, got)
	}
}

// Where ib_cm has QP 1 of the port, REQs of others are rejected by it for ever. So no mode is
// announced: who knows QP 1 only sends by UD, and hosts of ours connect in-band, of which one has
// QP 1 or neither.
func TestForeignREQs(t *testing.T) {
	w := newSubnet(t, 17, simsm.Options{})
	a, b := w.port(1, true, Options{NoGSI: true}), w.port(2, true, Options{NoGSI: true})
	c, d := w.port(3, true, Options{}), w.port(4, true, Options{CMTransport: CMGSI})
	a.taken, b.taken = true, true
	w.run(4 * time.Second)
	for i, to := range []*node{b, c, d} {
		addr := fmt.Sprintf("10.0.0.%d", 2+i)
		p, q := a.ping(addr, 100, true), to.ping("10.0.0.1", 100, true)
		w.settle()
		if got := to.got(p) + a.got(q); got != 2 {
			w.Fatalf("%s: %d packets arrived, want both ways", to.name, got)
		}
		via := to.up()
		if to == d { // nobody could have set it up
			expect.MustEqual(w, len(via), 0, "number of d's connections")
			continue
		}
		expect.MustEqual(w, len(via), 1, "%s: number of connections", to.name)
		expect.MustEqual(w, via[0].Via, ViaInband, "%s: Via", to.name)
		expect.MustEqual(w, via[0].Transport, ib.RC, "%s: Transport", to.name)
	}
	if n := len(d.reqs); n != 0 {
		t.Errorf("d sent %d REQs to a, whose QP 1 rejects them all", n)
	}
	for _, n := range []*node{b, c, d} {
		i := slices.IndexFunc(n.f.Neighbours(), func(x NeighbourInfo) bool { return x.Addr == ip4("10.0.0.1") })
		if got := n.f.Neighbours()[i].Link.Flags; got != 0 {
			t.Errorf("%s hears that a offers %v, want nothing", n.name, got)
		}
	}
}

// Our P_Key has another place in the port's table: queue pairs go by the place, so connections
// are set up anew, and what had been learnt of neighbours is asked again.
func TestPKeyMoves(t *testing.T) {
	w := newSubnet(t, 16, simsm.Options{})
	a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
	w.run(4 * time.Second)
	a.ping("10.0.0.2", 9000, true)
	w.settle()
	before, _ := w.agree(a, b)
	a.step(PortChanged{Port: a.ib.now(), Reregister: true, Moved: true})
	w.run(2 * time.Second)
	if !a.f.Status().Up {
		w.Fatalf("a is not up again")
	}
	p, q := a.ping("10.0.0.2", 9000, true), b.ping("10.0.0.1", 9000, true)
	w.settle()
	after, _ := w.agree(a, b)
	if after.Conn == before.Conn {
		w.Fatalf("connection %d is that of before: its queue pair goes by a place that is another's", after.Conn)
	}
	if got := b.got(p) + a.got(q); got != 2 {
		w.Fatalf("%d packets arrived, want 2", got)
	}
}

// Another LID of the peer: the connection breaks as its packets go nowhere, and the
// path is asked for again before the next.
func TestPeerHasAnotherLID(t *testing.T) {
	w := newSubnet(t, 4, simsm.Options{})
	a, b := w.port(1, false, Options{Mode: ModeUD}), w.port(2, false, Options{Mode: ModeUD})
	w.run(4 * time.Second)
	a.ping("10.0.0.2", 100, true)
	w.settle()
	w.subnet.Relabel(w.now, b.ib.port)
	w.subnet.Start(w.now) // all are asked to register again
	w.run(5 * time.Second)
	p := a.ping("10.0.0.2", 100, true)
	w.settle()
	if got := b.got(p); got != 1 {
		w.Fatalf("b got %d packets, want 1", got)
	}
	if got := a.ib.paths[b.opt.Link.GID].DLID; got != b.ib.port.LID {
		w.Fatalf("path to LID %d, want %d", got, b.ib.port.LID)
	}
}

// Another LID of one end of a UC connection, of which nothing tells the other: both close the connection, whoever
// hears of it first, and make another one.
func TestUCConnectionAfterAnotherLID(t *testing.T) {
	for i, name := range []string{"ours", "the peer's"} {
		w := newSubnet(t, 19, simsm.Options{})
		a, b := w.port(1, false, Options{Mode: ModeUC}), w.port(2, false, Options{Mode: ModeUC})
		w.run(4 * time.Second)
		a.ping("10.0.0.2", 9000, true)
		w.settle()
		before, _ := w.agree(a, b)
		w.subnet.Relabel(w.now, w.nodes[i].ib.port)
		w.subnet.Start(w.now) // all are asked to register again
		w.run(5 * time.Second)
		p := a.ping("10.0.0.2", 9000, true)
		w.settle()
		expect.Equal(t, b.got(p), 1, "%s: packets that b got", name)
		after, _ := w.agree(a, b)
		if before.Conn == after.Conn {
			t.Errorf("%s: connection %d of before goes on", name, before.Conn)
		}
	}
}

// A host that no path leads to: what waits for it is bounded, and given up.
func TestNoPath(t *testing.T) {
	w := newSubnet(t, 5, simsm.Options{})
	a, b := w.port(1, true, Options{}), w.port(2, true, Options{})
	w.run(4 * time.Second)
	w.subnet.SetLink(w.now, b.ib.port, false)
	w.run(time.Second)
	a.output(mustEcho("10.0.0.1", "10.0.0.2", 100))
	a.recvUD(b.link(), a.opt.Link.GID, mustReply(b, a)) // as if it had come at the last moment
	for range 40 {
		a.output(mustEcho("10.0.0.1", "10.0.0.2", 100))
	}
	if got := a.f.fab.waiting; got != maxPathJobs {
		t.Errorf("%d packets wait for the path, want the %d that may", got, maxPathJobs)
	}
	if got := a.counter("drop_path_queue"); got != 41-maxPathJobs {
		t.Errorf("%d packets found no room, want %d", got, 41-maxPathJobs)
	}
	w.run(time.Minute)
	if got := a.counter("drop_no_path"); got < maxPathJobs {
		t.Errorf("%d packets were given up for want of a path, want %d at least", got, maxPathJobs)
	}
	if a.f.fab.waiting != 0 {
		t.Errorf("%d packets still wait", a.f.fab.waiting)
	}
	if n := len(a.f.fab.paths); n != 0 {
		t.Errorf("%d paths on record, want none", n)
	}
}

// mustReply is an ARP reply of from.
func mustReply(from, to *node) []byte {
	b, _ := arp.NewRequest(to.opt.Link, ip4("10.0.0.1"), ip4("10.0.0.2")).ReplyFrom(from.opt.Link).AppendBinary(nil)
	return frameOf(encap.ARP, b)
}
