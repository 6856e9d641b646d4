package cni

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Containers that containerd runs on two hosts are attached by its own client of CNI, exchange packets
// larger than any frame of the underlay, and leave nothing when they end.
func TestContainerd(t *testing.T) {
	for _, name := range []string{"containerd", "ctr", "runc", "busybox"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("%s is not installed (Debian: containerd, runc, busybox-static)", name)
		}
	}
	hs := hosts(t, 2)
	c := startContainerd(t)
	one := c.start(hs[0], c.id("one"), "ip -4 -o address show dev eth0; sleep 1000")
	var address string
	var lines []string
	for s := bufio.NewScanner(one.out); address == "" && s.Scan(); lines = append(lines, s.Text()) {
		if _, rest, ok := strings.Cut(s.Text(), " inet "); ok {
			address, _, _ = strings.Cut(rest, "/")
		}
	}
	if address == "" {
		t.Fatalf("the first container has no address: %q", lines)
	}
	two := c.start(hs[1], c.id("two"), "for i in 1 2 3 4 5; do ping -c 1 -W 2 -s 65000 "+address+" && exit; done; exit 1")
	said, _ := io.ReadAll(two.out)
	if err := two.cmd.Wait(); err != nil {
		t.Errorf("the second container does not reach %s: %v\n%s", address, err, said)
	}
	hs[1].clean()
	if out, err := exec.Command("ctr", "-a", c.dir+"/s", "task", "kill", "-s", "KILL", c.id("one")).CombinedOutput(); err != nil {
		t.Errorf("kill the first container: %v: %s", err, out)
	}
	_ = one.cmd.Wait() // it was killed
	hs[0].clean()
}

// A containerd of our own, with a root file system of busybox for its containers.
type ownContainerd struct {
	*testing.T
	dir string
}

func startContainerd(t *testing.T) *ownContainerd {
	t.Helper()
	dir, err := os.MkdirTemp("", "ipcnd") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	c := &ownContainerd{t, dir}
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = %q
[ttrpc]
  address = %q
`, dir+"/root", dir+"/state", dir+"/s", dir+"/s.ttrpc")
	if err := os.WriteFile(dir+"/config.toml", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	bin := dir + "/rootfs/bin"
	for _, d := range []string{bin, dir + "/rootfs/proc", dir + "/rootfs/sys", dir + "/rootfs/dev", dir + "/rootfs/tmp"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(busybox)
	if err == nil {
		err = os.WriteFile(bin+"/busybox", text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sh", "ip", "ping", "sleep"} {
		link(t, "busybox", filepath.Join(bin, name))
	}
	log, err := os.Create(dir + "/log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	daemon := exec.Command("containerd", "-c", dir+"/config.toml")
	daemon.Stderr = log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		daemon.Process.Signal(os.Interrupt)
		daemon.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(dir + "/log")
			t.Logf("log of containerd:\n%s", text[max(0, len(text)-10000):])
		}
		os.RemoveAll(dir)
	})
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		out, err := exec.Command("ctr", "-a", dir+"/s", "version").CombinedOutput()
		if err == nil {
			return c
		}
		if time.Now().After(end) {
			t.Fatalf("containerd does not answer: %v: %s", err, out)
		}
	}
}

// id names a container, which runc keeps in a folder that all share.
func (c *ownContainerd) id(name string) string { return fmt.Sprintf("ipcn-%d-%s", os.Getpid(), name) }

// A container is what runs one, in the foreground.
type container struct {
	cmd *exec.Cmd
	out io.Reader
}

// start runs a shell command in a container on a host. What attaches it, ctr, looks for plugins and
// networks in two folders, which are the host's here, in a mount namespace of its own.
func (c *ownContainerd) start(h *host, id, command string) container {
	c.Helper()
	for _, dir := range []string{"/etc/cni", "/etc/cni/net.d", "/opt/cni", "/opt/cni/bin"} {
		if err := os.Mkdir(dir, 0o755); err == nil {
			c.Cleanup(func() { os.Remove(dir) })
		}
	}
	const attach = `mount --bind "$1" /etc/cni/net.d && mount --bind "$2" /opt/cni/bin && exec ctr -a "$3" run --rm --cni --rootfs "$4" "$5" /bin/sh -c "$6"`
	networks := c.TempDir()
	text, err := os.ReadFile(h.dir + "/10-fabric.conflist")
	if err == nil { // containerd 1.6 speaks CNI 1.0
		err = os.WriteFile(networks+"/10-fabric.conflist", bytes.ReplaceAll(text, []byte(`"1.1.0"`), []byte(`"1.0.0"`)), 0o644)
	}
	if err != nil {
		c.Fatal(err)
	}
	cmd := exec.Command("ip", "netns", "exec", h.netns, "sh", "-c", attach, "sh", networks, bin, c.dir+"/s",
		c.dir+"/rootfs", id, command)
	out, err := cmd.StdoutPipe()
	cmd.Stderr = cmd.Stdout
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() {
		if cmd.ProcessState == nil {
			exec.Command("ctr", "-a", c.dir+"/s", "task", "kill", "-s", "KILL", id).Run()
			cmd.Wait()
		}
	})
	return container{cmd, out}
}
