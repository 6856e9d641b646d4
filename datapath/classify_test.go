package datapath

import (
	"testing"

	"ipoibcm/wire/encap"
	"ipoibcm/wire/nd"
)

// What the loop takes for ND is what the control plane takes for ND, in both
// directions: from the TUN, on a connection, on the UD QP.
func TestNDBehindExtensionHeaders(t *testing.T) {
	w := newWorld()
	a, b := start(t, w, 1, nil), start(t, w, 2, nil)
	na := []byte{136, 0, 0, 0, 0, 0, 0, 0}
	behind := func(next byte, headers ...byte) []byte { return ip6("fe80::2", next, append(headers, na...)...) }
	p := NewPath(1, Target{Kind: ToUD, UD: a.udTo(b)})
	a.route("fe80::2", p)
	for _, tt := range []struct {
		name string
		pkt  []byte
		nd   bool
	}{
		{"plain", behind(58), true},
		{"hop-by-hop options", behind(0, 58, 0, 1, 4, 0, 0, 0, 0), true},
		{"destination options", behind(60, 58, 0, 1, 4, 0, 0, 0, 0), true},
		{"both", behind(0, 60, 0, 1, 4, 0, 0, 0, 0, 58, 0, 1, 4, 0, 0, 0, 0), true},
		{"atomic fragment", behind(44, 58, 0, 0, 0, 0, 0, 0, 1), false}, // RFC 6980 section 5
		{"first fragment", behind(44, 58, 0, 0, 1, 0, 0, 0, 1), false},
		{"echo", ip6("fe80::2", 58, 128, 0, 0, 0, 0, 0, 0, 0), false},
	} {
		if got := nd.KindOf(tt.pkt) != nd.None; got != tt.nd {
			t.Errorf("%s: the control plane sees ND %v, want %v", tt.name, got, tt.nd)
		}
		a.tun.Send(tt.pkt)
		if tt.nd {
			f := up(t, a)
			if f.Kind != TXControl {
				t.Errorf("%s from the TUN: %v, want TXControl", tt.name, f.Kind)
			}
			f.Release()
			if err := a.SendUD(a.udTo(b), encap.IPv6, tt.pkt); err != nil {
				t.Fatal(err)
			}
			if f = up(t, b); f.Kind != RXND {
				t.Errorf("%s from the fabric: %v, want RXND", tt.name, f.Kind)
			}
			f.Release()
			continue
		}
		if got := b.tun.Receive(2e9); string(got) != string(tt.pkt) {
			t.Errorf("%s: %x reached the kernel, want %x", tt.name, got, tt.pkt)
		}
	}
}
