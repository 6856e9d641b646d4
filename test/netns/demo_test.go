package netns

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/doctor"
)

// routeOnly is the first argument by which this program becomes another one that
// sees a kernel whose only netlink families are those every kernel with IP has.
const routeOnly = "netns.route-only"

// execRouteOnly becomes the program args[0], for which the kernel knows
// NETLINK_ROUTE and NETLINK_GENERIC and no other netlink family: one built
// without xfrm_user and nfnetlink answers so.
func execRouteOnly(args []string) {
	runtime.LockOSThread() // the filter is this thread's, and exec keeps it
	const allow, refuse = unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	equal := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	end := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	const number, family, protocol = 0, 16, 32 // in struct seccomp_data, args[0] and args[2] of a little-endian machine
	filter := []unix.SockFilter{
		load(number), equal(unix.SYS_SOCKET, 0, 6),
		load(family), equal(unix.AF_NETLINK, 0, 4),
		load(protocol), equal(unix.NETLINK_ROUTE, 2, 0), equal(unix.NETLINK_GENERIC, 1, 0),
		end(refuse), end(allow),
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		fmt.Fprintln(os.Stderr, "seccomp:", errno)
		os.Exit(1)
	}
	if _, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM); err != unix.EPROTONOSUPPORT {
		fmt.Fprintln(os.Stderr, "the filter lets NETLINK_XFRM pass:", err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stderr, "exec:", syscall.Exec(args[0], args, os.Environ()))
	os.Exit(1)
}

// The demo works, and doctor knows it, where the kernel has neither xfrm_user
// nor nfnetlink; and it leaves nothing behind.
func TestDemoNeedsRouteOnly(t *testing.T) {
	parallel(t)
	if runtime.GOARCH == "386" {
		t.Skip("sockets are opened by socketcall there, whose arguments a filter does not see")
	}
	s := newSegment(t, topology{})
	self, err := os.Executable()
	s.must(err)
	c := exec.CommandContext(s.ctx, self, routeOnly, program, "demo", "--json", "--duration", "100ms")
	c.WaitDelay = time.Second
	out, err := c.Output()
	var demo struct {
		OK    bool
		Steps []struct {
			Name, Detail string
			OK           bool
		}
	}
	if bad := json.Unmarshal(out, &demo); bad != nil {
		t.Fatalf("%v, %v\n%s", err, bad, out)
	}
	if err != nil || !demo.OK {
		t.Errorf("demo: %v: %+v", err, demo.Steps)
	}
	if left, _ := filepath.Glob(fmt.Sprintf("/run/netns/ipoibcm-%d-*", c.Process.Pid)); len(left) != 0 {
		t.Errorf("it has left %v", left)
	}
	d, _ := s.hosts[0].examined(`set -- `+self+" "+routeOnly+` "$@"`, s.hosts[0].args()...)
	if !slices.Contains(withStatus(d, control.CheckOK), doctor.Demo) {
		t.Errorf("doctor of the demo: %+v", d.Checks)
	}
}
