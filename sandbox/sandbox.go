// Package sandbox takes from this process what it does not need any more, on all of its
// threads: root, capabilities, files, and system calls.
//
// It is the second line of defence: it limits what an attacker can do who has taken over the process. There
// is no way back. A part that could not be put in force here is reported, not hidden. What is allowed was
// found by tracing the product's tests.
package sandbox

import (
	"cmp"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/psx"
)

// Options says what to take.
type Options struct {
	User *User // to go on as; nil: the present one

	// SysAdmin keeps CAP_SYS_ADMIN, which entering other network namespaces needs.
	// It matters only with User.
	SysAdmin bool

	NoLandlock bool
	ReadFiles  []string // more files to read, and whatever takes their places: all of their folders
	Names      bool     // names are looked up, with whatever takes the place of the resolver's files
	// ConnectPorts are TCP ports that may be connected to, of any host.
	ConnectPorts []uint16
	Abstract     bool   // keep access to abstract sockets of others: the service manager's may be one
	OwnFolder    bool   // User becomes the owner of the socket's folder, to remove the socket from it
	Socket       string // the control socket, to be removed in the end; may be empty

	NoSeccomp string // why there is to be no filter of system calls; empty: there is one

	became bool // the process has become another user
}

// A User is a user that the process can go on as.
type User struct {
	Name     string
	UID, GID int
}

// A Part is one part of the sandbox, as it is.
type Part struct {
	Name   string `json:"name"` // "user", "capabilities", "no_new_privs", "landlock" or "seccomp"
	On     bool   `json:"on"`
	Detail string `json:"detail"` // what it is, or why it is off
}

// found has the users that LookUp has found. With it a reload can still check the configuration, when the
// process may no longer read the files that list users.
var found sync.Map

// LookUp finds a user by name or number, and remembers the user. A number need not have a name, because
// containers have no list of users. The group then has the same number. It is an error if the user is root.
func LookUp(name string) (*User, error) {
	if u, ok := found.Load(name); ok {
		return u.(*User), nil
	}
	u, err := lookUp(name)
	if err == nil {
		found.Store(name, u)
	}
	return u, err
}

func lookUp(name string) (*User, error) {
	u, err := user.Lookup(name)
	if err != nil {
		u, err = user.LookupId(name)
	}
	if n, err2 := strconv.ParseUint(name, 10, 31); err != nil && err2 == nil {
		u, err = &user.User{Username: name, Uid: strconv.FormatUint(n, 10), Gid: strconv.FormatUint(n, 10)}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("user %q: there is no such user", name)
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	if err1 != nil || err2 != nil || uid == 0 {
		return nil, fmt.Errorf("user %s: want one that is not root", name)
	}
	return &User{Name: u.Username, UID: uid, GID: gid}, nil
}

// Enter puts the sandbox that o describes in force, and returns its parts as they are now. After an error
// the process has lost some of its rights, and perhaps rights that it needs.
func Enter(o Options) ([]Part, error) {
	runtime.LockOSThread() // seccomp asks for no_new_privs on the calling thread
	defer runtime.UnlockOSThread()
	if o.User != nil {
		if err := o.become(); err != nil {
			return nil, fmt.Errorf("go on as user %s: %w", o.User.Name, err)
		}
	}
	if err := allThreads(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return nil, fmt.Errorf("set no_new_privs: %w", err)
	}
	file, err := o.landlock()
	if err != nil {
		return nil, fmt.Errorf("landlock: %w", err)
	}
	calls, err := o.filter()
	if err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	threads, err := readThreads()
	if err != nil {
		return nil, err
	}
	if err := o.verify(threads, calls.On); err != nil {
		return nil, err
	}
	return []Part{identity(threads[0]), capabilities(threads[0]),
		{Name: "no_new_privs", On: true, Detail: "no program that is started gains rights"}, file, calls}, nil
}

// become changes user and group, and keeps only the capabilities that are needed. Before, it gives the user
// the control socket, and its folder with OwnFolder. It does nothing if the process is that user already.
func (o *Options) become() error {
	if os.Geteuid() != 0 {
		if os.Geteuid() == o.User.UID {
			return nil
		}
		return fmt.Errorf("the process is user %d: only root can do that", os.Geteuid())
	}
	if o.Socket != "" {
		if err := os.Chown(o.Socket, o.User.UID, -1); err != nil {
			return err
		}
	}
	if o.Socket != "" && o.OwnFolder {
		if err := os.Chown(filepath.Dir(o.Socket), o.User.UID, -1); err != nil {
			return err
		}
	}
	restore, err := keepCapabilities()
	if err != nil {
		return fmt.Errorf("keep capabilities: %w", err)
	}
	for _, step := range []error{ // the standard library does these on all threads
		syscall.Setgroups([]int{o.User.GID}),
		syscall.Setresgid(o.User.GID, o.User.GID, o.User.GID),
		syscall.Setresuid(o.User.UID, o.User.UID, o.User.UID),
	} {
		if step != nil {
			return step
		}
	}
	o.became = true
	if err := restore(); err != nil {
		return fmt.Errorf("restore the secure bits: %w", err)
	}
	return setCapabilities(o.keep())
}

// noSetuidFixup is SECBIT_NO_SETUID_FIXUP: capabilities stay as they are when the user changes.
const noSetuidFixup = 1 << 2

// keepCapabilities lets the process keep its capabilities when it changes its user, and returns the
// function that undoes that. Other threads use CAP_NET_ADMIN meanwhile. Without CAP_SETPCAP, which a
// container may lack, the capabilities stay permitted, but are not effective until [setCapabilities]. The
// kernel may refuse a request of another thread until then; that thread repeats the request at the kernel's
// next change.
func keepCapabilities() (restore func() error, err error) {
	bits, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err != nil {
		return nil, err
	}
	if allThreads(unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, uintptr(bits)|noSetuidFixup) == nil {
		return func() error { return allThreads(unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, uintptr(bits)) }, nil
	}
	return func() error { return nil }, allThreads(unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1)
}

// keep returns the capabilities that the process goes on with.
func (o *Options) keep() uint64 {
	caps := uint64(1) << unix.CAP_NET_ADMIN
	if o.SysAdmin {
		caps |= 1 << unix.CAP_SYS_ADMIN
	}
	return caps
}

// allThreads makes a system call on every thread. The arguments after b are zero, as prctl(2) demands. With
// cgo, psx.Syscall3 would leave them undefined.
func allThreads(nr, a, b uintptr) error {
	if _, _, errno := psx.Syscall6(nr, a, b, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// identity says which user we are.
func identity(t thread) Part {
	p := Part{Name: "user", On: t.uid != 0, Detail: fmt.Sprintf("user %d", t.uid)}
	if t.uid == 0 {
		p.Detail = "root: no user is configured"
	}
	return p
}

// capabilityNames are the names of the capabilities that the product knows.
var capabilityNames = map[int]string{unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN",
	unix.CAP_NET_RAW: "CAP_NET_RAW"}

// fewCapabilities bounds the capabilities of a process that counts as restricted. A process with more has
// what it was started with.
const fewCapabilities = 8

func capabilities(t thread) Part {
	var names []string
	for c := range 64 {
		if t.caps&(1<<c) != 0 {
			names = append(names, cmp.Or(capabilityNames[c], strconv.Itoa(c)))
		}
	}
	if len(names) > fewCapabilities {
		return Part{Name: "capabilities", Detail: fmt.Sprintf("%d of them, as it was started", len(names))}
	}
	return Part{Name: "capabilities", On: true, Detail: strings.Join(names, ", ")}
}
