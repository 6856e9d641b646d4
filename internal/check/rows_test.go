package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestRowsAreNotSkipped: a test that shows a requirement and is skipped, in
// whole or in part, or does not run, is a failure; of packages that were not
// run nothing is asked.
func TestRowsAreNotSkipped(t *testing.T) {
	for _, tt := range []struct {
		name   string
		events []string
		want   string // "" for no complaint
	}{
		{"passed", []string{`{"Action":"pass","Package":"m/p","Test":"TestA"}`}, ""},
		{"skipped", []string{
			`{"Action":"output","Package":"m/p","Test":"TestA","Output":"    a_test.go:9: no nft\n"}`,
			`{"Action":"skip","Package":"m/p","Test":"TestA"}`}, "shows rows of docs/specs.md and was skipped: no nft"},
		{"skipped in part", []string{
			`{"Action":"skip","Package":"m/p","Test":"TestA/uc/deep"}`,
			`{"Action":"pass","Package":"m/p","Test":"TestA"}`}, "shows rows of docs/specs.md and was skipped: no reason"},
		{"left to the long form", []string{
			`{"Action":"output","Package":"m/p","Test":"TestA","Output":"    a_test.go:9: is part of make test-long\n"}`,
			`{"Action":"skip","Package":"m/p","Test":"TestA"}`}, ""},
		{"skipped once and passed once", []string{
			`{"Action":"skip","Package":"m/p","Test":"TestA"}`,
			`{"Action":"pass","Package":"m/p","Test":"TestA"}`}, ""},
		{"another was skipped", []string{
			`{"Action":"skip","Package":"m/p","Test":"TestAB"}`,
			`{"Action":"pass","Package":"m/p","Test":"TestA"}`}, ""},
		{"did not run", []string{`{"Action":"pass","Package":"m/p","Test":"TestB"}`},
			"shows rows of docs/specs.md and did not run"},
		{"package did not run", []string{`{"Action":"pass","Package":"m/q","Test":"TestB"}`}, ""},
	} {
		r := newRun(new(bytes.Buffer))
		read(t, r, append(tt.events, `{"Action":"pass","Package":"m/p"}`, `{"Action":"pass","Package":"m/q"}`)...)
		r.mustPass([]string{"m/p.TestA"})
		var sum bytes.Buffer
		good := r.summary(&sum)
		if good != (tt.want == "") {
			t.Errorf("%s: good is %v, want %v", tt.name, good, tt.want == "")
		}
		if !strings.Contains(sum.String(), tt.want) {
			t.Errorf("%s: the summary lacks %q:\n%s", tt.name, tt.want, &sum)
		}
	}
	r := newRun(new(bytes.Buffer))
	r.long = true
	read(t, r,
		`{"Action":"output","Package":"m/p","Test":"TestA","Output":"    a_test.go:9: is part of make test-long\n"}`,
		`{"Action":"skip","Package":"m/p","Test":"TestA"}`, `{"Action":"pass","Package":"m/p"}`)
	if r.mustPass([]string{"m/p.TestA"}); r.summary(new(bytes.Buffer)) {
		t.Error("the long form left a test to the long form, and that is good")
	}
}
