package simfabric

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/long"
	"ipoibcm/verbs"
)

// host is a port with one RC QP that sends numbered messages and checks those
// it gets.
type host struct {
	t              *testing.T
	p              *Port
	qp             verbs.QP
	sendCQ, recvCQ verbs.CQ
	in             []*verbs.Region
	memory         *verbs.Region // what the peer reads
	reads          [][]byte      // by ID; nil: a SEND
	posted, done   int
	sends, got     int // of this side, of the other
	failed         verbs.Status
}

const (
	hostDepth = 32
	hostMax   = 6000
)

// message is the content of the i-th message from a port.
func message(from ib.GID, i int) []byte {
	b := make([]byte, i*2971%hostMax)
	for k := range b {
		b[k] = byte(k) + byte(k>>8)*3 + byte(i)*7 + from[15]
	}
	return b
}

func newHosts(t *testing.T, f *Fabric, mtu ib.MTU) (a, b *host) {
	hosts := [2]*host{}
	for i := range hosts {
		h := &host{t: t, p: f.NewPort(PortOptions{GID: testGID(fmt.Sprintf("fe80::%d", i+1)), MTU: mtu})}
		h.sendCQ, _ = h.p.CreateCQ(hostDepth)
		h.recvCQ, _ = h.p.CreateCQ(hostDepth)
		var err error
		h.qp, err = h.p.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: h.sendCQ, RecvCQ: h.recvCQ,
			SendDepth: hostDepth, RecvDepth: hostDepth, MaxSendSGE: 2, MaxRecvSGE: 2})
		if err != nil {
			t.Fatal(err)
		}
		for range hostDepth {
			r, _ := h.p.Alloc(hostMax)
			h.in = append(h.in, r)
		}
		mem := make([]byte, 50000)
		for k := range mem {
			mem[k] = byte(k*5 + k>>8)
		}
		h.memory, _ = h.p.Register(mem, verbs.RemoteRead)
		hosts[i] = h
	}
	a, b = hosts[0], hosts[1]
	for _, pair := range [][2]*host{{a, b}, {b, a}} {
		h, peer := pair[0], pair[1]
		for s := verbs.StateInit; s <= verbs.StateRTS; s++ {
			err := h.qp.Modify(verbs.QPAttr{State: s, PKey: ib.DefaultPKey, Access: verbs.RemoteRead,
				Path: verbs.AHAttr{DGID: peer.p.opts.GID}, PathMTU: mtu, DestQPN: peer.qp.QPN(),
				RQPSN: 0xffffc0, SQPSN: 0xffffc0, MaxDestRDAtomic: 2, MaxRDAtomic: 2, MinRNRTimer: 5,
				Timeout: 10, RetryCount: 7, RNRRetry: 7})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return a, b
}

func (h *host) recv(k int) {
	if _, err := h.qp.PostRecv([]verbs.RecvWR{{ID: uint64(k),
		SG: []verbs.SGE{{Region: h.in[k], Buf: h.in[k].Buf[:100]}, {Region: h.in[k], Buf: h.in[k].Buf[100:]}}}}); err != nil {
		h.t.Fatal(err)
	}
}

// step posts what fits of total work requests and takes in what has completed.
func (h *host) step(peer *host, total int, lazy bool) {
	if h.posted == 0 {
		for k := range hostDepth {
			if !lazy || k < 3 { // a lazy receiver answers RNR NAK now and then
				h.recv(k)
			}
		}
	}
	for h.posted < total && h.posted-h.done < hostDepth/2 {
		wr := verbs.SendWR{ID: uint64(h.posted), Flags: verbs.Signaled}
		if h.posted%5 == 4 {
			buf := make([]byte, 3000+h.posted*37%5000)
			wr.Opcode, wr.RemoteAddr, wr.RKey = verbs.Read, peer.memory.Addr+uint64(h.posted), peer.memory.RKey
			wr.SG = []verbs.SGE{{Buf: buf}}
			h.reads = append(h.reads, buf)
		} else {
			wr.Opcode, wr.Imm = verbs.SendImm, uint32(h.sends)
			m := message(h.p.opts.GID, h.sends)
			wr.SG = []verbs.SGE{{Buf: m[:len(m)/3]}, {Buf: m[len(m)/3:]}}
			h.sends++
			h.reads = append(h.reads, nil)
		}
		if _, err := h.qp.PostSend([]verbs.SendWR{wr}); err != nil {
			h.t.Fatal(err)
		}
		h.posted++
	}
	var wcs [8]verbs.WC
	for n := h.sendCQ.Poll(wcs[:]); n > 0; n = h.sendCQ.Poll(wcs[:]) {
		for _, wc := range wcs[:n] {
			if wc.ID != uint64(h.done) {
				h.t.Fatalf("completion %d is %+v", h.done, wc)
			}
			if wc.Status != verbs.Success {
				h.failed = wc.Status
				return
			}
			if b := h.reads[h.done]; b != nil && !bytes.Equal(b, peer.memory.Buf[h.done:h.done+len(b)]) {
				h.t.Fatalf("READ %d brought something else", h.done)
			}
			h.done++
		}
	}
	for n := h.recvCQ.Poll(wcs[:]); n > 0; n = h.recvCQ.Poll(wcs[:]) {
		for _, wc := range wcs[:n] {
			want := message(peer.p.opts.GID, h.got)
			expect.MustEqual(h.t, wc.Status, verbs.Success, "Status")
			expect.MustEqual(h.t, wc.Imm, uint32(h.got), "Imm")
			expect.MustEqual(h.t, wc.ByteLen, len(want), "ByteLen")
			if !bytes.Equal(h.in[wc.ID].Buf[:wc.ByteLen], want) {
				h.t.Fatalf("message %d is damaged", h.got)
			}
			h.recv(int(wc.ID))
			h.got++
		}
	}
}

// transfer runs total work requests each way.
func transfer(t *testing.T, f *Fabric, a, b *host, total int) {
	t.Helper()
	lazy := f.Seed()%2 == 0
	ok := f.RunWhile(func() bool {
		a.step(b, total, false)
		b.step(a, total, lazy)
		if a.failed != 0 || b.failed != 0 {
			t.Fatalf("after %v: %v, %v", f.Now(), a.failed, b.failed)
		}
		return a.done < total || b.done < total || a.got < b.sends || b.got < a.sends
	}, time.Minute)
	if !ok {
		t.Fatalf("stuck: %d and %d of %d done, received %d and %d; %+v", a.done, b.done, total, a.got, b.got, f.Stats)
	}
}

// hostile is a network that gets worse with the seed.
func hostile(seed uint64) Options {
	rate := []float64{0.01, 0.02, 0.05, 0.10}[seed%4]
	return Options{Loss: rate, Dup: rate, Reorder: rate, Flip: rate / 2,
		Jitter: time.Duration(seed%3) * 5 * time.Microsecond}
}

// TestHostileRC: every message arrives whole, once and in order, whatever the
// network does.
func TestHostileRC(t *testing.T) {
	Seeds(t, long.Of(16, 80), func(t *testing.T, seed uint64) {
		f := New(seed, hostile(seed))
		a, b := newHosts(t, f, []ib.MTU{ib.MTU256, ib.MTU1024, ib.MTU4096}[seed%3])
		transfer(t, f, a, b, 60)
		switch {
		case f.Stats.Lost == 0:
			t.Errorf("the network was kind: nothing was lost")
		case f.Stats.Duplicated == 0:
			t.Errorf("the network was kind: nothing was duplicated")
		case f.Stats.Reordered == 0:
			t.Errorf("the network was kind: nothing was reordered")
		case f.Stats.Flipped == 0:
			t.Errorf("the network was kind: no bit was flipped")
		}
	})
}

// TestPartition cuts the two hosts off for less, and for more, than the retries
// last.
func TestPartition(t *testing.T) {
	for _, tt := range []struct {
		name string
		cut  time.Duration
		want verbs.Status
	}{
		{"short", 50 * time.Millisecond, verbs.Success},
		{"long", 5 * time.Second, verbs.RetryExceeded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := New(7, Options{})
			a, b := newHosts(t, f, ib.MTU1024)
			f.After(100*time.Microsecond, func() { f.Partition([]*Port{a.p}) })
			f.After(100*time.Microsecond+tt.cut, func() { f.Partition() })
			f.RunWhile(func() bool {
				a.step(b, 200, false)
				b.step(a, 200, false)
				return a.failed == 0 && (a.done < 200 || b.got < a.sends)
			}, 10*time.Second)
			if a.failed != tt.want {
				t.Fatalf("after %v: status %v, want %v (%d done)", tt.cut, a.failed, tt.want, a.done)
			}
			if f.Stats.Cut == 0 {
				t.Error("nothing was cut")
			}
			if tt.want != verbs.Success && a.qp.State() != verbs.StateError {
				t.Errorf("state is %v", a.qp.State())
			}
		})
	}
}

