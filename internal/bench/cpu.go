package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clockTick is USER_HZ, the unit of /proc.
const clockTick = 10 * time.Millisecond

// A cpuReading is processor time used since boot.
type cpuReading struct {
	busy  time.Duration // by all processes, and by interrupts
	other time.Duration // by processes outside our own tree
	at    time.Time
}

// A cpuUse is the processor time used between two readings.
type cpuUse struct {
	ours, other, wall time.Duration
}

func (a cpuReading) until(b cpuReading) cpuUse {
	u := cpuUse{other: max(0, b.other-a.other), wall: b.at.Sub(a.at)}
	u.ours = max(0, b.busy-a.busy-u.other)
	return u
}

// readCPU reads the processor time used since boot. The time of processes outside our own
// tree counts as other, and the rest as ours. Interrupts and the kernel's threads count
// as ours, because they work for the network. When a child of another program ends,
// its time is added to its parent's, so that nothing is lost between two readings.
func readCPU() (r cpuReading, err error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return r, err
	}
	r.at = time.Now()
	if r.busy, err = busyTime(string(b)); err != nil {
		return r, err
	}
	list := map[int]procStat{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		if p, ok := parseProcStat(string(b)); ok {
			list[p.pid] = p
		}
	}
	r.other = otherTime(list, os.Getpid())
	return r, nil
}

// busyTime adds up the first line of /proc/stat without idle time.
func busyTime(stat string) (time.Duration, error) {
	line, _, _ := strings.Cut(stat, "\n")
	f := strings.Fields(line)
	if len(f) < 8 || f[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q", line)
	}
	sum := uint64(0)
	for _, i := range []int{1, 2, 3, 6, 7} { // user, nice, system, irq, softirq
		n, err := strconv.ParseUint(f[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		sum += n
	}
	return time.Duration(sum) * clockTick, nil
}

// A procStat is what we read of /proc/PID/stat.
type procStat struct {
	pid, parent int
	name        string
	used        time.Duration // its own, and of children that have ended
}

// parseProcStat reads one line. The name, in brackets, may hold anything.
func parseProcStat(line string) (p procStat, ok bool) {
	open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 1 || end < open {
		return p, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line[:open]))
	f := strings.Fields(line[end+1:])
	if err != nil || len(f) < 15 {
		return p, false
	}
	parent, err := strconv.Atoi(f[1])
	if err != nil {
		return p, false
	}
	p.pid, p.parent, p.name = pid, parent, line[open+1:end]
	for _, i := range []int{11, 12, 13, 14} { // utime, stime, cutime, cstime
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return p, false
		}
		p.used += time.Duration(n) * clockTick
	}
	return p, true
}

// kthreadd is the parent of the kernel's threads.
const kthreadd = 2

// otherTime adds up the time of processes that are neither in the tree of pid self nor kernel threads.
func otherTime(list map[int]procStat, self int) (sum time.Duration) {
	kernel := list[kthreadd].name == "kthreadd" // not in a container
	for pid, p := range list {
		ours := kernel && (pid == kthreadd || p.parent == kthreadd)
		for at, steps := pid, 0; !ours && at > 1 && steps < len(list); steps++ {
			ours = at == self
			at = list[at].parent
		}
		if !ours {
			sum += p.used
		}
	}
	return sum
}

// copySpeed returns how fast 16 MiB are copied in memory, in GB/s.
func copySpeed() float64 {
	const size, times = 16 << 20, 8
	from, to := make([]byte, size), make([]byte, size)
	for i := range from {
		from[i] = byte(i)
	}
	copy(to, from) // the first copy makes the pages present
	start := time.Now()
	for range times {
		copy(to, from)
	}
	return size * times / time.Since(start).Seconds() / 1e9
}
