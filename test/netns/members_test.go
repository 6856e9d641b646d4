package netns

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/long"
)

// needEtcd skips where there is no etcd to run.
func needEtcd(t *testing.T) {
	if _, err := exec.LookPath("etcd"); err == nil {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("etcd is missing (Debian: etcd-server)")
	}
	t.Skip("etcd is not installed (Debian: etcd-server)")
}

// etcd runs etcd on h, with its data in the segment's folder.
func (h *host) etcd() *daemon {
	addr := fmt.Sprintf("http://192.168.7.%d", h.i+1)
	return h.daemon("etcd", "--data-dir", filepath.Join(h.seg.dir, "etcd"), "--listen-client-urls", addr+":2379",
		"--advertise-client-urls", addr+":2379",
		"--listen-peer-urls", addr+":2380", "--initial-advertise-peer-urls", addr+":2380", "--initial-cluster",
		"default="+addr+":2380")
}

func (h *host) members() (d control.Members) {
	h.seg.Helper()
	h.seg.must(h.agent.Get(h.seg.ctx, control.PathMembers, &d))
	return d
}

// knows waits until the members that h knows are those.
func (h *host) knows(want ...string) {
	h.seg.Helper()
	h.seg.eventually(patience, fmt.Sprintf("%s knows %v", h.Name, want), func() error {
		d := h.members()
		var got []string
		for _, m := range d.Members {
			got = append(got, m.ID)
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("it knows %v: %s %s", got, d.Error, d.Unpublished)
		}
		return nil
	})
}

// Hosts that know the name of the link and of an etcd cluster reach each other on an underlay
// without multicast; when etcd is away nothing changes, and a host that starts then goes by the list
// that it had.
func TestMembersFromEtcd(t *testing.T) {
	parallel(t)
	needEtcd(t)
	s := newSegment(t, topology{hosts: 3, ipv4: true})
	a, b, c := s.hosts[0], s.hosts[1], s.hosts[2]
	etcd := a.etcd()
	run := func(h *host, id string) {
		args := h.config("state_dir: " + filepath.Join(s.dir, id) + "\netcd: {lease: 3s}\n")
		h.run(append(args, "--link", "blue", "--membership", "etcd://192.168.7.1:2379", "--member-id", id)...)
	}
	run(a, "a")
	run(b, "b")
	run(c, "c")
	for _, h := range s.hosts {
		h.knows("a", "b", "c")
	}
	for _, pair := range [][2]*host{{a, b}, {b, c}, {c, a}} {
		pair[0].connect(pair[1], "RC")
		both(pair[1], pair[0].reach)
	}
	a.showsMembers(b)
	s.eventually(patience, "the list is on disk", func() error {
		b, err := os.ReadFile(filepath.Join(s.dir, "c", ifName+".members.0"))
		if err == nil && !strings.Contains(string(b), `"id":"b"`) {
			err = fmt.Errorf("it has %d octets", len(b))
		}
		return err
	})
	s.withoutEtcd(etcd, run)
}

// showsMembers looks at what members and explain say on host a, of three, about b.
func (a *host) showsMembers(b *host) {
	t := a.seg.T
	t.Helper()
	var d control.Members
	a.seg.eventually(patience, "b and c are heard, and b has its address", func() error { // which it tells later
		d = a.members()
		for i, want := range []string{control.MemberSelf, control.MemberHeard, control.MemberHeard} {
			if got := d.Members[i].State; got != want {
				return fmt.Errorf("%s is %s, want %s", d.Members[i].ID, got, want)
			}
		}
		if !slices.Contains(d.Members[1].IPs, b.v4.String()) {
			return fmt.Errorf("b publishes %v, want %v among them", d.Members[1].IPs, b.v4)
		}
		return nil
	})
	if got, want := d.Members[1].By, "/ipoibcm/v1/blue/ffff/members/b"; got != want {
		t.Errorf("b is published by %s, want %s", got, want)
	}
	a.seg.alertsKnow(a.metrics(), true)
	if e := a.explain(b.v4); !strings.Contains(strings.Join(e.Why, "\n"), "b publishes "+b.v4.String()) {
		t.Errorf("explain says %q, want who publishes it", e.Why)
	}
}

