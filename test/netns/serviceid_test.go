package netns

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// With service_id linux a new peer is asked for the 0x10 service ID first, and serves it;
// without the setting for the one with 0x01.
func TestFirstServiceID(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	for i, tt := range []struct{ setting, want string }{
		{setting: ""}, // who is asked
		{"service_id: rfc4755\n", "service=0x01"},
		{"service_id: linux\n", "service=0x10"},
	} {
		h := s.hosts[i]
		h.runFile(tt.setting)
		if i == 0 {
			continue
		}
		h.reach(s.hosts[0].v4)
		var first string
		s.eventually(patience, h.Name+" has asked", func() error {
			log, err := os.ReadFile(h.path(".log"))
			_, rest, ok := strings.Cut(string(log), "sent REQ")
			if first = rest; err == nil && !ok {
				err = errors.New("no REQ in its log")
			}
			return err
		})
		if first, _, _ = strings.Cut(first, "\n"); !strings.Contains(first, tt.want) {
			t.Errorf("%q: the first REQ is %q, want %s", tt.setting, first, tt.want)
		}
		h.ping(s.hosts[0].v4, 9000, true)
	}
}
