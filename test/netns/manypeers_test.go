package netns

import (
	"cmp"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/roce"
)

var manyPeers = flag.Int("peers", 0, "peers of TestStatusAmongManyPeers; 0: three thousand, in the long form")

// Whoever reads the status of a host with very many peers delays none of its packets by more than
// a millisecond: neither those of a connection nor those that the driver is asked for. What other work
// on the machine delays them is seen by reading another host's, which has as many and no part in them.
// Where that is more than a millisecond, the agent's threads wait for each other's turns, too, and it
// may be as much again.
func TestStatusAmongManyPeers(t *testing.T) {
	if *manyPeers == 0 {
		long.Only(t)
	}
	needRoot(t)
	const most, rounds = time.Millisecond, 6
	peers := cmp.Or(*manyPeers, 3000)
	s := newSegment(t, topology{hosts: 3})
	a, b, other := s.hosts[0], s.hosts[1], s.hosts[2]
	crowd := netip.MustParsePrefix("10.50.0.1/16")
	b.run("--log-level", "error")
	for _, h := range []*host{a, other} {
		h.run(append(h.config(fmt.Sprintf("limits:\n  neighbours: %d\n", 4*peers)), "--log-level", "error")...)
		s.must(h.AddAddr(ifName, crowd.String()))
		time.Sleep(time.Second) // its announcement
		s.introduce(h, crowd.Addr(), peers)
		if got := len(h.status().Peers); got < peers {
			t.Fatalf("%d peers, want %d", got, peers)
		}
		s.must(h.DelAddr(ifName, crowd.String()))
	}
	a.connect(b, "RC")
	var quiet, beside, read []time.Duration
	slow := map[float64][]time.Duration{} // by share of the packets: what reading its own status costs, by round
	documents := 0
	for range rounds {
		idle := a.roundTrips(t, b.v4)
		done := other.readStatus(t)
		others := a.roundTrips(t, b.v4)
		done()
		done = a.readStatus(t)
		own := a.roundTrips(t, b.v4)
		documents += done()
		for _, share := range []float64{0.5, 0.9} {
			base := quantile(others, share)
			slow[share] = append(slow[share], quantile(own, share)-base-max(0, base-most))
		}
		quiet, beside, read = append(quiet, idle...), append(beside, others...), append(read, own...)
	}
	for _, share := range []float64{0.5, 0.9, 0.99, 1} {
		t.Logf("%d peers: of %d round trips %3.0f %% within %v; while another's status was read %v; while this one's was, %d times, %v",
			peers, len(quiet), 100*share, quantile(quiet, share), quantile(beside, share), documents, quantile(read, share))
	}
	// A round beside which something else begins says nothing; most do.
	for share, rounds := range slow {
		if got := quantile(rounds, 0.5); got > most {
			t.Errorf("status delays %.0f %% of the packets by %v more than another's, of rounds %v, want %v at most",
				100*share, got, rounds, most)
		}
	}
}

// quantile sorts times and returns what a share of them is not above.
func quantile(times []time.Duration, share float64) time.Duration {
	slices.Sort(times)
	return times[int(float64(len(times)-1)*share)]
}

// introduce makes n hosts and more known to h, which has address self: each asks for it.
func (s *segment) introduce(h *host, self netip.Addr, n int) {
	s.Helper()
	f := s.forger(s.hosts[1], h)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	packets := make([][]byte, n+n/3) // some are turned away each time
	for i := range packets {
		src := [16]byte{0: 0xfe, 1: 0x80, 8: 2}
		binary.BigEndian.PutUint32(src[12:], uint32(i))
		from := netip.AddrFrom16(src)
		link := encap.LinkAddr{QPN: ib.QPN(0x1000 + i), GID: ib.GIDFromAddr(from)} // datagrams only
		body, err := arp.NewRequest(link, netip.AddrFrom4([4]byte{10, 50, byte(1 + i>>8), byte(i)}), self).
			AppendBinary([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0})
		s.must(err)
		packets[i] = forgedUD(r, from, f.gid, link.QPN, f.qpn, ib.QKeyIPoIB, body)
	}
	f.load(packets)
	ctx, stop := context.WithTimeout(s.ctx, 4*patience)
	defer stop()
	// Few unknown sources may speak in a second, more of those that come again.
	for try := 0; len(h.status().Peers) < n && try < 20; try++ {
		sent, err := f.send(ctx, roce.Port, 1000)
		s.must(err)
		if sent != len(packets) {
			s.Fatalf("%d of %d hosts were introduced", sent, len(packets))
		}
	}
}

// roundTrips pings dst every few milliseconds for a while.
func (h *host) roundTrips(t *testing.T, dst netip.Addr) (times []time.Duration) {
	t.Helper()
	const pings, lost = 200, 4 // the kernel may drop some
	for range pings {
		if rtt, err := h.Ping(lab.Ping{Dst: dst, Timeout: time.Second}); err == nil {
			times = append(times, rtt)
		}
		time.Sleep(2 * time.Millisecond)
	}
	if n := pings - len(times); n > lost {
		h.seg.Fatalf("%d of %d pings to %s were not answered", n, pings, dst)
	}
	return times
}

// readStatus reads the agent's status again and again, until what it returns is called, which says how
// often.
func (h *host) readStatus(t *testing.T) func() int {
	ctx, stop := context.WithCancel(h.seg.ctx)
	var n atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			doc, err := h.agent.Stream(ctx, control.PathStatus)
			if err == nil {
				_, err = io.Copy(io.Discard, doc) // to make sense of it would delay our pings
				doc.Close()
			}
			if err == nil {
				n.Add(1)
			} else if ctx.Err() == nil {
				t.Error(err)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	return func() int {
		stop()
		<-ended
		return int(n.Load())
	}
}
