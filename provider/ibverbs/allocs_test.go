//go:build ibverbs && cgo

package ibverbs

import (
	"math"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A batch of datagrams is sent again and again.
const batch, size = 16, 500

// An allocEnd is a UD queue pair with receives for a batch.
type allocEnd struct {
	p    verbs.Provider
	cq   verbs.CQ
	qp   verbs.QP
	mem  *verbs.Region
	recv []verbs.RecvWR
}

func openAllocEnd(t *testing.T, underlay string) (e allocEnd) {
	t.Helper()
	must := mustOf(t)
	var err error
	e.p, err = Open(Options{Underlay: underlay, NoCM: true})
	must(err)
	t.Cleanup(func() { e.p.Close() })
	e.mem, err = e.p.Alloc(batch * 1024)
	must(err)
	e.cq, err = e.p.CreateCQ(4 * batch)
	must(err)
	e.qp, err = e.p.CreateQP(verbs.QPInit{Transport: ib.UD, SendCQ: e.cq, RecvCQ: e.cq, SendDepth: batch,
		RecvDepth: batch, MaxSendSGE: 1, MaxRecvSGE: 1})
	must(err)
	for _, s := range []verbs.QPState{verbs.StateInit, verbs.StateRTR, verbs.StateRTS} {
		must(e.qp.Modify(verbs.QPAttr{State: s, PKey: ib.DefaultPKey, QKey: ib.QKeyIPoIB}))
	}
	for i := range batch {
		e.recv = append(e.recv, verbs.RecvWR{ID: uint64(i),
			SG: []verbs.SGE{{Region: e.mem, Buf: e.mem.Buf[i*1024 : (i+1)*1024]}}})
	}
	return e
}

func mustOf(t *testing.T) func(error) {
	return func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestAllocs sends batches of datagrams from one device to the other: nothing is
// allocated per packet.
func TestAllocs(t *testing.T) {
	if *flagA == "" || *flagB == "" {
		t.Skip("no RDMA devices are named (-ibverbs.a and -ibverbs.b); make interop runs this on rdma_rxe")
	}
	must := mustOf(t)
	a, b := openAllocEnd(t, *flagA), openAllocEnd(t, *flagB)
	ah, err := a.p.CreateAH(verbs.AHAttr{DGID: b.p.Port().GIDs[0]})
	must(err)
	sends := make([]verbs.SendWR, batch)
	for i := range sends {
		sends[i] = verbs.SendWR{ID: uint64(i), Flags: verbs.Signaled,
			SG: []verbs.SGE{{Region: a.mem, Buf: a.mem.Buf[:size]}}, AH: ah, RemoteQPN: b.qp.QPN(), RemoteQKey: ib.QKeyIPoIB}
	}
	wcs := make([]verbs.WC, batch)
	drain := func(cq verbs.CQ) {
		for got, end := 0, time.Now().Add(20*time.Second); got < batch; {
			got += cq.Poll(wcs)
			if time.Now().After(end) {
				t.Fatalf("only %d of %d completions", got, batch)
			}
		}
	}
	// Goroutines of the provider that read events, and of the runtime, are counted too where
	// a batch takes long: the least of some measurements is the path's own.
	least := math.Inf(1)
	for range 5 {
		least = min(least, testing.AllocsPerRun(10, func() {
			_, err := b.qp.PostRecv(b.recv)
			must(err)
			_, err = a.qp.PostSend(sends)
			must(err)
			drain(a.cq)
			drain(b.cq)
		}))
	}
	if least >= 1 { // of a batch of 16
		t.Errorf("%v allocations per batch of %d datagrams", least, batch)
	}
}
