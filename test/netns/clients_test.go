package netns

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
)

// runLimited starts the host's agent from a shell that has run the commands before.
func (h *host) runLimited(before string, args ...string) {
	h.seg.Helper()
	script := h.path(".sh")
	h.seg.must(os.WriteFile(script, []byte("#!/bin/sh\n"+before+"\nexec "+program+" \"$@\"\n"), 0o700))
	a, err := lab.StartAgent(h.seg.ctx, h.Host, lab.AgentConfig{Program: script, Control: h.path(".sock"),
		Log: h.path(".log"), Args: h.args(args...)})
	h.seg.must(err)
	h.agent = a
}

// With few descriptors, and more who want to follow events than there are, requests
// are answered, traffic goes on, and what is refused is refused in words.
func TestManyMonitorsFewDescriptors(t *testing.T) {
	parallel(t)
	const limit, monitors = 110, 110 // and an agent has some of its own
	s, a, b := newPair(t)
	a.run()
	b.runLimited(fmt.Sprintf("ulimit -n %d", limit))
	a.connect(b, "RC")
	following, refused := 0, 0
	for range monitors {
		ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
		defer cancel()
		body, err := b.agent.Stream(ctx, control.PathEvents)
		switch {
		case err == nil:
			following++
			defer body.Close()
			go io.Copy(io.Discard, body)
		case strings.Contains(err.Error(), "descriptors left"):
			refused++
		default:
			t.Errorf("a monitor: %v, want events or a word about descriptors", err)
		}
	}
	if following == 0 || refused == 0 {
		t.Errorf("%d follow and %d were refused, of %d", following, refused, monitors)
	}
	for range 5 {
		ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
		_, err := b.agent.Status(ctx)
		cancel()
		if err != nil {
			t.Errorf("status beside %d monitors: %v", following, err)
		}
	}
	a.ping(b.v4, maxMTU, true)
	t.Logf("%d follow, %d were refused", following, refused)
}

// A command whose output cannot be written says so, and fails.
func TestOutputThatCannotBeWritten(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	a := s.hosts[0]
	a.run()
	for _, command := range []string{"status", "status --json", "show stats", "devices", "init", "explain 10.0.0.2",
		"--help", "--version"} {
		args := strings.Fields(command)
		if command != "devices" && command != "init" && args[0][0] != '-' {
			args = append(args, "--control", a.path(".sock"))
		}
		out, code := a.commandInto("/dev/full", args...)
		if code != 1 {
			t.Errorf("%s: exit status %d, want 1", command, code)
		}
		if err := containsAll(out, "no space left on device"); err != nil {
			t.Errorf("%s: %v", command, err)
		}
	}
}
