package hostnet

import (
	"errors"
	"ipoibcm/rtnl"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// host is a host route of ours.
func host(dst string, mtu int) rtnl.Route {
	a := netip.MustParseAddr(dst)
	return rtnl.Route{Dst: netip.PrefixFrom(a, a.BitLen()), MTU: mtu}
}

func family(r rtnl.Route) byte {
	if r.Dst.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func TestAddRouteGivesOursOtherMetrics(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	for _, dst := range []string{"10.9.0.2", "fd09::2"} {
		for _, mtu := range []int{8996, 65520, 2044} {
			r := host(dst, mtu)
			if err := d.AddRoute(r); err != nil {
				t.Fatal(err)
			}
			got := every(t, d, family(r), r.Dst.String())
			if len(got) != 1 {
				t.Fatalf("%s mtu %d: have %v, want one", dst, mtu, got)
			}
			if got[0].MTU != mtu {
				t.Errorf("%s: MTU %d, want %d", dst, got[0].MTU, mtu)
			}
			if got[0].Protocol != rtnl.Protocol {
				t.Errorf("%s: protocol %d, want %d", dst, got[0].Protocol, rtnl.Protocol)
			}
		}
	}
}

// A route that is given other metrics is there at every moment.
func TestAddRouteLeavesNoGap(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	r := host("10.9.0.2", 8996) // without a connected route, so that a gap is seen
	if err := d.AddRoute(r); err != nil {
		t.Fatal(err)
	}
	withoutGap(t, d, r.Dst.Addr(), 300, func(mtu int) error {
		r.MTU = mtu
		return d.AddRoute(r)
	})
}

// So is one of the kernel's: others to the same subnet, with worse metrics, never count.
func TestSetRouteLeavesNoGap(t *testing.T) {
	for _, family := range []struct{ option, addr, worse, to string }{
		{"4", "10.9.0.1/24", "10.9.0.0/24 via 10.9.0.254 dev ibcm0 metric 300", "10.9.0.2"},
		{"6", "fd09::1/64", "fd09::/64 via fd09::fe dev ibcm0 metric 300", "fd09::2"},
	} {
		t.Run(family.to, func(t *testing.T) {
			inNetns(t)
			d := openUp(t, newTUN(t, "ibcm0"))
			add(t, d, family.addr)
			if out, err := exec.Command("ip", append([]string{"route", "add"}, strings.Fields(family.worse)...)...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			a := netip.MustParseAddr(family.to)
			connected := find(snapshot(t, d), func(r rtnl.Route) bool { return r.Protocol == rtnl.ProtoKernel && r.Dst.Contains(a) })
			if len(connected) != 1 {
				t.Fatalf("connected routes %v, want one", connected)
			}
			r := connected[0]
			withoutGap(t, d, a, 300, func(mtu int) error {
				r.MTU = mtu
				return d.SetRoute(r)
			})
			if got := find(snapshot(t, d), to(r.Dst.String())); len(got) != 1 || got[0] != r {
				t.Errorf("connected routes %v, want %v", got, r)
			}
			if got := ipOut(t, "-"+family.option, "route", "show", "metric", "300"); !strings.Contains(got, " via ") {
				t.Errorf("the user's route is gone: %q", got)
			}
		})
	}
}

// Somebody removes a better route again and again: that the kernel has looked at it just
// then is no reason to say that there is none.
func TestLookupWhileARouteGoes(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	add(t, d, "fd09::1/64")
	a := netip.MustParseAddr("fd09::2")
	better := find(snapshot(t, d), func(r rtnl.Route) bool { return r.Protocol == rtnl.ProtoKernel && r.Dst.Contains(a) })[0]
	better.Metric = 100
	unreachable := withoutGap(t, d, a, 5000, func(int) error {
		if err := d.route(unix.RTM_NEWROUTE, unix.NLM_F_CREATE, better); err != nil {
			return err
		}
		return d.route(unix.RTM_DELROUTE, 0, better)
	})
	if unreachable > 2 { // five to nine if Lookup asks once
		t.Errorf("the kernel's first answer was taken %d times", unreachable)
	}
}

// withoutGap makes a number of changes to a route, and asks meanwhile whether to is on the link.
//
// While a route of IPv6 goes, the kernel says "unreachable" beside others that lead there (see
// [Resolver.Lookup]): in two million lookups beside 160,000 changes up to four times in a row, and
// for longer where the processor that makes the change is taken away just then. So that answer is
// counted, and fails only if it is the same a while later. A gap shows by another route, which is
// there to be found.
func withoutGap(t *testing.T, d *Device, to netip.Addr, changes int, change func(mtu int) error) (unreachable int) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		for i := range changes {
			if err := change(2000 + i); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for asked := 0; ; asked++ {
		a, err := d.Lookup(rtnl.Query{Flow: rtnl.Flow{Dst: to}})
		for again := 0; err == nil && a.Type == rtnl.Unreachable && to.Is6() && again < 10; again++ {
			unreachable++
			time.Sleep(10 * time.Millisecond)
			a, err = d.Lookup(rtnl.Query{Flow: rtnl.Flow{Dst: to}})
		}
		if err != nil {
			t.Fatal(err)
		}
		if a.OIF != d.Index() || a.Via.IsValid() {
			t.Fatalf("asked %d times, then %+v", asked, a)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("asked %d times, unreachable %d times", asked, unreachable)
			return unreachable
		default:
		}
	}
}

// Another's route stays, whatever differs in it: metric, protocol, device.
func TestAnothersRouteIsLeftAlone(t *testing.T) {
	inNetns(t)
	tun := newTUN(t, "ibcm0")
	newVeth(t, "v0", "v1")
	d := openUp(t, tun)
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	for _, theirs := range []string{
		"10.9.0.2/32 dev ibcm0 mtu lock 1400 initcwnd 50",
		"10.9.0.2/32 dev ibcm0 metric 100",
		"10.9.0.2/32 dev ibcm0 proto kernel",
		"10.9.0.2/32 dev v0",
		"blackhole 10.9.0.2/32 metric 0",
		"fd09::2/128 dev ibcm0 mtu 1400",
		"fd09::2/128 dev ibcm0 metric 100",
		"fd09::2/128 dev ibcm0 metric 3000",
		"fd09::2/128 dev v0",
		"fd09::2/128 dev v0 metric 7",
	} {
		r := host("10.9.0.2", 8996)
		if theirs[0] == 'f' {
			r = host("fd09::2", 8996)
		}
		ip(t, "route add "+theirs)
		before := allTo(t, d, r)
		if err := d.AddRoute(r); !errors.Is(err, ErrExists) {
			t.Errorf("add beside %s: %v, want ErrExists", theirs, err)
		}
		if err := d.DelRoute(r); !errors.Is(err, ErrNotFound) {
			t.Errorf("remove beside %s: %v, want ErrNotFound", theirs, err)
		}
		if after := allTo(t, d, r); after != before {
			t.Errorf("%s: now %s, was %s", theirs, after, before)
		}
		ip(t, "route del "+theirs)

		// Theirs comes when ours is there, if the kernel lets it.
		if err := d.AddRoute(r); err != nil {
			t.Fatalf("add ours where %s was: %v", theirs, err)
		}
		lets := exec.Command("ip", append([]string{"route", "append"}, strings.Fields(theirs)...)...).Run() == nil
		if err := d.DelRoute(r); err != nil {
			t.Errorf("remove ours beside %s: %v", theirs, err)
		}
		if !lets { // IPv6: it differs from ours in nothing but metrics
			continue
		}
		if after := allTo(t, d, r); after != before {
			t.Errorf("%s: now %s, was %s", theirs, after, before)
		}
		ip(t, "route del "+theirs)
	}
}

// allTo tells what routes lead to r's destination by any device.
func allTo(t *testing.T, d *Device, r rtnl.Route) string {
	t.Helper()
	return ipOut(t, "route", "show", "table", "all", r.Dst.Addr().String())
}

func TestRules(t *testing.T) {
	inNetns(t)
	d := openUp(t, newTUN(t, "ibcm0"))
	rule := rtnl.Rule{Priority: 1000, To: netip.MustParsePrefix("224.0.0.0/4"), OIF: "ibcm0", Table: 7575}
	groups := rtnl.Route{Dst: rule.To, Table: rule.Table, Type: rtnl.Multicast, MTU: 2044}
	for range 2 { // there already: no error
		if err := d.AddRule(rule); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.AddRoute(groups); err != nil {
		t.Fatal(err)
	}
	q := rtnl.Query{Flow: rtnl.Flow{Dst: netip.MustParseAddr("224.1.1.1")}}
	got, err := d.Lookup(q)
	answer{typ: rtnl.Unreachable}.check(t, "multicast of a program that names no interface", got, err)
	q.OIF = d.Index()
	got, err = d.Lookup(q)
	answer{typ: rtnl.Multicast, oif: d.Index(), mtu: 2044, table: rule.Table}.check(t, "multicast by us", got, err)

	six := rtnl.Rule{Priority: 1000, To: netip.MustParsePrefix("fd77::/16"), Table: 7}
	if err := d.AddRule(six); err != nil {
		t.Fatal(err)
	}
	if err := d.DelRule(six); err != nil {
		t.Error(err)
	}
	for _, r := range []rtnl.Rule{six, {Priority: 999, To: rule.To, OIF: rule.OIF, Table: rule.Table}} {
		if err := d.DelRule(r); !errors.Is(err, ErrNotFound) {
			t.Errorf("remove %+v: %v, want ErrNotFound", r, err)
		}
	}
	// The user's, and that of another interface of ours.
	ip(t, `
rule add to 224.0.0.0/4 oif ibcm0 lookup 7575 pref 1001
rule add to 224.0.0.0/4 oif ibcm1 lookup 7576 pref 1002 protocol 75
`)
	theirs := rule
	theirs.Priority = 1001
	if err := d.DelRule(theirs); !errors.Is(err, ErrNotFound) {
		t.Errorf("remove the user's rule: %v, want ErrNotFound", err)
	}
	if n, err := d.RemoveOurs(); n != 2 || err != nil {
		t.Errorf("removed %d (%v), want the rule and the route", n, err)
	}
	rules, err := d.dumpRules()
	if err != nil {
		t.Fatal(err)
	}
	left := map[int]bool{}
	for _, m := range rules {
		left[m.Priority] = true
	}
	for priority, want := range map[int]bool{1000: false, 1001: true, 1002: true, 32766: true} {
		if left[priority] != want {
			t.Errorf("rule %d there: %v, want %v", priority, left[priority], want)
		}
	}
}

// What the kernel has learned of destinations by other devices survives, if there is
// nothing of that family to forget by ours; IPv6 in any case.
func TestFlushLeavesOthersPathMTU(t *testing.T) {
	inNetns(t)
	tun := newTUN(t, "ibcm0")
	ourSide := tunSide(t)
	d := openUp(t, tun)
	other := openUp(t, newTUN(t, "tun1"))
	add(t, d, "10.9.0.1/24", "fd09::1/64")
	add(t, other, "10.8.0.1/24", "fd08::1/64")
	ip(t, "route add 10.77.0.0/16 via 10.8.0.254\nroute add fd77::/32 via fd08::fe\n")
	far4, far6 := netip.MustParseAddr("10.77.0.5"), netip.MustParseAddr("fd77::5")
	learn(t, tunSide(t), far4, netip.MustParseAddr("10.8.0.1"), far6, netip.MustParseAddr("fd08::1"))
	flush := func(when string) {
		t.Helper()
		if err := d.FlushExceptions(); err != nil {
			t.Fatal(err)
		}
		for _, a := range []netip.Addr{far4, far6} {
			if got := kernelMTU(t, a); got != 1400 {
				t.Errorf("%s: path MTU for %v by another device: %d, want 1400", when, a, got)
			}
		}
	}
	flush("nothing by ours")
	ip(t, "route add fd99::/32 via fd09::fe\n")
	ours := netip.MustParseAddr("fd99::5")
	for deadline := time.Now().Add(patience); kernelMTU(t, ours) != 1400; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the kernel did not learn: %d", kernelMTU(t, ours))
		}
		ourSide.Write(tooBig6(ours, netip.MustParseAddr("fd09::1"), 1400)) // not heard while ours is tentative
	}
	flush("IPv6 by ours")
	if got := kernelMTU(t, ours); got == 1400 {
		t.Errorf("path MTU for %v by ours after the flush: %d", ours, got)
	}
}

// Where /proc/sys is read-only, as in a container, only what needs it fails.
func TestReadOnlySysctls(t *testing.T) {
	inNetns(t)
	tun := newTUN(t, "ibcm0")
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		t.Skip(err)
	}
	for _, err := range []error{
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""),
		unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""),
	} {
		if err != nil {
			t.Skip(err)
		}
	}
	if f, err := os.OpenFile("/proc/sys/net/ipv4/ip_forward", os.O_WRONLY, 0); err == nil {
		f.Close()
		t.Fatal("/proc/sys is not read-only")
	}
	d, err := Open(tun)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for name, do := range map[string]func() error{
		"DisableAddrGen":  d.DisableAddrGen,
		"SetMTU":          func() error { return d.SetMTU(65520) },
		"SetUp":           func() error { return d.SetUp(true) },
		"AddAddr":         func() error { return d.AddAddr(netip.MustParsePrefix("10.9.0.1/24")) },
		"FlushExceptions": d.FlushExceptions, // there are none
		"Groups":          func() error { _, err := d.Groups(); return err },
		"RemoveOurs":      func() error { _, err := d.RemoveOurs(); return err },
	} {
		if err := do(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, do := range map[string]func() error{"IgnoreRAMTU": d.IgnoreRAMTU, "DisableIPv6": d.DisableIPv6} {
		if err := do(); !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s: %v, want EROFS", name, err)
		}
	}
}
