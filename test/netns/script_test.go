package netns

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/testscript"

	"ipoibcm/internal/lab"
)

// updateScripts writes what the scripts compare anew: review the difference.
var updateScripts = os.Getenv("UPDATE_SCRIPTS") != ""

// widest is how long a line for people may be where there is no terminal, in characters.
const widest = 80

// varying are the parts of an output that differ between runs.
var varying = []struct {
	from *regexp.Regexp
	to   string
}{
	{regexp.MustCompile(`\b[0-9]+ \([0-9.]+ (?:[KMGT]i)?B\)`), "N (N)"},
	{regexp.MustCompile(`\b[0-9.]+ (?:[KMGT]i)?B\b`), "N"},
	{regexp.MustCompile(`0x[0-9a-f]{16}\b`), "0xSERVICE"},
	{regexp.MustCompile(`0x[0-9a-f]{6}\b`), "0xQPN"},
	{regexp.MustCompile(`\b(00|40|80|c0) [0-9a-f]{6} `), "$1 QPN "},
	{regexp.MustCompile(`\b[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?\b`), "TIME"},
	{regexp.MustCompile(`\b(?:[0-9]+h)?(?:[0-9]+m)?[0-9.]+ ?(?:ms|s|µs)\b`), "T"},
	{regexp.MustCompile(`\b[0-9.]+e[+-][0-9]+ %`), "N %"},
	{regexp.MustCompile(`\b[0-9.]+ %`), "N %"},
	{regexp.MustCompile(`ipnt[0-9-]+[a-z]?`), "TESTNAME"},
	{regexp.MustCompile(` \(probing\)`), ""},
	{regexp.MustCompile(`\b[0-9]+ of [0-9]+\b( \([0-9]+\))?`), "N of N"},
	{regexp.MustCompile(`ROLE (?:active|passive)`), "ROLE any"},
	{regexp.MustCompile(`opened by (?:us|the peer)`), "opened by one"},
	{regexp.MustCompile(`min [0-9.]+, median [0-9.]+, max`), "min T, median T, max"},
	{regexp.MustCompile(`build .*`), "build B"},
	{regexp.MustCompile(`  +([^ ])`), "  $1"},
	{regexp.MustCompile(`(?m)^  sandbox  .*\n`), ""}, // as the kernel has it
	// Where a line of keys breaks depends on how long the values are.
	{
		regexp.MustCompile(
			`\n  ((?:RX|RTT|IN FLIGHT|SENT AGAIN|ROLE|DIRECTION|SERVICE ID|QPN|REMOTE QPN) |CM (?:gsi|inband)\b)`), "  $1"},
	// Both may dial at once. Verdicts are the last column, and after the keys.
	{regexp.MustCompile(`\n?  CROSSING [^\n]*(?:\n  [^\n]*)*`), ""},
	{regexp.MustCompile(`\n  (?:crossing|- [^\n]*\bcross)[^\n]*(?:\n  [^-][^\n]*)*`), ""},
}

// fixed replaces what varies. Columns keep two blanks between them, lines their
// indentation of none or two.
func fixed(s string, dirs ...string) string {
	for _, dir := range dirs {
		s = strings.ReplaceAll(s, dir, "$DIR")
	}
	for _, v := range varying {
		s = v.from.ReplaceAllString(s, v.to)
	}
	return s
}

// TestScripts drives the built program through its commands as an operator would.
// The scripts in testdata/script say which command comes when, how it ends and what
// it prints, in lines of at most 80 characters.
func TestScripts(t *testing.T) {
	parallel(t)
	files, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d scripts, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			parallel(t)
			r := &scripted{newSegment(t, topology{})}
			for _, h := range r.hosts {
				r.must(h.AddAddr(underlay, gidOf(h)+"/64"))
			}
			testscript.Run(t, testscript.Params{
				Files: []string{file}, UpdateScripts: updateScripts, RequireUniqueNames: true,
				Cmds: map[string]func(*testscript.TestScript, bool, []string){
					"ipoibcmd": r.command, "agent": r.start, "end": r.end, "reach": r.meet, "ask": r.ask, "net": r.change,
					"follow": r.watch,
				},
			})
		})
	}
}

// gidOf is the GID of a host in a script.
func gidOf(h *host) string { return fmt.Sprintf("fe80::1234:5678:9abc:def%c", 'a'+rune(h.i)) }

// A scripted segment has two hosts, a and b, as scripts name them.
type scripted struct{ *segment }

