package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// systemd understands every line of the unit of pods.
func TestNodeUnitIsUnderstood(t *testing.T) {
	need(t, "systemd-analyze")
	text, err := os.ReadFile(root + "/packaging/systemd/ipoibcm-node.service")
	if err != nil {
		t.Fatal(err)
	}
	// The program it starts is not installed here: another stands for it.
	unit := strings.ReplaceAll(string(text), "/usr/bin/ipoibcmd", "/bin/true")
	unit = regexp.MustCompile(`(?m)^Documentation=.*$`).ReplaceAllString(unit, "")
	path := filepath.Join(t.TempDir(), "ipoibcm-node.service")
	if err := os.WriteFile(path, []byte(unit), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", path).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "ipoibcm") {
			t.Errorf("%s (%v)", line, err)
		}
	}
}