// TestReplay: a seed gives the same packets at the same times, another seed
// gives others.
func TestReplay(t *testing.T) {
	digest := func(seed uint64) (uint64, Stats) {
		f := New(seed, hostile(3))
		a, b := newHosts(t, f, ib.MTU1024)
		transfer(t, f, a, b, 40)
		return f.Digest(), f.Stats
	}
	d1, s1 := digest(5)
	d2, s2 := digest(5)
	if d1 != d2 || s1 != s2 {
		t.Errorf("same seed: %x %+v, then %x %+v", d1, s1, d2, s2)
	}
	if d3, _ := digest(6); d3 == d1 {
		t.Error("another seed gives the same packets")
	}
}

// TestRate: packets leave a port no faster than its rate.
func TestRate(t *testing.T) {
	f := New(1, Options{Rate: 1e9})
	a, b := newHosts(t, f, ib.MTU4096)
	start := f.Now()
	transfer(t, f, a, b, 200)
	took := f.Now().Sub(start)
	if least := time.Duration(200 * 3000 * 8); took < least || took > 4*least {
		t.Errorf("200 messages of 3000 octets on average took %v at 1 Gb/s", took)
	}
}

// TestLink takes the link of a port down and up, and closes and replaces one.
func TestLink(t *testing.T) {
	f := New(1, Options{})
	gid := testGID("fe80::1")
	p := f.NewPort(PortOptions{GID: gid})
	told := 0
	p.Notify(func() { told++ })
	p.SetActive(false)
	p.SetActive(false)
	f.RunFor(time.Millisecond)
	expect.MustEqual(t, p.Port().Active, false, "link down: Port.Active")
	expect.MustEqual(t, told, 1, "link down: told")
	if (<-p.Events()).Kind != verbs.PortError {
		t.Errorf("link down: active %v, told %d times", p.Port().Active, told)
	}
	p.SetActive(true)
	if ev := <-p.Events(); ev.Kind != verbs.PortActive || !p.Port().Active {
		t.Errorf("link up: %+v", ev)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	again := f.NewPort(PortOptions{GID: gid})
	other := f.NewPort(PortOptions{GID: testGID("fe80::2")})
	if err := other.MADPort().SendMAD(&verbs.MAD{Remote: gid, QPN: ib.QPNGSI}); err != nil {
		t.Fatal(err)
	}
	if f.Flying() != 1 {
		t.Errorf("%d packets are on their way, want one MAD", f.Flying())
	}
	f.RunFor(time.Millisecond)
	if len(again.MADPort().MADs()) != 1 {
		t.Error("the new port with an old GID does not get packets")
	}
}

// TestEvents: time goes forward, and what is due together keeps its order.
func TestEvents(t *testing.T) {
	f := New(1, Options{})
	var got []int
	start := f.Now()
	f.After(2*time.Second, func() { got = append(got, 3) })
	f.After(time.Second, func() { got = append(got, 1); f.At(start, func() { got = append(got, 2) }) })
	stopped := f.After(time.Second, func() { got = append(got, 99) })
	if n := f.Timers(); n != 3 {
		t.Errorf("%d timers are set, want 3", n)
	}
	stopped.Stop()
	stopped.Stop()
	Timer{}.Stop()
	if n := f.Timers(); n != 2 {
		t.Errorf("%d timers are set, want 2: one was stopped", n)
	}
	f.RunFor(1500 * time.Millisecond)
	if d := f.Now().Sub(start); d != 1500*time.Millisecond || len(got) != 2 {
		t.Errorf("after %v: %v", d, got)
	}
	f.RunFor(time.Hour)
	expect.Equal(t, fmt.Sprint(got), "[1 2 3]", "got")
	expect.Equal(t, f.Step(), false, "Step")
	expect.Equal(t, f.Timers(), 0, "Timers")
	stopped.Stop() // of one long gone
}
