package netns

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// The kernel takes all IPv6 addresses off a device whose MTU falls below 1280,
// whose IPv6 is switched off, or that goes down, and forgets what was set for it.
// The interface's own addresses and settings come back with IPv6.
func TestIPv6ComesBack(t *testing.T) {
	parallel(t)
	needIP(t)
	for _, tt := range []struct {
		name      string
		off, back func(a *host)
	}{
		{"device MTU", func(a *host) { a.ip("link set " + ifName + " mtu 1000") },
			func(a *host) { a.ip("link set " + ifName + " mtu 65520") }},
		{"disable_ipv6", func(a *host) { a.disableIPv6("1") }, func(a *host) { a.disableIPv6("0") }},
		{"link", func(a *host) { a.ip("link set " + ifName + " down") },
			func(a *host) { a.ip("link set " + ifName + " up") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parallel(t)
			s, a, b := connectedPair(t)
			before := a.ip("-6 -o addr show dev " + ifName)
			tt.off(a)
			s.eventually(patience, "IPv6 is off", func() error {
				if got := a.ip("-6 -o addr show dev " + ifName); strings.Contains(got, "inet6 "+a.v6.String()) {
					return fmt.Errorf("addresses\n%s", got)
				}
				return nil
			})
			tt.back(a)
			s.eventually(patience, "the addresses are back", func() error {
				if got := a.ip("-6 -o addr show dev " + ifName); strings.Count(got, "\n") != strings.Count(before, "\n") ||
					!strings.Contains(got, "inet6 "+a.v6.String()+"/") {
					return fmt.Errorf("addresses\n%s, want those of before:\n%s", got, before)
				}
				return nil
			})
			a.reach(b.v6)
			a.waitRoute(patience, b.v6, maxMTU)
			a.ping(b.v6, maxMTU, true)
			if mtu := a.routeMTU(neighbour(b.v6)); mtu != udMTU {
				t.Errorf("the connected route of %s has MTU %d, want %d", b.v6, mtu, udMTU)
			}
			for name, want := range map[string]string{"accept_ra_mtu": "0", "addr_gen_mode": "1"} {
				if got := a.readSysctl("net/ipv6/conf/" + ifName + "/" + name); got != want {
					t.Errorf("%s is %s, want %s", name, got, want)
				}
			}
		})
	}
}

func (h *host) readSysctl(name string) (value string) {
	h.seg.must(h.Do(func() error {
		b, err := os.ReadFile("/proc/sys/" + name)
		value = strings.TrimSpace(string(b))
		return err
	}))
	return value
}

func (h *host) disableIPv6(value string) {
	h.seg.must(h.Sysctl("net/ipv6/conf/"+ifName+"/disable_ipv6", value))
}
