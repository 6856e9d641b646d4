package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Debian's kernel comes without siw, the kernel's iWARP. This file builds siw below the
// cache, from the kernel's source package with the compiler of the host; nothing is
// installed. siw has constants in its source where others have parameters, so there
// is one module for each choice.

// SIWVariants are the modules by name: the text of siw_main.c that is replaced, and its
// replacement. The module siw is the source unchanged.
var SIWVariants = map[string][2]string{
	"siw":      {},
	"siw-p2p":  {"const bool peer_to_peer;", "const bool peer_to_peer = 1;"},
	"siw-rev1": {"u_char mpa_version = MPA_REVISION_2;", "u_char mpa_version = MPA_REVISION_1;"},
	"siw-crc":  {"const bool mpa_crc_required;", "const bool mpa_crc_required = 1;"},
}

// siwTools are the programs that guests with siw need beyond [tools] and [sourceTools], each with its
// Debian package.
var siwTools = [][2]string{{"rdma_server", "rdmacm-utils"}, {"rdma_client", "rdmacm-utils"}}

// siwPrograms are programs of rdma-core that guests with siw have in addition.
var siwPrograms = []string{"rdma_server", "rdma_client"}

// siwVersion changes when the code of this file makes other modules or images from the
// same sources.
const siwVersion = "1"

// WithSIW returns a copy of img that also has the modules in /lib/siw.
func WithSIW(ctx context.Context, img *Image) (*Image, error) {
	if err := require(slices.Concat(sourceTools, siwTools)); err != nil {
		return nil, err
	}
	so, _ := filepath.Glob("/usr/lib/*-linux-gnu/libibverbs/libsiw-rdmav*.so")
	if len(so) != 1 {
		return nil, &MissingError{"ibverbs-providers", "the siw driver of libibverbs is not installed"}
	}
	cache, lock, err := lockCache()
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	pkg, from, err := findKernel(ctx, img.series, cache)
	if err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(cache, "tmp-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	k, err := cachedKernel(ctx, pkg, from, cache, tmp)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, "siw-"+k.version+"-"+siwVersion)
	if _, err := os.Stat(dir); err != nil {
		src, err := unpackSource(ctx, k, from, cache, tmp)
		if err != nil {
			return nil, err
		}
		if err := buildSIW(ctx, src, tmp, filepath.Join(tmp, "siw")); err != nil {
			return nil, err
		}
		if err := os.Rename(filepath.Join(tmp, "siw"), dir); err != nil {
			return nil, err
		}
	}
	out, err := img.with(siwRoot(ctx, k, filepath.Join(tmp, "root"), dir, so[0]), filepath.Join(tmp, "initrd"))
	if err != nil {
		return nil, err
	}
	whole := out.Initrd
	out.Initrd = filepath.Join(dir, "initrd")
	return out, os.Rename(whole, out.Initrd)
}

// siwRoot returns a tree at root with the modules of dir, libibverbs' driver so and the programs.
func siwRoot(ctx context.Context, k *kernel, root, dir, so string) *tree {
	r := &tree{ctx: ctx, root: root}
	for name := range SIWVariants {
		r.file(filepath.Join(dir, name+".ko"), "lib/siw/"+name+".ko")
	}
	r.file("/etc/libibverbs.d/siw.driver", "/etc/libibverbs.d/siw.driver")
	r.file(so, so)
	r.libraries(so)
	for _, p := range siwPrograms {
		path, _ := exec.LookPath(p)
		r.program(path)
	}
	crc, _ := filepath.Glob(filepath.Join(k.dir, "lib/modules", k.version, "kernel/lib/libcrc32c.ko*"))
	switch {
	case r.err != nil:
	case len(crc) != 1:
		r.err = errors.New("the kernel has no libcrc32c")
	default:
		r.err = k.copyModule(ctx, crc[0], filepath.Join(root, "lib/siw", filepath.Base(crc[0])))
	}
	return r
}

func concat(to string, from ...string) error {
	w, err := os.Create(to)
	if err != nil {
		return err
	}
	for _, f := range from {
		err = errors.Join(err, copyFile(w, f))
	}
	return errors.Join(err, w.Close())
}

func copyFile(w io.Writer, from string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(w, r)
	return err
}

// buildSIW makes the modules in out, and temporary files in tmp.
func buildSIW(ctx context.Context, src *source, tmp, out string) error {
	siw := filepath.Join(tmp, "siw-source")
	if err := os.CopyFS(siw, os.DirFS(filepath.Join(src.drivers, "siw"))); err != nil {
		return err
	}
	main := filepath.Join(siw, "siw_main.c")
	original, err := os.ReadFile(main)
	if err != nil {
		return err
	}
	if err := os.Mkdir(out, 0o755); err != nil {
		return err
	}
	for name, change := range SIWVariants {
		changed := original
		if change[0] != "" {
			s := strings.Replace(string(original), change[0], change[1], 1)
			if s == string(original) {
				return fmt.Errorf("siw_main.c has no %q", change[0])
			}
			changed = []byte(s)
		}
		if err := os.WriteFile(main, changed, 0o644); err != nil {
			return err
		}
		if err := src.module(ctx, siw, "siw.ko", filepath.Join(out, name+".ko"), "CONFIG_RDMA_SIW=m"); err != nil {
			return err
		}
	}
	return nil
}
