package softroce

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
)

// An end is one queue pair with what it needs.
type end struct {
	testing.TB
	d      *Device
	cq     *cq
	qp     *qp
	region *verbs.Region
	wcs    [64]verbs.WC
}

func newEnd(t testing.TB, d *Device, tr ib.Transport, depth, size int) *end {
	t.Helper()
	return newEndOn(t, d, 0, tr, depth, size)
}

// newEndOn makes an end of a data thread.
func newEndOn(t testing.TB, d *Device, thread int, tr ib.Transport, depth, size int) *end {
	t.Helper()
	c, err := d.Thread(thread).CreateCQ(4 * depth)
	must(t, err)
	q, err := d.CreateQP(verbs.QPInit{Transport: tr, SendCQ: c, RecvCQ: c, SendDepth: depth, RecvDepth: depth, MaxSendSGE: 2, MaxRecvSGE: 2})
	must(t, err)
	r, err := d.Alloc(2 * depth * size)
	must(t, err)
	return &end{TB: t, d: d, cq: c.(*cq), qp: q.(*qp), region: r}
}

// connect brings two ends to RTS.
func connect(a, b *end) {
	for _, e := range []struct{ self, peer *end }{{a, b}, {b, a}} {
		path := verbs.AHAttr{SGID: e.self.d.Port().GIDs[0], DGID: e.peer.d.Port().GIDs[0]}
		must(a, e.self.qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey, QKey: 0x1b}))
		must(a, e.self.qp.Modify(verbs.QPAttr{State: verbs.StateRTR, Path: path, PathMTU: min(e.self.d.Port().MTU, e.peer.d.Port().MTU),
			DestQPN: e.peer.qp.QPN(), RQPSN: 0xfffff0, MaxDestRDAtomic: 4, MinRNRTimer: 1}))
		must(a, e.self.qp.Modify(verbs.QPAttr{State: verbs.StateRTS, SQPSN: 0xfffff0, Timeout: 14, RetryCount: 7, RNRRetry: 7, MaxRDAtomic: 4}))
	}
}

func (e *end) sge(slot, size int) []verbs.SGE {
	return []verbs.SGE{{Region: e.region, Buf: e.region.Buf[slot*size : (slot+1)*size]}}
}

// next waits for one completion.
func (e *end) next() verbs.WC {
	e.Helper()
	deadline := time.AfterFunc(patience, func() {
		e.d.Counters(func(n string, v uint64) {
			if v != 0 {
				println(n, v)
			}
		})
		panic("no completion")
	})
	defer deadline.Stop()
	for e.cq.Poll(e.wcs[:1]) == 0 {
		must(e, e.cq.Wait())
	}
	return e.wcs[0]
}

func counter(d *Device, name string) (value uint64) {
	d.Counters(func(n string, v uint64) {
		if n == name {
			value = v
		}
	})
	return value
}

// A counter does not fall when a queue pair is destroyed while the counters are read.
func TestCountersDoNotFall(t *testing.T) {
	d, _ := pair(t, families[0], nil)
	for range 2 {
		newEnd(t, d, ib.RC, 1, 64)
	}
	qs := d.qps.all()
	first, last := qs[0], qs[len(qs)-1]
	last.mu.Lock()
	last.eng.Counters().Probes = 7
	last.mu.Unlock()
	const name = "rc_probes"
	if got := counter(d, name); got != 7 {
		t.Fatalf("%s is %d, want 7", name, got)
	}
	first.mu.Lock()
	beside := make(chan uint64)
	go func() { beside <- counter(d, name) }()
	time.Sleep(50 * time.Millisecond) // until it waits for first
	must(t, last.Destroy())
	first.mu.Unlock()
	if got := <-beside; got != 7 {
		t.Errorf("%s is %d while the queue pair goes, want 7", name, got)
	}
	if got := counter(d, name); got != 7 {
		t.Errorf("%s is %d after that, want 7", name, got)
	}
}

