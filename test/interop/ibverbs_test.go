package interop

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/test/interop/vm"
)

// build compiles for the guest with libibverbs.
func build(t *testing.T, args ...string) {
	t.Helper()
	c := exec.Command("go", args...)
	c.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// TestVerbsOnRXE runs the suite of every provider over libibverbs, between two
// Soft-RoCE devices of one guest, on both ends of a veth pair.
func TestVerbsOnRXE(t *testing.T) {
	t.Parallel() // it waits more than it works
	base := image(t)
	dir := t.TempDir()
	program := filepath.Join(dir, "ibverbs.test")
	build(t, "test", "-c", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-tags=ibverbs", "-o", program,
		"ipoibcm/provider/ibverbs")
	img, err := vm.WithPrograms(context.Background(), base, dir, program)
	if err != nil {
		t.Fatal(err)
	}
	seg := vm.NewSegment()
	t.Cleanup(seg.Close)
	g, err := vm.Boot(context.Background(), img, vm.Config{Name: "guest", Segment: seg, MAC: mac(1), MTU: 1500,
		IPv4:    guestIPv4 + "/24",
		Modules: []string{"rdma_rxe", "ib_umad", "veth"}, NoRXE: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Kill)
	if _, err := g.Sh(patience, strings.Join([]string{
		"set -e",
		"/usr/bin/ip link add v0 type veth peer name v1",
		"echo 0 >/proc/sys/net/ipv6/conf/v0/accept_dad", "echo 0 >/proc/sys/net/ipv6/conf/v1/accept_dad",
		"/usr/bin/ip link set v0 up", "/usr/bin/ip link set v1 up",
		"rdma link add rxe0 type rxe netdev v0", "rdma link add rxe1 type rxe netdev v1",
	}, "\n")); err != nil {
		t.Fatal(err)
	}
	// Without -test.v: what it prints is what failed, and the end of it is what CI keeps.
	p, err := g.Start("ibverbs.test", "-ibverbs.a=v0", "-ibverbs.b=v1", "-test.timeout=8m")
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.Wait(8 * time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(out)
}
