package main

import (
	"strings"
	"testing"

	"ipoibcm/control"
)

// What another host's agent says does not reach the terminal as commands.
func TestPeerTextIsPlain(t *testing.T) {
	var b strings.Builder
	printPeerStatus(&b, &control.PeerStatus{
		Status: control.Status{Interface: control.Interface{Name: "ib0\x1b[2J\u009b2J\r"}, Warnings: []string{"w\a"}}}, false)
	if text := b.String(); strings.ContainsAny(text, "\x1b\u009b\r\a") || !strings.Contains(text, "ib0") ||
		strings.Count(text, "\n") < 3 {
		t.Errorf("%q", text)
	}
	if text := plain(eventLine(&control.Event{Kind: "cm", Text: "REQ\n\x1b]0;title"}), ""); strings.ContainsAny(text,
		"\n\x1b") || !strings.Contains(text, "REQ") {
		t.Errorf("%q", text)
	}
}
