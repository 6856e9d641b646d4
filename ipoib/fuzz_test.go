package ipoib

import (
	"fmt"
	"testing"
)

// FuzzNames: a policy or a path of CM messages is read exactly if it prints so.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"rc", "uc", "auto", "ud", "gsi", "inband", "RC", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		m, err := ParseMode(s)
		checkName(t, "mode", s, m, ModeUD, err)
		p, err := ParseCMTransport(s)
		checkName(t, "CM transport", s, p, CMInband, err)
	})
}

// checkName checks that s was read as a value up to most which prints so, or that an error came with zero.
func checkName[T interface {
	~uint8
	fmt.Stringer
}](t *testing.T, what, s string, v, most T, err error) {
	if err != nil {
		if v != 0 {
			t.Errorf("%s %q is %d beside the error %v, want 0", what, s, uint8(v), err)
		}
		return
	}
	if v > most {
		t.Errorf("%s %q is %d, want at most %d", what, s, uint8(v), uint8(most))
		return
	}
	if v.String() != s {
		t.Errorf("%s %q prints %q, want what was read", what, s, v)
	}
}
