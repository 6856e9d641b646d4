package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// earlier ends the name of a contender that runs the older program.
const earlier = ", before"

func before(contender string) string { return contender + earlier }

// modeOf returns the mode of a contender of ours, whichever program it runs.
func modeOf(contender string) string { return strings.TrimSuffix(contender, earlier) }

// programOf returns the program that a contender of ours runs.
func (b *bench) programOf(contender string) string {
	if strings.HasSuffix(contender, earlier) {
		return b.against
	}
	return b.program
}

// measured returns the contenders whose throughput and latency are measured, in the order of every other round.
func (b *bench) measured() []string {
	if b.against == "" {
		return contenders
	}
	if b.contender != "" {
		return []string{raw, b.contender, before(b.contender)}
	}
	return []string{raw, oursRC, before(oursRC), oursUC, before(oursUC), oursUD, before(oursUD)}
}

// printAgainst writes, for each number, the medians of both programs, and the ratios of this
// program to the older one within rounds: their median, which is what counts, and their spread.
func (r *Report) printAgainst(w io.Writer) {
	fmt.Fprint(w, "\n## Of the older program\n\n")
	t := table{head: []string{"what", "now", "before", "ratio", "lowest–highest"}}
	for _, s := range r.Series {
		old := s.Key
		old.Contender = before(s.Contender)
		of := ratios(s.Values, r.values(old))
		if len(of) == 0 {
			continue
		}
		at := place{s.MTU, s.Family}
		t.row(fmt.Sprintf("%s: %s, %s, %v", s.Test, s.Variant, s.Contender, at), number(s.Median)+" "+s.Unit,
			number(r.index[old].Median), number(median(of)), number(slices.Min(of))+"–"+number(slices.Max(of)))
	}
	t.print(w)
}
