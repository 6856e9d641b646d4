package cni

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Pods of two hosts reach each other on an underlay without multicast of RoCE, because they know the
// name of the link and of etcd. Each is published under a name of its own, until it goes.
func TestPodsByMembership(t *testing.T) {
	for _, name := range []string{"etcd", "nft"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("%s is not installed: pods do not find each other in etcd", name)
		}
	}
	hs := hosts(t, 2)
	for i, h := range hs {
		ip(t, "-n", h.netns, "address", "add", fmt.Sprintf("192.168.7.%d/24", i+1), "dev", "eth0")
		h.sh("nft", "add table inet m; add chain inet m out { type filter hook output priority 0; }; "+
			"add rule inet m out ip6 daddr ff00::/8 udp dport 4791 drop")
		h.configureWith(i, map[string]any{"link": "blue", "membership": "etcd://192.168.7.1:2379",
			"etcd": map[string]any{"lease": "3s"}})
	}
	const at = "http://192.168.7.1:"
	etcd := exec.Command("ip", "netns", "exec", hs[0].netns, "etcd", "--data-dir", t.TempDir(), "--listen-client-urls",
		at+"2379", "--advertise-client-urls", at+"2379", "--listen-peer-urls", at+"2380",
		"--initial-advertise-peer-urls", at+"2380", "--initial-cluster", "default="+at+"2380")
	if err := etcd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { etcd.Process.Kill(); etcd.Wait() })
	pods, addresses := []string{hs[0].pod(), hs[0].pod(), hs[1].pod()}, make([]string, 3)
	on := []*host{hs[0], hs[0], hs[1]}
	for i, p := range pods {
		address, err := on[i].add(p)
		if err != nil {
			t.Fatal(err)
		}
		addresses[i] = address
	}
	for _, to := range addresses[1:] {
		hs[0].reaches(pods[0], to, 56)
	}
	hs[0].hasMembers(3)
	for i, p := range pods[1:] {
		if _, err := on[i+1].cni("del", p, "net1"); err != nil {
			t.Error(err)
		}
	}
	hs[0].hasMembers(1)
	if _, err := hs[0].cni("del", pods[0], "net1"); err != nil {
		t.Error(err)
	}
	for _, h := range hs {
		h.clean()
	}
}

// sh has a program take commands from its standard input, on the host.
func (h *host) sh(program, commands string) {
	h.Helper()
	c := exec.Command("ip", "netns", "exec", h.netns, program, "-f", "-")
	c.Stdin = strings.NewReader(commands)
	if out, err := c.CombinedOutput(); err != nil {
		h.Fatalf("%s: %v: %s", program, err, out)
	}
}

// hasMembers waits until the agent of the host's first pod knows of n hosts of the link, whose names all
// differ.
func (h *host) hasMembers(n int) {
	h.Helper()
	h.within(20*time.Second, fmt.Sprintf("%d members", n), func() error {
		var known struct{ Members []struct{ ID string } }
		for _, config := range h.agents() {
			out, err := exec.Command(bin+"/ipoibcmd", "members", "--json", "--control",
				strings.TrimSuffix(config, ".yaml")+".sock").Output()
			if err != nil {
				return err
			}
			if err := json.Unmarshal(out, &known); err != nil {
				return err
			}
			names := map[string]bool{}
			for _, m := range known.Members {
				names[m.ID] = true
			}
			if len(names) != n {
				return fmt.Errorf("an agent knows %v", known.Members)
			}
		}
		return nil
	})
}
