package ipoib

import (
	"testing"
	"time"

	"ipoibcm/nexthop"
	"ipoibcm/rtnl"
	"ipoibcm/wire/ip"
)

// The path of an answer to a host that sends many datagrams gets known without a packet: by it the data path
// learns whose datagrams to take. Nobody else gets a path, and no packet leaves.
func TestSenderGetsAPath(t *testing.T) {
	for _, tt := range []struct{ dst string }{{"10.0.0.1"}, {"fd00::1"}, {"224.0.0.9"}, {"255.255.255.255"}, {"ff02::5"}} {
		w := newWorld(t, 41)
		a, b := w.node(1, Options{Mode: ModeUD}), w.node(2, Options{Mode: ModeUD})
		w.run(2 * time.Second)
		pkt := b.echo(tt.dst, 100, false)
		a.step(Sender{IP: pkt[:64]})
		w.run(time.Second)
		src, _ := ip.Src(pkt)
		p, ok := a.paths[src]
		if !ok || p.Kind != nexthop.PathUD || p.Link.Key() != b.link() {
			w.Fatalf("to %s: the path to %v is %+v, want one by UD to %v", tt.dst, src, p, b.link())
		}
		if a.dests[rtnl.Flow{Dst: src}] != src {
			w.Fatalf("to %s: %v is no destination", tt.dst, src)
		}
		if a.onUD+a.onConn != 0 || len(b.tun) != 0 {
			w.Fatalf("to %s: %d packets were sent by UD and %d by connections, and b got %x", tt.dst, a.onUD, a.onConn, b.tun)
		}
	}
}

// What is no host's address is not looked up, and nothing is while the link is down.
func TestSenderOfNothing(t *testing.T) {
	w := newWorld(t, 42)
	a, b := w.node(1, Options{Mode: ModeUD}), w.node(2, Options{Mode: ModeUD})
	w.run(2 * time.Second)
	pkt := b.echo("10.0.0.1", 100, false)
	for _, src := range [][4]byte{{}, {224, 0, 0, 9}, {255, 255, 255, 255}} {
		forged := append([]byte{}, pkt...)
		copy(forged[12:], src[:])
		a.step(Sender{IP: forged})
	}
	a.step(Sender{})
	a.step(Sender{IP: pkt[:10]})
	w.run(time.Second)
	if len(a.dests) != 0 {
		w.Fatalf("destinations %v, want none", a.dests)
	}
}
