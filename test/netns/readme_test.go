package netns

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// readmeCommands returns the lines of README's blocks of code that begin with ipoibcmd.
func readmeCommands(t *testing.T) (lines []string) {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for i, part := range strings.Split(string(text), "```") {
		for l := range strings.Lines(part) {
			if i%2 == 1 && strings.HasPrefix(l, "ipoibcmd ") {
				lines = append(lines, strings.TrimSpace(l))
			}
		}
	}
	return lines
}

// TestREADME runs the commands of README as they are written, on a host beside one that
// has the address which they name: run goes on, and every other must end with status 0.
func TestREADME(t *testing.T) {
	parallel(t)
	commands := readmeCommands(t)
	if len(commands) < 3 || !strings.HasPrefix(commands[0], "ipoibcmd run ") {
		t.Fatalf("README has %q, want run and what to look with", commands)
	}
	s, a, b := newPair(t)
	b.run()
	bin, err := filepath.Abs(program)
	s.must(err)
	s.must(os.Symlink(bin, filepath.Join(s.dir, "ipoibcmd")))
	// Whoever reads README sees run start, and has talked to the other host, before he looks at status.
	talked := filepath.Join(s.dir, "talked")
	script := "set -e\nmount -t tmpfs none /run\n" + commands[0] + " 2>" + a.path(".log") + " &\n" +
		"trap \"kill $!; wait\" EXIT\n" +
		"for i in $(seq 600); do [ -e " + talked + " ] && break; sleep 0.1; done\n"
	for _, c := range commands[1:] {
		script += "echo '$ " + c + "'\n" + c + "\n"
	}
	ctx, cancel := context.WithTimeout(s.ctx, 2*patience)
	defer cancel()
	var out bytes.Buffer
	c := exec.CommandContext(ctx, "sh", "-c", script)
	c.Env = append(os.Environ(), "PATH="+s.dir+":"+os.Getenv("PATH"))
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	c.Stdout, c.Stderr, c.WaitDelay = &out, &out, 5*time.Second
	s.must(a.Start(c))
	a.reach(b.v4)
	a.ping(b.v4, 60000, false)
	s.eventually(patience, "the agent to have started", func() error {
		log, err := os.ReadFile(a.path(".log"))
		return errors.Join(err, containsAll(string(log), `msg="interface up"`))
	})
	s.must(os.WriteFile(talked, nil, 0o600))
	_ = c.Wait()
	t.Logf("%s", &out)
	if c.ProcessState == nil || c.ProcessState.ExitCode() != 0 {
		t.Errorf("the commands of README: %v, want status 0", c.ProcessState)
	}
	if last := commands[len(commands)-1]; !strings.Contains(out.String(), "$ "+last) {
		t.Errorf("they came not as far as %q", last)
	}
}
