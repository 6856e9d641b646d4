// Package script runs tests of state machines that read like a trace of the
// protocol. A script is a text file:
//
//	# A line that begins with # says what the next lines show.
//	connect 10.0.0.2
//		> REQ comm=01
//	+4.2s
//	< REP comm=a1 remote=01
//		> RTU comm=01 remote=a1
//
// A line without indentation is input; "+4.2s" lets that time pass. The indented lines
// below an input are all of its output; if there are none, there must be no output. With
// -update, Run writes the indented lines anew, for people to review the difference.
//
// It is for tests.
package script

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite the indented lines of testdata/*.txt")

// A Machine is what a script drives.
type Machine interface {
	// Do carries out one line of input and returns the output, one line for each
	// action. An error means that the line is wrong.
	Do(line string) (out []string, err error)
	// Pass lets time pass, and returns the output.
	Pass(d time.Duration) (out []string)
}

// Run runs every script that pattern matches, each with a machine of its own.
func Run(t *testing.T, pattern string, machine func(t *testing.T) Machine) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no script matches %s (%v)", pattern, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), filepath.Ext(file)), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := Play(string(text), machine(t))
			if err != nil {
				t.Fatalf("%s:%v", file, err)
			}
			if got == string(text) {
				return
			}
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			t.Errorf("%s: %s\n(-update writes what comes out, to be reviewed)", file, difference(string(text), got))
		})
	}
}

// Play runs one script, and returns its text with the output of m as the indented lines.
func Play(text string, m Machine) (string, error) {
	var b bytes.Buffer
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		if strings.HasPrefix(line, "\t") {
			continue
		}
		fmt.Fprintln(&b, line)
		var out []string
		var err error
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "+"):
			var d time.Duration
			if d, err = time.ParseDuration(line[1:]); err == nil {
				out = m.Pass(d)
			}
		default:
			out, err = m.Do(line)
		}
		if err != nil {
			return "", fmt.Errorf("%d: %q: %w", i+1, line, err)
		}
		for _, o := range out {
			fmt.Fprintf(&b, "\t%s\n", o)
		}
	}
	return b.String(), nil
}

// difference describes the first line in which two texts differ.
func difference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		if a, b := at(w, i), at(g, i); a != b {
			return fmt.Sprintf("line %d after %q:\n got %q\nwant %q", i+1, input(g, i), b, a)
		}
	}
	return "no difference"
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(the end)"
}

// input returns the last line of input before line i.
func input(lines []string, i int) string {
	for i = min(i, len(lines)-1); i > 0; i-- {
		if l := lines[i]; l != "" && !strings.HasPrefix(l, "\t") {
			return l
		}
	}
	return lines[0]
}

// Args returns the words of a line as arguments, by name. "size=100" has the name "size" and the
// value "100", "silent" an empty value.
func Args(words []string) map[string]string {
	args := map[string]string{}
	for _, w := range words {
		name, value, _ := strings.Cut(w, "=")
		args[name] = value
	}
	return args
}

// Text returns the value of the argument key, or def if there is no such argument.
func Text(args map[string]string, key, def string) string {
	if v, ok := args[key]; ok {
		return v
	}
	return def
}

// Duration returns the value of the argument key as a duration, or zero if there is no such
// argument. It panics if the value is no duration.
func Duration(args map[string]string, key string) time.Duration {
	d, err := time.ParseDuration(Text(args, key, "0s"))
	if err != nil {
		panic(err)
	}
	return d
}

// Hex returns the value of the argument key as a hexadecimal number, or def if there is no
// such argument. It panics if the value is no such number.
func Hex(args map[string]string, key string, def uint64) uint64 {
	return number(args, key, def, 16)
}

// Decimal is Hex for decimal numbers.
func Decimal(args map[string]string, key string, def int) int {
	return int(number(args, key, uint64(def), 10))
}

func number(args map[string]string, key string, def uint64, base int) uint64 {
	v, ok := args[key]
	if !ok {
		return def
	}
	n, err := strconv.ParseUint(v, base, 64)
	if err != nil {
		panic(err)
	}
	return n
}
