package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"ipoibcm/internal/long"
)

// architectures are the values of GOARCH for which the long form vets everything and
// links the program.
var architectures = []string{"386", "amd64", "arm", "arm64", "loong64", "mips64le", "ppc64le", "riscv64", "s390x"}

// narrow is the architecture for which the short form vets too. Its int has 32 bits,
// and a number that does not fit one is the most common mistake.
const narrow = "386"

// notNarrow are the packages whose tests are not run as programs of narrow. Those of test/cni use tools of
// this architecture.
var notNarrow = slices.Concat(fromSource, []string{"test/cni"})

// emulated are the architectures whose tests run in QEMU's user mode: one where an int
// has 32 bits, one with instructions of its own for CRC-32, and one where the high
// octet of a number comes first.
var emulated = []string{"arm", "arm64", "s390x"}

// An emulation is a choice of tests that run in QEMU's user mode within seconds.
type emulation struct {
	packages []string
	// run and skip are names of tests, without Test. An empty run means all tests, an
	// empty skip leaves none out.
	run, skip []string
}

var emulations = []emulation{
	// The codecs and the machines need nothing of the kernel. Searches and random runs
	// are left out: they take minutes there, and their results do not depend on the architecture.
	{packages: []string{"./ib", "./wire/...", "./mtu", "./cm", "./rpcrdma", "./provider/softroce/engine", "./neigh",
		"./fib", "./ipoib", "./ratelimit", "./group", "./peerrpc", "./rtnl", "./sa", "./serviceid", "./verbs/...",
		"./mpa", "./mpa/sctp"},
		skip: []string{"Simulation", "RandomEvents", "Oracle", "Machine", "SessionOverSCTP", "EveryRequest",
			"EveryReply", "BothSides", "CrossingExhaustively", "InbandSparesUnknown", "ManySeeds", "Flood", "Tshark"}},
	// Of the edges only what the kernel reads and writes is tested: QEMU does not know all of netlink.
	{packages: []string{"./tun", "./provider/softroce"},
		run: []string{"KernelStructures", "KernelFeatures", "ControlMessages", "PathControlMessages", "Verify", "Complete", "NotMerged",
			"OddSegments", "MergeRefused"}},
}

// flags returns the flags of go test that choose the tests of e.
func (e emulation) flags() (flags []string) {
	if len(e.run) > 0 {
		flags = append(flags, "-run=^Test("+strings.Join(e.run, "|")+")$")
	}
	if len(e.skip) > 0 {
		flags = append(flags, "-skip=^Test("+strings.Join(e.skip, "|")+")$")
	}
	return flags
}

// vetNarrow vets everything for narrow. It is a step of the short form.
func (r *run) vetNarrow() error { return r.goFor(narrow, "vet", "./...") }

// vetAll vets everything for every architecture, and links the program.
func (r *run) vetAll() {
	dir, err := os.MkdirTemp("", "check-")
	if err != nil {
		r.note("architectures", failed, err.Error())
		return
	}
	defer os.RemoveAll(dir)
	for _, arch := range architectures {
		r.check("go vet and go build for "+arch, func() error {
			if err := r.goFor(arch, "vet", "./..."); err != nil {
				return err
			}
			return r.goFor(arch, "build", "-o", filepath.Join(dir, arch), "./cmd/ipoibcmd")
		})()
		if r.out.interrupted() {
			return
		}
	}
}

// goFor runs the go command for another architecture.
func (r *run) goFor(arch string, args ...string) error {
	fmt.Fprintf(r.out, "GOARCH=%s go %s\n", arch, strings.Join(args, " "))
	return r.show(goWith([]string{"GOARCH=" + arch}, args...))
}

// testNarrow returns the function of a step that tests packages at a place as programs of 32 bits, and runs the
// demo and doctor so unless the place has others before it. Most kernels of amd64 run such programs. Elsewhere
// the step is skipped, with CI=true too: nothing that could be installed changes that.
func (r *run) testNarrow(at place, packages []string) func() {
	return func() {
		if runtime.GOARCH != "amd64" {
			r.cannot(narrow, "this processor does not run its programs")
			return
		}
		if err := tryNarrow(); errors.Is(err, syscall.ENOEXEC) {
			r.cannot(narrow, "this kernel does not run programs of 32 bits")
			return
		} else if err != nil {
			r.note(narrow, failed, err.Error())
			return
		}
		r.testAt(at, slices.DeleteFunc(slices.Clone(packages), func(p string) bool {
			return slices.Contains(notNarrow, strings.TrimPrefix(p, "ipoibcm/"))
		}))
		if !at.behind {
			r.testAt(at, []string{"./test/netns"}, "-run=^(TestDemo|TestDoctor)")
		}
	}
}

// tryNarrow runs a program of narrow. Its error is ENOEXEC if the kernel does not run such programs.
func tryNarrow() error {
	dir, err := os.MkdirTemp("", "check-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "ib")
	build := goWith([]string{"GOARCH=" + narrow}, "test", "-c", "-o", program, "./ib")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, lastLine(string(out)))
	}
	return exec.Command(program, "-test.run=^$").Run()
}

// testEmulated runs the tests of emulations for each architecture in emulated.
func (r *run) testEmulated() {
	for _, arch := range emulated {
		var exec []string
		if arch != runtime.GOARCH {
			program, err := emulator(arch)
			if err != nil {
				r.missing("tests on "+arch, err.Error())
				continue
			}
			exec = []string{"-exec=" + program}
		}
		for _, e := range emulations {
			at := placeFor(arch)
			at.behind = true
			r.testAt(at, e.packages, append(e.flags(), exec...)...)
			if r.out.interrupted() {
				return
			}
		}
	}
}

// emulator returns QEMU's program for an architecture.
func emulator(arch string) (string, error) {
	name := "qemu-" + cmp.Or(qemuNames[arch], arch) + "-static"
	if _, err := exec.LookPath(name); err != nil {
		return "", fmt.Errorf("%s is not installed (package qemu-user-static)", name)
	}
	return name, nil
}

// qemuNames holds the architectures that QEMU calls otherwise than Go does.
var qemuNames = map[string]string{"arm64": "aarch64"}

// placeFor returns the place where the tests of an architecture run, in their short form.
func placeFor(arch string) place {
	return place{name: arch, env: []string{"GOARCH=" + arch, long.Variable + "="}}
}
