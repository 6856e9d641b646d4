package interop

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/test/interop/vm"
)

// demoTimeout bounds the demo in a guest, which is emulated.
const demoTimeout = 15 * time.Minute

// TestDemoInGuest runs the whole demo, and doctor, on the guest's kernel: every step
// holds, and doctor finds that run would work.
func TestDemoInGuest(t *testing.T) {
	base := image(t)
	dir := t.TempDir()
	program := filepath.Join(dir, "ipoibcmd")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", program,
		"ipoibcm/cmd/ipoibcmd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build ipoibcmd: %v\n%s", err, out)
	}
	img, err := vm.WithPrograms(t.Context(), base, dir, program)
	if err != nil {
		t.Fatal(err)
	}
	seg := vm.NewSegment()
	defer seg.Close()
	g, err := vm.Boot(context.Background(), img, vm.Config{Name: "demo", Segment: seg, MAC: mac(1), MTU: 9000,
		IPv4: guestIPv4 + "/24", NoRXE: true,
		Memory: 1024, Modules: []string{"tun", "veth"}})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Kill()
	release, err := g.Run(patience, "uname", "-r")
	if err != nil {
		t.Fatal(err)
	}
	if series := os.Getenv(kernelVariable); series != "" && !strings.HasPrefix(release, series+".") {
		t.Fatalf("the guest runs Linux %s, want %s", release, series)
	}
	t.Logf("Linux %s", strings.TrimSpace(release))
	demoHolds(t, g)
	var d control.Doctor
	guestJSON(t, g, &d, patience, "ipoibcmd", "doctor", "--underlay", "eth0", "--json")
	for _, c := range d.Checks {
		if c.Status == control.CheckFail {
			t.Errorf("doctor: %s is %s: %s", c.Name, c.Status, c.Detail)
		}
		if c.Name == "kernel" && c.Status != control.CheckOK {
			t.Errorf("doctor: %s is %s, want %s: %s", c.Name, c.Status, control.CheckOK, c.Detail)
		}
	}
}

// demoHolds runs the demo in g. It ends with the agents' logs if a step fails.
func demoHolds(t *testing.T, g *vm.VM) {
	t.Helper()
	// 64 MiB each, as elsewhere, take long here: all of it is emulated.
	out, err := g.Run(demoTimeout, "ipoibcmd", "demo", "--duration", "500ms", "--transfer", "4")
	if err != nil {
		t.Errorf("demo: %v", err)
		return
	}
	if steps := strings.Count(out, "\nok "); steps < 20 {
		t.Errorf("demo has %d steps that hold, want 20 and more:\n%s", steps, out)
	}
	if !strings.Contains(out, " steps hold, in ") {
		t.Errorf("demo does not say that all steps hold:\n%s", out)
	}
}

// guestJSON runs a command in g and reads the JSON that it prints.
func guestJSON(t *testing.T, g *vm.VM, v any, timeout time.Duration, argv ...string) {
	t.Helper()
	out, err := g.Run(timeout, argv...)
	if err != nil {
		t.Errorf("%v", err)
	}
	if i := strings.IndexByte(out, '{'); i < 0 || json.NewDecoder(strings.NewReader(out[i:])).Decode(v) != nil {
		t.Fatalf("%s prints no JSON:\n%s\n%s", strings.Join(argv, " "), out, g.Console())
	}
}
