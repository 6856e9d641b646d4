// Package expect compares what a test got with what it wants, one condition a line. If
// they differ it prints both.
//
// It is for tests.
package expect

import "fmt"

// Equal fails the test, which goes on, unless got equals want. what and args name the
// compared value, as a format and its arguments.
func Equal[T comparable](t interface {
	Helper()
	Errorf(format string, args ...any)
}, got, want T, what string, args ...any) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", fmt.Sprintf(what, args...), got, want)
	}
}

// MustEqual fails and ends the test unless got equals want.
func MustEqual[T comparable](t interface {
	Helper()
	Fatalf(format string, args ...any)
}, got, want T, what string, args ...any) {
	t.Helper()
	if got != want {
		t.Fatalf("%s is %v, want %v", fmt.Sprintf(what, args...), got, want)
	}
}
