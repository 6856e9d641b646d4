package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// name is the name of the packages.
const name = "ipoibcm"

// A build is one run: a commit, compiled for one architecture.
type build struct {
	options
	ctx   context.Context
	dir   string // scratch
	epoch time.Time
	made  []program
	files []file
}

// A program is a program that is compiled and installed.
type program struct {
	source string // its package
	to     string // where it is installed
	path   string // where it is now
	info   *buildinfo.BuildInfo
}

// programs are all programs. The first one also prints manual pages, completions and an example.
var programs = []program{
	{source: "./cmd/ipoibcmd", to: "/usr/bin/ipoibcmd"},
	{source: "./cmd/ipoibcm-cni", to: "/usr/lib/cni/ipoibcm"},
}

// A file is a file or a directory to install.
type file struct {
	from   string // where it is; empty for a directory
	to     string
	mode   os.FileMode
	config bool // an administrator may edit it
}

// prepare compiles the programs and collects all files to install.
func (b *build) prepare() (err error) {
	if b.epoch, err = b.time(); err != nil {
		return err
	}
	if b.version == "" {
		if b.version, err = b.versionOfCommit(); err != nil {
			return err
		}
	}
	if !regexp.MustCompile(`^[0-9][0-9A-Za-z.+~]*$`).MatchString(b.version) {
		return fmt.Errorf("version %q: want a digit, then digits, letters and .+~", b.version)
	}
	for _, p := range programs {
		p.path = filepath.Join(b.dir, filepath.Base(p.to))
		if err := b.compile(p.path, p.source, b.arch); err != nil {
			return err
		}
		if p.info, err = buildinfo.ReadFile(p.path); err != nil {
			return err
		}
		b.made = append(b.made, p)
		b.add(p.path, p.to, 0o755)
	}
	asker := b.made[0].path // a build of it that runs on this machine
	if b.arch != runtime.GOARCH {
		asker = filepath.Join(b.dir, "ipoibcmd-here")
		if err := b.compile(asker, programs[0].source, runtime.GOARCH); err != nil {
			return err
		}
	}
	for _, part := range []func() error{
		b.fromTree, func() error { return b.manuals(asker) }, func() error { return b.printed(asker) }, b.licences,
		b.bill, b.changes,
	} {
		if err := part(); err != nil {
			return err
		}
	}
	return nil
}

// time returns the time of all files: SOURCE_DATE_EPOCH, or that of the commit.
func (b *build) time() (time.Time, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		out, err := b.output("git", "log", "-1", "--format=%ct")
		if err != nil {
			return time.Time{}, fmt.Errorf("no commit to take the time of (set SOURCE_DATE_EPOCH): %w", err)
		}
		text = strings.TrimSpace(out)
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH %q: want seconds since 1970", text)
	}
	return time.Unix(n, 0).UTC(), nil
}

// versionOfCommit returns the version of the latest tagged release that the commit is or
// follows, as [releaseVersion] writes it. If there is none it returns a version that sorts
// before all releases, and among others of its kind by the time of the commit.
func (b *build) versionOfCommit() (string, error) {
	if tag, err := b.output("git", "describe", "--tags", "--dirty"); err == nil {
		return releaseVersion(strings.TrimSpace(tag)), nil
	}
	commit, err := b.output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*")
	if err != nil {
		return "", fmt.Errorf("no commit to name the version after (set -version): %w", err)
	}
	return "0~" + b.epoch.Format("20060102150405") + ".g" + strings.ReplaceAll(strings.TrimSpace(commit), "-", "."), nil
}

// releaseVersion returns the output of git describe in a form that package managers sort
// correctly: v1.2-3-gabc becomes 1.2+3.gabc.
func releaseVersion(tag string) string {
	version, more, _ := strings.Cut(strings.TrimPrefix(tag, "v"), "-")
	if more == "" {
		return version
	}
	return version + "+" + strings.ReplaceAll(more, "-", ".")
}

// compile builds a static program for an architecture.
func (b *build) compile(path, source, arch string) error {
	_, err := b.output("git", "rev-parse", "HEAD")
	c := exec.CommandContext(b.ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+b.version,
		"-tags", "grpcnotrace", "-o", path, fmt.Sprintf("-buildvcs=%v", err == nil), source)
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=")
	_, err = run(c)
	return err
}

// add adds the file at from to the files to install.
func (b *build) add(from, to string, mode os.FileMode) {
	b.files = append(b.files, file{from: from, to: to, mode: mode})
}

// write adds a file that holds text to the files to install.
func (b *build) write(to string, text []byte) error {
	path := filepath.Join(b.dir, "written", to)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return err
	}
	b.add(path, to, 0o644)
	return nil
}

// manuals installs the manual pages that the program writes.
func (b *build) manuals(program string) error {
	dir := filepath.Join(b.dir, "man")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if _, err := b.output(program, "man", dir); err != nil {
		return err
	}
	pages, _ := filepath.Glob(filepath.Join(dir, "*.8")) // the pattern is well formed
	if len(pages) == 0 {
		return errors.New("there are no manual pages")
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		if err := b.write("/usr/share/man/man8/"+filepath.Base(page)+".gz", packed(text)); err != nil {
			return err
		}
	}
	return nil
}

// changelog is where a Debian package has its changelog.
const changelog = "/usr/share/doc/ipoibcm/changelog.Debian.gz"

// changes installs a changelog that names the commit only: the repository has the rest.
func (b *build) changes() error {
	text := fmt.Sprintf("%s (%s-1) unstable; urgency=medium\n\n  * Built from commit %s.\n\n -- %s  %s\n",
		name, b.version, b.commit(), maintainer, b.epoch.Format(time.RFC1123Z))
	return b.write(changelog, packed([]byte(text)))
}

// commit returns the commit from which the programs were compiled.
func (b *build) commit() string { return vcs(b.made[0].info, "vcs.revision") }

// packed compresses text, without a time.
func packed(text []byte) []byte {
	var out bytes.Buffer
	z, _ := gzip.NewWriterLevel(&out, gzip.BestCompression) // the level is known
	z.Write(text)                                           // a buffer never fails
	z.Close()
	return out.Bytes()
}

// printed installs the completions and the example configuration that the program prints.
func (b *build) printed(program string) error {
	for _, p := range []struct{ to, args string }{
		{"/usr/share/bash-completion/completions/ipoibcmd", "completion bash"},
		{"/usr/share/zsh/vendor-completions/_ipoibcmd", "completion zsh"},
		{"/usr/share/fish/vendor_completions.d/ipoibcmd.fish", "completion fish"},
		{"/usr/share/doc/ipoibcm/examples/ibcm0.yaml", "init"},
	} {
		text, err := b.output(program, strings.Fields(p.args)...)
		if err != nil {
			return err
		}
		if err := b.write(p.to, []byte(text)); err != nil {
			return err
		}
	}
	return nil
}

// output runs a program and returns what it prints.
func (b *build) output(program string, args ...string) (string, error) {
	return run(exec.CommandContext(b.ctx, program, args...))
}

func run(c *exec.Cmd) (string, error) {
	var said strings.Builder
	c.Stderr = &said
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, strings.TrimSpace(said.String()))
	}
	return string(out), nil
}
