package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

// fuzz runs every fuzz target of the tree, one after the other, for d each.
func (r *run) fuzz(d time.Duration) {
	targets, err := fuzzTargets()
	if err != nil {
		r.note("fuzz targets", failed, err.Error())
		return
	}
	for _, t := range targets {
		r.step(t.pkg+"."+t.name, func() error {
			return r.stream("go", "test", "-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+d.String(), t.pkg)
		})
	}
}

type fuzzTarget struct{ pkg, name string }

var fuzzFunc = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(\w+ \*testing\.F\)`)

// fuzzTargets finds them in the source: go test -list would build every test
// program and run its TestMain.
func fuzzTargets() (targets []fuzzTarget, err error) {
	const format = `{{$d := .Dir}}{{$p := .ImportPath}}{{range .TestGoFiles}}{{$p}}	{{$d}}/{{.}}
{{end}}{{range .XTestGoFiles}}{{$p}}	{{$d}}/{{.}}
{{end}}`
	out, err := exec.Command("go", "list", "-f", format, "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("list test files: %w", err)
	}
	for _, l := range strings.Split(string(out), "\n") {
		pkg, file, ok := strings.Cut(l, "\t")
		if !ok {
			continue
		}
		src, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, m := range fuzzFunc.FindAllSubmatch(src, -1) {
			targets = append(targets, fuzzTarget{pkg, string(m[1])})
		}
	}
	return targets, nil
}
