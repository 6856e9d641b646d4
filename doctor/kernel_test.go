package doctor

import (
	"strings"
	"testing"

	"ipoibcm/control"
)

// An older kernel costs what newer ones brought, and nothing else.
func TestKernelCosts(t *testing.T) {
	for release, want := range map[string]struct {
		status string
		costs  int
	}{
		"6.18.0-firecracker": {control.CheckOK, 0},
		"5.10.0-35-amd64":    {control.CheckOK, 0},
		"5.9.16":             {control.CheckWarn, 0},
		"5.6.0-rc1":          {control.CheckWarn, 1},
		"4.20":               {control.CheckWarn, 2},
		"4.19.0-27-amd64":    {control.CheckWarn, 3},
		"4.9.337":            {control.CheckWarn, 4},
		"10.0":               {control.CheckOK, 0},
		"-5.10":              {control.CheckSkipped, 0},
		"five":               {control.CheckSkipped, 0},
	} {
		f := fine()
		f.Kernel = release
		for _, c := range Examine(f).Checks {
			if c.Name != Kernel {
				continue
			}
			if c.Status != want.status {
				t.Errorf("Linux %s: %s, want %s", release, c.Status, want.status)
			}
			costs := 0
			for _, k := range kernelCosts {
				if strings.Contains(c.Detail, k.cost) {
					costs++
				}
			}
			if costs != want.costs {
				t.Errorf("Linux %s: %d costs, want %d: %s", release, costs, want.costs, c.Detail)
			}
		}
	}
}

// What is read of a release is what it begins with.
func FuzzKernel(f *testing.F) {
	for _, s := range []string{"6.18.0-firecracker", "5.10.0-35-amd64", "4.20", "-5.10", "5.+1", "5", "5.", ".1",
		" 5.10", "99999.1", "05.010"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, release string) {
		v, ok := parseKernel(release)
		if !ok {
			return
		}
		if again, ok := parseKernel(v.String() + ".7-x"); !ok || again != v {
			t.Errorf("%q is read as %v, which is read as %v", release, v, again)
		}
		if c := release[0]; c < '0' || c > '9' {
			t.Errorf("%q is read as %v", release, v)
		}
	})
}
