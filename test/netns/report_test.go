package netns

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
)

// At the default level the log has what an operator looks for, as JSON if asked, and
// no word of what only a developer does.
func TestLogForOperators(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.run("--log-level", "info", "--log-format", "json")
	b.run()
	a.connect(b, "RC")
	b.stop()
	logged := func() map[string]map[string]any {
		text, err := os.ReadFile(a.path(".log"))
		s.must(err)
		found := map[string]map[string]any{}
		for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
			var e map[string]any
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			if e["level"] == "DEBUG" {
				t.Errorf("at level info: %s", line)
			}
			found[fmt.Sprint(e["msg"])] = e
		}
		return found
	}
	s.eventually(patience, "the log says that the connection came and went", func() error {
		found := logged()
		for _, want := range []string{"interface carries packets", "connection up", "connection lost"} {
			if found[want] == nil {
				return fmt.Errorf("no line says %q", want)
			}
		}
		return nil
	})
	up := logged()["connection up"]
	if peer, _ := up["peer"].(string); !strings.Contains(peer, "fe80::") {
		t.Errorf("connection up has peer %q", up["peer"])
	}
	if detail, _ := up["detail"].(string); !strings.Contains(detail, "MTU 65520") {
		t.Errorf("connection up has detail %q", up["detail"])
	}
}

// At level debug the log has each event once.
func TestDebugSaysEachEventOnce(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.run("--log-level", "debug", "--log-format", "json")
	b.run()
	a.connect(b, "RC")
	for _, h := range s.hosts {
		h.stop()
	}
	text, err := os.ReadFile(a.path(".log"))
	s.must(err)
	times := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var e struct{ Msg, Kind, Detail string }
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		for _, what := range []string{"RC connection up", "sent REQ", "received REP", "sent RTU", "sent REP",
			"received RTU", "interface up", "address 10.0.0.1/24 added"} {
			if strings.HasPrefix(e.Detail, what) {
				times[e.Detail]++
			}
		}
		if e.Detail == "" && strings.Contains(line, "REQ") {
			t.Errorf("a second line for a message of the CM: %s", line)
		}
	}
	if len(times) < 4 {
		t.Errorf("only %d events in the log: %v", len(times), times)
	}
	for what, n := range times {
		if n != 1 {
			t.Errorf("%d lines say %q, want 1", n, what)
		}
	}
}
