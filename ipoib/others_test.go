package ipoib

import (
	"net/netip"
	"testing"
	"time"

	"ipoibcm/rtnl"
)

// A host answers for its addresses of other devices, and for those it is a proxy
// for; packets to them arrive there.
func TestAnswersForOthers(t *testing.T) {
	for dst, as := range map[string]rtnl.Answering{"10.0.0.99": rtnl.AnswerLocal, "fd00::99": rtnl.AnswerProxy} {
		w := newWorld(t, 4)
		a, b := w.node(1, Options{}), w.node(2, Options{})
		w.settle()
		p := a.ping(dst, 100, false)
		w.run(10 * time.Second)
		if b.got(p) != 0 {
			t.Errorf("%s: answered for without being asked to", dst)
		}
		b.others = map[netip.Addr]rtnl.Answering{netip.MustParseAddr(dst): as}
		p = a.ping(dst, 100, false)
		w.run(time.Second)
		if b.got(p) != 1 {
			t.Errorf("%s: a packet to it did not arrive", dst)
		}
		if b.counter("neigh_other_answers") == 0 {
			t.Errorf("%s: no answer is counted", dst)
		}
	}
}

// Our advertisements say that we are a router while the kernel forwards, and
// neighbours hear of it at once when that ends.
func TestRouterFlag(t *testing.T) {
	w := newWorld(t, 4)
	a, b := w.node(1, Options{}), w.node(2, Options{})
	w.settle()
	router := func() bool {
		n, _ := b.f.neigh.Lookup(netip.MustParseAddr("fd00::1"))
		return n.Router
	}
	b.ping("fd00::1", 100, false)
	w.run(time.Second)
	if router() {
		t.Error("a host is taken for a router")
	}
	for _, on := range []bool{true, false} {
		a.step(KernelConf{rtnl.Conf{Forward6: on}})
		w.run(10 * time.Millisecond)
		if got := router(); got != on {
			t.Errorf("forwarding %v: taken for a router %v", on, got)
		}
	}
}
