package netns

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var weightLoad = flag.Int("weight.load", -1, "measure in TestWeight what CPUWeight= is worth beside so many busy processes")

// TestWeight measures round trips and goodput of agents beside busy processes of another control group, with
// several weights of their own: cpu.shares of version 1, of which 1024 is CPUWeight=100.
func TestWeight(t *testing.T) {
	if *weightLoad < 0 {
		t.Skip("measures: go test ./test/netns -run TestWeight -v -weight.load 8")
	}
	needRoot(t)
	const rounds = 5
	weights := []int{100, 300, 1000}
	s, a, b := startedPair(t, "--mode", "rc")
	a.connect(b, "RC")
	put := func(group, file string, value int) {
		s.must(os.WriteFile(filepath.Join(group, file), []byte(strconv.Itoa(value)), 0o644))
	}
	var groups [3]string // of a, b and what is busy, as services are each in one
	for i := range groups {
		groups[i] = fmt.Sprintf("/sys/fs/cgroup/cpu/ipnt-%d-%d", os.Getpid(), i)
		s.must(os.Mkdir(groups[i], 0o755))
		t.Cleanup(func() {
			time.Sleep(time.Second) // its processes have ended
			os.Remove(groups[i])
		})
	}
	for i, h := range s.hosts {
		put(groups[i], "cgroup.procs", h.agent.PID())
	}
	for range *weightLoad {
		busy := exec.Command("sh", "-c", "echo $$ >$0/cgroup.procs; exec timeout 600 sh -c 'while :; do :; done'", groups[2])
		s.must(busy.Start())
		t.Cleanup(func() {
			_ = busy.Process.Signal(unix.SIGTERM) // which timeout passes on
			_ = busy.Wait()
		})
	}
	time.Sleep(time.Second)
	times, rates := map[int][]time.Duration{}, map[int][]float64{}
	for range rounds {
		for _, w := range weights {
			for i := range s.hosts {
				put(groups[i], "cpu.shares", w*1024/100)
			}
			times[w] = append(times[w], a.roundTrips(t, b.v4)...)
			got := a.send(b, b.v4, 32<<20)
			rates[w] = append(rates[w], got.Mbps()/1000)
		}
	}
	for _, w := range weights {
		slices.Sort(times[w])
		slices.Sort(rates[w])
		n := len(times[w])
		t.Logf("CPUWeight=%-4d beside %d busy processes: round trip p50 %v, p90 %v, p99 %v; TCP %.2f Gb/s (%.2f-%.2f)", w, *weightLoad,
			times[w][n/2], times[w][n*9/10], times[w][n*99/100], rates[w][rounds/2], rates[w][0], rates[w][rounds-1])
	}
}
