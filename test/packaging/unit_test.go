// Package packaging shows that the service files hold what they promise. It asks
// systemd's own tools, where they are installed, and starts nothing.
package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const unit = "../../packaging/systemd/ipoibcm@.service"

// mostExposed is how exposed systemd may find the service, of 10.
const mostExposed = 2.5

// The sandbox of the unit is as tight as systemd's own measure asks.
func TestExposure(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed: the sandbox of the unit is not measured")
	}
	out, err := exec.Command(analyze, "security", "--offline=true", "--no-pager", unit).CombinedOutput()
	m := regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+)`).FindSubmatch(out)
	if m == nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got, err := strconv.ParseFloat(string(m[1]), 64); err != nil || got > mostExposed {
		t.Errorf("exposure %s, want at most %v", m[1], mostExposed)
	}
}

// systemd understands every line of the unit.
func TestUnitIsUnderstood(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed: the unit is not verified")
	}
	// The program it starts is not installed here: another stands for it.
	b, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "ipoibcm@test.service")
	text := strings.ReplaceAll(string(b), "/usr/bin/ipoibcmd", "/bin/true")
	text = regexp.MustCompile(`(?m)^Documentation=.*$`).ReplaceAllString(text, "")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(analyze, "verify", "--man=no", path).CombinedOutput()
	for _, line := range strings.Split(string(out), "\n") {
		if strings.Contains(line, "ipoibcm") {
			t.Errorf("%s (%v)", line, err)
		}
	}
}

// Alerts fire when they should, and only then.
func TestAlerts(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool (Debian's prometheus) is not installed: the alert rules are not tested")
	}
	if out, err := exec.Command(promtool, "test", "rules",
		"../../packaging/prometheus/ipoibcm.rules_test.yml").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
