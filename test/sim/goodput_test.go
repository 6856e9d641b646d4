package sim

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/simfabric"
)

var update = flag.Bool("update", false, "rewrite testdata")

const (
	goodputFile = "testdata/goodput.txt"
	// goodputTolerance is how far a run may be from the table, as a share: a
	// change of the engine that costs more wants a reason in its commit.
	goodputTolerance = 0.15
	linkRate         = 1e9 // bits per second
	linkDelay        = 50 * time.Microsecond
)

// goodput returns the octets of IP per second, as Mbit/s, that one RC stream
// gets through a link that loses a share of the packets.
func goodput(t *testing.T, path ib.MTU, size int, loss float64, d time.Duration) float64 {
	w := newWorld(t, 1, simfabric.Options{Delay: linkDelay, Rate: linkRate})
	a, b := w.host(config{path: path}), w.host(config{path: path})
	w.talk()
	w.run(time.Second)
	w.f.Loss = loss
	dst := b.addr4()
	a.onSent = func(c *conn) {
		for c.id != 0 && len(c.inflight) < 16 {
			a.send(dst, size, true)
		}
	}
	a.send(dst, size, true)
	w.run(d / 10)
	c := b.conns[b.with(a)[0].Conn]
	if c == nil {
		w.fatalf("no connection")
	}
	start, life := c.rxOctets, c.id
	w.run(d)
	if cs := b.with(a); len(cs) != 1 || cs[0].Conn != life {
		w.fatalf("the connection did not survive %v%% of loss", loss*100)
	}
	return float64(c.rxOctets-start) * 8 / d.Seconds() / 1e6
}

// TestGoodput compares what RC carries with a table, so that a change of its
// retransmission shows. 4755-7.1-1: a loss is repaired, and the connection
// survives every one of these.
func TestGoodput(t *testing.T) {
	const d = 500 * time.Millisecond
	few := (raceDetector || testing.Short()) && !*update
	golden := map[string]float64{}
	if f, err := os.ReadFile(goodputFile); err == nil {
		for s := bufio.NewScanner(bytes.NewReader(f)); s.Scan(); {
			var path, size int
			var loss, mbps float64
			if n, _ := fmt.Sscanf(s.Text(), "%d %d %f%% %f", &path, &size, &loss, &mbps); n == 4 {
				golden[row(path, size, loss)] = mbps
			}
		}
	} else if !*update {
		t.Fatal(err)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "# Goodput of one RC stream in virtual time: %.0f Mbit/s, %v one way.\n# Written by go test ./test/sim -run Goodput -update\n#\n# path MTU, octets of an IP packet, loss, Mbit/s\n", linkRate/1e6, linkDelay)
	for _, path := range []ib.MTU{ib.MTU1024, ib.MTU4096} {
		for _, size := range []int{1500, 65520} {
			for _, loss := range []float64{0, 0.001, 0.01, 0.05} {
				if few && (path != ib.MTU4096 || size != 65520 || loss == 0.001) {
					continue
				}
				key := row(path.Octets(), size, loss*100)
				got := goodput(t, path, size, loss, d)
				fmt.Fprintf(&out, "%s %8.1f\n", key, got)
				if want, ok := golden[key]; !*update && (!ok || math.Abs(got-want) > want*goodputTolerance) {
					t.Errorf("%s: %.1f Mbit/s, want %.1f", key, got, want)
				}
			}
		}
	}
	t.Logf("\n%s", &out)
	if *update {
		if err := os.WriteFile(goodputFile, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func row(path, size int, loss float64) string {
	return fmt.Sprintf("%4d %5d %4.1f%%", path, size, loss)
}
