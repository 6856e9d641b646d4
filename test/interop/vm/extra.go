package vm

import (
	"context"
	"path/filepath"
)

// WithPrograms returns an image that is img with these programs of the host, and
// the libraries they need, in /usr/bin. It is made in dir, which is the caller's.
func WithPrograms(ctx context.Context, img *Image, dir string, programs ...string) (*Image, error) {
	r := &tree{ctx: ctx, root: filepath.Join(dir, "root")}
	for _, p := range programs {
		r.program(p)
	}
	if r.err != nil {
		return nil, r.err
	}
	extra, whole := filepath.Join(dir, "extra"), filepath.Join(dir, "initrd")
	if err := pack(r.root, extra); err != nil {
		return nil, err
	}
	// The kernel unpacks one archive after another.
	return &Image{Kernel: img.Kernel, Initrd: whole, series: img.series}, concat(whole, img.Initrd, extra)
}
