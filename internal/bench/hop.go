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
		rows = append(rows, row{name: fmt.Sprintf("%s, %v", hopVariant, at), judged: ours, rounds: 2, measure: b.overHop,
			kind: meshKind{at: at, hosts: meshHosts, hop: hopMTU}})
	}
	return rows
}

// overHop measures one TCP stream to the peer.
func (b *bench) overHop(ctx context.Context, m *mesh) error {
	l, err := streams(ctx, m.hosts[meshSender], m.hosts[meshPeer], m.addrs[meshPeer], 1)
	if err != nil {
		return err
	}
	defer l.stop()
	time.Sleep(hopFound)
	mbps, _, err := l.during(func() error { time.Sleep(b.transferTime(0)); return nil })
	if err != nil {
		return err
	}
	b.r.add(m.at.key(testHop, hopVariant, m.contender), "Mb/s", mbps)
	return nil
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
