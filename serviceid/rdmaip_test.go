package serviceid_test

import (
	"testing"

	"ipoibcm/serviceid"
)

func TestRDMAIP(t *testing.T) {
	if id := serviceid.RDMAIP(20049); id != 0x0000000001064e51 {
		t.Error(id)
	}
	for port, want := range map[uint16]serviceid.ID{0: 0x01060000, 0xffff: 0x0106ffff} {
		if id := serviceid.RDMAIP(port); id != want {
			t.Errorf("port %d: %v, want %v", port, id, want)
		}
	}
}
