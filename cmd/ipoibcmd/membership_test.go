package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

// Where the hosts of the link are found, and what cannot be meant.
func TestMembership(t *testing.T) {
	for _, tt := range []struct{ membership, link, want string }{
		{"", "", "static [] false  0s "},
		{"static", "", "static [] false  0s "},
		{"etcd://h1", "blue", "etcd [h1:2379] false  0s "},
		{"etcd://h1:1,[fe80::1]:2,2001:db8::1/", "blue", "etcd [h1:1 [fe80::1]:2 [2001:db8::1]:2379] false  0s "},
		{"etcds://h1", "blue", "etcd [h1:2379] true  0s "},
		{"dns://a.example", "", "dns [] false a.example 0s "},
		{"dns://_i._udp.a.example?interval=10s", "", "dns [] false _i._udp.a.example 10s "},
		{"file:///etc/members", "", "file [] false  0s /etc/members"},
		{"etcd://h1", "", "link: etcd keeps the hosts of many links"},
		{"etcd://h1", "a/b", `link "a/b": want letters`},
		{"etcd://", "blue", "nothing follows ://"},
		{"etcd://h1:0", "blue", `"h1:0" is no HOST:PORT`},
		{"etcd://u:p@h1:1", "blue", "is no HOST:PORT"},
		{"etcd://h1,", "blue", `"" is no HOST:PORT`},
		{"dns://a/b", "", `"a/b" is no name of DNS`},
		{"dns://a?interval=0s", "", `interval "0s": want a duration of 1s or more`},
		{"dns://a?x=1", "", "only ?interval=30s can follow"},
		{"file://members", "", "want a whole path"},
		{"consul://a", "", "want etcd://HOST:2379"},
		{"members", "", "want etcd://HOST:2379"},
	} {
		c := defaults()
		c.Underlay, c.Membership, c.Link, c.MemberID = "eth0", tt.membership, tt.link, "me"
		s, err := c.settings()
		l := s.link
		got := fmt.Sprintf("%s %v %v %s %v %s", l.kind, l.endpoints, l.tls, l.name, l.every, l.path)
		if err == nil {
			expect.Equal(t, got, tt.want, "%q, link %q: what was read", tt.membership, tt.link)
		} else if !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q, link %q: got %q, want %q", tt.membership, tt.link, err, tt.want)
		}
	}
}

// Settings that contradict each other, or lack another, are refused by name.
func TestMembershipSettings(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"peers too", func(c *Config) { c.Peers = []string{"fe80::1"} }, "peers: membership etcd://h1 finds"},
		{"a certificate without its key", func(c *Config) { c.Etcd.Cert = "x" }, "cert and key belong together"},
		{"a user without a password", func(c *Config) { c.Etcd.User = "x" }, "user and password_file belong together"},
		{"a short lease", func(c *Config) { c.Etcd.Lease = "1s" }, `etcd.lease "1s": want 2s to 10m0s`},
		{"no lease", func(c *Config) { c.Etcd.Lease = "" }, `etcd.lease "": want`},
		{"a name that is no key", func(c *Config) { c.MemberID = "a b" }, `member_id "a b": want letters`},
		{"ibverbs", func(c *Config) { c.Provider = ibVerbs }, "provider ibverbs cannot receive the copies"},
	} {
		c := defaults()
		c.Underlay, c.Membership, c.Link, c.MemberID = "eth0", "etcd://h1", "blue", "me"
		tt.change(&c)
		if _, err := c.settings(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// What the process may still do once it is confined: read the files that the source names, connect to its
// ports, and look up names where it has some.
func TestMemberFiles(t *testing.T) {
	c := defaults()
	c.Etcd.CA, c.Etcd.Password = "/a/ca.pem", "/b/pw"
	files, ports := c.memberFiles(linkSpec{kind: fromEtcd, endpoints: []string{"h1:2379", "h2:2379", "h3:4001"}})
	if want := []string{"/a/ca.pem", "/b/pw"}; !slices.Equal(files, want) {
		t.Errorf("files %v, want %v", files, want)
	}
	if want := []uint16{2379, 4001, 53}; !slices.Equal(ports, want) {
		t.Errorf("ports %v, want %v", ports, want)
	}
	c = defaults()
	if files, ports := c.memberFiles(linkSpec{kind: fromStatic}); len(files)+len(ports) != 0 {
		t.Errorf("a static list may read %v and connect to %v, want nothing", files, ports)
	}
	for _, tt := range []struct {
		membership string
		want       bool
	}{{"static", false}, {"file:///a", false}, {"dns://a.example", true}, {"etcd://h1,10.0.0.1", true},
		{"etcd://10.0.0.1,[fd00::1]:4001", false}} {
		c.Membership, c.Link = tt.membership, "blue"
		l, err := c.parseMembership()
		if err != nil {
			t.Fatal(err)
		}
		if got := l.named(); got != tt.want {
			t.Errorf("%s looks up names: got %v, want %v", tt.membership, got, tt.want)
		}
	}
}

// The table says what is wrong first, and fits 80 columns.
func TestPrintMembers(t *testing.T) {
	d := control.Members{Link: "blue", Source: "etcd://h1:2379", Copies: true, Known: true, Saved: true, AgeMS: 90_000,
		FailingMS: 60_000, Revision: 12,
		Error: "no answer in time", Unpublished: "permission denied", Held: []string{"c"}, Members: []control.Member{
			{ID: "a", State: control.MemberSelf, GIDs: []string{"fe80::a"}, IPs: []string{},
				By: "/ipoibcm/v1/blue/ffff/members/a"},
			{ID: "b", State: control.MemberHeard, Heard: true, HeardMS: 1500,
				GIDs: []string{"::ffff:192.168.100.100", "fe80::200:ffff:c0a8:701"},
				IPs:  []string{"10.0.0.2", "fd00::2"}, UDQPN: "0x000048", By: "/ipoibcm/v1/blue/ffff/members/b"}}}
	var b strings.Builder
	printMembers(&b, &d)
	out := b.String()
	for _, want := range []string{"2 members, 1 heard", "of before the start", "revision 12",
		"! the source fails since 1.0m", "! others do not find this host: permission denied",
		"kept for a moment: c", "/ipoibcm/v1/blue/ffff/members/b", "0x000048", "1.5s"} {
		if want = strings.ReplaceAll(want, "1.0m", "60.0s"); !strings.Contains(out, want) {
			t.Errorf("%q is missing in\n%s", want, out)
		}
	}
	for line := range strings.Lines(out) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 80 {
			t.Errorf("%d characters: %s", n, line)
		}
	}
	b.Reset()
	printMembers(&b, &control.Members{})
	if want := "broadcasts go by multicast"; !strings.Contains(b.String(), want) {
		t.Errorf("without a list: %q, want %q", b.String(), want)
	}
}

// Ages alone are no change to print again.
func TestSameMembers(t *testing.T) {
	a := control.Members{AgeMS: 1, Members: []control.Member{{ID: "a", HeardMS: int64(time.Second)}}}
	b := control.Members{AgeMS: 2, Members: []control.Member{{ID: "a", HeardMS: 7}}}
	if !sameMembers(&a, &b) {
		t.Error("ages alone are a change, want none")
	}
	b.FailingMS = 5
	if sameMembers(&a, &b) {
		t.Error("a source that fails is no change, want one")
	}
	if sameMembers(nil, &b) {
		t.Error("the first list is no change, want one")
	}
}
