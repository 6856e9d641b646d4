// Package expect compares what a test got with what it wants, one condition a line. If
// they differ it prints both. It also waits for what a test wants.
//
// It is for tests.
package expect

import (
	"fmt"
	"time"
)

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

// patience bounds waits for what takes milliseconds on an idle machine.
const patience = time.Minute

// Eventually waits until ok, which the kernel, another process or another goroutine brings about. It fails
// and ends the test if that takes longer than a minute. A test whose goroutines wait for nothing but each
// other has no need of it: [testing/synctest] is for such.
func Eventually(t interface {
	Helper()
	Fatalf(format string, args ...any)
}, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: has not happened after %v", what, patience)
		}
	}
}
