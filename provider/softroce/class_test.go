package softroce

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// An address handle has others for its traffic classes, which differ in nothing else and
// are made once.
func TestClassAH(t *testing.T) {
	d := open(t, Options{Underlay: "lo", GID: gid("127.0.0.1"), TrafficClass: 0x68})
	h, err := d.CreateAH(verbs.AHAttr{DGID: gid("127.0.0.2")})
	must(t, err)
	a := h.(verbs.ClassAH)
	if got := a.WithClass(0x68); got != h {
		t.Errorf("the class that it has leads to another: %v", got.Attr())
	}
	other := a.WithClass(0).(*ah)
	if got := other.Attr().TrafficClass; got != 0 {
		t.Errorf("traffic class %#x, want 0", got)
	}
	if other.head.TrafficClass != 0 {
		t.Errorf("captures show the traffic class %#x, want 0", other.head.TrafficClass)
	}
	if got := other.sender; got != h.(*ah).sender {
		t.Errorf("it leaves by another port, %d", got.port)
	}
	if other.route != h.(*ah).route {
		t.Error("it does not obey the MTU of the route")
	}
	if n := testing.AllocsPerRun(100, func() {
		if a.WithClass(0) != verbs.AH(other) {
			t.Error("asked for once more, it is another")
		}
	}); n != 0 {
		t.Errorf("%v allocations to ask for it once more", n)
	}
}

// The connections between two hosts leave by many source ports, each by its own.
func TestSourcePorts(t *testing.T) {
	d := open(t, Options{Underlay: "lo", GID: gid("127.0.0.1")})
	ports := map[uint16]int{}
	for qpn := range ib.QPN(4096) {
		p, err := d.newPath(verbs.AHAttr{DGID: gid("127.0.0.2")}, false, 0x1000+qpn, 0x800000+7*qpn)
		must(t, err)
		ports[p.sender.port]++
	}
	if len(ports) < 64 {
		t.Errorf("%d source ports, want 64", len(ports))
	}
	for port, n := range ports {
		if n > 3*4096/64 {
			t.Errorf("%d of 4096 connections leave by port %d", n, port)
		}
	}
}
