package main

import (
	"os"
	"testing"
	"time"
)

func TestBusyTime(t *testing.T) {
	got, err := busyTime("cpu  100 20 30 9999 5000 6 7 800 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
	if want := 1630 * time.Millisecond; got != want || err != nil { // neither idle, I/O wait nor steal
		t.Errorf("busy %v, want %v (%v)", got, want, err)
	}
	for _, bad := range []string{"", "cpu 1 2", "cpu a b c d e f g h", "intr 1 2 3 4 5 6 7 8"} {
		if _, err := busyTime(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func TestParseProcStat(t *testing.T) {
	p, ok := parseProcStat("42 (a) R (b) S 7 42 42 0 -1 4194304 1 2 3 4 100 20 3 4 20 0 1 0 0 0 0")
	if want := (procStat{42, 7, "a) R (b", 1270 * time.Millisecond}); !ok || p != want {
		t.Errorf("got %+v, %v, want %+v", p, ok, want)
	}
	for _, bad := range []string{"", "(a) S 1", "x (a) S 1 2 3", "42 )a( S 7 42", "42 (a) S 7"} {
		if p, ok := parseProcStat(bad); ok {
			t.Errorf("%q was read as %+v", bad, p)
		}
	}
	self, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Skip(err)
	}
	switch p, ok := parseProcStat(string(self)); {
	case !ok:
		t.Errorf("of ourselves: ok is false")
	case p.pid != os.Getpid():
		t.Errorf("of ourselves: pid is %v, want %v", p.pid, os.Getpid())
	case p.parent != os.Getppid():
		t.Errorf("of ourselves: parent is %v, want %v", p.parent, os.Getppid())
	}
}

// Ours are we, our descendants and the kernel's threads.
func TestOtherTime(t *testing.T) {
	list := map[int]procStat{}
	for _, p := range []procStat{
		{1, 0, "init", 1}, {2, 0, "kthreadd", 2}, {3, 2, "ksoftirqd/0", 4},
		{10, 1, "bench", 8}, {11, 10, "ipoibcmd", 16}, {12, 11, "child", 32},
		{20, 1, "another", 64}, {21, 20, "its child", 128},
		{30, 99, "whose parent has ended", 256},
	} {
		list[p.pid] = p
	}
	if got := otherTime(list, 10); got != 1+64+128+256 {
		t.Errorf("other time %d", got)
	}
	list[2] = procStat{2, 0, "something", 2} // a container with a PID space of its own
	if got := otherTime(list, 10); got != 1+2+4+64+128+256 {
		t.Errorf("other time %d where 2 is not kthreadd", got)
	}
}

func TestCPUUse(t *testing.T) {
	now := time.Now()
	u := cpuReading{busy: 10, other: 4, at: now}.until(cpuReading{busy: 30, other: 9, at: now.Add(100)})
	if want := (cpuUse{ours: 15, other: 5, wall: 100}); u != want {
		t.Errorf("%+v, want %+v", u, want)
	}
}

func TestCopySpeed(t *testing.T) {
	if v := copySpeed(); v < 0.1 || v > 1000 {
		t.Errorf("%.2f GB/s", v)
	}
}
