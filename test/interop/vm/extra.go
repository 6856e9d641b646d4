package vm

import (
	"context"
	"path/filepath"
)

// WithPrograms returns a copy of img that also has the given programs of the host in
// /usr/bin, and the libraries that they need. It makes the copy in the caller's
// directory dir.
func WithPrograms(ctx context.Context, img *Image, dir string, programs ...string) (*Image, error) {
	r := &tree{ctx: ctx, root: filepath.Join(dir, "root")}
	for _, p := range programs {
		r.program(p)
	}
	return img.with(r, filepath.Join(dir, "initrd"))
}

// with returns a copy of img that also has the files of r. The archive of the copy is whole.
func (img *Image) with(r *tree, whole string) (*Image, error) {
	extra := r.root + ".cpio"
	if err := r.pack(extra); err != nil {
		return nil, err
	}
	// The kernel unpacks one archive after another.
	return &Image{Kernel: img.Kernel, Initrd: whole, series: img.series}, concat(whole, img.Initrd, extra)
}
