package main

import (
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/doctor"
)

// What another host's agent says does not reach the terminal as commands.
func TestPeerTextIsPlain(t *testing.T) {
	var b strings.Builder
	printPeerStatus(&b, &control.PeerStatus{
		Status: control.Status{Interface: control.Interface{Name: "ib0\x1b[2J\u009b2J\r"}, Warnings: []string{"w\a"}}}, false)
	status := b.String()
	isPlain(t, status, "\x1b\u009b\r\a", "ib0")
	if n := strings.Count(status, "\n"); n < 3 {
		t.Errorf("%q has %d lines, want 3 at least", status, n)
	}
	isPlain(t, plain(eventLine(&control.Event{Kind: "cm", Text: "REQ\n\x1b]0;title"}), ""), "\n\x1b", "REQ")

	var d strings.Builder
	theirs := control.Status{Interface: control.Interface{State: "gone\x1b[2J\u009b2J\r"}}
	exam := examinePeer(&doctor.PeerFacts{IP: "10.0.0.2", Theirs: theirs})
	printDoctor(&d, &exam, "bad")
	isPlain(t, d.String(), "\x1b\u009b\r", "its interface is gone")
}

// isPlain checks that text has none of the characters in commands, but has word.
func isPlain(t *testing.T, text, commands, word string) {
	t.Helper()
	if strings.ContainsAny(text, commands) {
		t.Errorf("%q has one of %q, want none", text, commands)
	}
	if !strings.Contains(text, word) {
		t.Errorf("%q does not have %q", text, word)
	}
}
