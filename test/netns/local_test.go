package netns

import (
	"errors"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"testing"

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
		return unix.Sendto(fd, []byte("not RoCE"), 0, &unix.SockaddrInet6{Port: 4791, Addr: dst.As16(), ZoneId: uint32(l.Attrs().Index)})
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
		out, _ := a.command("doctor", "--underlay", underlay, "--name", "other0", "--control", a.path("2.sock"), "--gid", "fe80::dead")
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
	if err := a.sendAs(65534, b); err != nil {
		t.Errorf("a user's packet without the rule: %v, want it sent", err)
	}
	s.eventually(patience, "the user's packet at the peer", func() error {
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
	doctor := func() string {
		out, _ := a.command("doctor", "--underlay", underlay, "--name", "other0", "--control", a.path("2.sock"))
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
	rules("table inet filter {\nchain input {\ntype filter hook input priority 0; policy drop;\nct state established,related accept\ntcp dport 22 accept\n}\n}")
	if err := containsAll(doctor(), "drops RoCEv2 (UDP port 4791) on input, by policy of chain inet filter input", "udp dport 4791 accept"); err != nil {
		t.Error(err)
	}
	rules("add rule inet filter input iifname " + underlay + " udp dport 4791 accept")
	if got := doctor(); !strings.Contains(got, "let RoCEv2 (UDP port 4791) pass") {
		t.Errorf("with the port open: %s", got)
	}
}
