package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// errStopped says that the run was asked to end.
var errStopped = errors.New("stopped; the same command goes on from here")

// maxLast bounds the last line of a log in the table, in octets.
const maxLast = 100

// A result is the result of one step.
type result struct {
	Command string  `json:"command"` // the result counts for this command only
	OK      bool    `json:"ok"`
	Seconds float64 `json:"seconds"`
	Last    string  `json:"last"` // line of its output
}

// A night is one run of the steps.
type night struct {
	steps []step
	dir   string // state, logs and table
	again bool
	out   io.Writer
	every time.Duration // from one line of progress to the next
	stop  chan os.Signal

	done map[string]result
}

// run carries out the steps that are not done, and prints the table. It reports
// whether all are well.
func (n *night) run() (ok bool, err error) {
	if err := os.MkdirAll(n.dir, 0o755); err != nil {
		return false, err
	}
	n.done = map[string]result{}
	if b, err := os.ReadFile(n.state()); err == nil {
		if err := json.Unmarshal(b, &n.done); err != nil {
			return false, fmt.Errorf("%s: %w", n.state(), err)
		}
	}
	for i, s := range n.steps {
		command := strings.Join(s.command, " ")
		if r, there := n.done[s.name]; there && r.Command == command && !n.again {
			fmt.Fprintf(n.out, "%d of %d  %-10s done before\n", i+1, len(n.steps), s.name)
			continue
		}
		delete(n.done, s.name)
		fmt.Fprintf(n.out, "%d of %d  %-10s %s: %s > %s\n", i+1, len(n.steps), s.name, s.what, command, n.log(s))
		r, err := n.carryOut(i, s)
		if err != nil {
			return false, err
		}
		n.done[s.name] = r
		if err := n.save(); err != nil {
			return false, err
		}
	}
	table, ok := n.table()
	fmt.Fprint(n.out, table)
	return ok, os.WriteFile(filepath.Join(n.dir, "table.md"), []byte(table), 0o644)
}

func (n *night) state() string     { return filepath.Join(n.dir, "state.json") }
func (n *night) log(s step) string { return filepath.Join(n.dir, s.name+".log") }

// save replaces the file of the state in one step, so that it is whole whenever we are killed.
func (n *night) save() error {
	b, err := json.MarshalIndent(n.done, "", "\t")
	if err != nil {
		return err
	}
	tmp := n.state() + ".new"
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, n.state())
}

// carryOut runs one step, and prints a line of progress each [night.every].
func (n *night) carryOut(i int, s step) (r result, err error) {
	log, err := os.Create(n.log(s))
	if err != nil {
		return r, err
	}
	defer log.Close()
	c := exec.Command(s.command[0], s.command[1:]...)
	c.Stdout, c.Stderr = log, log
	c.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { // of the make that runs us
		return strings.HasPrefix(v, "MAKEFLAGS=") || strings.HasPrefix(v, "MFLAGS=") || strings.HasPrefix(v, "MAKELEVEL=")
	})
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // processes that it starts end with it
	begin := time.Now()
	if err := c.Start(); err != nil {
		return r, err
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	tick := time.NewTicker(n.every)
	defer tick.Stop()
	for {
		select {
		case err := <-ended:
			r = result{Command: strings.Join(s.command, " "), OK: err == nil, Seconds: time.Since(begin).Seconds(),
				Last: lastLine(n.log(s))}
			return r, nil
		case sig := <-n.stop:
			_ = syscall.Kill(-c.Process.Pid, sig.(syscall.Signal)) // it may have ended
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
				<-ended
			}
			return r, errStopped
		case <-tick.C:
			fmt.Fprintf(n.out, "%d of %d  %-10s %v so far, %d to come; %s\n", i+1, len(n.steps), s.name,
				time.Since(begin).Round(time.Second), len(n.steps)-i-1, lastLine(n.log(s)))
		}
	}
}

// lastLine returns the last line of a file that is not blank, at most maxLast octets of it.
func lastLine(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	b := make([]byte, 4096)
	if st, err := f.Stat(); err == nil {
		_, _ = f.Seek(max(0, st.Size()-int64(len(b))), io.SeekStart)
	}
	k, _ := io.ReadFull(f, b)
	lines := bytes.Split(bytes.TrimSpace(b[:k]), []byte("\n"))
	last := strings.TrimSpace(string(lines[len(lines)-1]))
	return strings.ToValidUTF8(last[:min(len(last), maxLast)], "?")
}

// table lists the result of every step, and reports whether all are well.
func (n *night) table() (text string, ok bool) {
	var b strings.Builder
	ok = true
	fmt.Fprintf(&b, "\n| step | outcome | time | last line |\n| --- | --- | --- | --- |\n")
	for _, s := range n.steps {
		r := n.done[s.name]
		outcome := "ok"
		if !r.OK {
			outcome, ok = "FAILED", false
		}
		took := time.Duration(r.Seconds * float64(time.Second)).Round(time.Second)
		fmt.Fprintf(&b, "| %s | %s | %v | %s |\n", s.name, outcome, took, strings.ReplaceAll(r.Last, "|", "\\|"))
	}
	fmt.Fprintf(&b, "\nlogs in %s\n", n.dir)
	return b.String(), ok
}
