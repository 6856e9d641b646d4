package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"ipoibcm/internal/lab"
)

// A path is the network between the bridge and the peer.
type path struct {
	name string
	way  lab.Way
	long time.Duration // how long a transfer runs before it is measured
	// bound is how much RC's goodput is wanted to be at least, of that over the clean path, or of raw veth's
	// if the path has a delay.
	bound float64
}

// clean is the path that the others are compared with.
const clean = "nothing"

// paths are the paths of the rows. A path treats the packets of every contender alike.
var paths = []path{
	{clean, lab.Way{}, time.Second, 0},
	{"round trip of 10 ms", lab.Way{Delay: 5 * time.Millisecond}, 2 * time.Second, 0.85},
	{"round trip of 40 ms", lab.Way{Delay: 20 * time.Millisecond}, 4 * time.Second, 0.85},
	{"0.5 % displaced by 3", lab.Way{Displace: 5}, time.Second, 0.8},
	{"0.1 % lost", lab.Way{Lose: 1}, time.Second, 0.9},
	{"1 % lost", lab.Way{Lose: 10}, time.Second, 0.5},
}

const (
	testPath = "goodput over a path" // Mb/s of one TCP stream
	wireSeed = 4791
)

// pathRows returns a row for each path. Each row has hosts of its own, which have never known another path.
func (b *bench) pathRows() (rows []row) {
	for _, p := range paths {
		judged, others := []string{oursRC}, []string{raw, vxlan, wireguard}
		if p.way.Delay > 0 { // where RC is compared with raw veth
			judged, others = judgedRC, besideRC
		}
		rows = append(rows, row{name: "path, " + p.name, judged: judged, others: others,
			kind:    meshKind{at: place{9000, family6}, size: meshPeer + 1, path: p.name},
			measure: func(ctx context.Context, m *mesh) error { return b.lateGoodput(ctx, m, testPath, p.name, p.long) }})
	}
	return rows
}

// lay puts the path of the mesh between the bridge and the peer.
func (m *mesh) lay() error {
	i := slices.IndexFunc(paths, func(p path) bool { return p.name == m.path })
	port := fmt.Sprintf("port%d", meshPeer)
	err := errors.Join(m.prepareWire(), m.bridge.SetMaster(port, ""), m.bridge.SetMaster("wire0", "br0"))
	if err != nil {
		return err
	}
	w, err := m.bridge.NewWire("wire1", port, m.at.mtu, paths[i].way, wireSeed)
	if err != nil {
		return err
	}
	m.onClose(w.Close)
	return nil
}

// prepareWire makes the devices that a wire joins.
func (m *mesh) prepareWire() error {
	if err := lab.Connect(m.bridge, "wire0", m.bridge, "wire1", m.at.mtu); err != nil {
		return err
	}
	for _, h := range []int{meshSender, meshPeer} {
		if err := m.hosts[h].WholePackets("eth0"); err != nil {
			return err
		}
	}
	return nil
}

// pathTargets returns the targets of the path rows that were measured.
func pathTargets(r *Report) (list []target) {
	for _, p := range r.places(testPath) {
		for _, w := range paths {
			if w.bound == 0 || !slices.Contains(r.variants(testPath, p.mtu, p.family), w.name) {
				continue
			}
			t := target{name: fmt.Sprintf("RC's goodput over a path, %s, of that over a clean one, %v", w.name, p),
				num: p.key(testPath, w.name, oursRC), den: p.key(testPath, clean, oursRC), bound: w.bound}
			if w.way.Delay > 0 {
				t.name, t.den = fmt.Sprintf("RC's goodput of raw veth's, %s, %v", w.name, p), p.key(testPath, w.name, raw)
			}
			list = append(list, t)
		}
	}
	return list
}
