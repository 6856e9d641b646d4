package hostnet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A namespace is found by its path, is called what it is called in /run/netns or by its
// inode, and by nothing if it is ours; devices in it are opened by name.
func TestNamespaces(t *testing.T) {
	inNetns(t)
	newTUN(t, "ibcm0")
	there, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	path := fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
	ns, err := OpenNamespace(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if !ns.Equal(there) {
		t.Errorf("%s is %v, want %v", path, ns, there)
	}
	if got := NamespaceName(ns); got != "" {
		t.Errorf("our own namespace is called %q", got)
	}
	elsewhere := make(chan string)
	go func() { elsewhere <- NamespaceName(ns) }() // on another thread, which is where it was
	if got := <-elsewhere; !strings.HasPrefix(got, "net:[") {
		t.Errorf("a namespace without a name is called %q", got)
	}
	for _, no := range []string{"no-such-name", "/proc/self/ns/mnt", "/etc/hostname", filepath.Join(t.TempDir(), "none")} {
		if _, err := OpenNamespace(no); err == nil || !strings.Contains(err.Error(), no) {
			t.Errorf("%s: %v, want an error that names it", no, err)
		}
	}
	if _, err := OpenIn(ns, "ibcm9"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a device that is not there: %v, want %v", err, ErrNotFound)
	}
	done := make(chan error)
	go func() {
		d, err := OpenIn(ns, "ibcm0")
		if err == nil {
			_, err = d.Snapshot()
			err = errors.Join(err, d.Close())
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Errorf("from another thread: %v", err)
	}
}
