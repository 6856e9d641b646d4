package main

import (
	"bytes"
	"fmt"
	"io"
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
			var out bytes.Buffer
			c := exec.Command("go", "test", "-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+d.String(), t.pkg)
			c.Stdout, c.Stderr = io.MultiWriter(r.out, &out), r.out
			if err := c.Run(); err != nil && !ranOutOfTime(out.String()) {
				return err
			}
			return nil
		})
	}
}

// ranOutOfTime reports whether go test failed only because its time ended while
// it waited for a worker, which it takes for a failure. What it finds has an
// input, and text of its own.
func ranOutOfTime(out string) bool {
	return onlyDeadline.MatchString(out) && !strings.Contains(out, "Failing input")
}

var onlyDeadline = regexp.MustCompile(`(?m)^--- FAIL: Fuzz\w+ \(.*\)\n\s+context deadline exceeded\n(exit status 1\n)?FAIL`)

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
