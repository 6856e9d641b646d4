package softroce

import (
	"errors"
	"strings"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/long"
	"ipoibcm/verbs"
	"ipoibcm/verbs/verbstest"
)

func TestVerbs(t *testing.T) {
	verbstest.Run(t, func(t *testing.T) verbstest.Pair {
		a, b := pair(t, families[0], nil)
		return verbstest.Pair{A: a, B: b}
	})
}

func TestVerbsOnVeth(t *testing.T) {
	verbstest.Run(t, func(t *testing.T) verbstest.Pair {
		a, b := vethPair(t, 1500, false, nil)
		return verbstest.Pair{A: a, B: b}
	})
}

// Under the race detector, in its short form, both are off: with one of them the code is that of this test
// and of TestVerbs, on the same threads.
func TestVerbsWithoutOffload(t *testing.T) {
	for name, off := range map[string]func(*Options){
		"GSO":  func(o *Options) { o.NoGSO = true },
		"GRO":  func(o *Options) { o.NoGRO = true },
		"both": func(o *Options) { o.NoGSO, o.NoGRO = true, true },
	} {
		t.Run(name, func(t *testing.T) {
			if long.Race && name != "both" {
				long.Only(t)
			}
			verbstest.Run(t, func(t *testing.T) verbstest.Pair {
				a, b := pair(t, families[0], off)
				return verbstest.Pair{A: a, B: b}
			})
		})
	}
}

// An offload that fails its test at the start is not used, and what there was to
// send and receive comes nevertheless; one that is switched off is not tested.
func TestOffloadsAreTried(t *testing.T) {
	broken := errors.New("three octets of five came")
	for name, tt := range map[string]struct {
		opts     Options
		on       [2]bool
		why      [2]string
		failures [2]uint64
	}{
		"all well":    {Options{}, [2]bool{true, true}, [2]string{}, [2]uint64{}},
		"GSO broken":  {Options{testOffload: func(gso, _ bool) error { return map[bool]error{true: broken}[gso] }}, [2]bool{false, true}, [2]string{"its test failed: three octets"}, [2]uint64{1, 0}},
		"GRO broken":  {Options{testOffload: func(_, gro bool) error { return map[bool]error{true: broken}[gro] }}, [2]bool{true, false}, [2]string{1: "its test failed: three octets"}, [2]uint64{0, 1}},
		"no loopback": {Options{testOffload: func(_, _ bool) error { return ErrLoopback }}, [2]bool{true, true}, [2]string{"not tried", "not tried"}, [2]uint64{}},
		"off":         {Options{NoGSO: true, NoGRO: true, testOffload: func(_, _ bool) error { t.Error("tested"); return nil }}, [2]bool{}, [2]string{"switched off", "switched off"}, [2]uint64{}},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, families[0], func(o *Options) {
				o.NoGSO, o.NoGRO, o.testOffload = tt.opts.NoGSO, tt.opts.NoGRO, tt.opts.testOffload
			})
			ea, eb := newEnd(t, a, ib.RC, 4, 20000), newEnd(t, b, ib.RC, 4, 20000)
			connect(ea, eb)
			_, err := eb.qp.PostRecv([]verbs.RecvWR{{SG: eb.sge(0, 20000)}})
			must(t, err)
			_, err = ea.qp.PostSend([]verbs.SendWR{{Flags: verbs.Signaled, SG: ea.sge(0, 20000)}})
			must(t, err)
			wc := eb.next()
			expect.Equal(t, wc.Status, verbs.Success, "Status")
			expect.Equal(t, wc.ByteLen, 20000, "ByteLen")
			for i, o := range a.Offloads()[:hold] {
				expect.Equal(t, o.On, tt.on[i], "%s: On", o.Name)
				expect.Equal(t, o.Why == "", tt.why[i] == "", "%s: %q: that no reason is given", o.Name, o.Why)
				if !strings.HasPrefix(o.Why, tt.why[i]) {
					t.Errorf("%s: Why is %q, want it to begin with %q", o.Name, o.Why, tt.why[i])
				}
				if o.Name == "gso" {
					expect.Equal(t, o.Uses > 0, o.On, "gso: %d uses: that it was used", o.Uses)
				}
				failed := []string{"tx_gso", "rx_gro"}[i] + "_selftest_failed"
				expect.Equal(t, counter(a, failed), tt.failures[i], "%s", failed)
			}
		})
	}
}

// Offloads are switched, and the traffic class changes, while a device is in use.
func TestTune(t *testing.T) {
	a, b := pair(t, families[1], func(o *Options) { o.testOffload = func(_, _ bool) error { return nil } })
	ea, eb := newEnd(t, a, ib.RC, 4, 60000), newEnd(t, b, ib.RC, 4, 60000)
	connect(ea, eb)
	counter := func(d *Device, name string) (n uint64) {
		d.Counters(func(s string, v uint64) {
			if s == name {
				n = v
			}
		})
		return n
	}
	message := func() (batches, chains uint64) {
		t.Helper()
		batches, chains = counter(a, "tx_batches"), counter(b, "rx_chains")
		_, err := eb.qp.PostRecv([]verbs.RecvWR{{SG: eb.sge(0, 60000)}})
		must(t, err)
		_, err = ea.qp.PostSend([]verbs.SendWR{{Flags: verbs.Signaled, SG: ea.sge(0, 60000)}})
		must(t, err)
		wc := eb.next()
		expect.MustEqual(t, wc.Status, verbs.Success, "Status")
		expect.MustEqual(t, wc.ByteLen, 60000, "ByteLen")
		if wc := ea.next(); wc.Status != verbs.Success {
			t.Fatalf("sent %+v", wc)
		}
		return counter(a, "tx_batches") - batches, counter(b, "rx_chains") - chains
	}
	for _, tt := range []struct {
		gso, gro        bool
		batches, chains bool
	}{
		{true, true, true, true}, {true, false, true, false}, {false, true, false, false}, {true, true, true, true},
	} {
		a.SetOffload("gso", tt.gso)
		b.SetOffload("gro", tt.gro)
		batches, chains := message()
		if got := batches > 0; got != tt.batches {
			t.Errorf("gso %v: %d batches", tt.gso, batches)
		}
		if got := chains > 0; got != tt.chains {
			t.Errorf("gso %v, gro %v: %d chains", tt.gso, tt.gro, chains)
		}
		if o := a.Offloads()[gso]; o.On != tt.gso || (o.Why == switchedOff) == tt.gso {
			t.Errorf("gso %v: %+v", tt.gso, o)
		}
	}
	a.SetOffload("connected", false)
	if o := a.Offloads()[connected]; o.On || o.Why != switchedOff {
		t.Errorf("connected sockets: %+v, want off", o)
	}
	hold := a.Offloads()[hold].On
	a.SetOffload("hold_p", !hold)
	if got := a.Offloads(); got[2].On != hold {
		t.Errorf("hold_p: %v, want %v: the threads were laid out for it", got[2].On, hold)
	}
	class := func() uint8 {
		h, err := a.CreateAH(verbs.AHAttr{DGID: b.Port().GIDs[0]})
		must(t, err)
		defer h.Destroy()
		return h.Attr().TrafficClass
	}
	a.SetTrafficClass(104)
	if got := class(); got != 104 {
		t.Errorf("traffic class %d, want 104", got)
	}
	a.SetTrafficClass(0)
	if got := class(); got != 0 {
		t.Errorf("traffic class %d, want 0", got)
	}
}
