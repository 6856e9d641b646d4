package vm

import (
	"context"
	"os"
	"path/filepath"
	"strings"
)

// sourceTools are the programs that building a module of the kernel takes beyond [tools], each with its
// Debian package.
var sourceTools = [][2]string{{"make", "make"}, {"tar", "tar"}, {"strip", "binutils"}, {"gcc-12", "gcc-12"}}

// A source is the unpacked headers and drivers from which modules of one kernel are built. It
// is kept in the cache; nothing is installed.
type source struct {
	headers string // directory of the kernel's makefile
	drivers string // directory drivers/infiniband/sw
}

// unpackSource returns the source of k from Debian's packages, downloaded once.
func unpackSource(ctx context.Context, k *kernel, from apt, cache, tmp string) (*source, error) {
	series := strings.Join(strings.SplitN(k.version, ".", 3)[:2], ".") // "6.1"
	dir := filepath.Join(cache, "source-"+k.version)
	src := &source{headers: filepath.Join(dir, "usr/src/linux-headers-"+k.version),
		drivers: filepath.Join(dir, "linux-source-"+series, "drivers/infiniband/sw")}
	if _, err := os.Stat(dir); err == nil {
		return src, nil
	}
	abi := k.version[:strings.LastIndexByte(k.version, '-')] // without "-amd64"
	kbuild := "linux-kbuild-" + abi                          // as newer kernels of Debian call it
	if _, err := from.run(ctx, "", "apt-cache", "show", kbuild); err != nil {
		kbuild = "linux-kbuild-" + series
	}
	fresh := filepath.Join(tmp, "source")
	for _, pkg := range []string{"linux-headers-" + k.version, "linux-headers-" + abi + "-common", kbuild,
		"linux-source-" + series} {
		if err := from.unpack(ctx, tmp, pkg, fresh); err != nil {
			return nil, err
		}
	}
	all := filepath.Join(fresh, "usr/src/linux-source-"+series+".tar.xz")
	if _, err := output(ctx, fresh, "tar", "-xJf", all, "linux-source-"+series+"/drivers/infiniband/sw"); err != nil {
		return nil, err
	}
	// The makefile names the place where the package would be installed.
	makefile := filepath.Join(fresh, "usr/src/linux-headers-"+k.version, "Makefile")
	text, err := os.ReadFile(makefile)
	if err != nil {
		return nil, err
	}
	moved := strings.ReplaceAll(string(text), "/usr/src/", filepath.Join(dir, "usr/src")+"/")
	if err := os.WriteFile(makefile, []byte(moved), 0o644); err != nil {
		return nil, err
	}
	if err := os.Remove(all); err != nil {
		return nil, err
	}
	return src, os.Rename(fresh, dir)
}

// module compiles the module ko in dir and writes it to out, without debugging information.
func (s *source) module(ctx context.Context, dir, ko, out string, args ...string) error {
	args = append([]string{"-s", "-C", s.headers, "M=" + dir, "CONFIG_DEBUG_INFO_BTF_MODULES=", "KCFLAGS=-w"}, args...)
	if _, err := output(ctx, dir, "make", append(args, "modules")...); err != nil {
		return err
	}
	_, err := output(ctx, dir, "strip", "--strip-debug", "-o", out, filepath.Join(dir, ko))
	return err
}
