package sim

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

var update = flag.Bool("update", false, "rewrite testdata")

const (
	goodputFile = "testdata/goodput.txt"
	linkRate    = 1e9 // bits per second
	linkDelay   = 50 * time.Microsecond
	goodputTime = 250 * time.Millisecond // virtual
)

// A flow is one stream of packets, all of one size, on a link that loses some.
type flow struct {
	mode    ipoib.Mode
	path    ib.MTU
	receive int // Receive MTU; 0 for UD, which has none
	size    int // octets of IP
	loss    float64
}

// row is where a flow stands in the table.
func (f flow) row() string {
	receive := "-"
	if f.receive > 0 {
		receive = fmt.Sprint(f.receive)
	}
	return fmt.Sprintf("%-4v %5d %8s %7d %5.1f%%", f.mode, f.path.Octets(), receive, f.size, f.loss*100)
}

// flows are all rows of the table, in its order.
func flows() (fs []flow) {
	losses := []float64{0, 0.001, 0.01, 0.05}
	for _, mode := range []ipoib.Mode{ipoib.ModeRC, ipoib.ModeUC} {
		for _, path := range []ib.MTU{ib.MTU1024, ib.MTU4096} {
			for _, receive := range []int{2048, 9000, 65524} {
				for _, loss := range losses {
					fs = append(fs, flow{mode, path, receive, receive - encap.HeaderLen, loss})
				}
			}
			for _, loss := range losses { // small packets where large ones may go
				fs = append(fs, flow{mode, path, 65524, 1500, loss})
			}
		}
	}
	for _, path := range []ib.MTU{ib.MTU1024, ib.MTU4096} {
		for _, loss := range losses {
			fs = append(fs, flow{ipoib.ModeUD, path, 0, udMTU, loss})
		}
	}
	return fs
}

// goodput returns what arrives of f, as Mbit/s of IP, and how often the
// connection did not outlive the loss.
func goodput(w *world, f flow) (mbps float64, lives int) {
	w.f.Options = simfabric.Options{Delay: linkDelay, Rate: linkRate}
	a := w.host(config{mode: f.mode, path: f.path, receive: f.receive})
	b := w.host(config{mode: f.mode, path: f.path, receive: f.receive})
	w.talk()
	w.run(time.Second)
	w.f.Loss = f.loss
	dst := b.addr4()
	if f.mode == ipoib.ModeRC {
		a.onSent = func(c *conn) { // an acknowledgement makes room
			for c.id != 0 && len(c.inflight) < 16 {
				a.send(dst, f.size, true)
			}
		}
		a.send(dst, f.size, true)
	} else {
		// Nothing says when there is room: packets leave as fast as the link takes
		// their octets, headers not counted.
		every := time.Duration(float64(f.size) * 8 / linkRate * float64(time.Second))
		var next func()
		next = func() {
			if w.f.Now().Before(epoch.Add(time.Second + goodputTime*11/10)) {
				a.send(dst, f.size, true)
				w.f.After(every, next)
			}
		}
		next()
	}
	w.run(goodputTime / 10)
	before := b.octets
	w.run(goodputTime)
	return float64(b.octets-before) * 8 / goodputTime.Seconds() / 1e6,
		int(a.counter("established_active") + b.counter("established_active"))
}

// TestGoodput compares what a link carries with a table, number by number: time
// is virtual, so a difference is a change of what the engine sends. A change
// that is wanted is written with -update, and its diff says what it costs.
// 4755-7.1-1: RC repairs every loss, and the connection survives.
func TestGoodput(t *testing.T) {
	fs := flows()
	lines := make([]string, len(fs))
	few := (raceDetector || !long.Form()) && !*update
	var wg sync.WaitGroup
	for half := range 2 {
		wg.Go(func() {
			for i := half; i < len(fs); i += 2 {
				f := fs[i]
				if few && (f.path != ib.MTU4096 || f.loss == 0.001 || f.size == 1500) {
					continue
				}
				v := try(1, func(w *world) {
					mbps, lives := goodput(w, f)
					lines[i] = fmt.Sprintf("%s %9.3f", f.row(), mbps)
					if want := min(1, f.receive); lives != want {
						w.fatalf("%s: %d connections were made, want %d: loss must not break them", f.row(), lives, want)
					}
				})
				if v != nil {
					t.Errorf("%s: %s\n%s", f.row(), v.text, v.before)
				}
				t.Log(lines[i])
			}
		})
	}
	wg.Wait()
	var out bytes.Buffer
	fmt.Fprintf(&out, "# Goodput of one stream in virtual time: a link of %.0f Mbit/s, %v one way.\n# Written "+
		"by go test ./test/sim -run Goodput -update\n#\n", linkRate/1e6, linkDelay)
	fmt.Fprintf(&out, "# mode, path MTU, Receive MTU, octets of an IP packet, loss, Mbit/s\n%s\n",
		strings.Join(lines, "\n"))
	if *update {
		if err := os.WriteFile(goodputFile, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	golden, err := os.ReadFile(goodputFile)
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, l := range strings.Split(string(golden), "\n") {
		have[l] = true
	}
	for i, l := range lines {
		if l != "" && !have[l] {
			t.Errorf("%s\nis not what the table has: %s", l, rowOf(string(golden), fs[i].row()))
		}
	}
	if n := strings.Count(string(golden), "%"); n != len(fs) {
		t.Errorf("the table has %d rows, want %d", n, len(fs))
	}
}

// rowOf returns the line of the table that begins with row.
func rowOf(table, row string) string {
	for _, l := range strings.Split(table, "\n") {
		if strings.HasPrefix(l, row) {
			return l
		}
	}
	return "no such row"
}
