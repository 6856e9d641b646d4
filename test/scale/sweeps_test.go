package scale

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"ipoibcm/internal/long"
)

var (
	probeFlag   = flag.Int("scale.probe", 0, "let TestProbe run every operation among this many neighbours")
	timesFlag   = flag.Int("scale.times", 2*maxRuns, "as often as this")
	controlFlag = flag.Bool("scale.control", false, "and one that does look at every neighbour")
)

// counted are the packages whose every block is counted, and the libraries that loop for them.
const counted = "ipoibcm/ipoib,ipoibcm/cm,ipoibcm/fib,ipoibcm/lru,ipoibcm/neigh,ipoibcm/group,ipoibcm/mtu,ipoibcm/timerheap,slices,maps,container/heap"

// TestProbe is run by TestSweeps, in a binary that counts.
func TestProbe(t *testing.T) {
	if *probeFlag == 0 {
		t.Skip("is for TestSweeps")
	}
	f := newField(newCrowd(t, crowdOptions(*probeFlag)), *probeFlag)
	for i := range *timesFlag {
		if i%maxRuns == 0 {
			f.refresh()
		}
		for _, op := range operations {
			op.do(f)
		}
		if *controlFlag { // the MTU of every entry may have to change
			f.told(f.kernel.MTU(65000))
			f.told(f.kernel.MTU(65520))
		}
	}
}

// TestSweeps counts how often each block of the machine is run: none of them more often
// because there are ten times as many neighbours. Time could hide a look at each of
// them behind what else a Step does; this does not, and says where it is.
func TestSweeps(t *testing.T) {
	long.Only(t)
	if raceDetector {
		t.Skip("is run without the race detector")
	}
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command to build a binary that counts")
	}
	dir := t.TempDir()
	bin := filepath.Join(dir, "counting")
	if out, err := exec.Command("go", "test", "-c", "-vet=off", "-covermode=count", "-coverpkg="+counted, "-o",
		bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if found := sweeps(t, bin); len(found) > 0 {
		t.Errorf("run more often with more neighbours:\n%s", strings.Join(found, "\n"))
	}
	// It can fail: there is such a sweep where it is wanted.
	found := strings.Join(sweeps(t, bin, "-scale.control"), "\n")
	if !strings.Contains(found, "ipoibcm/ipoib/hop.go:") {
		t.Errorf("an event that concerns every neighbour was not found to look at each:\n%s", found)
	}
}

// sweeps lists the blocks that are run much more often among 2000 neighbours than among 200.
func sweeps(t *testing.T, bin string, args ...string) (found []string) {
	t.Helper()
	few, many := blocks(t, bin, 200, args), blocks(t, bin, 2000, args)
	for at, n := range many {
		// What is searched by halves is deeper. What is run once in a while may be so by chance.
		if n > 5*few[at]+turns {
			found = append(found, fmt.Sprintf("%s: %d times, among a tenth as many neighbours %d times", at, n, few[at]))
		}
	}
	return found
}

// blocks returns how often each block is run for 40 times every operation, without what it
// takes to make the field: that is what twice as many differ by.
func blocks(t *testing.T, bin string, n int, args []string) map[string]int {
	t.Helper()
	count := func(times int) map[string]int {
		profile := filepath.Join(t.TempDir(), "profile")
		args := append([]string{"-test.run=^TestProbe$", "-test.coverprofile=" + profile,
			fmt.Sprintf("-scale.probe=%d", n), fmt.Sprintf("-scale.times=%d", times)}, args...)
		if out, err := exec.Command(bin, args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		b, err := os.ReadFile(profile)
		if err != nil {
			t.Fatal(err)
		}
		counts := map[string]int{}
		for l := range strings.Lines(string(b)) {
			var statements, n int
			if at, rest, ok := strings.Cut(l, " "); ok {
				if _, err := fmt.Sscan(rest, &statements, &n); err == nil {
					counts[at] += n
				}
			}
		}
		if len(counts) < 100 {
			t.Fatalf("only %d blocks in the profile", len(counts))
		}
		return counts
	}
	once, twice := count(2*maxRuns), count(4*maxRuns)
	for at, n := range once {
		// What the field takes is not the same each time: less than nothing is nothing.
		twice[at] = max(0, twice[at]-n)
	}
	return twice
}
