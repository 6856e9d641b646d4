package softroce

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// stream sends n messages of size octets from a to b over RC. Both sides run to
// completion in their handlers, as datapath does.
func stream(t testing.TB, da, db *Device, size, n int) {
	const depth = 64
	a, b := newEnd(t, da, ib.RC, depth, size), newEnd(t, db, ib.RC, depth, size)
	room := make(chan struct{}, depth)
	done := make(chan struct{})
	received := 0
	wcb, wrs := make([]verbs.WC, depth), make([]verbs.RecvWR, 0, depth)
	sgb := make([][]verbs.SGE, depth)
	for i := range sgb {
		sgb[i] = b.sge(i, size)
	}
	b.cq.OnReady(func() {
		for {
			k := b.cq.Poll(wcb)
			if k == 0 {
				return
			}
			wrs = wrs[:0]
			for _, wc := range wcb[:k] {
				if wc.Status != verbs.Success || wc.ByteLen != size {
					panic(fmt.Sprintf("receive: %+v", wc))
				}
				wrs = append(wrs, verbs.RecvWR{ID: wc.ID, SG: sgb[wc.ID]})
			}
			if _, err := b.qp.PostRecv(wrs); err != nil {
				return // closing
			}
			if received += k; received == n {
				close(done)
			}
		}
	})
	wca := make([]verbs.WC, depth)
	a.cq.OnReady(func() {
		for {
			k := a.cq.Poll(wca)
			if k == 0 {
				return
			}
			for _, wc := range wca[:k] {
				if wc.Status != verbs.Success {
					panic(fmt.Sprintf("send: %+v", wc))
				}
				room <- struct{}{}
			}
		}
	})
	connect(a, b)
	for i := range depth {
		_, err := b.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SG: sgb[i]}})
		must(t, err)
		room <- struct{}{}
	}
	sga := make([][]verbs.SGE, depth)
	for i := range sga {
		sga[i] = a.sge(i, size)
	}
	wr := make([]verbs.SendWR, 1)
	for i := range n {
		<-room
		wr[0] = verbs.SendWR{ID: uint64(i), Flags: verbs.Signaled, SG: sga[i%depth]}
		_, err := a.qp.PostSend(wr)
		must(t, err)
	}
	<-done
	_ = a.qp.Destroy()
	_ = b.qp.Destroy()
}

func benchStream(b *testing.B, da, db *Device, size int) {
	stream(b, da, db, size, 100) // warm
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	before := cpu()
	stream(b, da, db, size, b.N)
	b.StopTimer()
	// On a busy machine this is the number to compare.
	b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
	b.ReportMetric(float64(size)*8*float64(b.N)/b.Elapsed().Seconds()/1e9, "Gb/s")
	b.ReportMetric(float64(counter(da, "rc_retransmits")), "resent")
	b.ReportMetric(float64(counter(da, "tx_calls"))/float64(b.N), "tx-calls/op")
	b.ReportMetric(float64(counter(db, "rx_calls"))/float64(b.N), "rx-calls/op")
	b.ReportMetric(float64(counter(db, "rc_acks_out"))/float64(b.N), "acks/op")
}

// cpu returns the processor time of this process, user and system.
func cpu() time.Duration {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func BenchmarkRC(b *testing.B) {
	b.Run("loopback", func(b *testing.B) {
		da, db := pair(b, families[0], nil)
		benchStream(b, da, db, 65524)
	})
	for _, mtu := range []int{9000, 1500} {
		b.Run(fmt.Sprintf("veth-%d", mtu), func(b *testing.B) {
			da, db := vethPair(b, mtu, false, nil)
			benchStream(b, da, db, 65524)
		})
	}
	b.Run("veth-9000-IPv4", func(b *testing.B) {
		da, db := vethPair(b, 9000, true, nil)
		benchStream(b, da, db, 65524)
	})
}
