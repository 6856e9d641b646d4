package main

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/Mellanox/rdmamap"
	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/hostnet"
	"ipoibcm/mtu"
	"ipoibcm/provider/ibverbs"
)

// shownFeatures are the ethtool features that matter to an underlay.
var shownFeatures = []string{"tx-udp-segmentation", "rx-gro", "rx-gro-list", "rx-udp-gro-forwarding"}

func newDevices() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "devices",
		Short: "list network devices that could be the underlay, and RDMA devices",
		Example: `  ipoibcmd devices
  ipoibcmd devices --json`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			d, err := listDevices()
			if err != nil {
				return err
			}
			return printDoc(asJSON, d, printDevices)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func listDevices() (*control.Devices, error) {
	infos, err := hostnet.Devices()
	if err != nil {
		return nil, fmt.Errorf("list network devices: %w", err)
	}
	d := &control.Devices{Version: control.Version, Underlays: []control.UnderlayDevice{}, RDMA: []control.RDMADevice{}}
	for _, i := range infos {
		if i.Link.Name == "lo" || i.Link.Type == "tun" || i.Link.Type == "tuntap" {
			continue
		}
		u := control.UnderlayDevice{Name: i.Link.Name, Driver: i.Driver, Up: i.Link.Up, MTU: i.Link.MTU,
			PathMTU:   mtu.PathMTU(i.Link.MTU).Octets(),
			SpeedMbps: i.Speed, Addresses: []string{}, Features: map[string]bool{}, RDMA: i.RDMA}
		for _, a := range i.Addrs {
			u.Addresses = append(u.Addresses, a.Prefix.String())
		}
		for _, f := range shownFeatures {
			if i.Features != nil {
				u.Features[f] = i.HasFeature(f)
			}
		}
		d.Underlays = append(d.Underlays, u)
	}
	d.RDMA = append(d.RDMA, rdmaDevices(infos)...)
	if len(d.RDMA) == 0 {
		d.Notes = append(d.Notes, "no RDMA devices: softroce needs none")
	}
	return d, nil
}

// rdmaDevices describes the RDMA devices of this host. all are its network devices.
func rdmaDevices(all []hostnet.Info) (out []control.RDMADevice) {
	netdevs := map[string][]string{}
	for _, i := range all {
		if i.RDMA != "" {
			netdevs[i.RDMA] = append(netdevs[i.RDMA], i.Link.Name)
		}
	}
	for _, name := range rdmamap.GetRdmaDeviceList() {
		out = append(out, rdmaDevice(name, netdevs[name]))
	}
	return out
}

// rdmaDevice describes an RDMA device: its InfiniBand ports, the character devices that it has, and the
// kinds of them that it lacks.
func rdmaDevice(name string, netdevs []string) control.RDMADevice {
	r := control.RDMADevice{Name: name, NetDevs: netdevs, Nodes: rdmamap.GetRdmaCharDevices(name), Missing: []string{}}
	for _, p := range ibverbs.IBPorts(name) {
		port := control.InfiniBandPort{Port: p.Port, State: p.State, LID: int(p.LID), SMLID: int(p.SMLID),
			GID: p.GID.String(), PKeys: []string{}, Rate: p.Rate}
		for _, k := range p.PKeys {
			if k != 0 {
				port.PKeys = append(port.PKeys, k.String())
			}
		}
		r.Ports = append(r.Ports, port)
	}
	if r.NetDevs == nil {
		r.NetDevs = []string{}
	}
	slices.Sort(r.Nodes)
	for _, kind := range []string{"uverbs", "umad", "issm", "rdma_cm"} {
		if !slices.ContainsFunc(r.Nodes, func(n string) bool { return strings.HasPrefix(filepath.Base(n), kind) }) {
			r.Missing = append(r.Missing, kind)
		}
	}
	return r
}

func printDevices(w io.Writer, d *control.Devices) {
	t := newTable("UNDERLAY", "STATE", "MTU", "PATH MTU", "ADDRESSES", "DRIVER", "SPEED", "UDP SEGMENTATION", "GRO")
	for _, u := range d.Underlays {
		speed := either(u.SpeedMbps > 0, fmt.Sprintf("%d Mb/s", u.SpeedMbps), "?")
		t.add(u.Name, either(u.Up, "up", "down"), u.MTU, u.PathMTU, strings.Join(u.Addresses, " "), u.Driver, speed,
			onOff(u.Features, "tx-udp-segmentation"), onOff(u.Features, "rx-gro"))
	}
	t.render(w)
	if len(d.RDMA) > 0 {
		fmt.Fprintln(w)
		t = newTable("RDMA DEVICE", "NETWORK DEVICES", "NODES", "MISSING")
		for _, r := range d.RDMA {
			t.add(r.Name, strings.Join(r.NetDevs, " "), strings.Join(r.Nodes, " "), strings.Join(r.Missing, " "))
		}
		t.render(w)
		printPorts(w, d.RDMA)
	}
	for _, n := range d.Notes {
		fmt.Fprintln(w, n)
	}
}

// printPorts shows InfiniBand ports, if there are any.
func printPorts(w io.Writer, devices []control.RDMADevice) {
	t, some := newTable("INFINIBAND PORT", "STATE", "LID", "SM LID", "GID", "PARTITIONS", "RATE"), false
	for _, r := range devices {
		for _, p := range r.Ports {
			sm := either(p.SMLID == 0, "no subnet manager", fmt.Sprint(p.SMLID))
			t.add(fmt.Sprintf("%s/%d", r.Name, p.Port), p.State, p.LID, sm, p.GID, strings.Join(p.PKeys, " "), p.Rate)
			some = true
		}
	}
	if some {
		fmt.Fprintln(w)
		t.render(w)
		fmt.Fprintln(w, "ipoibcmd-ibverbs run --provider ibverbs --device DEVICE --port N serves an InfiniBand port")
	}
}

func onOff(features map[string]bool, name string) string {
	on, known := features[name]
	if !known {
		return "?"
	}
	return either(on, "on", "off")
}
