package rpcrdma

import (
	"fmt"
	"testing"
	"time"
)

// TestBackwardNeedsPeer: V2-R1-19. A server calls only a client that has heard
// its version and whose program has said that it is ready.
func TestBackwardNeedsPeer(t *testing.T) {
	for _, version := range []Version{1, 2} {
		for _, tt := range []struct {
			name            string
			answered, ready bool
		}{
			{"neither", false, false},
			{"the program alone", false, true},
			{"the version alone", true, false},
			{"both", true, true},
		} {
			name := fmt.Sprintf("version %d, %s", version, tt.name)
			o := Options{MaxVersion: version}
			w := pair(t, o, o).connect()
			s := w.server()
			if tt.answered {
				w.client().step(Submit{ID: 1, Payload: rpc(0)})
				w.run(time.Second)
			}
			if tt.ready {
				s.step(PeerReady{})
			}
			before := len(s.sends)
			s.step(Submit{ID: 9, Payload: rpc(0)})
			w.run(time.Second)
			d, calls := s.result(9), len(s.sends)-before
			if tt.answered && tt.ready {
				if d.Err != nil || calls != 1 {
					t.Errorf("%s: %v after %d messages", name, d.Err, calls)
				}
				continue
			}
			if calls != 0 {
				t.Errorf("%s: %d messages were sent", name, calls)
			}
			if d.Err == nil || d.Err.Reason != ReasonNotReady {
				t.Errorf("%s: ended with %v, want %v", name, d.Err, ReasonNotReady)
			}
		}
	}
}
