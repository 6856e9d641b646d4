package tun

import (
	"errors"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// place returns the inode of the namespace that f is in, and its name there.
func place(t *testing.T, f *File) (inode uint64, name string) {
	t.Helper()
	fd, name, err := f.Namespace()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		t.Fatal(err)
	}
	return s.Ino, name
}

// A TUN that is moved and renamed says where it is; its descriptor stays good.
func TestNamespace(t *testing.T) {
	f := open(t, Options{})
	home, err := netns.Get() // the thread is locked to it
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	before, name := place(t, f)
	if name != f.Name() {
		t.Errorf("before the move it is called %q, want %q", name, f.Name())
	}
	away, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer away.Close()
	if err := netns.Set(home); err != nil {
		t.Fatal(err)
	}
	l, err := netlink.LinkByIndex(f.Index())
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetDown(l); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(l, "elsewhere"); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetNsFd(l, int(away)); err != nil {
		t.Fatal(err)
	}
	var want unix.Stat_t
	if err := unix.Fstat(int(away), &want); err != nil {
		t.Fatal(err)
	}
	after, name := place(t, f)
	if after == before {
		t.Error("after the move it is where it was")
	}
	if after != want.Ino {
		t.Errorf("it is in namespace %d, want %d", after, want.Ino)
	}
	if name != "elsewhere" {
		t.Errorf("it is called %q, want elsewhere", name)
	}
	h, err := netlink.NewHandleAt(away)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if l, err = h.LinkByName("elsewhere"); err != nil {
		t.Fatal(err)
	}
	if err := h.LinkDel(l); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.Namespace(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the namespace of a TUN that was deleted: %v, want %v", err, os.ErrNotExist)
	}
}
