// Package ownnet runs the tests of a package in a network namespace of their own. All
// processes of a host share UDP port 4791 of the loopback device: without namespaces
// packets of one package's tests would reach another's that run at the same time.
//
// It is for tests.
package ownnet

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
)

// variable is the environment variable with the PID of the process that made the namespace.
const variable = "IPOIBCM_OWN_NETNS"

// Have reports whether this process has a namespace of its own. It has none if it was
// started without root.
func Have() bool { return os.Getenv(variable) != "" }

// Main is for TestMain. It starts the test program again in a new namespace, so that all
// its threads are there, sets the loopback device up and calls prepare, which may be nil,
// with it. Without root, or if no namespace can be made, it runs the tests in the present
// namespace, without preparing anything.
func Main(m *testing.M, prepare func(lo netlink.Link) error) {
	if !Have() && os.Geteuid() == 0 {
		err := again()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			os.Exit(max(1, exit.ExitCode())) // -1 if a signal ended it
		}
		if err == nil {
			os.Exit(0)
		}
		fmt.Fprintln(os.Stderr, "no namespace of our own:", err)
	}
	if os.Getenv(variable) == strconv.Itoa(os.Getppid()) { // not in a fuzzing worker
		if err := up(prepare); err != nil {
			fmt.Fprintln(os.Stderr, "loopback:", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// again runs this program in a new namespace.
func again() error {
	runtime.LockOSThread() // the child dies with this thread
	defer runtime.UnlockOSThread()
	c := exec.Command("/proc/self/exe", os.Args[1:]...)
	c.Env = append(os.Environ(), variable+"="+strconv.Itoa(os.Getpid()))
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	return c.Run()
}

func up(prepare func(lo netlink.Link) error) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil || prepare == nil {
		return err
	}
	return prepare(lo)
}