func TestRCTransfer(t *testing.T) {
	const size, count = 20000, 50
	for _, f := range families {
		for _, tt := range []struct {
			name   string
			change func(*Options)
			lose   int // one packet in so many
		}{
			{"as it comes", nil, 0},
			{"without UDP_SEGMENT", func(o *Options) { o.NoGSO = true }, 0},
			{"without UDP_GRO", func(o *Options) { o.NoGRO = true }, 0},
			{"one packet in 13 lost", nil, 13},
		} {
			t.Run(f.name+"/"+tt.name, func(t *testing.T) {
				da, db := pair(t, f, tt.change)
				if tt.lose > 0 {
					for _, d := range []*Device{da, db} {
						n := 0
						drop := func([]byte) bool { n++; return n%tt.lose == 0 }
						d.dropHook.Store(&drop)
					}
				}
				a, b := newEnd(t, da, ib.RC, 64, size), newEnd(t, db, ib.RC, 64, size)
				connect(a, b)
				for i := range count {
					_, err := b.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SG: b.sge(i, size)}})
					must(t, err)
				}
				for i := range count {
					sg := a.sge(i, size)
					for k := range sg[0].Buf {
						sg[0].Buf[k] = byte(k*7 + i)
					}
					_, err := a.qp.PostSend([]verbs.SendWR{{ID: uint64(i), Flags: verbs.Signaled, SG: sg}})
					must(t, err)
				}
				for i := range count {
					wc := b.next()
					expect.MustEqual(t, wc.Status, verbs.Success, "Status of receive %d", i)
					expect.MustEqual(t, wc.ID, uint64(i), "ID of receive %d", i)
					expect.MustEqual(t, wc.ByteLen, size, "ByteLen of receive %d", i)
					for k, v := range b.sge(i, size)[0].Buf {
						if v != byte(k*7+i) {
							t.Fatalf("message %d octet %d is %#x", i, k, v)
						}
					}
					wc = a.next()
					expect.MustEqual(t, wc.Status, verbs.Success, "Status of send %d", i)
					expect.MustEqual(t, wc.ID, uint64(i), "ID of send %d", i)
				}
				if tt.lose > 0 && counter(da, "rc_retransmits") == 0 {
					t.Error("nothing was sent again")
				}
				if tt.lose == 0 && counter(da, "rc_retransmits") != 0 {
					// Two processors can bring packets out of order, and a busy one be late.
					t.Logf("%d packets sent again without loss", counter(da, "rc_retransmits"))
				}
				if tt.change == nil && counter(db, "rx_chains") == 0 {
					t.Error("no packet came in a chain")
				}
				if counter(db, "rx_drop_icrc")+counter(db, "rx_foreign_id") != 0 {
					t.Errorf("ICRC errors %d, foreign identifications %d", counter(db, "rx_drop_icrc"), counter(db, "rx_foreign_id"))
				}
			})
		}
	}
}

// Nobody has to wait for an address that does not come.
func TestOpenIsInterrupted(t *testing.T) {
	stop := make(chan struct{})
	close(stop)
	absent := ib.GIDFromAddr(netip.MustParseAddr("fe80::404"))
	_, err := Open(Options{Underlay: "lo", GID: absent, AddressWait: time.Hour, Stop: stop})
	if !errors.Is(err, ErrStopped) {
		t.Errorf("got %v, want ErrStopped", err)
	}
	_, err = Open(Options{Underlay: "lo", GID: absent, AddressWait: -1})
	if err == nil || !strings.Contains(err.Error(), "fe80::404 is not a usable address of it; it has 127.0.0.1") {
		t.Errorf("got %v, want the addresses there are", err)
	}
}

// A queue pair can have no P_Key that the port does not have.
func TestPKeyOfAQP(t *testing.T) {
	_, d := pair(t, families[0], nil)
	for _, tt := range []struct {
		pkey ib.PKey
		ok   bool
	}{{ib.DefaultPKey, true}, {0x8001, false}} {
		e := newEnd(t, d, ib.UD, 4, 100)
		err := e.qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: tt.pkey, QKey: 0x1b})
		if ok := err == nil; ok != tt.ok {
			t.Errorf("P_Key %v: %v, want it taken: %v", tt.pkey, err, tt.ok)
		}
	}
}
