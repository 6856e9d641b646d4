package packaging

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A step is one block of commands in the quick start of docs/install.md.
type step struct {
	on       string // "both", "first" or "second"
	commands string
}

// quickStart reads the commands of the quick start.
func quickStart(t *testing.T) (steps []step) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## Quick start")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, m := range regexp.MustCompile("(?s)```sh (both|first|second)\n(.*?)```").FindAllStringSubmatch(section, -1) {
		steps = append(steps, step{m[1], m[2]})
	}
	return steps
}

// quickStartWithin is what the quick start may take, installation included.
const quickStartWithin = 3 * time.Minute

// follow does what the quick start says, on the machines it says.
func follow(t *testing.T, ms [2]*machine) {
	steps := quickStart(t)
	if len(steps) < 4 {
		t.Fatalf("the quick start has %d blocks of commands, want some", len(steps))
	}
	on := map[string][]*machine{"both": ms[:], "first": ms[:1], "second": ms[1:]}
	for _, s := range steps {
		for _, m := range on[s.on] {
			began := time.Now()
			out := m.run("set -e\n" + s.commands)
			t.Logf("%s, %v\n%s\n%s", s.on, time.Since(began).Round(time.Millisecond), s.commands, out)
		}
	}
}

// The quick start leads from the package to traffic between two machines, as it is
// written; a newer package replaces the old one under traffic; and what was installed
// goes again.
func TestQuickStartUpgradeAndRemoval(t *testing.T) {
	deb := built(t, "deb")
	ms := machines(t)
	for _, m := range ms {
		m.give(deb)
	}
	began := time.Now()
	follow(t, ms)
	took := time.Since(began)
	t.Logf("from the package to traffic in %v", took.Round(100*time.Millisecond))
	if took > quickStartWithin {
		t.Errorf("the quick start took %v, want at most %v", took, quickStartWithin)
	}
	installed(ms[0])
	upgrade(t, ms)
	pods(ms[1])
	remove(ms[0])
}

// installed checks what the package set up.
func installed(m *machine) {
	for _, c := range []struct{ script, want string }{
		{"getent passwd ipoibcm | cut -d: -f7", "/usr/sbin/nologin\n"},
		{"stat -c '%U %G %a' /etc/ipoibcm", "root ipoibcm 750\n"},
		{"systemctl is-enabled ipoibcm@ibcm0", "enabled\n"},
		{"ip route show proto ipoibcm | grep -c '^10.0.0.2 dev ibcm0'", "1\n"},
		{"systemctl start systemd-networkd; networkctl list ibcm0 --no-legend | awk '{print $5}'", "unmanaged\n"},
		{"systemctl show -P User ipoibcm@ibcm0", "ipoibcm\n"},
	} {
		if got := m.run(c.script); got != c.want {
			m.Errorf("%s: got %q, want %q", c.script, got, c.want)
		}
	}
	m.run("test -s /usr/share/bash-completion/completions/ipoibcmd && ipoibcmd version && ipoibcmd doctor || true")
}

// pods attaches two pods by the plugin and the unit that the package has, and shows that
// they outlive a restart of the unit.
func pods(m *machine) {
	m.Helper()
	tools, err := filepath.Glob(root + "/.cache/cni-*/*")
	if err != nil || len(tools) < 2 {
		m.Log("cnitool and host-local are not built yet (test/cni does that): pods were not tried")
		return
	}
	for _, tool := range tools {
		m.give(tool)
	}
	m.run(`chmod +x cnitool host-local; mkdir -p net; cat > net/fabric.conflist <<END
{"cniVersion": "1.1.0", "name": "fabric", "plugins": [{"type": "ipoibcm", "master": "eth0",
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.77.0.0/24"}]]}}]}
END
systemctl start ipoibcm-node; ip netns add one; ip netns add two`)
	const cni = "NETCONFPATH=net CNI_PATH=/usr/lib/cni:/root CNI_IFNAME=net1 ./cnitool "
	m.run(cni + "add fabric /run/netns/one; " + cni + "add fabric /run/netns/two")
	m.run("ip netns exec one ping -c 3 10.77.0.3")
	const agents = "grep -lz '^/run/ipoibcm-node/' /proc/[0-9]*/cmdline | grep -v self"
	before := m.run(agents)
	m.run("systemctl restart ipoibcm-node")
	m.run("ip netns exec one ping -c 3 10.77.0.3")
	if after := m.run(agents); after != before {
		m.Errorf("agents after a restart of the unit are %q, before %q", after, before)
	}
	m.run(cni + "check fabric /run/netns/one")
	m.run(cni + "del fabric /run/netns/one; " + cni + "del fabric /run/netns/two; systemctl stop ipoibcm-node")
	m.refuses(agents)
	m.refuses("ls /run/ipoibcm-node/pods/*")
}

