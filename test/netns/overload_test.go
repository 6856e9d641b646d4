package netns

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"ipoibcm/internal/lab"
)

// narrow lets a bucket of 20 Mb/s through to host i, with 50 ms of queue.
func (s *segment) narrow(i int) {
	s.Helper()
	const rate = 20e6 / 8
	port, err := s.bridge.Link([]string{"port0", "port1", "port2"}[i])
	s.must(err)
	s.must(s.bridge.Netlink().QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: port.Attrs().Index, Handle: netlink.MakeHandle(1, 0),
			Parent: netlink.HANDLE_ROOT},
		Rate: rate, Limit: rate / 20, Buffer: uint32(netlink.Xmittime(rate, 20000)),
	}))
}

// flow sends datagrams of 1400 octets, so many a second, until stop is called, and
// counts the octets that arrive.
func (h *host) flow(to *host, dst netip.Addr, perSecond int) (got *atomic.Int64, stop func()) {
	h.seg.Helper()
	var in, out *net.UDPConn
	h.seg.must(to.Do(func() (err error) {
		in, err = net.ListenUDP("udp", &net.UDPAddr{})
		return err
	}))
	h.seg.must(h.Do(func() (err error) {
		out, err = net.DialUDP("udp", nil, &net.UDPAddr{IP: dst.AsSlice(), Port: in.LocalAddr().(*net.UDPAddr).Port})
		return err
	}))
	got = new(atomic.Int64)
	ctx, cancel := context.WithCancel(h.seg.ctx)
	var ended sync.WaitGroup
	ended.Go(func() {
		buf := make([]byte, 2048)
		for {
			n, err := in.Read(buf)
			if got.Add(int64(n)); err != nil && ctx.Err() != nil {
				return
			}
		}
	})
	ended.Go(func() {
		msg := make([]byte, 1400)
		start, n := time.Now(), 0
		for ctx.Err() == nil {
			for due := int(time.Since(start).Seconds() * float64(perSecond)); n < due && ctx.Err() == nil; n++ {
				_, _ = out.Write(msg)
			}
			time.Sleep(time.Millisecond)
		}
	})
	return got, func() {
		cancel()
		in.Close()
		out.Close()
		ended.Wait()
	}
}

// While a peer is sent ten times what the way to it carries, others are served as if
// nothing was, and the peer has what the way carries. A machine that cannot send ten times as
// much, as under the race detector beside other tests, is asked for half of that, and so on, down to
// more than the way carries: who waits for the peer loses the others' packets at each.
func TestOverloadedPeerIsAlone(t *testing.T) {
	for _, mode := range []string{"rc", "uc", "ud"} {
		t.Run(mode, func(t *testing.T) {
			parallel(t)
			s := newSegment(t, topology{hosts: 3})
			a, slow, idle := s.hosts[0], s.hosts[1], s.hosts[2]
			for _, h := range s.hosts {
				h.run(h.config("mode: " + mode + "\n")...)
			}
			for _, h := range []*host{slow, idle} {
				if mode == "ud" {
					a.reach(h.v4)
				} else {
					a.connect(h, map[string]string{"rc": "RC", "uc": "UC"}[mode])
				}
			}
			s.narrow(1)
			const pings, enough = 100, 10
			lost, mbps := pings, 0.0
			for sent := 200; sent >= 25 && (lost > pings/20 || mode == "rc" && mbps < enough); sent /= 2 {
				lost, mbps = a.besides(slow, idle, sent, pings)
				t.Logf("%d of %d pings lost, %.1f of %d Mb/s to the peer behind 20 Mb/s", lost, pings, mbps, sent)
			}
			if lost > pings/20 {
				t.Errorf("%d of %d pings to the idle host were lost, want %d at most", lost, pings, pings/20)
			}
			if mode == "rc" && mbps < enough {
				t.Errorf("%.1f Mb/s came through 20 Mb/s, want half of it at least", mbps)
			}
			if mode == "rc" && a.counter("datapath", "tx_drop_queue_full")+a.counter("datapath", "tx_drop_late") == 0 {
				t.Error("no packet to the overloaded peer was dropped in front of its queue pair")
			}
		})
	}
}

// besides sends so many Mb/s to slow. It returns how many of pings to idle beside that were lost, and
// the rate with which slow received.
func (h *host) besides(slow, idle *host, sent, pings int) (lost int, mbps float64) {
	h.seg.Helper()
	got, stop := h.flow(slow, slow.v4, sent*1e6/8/1400)
	defer stop()
	time.Sleep(300 * time.Millisecond)
	begin, before := time.Now(), got.Load()
	for range pings {
		if _, err := h.Ping(lab.Ping{Dst: idle.v4, Timeout: time.Second}); err != nil {
			lost++
		}
		time.Sleep(10 * time.Millisecond)
	}
	return lost, float64(got.Load()-before) * 8 / 1e6 / time.Since(begin).Seconds()
}

// A ping beside TCP to the same peer does not wait for all that TCP has sent.
func TestPingBesideTCP(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	a, slow := s.hosts[0], s.hosts[1]
	for _, h := range s.hosts[:2] {
		h.run(h.args()...)
	}
	a.connect(slow, "RC")
	s.narrow(1)
	ctx, cancel := context.WithCancel(s.ctx)
	var streams sync.WaitGroup
	for range 8 {
		streams.Go(func() { _, _ = a.Send(ctx, slow.Host, slow.v4, 0, patience) })
	}
	defer streams.Wait()
	defer cancel()
	time.Sleep(time.Second)
	const patient = 10 * time.Second
	var times []time.Duration
	lost := 0
	for range 40 {
		w := s.stopwatch().withTest()
		rtt, err := a.Ping(lab.Ping{Dst: slow.v4, Timeout: patient})
		_, waited := w.read()
		if err != nil {
			if rtt = patient; waited < patient/2 { // else the machine had no time for it
				lost++
			}
		}
		times = append(times, max(0, rtt-waited))
		time.Sleep(20 * time.Millisecond)
	}
	// One message of 64 KB takes 26 ms there, what lies in the bucket's queue 50 ms at
	// most. In the order in which packets came the eight streams kept a ping for 900 ms.
	slices.Sort(times)
	if p50 := times[len(times)/2]; p50 > 200*time.Millisecond {
		t.Errorf("half of the pings took more than %v, want 200 ms at most", p50)
	} else {
		t.Logf("half of the pings took %v at most", p50)
	}
	if n := a.counter("datapath", "tx_sparse"); n < uint64(len(times))/2 {
		t.Errorf("%d packets of sparse flows went by UD, want half of the %d pings at least", n, len(times))
	}
	// They are the only packets of their flow: nothing of them is too much.
	if lost > 1 {
		t.Errorf("%d of %d pings were lost, want one at most", lost, len(times))
	}
}
