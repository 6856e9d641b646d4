// Package long says in which of two forms the tests run. The short form is what
// go test ./... and make test run; make test-long runs the long form, which takes
// more seeds, larger bounds and longer traffic. What the short form leaves out the
// long form contains.
//
// It is for tests.
package long

import (
	"os"
	"testing"
)

// Variable is the environment variable that asks for the long form: 1, or empty
// for the short form.
const Variable = "IPOIBCM_LONG"

// Reason is why [Only] skips.
const Reason = "is part of make test-long"

// Form reports whether the long form is asked for.
func Form() bool { return os.Getenv(Variable) == "1" }

// Of returns what the form that runs takes.
func Of[T any](short, long T) T {
	if Form() {
		return long
	}
	return short
}

// Only skips a test that has no short form.
func Only(tb testing.TB) {
	tb.Helper()
	if !Form() {
		tb.Skip(Reason)
	}
}

// OneGoroutine is for a test of which all happens on one goroutine, and that takes long: the race
// detector has nothing to see there and makes it ten times as slow. The short form skips it under the
// race detector; it runs without in the same make test, and in make test-long with it.
func OneGoroutine(tb testing.TB) {
	tb.Helper()
	if Race && !Form() {
		tb.Skip("is on one goroutine, and runs without the race detector too")
	}
}
