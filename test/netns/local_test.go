package netns

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// securityExample returns the example of that language in docs/security.md.
func securityExample(t *testing.T, language string) string {
	t.Helper()
	b, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```" + language + "\n(.*?)```").FindSubmatch(b)
	if m == nil {
		t.Fatalf("docs/security.md has no example for %s", language)
	}
	return string(m[1])
}

// sendAs sends a datagram from the host to the agent of another, as a user.
func (h *host) sendAs(uid int, to *host) error {
	dst, err := to.LinkLocal(underlay)
	h.seg.must(err)
	l, err := h.Link(underlay)
	h.seg.must(err)
	return h.Do(func() error { // on a thread that ends, and its user with it
		runtime.LockOSThread()
		if err := unix.Setfsuid(uid); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, []byte("not RoCE"), 0,
			&unix.SockaddrInet6{Port: 4791, Addr: dst.As16(), ZoneId: uint32(l.Attrs().Index)})
	})
}

// The rule of docs/security.md keeps users from sending as the host, and nothing else:
// the agent, also one that has changed its user, talks to its peers as before. doctor
// sees the difference.
func TestLocalUserRule(t *testing.T) {
	parallel(t)
	needNFT(t)
	s := newSegment(t, topology{})
	s.must(os.Chown(s.dir, 65533, 65533))
	a, b := s.hosts[0], s.hosts[1]
	a.run("--user", "65533")
	b.run()
	doctor := func() string {
		out, _ := a.command("doctor", "--underlay", underlay, "--name", "other0", "--control", a.path("2.sock"), "--gid",
			"fe80::dead")
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) > 1 && f[1] == "local" {
				return f[0]
			}
		}
		return out
	}
	if got := doctor(); got != "warn" {
		t.Errorf("doctor without the rule says %q, want warn", got)
	}
	malformed := b.counter("softroce", "rx_drop_malformed")
	s.eventually(patience, "a user's packet without the rule at the peer", func() error {
		if err := a.sendAs(65534, b); err != nil {
			return err
		}
		if b.counter("softroce", "rx_drop_malformed") == malformed {
			return errors.New("no malformed packet counted")
		}
		return nil
	})
	rule := strings.ReplaceAll(securityExample(t, "nft"), "ibcm }", "65533 }")
	nft := exec.Command("nft", "-f", "-")
	nft.Stdin = strings.NewReader(rule)
	out, err := a.Output(nft)
	if err != nil {
		t.Fatalf("nft: %v\n%s\n%s", err, out, rule)
	}
	if err := a.sendAs(65534, b); !errors.Is(err, unix.EPERM) {
		t.Errorf("a user's packet beside the rule: %v, want EPERM", err)
	}
	if got := doctor(); got != "ok" {
		t.Errorf("doctor with the rule says %q, want ok", got)
	}
	a.connect(b, "RC")
	a.send(b, b.v4, 1<<20)
	a.send(b, b.v6, 1<<20)
	b.send(a, a.v6, 1<<20)
}

// doctor says which rule of the firewall keeps peers out, and not when there is none.
func TestDoctorReadsTheFirewall(t *testing.T) {
	parallel(t)
	needNFT(t)
	s := newSegment(t, topology{hosts: 1})
	a := s.hosts[0]
	var all string // that doctor said last
	doctor := func() string {
		out, _ := a.command("doctor", "--underlay", underlay, "--name", "other0", "--control", a.path("2.sock"))
		all = out
		_, after, _ := strings.Cut(out, " firewall ")
		before, _, _ := strings.Cut(after, " local ")
		return strings.Join(strings.Fields(before), " ")
	}
	rules := func(text string) {
		nft := exec.Command("nft", "-f", "-")
		nft.Stdin = strings.NewReader(text + "\n")
		out, err := a.Output(nft)
		if err != nil {
			t.Fatalf("nft: %v\n%s", err, out)
		}
	}
	if got := doctor(); !strings.Contains(got, "let RoCEv2 (UDP port 4791) pass") {
		t.Errorf("without rules: %s", got)
	}
	rules(
		"table inet filter {\nchain input {\ntype filter hook input priority 0; policy drop;\nct state " +
			"established,related accept\ntcp dport 22 accept\n}\n}")
	if err := containsAll(doctor(), "drops RoCEv2 (UDP port 4791) on input, by policy of chain inet filter input",
		"udp dport 4791 accept"); err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(all) { // its tests send on the loopback device, which is closed too
		if strings.Contains(line, " offload.") && !strings.HasPrefix(line, "ok") {
			t.Errorf("a firewall is taken for an offload that does not work: %s", line)
		}
	}
	rules("add rule inet filter input iifname " + underlay + " udp dport 4791 accept")
	if got := doctor(); !strings.Contains(got, "let RoCEv2 (UDP port 4791) pass") {
		t.Errorf("with the port open: %s", got)
	}
}

// look runs ipoibcmd as a user, with a further group unless that is root, and returns what it prints, in lower
// case. The command monitor is interrupted after d.
func (h *host) look(d time.Duration, uid, gid uint32, args ...string) string {
	h.seg.Helper()
	ctx, cancel := context.WithTimeout(h.seg.ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(args, "--control", h.path(".sock"), "--json")...)
	cmd.Dir = "/"
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, Groups: []uint32{gid}}}
	}
	if args[0] == "monitor" { // it goes on until it is told to stop
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		time.AfterFunc(d, cancel)
	}
	out, err := cmd.Output()
	if err != nil && args[0] != "monitor" {
		h.seg.Errorf("%v: %v", args, err)
	}
	return strings.ToLower(string(out))
}

// A member of the socket's group looks at everything there is to see, and reads no identifier of a
// connection: it could forge a message of the CM, or of UC a packet, with those.
func TestLookersLearnNoIdentifiers(t *testing.T) {
	parallel(t)
	const group = "daemon"
	g, err := user.LookupGroup(group)
	if err != nil {
		t.Skipf("there is no group to let look: %v", err)
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		t.Fatal(err)
	}
	s, a, b, c := newTrio(t)
	config := a.path(".yaml")
	s.must(os.WriteFile(config, []byte("control_group: "+group+"\n"), 0o644))
	a.run("--config", config)
	b.run()
	c.run()
	a.connect(b, "RC")
	a.connect(c, "RC")
	for _, dir := range []string{s.dir, filepath.Dir(program)} { // made for us alone
		s.must(os.Chmod(dir, 0o711))
	}
	look := func(uid uint32, args ...string) (seen string) {
		t.Helper()
		for d := time.Second; d < patience && !strings.Contains(seen, "{"); d *= 4 {
			seen = a.look(d, uid, uint32(gid), args...)
		}
		return seen
	}
	all := 0
	for _, args := range [][]string{{"status"}, {"show", "conn"}, {"show", "neigh"}, {"show", "routes"},
		{"show", "groups"}, {"show", "stats"},
		{"explain", b.v4.String()}, {"monitor", "--since", "10m"}} {
		whole, seen := look(0, args...), look(65534, args...)
		if !strings.Contains(seen, "{") {
			t.Errorf("%v shows nothing: %q", args, seen)
		}
		for name, id := range a.identifiers() {
			if name == "UD QPN" { // every host on the link hears it
				continue
			}
			if strings.Contains(whole, id) {
				all++
			}
			if strings.Contains(seen, id) {
				t.Errorf("%v has the %s %s:\n%s", args, name, id, seen)
			}
		}
	}
	if all < 8 {
		t.Errorf("root reads %d identifiers: this shows nothing", all)
	}
}
