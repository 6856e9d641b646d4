package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"ipoibcm/control"
)

// A kernelVersion is the series of a kernel, such as 5.10.
type kernelVersion struct{ major, minor int }

func (v kernelVersion) String() string { return fmt.Sprintf("%d.%d", v.major, v.minor) }

func (v kernelVersion) before(w kernelVersion) bool {
	return v.major < w.major || v.major == w.major && v.minor < w.minor
}

// parseKernel reads what uname calls a release: "5.10.0-35-amd64".
func parseKernel(release string) (v kernelVersion, ok bool) {
	major, rest, _ := strings.Cut(release, ".")
	minor := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
	a, err := strconv.ParseUint(major, 10, 16)
	b, err2 := strconv.ParseUint(minor, 10, 16)
	return kernelVersion{int(a), int(b)}, err == nil && err2 == nil
}

// leastKernel is the oldest kernel on which tests run the demo.
var leastKernel = kernelVersion{5, 10}

// kernelCosts are what does not work on a kernel older than since, the newest kernel first. The program
// uses such a feature where the kernel has it, and does without it elsewhere.
var kernelCosts = []struct {
	since kernelVersion
	cost  string
}{
	{kernelVersion{5, 7}, "an interface that is moved to another network namespace is not followed"},
	{kernelVersion{5, 0}, "no UDP_GRO: packets come in one by one, which costs most of the speed; the " +
		"interface has a carrier when the underlay has none"},
	{kernelVersion{4, 20}, "whole routing tables are read where a part would do; packets to groups of other " +
		"programs come in, and are dropped"},
	{kernelVersion{4, 18}, "no UDP_SEGMENT: packets leave one by one, which costs most of the speed; rules " +
		"that look at ports are not followed"},
}

// kernel says what is lost on an old kernel.
func (e *exam) kernel() control.Check {
	v, ok := parseKernel(e.f.Kernel)
	switch {
	case !ok:
		return skip("its version cannot be read: %q", e.f.Kernel)
	case !v.before(leastKernel):
		return okay("Linux %s; %v is the oldest that is tested", e.f.Kernel, leastKernel)
	}
	var costs []string
	for _, c := range kernelCosts {
		if v.before(c.since) {
			costs = append(costs, c.cost)
		}
	}
	lacks := ""
	if len(costs) > 0 {
		lacks = ": " + strings.Join(costs, "; ")
	}
	return warn("Linux "+leastKernel.String()+" or newer",
		"Linux %s is older than the oldest that is tested, %v%s", e.f.Kernel, leastKernel, lacks)
}
