package main

import "golang.org/x/sys/unix"

// maxMemory is how many octets a mutant that never stops allocating can take.
const maxMemory = 4 << 30

// limitMemory limits the memory of a process. If that fails the mutant runs without a limit.
func limitMemory(pid int) {
	_ = unix.Prlimit(pid, unix.RLIMIT_DATA, &unix.Rlimit{Cur: maxMemory, Max: maxMemory}, nil)
}
