package expect

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A report keeps what a test would have said.
type report []string

func (r *report) Helper()                           {}
func (r *report) Errorf(format string, args ...any) { *r = append(*r, fmt.Sprintf(format, args...)) }
func (r *report) Fatalf(format string, args ...any) { r.Errorf("fatal: "+format, args...) }

// What differs is said, with both values; what does not is not.
func TestDifferences(t *testing.T) {
	var r report
	Equal(&r, 1, 1, "one")
	MustEqual(&r, "a", "a", "a")
	Equal(&r, 1, 2, "%s: number", "REQ")
	MustEqual(&r, true, false, "up")
	if want := []string{"REQ: number is 1, want 2", "fatal: up is true, want false"}; !slices.Equal(r, want) {
		t.Errorf("said %q, want %q", r, want)
	}
}

// What comes late is waited for; what does not come within a minute is said.
func TestEventually(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var r report
		Eventually(&r, "the end", func() bool { return time.Since(began) >= 59*time.Second })
		if r != nil {
			t.Errorf("said %q of what came after 59 seconds, want nothing", r)
		}
		defer func() {
			recover()
			want := report{"fatal: the end: has not happened after 1m0s"}
			if !slices.Equal(r, want) {
				t.Errorf("said %q, want %q", r, want)
			}
		}()
		Eventually(fatal{&r}, "the end", func() bool { return false })
	})
}

// A fatal is a report whose Fatalf does not return.
type fatal struct{ *report }

func (f fatal) Fatalf(format string, args ...any) {
	f.report.Fatalf(format, args...)
	panic("fatal")
}
