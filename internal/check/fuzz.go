package main

import (
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// fuzz runs every fuzz target of the tree, one after the other, for d each.
func (r *run) fuzz(d time.Duration) {
	packages, err := packages()
	if err != nil {
		r.note("go list", failed, err.Error())
		return
	}
	for _, p := range packages {
		targets, err := fuzzTargets(p)
		if err != nil {
			r.note(p, failed, err.Error())
			continue
		}
		for _, t := range targets {
			r.step(p+"."+t, func() error {
				return r.stream("go", "test", "-run=^$", "-fuzz=^"+t+"$", "-fuzztime="+d.String(), p)
			})
		}
	}
}

func fuzzTargets(pkg string) (targets []string, err error) {
	out, err := exec.Command("go", "test", "-list=^Fuzz", pkg).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("list fuzz targets: %s", lastLine(string(out)))
	}
	for _, l := range strings.Fields(string(out)) {
		if strings.HasPrefix(l, "Fuzz") {
			targets = append(targets, l)
		}
	}
	return targets, nil
}
