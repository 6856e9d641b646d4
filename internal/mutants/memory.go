package main

import "golang.org/x/sys/unix"

// maxMemory bounds what a mutant that never stops allocating can take.
const maxMemory = 4 << 30

// limitMemory bounds a process. Where that fails the mutant runs without.
func limitMemory(pid int) {
	_ = unix.Prlimit(pid, unix.RLIMIT_DATA, &unix.Rlimit{Cur: maxMemory, Max: maxMemory}, nil)
}
