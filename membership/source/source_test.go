package source

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/membership"
)

// collect runs a source and returns a function that waits until what it told last is
// printed so.
func collect(t *testing.T, src membership.Source) func(want string) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	evs, done := make(chan membership.Event, 256), make(chan struct{})
	go func() {
		defer close(done)
		src.Run(ctx, func(ev membership.Event) { evs <- ev })
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	return func(want string) {
		t.Helper()
		last := "nothing"
		for end := time.After(10 * time.Second); last != want; {
			select {
			case ev := <-evs:
				last = text(ev)
			case <-end:
				t.Fatalf("it told %q, want %q", last, want)
			}
		}
	}
}

func text(ev membership.Event) string {
	switch ev := ev.(type) {
	case membership.Listed:
		var out []string
		for _, m := range ev.Members {
			out = append(out, fmt.Sprintf("%s%v", m.ID, m.GIDs))
		}
		for _, b := range ev.Bad {
			out = append(out, "bad "+b.ID)
		}
		return strings.Join(out, " ")
	case membership.Failed:
		return "failed: " + ev.Err.Error()
	}
	return fmt.Sprintf("%T", ev)
}

// A file is read again when it is written, replaced, removed, and there again; also by
// the way of a link to a folder that is exchanged, as Kubernetes does.
func TestFileIsWatched(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "members")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	want := collect(t, &File{Path: path, Every: time.Hour, Settle: time.Millisecond})
	want("failed: open " + path + ": no such file or directory")
	must(os.WriteFile(path, []byte("a fe80::1\n"), 0o600))
	want("a[fe80::1]")
	must(os.WriteFile(path+".new", []byte("a fe80::2\n"), 0o600))
	must(os.Rename(path+".new", path))
	want("a[fe80::2]")
	must(os.WriteFile(path, []byte("?\n"), 0o600))
	want("failed: " + path + `: line 1: "?": want a GID, or a name and GIDs`)
	must(os.Remove(path))
	want("failed: open " + path + ": no such file or directory")
	for i, g := range []string{"fe80::3", "fe80::4"} {
		sub := filepath.Join(dir, fmt.Sprint("v", i))
		must(os.Mkdir(sub, 0o700))
		must(os.WriteFile(filepath.Join(sub, "members"), []byte("a "+g), 0o600))
		must(os.Symlink(sub, filepath.Join(dir, "data.new")))
		must(os.Rename(filepath.Join(dir, "data.new"), filepath.Join(dir, "data")))
		if i == 0 {
			must(os.Symlink(filepath.Join(dir, "data", "members"), path))
		}
		want("a[" + g + "]")
	}
}

