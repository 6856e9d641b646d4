package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"ipoibcm/internal/lab"
)

// A path is the network between the bridge and the peer.
type path struct {
	name string
	way  lab.Way
	long time.Duration // how long a transfer runs before it is measured
}

// clean is the path that the others are compared with.
const clean = "nothing"

// paths are the paths of the rows. A path treats the packets of every contender alike.
var paths = []path{
	{clean, lab.Way{}, time.Second},
	{"round trip of 10 ms", lab.Way{Delay: 5 * time.Millisecond}, 2 * time.Second},
	{"round trip of 40 ms", lab.Way{Delay: 20 * time.Millisecond}, 4 * time.Second},
	{"0.5 % displaced by 3", lab.Way{Displace: 5}, time.Second},
	{"0.1 % lost", lab.Way{Lose: 1}, time.Second},
	{"1 % lost", lab.Way{Lose: 10}, time.Second},
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

// prepareWire makes the devices that a wire joins. It turns off offloads, so that every
// frame on the wire is one packet with a finished checksum.
func (m *mesh) prepareWire() error {
	if err := lab.ConnectHere(m.bridge, "wire0", "wire1", m.at.mtu); err != nil {
		return err
	}
	for _, h := range []int{meshSender, meshPeer} {
		err := m.hosts[h].OffloadsOff("eth0", "tx-udp-segmentation", "tx-tcp-segmentation", "tx-tcp6-segmentation",
			"tx-checksum-ip-generic")
		if err != nil {
			return err
		}
	}
	return nil
}

// pathTargets returns the targets of the path rows that were measured.
func pathTargets(r *Report) (list []target) {
	for _, p := range r.places(testPath) {
		of := func(what string) target {
			return target{name: fmt.Sprintf("RC's goodput over a path, %s, of that over a clean one, %v", what, p),
				num: p.key(testPath, what, oursRC), den: p.key(testPath, clean, oursRC)}
		}
		for _, v := range r.variants(testPath, p.mtu, p.family) {
			t := of(v)
			switch {
			case strings.HasPrefix(v, "round trip"):
				t = target{name: fmt.Sprintf("RC's goodput of raw veth's, %s, %v", v, p), num: p.key(testPath, v, oursRC),
					den: p.key(testPath, v, raw), bound: 0.85}
			case strings.Contains(v, "displaced"):
				t.bound = 0.8
			case strings.HasPrefix(v, "0.1 %"):
				t.bound = 0.9
			case strings.HasPrefix(v, "1 %"):
				t.bound = 0.5
			default:
				continue
			}
			list = append(list, t)
		}
	}
	return list
}
