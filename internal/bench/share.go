package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"ipoibcm/internal/lab"
)

const (
	testShare    = "share of several senders" // relative to an equal share
	testThree    = "goodput of three senders" // together, Mb/s
	sendersToOne = 3
	// sharesTake is how long shares are measured: within one second TCP does not share fairly.
	sharesTake = 4 * time.Second
)

// threeToOne measures the shares that three hosts get of a narrow way to the fourth.
func (b *bench) threeToOne(ctx context.Context, m *mesh) error {
	var loads backgrounds
	defer func() { loads.stop() }()
	for from, h := range m.hosts[:sendersToOne] {
		if _, err := h.Ping(lab.Ping{Dst: m.addrs[meshTarget], Timeout: time.Second}); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
		l, err := m.streams(ctx, from, meshTarget, 1)
		if err != nil {
			return err
		}
		loads = append(loads, l)
	}
	time.Sleep(2 * time.Second)
	before, d := loads.received(), b.transferTime(sharesTake)
	time.Sleep(d)
	least, most, sum := shares(before, loads.received())
	b.r.add(m.key(testShare, "least of three senders, "+midTCP.name), "of equal", least)
	b.r.add(m.key(testShare, "most of three senders, "+midTCP.name), "of equal", most)
	b.r.add(m.key(testThree, midTCP.name), "Mb/s", sum*8/1e6/d.Seconds())
	return nil
}

// shareTargets returns the targets of the shares that were measured.
func shareTargets(r *Report) (list []target) {
	for _, p := range r.places(testShare) {
		for _, v := range r.variants(testShare, p.mtu, p.family) {
			t := target{name: fmt.Sprintf("RC's share, %s, %v", v, p), num: p.key(testShare, v, oursRC), bound: 0.7}
			if strings.HasPrefix(v, "most") {
				t.atMost, t.bound = true, 1.3
			}
			list = append(list, t)
		}
	}
	return list
}
