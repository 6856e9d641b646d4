package interop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
	"ipoibcm/test/interop/vm"
)

// outageBound is how soon there must be an answer again, in a guest that is emulated.
const outageBound = 10 * time.Second

// A clockWorld is an agent of ours in a guest and one in a namespace of the host.
type clockWorld struct {
	t    *testing.T
	g    *vm.VM
	a, b *node // host, guest
}

func newClockWorld(t *testing.T, name string) *clockWorld {
	img, dir := productImage(t)
	seg := vm.NewSegment()
	t.Cleanup(seg.Close)
	host, err := lab.NewHost(fmt.Sprintf("%s%d-%s", namePrefix, os.Getpid(), name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	if err := seg.AddHost(host, "eth0", mac(0xfe), 5000); err != nil {
		t.Fatal(err)
	}
	g, err := vm.Boot(context.Background(), img, vm.Config{Name: name, Segment: seg, MAC: mac(1), MTU: 5000,
		IPv4: guestIPv4 + "/24", NoRXE: true, Modules: []string{"tun", "button"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Kill)
	w := &clockWorld{t: t, g: g, a: hostNode(t, host, dir, 2), b: guestNode(t, g, 1)}
	w.b.provider = []string{"--provider=softroce", "--underlay=eth0"}
	both := &pairing{a: w.a, b: w.b, path: "gsi", ud: 2044}
	w.a.up(both.args(w.a, "rc")...)
	w.b.up(both.args(w.b, "rc")...)
	w.a.reach(w.b.v4(), 2044)
	w.b.connected("RC", "gsi")
	w.b.reach(w.a.v4(), maxMTU)
	return w
}

// A holding is what an agent has.
type holding struct {
	runtime       control.Runtime
	neighs, conns int
}

func (n *node) holding() (h holding) {
	n.t.Helper()
	var neighs control.Neighbours
	var conns control.Conns
	if err := errors.Join(json.Unmarshal([]byte(n.must(trafficProgram, "get", n.socket, control.PathRuntime)), &h.runtime),
		n.ask(&neighs), n.ask(&conns)); err != nil {
		n.t.Fatal(err)
	}
	h.neighs, h.conns = len(neighs.Neighbours), len(conns.Conns)
	return h
}

// leaked compares what n has with what it had before.
func (n *node) leaked(before holding) {
	n.t.Helper()
	n.until("nothing is left over", func() error {
		now := n.holding()
		switch {
		case now.neighs > before.neighs:
			return fmt.Errorf("%d neighbours, before %d", now.neighs, before.neighs)
		case now.conns > before.conns:
			return fmt.Errorf("%d connections, before %d", now.conns, before.conns)
		case now.runtime.Goroutines > before.runtime.Goroutines+2:
			return fmt.Errorf("%d goroutines, before %d", now.runtime.Goroutines, before.runtime.Goroutines)
		case now.runtime.Descriptors > before.runtime.Descriptors+1:
			return fmt.Errorf("%d descriptors, before %d", now.runtime.Descriptors, before.runtime.Descriptors)
		case now.runtime.HeapOctets > before.runtime.HeapOctets+8<<20:
			return fmt.Errorf("%d octets on the heap, before %d", now.runtime.HeapOctets, before.runtime.HeapOctets)
		}
		return nil
	})
}

// back reports how long it takes until the two reach each other again.
func (w *clockWorld) back(what string) {
	w.t.Helper()
	start := time.Now()
	w.a.reach(w.b.v4(), 1000)
	took := time.Since(start)
	w.t.Logf("%s: an answer after %v", what, took.Round(time.Millisecond))
	if took > outageBound {
		w.t.Errorf("%s: an answer after %v, want within %v", what, took, outageBound)
	}
	w.b.reach(w.a.v4(), 1000)
}

// TestClockSteps sets the guest's clock by hours and years, forth and back, beside traffic both
// ways: the connection stays, every octet arrives, nothing is left over.
func TestClockSteps(t *testing.T) {
	t.Parallel()
	w := newClockWorld(t, "clock")
	up, a, b := w.b.established(), w.a.holding(), w.b.holding()
	steps := []string{"5 hours", "-9 hours", "20 years", "-20 years", "3 days", "-400 days"}
	for _, dir := range [][2]*node{{w.a, w.b}, {w.b, w.a}} {
		from, to := dir[0], dir[1]
		done := make(chan struct{})
		go func() {
			defer close(done)
			from.transfer(to, to.v4(), 4<<20)
		}()
		made, at := 0, ""
		for running := true; running; {
			select {
			case <-done:
				running = false
			default:
				at = steps[made%len(steps)]
				made++
				sh(t, w.g, stepClock(at))
				w.back("clock set by " + at)
			}
		}
		if made < 3 {
			t.Errorf("the clock was set %d times while %s sent, want 3 and more", made, from.name)
		}
	}
	// A guest that is emulated may stand still for longer than a connection waits, once.
	if lost := w.b.established() - up; lost > 1 {
		t.Errorf("%d connections were made anew, want none", lost)
	}
	now := w.b.connected("RC", "gsi")
	if age := time.Duration(now.AgeMS) * time.Millisecond; age < 0 || age > time.Hour {
		t.Errorf("the connection is %v old", age)
	}
	w.a.leaked(a)
	w.b.leaked(b)
}

// established is how many connections n has had.
func (n *node) established() uint64 {
	n.t.Helper()
	c := n.counters()
	return c["ipoib established_active"] + c["ipoib established_passive"]
}

// stepClock is the command that sets the clock by so much.
func stepClock(by string) string {
	seconds, n, unit := 0, 0, ""
	fmt.Sscan(by, &n, &unit)
	for name, s := range map[string]int{"hour": 3600, "day": 86400, "year": 365 * 86400} {
		if strings.HasPrefix(unit, name) {
			seconds = n * s
		}
	}
	return fmt.Sprintf("date -s @$(($(date +%%s) + %d))", seconds)
}

// TestSuspend stops a guest's processors for longer than its connection lasts, and has it suspend
// itself to idle, each in the middle of a stream of TCP, for a minute in the long form. The
// connection is made anew, and nothing of the stream is lost.
func TestSuspend(t *testing.T) {
	t.Parallel()
	w := newClockWorld(t, "asleep")
	a, b := w.a.holding(), w.b.holding()
	away := long.Of(15*time.Second, time.Minute)
	for _, tt := range []struct {
		name        string
		begin, wake func() error
	}{
		{"stopped by QEMU", w.g.Stop, w.g.Continue},
		{"suspend to idle", w.freeze, w.g.WakeUp},
	} {
		conn := w.a.connected("RC", "gsi")
		done := make(chan struct{})
		go func() {
			defer close(done)
			w.a.transferWithin(w.b, w.b.v4(), 6<<20, 2*patience+2*away)
		}()
		w.a.sends(256 << 10)
		start := time.Now()
		if err := tt.begin(); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		select {
		case <-done:
			t.Errorf("%s: the stream did not last until then", tt.name)
		case <-time.After(away - 2*time.Second):
		}
		if _, err := w.a.run(trafficProgram, "ping", w.b.v4(), "100"); err == nil {
			t.Errorf("%s: the guest answers after %v", tt.name, time.Since(start))
		}
		time.Sleep(away - time.Since(start))
		if err := tt.wake(); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		w.back(tt.name)
		select {
		case <-done:
		case <-time.After(2*patience + away): // TCP waits for as long again as it has waited
			t.Fatalf("%s: the stream has not ended", tt.name)
		}
		for _, n := range []*node{w.a, w.b} {
			if now := n.connected("RC", "gsi"); now.LocalQPN == conn.LocalQPN || now.RemoteQPN == conn.LocalQPN {
				t.Errorf("%s: %s still has the connection of before: it was not away for long enough", tt.name, n.name)
			}
		}
		w.a.leaked(a)
		w.b.leaked(b)
	}
}

// sends waits until so many octets more have left by n's connections: a stream is under way.
func (n *node) sends(octets uint64) {
	n.t.Helper()
	sent := func() (sum uint64) {
		var conns control.Conns
		if err := n.ask(&conns); err != nil {
			n.t.Fatal(err)
		}
		for _, c := range conns.Conns {
			sum += c.TxOctets
		}
		return sum
	}
	begin := sent()
	n.until(fmt.Sprintf("%d octets have left", octets), func() error {
		if now := sent(); now < begin+octets {
			return fmt.Errorf("%d before, %d now", begin, now)
		}
		return nil
	})
}

// freeze has the guest suspend itself to idle.
func (w *clockWorld) freeze() error {
	_, err := w.g.Start("/bin/sh", "-c", "echo freeze >/sys/power/state")
	return err
}
