package vm

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"ipoibcm/test/interop/guest"
)

// SoftIBModule is the path in guests of the module that makes a soft InfiniBand port.
const SoftIBModule = "/lib/softib/softib.ko"

// softIBSeries is the series of Linux from whose Soft-RoCE the module is made.
const softIBSeries = "6.1"

// ErrNoSoftIB says that the module cannot be made from the Soft-RoCE of an image's kernel.
var ErrNoSoftIB = errors.New("the soft InfiniBand port is made of the Soft-RoCE of Linux " + softIBSeries)

// WithSoftIB returns a copy of img that also has [SoftIBModule]: the kernel's Soft-RoCE, in
// which some calls are renamed so that they reach functions of our own. It makes the copy in
// the caller's directory dir.
func WithSoftIB(ctx context.Context, img *Image, dir string) (*Image, error) {
	if err := require(sourceTools); err != nil {
		return nil, err
	}
	ko, err := softIB(ctx, img)
	if err != nil {
		return nil, err
	}
	r := &tree{ctx: ctx, root: filepath.Join(dir, "softib-root")}
	r.file(ko, SoftIBModule)
	return img.with(r, filepath.Join(dir, "softib-initrd"))
}

// softIB returns the path of the module for the kernel of img. It builds the module once and keeps it in
// the cache.
func softIB(ctx context.Context, img *Image) (string, error) {
	cache, lock, err := lockCache()
	if err != nil {
		return "", err
	}
	defer lock.Close()
	pkg, from, err := findKernel(ctx, img.series, cache)
	if err != nil {
		return "", err
	}
	if !strings.HasPrefix(pkg, "linux-image-"+softIBSeries+".") {
		return "", ErrNoSoftIB
	}
	ours, err := fs.Sub(guest.SoftIB, "softib")
	if err != nil {
		return "", err
	}
	key := sha256.New()
	for _, name := range []string{"Kbuild", "port.c"} {
		b, err := fs.ReadFile(ours, name)
		if err != nil {
			return "", err
		}
		key.Write(b)
	}
	ko := filepath.Join(cache, fmt.Sprintf("softib-%s-%x.ko", strings.TrimPrefix(pkg, "linux-image-"), key.Sum(nil)[:8]))
	if _, err := os.Stat(ko); err == nil {
		return ko, nil
	}
	tmp, err := os.MkdirTemp(cache, "tmp-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	k, err := cachedKernel(ctx, pkg, from, cache, tmp)
	if err != nil {
		return "", err
	}
	src, err := unpackSource(ctx, k, from, cache, tmp)
	if err != nil {
		return "", err
	}
	build, out := filepath.Join(tmp, "softib"), filepath.Join(tmp, "softib.ko")
	if err := errors.Join(os.CopyFS(build, os.DirFS(filepath.Join(src.drivers, "rxe"))),
		os.CopyFS(build, ours)); err != nil {
		return "", err
	}
	if err := src.module(ctx, build, "softib.ko", out); err != nil {
		return "", err
	}
	old, _ := filepath.Glob(strings.TrimSuffix(ko, filepath.Base(ko)) + "softib-*.ko")
	for _, f := range old {
		os.Remove(f)
	}
	return ko, os.Rename(out, ko)
}
