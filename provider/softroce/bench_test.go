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
//
// With reply, b answers every second message with one of 56 octets from another
// goroutine, as TCP above us would.
func stream(t testing.TB, da, db *Device, size, n int, reply bool) {
	const depth = 64
	a, b := newEnd(t, da, ib.RC, depth, size), newEnd(t, db, ib.RC, depth, size)
	room := make(chan struct{}, depth)
	done := make(chan struct{})
	received := 0
	answer := make(chan struct{}, n)
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
			got := 0
			for _, wc := range wcb[:k] {
				if wc.Opcode != verbs.Recv {
					continue // an answer that has arrived
				}
				if wc.Status != verbs.Success || wc.ByteLen != size {
					panic(fmt.Sprintf("receive: %+v", wc))
				}
				got++
				if (received+got)%2 == 0 && reply {
					answer <- struct{}{}
				}
				wrs = append(wrs, verbs.RecvWR{ID: wc.ID, SG: sgb[wc.ID]})
			}
			if _, err := b.qp.PostRecv(wrs); err != nil {
				return // closing
			}
			if received += got; got > 0 && received == n {
				close(done)
			}
		}
	})
	wca := make([]verbs.WC, depth)
	small := a.sge(depth, size)
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
				if wc.Opcode == verbs.Recv {
					_, _ = a.qp.PostRecv([]verbs.RecvWR{{SG: small}})
					continue
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
	for range depth {
		_, err := a.qp.PostRecv([]verbs.RecvWR{{SG: small}})
		must(t, err)
	}
	go func() {
		ack := []verbs.SendWR{{SG: b.sge(depth, 56)}}
		for i := 0; ; i++ {
			if _, ok := <-answer; !ok {
				return
			}
			ack[0].Flags = 0
			if i%16 == 0 {
				ack[0].Flags = verbs.Signaled
			}
			_, _ = b.qp.PostSend(ack)
		}
	}()
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
	close(answer)
	_ = a.qp.Destroy()
	_ = b.qp.Destroy()
}

func benchStream(b *testing.B, da, db *Device, size int, reply bool) {
	stream(b, da, db, size, 100, reply) // warm
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	before := cpu()
	stream(b, da, db, size, b.N, reply)
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
		benchStream(b, da, db, 65524, false)
	})
	for _, mtu := range []int{9000, 1500} {
		b.Run(fmt.Sprintf("veth-%d", mtu), func(b *testing.B) {
			da, db := vethPair(b, mtu, false, nil)
			benchStream(b, da, db, 65524, false)
		})
	}
	b.Run("veth-9000-answered", func(b *testing.B) {
		da, db := vethPair(b, 9000, false, nil)
		benchStream(b, da, db, 65524, true)
	})
	b.Run("veth-9000-IPv4", func(b *testing.B) {
		da, db := vethPair(b, 9000, true, nil)
		benchStream(b, da, db, 65524, false)
	})
}

// BenchmarkUD sends datagrams of 2048 octets, 32 per post, as fast as they go;
// those that find no receive posted are lost and counted.
func BenchmarkUD(b *testing.B) {
	for _, mtu := range []int{9000, 1500} {
		b.Run(fmt.Sprintf("veth-%d", mtu), func(b *testing.B) {
			da, db := vethPair(b, mtu, false, nil)
			const size, depth, run = 2048, 256, 32
			s, r := newEnd(b, da, ib.UD, depth, size).datagram(), newEnd(b, db, ib.UD, depth, size+verbs.GRHLen).datagram()
			h, err := da.CreateAH(verbs.AHAttr{DGID: db.Port().GIDs[0]})
			must(b, err)
			wcs := make([]verbs.WC, depth)
			wrs := make([]verbs.RecvWR, 0, depth)
			received := 0
			r.cq.OnReady(func() {
				for n := r.cq.Poll(wcs); n > 0; n = r.cq.Poll(wcs) {
					wrs = wrs[:0]
					for _, wc := range wcs[:n] {
						wrs = append(wrs, verbs.RecvWR{ID: wc.ID, SG: r.sge(int(wc.ID), size+verbs.GRHLen)})
					}
					received += n
					_, _ = r.qp.PostRecv(wrs)
				}
			})
			for i := range depth {
				_, err := r.qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SG: r.sge(i, size+verbs.GRHLen)}})
				must(b, err)
			}
			send := make([]verbs.SendWR, run)
			for i := range send {
				send[i] = verbs.SendWR{SG: s.sge(i, size), AH: h, RemoteQPN: r.qp.QPN(), RemoteQKey: 0x1b}
			}
			b.SetBytes(size)
			b.ResetTimer()
			before := cpu()
			for i := 0; i < b.N; i += run {
				_, err := s.qp.PostSend(send)
				must(b, err)
			}
			b.StopTimer()
			b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
			must(b, r.qp.Destroy())
			b.ReportMetric(float64(size)*8*float64(received)/b.Elapsed().Seconds()/1e9, "Gb/s")
			b.ReportMetric(100*float64(received)/float64(b.N), "%received")
		})
	}
}
