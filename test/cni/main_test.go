// Package cni shows the CNI plugin and ipoibcmd node at work: namespaces stand for hosts
// and for pods, cnitool for the container runtime, and host-local gives the addresses.
// It needs root.
package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"ipoibcm/hostnet"
	"ipoibcm/internal/gotool"
	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
)

const root = "../.."

// What plays the runtime, and what gives addresses, by their releases.
var (
	cnitool   = gotool.Program{Module: "github.com/containernetworking/cni", Version: "v1.3.0", Package: "./cnitool"}
	hostLocal = gotool.Program{Module: "github.com/containernetworking/plugins", Version: "v1.9.0",
		Package: "./plugins/ipam/host-local"}
)

// bin has cnitool, host-local, ipoibcmd and the plugin.
var bin string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "ipcn")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	bin = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// need builds the programs, or skips.
func need(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	const cache = root + "/.cache"
	ci := os.Getenv("CI") == "true"
	for _, tool := range []gotool.Program{cnitool, hostLocal} {
		if !ci && !long.Form() && !tool.Built(cache) {
			t.Skipf("%s is not built yet: make test-long does that", tool.Name())
		}
		program, err := tool.Build(t.Context(), cache)
		if err != nil {
			t.Fatal(err)
		}
		link(t, program, filepath.Join(bin, tool.Name()))
	}
	if _, err := os.Stat(bin + "/ipoibcm"); err != nil {
		build(t, bin+"/ipoibcmd", "./cmd/ipoibcmd")
		build(t, bin+"/ipoibcm", "./cmd/ipoibcm-cni")
	}
}

func link(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Symlink(from, to); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
}

func build(t *testing.T, program, source string) {
	t.Helper()
	c := exec.CommandContext(t.Context(), "go", "build", "-o", program, source)
	c.Dir, c.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", c.Args, err, out)
	}
}

// A host is a network namespace with a node service, and its own list of addresses.
type host struct {
	*testing.T
	netns string
	dir   string
	node  *exec.Cmd
	pods  int
}

// hosts makes hosts on one Ethernet; pods have 10.77.0.0/24, a part of it on each.
func hosts(t *testing.T, n int) (all []*host) {
	t.Helper()
	need(t)
	prefix := fmt.Sprintf("ipcn-%d-", os.Getpid())
	hub := prefix + "hub"
	namespace(t, hub)
	ip(t, "-n", hub, "link", "add", "br0", "type", "bridge")
	ip(t, "-n", hub, "link", "set", "br0", "up")
	for i := range n {
		h := &host{T: t, netns: fmt.Sprintf("%s%c", prefix, 'a'+i), dir: t.TempDir()}
		namespace(t, h.netns)
		port := fmt.Sprintf("p%d", i)
		ip(t, "link", "add", "eth0", "netns", h.netns, "type", "veth", "peer", "name", port, "netns", hub)
		ip(t, "-n", hub, "link", "set", port, "master", "br0", "up")
		ip(t, "-n", h.netns, "link", "set", "lo", "up")
		ip(t, "-n", h.netns, "link", "set", "eth0", "up")
		h.configure(i)
		h.start()
		t.Cleanup(h.end)
		all = append(all, h)
	}
	return all
}

// hub is the namespace with the bridge between the hosts.
func (h *host) hub() string { return h.netns[:strings.LastIndexByte(h.netns, '-')+1] + "hub" }

// configure writes the network's configuration of a host.
func (h *host) configure(i int) { h.configureWith(i, nil) }

// configureWith does so with more settings.
func (h *host) configureWith(i int, more map[string]any) {
	h.Helper()
	plugin := map[string]any{
		"type": "ipoibcm", "master": "eth0", "mode": "rc", "pkey": "0x8001", "socket": h.socket(),
		"ipam": map[string]any{"type": "host-local", "dataDir": h.dir + "/addresses",
			"routes": []any{map[string]any{"dst": "10.88.0.0/16", "gw": "10.77.0.1"}},
			"ranges": []any{[]any{map[string]any{"subnet": "10.77.0.0/24",
				"rangeStart": fmt.Sprintf("10.77.0.%d", 10+100*i), "rangeEnd": fmt.Sprintf("10.77.0.%d", 100+100*i)}}}},
	}
	maps.Copy(plugin, more)
	conf := map[string]any{"cniVersion": "1.1.0", "name": "fabric", "plugins": []any{plugin}}
	text, err := json.Marshal(conf)
	if err == nil {
		err = os.WriteFile(h.dir+"/10-fabric.conflist", text, 0o644)
	}
	if err != nil {
		h.Fatal(err)
	}
}

func (h *host) socket() string { return h.dir + "/node.sock" }
func (h *host) state() string  { return h.dir + "/state" }

