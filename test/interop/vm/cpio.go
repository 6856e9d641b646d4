package vm

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// A cpio writes an archive in the "newc" form, which the kernel unpacks as its
// first root file system. An archive may follow another in one file.
type cpio struct {
	w   io.Writer
	n   int // octets written
	ino int
	err error
}

func (c *cpio) write(b []byte) {
	if c.err == nil {
		_, c.err = c.w.Write(b)
	}
	c.n += len(b)
}

func (c *cpio) pad() { c.write(make([]byte, -c.n&3)) }

// add writes one entry; mode is that of Linux, type bits included.
func (c *cpio) add(name string, mode uint32, data []byte) {
	c.ino++
	c.write(fmt.Appendf(nil, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name))
	c.pad()
	c.write(data)
	c.pad()
}

// tree writes everything below root.
func (c *cpio) tree(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		perm := uint32(info.Mode().Perm())
		switch {
		case d.IsDir():
			c.add(name, 0o040000|perm, nil)
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			c.add(name, 0o120777, []byte(to))
		default:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			c.add(name, 0o100000|perm, b)
		}
		return c.err
	})
}

// end closes the archive.
func (c *cpio) end() error {
	c.add("TRAILER!!!", 0, nil)
	c.write(make([]byte, -c.n&511))
	return c.err
}
