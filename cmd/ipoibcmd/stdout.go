package main

import (
	"fmt"
	"os"
)

// stdout is where all commands print. If a disk is full or the terminal has gone, the command fails,
// because not all of its output arrived.
var stdout = new(output)

// An output writes to os.Stdout and remembers the first error.
type output struct{ err error }

func (o *output) Write(b []byte) (int, error) {
	n, err := os.Stdout.Write(b)
	if err != nil && o.err == nil {
		o.err = fmt.Errorf("write standard output: %w", err)
	}
	return n, err
}
