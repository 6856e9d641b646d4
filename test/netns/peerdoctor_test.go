package netns

import (
	"os/exec"
	"strings"
	"testing"
)

// peerDoctor runs doctor --peer and returns the exit status and what it says, in one line.
func (h *host) peerDoctor(to *host) (code int, text string) {
	h.seg.Helper()
	out, errs, code := h.output("doctor", "--control", h.path(".sock"), "--peer", to.v4.String())
	return code, strings.Join(strings.Fields(out+errs), " ")
}

// doctor --peer tells a path that is well from a closed firewall and from a path of a
// smaller MTU.
func TestDoctorPeer(t *testing.T) {
	parallel(t)
	needNFT(t)
	for _, tt := range []struct {
		name string
		do   func(s *segment)
		ok   bool
		says []string
	}{
		{name: "well", ok: true, says: []string{"is reached as it should be: 5 ok", "pass in both directions",
			"RC with MTU 65520"}},
		{name: "firewall", do: func(s *segment) {
			a, b := s.hosts[0], s.hosts[1]
			a.connect(b, "RC") // else a may hear of b, or may not, while it asks
			nft := exec.Command("nft",
				"add table inet f; add chain inet f in { type filter hook input priority 0; }; add rule inet f in udp dport "+
					"4791 drop")
			_, err := b.Output(nft)
			s.must(err)
		}, says: []string{"its address was heard, and its agent does not answer over RC", "open UDP port 4791"}},
		{name: "refused", ok: true, do: func(s *segment) {
			a, b := s.hosts[0], s.hosts[1]
			b.stop()
			b.run(b.config("peer_allow: [192.0.2.0/24]\n")...)
			a.connect(b, "RC")
		}, says: []string{"packets pass both ways, and its agent refuses", "put our GID, fe80::"}},
		{name: "small MTU", do: func(s *segment) {
			a, b := s.hosts[0], s.hosts[1]
			s.must(a.Swallow(underlay, b.Host, underlay, 1500))
			s.must(b.Swallow(underlay, a.Host, underlay, 1500))
		}, says: []string{"small packets pass, those of the path MTU, 4096 octets, do not"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{udMTU: 1280})
			a, b := s.hosts[0], s.hosts[1]
			s.start()
			if tt.do != nil {
				tt.do(s)
			}
			if tt.ok {
				a.connect(b, "RC")
			}
			code, text := a.peerDoctor(b)
			if (code == 0) != tt.ok {
				t.Errorf("exit status %d, want all well: %v", code, tt.ok)
			}
			if err := containsAll(text, tt.says...); err != nil {
				t.Error(err)
			}
		})
	}
}
