package cni

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ipoibcm/internal/long"
)

// Pods of one host and of two exchange packets of the full MTU; each has its own GID.
func TestPods(t *testing.T) {
	hs := hosts(t, 2)
	a, b := hs[0], hs[1]
	pods := []struct {
		on        *host
		name, has string
	}{{on: a}, {on: a}, {on: b}}
	for i := range pods {
		p := &pods[i]
		p.name = p.on.pod()
		address, err := p.on.add(p.name)
		if err != nil {
			t.Fatal(err)
		}
		p.has = address
	}
	first := pods[0]
	for _, other := range pods[1:] {
		a.reaches(first.name, other.has, 56)
		a.reaches(first.name, other.has, 65492)
	}
	if got := ip(t, "-n", first.name, "route", "show", "10.88.0.0/16"); !strings.HasPrefix(got,
		"10.88.0.0/16 via 10.77.0.1 dev net1") {
		t.Errorf("the route of the configuration is %q", got)
	}
	if got := ip(t, "-n", first.name, "link", "show", "net1"); !strings.Contains(got, "mtu 65520") {
		t.Errorf("the interface is %q, want an MTU of 65520", got)
	}
	if _, err := a.cni("check", first.name, "net1"); err != nil {
		t.Error(err)
	}
	ip(t, "-n", first.name, "route", "delete", "10.88.0.0/16")
	if _, err := a.cni("check", first.name, "net1"); err == nil {
		t.Error("CHECK finds nothing wrong with an interface that has lost its route")
	}
	ip(t, "-n", first.name, "route", "add", "10.88.0.0/16", "via", "10.77.0.1")
	ip(t, "-n", first.name, "address", "flush", "dev", "net1")
	if _, err := a.cni("check", first.name, "net1"); err == nil {
		t.Error("CHECK finds nothing wrong with an interface that has lost its address")
	}
	for _, p := range pods {
		if _, err := p.on.cni("del", p.name, "net1"); err != nil {
			t.Error(err)
		}
		if _, err := p.on.cni("del", p.name, "net1"); err != nil {
			t.Errorf("a second DEL: %v", err)
		}
		if out, err := exec.Command("ip", "-n", p.name, "link", "show", "net1").CombinedOutput(); err == nil {
			t.Errorf("the interface is left: %s", out)
		}
	}
	a.clean()
	b.clean()
}

// An attachment outlives the service that made it, and its agent's death; it ends with
// the pod, whoever says so.
func TestDeaths(t *testing.T) {
	h := hosts(t, 1)[0]
	pods, addresses := []string{h.pod(), h.pod(), h.pod()}, []string{}
	for _, p := range pods {
		address, err := h.add(p)
		if err != nil {
			t.Fatal(err)
		}
		addresses = append(addresses, address)
	}
	h.reaches(pods[0], addresses[1], 56)
	before := h.agents()

	h.stop(syscall.SIGKILL)
	h.reaches(pods[0], addresses[1], 56) // nobody is needed for that
	if _, err := h.cni("check", pods[0], "net1"); err == nil {
		t.Error("CHECK finds nothing wrong though the service is dead")
	}
	if _, err := h.cni("del", pods[0], "net1"); err == nil {
		t.Error("DEL succeeds though the service is dead")
	}
	if _, err := os.Stat(h.dir + "/addresses/fabric/" + addresses[0]); err != nil {
		t.Errorf("the address may be given to another, and the pod has it still: %v", err)
	}
	h.start()
	if got := h.agents(); !maps.Equal(got, before) {
		t.Errorf("after a restart there are agents %v, before %v", got, before)
	}

	for pid := range before {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	h.reaches(pods[0], addresses[1], 56)
	h.within(15*time.Second, "a route by the new agent's interface", func() error { // it comes after the address
		if ip(t, "-n", pods[0], "route", "show", "10.88.0.0/16") == "" {
			return errors.New("there is none")
		}
		return nil
	})

	h.serves(3)                       // all agents are back
	ip(t, "netns", "delete", pods[2]) // without a DEL
	h.serves(2)
	for _, p := range pods {
		if _, err := h.cni("del", p, "net1"); err != nil {
			t.Error(err)
		}
	}
	h.clean()
}

// serves waits until so many pods have agents.
func (h *host) serves(want int) {
	h.Helper()
	h.within(15*time.Second, "agents of all pods", func() error {
		if got := len(h.agents()); got != want {
			return fmt.Errorf("there are %d agents, want %d", got, want)
		}
		return nil
	})
}

// Many pods come and go at once, the runtime's requests are killed in their middle, and
// so is the service: no address is there twice, and in the end nothing is left.
func TestManyPods(t *testing.T) {
	h := hosts(t, 1)[0]
	n := long.Of(8, 50)
	pods := make([]string, n)
	for i := range pods {
		pods[i] = h.pod()
	}
	addresses := h.addAll(pods)
	for i, a := range addresses {
		if a == "" {
			t.Errorf("pod %d was not attached", i)
		} else if slices.Index(addresses, a) != i {
			t.Errorf("address %s is there twice", a)
		}
	}
	// Half go and come again while the service is killed.
	var wg sync.WaitGroup
	for _, p := range pods[:n/2] {
		wg.Go(func() {
			h.cni("del", p, "net1")
			h.cni("add", p, "net1")
		})
	}
	h.stop(syscall.SIGKILL)
	wg.Wait()
	h.start()
	// A runtime asks for the end of all that it does not know to be well.
	for _, p := range pods {
		wg.Go(func() {
			if _, err := h.cni("del", p, "net1"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	h.clean()
}

// addAll attaches pods at once and returns their addresses; empty means failed.
func (h *host) addAll(pods []string) []string {
	addresses := make([]string, len(pods))
	var wg sync.WaitGroup
	for i, p := range pods {
		wg.Go(func() {
			var err error
			if addresses[i], err = h.add(p); err != nil {
				h.Error(err)
			}
		})
	}
	wg.Wait()
	return addresses
}
