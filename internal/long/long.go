// Package long says in which of two forms the tests run. go test ./... and make test
// run the short form. make test-long runs the long form, which has more seeds, larger
// bounds and longer traffic, and all that the short form leaves out.
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

// Of returns short in the short form and long in the long form.
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

// OneGoroutine is for a test that takes long and runs on one goroutine only. There the race detector has
// nothing to find, and makes the test ten times as slow. So under the race detector the test is skipped; each
// form runs it without as well.
func OneGoroutine(tb testing.TB) {
	tb.Helper()
	if Race {
		tb.Skip("is on one goroutine, and runs without the race detector too")
	}
}
