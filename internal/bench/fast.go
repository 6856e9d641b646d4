package main

import (
	"context"
	"fmt"
	"time"
)

const (
	testFast     = "goodput of a fast stream" // Mb/s
	testFastPing = "ping to a fast host"      // ms, beside that stream
	aloneStream  = "alone"
	slowStreams  = 48
)

// besideSlow is the name of the row and of its second variant.
var besideSlow = fmt.Sprintf("beside %d streams, %s", slowStreams, slowTCP.name)

// take is how long each variant is measured at least: within one second 48 streams do not share fairly.
var take = map[string]time.Duration{besideSlow: sharesTake}

// fastBesideSlow measures one stream to the bystander, first alone, then beside many
// streams to the peer through a bottleneck.
func (b *bench) fastBesideSlow(ctx context.Context, m *mesh) error {
	fast, err := m.streams(ctx, meshSender, meshBystander, 1)
	if err != nil {
		return err
	}
	defer fast.stop()
	if err := b.pingBeside(m, fast, aloneStream); err != nil {
		return err
	}
	slow, err := m.streams(ctx, meshSender, meshPeer, slowStreams)
	if err != nil {
		return err
	}
	defer slow.stop()
	time.Sleep(settle)
	before := slow.received()
	if err := b.pingBeside(m, fast, besideSlow); err != nil {
		return err
	}
	least, most, _ := shares(before, slow.received())
	of := fmt.Sprintf(" of %d streams, %s", slowStreams, slowTCP.name)
	b.r.add(m.key(testShare, "least"+of), "of equal", least)
	b.r.add(m.key(testShare, "most"+of), "of equal", most)
	return nil
}

// pingBeside pings the bystander beside the stream to it, and adds the results of both to the report.
func (b *bench) pingBeside(m *mesh, fast *background, variant string) error {
	time.Sleep(2 * settle)
	var p pings
	mbps, _, err := fast.during(func() (err error) {
		p, err = runPings(m.hosts[meshSender], m.addrs[meshBystander], b.transferTime(take[variant]))
		return err
	})
	if err != nil {
		return err
	}
	b.r.add(m.key(testFast, variant), "Mb/s", mbps)
	b.r.add(m.key(testFastPing, variant), "ms", p.p50())
	return nil
}

// fastTargets returns the targets of the row, if it was measured.
func fastTargets(r *Report) (list []target) {
	for _, p := range r.places(testFast) {
		list = append(list,
			target{name: fmt.Sprintf("RC's ping to a fast host %s, %v", besideSlow, p),
				num: p.key(testFastPing, besideSlow, oursRC), atMost: true, bound: 1, unit: "ms"},
			target{name: fmt.Sprintf("RC's fast stream %s, of the same alone, %v", besideSlow, p),
				num: p.key(testFast, besideSlow, oursRC), den: p.key(testFast, aloneStream, oursRC), bound: 0.7})
	}
	return list
}