// gapWithin is for how long an upgrade may keep packets from passing: the unit is
// started anew.
const gapWithin = 10 * time.Second

// upgrade installs a newer package of the same program while packets flow.
func upgrade(t *testing.T, ms [2]*machine) {
	t.Helper()
	dir := t.TempDir()
	buildInto(t, dir, "-only", "deb", "-version", "1.0")
	newer := one(t, dir, "deb")
	ms[0].give(newer)
	before := ms[0].run("systemctl show -P MainPID ipoibcm@ibcm0")
	ms[1].run("ping -i 0.01 -D 10.0.0.1 > ping.log 2>&1 & echo $! > ping.pid; sleep 1")
	ms[0].run("apt-get install -y ./" + filepath.Base(newer))
	ms[1].run("sleep 3; kill -INT $(cat ping.pid); sleep 1")
	after := ms[0].run("systemctl show -P MainPID ipoibcm@ibcm0")
	if before == after {
		t.Errorf("process %s served before and after the upgrade: it was not started anew", strings.TrimSpace(after))
	}
	if got := ms[0].run("dpkg-query -W -f '${Version}' ipoibcm; ipoibcmd version"); !strings.HasPrefix(got,
		"1.0-1ipoibcmd 1.0") {
		t.Errorf("after the upgrade there is %q, want version 1.0", got)
	}
	gap, err := longestGap(ms[1].run("cat ping.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("no answers for %v during the upgrade", gap)
	if gap > gapWithin {
		t.Errorf("no answers for %v during the upgrade, want at most %v", gap, gapWithin)
	}
}

// longestGap returns the longest time between two answers in the output of ping -D.
func longestGap(log string) (gap time.Duration, err error) {
	last, answers := 0.0, 0
	for _, m := range regexp.MustCompile(`(?m)^\[([0-9.]+)\] \d+ bytes from`).FindAllStringSubmatch(log, -1) {
		at, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return 0, err
		}
		if answers++; answers > 1 {
			gap = max(gap, time.Duration((at-last)*float64(time.Second)))
		}
		last = at
	}
	if answers < 100 {
		return 0, fmt.Errorf("ping had %d answers only:\n%s", answers, log)
	}
	return gap, nil
}

// remove takes the package away, and then the settings too.
func remove(m *machine) {
	m.run("apt-get remove -y ipoibcm")
	m.refuses("ip link show ibcm0")
	m.refuses("test -e /usr/bin/ipoibcmd")
	m.run("test -e /etc/ipoibcm/ibcm0.yaml") // a removal keeps settings
	m.run("test -e /var/lib/ipoibcm")        // and lists of members
	if got := m.run("ip rule show; ip route show table all proto 75"); strings.Contains(got, "ibcm0") {
		m.Errorf("routes or rules are left:\n%s", got)
	}
	m.run("apt-get purge -y ipoibcm")
	m.refuses("test -e /etc/ipoibcm")
	m.refuses("test -e /run/ipoibcm")
	m.refuses("test -e /var/lib/ipoibcm")
	m.refuses("ls /etc/systemd/system/*.wants/ipoibcm@*")
	m.refuses("ls /etc/iproute2/rt_protos.d/ipoibcm.conf")
	if got := m.run("systemctl list-units --all --no-legend --state=active,activating,failed 'ipoibcm@*'"); got != "" {
		m.Errorf("units are left:\n%s", got)
	}
}
