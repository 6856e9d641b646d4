package netns

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/internal/lab"
	"ipoibcm/internal/long"
)

// oldVersions are commits whose program is a peer in these tests. They stay when the wire
// or the private data of the CM change; newer ones come in front.
var oldVersions = []string{
	"887bf67cf7c6912657057973a69d8c41d5e91a4d", // all is sent again from the first packet that is missing
	"9e8ad15467f87616ab59be14d4c75b768f7de835", // no queue in front of each peer
}

var oldProgram = sync.OnceValues(func() (string, error) { return buildOld(oldVersions[0]) })

// buildOld builds the program of a commit, if this is a clone that has it.
func buildOld(commit string) (string, error) {
	dir := filepath.Join(filepath.Dir(program), commit)
	out, err := exec.Command("git", "cat-file", "-e", commit+"^{commit}").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("no commit %.7s: not a whole clone of the repository (%w) %s", commit, err, out)
	}
	tree := filepath.Join(dir, "tree")
	for _, c := range []*exec.Cmd{
		exec.Command("mkdir", "-p", tree),
		exec.Command("git", "-C", "../..", "archive", "--output", filepath.Join(dir, "tree.tar"), commit),
		exec.Command("tar", "-x", "-f", filepath.Join(dir, "tree.tar"), "-C", tree),
		exec.Command("go", "build", "-C", tree, "-o", filepath.Join(dir, "ipoibcmd"), "./cmd/ipoibcmd"),
	} {
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w: %s", c.Args, err, out)
		}
	}
	os.RemoveAll(tree)
	return filepath.Join(dir, "ipoibcmd"), nil
}

// needOld returns the program of the version before.
func needOld(t *testing.T) string {
	t.Helper()
	p, err := oldProgram()
	if err != nil && strings.HasPrefix(err.Error(), "no commit") {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The version before and this one are peers on a wire that loses packets and has some
// overtaken: over RC, UC and UD, whichever begins, both ways, by IPv4 and IPv6.
func TestOldBesideNew(t *testing.T) {
	needRoot(t)
	for _, tt := range []struct {
		mode string
		args []string
	}{{"RC", nil}, {"UC", []string{"--receive-mtu", "4096"}}, {"UD", nil}} {
		for i, begins := range []string{"the old one begins", "the new one begins"} {
			t.Run(tt.mode+", "+begins, func(t *testing.T) {
				parallel(t)
				old := needOld(t)
				s := newSegment(t, topology{relay: &lab.Impairment{Lose: 5, Reorder: 10}})
				a, b := s.hosts[0], s.hosts[1]
				s.hosts[i].old = old
				s.start(append([]string{"--mode", strings.ToLower(tt.mode)}, tt.args...)...)
				carry(a, b, tt.mode)
			})
		}
	}
	t.Run("an older one", func(t *testing.T) {
		parallel(t)
		long.Only(t)
		needOld(t)
		old, err := buildOld(oldVersions[1])
		if err != nil {
			t.Skip(err)
		}
		s := newSegment(t, topology{relay: &lab.Impairment{Lose: 5, Reorder: 10}})
		s.hosts[1].old = old
		s.start("--mode", "rc")
		carry(s.hosts[0], s.hosts[1], "RC")
	})
}

// carry has two hosts send each other TCP.
func carry(a, b *host, mode string) {
	s := a.seg
	s.Helper()
	if mode == "UD" {
		a.reach(b.v4)
	} else {
		a.connect(b, mode)
	}
	b.reach(a.v6)
	for _, way := range []struct {
		from, to *host
		dst      netip.Addr
	}{{a, b, b.v4}, {b, a, a.v6}} {
		way.from.send(way.to, way.dst, 8<<20) // compares hashes
	}
	if mode == "UD" {
		return
	}
	a.paired(b, mode)
	for _, h := range []*host{a, b} {
		if n := h.counter("ipoib", "qp_errors"); n != 0 {
			s.Errorf("%d QPs of %s gave up", n, h.Name)
		}
		if mode != "RC" {
			continue
		}
		if h.counter("softroce", "rc_retransmits") == 0 {
			s.Errorf("%s sent nothing again: this shows nothing", h.Name)
		}
		if h.old == "" && h.counter("softroce", "rc_early") == 0 {
			s.Errorf("%s kept no packet that was early: this shows nothing", h.Name)
		}
	}
}

// Three hosts become new ones after the other, under traffic: whoever is not being
// restarted talks to the others all the time.
func TestRollingUpgrade(t *testing.T) {
	parallel(t)
	old := needOld(t)
	s := newSegment(t, topology{hosts: 3})
	for _, h := range s.hosts {
		h.old = old
	}
	s.start("--mode", "rc")
	meet := func(when string) {
		t.Helper()
		for i, h := range s.hosts {
			p := s.hosts[(i+1)%len(s.hosts)]
			h.reach(p.v4)
			h.connect(p, "RC")
			h.send(p, p.v6, 1<<20)
			if n := h.counter("ipoib", "qp_errors"); n != 0 {
				t.Errorf("%s: %d QPs of %s gave up", when, n, h.Name)
			}
		}
	}
	meet("all old")
	for i, h := range s.hosts {
		others := [2]*host{s.hosts[(i+1)%3], s.hosts[(i+2)%3]}
		ping := others[0].pinging(others[1].v4, 20*time.Millisecond)
		h.stop()
		h.old = ""
		h.run("--mode", "rc")
		meet(fmt.Sprintf("%d new", i+1))
		if ping.end(); ping.lost > 0 {
			t.Errorf("%d of %d pings between the other two were lost while %s was restarted: %v", ping.lost, ping.sent,
				h.Name, ping.last)
		}
	}
}
