// Package netns shows the whole product at work in a real kernel: agents as
// processes in network namespaces, joined by veth pairs and bridges, with
// traffic of the tests' own making. It needs root, /dev/net/tun and nothing
// else, except for nft where packets are to be lost.
package netns

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
)

// program is the ipoibcmd binary under test, built by TestMain.
var program string

// namePrefix begins the name of every namespace these tests make; the process
// ID follows.
const namePrefix = "ipnt-"

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == routeOnly {
		execRouteOnly(os.Args[2:]) // does not return
	}
	flag.Parse()
	os.Exit(testMain(m))
}

// longOrRace skips a test that has no short form, but not under the race detector: make test-long has it run the
// tests of this package in their short form only.
func longOrRace(t *testing.T) {
	t.Helper()
	if !raceDetector {
		long.Only(t)
	}
}

func testMain(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run() // every test skips, and says so
	}
	if signal.Ignored(syscall.SIGHUP) { // by nohup, as agents would inherit; a handler is not inherited
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	lab.SweepKilled(namePrefix)
	defer lab.Sweep(fmt.Sprintf("%s%d-", namePrefix, os.Getpid()))
	dir, err := os.MkdirTemp("", "ipnt")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "ipoibcmd")
	build := exec.Command("go", "build", "-tags", "grpcnotrace", "-o", program, "ipoibcm/cmd/ipoibcmd")
	if raceDetector {
		build.Args = slices.Insert(build.Args, 2, "-race")
	} else {
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build ipoibcmd: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}
