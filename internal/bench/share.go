package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"ipoibcm/cmd/ipoibcmd/lab"
)

const (
	testShare    = "share of three senders"   // of what each would have if all had the same
	testThree    = "goodput of three senders" // together, Mb/s
	sendersToOne = 3
	// sharesTake is how long shares are measured: TCP does not share a second fairly.
	sharesTake = 4 * time.Second
)

// threeToOne measures what each of three hosts gets of a narrow way to the fourth.
func (b *bench) threeToOne(ctx context.Context, m *mesh) error {
	widen, err := m.narrowTo(meshTarget, midTCP)
	if err != nil {
		return err
	}
	defer widen()
	var loads []*background
	defer func() {
		for _, l := range loads {
			l.stop()
		}
	}()
	for _, h := range m.hosts[:sendersToOne] {
		if _, err := h.Ping(lab.Ping{Dst: m.addrs[meshTarget], Timeout: time.Second}); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
		l, err := streams(ctx, h, m.hosts[meshTarget], m.addrs[meshTarget], 1)
		if err != nil {
			return err
		}
		loads = append(loads, l)
	}
	time.Sleep(2 * time.Second)
	var got []float64
	for _, l := range loads {
		got = append(got, -float64(l.octets.Load()))
	}
	d := b.transferTime(sharesTake)
	time.Sleep(d)
	sum := 0.0
	for i, l := range loads {
		got[i] += float64(l.octets.Load())
		sum += got[i]
	}
	b.r.add(m.at.key(testShare, "least, "+midTCP.name, m.contender), "of equal", slices.Min(got)*sendersToOne/max(sum, 1))
	b.r.add(m.at.key(testShare, "most, "+midTCP.name, m.contender), "of equal", slices.Max(got)*sendersToOne/max(sum, 1))
	b.r.add(m.at.key(testThree, midTCP.name, m.contender), "Mb/s", sum*8/1e6/d.Seconds())
	return nil
}

// shareTargets are those of the row, if it was measured.
func shareTargets(r *Report) (list []target) {
	for _, p := range r.places(testShare) {
		of := func(which string, atMost bool, bound float64) target {
			return target{name: fmt.Sprintf("RC's %s share of three senders, %s, %v", which, midTCP.name, p),
				num: p.key(testShare, which+", "+midTCP.name, oursRC), atMost: atMost, bound: bound}
		}
		list = append(list, of("least", false, 0.7), of("most", true, 1.3))
	}
	return list
}
