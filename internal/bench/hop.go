package main

import (
	"context"
	"fmt"
	"time"
)

const (
	testHop = "goodput over a hop" // Mb/s of one TCP stream, 2 s after it began
	hopMTU  = 1500
	// hopFound is how long an agent has to find the hop's MTU before goodput is measured.
	hopFound = 2 * time.Second
)

// hopVariant names the row.
var hopVariant = fmt.Sprintf("hop of %d", hopMTU)

// hopRows returns the row of hosts with jumbo frames and a smaller hop between them, and the row of hosts
// whose own MTU is that of the hop.
func (b *bench) hopRows() (rows []row) {
	for _, mtu := range []int{9000, hopMTU} {
		at := place{mtu, family6}
		rows = append(rows, row{name: fmt.Sprintf("%s, %v", hopVariant, at), judged: ours, rounds: 2,
			kind: meshKind{at: at, size: meshHosts, hop: hopMTU},
			measure: func(ctx context.Context, m *mesh) error {
				return b.lateGoodput(ctx, m, testHop, hopVariant, hopFound)
			}})
	}
	return rows
}

// hopTargets returns the targets of the row over the hop, if it was measured.
func hopTargets(r *Report) (list []target) {
	near := place{hopMTU, family6}
	for _, p := range r.places(testHop) {
		if p == near {
			continue
		}
		for _, who := range []string{oursRC, oursUC, oursUD} {
			list = append(list, target{name: fmt.Sprintf("%s's goodput over a %s, of that between hosts at %d, %v", who,
				hopVariant, hopMTU, p),
				num: p.key(testHop, hopVariant, who), den: near.key(testHop, hopVariant, who), bound: 0.9})
		}
	}
	return list
}
