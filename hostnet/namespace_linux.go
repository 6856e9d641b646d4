package hostnet

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// namespaceDir is where iproute2 keeps network namespaces that have a name.
const namespaceDir = "/run/netns"

// maxNamespaces bounds how many names are looked at to find a namespace.
const maxNamespaces = 4096

// OpenNamespace opens a network namespace by its name ("ip netns list") or by a path,
// such as /proc/PID/ns/net.
func OpenNamespace(nameOrPath string) (netns.NsHandle, error) {
	path := nameOrPath
	if !strings.Contains(path, "/") {
		path = filepath.Join(namespaceDir, path)
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return ns, fmt.Errorf("open network namespace %s: %w", nameOrPath, err)
	}
	// Without this check, any other file would fail only when a thread enters it, with an error
	// that explains nothing.
	kind, err := unix.IoctlRetInt(int(ns), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		ns.Close()
		return netns.None(), fmt.Errorf("open network namespace %s: it is no network namespace", nameOrPath)
	}
	return ns, nil
}

// NamespaceName returns what people call ns: its name in /run/netns, else "net:[INODE]" as in lsns
// and /proc/PID/ns/net. It is empty if ns is the namespace of the calling thread.
func NamespaceName(ns netns.NsHandle) string {
	var s, is unix.Stat_t
	if unix.Fstat(int(ns), &s) != nil {
		return "unknown"
	}
	same := func(path string) bool {
		return unix.Stat(path, &is) == nil && is.Dev == s.Dev && is.Ino == s.Ino
	}
	if same("/proc/thread-self/ns/net") {
		return ""
	}
	names, _ := os.ReadDir(namespaceDir)
	for _, e := range names[:min(len(names), maxNamespaces)] {
		if same(filepath.Join(namespaceDir, e.Name())) {
			return e.Name()
		}
	}
	return fmt.Sprintf("net:[%d]", s.Ino)
}

// OpenIn is [Open] of the device with this name in network namespace ns. The error is
// [ErrNotFound] if there is none.
func OpenIn(ns netns.NsHandle, name string) (d *Device, err error) {
	err = InNamespace(ns, func() error {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return fmt.Errorf("device %s: %w", name, errors.Join(ErrNotFound, err))
		}
		d, err = Open(i.Index)
		return err
	})
	return d, err
}
