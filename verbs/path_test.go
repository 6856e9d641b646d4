package verbs

import (
	"testing"

	"ipoibcm/ib"
)

// fixed is a provider of which only the MTU is asked.
type fixed struct {
	Provider
	mtu ib.MTU
}

func (f fixed) Port() Port { return Port{MTU: f.mtu} }

// nearer knows that the path to one destination carries less.
type nearer struct {
	fixed
	to ib.GID
}

func (n nearer) PathMTU(dgid ib.GID) ib.MTU {
	if dgid == n.to {
		return ib.MTU256
	}
	return n.mtu
}

func TestPathOverEthernet(t *testing.T) {
	a, b, c := ib.GID{0: 0xfe, 15: 1}, ib.GID{0: 0xfe, 15: 2}, ib.GID{0: 0xfe, 15: 3}
	port := nearer{fixed{mtu: ib.MTU4096}, c}
	for _, tt := range []struct {
		name string
		p    Provider
		to   ib.GID
		mtu  ib.MTU
	}{
		{"a provider that knows its port", port.fixed, c, ib.MTU4096},
		{"one that knows paths", port, b, ib.MTU4096},
		{"one that carries less", port, c, ib.MTU256},
	} {
		want := Path{SGID: a, DGID: tt.to, GRH: true, HopLimit: 64, MTU: tt.mtu}
		got := PathTo(tt.p, a, tt.to)
		if got != want {
			t.Errorf("%s: got %+v\nwant %+v", tt.name, got, want)
		}
		if got.AckTimeout() != 0 {
			t.Errorf("%s: ACK timeout: got %d, want 0, not known", tt.name, got.AckTimeout())
		}
		if got.SubnetLocal() {
			t.Errorf("%s: it is subnet-local", tt.name)
		}
	}
}

func TestPathOverInfiniBand(t *testing.T) {
	p := Path{SGID: ib.GID{15: 1}, DGID: ib.GID{15: 2}, SLID: 4, DLID: 6, FlowLabel: 7, TrafficClass: 8,
		HopLimit: 1, SL: 3,
		Rate: ib.Rate10G, Life: 18}
	want := AHAttr{SGID: p.SGID, DGID: p.DGID, LID: 6, SL: 3, Rate: ib.Rate10G}
	if got := p.AH(); got != want {
		t.Errorf("without GRH: got %+v\nwant %+v", got, want)
	}
	p.GRH = true
	want.GRH = true
	want.FlowLabel, want.TrafficClass, want.HopLimit = 7, 8, 1
	if got := p.AH(); got != want {
		t.Errorf("with GRH: got %+v\nwant %+v", got, want)
	}
	if !p.SubnetLocal() {
		t.Error("hop limit 1 leads out of the subnet")
	}
	for _, tt := range []struct{ life, want ib.Timeout }{{0, 0}, {1, 2}, {18, 19}, {31, 31}} {
		p.Life = tt.life
		if got := p.AckTimeout(); got != tt.want {
			t.Errorf("ACK timeout of life %d: got %d, want %d", tt.life, got, tt.want)
		}
	}
}
