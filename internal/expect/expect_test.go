package expect

import (
	"fmt"
	"slices"
	"testing"
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
