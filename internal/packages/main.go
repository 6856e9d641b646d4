// Command packages builds what administrators install: a Debian package, an RPM
// package and a container image, each with the same static binary.
//
//	go run ./internal/packages                   # for this machine's architecture, into bin/packages
//	go run ./internal/packages -arch arm64       # for another
//	go run ./internal/packages -only deb,rpm     # not all of them
//
// The same commit makes the same octets: every time in them is that of the commit, or
// SOURCE_DATE_EPOCH, and nothing of the machine that builds gets in. nfpm, which
// writes the two package formats, is fetched and built into .cache; this command writes
// the image itself. The reasons are in docs/adr/0038-packages.md.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// formats are the formats in which packages can be made.
var formats = []string{"deb", "rpm", "image"}

// architectures are the architectures for which packages are made, by their names in Go.
var architectures = []string{"amd64", "arm64"}

func main() {
	var o options
	only := flag.String("only", strings.Join(formats, ","), "what to make")
	flag.StringVar(&o.arch, "arch", runtime.GOARCH, "architecture: "+strings.Join(architectures, " or "))
	flag.StringVar(&o.out, "out", filepath.Join("bin", "packages"), "where to put it")
	flag.StringVar(&o.version, "version", "", "of the product; empty: that of the commit")
	flag.StringVar(&o.cache, "cache", ".cache", "where nfpm is kept")
	flag.Parse()
	o.formats = strings.Split(*only, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := produce(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "packages:", err)
		os.Exit(1)
	}
}

// options are the options of the command line.
type options struct {
	formats                   []string
	arch, out, version, cache string
}

func (o *options) check() error {
	for _, f := range o.formats {
		if !slices.Contains(formats, f) {
			return fmt.Errorf("-only %s: want some of %s", f, strings.Join(formats, ","))
		}
	}
	if !slices.Contains(architectures, o.arch) {
		return fmt.Errorf("-arch %s: want one of %s", o.arch, strings.Join(architectures, ", "))
	}
	return nil
}

// produce makes the packages that o asks for, and prints the name of each file.
func produce(ctx context.Context, o options) error {
	if err := o.check(); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "ipoibcm-packages")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	syscall.Umask(0o022)
	b := build{ctx: ctx, options: o, dir: dir}
	if err := b.prepare(); err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	for _, f := range o.formats {
		path := filepath.Join(o.out, b.fileName(f))
		write := b.nfpm
		if f == "image" {
			write = func(_, path string) error { return b.image(path) }
		}
		if err := write(f, path); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		fmt.Println(path)
	}
	return nil
}
