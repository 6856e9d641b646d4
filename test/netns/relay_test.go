package netns

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

// relaySeed makes the luck of every run the same, as far as packets are.
const relaySeed = 20050

// throughRelay joins the two hosts by way of mid.
func (s *segment) throughRelay(mid *lab.Host) {
	r, err := lab.ConnectThrough(s.hosts[0].Host, mid, s.hosts[1].Host, underlay, s.mtu, *s.topology.relay, relaySeed)
	s.must(err)
	s.relay = r
	s.Cleanup(r.Close)
}

// throughWire joins the two hosts by way of mid.
func (s *segment) throughWire(mid *lab.Host) {
	for i, end := range []string{"left", "right"} {
		h := s.hosts[i].Host
		s.must(lab.Connect(h, underlay, mid, end, s.mtu))
		s.must(h.OffloadsOff(underlay, "tx-udp-segmentation", "tx-tcp-segmentation", "tx-tcp6-segmentation",
			"tx-checksum-ip-generic"))
	}
	w, err := mid.NewWire("left", "right", s.mtu, *s.topology.wire, relaySeed)
	s.must(err)
	s.Cleanup(w.Close)
}

// One wire packet in twenty is lost, one in ten comes twice, and some overtake
// others, both ways. TCP transfers end with the right hash.
func TestHostileWire(t *testing.T) {
	parallel(t)
	imp := lab.Impairment{Lose: 50, Duplicate: 100, Reorder: 50}
	for _, tt := range []struct {
		mode   string
		args   []string
		octets int64
	}{
		{"RC", nil, 8 << 20},
		// A UC message is lost with any of its packets: these have one each.
		{"UC", []string{"--receive-mtu", "4096"}, 4 << 20},
	} {
		t.Run(tt.mode, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{relay: &imp})
			s.start(append([]string{"--mode", strings.ToLower(tt.mode)}, tt.args...)...)
			a, b := s.hosts[0], s.hosts[1]
			a.reach(b.v4)
			a.connect(b, tt.mode)
			b.reach(a.v6)
			var octets int64
			for _, way := range []struct {
				from, to *host
				dst      netip.Addr
			}{{a, b, b.v4}, {b, a, a.v6}} {
				r := way.from.send(way.to, way.dst, tt.octets) // compares hashes
				octets += r.Octets
				t.Logf("%.1f MiB in %v", float64(r.Octets)/(1<<20), r.Duration.Round(time.Millisecond))
			}
			a.paired(b, tt.mode)
			r := s.relay
			packets, lost, twice, late := r.Packets.Load(), r.Lost.Load(), r.Duplicated.Load(), r.Reordered.Load()
			t.Logf("%d packets, %d lost, %d twice, %d late", packets, lost, twice, late)
			if least := octets / 4096; packets < least {
				t.Errorf("the relay saw %d packets, less than the %d that carry the data: it does not see wire packets",
					packets, least)
			}
			for _, n := range []struct {
				what       string
				got, parts int64
			}{{"lost", lost, 50}, {"sent twice", twice, 100}, {"held back", late, 50}} {
				if want := packets * n.parts / 1000; n.got < want/2 || n.got > 2*want {
					t.Errorf("%d of %d packets were %s, want about %d", n.got, packets, n.what, want)
				}
			}
			if tt.mode == "RC" {
				if n := a.counter("softroce", "rc_retransmits") + b.counter("softroce", "rc_retransmits"); n == 0 {
					t.Error("nothing was sent again")
				}
			}
			if n := a.counter("ipoib", "qp_errors") + b.counter("ipoib", "qp_errors"); n != 0 {
				t.Errorf("%d QPs gave up", n)
			}
		})
	}
}

// silence makes h drop all RoCEv2 packets that come in, or ends that.
func (h *host) silence(on bool) {
	h.seg.Helper()
	if on {
		h.seg.must(h.Block(underlay))
		return
	}
	h.seg.must(h.Unblock())
}

// One direction of the underlay is blocked for a while: nothing hangs, and when
// it is open again traffic is back, on one connection.
func TestOneWayBlocked(t *testing.T) {
	parallel(t)
	const blocked = 4 * time.Second
	connectedModes(t, func(t *testing.T, mode string) {
		needNFT(t)
		_, a, b := startedPair(t, "--mode", strings.ToLower(mode))
		a.connect(b, mode)
		for _, deaf := range []*host{a, b} {
			deaf.silence(true)
			end := time.Now().Add(blocked)
			for time.Now().Before(end) { // both keep trying
				a.Ping(lab.Ping{Dst: b.v4, Timeout: 100 * time.Millisecond})
				b.Ping(lab.Ping{Dst: a.v6, Timeout: 100 * time.Millisecond})
			}
			deaf.silence(false)
			start := time.Now()
			a.backWithin(3*time.Second, b)
			t.Logf("%s hears again: traffic back after %v", deaf.Name, time.Since(start).Round(time.Millisecond))
			a.recovers(b, mode, 4<<20)
		}
	})
}

// recovers sees that h and p have a connection again, whose MTU h's routes show, and that TCP passes
// in both directions.
func (h *host) recovers(p *host, mode string, octets int64) {
	h.seg.Helper()
	h.connect(p, mode)
	h.reachRouted(p, maxMTU)
	h.send(p, p.v4, octets)
	p.send(h, h.v6, octets)
}

// backWithin waits until pings pass both ways. That must not take longer than d, not
// counting for how long the agents waited for a processor that others had.
func (h *host) backWithin(d time.Duration, p *host) {
	h.seg.Helper()
	h.seg.within(d, "traffic both ways", func() error {
		if _, err := h.Ping(lab.Ping{Dst: p.v4, Timeout: 100 * time.Millisecond}); err != nil {
			return fmt.Errorf("%s to %s: %w", h.Name, p.Name, err)
		}
		if _, err := p.Ping(lab.Ping{Dst: h.v6, Timeout: 100 * time.Millisecond}); err != nil {
			return fmt.Errorf("%s to %s: %w", p.Name, h.Name, err)
		}
		return nil
	})
}
