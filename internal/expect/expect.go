// Package expect compares what a test has got with what it wants, one condition a
// line, and says both where they differ.
//
// It is for tests.
package expect

import "fmt"

// Equal fails the test, which goes on, unless got is want. What is compared is said as
// fmt.Sprintf says it.
func Equal[T comparable](t interface {
	Helper()
	Errorf(format string, args ...any)
}, got, want T, what string, args ...any) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", fmt.Sprintf(what, args...), got, want)
	}
}

// MustEqual ends the test unless got is want.
func MustEqual[T comparable](t interface {
	Helper()
	Fatalf(format string, args ...any)
}, got, want T, what string, args ...any) {
	t.Helper()
	if got != want {
		t.Fatalf("%s is %v, want %v", fmt.Sprintf(what, args...), got, want)
	}
}
