package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ipoibcm/control"
)

// TestModuleUsers: what uses ib_cm comes in an order in which it can be unloaded, each once.
func TestModuleUsers(t *testing.T) {
	dir := t.TempDir()
	for _, h := range []string{"ib_cm/holders/rdma_cm", "ib_cm/holders/ib_ipoib", "rdma_cm/holders/rdma_ucm",
		"rdma_cm/holders/rpcrdma", "other/holders/x"} {
		if err := os.MkdirAll(filepath.Join(dir, h), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "ib_ipoib/holders/rdma_ucm"), 0o755); err != nil { // by two ways
		t.Fatal(err)
	}
	got := moduleUsers(dir, "ib_cm")
	if want := []string{"rdma_ucm", "ib_ipoib", "rpcrdma", "rdma_cm"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := moduleUsers(dir, "none"); len(got) != 0 {
		t.Errorf("a module that is not there is used by %v", got)
	}
}

// TestInfiniBandPorts: what the kernel says of each, and what cannot be done with it.
func TestInfiniBandPorts(t *testing.T) {
	var b strings.Builder
	printPorts(&b, []control.RDMADevice{{Name: "rxe0"}})
	if b.Len() != 0 {
		t.Errorf("without an InfiniBand port there is %q", &b)
	}
	printPorts(&b, []control.RDMADevice{{Name: "mlx5_0", Ports: []control.InfiniBandPort{
		{Port: 1, State: "ACTIVE", LID: 18, SMLID: 1, GID: "fe80::2:c903:0:1234", PKeys: []string{"0xffff", "0x8001"},
			Rate: "10 Gb/sec (4X SDR)"},
		{Port: 2, State: "DOWN", GID: "fe80::2:c903:0:1235"},
	}}})
	words := strings.Join(strings.Fields(b.String()), " ") // a narrow terminal has lines of its own
	for _, want := range []string{"mlx5_0/1 ACTIVE 18 1 fe80::2:c903:0:1234", "0xffff 0x8001", "10 Gb/sec (4X SDR)",
		"mlx5_0/2 DOWN 0 no subnet manager", "run --provider ibverbs --device DEVICE --port N"} {
		if !strings.Contains(words, want) {
			t.Errorf("no %q in:\n%s", want, &b)
		}
	}
}
