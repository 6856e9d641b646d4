package datapath

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"time"

	"ipoibcm/rtnl"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
)

func TestOutdated(t *testing.T) {
	const now, s = int64(1_800_000_000_000_000_000), int64(time.Second)
	for _, tt := range []struct {
		name          string
		made, changed int64
		gen           uint32
		want          bool
	}{
		{"not changed", now - 20*s, 0, 5, false},
		{"old, but not changed", now - 40*s, now - 40*s, 5, false},
		{"changed just now", now - 20*s, now, 6, false},
		{"changed a while ago", now - 20*s, now - s*9/10, 6, false},
		{"changed long ago", now - 20*s, now - s*11/10, 6, true},
		{"StaleDest a while ago", now - s*9/10, now - 20*s, 6, false},
		{"StaleDest long ago", now - s*11/10, now - 20*s, 6, true},
	} {
		var c dests
		c.changed.Store(tt.changed)
		if got := c.isOutdated(newMark(tt.made, 5), now, tt.gen); got != tt.want {
			t.Errorf("%s: outdated is %v, want %v", tt.name, got, tt.want)
		}
	}
	l, begin := cacheLoop(rtnl.DstOnly), nanotime()
	l.StaleAll()
	if got := l.dests.Load().changed.Load(); got < begin || got > nanotime() {
		t.Errorf("StaleAll notes a change at %d, want %d or a little later", got, begin)
	}
}

// After a change an old answer serves for a second. A packet that comes later goes up, to wait for the new answer,
// unless the ring is full or HoldGroups would drop it.
func TestOutdatedDests(t *testing.T) {
	w := newWorld()
	a, b := stillHost(t, w, 1), stillHost(t, w, 2)
	p := NewPath(1, Target{Kind: ToUD, UD: a.udTo(b)})
	s := newSender(a.threads[0], a.threads[0].tun.Read)
	var begun, ended int64 // of the last change, which notes a time between them
	send := func(what string, pkt []byte, now int64, sent bool, up ...FrameKind) {
		t.Helper()
		before := a.Counters().TxUD
		a.tun.Send(pkt)
		if n, err := a.tun.Read(s.fill(), s.sizes); err != nil || n != 1 {
			t.Fatalf("%s: read %d, %v", what, n, err)
		}
		s.batch(1, now)
		a.threads[0].sendWC.drain()
		b.ud.drain()
		if got := a.Counters().TxUD != before; got != sent {
			t.Errorf("%s: sent is %v, want %v", what, got, sent)
		}
		var kinds []FrameKind
		for len(a.up.ch) > 0 {
			f := <-a.up.ch
			if kinds = append(kinds, f.Kind); f.Kind == TXNoRoute && !bytes.Equal(f.Data, pkt) {
				t.Errorf("%s: %x went up, want the packet", what, f.Data)
			}
			f.Release()
		}
		if !slices.Equal(kinds, up) {
			t.Errorf("%s: frames of kinds %v went up, want %v", what, kinds, up)
		}
	}
	later := func() int64 { return ended + int64(1100*time.Millisecond) }
	for dst, f := range map[string]func(rtnl.Flow){
		"10.9.0.2": func(flow rtnl.Flow) { a.StaleDest(flow) },
		"10.9.0.3": func(rtnl.Flow) { a.StaleAll() },
	} {
		pkt, flow := ip4(dst, 1000, ip.ProtoUDP), rtnl.Flow{Dst: netip.MustParseAddr(dst)}
		change := func() {
			a.SetDest(flow, p)
			begun = nanotime()
			f(flow)
			ended = nanotime()
		}
		change()
		send(dst+" soon after a change", pkt, begun+int64(900*time.Millisecond), true, TXStale)
		send(dst+" asked about", pkt, later(), true)
		change()
		send(dst+" later", pkt, later(), false, TXNoRoute)
		send(dst+" not answered yet", pkt, later(), false, TXNoRoute)
		a.SetDest(flow, p)
		send(dst+" answered", pkt, nanotime(), true)
		change()
		ring := a.up
		a.up = newUpRing(8)
		for a.up.get(Frame{Kind: TXMiss, Type: encap.IPv4, Data: pkt}) != nil { // all frames are in other hands
		}
		send(dst+" later, full ring", pkt, later(), true)
		a.up = ring
		send(dst+" later, room in the ring", pkt, later(), false, TXNoRoute)
	}
	group := rtnl.Flow{Dst: netip.MustParseAddr("224.1.2.3")}
	a.SetDest(group, p)
	a.StaleAll()
	a.HoldGroups(true)
	send("held group", ip4("224.1.2.3", 100, ip.ProtoUDP), nanotime()+int64(1200*time.Millisecond), true, TXStale)
	if got := a.Counters().UpFull; got != 0 {
		t.Errorf("%d frames dropped, want none", got)
	}
}
