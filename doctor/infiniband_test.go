package doctor

import (
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/ib"
)

// An InfiniBand port stands for an underlay: active, with a subnet manager, in the
// partition that is wanted.
func TestInfiniBandPort(t *testing.T) {
	good := InfiniBandPort{Device: "mlx5_0", Port: 1, State: "ACTIVE", LID: 4, SMLID: 1,
		PKeys: []ib.PKey{0xffff, 0x0001}, PKey: 0xffff}
	for _, tt := range []struct {
		name   string
		change func(*InfiniBandPort)
		want   string
		words  string
	}{
		{"as it should be", func(*InfiniBandPort) {}, control.CheckOK, "LID 4, subnet manager at LID 1"},
		{"a limited member", func(p *InfiniBandPort) { p.PKey = 0x8001 }, control.CheckOK, "active InfiniBand port"},
		{"no cable", func(p *InfiniBandPort) { p.State = "DOWN" }, control.CheckFail, "is DOWN"},
		{"no subnet manager", func(p *InfiniBandPort) { p.SMLID = 0 }, control.CheckFail, "no subnet manager"},
		{"another partition", func(p *InfiniBandPort) { p.PKey = 0x8002 }, control.CheckFail, "not in 0x8002"},
	} {
		port := good
		tt.change(&port)
		out := Examine(Facts{Provider: "ibverbs", InfiniBand: &port})
		for _, c := range out.Checks {
			if c.Name != Underlay {
				continue
			}
			if c.Status != tt.want {
				t.Errorf("%s: got %s, want %s", tt.name, c.Status, tt.want)
			}
			if !strings.Contains(c.Detail, tt.words) {
				t.Errorf("%s: %q, want %q in it", tt.name, c.Detail, tt.words)
			}
		}
	}
}
