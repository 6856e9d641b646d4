package rpcrdma

import (
	"os"
	"strings"
	"testing"
)

// TestReasonsAreDocumented: docs/rpcrdma.md says of each reason what becomes of it.
func TestReasonsAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/rpcrdma.md")
	if err != nil {
		t.Fatal(err)
	}
	new(Counters).Each(func(name string, _ uint64) {
		if strings.HasPrefix(name, "reason ") {
			t.Errorf("%s has no name", name)
		}
		if !strings.Contains(string(b), "`"+name+"`") {
			t.Errorf("%s is not in docs/rpcrdma.md", name)
		}
	})
}
