package hostnet

import (
	"ipoibcm/rtnl"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// benchDevice is a device with an address in a namespace of its own.
func benchDevice(b *testing.B) *Device {
	b.Helper()
	runtime.LockOSThread() // not given back: the thread ends with the benchmark
	ns, err := netns.New()
	if err != nil {
		b.Skipf("cannot make a network namespace: %v", err)
	}
	b.Cleanup(func() { ns.Close() })
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1"}); err != nil {
		b.Fatal(err)
	}
	ip(b, "link set v0 up\nlink set v1 up\naddr add 10.0.0.1/16 dev v0\naddr add fd00::1/64 dev v0 nodad\n"+
		"route add 10.5.0.0/16 via 10.0.0.2 dev v0\nroute add fd05::/16 via fd00::2 dev v0\n")
	l, err := netlink.LinkByName("v0")
	if err != nil {
		b.Fatal(err)
	}
	d, err := Open(l.Attrs().Index)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.Close() })
	go func() {
		for range d.Events() {
		}
	}()
	return d
}

func BenchmarkLookup(b *testing.B) {
	for _, bb := range []struct {
		name string
		q    rtnl.Query
		busy bool
	}{
		{"IPv4", rtnl.Query{Flow: flow("10.5.0.1", "")}, false},
		{"IPv4/source", rtnl.Query{Flow: flow("10.5.0.1", "10.0.0.1")}, false},
		{"IPv6", rtnl.Query{Flow: flow("fd05::1", "")}, false},
		{"IPv4/beside changes", rtnl.Query{Flow: flow("10.5.0.1", "")}, true},
		{"IPv6/beside changes", rtnl.Query{Flow: flow("fd05::1", "")}, true},
	} {
		b.Run(bb.name, func(b *testing.B) {
			d := benchDevice(b)
			changes := func() int { return 0 }
			if bb.busy {
				changes = changeRoutes(b, d)
			}
			took := make([]time.Duration, 0, 1<<20) // of the first; on a busy machine the median says more than the mean
			b.ReportAllocs()
			for b.Loop() {
				start := time.Now()
				if a, err := d.Lookup(bb.q); err != nil || a.OIF != d.Index() {
					b.Fatal(a, err)
				}
				if len(took) < cap(took) {
					took = append(took, time.Since(start))
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
			if bb.busy {
				b.ReportMetric(float64(changes())/b.Elapsed().Seconds(), "changes/s")
			}
		})
	}
}

// changeRoutes replaces routes until the benchmark calls what it returns.
func changeRoutes(b *testing.B, d *Device) (stop func() int) {
	h, err := netlink.NewHandle()
	if err != nil {
		b.Fatal(err)
	}
	var wg sync.WaitGroup
	done, n := make(chan struct{}), 0
	wg.Go(func() {
		defer h.Close()
		for ; ; n++ {
			select {
			case <-done:
				return
			default:
			}
			dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 0, byte(n), 0}), 24)
			if err := h.RouteReplace(&netlink.Route{LinkIndex: d.Index(), Dst: ipnet(dst.String()),
				Gw: []byte{10, 0, 0, byte(n>>8%200 + 2)}}); err != nil {
				b.Error(err)
				return
			}
		}
	})
	return func() int {
		close(done)
		wg.Wait()
		return n
	}
}

// BenchmarkWatch is how many route changes of others a second the watch reads.
func BenchmarkWatch(b *testing.B) {
	d := benchDevice(b)
	start := d.Counters()
	stop := changeRoutes(b, d)
	b.ReportAllocs()
	for b.Loop() {
		time.Sleep(time.Millisecond)
	}
	b.ReportMetric(float64(stop())/b.Elapsed().Seconds(), "changes/s")
	b.ReportMetric(float64(d.Counters().Overflows-start.Overflows), "overruns")
}

func BenchmarkAddRoute(b *testing.B) {
	d := benchDevice(b)
	i := 0
	for b.Loop() {
		r := host("10.0.1.2", 2000+i%1000)
		if err := d.AddRoute(r); err != nil {
			b.Fatal(err)
		}
		i++
	}
}
