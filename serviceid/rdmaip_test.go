package serviceid_test

import (
	"testing"

	"ipoibcm/serviceid"
)

func TestRDMAIP(t *testing.T) {
	if id := serviceid.RDMAIP(20049); id != 0x0000000001064e51 {
		t.Error(id)
	}
	for id, want := range map[serviceid.ID]int{0x01060000: 0, 0x0106ffff: 0xffff, 0x01070001: -1,
		0x0000000101060001: -1, serviceid.BaseRFC: -1} {
		port, ok := serviceid.ParseRDMAIP(id)
		switch {
		case ok != (want >= 0):
			t.Errorf("%v: ok is %v, want %v", id, ok, want >= 0)
		case ok && int(port) != want:
			t.Errorf("%v: port is %v, want %v", id, int(port), want)
		}
	}
}
