package main

import "testing"

func TestTrafficClassSetting(t *testing.T) {
	for _, tt := range []struct {
		in       string
		inherits bool
		fixed    int
	}{{"0", false, 0}, {"104", false, 104}, {"inherit", true, 0}, {"inherit/104", true, 104}} {
		var c trafficClass
		if err := c.Set(tt.in); err != nil {
			t.Errorf("%s: %v", tt.in, err)
			continue
		}
		if got := c.inherits(); got != tt.inherits {
			t.Errorf("%s inherits: %v, want %v", tt.in, got, tt.inherits)
		}
		if got := c.fixed(); got != tt.fixed {
			t.Errorf("%s has the class %d, want %d", tt.in, got, tt.fixed)
		}
		if got := c.String(); got != tt.in {
			t.Errorf("%s is printed as %s", tt.in, got)
		}
	}
	for _, in := range []string{"", "inherit/", "inherit104", "/104", "inherit/65536", "-4", "inherit/-4", "af31"} {
		var c trafficClass
		if err := c.Set(in); err == nil {
			t.Errorf("%q was taken as %v", in, c)
		}
	}
}
