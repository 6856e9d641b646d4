package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// shell is a step that notes in file that it ran, and then does more.
func shell(name, file, more string) step {
	return step{name, "for a test", []string{"sh", "-c", "echo " + name + " >> " + file + "; " + more}}
}

func newNight(dir string, out *bytes.Buffer, steps ...step) *night {
	return &night{steps: steps, dir: dir, out: out, every: time.Hour, stop: make(chan os.Signal, 1)}
}

func ran(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(b)), " ")
}

// A night that is stopped goes on where it was: what is done is not done again, unless
// it is another command.
func TestGoesOn(t *testing.T) {
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "ran")
	var out bytes.Buffer
	n := newNight(dir, &out, shell("a", file, "echo well"), shell("b", file, "touch "+file+".b; sleep 60"),
		shell("c", file, "echo so | tr s z"))
	go func() {
		for range 60_000 {
			if _, err := os.Stat(file + ".b"); err == nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		n.stop <- syscall.SIGTERM
	}()
	if ok, err := n.run(); ok || !errors.Is(err, errStopped) {
		t.Fatalf("stopped: %v, %v", ok, err)
	}
	if got := ran(t, file); got != "a b" {
		t.Errorf("ran %q, want a b", got)
	}
	n = newNight(dir, &out, n.steps[0], shell("b", file, "true"), n.steps[2])
	if ok, err := n.run(); !ok || err != nil {
		t.Fatalf("the second time: %v, %v", ok, err)
	}
	if got := ran(t, file); got != "a b b c" {
		t.Errorf("ran %q, want a b b c", got)
	}
	for _, want := range []string{"1 of 3  a          done before", "| a | ok | 0s | well |", "| c | ok | 0s | zo |"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	n = newNight(dir, &out, shell("a", file, "echo longer"))
	if _, err := n.run(); err != nil || ran(t, file) != "a b b c a" {
		t.Errorf("another command: %v, ran %q", err, ran(t, file))
	}
	n.again = true
	if _, err := n.run(); err != nil || ran(t, file) != "a b b c a a" {
		t.Errorf("again: %v, ran %q", err, ran(t, file))
	}
}

// A step that fails is in the table, and the others run.
func TestFailure(t *testing.T) {
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "ran")
	var out bytes.Buffer
	n := newNight(dir, &out, shell("a", file, "echo 'a | b'; exit 1"), shell("b", file, "sleep 0.2"))
	n.every = 10 * time.Millisecond
	if ok, err := n.run(); ok || err != nil {
		t.Errorf("with a failure: %v, %v", ok, err)
	}
	if got := ran(t, file); got != "a b" {
		t.Errorf("ran %q, want a b", got)
	}
	for _, want := range []string{`| a | FAILED | 0s | a \| b |`, "| b | ok |",
		"2 of 2  b          0s so far, 0 to come; "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	table, err := os.ReadFile(filepath.Join(dir, "table.md"))
	if err != nil || !strings.HasSuffix(out.String(), string(table)) {
		t.Errorf("%v, the file has\n%s", err, table)
	}
}

func TestChoose(t *testing.T) {
	all := steps(time.Minute)
	got, err := choose(all, "soak,sim")
	if err != nil {
		t.Errorf("err is %v, want nil", err)
	}
	expect.MustEqual(t, len(got), 2, "length of got")
	expect.Equal(t, got[0].name, "soak", "name")
	expect.Equal(t, got[1].name, "sim", "name")
	if cmd := strings.Join(got[0].command, " "); cmd != "make --no-print-directory soak D=1m0s" {
		t.Errorf("soak is %q", cmd)
	}
	if _, err := choose(all, "soak,none"); err == nil {
		t.Error("a step that there is not was taken")
	}
	// Every command is a target of the Makefile, except those that are to come.
	makefile, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.name != "mutants" && !strings.Contains(string(makefile), "\n"+s.command[2]+":") {
			t.Errorf("%s: the Makefile has no target %s", s.name, s.command[2])
		}
	}
}

// A line is cut to its octets, and not inside a character.
func TestLastLine(t *testing.T) {
	for _, tt := range []struct{ log, want string }{
		{"one\n\ntwo\n\n", "two"},
		{strings.Repeat("a", maxLast-1) + "é\n", strings.Repeat("a", maxLast-1) + "?"},
		{"\xffx\n", "?x"},
		{"", ""},
	} {
		file := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(file, []byte(tt.log), 0o600); err != nil {
			t.Fatal(err)
		}
		expect.Equal(t, lastLine(file), tt.want, "last line of %q", tt.log)
	}
}
