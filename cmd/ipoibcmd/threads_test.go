package main

import (
	"runtime"
	"testing"
)

// How many data threads a setting means.
func TestThreadCount(t *testing.T) {
	processors := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(processors)
	for _, tt := range []struct {
		name, value, provider string
		processors, want      int
	}{
		{"auto on one processor", "auto", softRoCE, 1, 1},
		{"auto on two", "auto", softRoCE, 2, 1},
		{"auto on three", "auto", softRoCE, 3, 3},
		{"auto on many", "auto", softRoCE, 16, 4},
		{"a number, whatever there is", "7", softRoCE, 2, 7},
		{"auto of a provider with one", "auto", ibVerbs, 16, 1},
	} {
		runtime.GOMAXPROCS(tt.processors)
		c := Config{Provider: tt.provider}
		if err := c.Threads.Set(tt.value); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if got := c.threads(); got != tt.want {
			t.Errorf("%s: %d threads, want %d", tt.name, got, tt.want)
		}
		if got := c.Threads.String(); got != tt.value {
			t.Errorf("%s: printed as %q, want %q", tt.name, got, tt.value)
		}
	}
	var n threadCount
	for _, s := range []string{"", "0", "two", "1.5"} {
		if err := n.Set(s); err == nil {
			t.Errorf("%q is taken as %v", s, n)
		}
	}
}