// withoutEtcd has etcd die, a host start meanwhile, etcd come back, and the host die.
func (s *segment) withoutEtcd(etcd *daemon, run func(h *host, id string)) {
	t, a, b, c := s.T, s.hosts[0], s.hosts[1], s.hosts[2]
	etcd.kill()
	c.kill()
	run(c, "c")
	if d := c.members(); !d.Saved {
		t.Errorf("c has %d members, not of before its start, and etcd is away", len(d.Members))
	}
	c.knows("a", "b", "c")
	c.reach(b.v4)
	a.reach(b.v4)
	s.eventually(patience, "a sees that etcd fails", func() error {
		if d := a.members(); d.Error == "" || d.FailingMS == 0 {
			return fmt.Errorf("error %q", d.Error)
		}
		return nil
	})

	a.etcd()
	s.eventually(patience, "c is published again", func() error {
		if d := c.members(); !d.Published || d.Error != "" {
			return fmt.Errorf("published %v, error %q", d.Published, d.Error)
		}
		return nil
	})
	a.knows("a", "b", "c")
	const lease, within = 3 * time.Second, 5 * time.Second
	took := time.Hour
	for i := 0; i < 3 && took > within; i++ { // others may have had the processors
		if i > 0 {
			run(c, "c")
			a.knows("a", "b", "c")
		}
		c.kill()
		w := s.stopwatch()
		a.knows("a", "b")
		lasted, waited := w.read()
		took = min(took, lasted-waited)
	}
	if took > within {
		t.Errorf("c was a member for %v after its death at least, want %v at most, of which its lease is %v", took,
			within, lease)
	}
}

// What an idle link costs etcd, by etcd's own count: the messages and octets of a host in a minute, with the
// lease that hosts have by default.
func TestEtcdTraffic(t *testing.T) {
	long.Only(t)
	parallel(t)
	needEtcd(t)
	const hosts = 3
	const look = time.Minute
	s := newSegment(t, topology{hosts: hosts, ipv4: true})
	a := s.hosts[0]
	a.etcd()
	for i, h := range s.hosts {
		h.run(append(h.config("state_dir: \"\"\n"), "--link", "blue", "--membership", "etcd://192.168.7.1:2379",
			"--member-id", string(rune('a'+i)))...)
	}
	for _, h := range s.hosts {
		h.knows("a", "b", "c")
	}
	time.Sleep(5 * time.Second) // what they publish changes while addresses are checked
	count := func(name string) (sum float64) {
		text, err := a.scrape("192.168.7.1:2379")
		s.must(err)
		for line := range strings.Lines(text) {
			if f := strings.Fields(line); len(f) == 2 && (f[0] == name || strings.HasPrefix(f[0], name+"{")) {
				n, err := strconv.ParseFloat(f[1], 64)
				s.must(err)
				sum += n
			}
		}
		return sum
	}
	names := []string{"grpc_server_msg_received_total", "grpc_server_msg_sent_total", "etcd_network_client_grpc_received_bytes_total",
		"etcd_network_client_grpc_sent_bytes_total"}
	var was, got [4]float64
	for i, name := range names {
		was[i] = count(name)
	}
	time.Sleep(look)
	for i, name := range names {
		got[i] = (count(name) - was[i]) / hosts * time.Minute.Seconds() / look.Seconds()
	}
	t.Logf("of a host in a minute: %.0f messages to etcd and %.0f from it, %.0f and %.0f octets", got[0], got[1], got[2], got[3])
	if got[0] == 0 || got[0] > 60 {
		t.Errorf("%.0f messages of a host in a minute, want 1 to 60", got[0])
	}
	if got[1] > 60 {
		t.Errorf("%.0f answers to a host in a minute, want 60 at most", got[1])
	}
}

// A list in a file is read again when it changes, also when it is replaced; one that cannot be read
// changes nothing.
func TestMembersFromFile(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3, ipv4: true})
	a, b, c := s.hosts[0], s.hosts[1], s.hosts[2]
	file := filepath.Join(s.dir, "lists", "members")
	s.must(os.Mkdir(filepath.Dir(file), 0o755))
	write := func(text string) {
		s.must(os.WriteFile(file+".new", []byte(text), 0o644))
		s.must(os.Rename(file+".new", file))
	}
	write("a 192.168.7.1\nb 192.168.7.2\n")
	for _, h := range s.hosts {
		h.run(append(h.config("state_dir: \"\"\n"), "--membership", "file://"+file)...)
	}
	a.knows("a", "b")
	a.reach(b.v4)
	write("a 192.168.7.1\nb 192.168.7.2\nc 192.168.7.3\n")
	for _, h := range s.hosts {
		h.knows("a", "b", "c")
	}
	c.reach(a.v4)
	write("nonsense\n")
	s.eventually(patience, "a sees that the file cannot be read", func() error {
		if d := a.members(); !strings.Contains(d.Error, "line 1") {
			return fmt.Errorf("error %q", d.Error)
		}
		return nil
	})
	a.knows("a", "b", "c")
	b.connect(c, "RC")
	write("a 192.168.7.1\nb 192.168.7.2\n")
	b.knows("a", "b")
	b.reach(c.v4) // a connection is not ended by what the list says
	b.paired(c, "RC")
}
