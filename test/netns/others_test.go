package netns

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tick is the unit of time in /proc.
const tick = time.Second / 100

// others begins to measure. What it returns tells which part of the processors' time has since gone
// to processes that are neither this test nor an agent of its segment, or to other guests of a
// hypervisor. What the kernel does for packets is not among it, nor are its threads.
func (s *segment) others() func() float64 {
	s.Helper()
	begin, all, ours := time.Now(), s.allTicks(), s.ourTicks()
	return func() float64 {
		s.Helper()
		theirs := (s.allTicks() - all) - (s.ourTicks() - ours)
		return max(0, float64(theirs)*float64(tick)/float64(time.Since(begin))/float64(processors()))
	}
}

// processors is how many there are, whatever this process may use.
func processors() (n int) {
	b, _ := os.ReadFile("/proc/stat")
	for l := range strings.Lines(string(b)) {
		if strings.HasPrefix(l, "cpu") && !strings.HasPrefix(l, "cpu ") {
			n++
		}
	}
	return max(1, n)
}

// allTicks is what all processes have had, and what was stolen, of all processors' time.
func (s *segment) allTicks() (n int64) {
	s.Helper()
	b, err := os.ReadFile("/proc/stat")
	s.must(err)
	const user, nice, system, steal = 1, 2, 3, 8
	f := strings.Fields(string(b[:bytes.IndexByte(b, '\n')]))
	if len(f) <= steal {
		s.Fatalf("/proc/stat begins with %q", f)
	}
	for _, i := range []int{user, nice, system, steal} {
		v, err := strconv.ParseInt(f[i], 10, 64)
		s.must(err)
		n += v
	}
	return n
}

// ourTicks is what this test, the agents and the threads of the kernel have had of it.
func (s *segment) ourTicks() (n int64) {
	s.Helper()
	ours := map[string]bool{strconv.Itoa(os.Getpid()): true}
	for _, h := range s.hosts {
		if h.agent != nil {
			ours[strconv.Itoa(h.agent.PID())] = true
		}
	}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	s.must(err)
	for _, name := range stats {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		ppid, used := ticksOf(b)
		if pid := filepath.Base(filepath.Dir(name)); ours[pid] || ppid == 2 {
			n += used
		}
	}
	return n
}

// ticksOf returns parent and processor time from /proc/PID/stat, whose second field may hold anything.
func ticksOf(stat []byte) (ppid int, used int64) {
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const parent, user, system = 1, 11, 12 // after the name
	if len(f) <= system {
		return 0, 0
	}
	ppid, _ = strconv.Atoi(f[parent])
	for _, i := range []int{user, system} {
		v, _ := strconv.ParseInt(f[i], 10, 64)
		used += v
	}
	return ppid, used
}

// busy returns which part of the processors' time we do not get when we want it
// all, because something else is running that does not make way.
func (s *segment) busy() float64 {
	s.Helper()
	const spin = 100 * time.Millisecond
	time.Sleep(50 * time.Millisecond) // for what the last flood has left to do
	var got atomic.Int64
	var wg sync.WaitGroup
	for range runtime.NumCPU() {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var begin, end unix.Timespec
			_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &begin) // it never fails
			for start := time.Now(); time.Since(start) < spin; {
			}
			_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &end)
			got.Add(end.Nano() - begin.Nano())
		})
	}
	wg.Wait()
	return 1 - float64(got.Load())/float64(spin.Nanoseconds()*int64(runtime.NumCPU()))
}

// TestOthers: a process that keeps a processor busy is seen; what the test does itself is not.
func TestOthers(t *testing.T) {
	s := &segment{T: t}
	measure := func() float64 {
		ended := s.others()
		for begin := time.Now(); time.Since(begin) < 500*time.Millisecond; {
		}
		return ended()
	}
	quiet, one := measure(), 1/float64(processors())
	spin := exec.Command("sh", "-c", "while :; do :; done")
	s.must(spin.Start())
	defer spin.Wait()
	defer spin.Process.Kill()
	loud := measure()
	if quiet < one/4 && loud < one/4 { // else there is more to see than that
		t.Errorf("beside a process that spins others have %.2f of the time, want some %.2f; before %.2f", loud, one, quiet)
	}
	if _, used := ticksOf([]byte("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 30 12 5 5")); used != 42 {
		t.Errorf("%d ticks, want 42", used)
	}
}