// Without a sign of change the file is read again after a while.
func TestFileIsPolled(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(t.TempDir(), "members") // of its folder nothing is heard
	path := filepath.Join(dir, "members")
	if err := os.WriteFile(target, []byte("a fe80::1"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	want := collect(t, &File{Path: path, Every: 20 * time.Millisecond})
	want("a[fe80::1]")
	if err := os.WriteFile(target, []byte("a fe80::2"), 0o600); err != nil {
		t.Fatal(err)
	}
	want("a[fe80::2]")
}

// A zone answers as it is set.
type zone struct {
	a, aaaa map[string]any // []string or error
	srv     any
}

func look(have any) ([]netip.Addr, error) {
	switch have := have.(type) {
	case error:
		return nil, have
	case []string:
		var out []netip.Addr
		for _, s := range have {
			out = append(out, netip.MustParseAddr(s))
		}
		return out, nil
	}
	return nil, &net.DNSError{Err: "no such host", IsNotFound: true}
}

func (z *zone) LookupNetIP(_ context.Context, network, host string) ([]netip.Addr, error) {
	if network == "ip4" {
		return look(z.a[host])
	}
	return look(z.aaaa[host])
}

func (z *zone) LookupSRV(context.Context, string, string, string) (string, []*net.SRV, error) {
	switch have := z.srv.(type) {
	case error:
		return "", nil, have
	case []string:
		var out []*net.SRV
		for _, s := range have {
			out = append(out, &net.SRV{Target: s})
		}
		return "", out, nil
	}
	return "", nil, &net.DNSError{IsNotFound: true, Err: "no such host"}
}

var errServer = errors.New("server misbehaving")

// What DNS answers, and what of it is no answer.
func TestDNSAnswers(t *testing.T) {
	type set = map[string]any
	for _, tt := range []struct {
		name, host string
		z          zone
		want       string
	}{
		{"A", "x", zone{a: set{"x": []string{"192.0.2.1", "192.0.2.2"}}},
			"192.0.2.1[::ffff:192.0.2.1] 192.0.2.2[::ffff:192.0.2.2]"},
		{"AAAA", "x", zone{aaaa: set{"x": []string{"2001:db8::1"}}}, "2001:db8::1[2001:db8::1]"},
		{"both", "x", zone{a: set{"x": []string{"192.0.2.1"}}, aaaa: set{"x": []string{"2001:db8::1"}}},
			"192.0.2.1[::ffff:192.0.2.1] 2001:db8::1[2001:db8::1]"},
		{"none", "x", zone{}, "failed: lookup : no such host"},
		{"half an answer", "x", zone{a: set{"x": []string{"192.0.2.1"}}, aaaa: set{"x": errServer}},
			"failed: server misbehaving"},
		{"SRV", "_i._udp.x", zone{srv: []string{"a.", "b.", "a.", "."},
			a: set{"a.": []string{"192.0.2.1"}, "b.": []string{"192.0.2.2"}}}, "a[::ffff:192.0.2.1] b[::ffff:192.0.2.2]"},
		{"SRV with a target that cannot be had", "_i._udp.x",
			zone{srv: []string{"a.", "b."}, a: set{"a.": []string{"192.0.2.1"}, "b.": errServer}}, "a[::ffff:192.0.2.1] bad b"},
		{"SRV with no target that can", "_i._udp.x", zone{srv: []string{"b."}, a: set{"b.": errServer}},
			"failed: server misbehaving"},
		{"SRV refused", "_i._udp.x", zone{srv: errServer}, "failed: server misbehaving"},
	} {
		d := &DNS{Host: tt.host, Resolver: &tt.z}
		if got := text(d.Look(t.Context())); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

// Who is missing in one answer is there still; in three in a row not any more.
func TestMissingInAnAnswer(t *testing.T) {
	var m missing
	listed := func(ids string) membership.Listed {
		var l membership.Listed
		for _, id := range strings.Fields(ids) {
			l.Members = append(l.Members, membership.Member{ID: id, GIDs: []ib.GID{{15: 1}}})
		}
		return l
	}
	for i, tt := range []struct{ in, want string }{
		{"a b", "a b"}, {"a", "a b"}, {"b", "b a"}, {"a", "a b"}, {"a", "a b"}, {"a", "a"}, {"a", "a"},
	} {
		l, _ := m.keep(listed(tt.in))
		var got []string
		for _, x := range l.Members {
			got = append(got, x.ID)
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("answer %d: %v, want %s", i, got, tt.want)
		}
	}
}

// A real server, and the resolver of the product.
func TestDNSServer(t *testing.T) {
	if _, err := exec.LookPath("dnsmasq"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("dnsmasq is missing (Debian: dnsmasq-base)")
		}
		t.Skip("dnsmasq is missing (Debian: dnsmasq-base)")
	}
	l, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := l.LocalAddr().(*net.UDPAddr)
	l.Close()
	cmd := exec.Command("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts",
		"--pid-file=", "--user=", "--bind-interfaces", "--listen-address=127.0.0.1", fmt.Sprintf("--port=%d", server.Port),
		"--host-record=link.test,192.0.2.1", "--host-record=link.test,2001:db8::1", "--host-record=a.test,192.0.2.7",
		"--srv-host=_ipoibcm._udp.link.test,a.test,4791", "--local=/test/")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, server.String())
	}}
	want := collect(t, &DNS{Host: "link.test.", Every: 100 * time.Millisecond, Resolver: r})
	want("192.0.2.1[::ffff:192.0.2.1] 2001:db8::1[2001:db8::1]")
	want = collect(t, &DNS{Host: "_ipoibcm._udp.link.test.", Every: 100 * time.Millisecond, Resolver: r})
	want("a.test[::ffff:192.0.2.7]")
}

// The last list that was saved is loaded, also when the write after it was cut short, and not
// for another link.
func TestStore(t *testing.T) {
	dir := t.TempDir()
	open := func(link string) *Store {
		t.Helper()
		s, err := OpenStore(dir, "ibcm0", link)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	s := open("blue")
	if _, ok := s.Load(); ok {
		t.Error("a list was loaded, want none")
	}
	for i := range 5 {
		if err := s.Save(membership.Snapshot{Revision: uint64(i),
			Members: []membership.Member{{ID: fmt.Sprint("m", i), GIDs: []ib.GID{{0xfe, 15: 1}}}}}); err != nil {
			t.Fatal(err)
		}
		got, ok := open("blue").Load()
		if !ok || got.Members[0].ID != fmt.Sprint("m", i) {
			t.Fatalf("loaded %+v, want m%d", got, i)
		}
	}
	if _, ok := open("red").Load(); ok {
		t.Error("the list of another link was loaded")
	}
	// m4 is in file 0, and its end is lost.
	if err := os.Truncate(filepath.Join(dir, "ibcm0.members.0"), 40); err != nil {
		t.Fatal(err)
	}
	again := open("blue")
	got, ok := again.Load()
	if !ok || got.Members[0].ID != "m3" {
		t.Fatalf("loaded %+v, want m3, the one before", got)
	}
	if err := again.Save(membership.Snapshot{Members: got.Members, Revision: 9}); err != nil {
		t.Fatal(err)
	}
	if got, _ := open("blue").Load(); got.Revision != 9 {
		t.Errorf("revision %d, want 9", got.Revision)
	}
}
