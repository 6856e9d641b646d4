package packaging

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/internal/long"
)

const root = "../.."

// ci says that a missing tool is a failure.
var ci = os.Getenv("CI") == "true"

// missing skips the test, or fails it where everything should be there.
func missing(t *testing.T, format string, args ...any) {
	t.Helper()
	if ci {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// need skips the test if a program is not installed.
func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			missing(t, "%s is not installed", p)
		}
	}
}

// needRoot is need for tests that take root and the long form.
func needRoot(t *testing.T, programs ...string) {
	t.Helper()
	long.Only(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	need(t, programs...)
}

// command runs a program in the root of the repository and returns what it prints.
func command(t *testing.T, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, program, args...)
	c.Dir = root
	var said strings.Builder
	c.Stderr = &said
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", program, strings.Join(args, " "), err, out, &said)
	}
	return string(out)
}

// packages are built once, and removed in the end.
var packages struct {
	sync.Once
	dir string
}

func TestMain(m *testing.M) {
	code := m.Run()
	if packages.dir != "" {
		os.RemoveAll(packages.dir)
	}
	os.Exit(code)
}

// built returns the package of a format, deb, rpm or image.
func built(t *testing.T, format string) string {
	t.Helper()
	if os.Getenv("SOURCE_DATE_EPOCH") == "" {
		if err := exec.Command("git", "-C", root, "rev-parse", "HEAD").Run(); err != nil {
			missing(t, "this is no checkout of git, which packages take their version and time from")
		}
	}
	if nfpm, _ := filepath.Glob(root + "/.cache/nfpm-*/nfpm"); len(nfpm) == 0 && !ci && !long.Form() {
		t.Skip("nfpm is not built yet: make packages does that, and so does make test-long")
	}
	packages.Do(func() {
		dir, err := os.MkdirTemp("", "ipoibcm-packages")
		if err != nil {
			t.Fatal(err)
		}
		buildInto(t, dir)
		packages.dir = dir
	})
	if packages.dir == "" {
		t.Fatal("the packages could not be built")
	}
	return one(t, packages.dir, format)
}

// buildInto builds the packages of the tree.
func buildInto(t *testing.T, dir string, args ...string) {
	t.Helper()
	command(t, "go", append([]string{"run", "./internal/packages", "-out", dir}, args...)...)
}

// one returns the package of a format in a directory.
func one(t *testing.T, dir, format string) string {
	t.Helper()
	suffix := map[string]string{"deb": ".deb", "rpm": ".rpm", "image": ".oci.tar"}[format]
	found, err := filepath.Glob(filepath.Join(dir, "*"+suffix))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("there are %d files *%s, want one", len(found), suffix)
	}
	if err != nil {
		t.Fatal(err)
	}
	return found[0]
}
