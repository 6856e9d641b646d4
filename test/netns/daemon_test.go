package netns

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// A daemon is a program that a test runs inside a host until it ends.
type daemon struct {
	cmd  *exec.Cmd
	done chan struct{}
	dead bool
}

// daemon starts a program in the foreground. Its output is shown if the test fails.
func (h *host) daemon(name string, args ...string) *daemon {
	h.seg.Helper()
	path := filepath.Join(h.dir(), filepath.Base(name)+".log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	h.seg.must(err)
	d := &daemon{cmd: exec.Command(name, args...), done: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	h.seg.must(h.Start(d.cmd))
	h.seg.daemons = append(h.seg.daemons, d)
	go func() {
		defer close(d.done)
		defer log.Close()
		_ = d.cmd.Wait()
	}()
	h.seg.Cleanup(func() {
		d.kill()
		if b, err := os.ReadFile(path); err == nil && h.seg.Failed() {
			lines := strings.Split(strings.TrimSpace(string(b)), "\n")
			h.seg.Logf("%s on %s:\n%s", name, h.Name, strings.Join(lines[max(0, len(lines)-25):], "\n"))
		}
	})
	return d
}

// kill ends the program and its children with SIGKILL.
func (d *daemon) kill() {
	if !d.dead {
		d.dead = true
		_ = syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL)
		<-d.done
	}
}

// dir is a directory of the host's own, for what daemons write.
func (h *host) dir() string {
	h.seg.Helper()
	dir := filepath.Join(h.seg.dir, fmt.Sprintf("%c.d", 'a'+h.i))
	h.seg.must(os.MkdirAll(dir, 0o755))
	h.seg.must(os.Chmod(h.seg.dir, 0o755))
	return dir
}

// file writes a file into dir and returns its path.
func (h *host) file(name, text string) string {
	h.seg.Helper()
	path := filepath.Join(h.dir(), name)
	h.seg.must(os.WriteFile(path, []byte(text), 0o644))
	return path
}

// needProgram returns where a program is, or skips the test.
func needProgram(t *testing.T, pkg string, paths ...string) string {
	t.Helper()
	for _, p := range paths {
		if found, err := exec.LookPath(p); err == nil {
			return found
		}
	}
	t.Skipf("%s is not installed: it is not tried over the interface", pkg)
	return ""
}

// documented returns the example of that language in docs/routing.md.
func documented(t *testing.T, language string) string {
	t.Helper()
	b, err := os.ReadFile("../../docs/routing.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```" + language + "\n(.*?)```").FindSubmatch(b)
	if m == nil {
		t.Fatalf("docs/routing.md has no example for %s", language)
	}
	return string(m[1])
}
