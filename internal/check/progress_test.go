package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
)

// A progressAt is one whose clock stands.
func progressAt(out *bytes.Buffer, clock *time.Time) *progress {
	p := &progress{w: out, now: func() time.Time { return *clock }}
	p.begin()
	return p
}

// In a log there is a line after a silence, and none while there is something to see.
func TestProgressInALog(t *testing.T) {
	var out bytes.Buffer
	clock := time.Unix(1000, 0)
	p := progressAt(&out, &clock)
	p.steps, p.endsBefore = 3, map[string]float64{"vet": 10, "tests": 70, "netns": 100}
	end := p.step("vet")
	clock = clock.Add(10 * time.Second)
	end()
	p.step("tests")
	p.about(func() string { return "7 of 9 packages left" })
	clock = clock.Add(silence - 1)
	p.draw()
	fmt.Fprintln(p, "ok cm")
	clock = clock.Add(silence - 1)
	p.draw()
	if strings.Contains(out.String(), "so far") {
		t.Errorf("a line though there was none missing:\n%s", &out)
	}
	clock = clock.Add(1)
	p.draw()
	p.draw()
	want := "==== 1 of 3: vet, about 1m40s left\n==== vet has ended after 10 s\n==== 2 of 3: tests, about 1m30s left\nok cm\n" +
		"     2 of 3, tests: 7 of 9 packages left; 50s so far, about 50s left\n"
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", &out, want)
	}
	clock = clock.Add(time.Hour) // longer than the last time
	if got := p.left(); got != ", about 30s left" {
		t.Errorf("%q left, want the step that remains", got)
	}
}

// On a terminal the line is drawn anew below what is written.
func TestProgressOnATerminal(t *testing.T) {
	var out bytes.Buffer
	clock := time.Unix(1000, 0)
	p := progressAt(&out, &clock)
	p.terminal, p.steps = true, 2
	p.step("tests")
	p.draw()
	p.draw() // nothing new
	fmt.Fprintln(p, "ok cm")
	clock = clock.Add(time.Second)
	p.draw()
	want := "==== 1 of 2: tests\n1 of 2, tests; 0s so far\r\x1b[Kok cm\n1 of 2, tests; 1s so far"
	if out.String() != want {
		t.Errorf("got\n%q\nwant\n%q", out.String(), want)
	}
	fmt.Fprint(p, "half a line") // must stay in one piece
	p.draw()
	if !strings.HasSuffix(out.String(), "\r\x1b[Khalf a line") {
		t.Errorf("%q", out.String())
	}
	first, second := p.about(func() string { return "3 left" }), p.about(func() string { return "8 left" })
	for _, want := range []string{": 3 left; 8 left; ", ": 8 left; "} {
		fmt.Fprintln(p)
		if p.draw(); !strings.Contains(p.line, want) {
			t.Errorf("the line is %q, want %q in it", p.line, want)
		}
		first()
	}
	second()
	if got := clip("äöüäöü", 4); got != "äöü…" {
		t.Errorf("clipped to %q", got)
	}
}
