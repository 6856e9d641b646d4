package cni

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"
)

var compareFor = flag.Duration("compare", 0, "how long each measurement of TestComparePods takes; it is skipped at zero")

// A podNetwork is one way to connect a pod of one host with a pod of another.
type podNetwork struct {
	name     string
	from, to string // pods
	address  string // of the second
	gbits    map[int][]float64
}

// TestComparePods measures TCP from pod to pod of two hosts, by this plugin, by agents on the hosts
// themselves, and by what other plugins would set up: a macvlan device in the pod, and a bridge with
// VXLAN as flannel makes it. All have the same hosts and underlay; measurements are interleaved.
func TestComparePods(t *testing.T) {
	if *compareFor == 0 {
		t.Skip("measures: go test ./test/cni -run TestComparePods -v -compare 3s, with IPOIBCM_LONG=1")
	}
	if _, err := exec.LookPath("iperf3"); err != nil {
		t.Skip("iperf3 is not installed")
	}
	const rounds = 5
	streams := []int{1, 4}
	for _, mtu := range []int{1500, 9000} {
		t.Run(strconv.Itoa(mtu), func(t *testing.T) {
			hs := hosts(t, 2)
			for i, h := range hs {
				ip(t, "-n", h.netns, "link", "set", "eth0", "mtu", strconv.Itoa(mtu))
				ip(t, "-n", h.hub(), "link", "set", fmt.Sprintf("p%d", i), "mtu", strconv.Itoa(mtu))
				ip(t, "-n", h.netns, "address", "add", fmt.Sprintf("192.168.7.%d/24", i+1), "dev", "eth0")
			}
			networks := []*podNetwork{byPlugin(hs), betweenHosts(hs), byMacvlan(hs), byVXLAN(hs, mtu)}
			for _, n := range networks {
				n.gbits = map[int][]float64{}
				n.serve(hs[1])
				hs[0].reaches(n.from, n.address, 56)
			}
			for range rounds {
				for _, s := range streams {
					for _, n := range networks {
						n.gbits[s] = append(n.gbits[s], n.measure(t, s))
					}
				}
			}
			for _, n := range networks {
				for _, s := range streams {
					slices.Sort(n.gbits[s])
					t.Logf("underlay %d, %-8s %d streams: %5.2f Gb/s (%.2f to %.2f)",
						mtu, n.name, s, n.gbits[s][rounds/2], n.gbits[s][0], n.gbits[s][rounds-1])
				}
			}
			for _, p := range []struct {
				on  *host
				pod string
			}{{hs[0], networks[0].from}, {hs[1], networks[0].to}} {
				if _, err := p.on.cni("del", p.pod, "net1"); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func byPlugin(hs []*host) *podNetwork {
	n := &podNetwork{name: "ipoibcm", from: hs[0].pod(), to: hs[1].pod()}
	for i, pod := range []string{n.from, n.to} {
		address, err := hs[i].add(pod)
		if err != nil {
			hs[i].Fatal(err)
		}
		n.address = address
	}
	return n
}

// betweenHosts has agents on the hosts themselves, without pods: what is different there the pods cost.
func betweenHosts(hs []*host) *podNetwork {
	n := &podNetwork{name: "hosts", from: hs[0].netns, to: hs[1].netns, address: "10.76.0.2"}
	for i, h := range hs {
		c := exec.Command("ip", "netns", "exec", h.netns, bin+"/ipoibcmd", "run", "--underlay", "eth0",
			"--address", fmt.Sprintf("10.76.0.%d/24", i+1), "--control", h.dir+"/host.sock")
		if err := c.Start(); err != nil {
			h.Fatal(err)
		}
		h.Cleanup(func() { c.Process.Signal(os.Interrupt); c.Wait() })
	}
	return n
}

func byMacvlan(hs []*host) *podNetwork {
	n := &podNetwork{name: "macvlan", from: hs[0].pod(), to: hs[1].pod(), address: "10.78.0.2"}
	for i, pod := range []string{n.from, n.to} {
		h := hs[i]
		ip(h.T, "-n", h.netns, "link", "add", "mv0", "link", "eth0", "type", "macvlan", "mode", "bridge")
		ip(h.T, "-n", h.netns, "link", "set", "mv0", "netns", pod)
		ip(h.T, "-n", pod, "address", "add", fmt.Sprintf("10.78.0.%d/24", i+1), "dev", "mv0")
		ip(h.T, "-n", pod, "link", "set", "mv0", "up")
	}
	return n
}

// byVXLAN has a bridge for the pods of each host, joined by VXLAN on the underlay.
func byVXLAN(hs []*host, mtu int) *podNetwork {
	const overhead = 50 // outer Ethernet, IPv4, UDP and VXLAN headers
	n := &podNetwork{name: "vxlan", from: hs[0].pod(), to: hs[1].pod(), address: "10.79.0.2"}
	inner := strconv.Itoa(mtu - overhead)
	for i, pod := range []string{n.from, n.to} {
		h := hs[i]
		ip(h.T, "-n", h.netns, "link", "add", "vx0", "mtu", inner, "type", "vxlan", "id", "7", "dstport", "4789",
			"local", fmt.Sprintf("192.168.7.%d", i+1), "remote", fmt.Sprintf("192.168.7.%d", 2-i))
		ip(h.T, "-n", h.netns, "link", "add", "cni0", "mtu", inner, "type", "bridge")
		ip(h.T, "-n", h.netns, "link", "add", "ve0", "mtu", inner, "type", "veth", "peer", "name", "eth0", "netns", pod, "mtu", inner)
		for _, dev := range []string{"vx0", "ve0"} {
			ip(h.T, "-n", h.netns, "link", "set", dev, "master", "cni0", "up")
		}
		ip(h.T, "-n", h.netns, "link", "set", "cni0", "up")
		ip(h.T, "-n", pod, "address", "add", fmt.Sprintf("10.79.0.%d/24", i+1), "dev", "eth0")
		ip(h.T, "-n", pod, "link", "set", "eth0", "up")
	}
	return n
}

// serve starts the receiver in the second pod.
func (n *podNetwork) serve(h *host) {
	h.Helper()
	c := exec.Command("ip", "netns", "exec", n.to, "iperf3", "-s")
	if err := c.Start(); err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { c.Process.Kill(); c.Wait() })
}

// measure returns what the second pod received, in Gb/s.
func (n *podNetwork) measure(t *testing.T, streams int) float64 {
	t.Helper()
	out, err := exec.Command("ip", "netns", "exec", n.from, "iperf3", "-c", n.address, "-J",
		"-P", strconv.Itoa(streams), "-t", fmt.Sprintf("%d", *compareFor/time.Second)).Output()
	var result struct {
		End struct {
			Received struct {
				BPS float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	if err == nil {
		err = json.Unmarshal(out, &result)
	}
	if err != nil {
		t.Fatalf("iperf3 by %s: %v: %s", n.name, err, out)
	}
	return result.End.Received.BPS / 1e9
}
