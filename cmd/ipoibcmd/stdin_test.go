package main

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The end of the input is noticed, and no thread waits for it in a system call meanwhile.
func TestUntilEOF(t *testing.T) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil { // blocking, as standard input is
		t.Fatal(err)
	}
	in, out := os.NewFile(uintptr(fds[0]), "in"), os.NewFile(uintptr(fds[1]), "out")
	defer in.Close()
	ended := make(chan struct{})
	go func() {
		untilEOF(in)
		close(ended)
	}()
	if _, err := out.WriteString("not the end"); err != nil {
		t.Fatal(err)
	}
	state := ""
	for end := time.Now().Add(10 * time.Second); !strings.Contains(state, "IO wait"); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the goroutine that waits for the end of the input is in state %q, want IO wait", state)
		}
		state = stateOf(".untilEOF(")
	}
	out.Close()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the end of the input was not noticed")
	}
}

// stateOf returns the first line of the stack of the goroutine that is in function.
func stateOf(function string) string {
	buf := make([]byte, 1<<20)
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(stack, function) {
			first, _, _ := strings.Cut(stack, "\n")
			return first
		}
	}
	return "not there"
}