// host returns the host that a script names, and the rest of its line.
func (r *scripted) host(ts *testscript.TestScript, args []string) (*host, []string) {
	switch {
	case len(args) == 0:
		ts.Fatalf("say on which host: args has no elements, want some")
	case len(args[0]) != 1:
		ts.Fatalf("say on which host: args[0] has %v elements, want 1", len(args[0]))
	case int(args[0][0]-'a') >= len(r.hosts):
		ts.Fatalf("say on which host: a or b")
	}
	return r.hosts[args[0][0]-'a'], args[1:]
}

// command runs ipoibcmd: HOST STATUS ARGUMENT…; what it prints on both streams is
// compared without what varies, and its lines must fit.
func (r *scripted) command(ts *testscript.TestScript, _ bool, args []string) {
	h, args := r.host(ts, args)
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	args = args[1:]
	dir := ts.Getenv("WORK")
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "@socket", h.path(".sock"))
	}
	c := exec.Command(program, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "COLUMNS="+ts.Getenv("COLUMNS"))
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	_, _ = h.Output(c)
	if got := c.ProcessState.ExitCode(); got != want {
		ts.Fatalf("exit status %d, want %d\n%s%s", got, want, &out, &errs)
	}
	if !slices.Contains(args, "--json") && args[0] != "completion" { // it is for people
		for line := range strings.SplitSeq(out.String(), "\n") {
			if n := utf8.RuneCountInString(line); n > widest && strings.Contains(line, "  ") {
				ts.Fatalf("a line of %d characters, want %d at most:\n%s", n, widest, line)
			}
		}
	}
	fmt.Fprint(ts.Stdout(), fixed(out.String(), dir, r.dir))
	fmt.Fprint(ts.Stderr(), fixed(errs.String(), dir, r.dir))
}

// start starts an agent: HOST ARGUMENT…. Files of the script are $WORK/FILE.
func (r *scripted) start(ts *testscript.TestScript, _ bool, args []string) {
	h, args := r.host(ts, args)
	ts.Check(h.tryRun(append([]string{"--gid", gidOf(h)}, args...)...))
}

func (r *scripted) end(ts *testscript.TestScript, _ bool, args []string) {
	h, _ := r.host(ts, args)
	h.stop()
}

// meet sends packets from one host to an address of the other until a connection of
// this mode is up on both, and then for a while, so that there is something to show.
func (r *scripted) meet(ts *testscript.TestScript, _ bool, args []string) {
	h, args := r.host(ts, args)
	other := r.hosts[1-h.i]
	h.connect(other, args[0])
	both(other, h.reach)
	time.Sleep(1100 * time.Millisecond) // every age is in seconds, and all traffic accounted
}

// ask sends packets to an address until the agent has something to say about it.
func (r *scripted) ask(ts *testscript.TestScript, _ bool, args []string) {
	h, args := r.host(ts, args)
	dst, err := netip.ParseAddr(args[0])
	ts.Check(err)
	for end := time.Now().Add(patience); len(h.status().Warnings) == 0; {
		_, _ = h.Ping(lab.Ping{Dst: dst, Timeout: 100 * time.Millisecond})
		if time.Now().After(end) {
			ts.Fatalf("no warning after %v", patience)
		}
	}
}

// change changes the network of a host: block, unblock, down DEVICE or up DEVICE.
func (r *scripted) change(ts *testscript.TestScript, _ bool, args []string) {
	h, args := r.host(ts, args)
	switch args[0] {
	case "block":
		ts.Check(h.Block(underlay))
	case "unblock":
		ts.Check(h.Unblock())
	case "down":
		ts.Check(h.Down(args[1]))
		if args[1] == ifName {
			h.waitState("down")
		}
	case "up":
		ts.Check(h.Up(args[1]))
	default:
		ts.Fatalf("%s: no change that is known", args[0])
	}
}

// watch runs a command that goes on until it has printed something: HOST TEXT
// ARGUMENT….
func (r *scripted) watch(ts *testscript.TestScript, _ bool, args []string) {
	h, args := r.host(ts, args)
	want := args[0]
	f := h.follow(append(args[1:], "--control", h.path(".sock"))...)
	for end := time.Now().Add(patience); !strings.Contains(strings.Join(f.output(), "\n"), want); time.Sleep(pollEvery) {
		if time.Now().After(end) {
			ts.Fatalf("no %q in\n%s", want, strings.Join(f.output(), "\n"))
		}
	}
	f.interrupt()
}
