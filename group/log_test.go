package group

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

// TestFailuresAreLogged: each failed join is in the log, with its group and reason.
// 4391-12-1
func TestFailuresAreLogged(t *testing.T) {
	var log bytes.Buffer
	m := New(Options{PKey: 0xffff, Log: slog.New(slog.NewTextHandler(&log, nil))})
	m.Step(nil, start, Up{GID: gid("fe80::aa")})
	broadcast, _ := MGID(addr("255.255.255.255"), 0xffff, DefaultScope)
	const text = "no such device"
	for range 2 {
		log.Reset()
		m.Step(nil, start, JoinFailed{MGID: broadcast, Err: errors.New(text)})
		for _, want := range []string{broadcast.String(), text} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("got log %q, want %q in it", &log, want)
			}
		}
		m.Step(nil, m.Deadline(), Wake{}) // tries again
	}
}
