package interop

import (
	"strings"
	"testing"

	"ipoibcm/provider/softroce"
)

// TestBoot shows that the guest has what the other tests stand on.
func TestBoot(t *testing.T) {
	for _, mtu := range underlays {
		w := open(t, mtu)
		out, err := w.vm.Run(patience, "ibv_devinfo", "-v")
		if err != nil {
			t.Fatal(err)
		}
		want := map[int]string{1500: "1024", 5000: "4096"}[mtu]
		if !strings.Contains(out, "rxe0") || !strings.Contains(out, "PORT_ACTIVE") {
			t.Errorf("no port that is active:\n%s", out)
		}
		for _, l := range strings.Split(out, "\n") {
			if strings.Contains(l, "active_mtu") && !strings.Contains(l, want) {
				t.Errorf("underlay MTU %d: %s, want %s", mtu, l, want)
			}
		}
		d := w.device(t, softroce.Options{})
		if got := d.Port().MTU; got != pathMTU(mtu) {
			t.Errorf("underlay MTU %d: our path MTU is %v, the kernel's %s", mtu, got, want)
		}
		w.families(t)
	}
}
