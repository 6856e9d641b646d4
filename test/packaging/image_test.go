package packaging

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/hostnet"
	"ipoibcm/internal/lab"

	"golang.org/x/sys/unix"
)

// A fleet are containers of the image under podman, with a store of its own.
type fleet struct {
	*testing.T
	dir   string
	image string
}

func (f *fleet) podman(args ...string) (string, error) {
	// The crun of Debian 12 refuses hosts that have cgroups of both versions.
	all := []string{"--root", f.dir + "/store", "--runroot", f.dir + "/run", "--cgroup-manager", "cgroupfs",
		"--runtime", "runc"}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // cleanups need it too
	defer cancel()
	out, err := exec.CommandContext(ctx, "podman", append(all, args...)...).CombinedOutput()
	return string(out), err
}

func (f *fleet) must(args ...string) string {
	f.Helper()
	out, err := f.podman(args...)
	if err != nil {
		f.Fatalf("podman %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// newFleet loads the image.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	needRoot(t, "podman", "runc", "ip")
	f := &fleet{T: t, dir: t.TempDir()}
	t.Cleanup(f.unmount)
	out := f.must("load", "--quiet", "--input", built(t, "image"))
	f.image = strings.TrimSpace(strings.TrimPrefix(out[strings.LastIndex(strings.TrimSpace(out), "\n")+1:],
		"Loaded image: "))
	return f
}

// unmount waits until no podman uses the store, and unmounts what the last one mounted there. When a
// container ends, its monitor (conmon) starts a podman of its own to clean up, which may come after
// the podman that removed the container.
func (f *fleet) unmount() {
	for end := time.Now().Add(30 * time.Second); f.used(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			f.Errorf("a process still uses %s", f.dir)
			break
		}
	}
	overlay := f.dir + "/store/overlay"
	if out, err := exec.Command("umount", "-R", overlay).CombinedOutput(); err != nil && mounted(overlay) {
		f.Errorf("umount: %v\n%s", err, out)
	}
}

// used reports whether a process has the store in its command line.
func (f *fleet) used() bool {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	return slices.ContainsFunc(lines, func(path string) bool {
		line, _ := os.ReadFile(path)
		return strings.Contains(string(line), f.dir+"/store")
	})
}

// mounted reports whether something is mounted at a path or below it.
func mounted(path string) bool {
	mounts, _ := os.ReadFile("/proc/self/mounts")
	return strings.Contains(string(mounts), " "+path)
}

// start starts the image in a network namespace, as little privileged as it works.
func (f *fleet) start(name, netns, address string) {
	f.Helper()
	config := filepath.Join(f.dir, name+".yaml")
	if err := os.WriteFile(config, []byte("underlay: eth0\naddresses: ["+address+"]\n"), 0o644); err != nil {
		f.Fatal(err)
	}
	tun := filepath.Join(f.dir, "tun") // as udev makes it: this host's may be for root alone
	if err := unix.Mknod(tun, unix.S_IFCHR, int(unix.Mkdev(10, 200))); err != nil && !errors.Is(err, unix.EEXIST) {
		f.Fatal(err)
	}
	if err := os.Chmod(tun, 0o666); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { f.remove(name) })
	f.must("run", "--detach", "--name", name, "--network", "ns:/run/netns/"+netns, "--cap-drop", "all", "--cap-add",
		"NET_ADMIN", "--device", tun+":/dev/net/tun",
		"--read-only", "--tmpfs", "/run/ipoibcm:mode=0750,U", "--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1024:1024",
		"--health-cmd", `["/usr/bin/ipoibcmd","show","stats"]`, "--volume", config+":/etc/ipoibcm/ibcm0.yaml:ro", f.image)
}

// remove ends a container.
func (f *fleet) remove(name string) {
	if out, err := f.podman("rm", "--force", "--time", "2", name); err != nil {
		f.Errorf("podman rm %s: %v\n%s", name, err, out)
	}
}

// reaches waits until an address answers the container with that name, in the namespace of that name.
func (f *fleet) reaches(name, address string) {
	f.Helper()
	ns, err := hostnet.OpenNamespace(name)
	if err != nil {
		f.Fatal(err)
	}
	defer ns.Close()
	ping := func() error {
		return hostnet.InNamespace(ns, func() error {
			_, err := lab.Echo(lab.Ping{Dst: netip.MustParseAddr(address)})
			return err
		})
	}
	err = ping()
	for end := time.Now().Add(30 * time.Second); err != nil && time.Now().Before(end); err = ping() {
		time.Sleep(200 * time.Millisecond)
	}
	if err != nil {
		logs, _ := f.podman("logs", name)
		f.Fatalf("no answer: %v\n%s", err, logs)
	}
}

// Two containers of the image exchange packets as a user without rights but
// CAP_NET_ADMIN, on a read-only root; what a read-only /proc/sys keeps them from is
// said; and the health check holds.
func TestImageRuns(t *testing.T) {
	f := newFleet(t)
	prefix := "ippk-" + strconv.Itoa(os.Getpid()) + "-"
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	names := []string{prefix + "x", prefix + "y"}
	for _, n := range names {
		ip("netns", "add", n)
		t.Cleanup(func() { exec.Command("ip", "netns", "delete", n).Run() })
	}
	ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
	for i, n := range names {
		ip("-n", n, "link", "set", "lo", "up")
		ip("-n", n, "link", "set", "eth0", "up")
		f.start(n, n, fmt.Sprintf("10.0.0.%d/24", i+1))
	}
	f.reaches(names[0], "10.0.0.2")
	status, _ := f.podman("exec", names[0], "ipoibcmd", "status")
	if !strings.Contains(status, "/proc/sys is read-only") {
		t.Errorf("status does not say that /proc/sys is read-only:\n%s", status)
	}
	if got, want := strings.TrimSpace(f.must("inspect", "--format", "{{.Config.User}}", names[0])),
		"65532:65532"; got != want {
		t.Errorf("it runs as %q, want %q", got, want)
	}
	f.must("healthcheck", "run", names[0])
	// As on Kubernetes' hosts, it brings the plugin.
	dir := t.TempDir()
	f.Cleanup(func() { f.remove("node") })
	f.must("run", "--detach", "--name", "node", "--user", "0", "--network", "ns:/run/netns/"+names[0], "--cap-drop",
		"all", "--cap-add", "NET_ADMIN,SYS_ADMIN,SYS_PTRACE",
		"--tmpfs", "/run/ipoibcm-node", "--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1024:1024", "--volume",
		dir+":/host", f.image, "node", "--cni-bin", "/host")
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		out, err := exec.Command(dir+"/ipoibcm", "--version").CombinedOutput()
		if err == nil && strings.Contains(string(out), "1.1.0") {
			break
		}
		if time.Now().After(end) {
			logs, _ := f.podman("logs", "node")
			t.Errorf("the plugin was not installed: %v %s\n%s", err, out, logs)
			break
		}
	}
	// Without the capability it starts, and says what it lacks.
	if out := f.must("run", "--rm", "--cap-drop", "all", "--network", "ns:/run/netns/"+names[0], "--ulimit",
		"nofile=1024:4096",
		"--ulimit", "nproc=1024:1024", f.image, "version"); !strings.HasPrefix(out, "ipoibcmd ") {
		t.Errorf("without capabilities version prints %q", out)
	}
}
