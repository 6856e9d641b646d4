package ipoib

import "testing"

// FuzzNames: a policy or a path of CM messages is read exactly if it prints so.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"rc", "uc", "auto", "ud", "gsi", "inband", "RC", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if m, err := ParseMode(s); err == nil && (m > ModeUD || m.String() != s) || err != nil && m != 0 {
			t.Errorf("mode %q is %v (%v)", s, m, err)
		}
		if p, err := ParseCMTransport(s); err == nil && (p > CMInband || p.String() != s) || err != nil && p != 0 {
			t.Errorf("CM transport %q is %v (%v)", s, p, err)
		}
	})
}