// start starts the node service and waits until it answers.
func (h *host) start() {
	h.Helper()
	log, err := os.OpenFile(h.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		h.Fatal(err)
	}
	defer log.Close()
	h.node = exec.Command("ip", "netns", "exec", h.netns, bin+"/ipoibcmd", "node", "--socket", h.socket(),
		"--state", h.state())
	h.node.Stderr = log
	if err := h.node.Start(); err != nil {
		h.Fatal(err)
	}
	h.within(30*time.Second, "the node service answers", func() error {
		_, err := h.cni("status", "", "eth0")
		return err
	})
}

// stop ends the node service with a signal.
func (h *host) stop(sig os.Signal) {
	h.node.Process.Signal(sig)
	h.node.Wait()
}

// end stops everything on the host.
func (h *host) end() {
	h.stop(syscall.SIGKILL)
	for pid := range h.agents() {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	if h.Failed() {
		text, _ := os.ReadFile(h.dir + "/log")
		h.Logf("log of %s:\n%s", h.netns, text[max(0, len(text)-20000):])
	}
}

// agents returns the agents that run on the host, and their configuration files.
func (h *host) agents() map[int]string {
	found := map[int]string{}
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		for _, arg := range bytes.Split(text, []byte{0}) {
			var pid int
			if n, _ := fmt.Sscanf(path, "/proc/%d/", &pid); n == 1 && strings.HasPrefix(string(arg), h.state()+"/") {
				found[pid] = string(arg)
			}
		}
	}
	return found
}

// pod makes a pod's namespace.
func (h *host) pod() string {
	h.Helper()
	h.pods++
	name := fmt.Sprintf("%s-%d", h.netns, h.pods)
	namespace(h.T, name)
	ip(h.T, "-n", name, "link", "set", "lo", "up")
	return name
}

// cni has cnitool ask the plugin on the host.
func (h *host) cni(verb, pod, ifName string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "ip", "netns", "exec", h.netns, bin+"/cnitool", verb, "fabric", "/run/netns/"+pod)
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_PATH=" + bin, "NETCONFPATH=" + h.dir,
		"CNI_IFNAME=" + ifName, "XDG_CACHE_HOME=" + h.dir}
	out, err := c.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("cnitool %s %s: %w: %s", verb, pod, err, bytes.TrimSpace(out))
	}
	return string(out), err
}

// add attaches a pod and returns its address.
func (h *host) add(pod string) (string, error) {
	out, err := h.cni("add", pod, "net1")
	if err != nil {
		return "", err
	}
	var result struct{ IPs []struct{ Address string } }
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	if len(result.IPs) != 1 {
		return "", fmt.Errorf("the result has %d addresses, want 1: %s", len(result.IPs), out)
	}
	address, _, _ := strings.Cut(result.IPs[0].Address, "/")
	return address, nil
}

// clean checks that nothing of any pod is left on the host.
func (h *host) clean() {
	h.Helper()
	h.within(10*time.Second, "nothing is left", func() error {
		if links := ip(h.T, "-n", h.netns, "-o", "link", "show", "type", "macvlan"); links != "" {
			return fmt.Errorf("underlays are left: %s", links)
		}
		if agents := h.agents(); len(agents) > 0 {
			return fmt.Errorf("agents are left: %v", agents)
		}
		if left, _ := filepath.Glob(h.state() + "/*"); len(left) > 0 {
			return fmt.Errorf("files are left: %v", left)
		}
		if left, _ := filepath.Glob(h.dir + "/addresses/fabric/10.*"); len(left) > 0 {
			return fmt.Errorf("addresses are left: %v", left)
		}
		return nil
	})
}

// within waits until f finds nothing wrong.
func (h *host) within(patience time.Duration, what string, f func() error) {
	h.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	h.Fatalf("%s: not within %v: %v", what, patience, err)
}

// reaches checks that one pod gets answers of an address to packets with that many octets behind the ICMP header.
func (h *host) reaches(pod, address string, octets int) {
	h.Helper()
	ns, err := hostnet.OpenNamespace(pod)
	if err != nil {
		h.Fatal(err)
	}
	defer ns.Close()
	h.within(15*time.Second, "pings from "+pod+" to "+address, func() error {
		return hostnet.InNamespace(ns, func() error {
			_, err := lab.Echo(lab.Ping{Dst: netip.MustParseAddr(address), Size: octets + 28, DF: true})
			return err
		})
	})
}

func namespace(t *testing.T, name string) {
	t.Helper()
	ip(t, "netns", "add", name)
	t.Cleanup(func() { exec.Command("ip", "netns", "delete", name).Run() })
}

func ip(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
