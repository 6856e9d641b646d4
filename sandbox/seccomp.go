package sandbox

import (
	"fmt"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/sys/unix"
)

// calls are the system calls that a running daemon makes, found by tracing the tests of the product under
// load, faults and shutdown (docs/security.md says how), and those that Go's runtime makes now and then.
// Not every architecture has all of them.
var calls = []string{
	// Packets and waiting.
	"recvmmsg", "sendmmsg", "sendmsg", "recvmsg", "sendto", "recvfrom", "read", "write", "readv", "writev",
	"pread64", "pwrite64", "ppoll", "poll", "epoll_pwait", "epoll_wait", "epoll_ctl", "epoll_create1", "eventfd2",
	"timerfd_create", "timerfd_settime", "nanosleep", "clock_nanosleep", "clock_gettime", "futex", "pselect6",
	// Sockets.
	"bind", "connect", "accept4", "getsockname", "getpeername", "getsockopt", "setsockopt", "shutdown",
	// Files.
	"open", "openat", "close", "fstat", "stat", "lstat", "newfstatat", "statx", "getdents64", "lseek", "fcntl",
	"readlink", "readlinkat", "unlink", "unlinkat", "faccessat", "faccessat2", "statfs", "fstatfs", "dup", "dup3",
	"pipe2", "getcwd",
	// Lists of members: watched, and kept on disk.
	"inotify_init1", "inotify_add_watch", "inotify_rm_watch", "fsync",
	// Memory.
	"mmap", "munmap", "mremap", "madvise", "brk", "mprotect",
	// Threads, signals, and what Go asks.
	"exit", "exit_group", "gettid", "getpid", "tgkill", "tkill", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn",
	"sigaltstack", "restart_syscall", "sched_yield", "sched_getaffinity", "set_robust_list", "rseq", "membarrier",
	"getrandom", "getrusage", "prlimit64", "getrlimit", "uname", "sysinfo", "getuid", "geteuid", "getgid",
	"getegid", "getgroups", "capget", "prctl", "arch_prctl", "set_tid_address", "getcpu",
	// The names of the same calls where a word has 32 bits. On 386 all calls on sockets are one call,
	// whose address family a filter does not see.
	"socketcall", "mmap2", "_llseek", "fcntl64", "fstat64", "stat64", "lstat64", "fstatat64", "statfs64",
	"fstatfs64", "ugetrlimit", "ppoll_time64", "pselect6_time64", "futex_time64", "clock_gettime64",
	"clock_nanosleep_time64", "timerfd_settime64", "recvmmsg_time64", "getuid32", "geteuid32", "getgid32",
	"getegid32", "getgroups32", "set_thread_area", "get_thread_area", "sigreturn", "send", "recv",
	// Network namespaces that the interface is moved to. The kernel demands CAP_SYS_ADMIN, which a
	// configured user has only with [Options.SysAdmin].
	"setns",
}

// families are the address families of the sockets that may be opened.
var families = []uint64{unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK, unix.AF_UNIX}

// Requests of ioctl that put words into a terminal's mouth.
const (
	tiocLinux = 0x541c
	tiocSTI   = unix.TIOCSTI
)

// policy returns the filter: a system call that is not on the list fails with EPERM. Threads may be
// started, processes not.
func policy() (seccomp.Policy, error) {
	info, err := arch.GetInfo("")
	if err != nil {
		return seccomp.Policy{}, err
	}
	group := seccomp.SyscallGroup{Action: seccomp.ActionAllow}
	for _, name := range calls {
		if _, ok := info.SyscallNames[name]; ok {
			group.Names = append(group.Names, name)
		}
	}
	conditional := func(name string, c ...seccomp.Condition) {
		group.NamesWithCondtions = append(group.NamesWithCondtions, seccomp.NameWithConditions{Name: name, Conditions: c})
	}
	for _, f := range families {
		conditional("socket", seccomp.Condition{Argument: 0, Operation: seccomp.Equal, Value: f})
	}
	conditional("clone", seccomp.Condition{Argument: 0, Operation: seccomp.BitsSet, Value: unix.CLONE_THREAD})
	conditional("ioctl", seccomp.Condition{Argument: 1, Operation: seccomp.NotEqual, Value: tiocSTI},
		seccomp.Condition{Argument: 1, Operation: seccomp.NotEqual, Value: tiocLinux})
	// A C library to which clone3 fails with ENOSYS starts threads by clone, whose flags the filter can
	// see.
	none := seccomp.SyscallGroup{Names: []string{"clone3"}, Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS)}
	return seccomp.Policy{DefaultAction: seccomp.ActionErrno, Syscalls: []seccomp.SyscallGroup{group, none}}, nil
}

// filter filters the system calls of all threads, unless NoSeccomp says why not.
func (o *Options) filter() (Part, error) {
	if o.NoSeccomp != "" {
		return Part{Name: "seccomp", Detail: o.NoSeccomp}, nil
	}
	if !seccomp.Supported() {
		return Part{Name: "seccomp", Detail: "the kernel has none"}, nil
	}
	p, err := policy()
	if err != nil {
		return Part{Name: "seccomp", Detail: err.Error()}, nil // no table for this architecture
	}
	if err := seccomp.LoadFilter(seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: p}); err != nil {
		return Part{}, err
	}
	return Part{Name: "seccomp", On: true,
		Detail: fmt.Sprintf("%d system calls are allowed", len(p.Syscalls[0].Names)+3)}, nil
}
