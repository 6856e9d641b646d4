package netns

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A stopwatch measures how long something takes, and how much of that the programs of a segment were
// ready to run while others had the processors: a bound on the rest holds on a busy machine too.
type stopwatch struct {
	s      *segment
	began  time.Time
	before map[int]threadTimes // of each program, by process ID
	stolen time.Duration
	late   time.Duration // by how much this test's own waits took longer than they should
	own    bool          // this process is one of the programs: it sends or receives what is measured
	rtnl   atomic.Int64  // how long requests of watchRTNL have taken, in ns
}

func (s *segment) stopwatch() *stopwatch {
	return &stopwatch{s: s, before: s.queued(), stolen: stolen(), began: time.Now()}
}

// withTest returns w, which counts this process among the programs from now on.
func (w *stopwatch) withTest() *stopwatch {
	w.own, w.before[os.Getpid()] = true, queued(os.Getpid())
	return w
}

// watchRTNL counts as waiting, until stop is called, how long the kernel takes for requests that change
// nothing. A program that adds an address waits as long. The lock for that is one of all namespaces,
// and who holds it, in another test, may not run because others have the processors.
func (w *stopwatch) watchRTNL(h *host) (stop func()) {
	ctx, cancel := context.WithCancel(w.s.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			began := time.Now()
			err := h.Up("lo")
			w.rtnl.Add(int64(time.Since(began)))
			if err != nil {
				return // the host has ended
			}
			time.Sleep(pollEvery)
		}
	}()
	return func() { cancel(); <-done }
}

// read returns how long it has been, and how much of that was waiting for a processor: in each program that
// of the thread that waited longest, because threads wait side by side, and that of all programs together,
// because they wait for each other; and for the kernel's lock (watchRTNL).
func (w *stopwatch) read() (took, waited time.Duration) {
	took, waited = time.Since(w.began), w.late+stolen()-w.stolen+time.Duration(w.rtnl.Load())
	now := w.s.queued()
	if w.own {
		now[os.Getpid()] = queued(os.Getpid())
	}
	for pid, threads := range now {
		waited += threads.longest(w.before[pid])
	}
	return took, min(took, waited)
}

// sleep sleeps, and takes note of how much longer that was.
func (w *stopwatch) sleep(d time.Duration) {
	began := time.Now()
	time.Sleep(d)
	w.late += time.Since(began) - d
}

// over returns what is wrong with a wait that may take most.
func (w *stopwatch) over(most time.Duration) error {
	if took, waited := w.read(); took-waited > most {
		return fmt.Errorf("took %v, of which %v were waiting for a processor or the kernel; want %v at most",
			took.Round(time.Millisecond), waited.Round(time.Millisecond), most)
	}
	return nil
}

// within waits until f returns nil, which may not take longer than d; what programs waited for a
// processor that others had does not count.
func (s *segment) within(d time.Duration, what string, f func() error) {
	s.Helper()
	w := s.stopwatch()
	s.eventuallyBy(w, max(d, patience), what, f)
	if err := w.over(d); err != nil {
		s.Errorf("%s: %v", what, err)
	}
}

// A threadTimes is how long each thread of a program, by its ID, has been ready to run and did not.
type threadTimes map[string]time.Duration

// longest returns how long the thread waited that waited longest since before.
func (t threadTimes) longest(before threadTimes) (d time.Duration) {
	for id, now := range t {
		d = max(d, now-before[id])
	}
	return d
}

// queued returns that of each program of the segment that runs.
func (s *segment) queued() map[int]threadTimes {
	by := map[int]threadTimes{}
	for _, h := range s.hosts {
		if h.agent != nil {
			by[h.agent.PID()] = queued(h.agent.PID())
		}
	}
	for _, d := range s.daemons {
		if !d.dead {
			for _, pid := range family(d.cmd.Process.Pid) {
				by[pid] = queued(pid)
			}
		}
	}
	return by
}

// family returns a process and all that have come from it: keepalived does its work in a child.
func family(pid int) []int {
	all := []int{pid}
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f) // fails if the thread has ended
		for _, word := range strings.Fields(string(b)) {
			if child, err := strconv.Atoi(word); err == nil {
				all = append(all, family(child)...)
			}
		}
	}
	return all
}

// queued returns that of a process (Documentation/scheduler/sched-stats.rst of the kernel).
func queued(pid int) threadTimes {
	all := threadTimes{}
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, f := range files {
		var onCPU, waiting int64
		if b, err := os.ReadFile(f); err == nil {
			if n, _ := fmt.Sscan(string(b), &onCPU, &waiting); n == 2 {
				all[f] = time.Duration(waiting)
			}
		}
	}
	return all
}

// stolen returns how much of the processors' time other guests of a hypervisor have had.
func stolen() time.Duration {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	const steal = 8
	f := strings.Fields(string(b[:max(0, bytes.IndexByte(b, '\n'))]))
	if len(f) <= steal {
		return 0
	}
	n, _ := strconv.ParseInt(f[steal], 10, 64)
	return time.Duration(n) * tick
}

// Time in which a program waits for a processor is seen, and that in which it wants none is not.
func TestStopwatch(t *testing.T) {
	if _, err := os.Stat("/proc/self/schedstat"); err != nil {
		t.Skipf("this kernel does not tell: %v", err)
	}
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		t.Fatal(err)
	}
	one := 0
	for !mine.IsSet(one) {
		one++
	}
	s := &segment{T: t, ctx: t.Context()}
	start := func(script string) {
		d := &daemon{cmd: exec.Command("taskset", "-c", strconv.Itoa(one), "sh", "-c", script)}
		d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := d.cmd.Start(); err != nil {
			t.Skipf("taskset (util-linux): %v", err)
		}
		t.Cleanup(func() {
			_ = syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL)
			_ = d.cmd.Wait()
		})
		s.daemons = append(s.daemons, d)
	}
	start("while :; do :; done")
	start("while :; do :; done & wait") // on the same processor, in a child
	w := s.stopwatch()
	for end := time.Now().Add(patience); ; time.Sleep(pollEvery) {
		if _, waited := w.read(); waited > 100*time.Millisecond {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("of two processes on one processor none waited, in %v", patience)
		}
	}
	for _, d := range s.daemons {
		s.must(syscall.Kill(-d.cmd.Process.Pid, syscall.SIGSTOP))
	}
	before := s.queued()
	if n := len(before); n != 3 {
		t.Errorf("%d processes were looked at, want 3", n)
	}
	s.eventually(patience, "processes that are stopped wait for no processor", func() error {
		last := before
		time.Sleep(100 * time.Millisecond)
		if before = s.queued(); !maps.EqualFunc(before, last, func(a, b threadTimes) bool { return maps.Equal(a, b) }) {
			return fmt.Errorf("waited %v, before %v", before, last)
		}
		return nil
	})
	w = s.stopwatch()
	w.began = w.began.Add(-time.Minute)
	if err := w.over(time.Second); err == nil {
		t.Error("a minute is no longer than a second")
	}
	if err := w.over(time.Hour); err != nil {
		t.Errorf("a minute, where an hour is allowed: %v", err)
	}
}
