package softroce

import (
	"errors"
	"testing"
)

func TestOffloadSelfTest(t *testing.T) {
	gso, gro := TestOffloads()
	for name, err := range map[string]error{"UDP_SEGMENT": gso, "UDP_GRO": gro} {
		if errors.Is(err, ErrLoopback) {
			t.Skip(err)
		}
		if err != nil { // this kernel runs our tests of both, so it has them
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := testOffload(false, false); err != nil {
		t.Errorf("without either: %v", err)
	}
}
