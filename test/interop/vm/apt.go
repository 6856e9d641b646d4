package vm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// releases maps series of Linux to the release of Debian that has them. The host's release does not.
var releases = map[string]string{"5.10": "bullseye"}

const (
	mirror  = "http://deb.debian.org/"
	keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// apt holds options that make apt's programs look at the packages of one release of
// Debian. nil means the host's release.
type apt []string

// run runs one of apt's programs in dir.
func (a apt) run(ctx context.Context, dir, program string, args ...string) (string, error) {
	return output(ctx, dir, program, append(slices.Clone(a), args...)...)
}

// unpack downloads pkg to tmp and unpacks it into the directory to. It installs nothing.
func (a apt) unpack(ctx context.Context, tmp, pkg, to string) error {
	if _, err := a.run(ctx, tmp, "apt-get", "-q", "download", pkg); err != nil {
		return err
	}
	debs, _ := filepath.Glob(filepath.Join(tmp, pkg+"_*.deb"))
	if len(debs) != 1 {
		return fmt.Errorf("apt-get download %s left %d packages", pkg, len(debs))
	}
	defer os.Remove(debs[0])
	_, err := output(ctx, tmp, "dpkg-deb", "-x", debs[0], to)
	return err
}

var dependsLine = regexp.MustCompile(`Depends: (linux-image-\S+)`)

// dependency returns the package with the kernel on which pkg, a package without files, depends.
func (a apt) dependency(ctx context.Context, pkg string) (string, error) {
	out, err := a.run(ctx, "", "apt-cache", "depends", pkg)
	if err != nil {
		return "", err
	}
	m := dependsLine.FindStringSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("apt knows no %s: run apt-get update", pkg)
	}
	return m[1], nil
}

// otherRelease returns the options for another release. It makes apt fetch the lists of that release into
// the cache, once.
func otherRelease(ctx context.Context, release, cache string) (apt, error) {
	dir := filepath.Join(cache, "apt-"+release)
	var sources strings.Builder
	for _, s := range []string{"debian " + release, "debian-security " + release + "-security"} {
		fmt.Fprintf(&sources, "deb [arch=amd64 signed-by=%s] %s%s main\n", keyring, mirror, s)
	}
	for _, d := range []string{"lists/partial", "archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	for name, text := range map[string]string{"sources.list": sources.String(), "status": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	var a apt
	for _, o := range [][2]string{
		{"Dir::Etc::sourcelist", "sources.list"}, {"Dir::Etc::sourceparts", "none"}, {"Dir::State::status", "status"},
		{"Dir::State::lists", "lists"}, {"Dir::Cache", "."},
	} {
		a = append(a, "-o", o[0]+"="+filepath.Join(dir, o[1]))
	}
	// The directory belongs to root, so that the user _apt cannot write to it.
	a = append(a, "-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none", "-o",
		"Acquire::Check-Valid-Until=false")
	done := filepath.Join(dir, "done")
	if _, err := os.Stat(done); err == nil {
		return a, nil
	}
	if _, err := a.run(ctx, "", "apt-get", "-q", "update", "--error-on=any"); err != nil {
		return nil, err
	}
	return a, os.WriteFile(done, nil, 0o644)
}
