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
	s := newSegment(t, topology{})
	a, b := s.hosts[0], s.hosts[1]
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
