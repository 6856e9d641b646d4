package sandbox

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/landlock-lsm/go-landlock/landlock"
	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
)

// Rights to files and directories.
const (
	toRead  = ll.AccessFSReadFile | ll.AccessFSReadDir
	toWrite = ll.AccessFSReadFile | ll.AccessFSReadDir | ll.AccessFSWriteFile | ll.AccessFSTruncate
)

// readDirs and readFiles are what a running daemon reads: what the kernel shows of devices, the named
// network namespaces, time zones, and what it needs to look up names and check certificates.
var (
	readDirs = []string{
		"/sys/class/net", "/sys/devices", "/sys/class/infiniband", "/run/netns", "/var/run/netns",
		"/usr/share/zoneinfo", "/etc/ssl", "/etc/pki", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates",
	}
	readFiles = append([]string{"/etc/localtime"}, resolverFiles...)
)

// resolverFiles are what Go's resolver reads, again whenever one of them has changed.
var resolverFiles = []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"}

// folders returns the directories of files, and of those that links among them lead to. A rule holds for an
// inode, and a file is mostly replaced by another one: only a rule for its directory holds for that too.
func folders(files []string) (dirs []string) {
	for _, f := range files {
		dirs = append(dirs, filepath.Dir(f))
		if target, err := filepath.EvalSymlinks(f); err == nil {
			dirs = append(dirs, filepath.Dir(target))
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// landlock leaves the process only the files that a running daemon needs, and no TCP but connections to
// ConnectPorts. What an older kernel cannot forbid stays allowed. With NoLandlock everything does.
func (o *Options) landlock() (Part, error) {
	if o.NoLandlock {
		return Part{Name: "landlock", Detail: "switched off"}, nil
	}
	abi, err := ll.LandlockGetABIVersion()
	if err != nil || abi < 1 {
		return Part{Name: "landlock", Detail: "the kernel has none"}, nil
	}
	rules := []landlock.Rule{
		landlock.PathAccess(toRead, slices.Concat(readDirs, folders(o.ReadFiles))...).IgnoreIfMissing(),
		landlock.PathAccess(ll.AccessFSReadFile, readFiles...).IgnoreIfMissing(),
		// A rule holds for an inode, and inodes below /proc come and go: /proc/sys/net has another one in
		// each network namespace, and a device's settings get new ones whenever they come back. So all of
		// /proc may be written here; the user and the capabilities of the process limit that.
		landlock.PathAccess(toWrite, "/proc"),
		landlock.PathAccess(ll.AccessFSReadFile|ll.AccessFSWriteFile, "/dev/net/tun").WithIoctlDev().IgnoreIfMissing(),
		landlock.PathAccess(ll.AccessFSReadFile|ll.AccessFSWriteFile, "/dev/null").IgnoreIfMissing(),
	}
	if o.Names {
		rules = append(rules, landlock.PathAccess(ll.AccessFSReadFile, folders(resolverFiles)...).IgnoreIfMissing())
	}
	if o.Socket != "" {
		rules = append(rules, landlock.PathAccess(ll.AccessFSRemoveFile, filepath.Dir(o.Socket)))
	}
	for _, port := range o.ConnectPorts {
		rules = append(rules, landlock.ConnectTCP(port))
	}
	config := landlock.V7 // with scopes for signals and abstract sockets
	if o.Abstract {
		config = landlock.V5
	}
	if err := config.BestEffort().Restrict(rules...); err != nil {
		return Part{}, err
	}
	detail := fmt.Sprintf("ABI %d: of files /proc, and what the kernel shows of devices", abi)
	if len(o.ConnectPorts) > 0 {
		detail += fmt.Sprintf("; TCP to ports %v", o.ConnectPorts)
	}
	return Part{Name: "landlock", On: true, Detail: detail}, nil
}
