//go:build !noetcd

package etcd

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"ipoibcm/ib"
	"ipoibcm/internal/ownnet"
	"ipoibcm/membership"
)

// A server is one etcd process on the loopback device.
type server struct {
	t              *testing.T
	dir            string
	client, peer   string
	cmd            *exec.Cmd
	scheme         string
	extra          []string
	administration *clientv3.Client
}

// newServer starts etcd, or skips the test where there is none.
func newServer(t *testing.T, extra ...string) *server { return newServerWith(t, nil, extra...) }

// newServerWith starts one that talks TLS to clients, as config does, unless that is nil.
func newServerWith(t *testing.T, config *tls.Config, extra ...string) *server {
	t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("etcd is missing (Debian: etcd-server)")
		}
		t.Skip("etcd is missing (Debian: etcd-server)")
	}
	s := &server{t: t, dir: t.TempDir(), client: freePort(t), peer: freePort(t), scheme: "http://", extra: extra}
	if config != nil {
		s.scheme = "https://"
	}
	s.start()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.scheme + s.client}, TLS: config,
		Logger: zap.NewNop(), DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	s.administration = c
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := c.Get(ctx, "ready"); err != nil {
		t.Fatalf("etcd did not start: %v", err)
	}
	return s
}

// TestMain gives the tests a network namespace of their own: nobody else takes a port there while its
// server is dead.
func TestMain(m *testing.M) { ownnet.Main(m, nil) }

// firstPort is below what the kernel gives to who asks for any.
const firstPort = 20000

var ports atomic.Int32 // taken so far

func freePort(t *testing.T) string {
	if ownnet.Have() {
		return fmt.Sprintf("127.0.0.1:%d", firstPort+ports.Add(1))
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (s *server) start() {
	s.t.Helper()
	log, err := os.Create(filepath.Join(s.dir, "log"))
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	s.cmd = exec.Command("etcd",
		append([]string{"--data-dir", filepath.Join(s.dir, "data"), "--listen-client-urls", s.scheme + s.client,
			"--advertise-client-urls", s.scheme + s.client, "--listen-peer-urls", "http://" + s.peer,
			"--initial-advertise-peer-urls", "http://" + s.peer, "--initial-cluster", "default=http://" + s.peer,
			"--unsafe-no-fsync"}, s.extra...)...)
	if out, _ := exec.Command("etcd", "--version").Output(); strings.Contains(string(out), "3.4.") {
		s.cmd.Args = slices.DeleteFunc(s.cmd.Args, func(a string) bool { return a == "--unsafe-no-fsync" })
	}
	s.cmd.Stdout, s.cmd.Stderr = log, log
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	cmd := s.cmd
	s.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
}

// kill ends the server as a crash does.
func (s *server) kill() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// A host is a source with a tracker of what it tells.
type host struct {
	t    *testing.T
	src  membership.Publisher
	evs  chan membership.Event
	tr   *membership.Tracker
	stop context.CancelFunc
	done chan struct{}
}

const testLease = 2 * time.Second

func (s *server) config(id string) Config {
	return Config{Endpoints: []string{s.client}, Link: "blue", PKey: 0x8001, ID: id, Lease: testLease}
}

func newHost(t *testing.T, c Config, gid string) *host {
	t.Helper()
	src, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	h := &host{t: t, src: src, evs: make(chan membership.Event, 1024), stop: stop, done: make(chan struct{}),
		tr: membership.NewTracker(membership.Options{Source: src.Name(), Grace: testLease / 2})}
	if gid != "" {
		src.Publish(member(t, gid))
	}
	go func() {
		defer close(h.done)
		src.Run(ctx, func(ev membership.Event) { h.evs <- ev })
	}()
	t.Cleanup(h.end)
	return h
}

// end stops the host, which says goodbye.
func (h *host) end() {
	h.stop()
	<-h.done
}

func member(t *testing.T, gid string) membership.Member {
	g, err := ib.ParseGID(gid)
	if err != nil {
		t.Fatal(err)
	}
	return membership.Member{GIDs: []ib.GID{g}, QPN: 0x123}
}

// want waits until the members are those, by name.
func (h *host) want(ids string) membership.Snapshot {
	h.t.Helper()
	return h.until(ids, func(s membership.Snapshot) bool { return names(s) == ids })
}

func (h *host) until(what string, good func(membership.Snapshot) bool) membership.Snapshot {
	h.t.Helper()
	end := time.After(time.Minute) // others may want the processors
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !good(h.tr.Snapshot()) {
		select {
		case ev := <-h.evs:
			h.tr.Step(time.Now(), ev)
		case <-tick.C:
			h.tr.Expire(time.Now())
		case <-end:
			h.t.Fatalf("the list is %+v, want %s", h.tr.Snapshot(), what)
		}
	}
	return h.tr.Snapshot()
}

// keeps looks for so long, and fails when the list becomes another.
func (h *host) keeps(ids string, d time.Duration) {
	h.t.Helper()
	for end := time.After(d); ; {
		select {
		case ev := <-h.evs:
			h.tr.Step(time.Now(), ev)
		case <-end:
			return
		}
		if got := names(h.tr.Snapshot()); got != ids {
			h.t.Fatalf("the list became %q, want %q", got, ids)
		}
	}
}

func names(s membership.Snapshot) string {
	var ids []string
	for _, m := range s.Members {
		ids = append(ids, m.ID)
	}
	return strings.Join(ids, " ")
}

// Hosts find each other, one that leaves is gone at once, and one that dies with its lease.
func TestHostsComeAndGo(t *testing.T) {
	t.Parallel() // it waits most of the time
	s := newServer(t)
	a := newHost(t, s.config("a"), "fe80::a")
	leaves := s.config("b")
	leaves.Lease = time.Minute
	b := newHost(t, leaves, "fe80::b")
	a.want("a b")
	got := b.want("a b")
	if want := "/ipoibcm/v1/blue/8001/members/a"; got.Members[0].By != want {
		t.Errorf("a was published by %q, want %q", got.Members[0].By, want)
	}
	a.until("published", func(s membership.Snapshot) bool { return s.Published })
	began := time.Now()
	b.end()
	a.want("a")
	if took := time.Since(began); took > leaves.Lease/2 {
		t.Errorf("who said goodbye was gone after %v, want before a lease of %v ends", took, leaves.Lease)
	}

	ctx := t.Context()
	put := func(key, value string, opts ...clientv3.OpOption) {
		t.Helper()
		if _, err := s.administration.Put(ctx, "/ipoibcm/v1/blue/8001/members/"+key, value, opts...); err != nil {
			t.Fatal(err)
		}
	}
	// Of a host that died its key is left, under a lease that nobody renews. Others may have
	// the processors: who watches late watches late only sometimes.
	const lease, within = 2 * time.Second, 4 * time.Second
	took := time.Hour
	for i := 0; i < 4 && took > within; i++ {
		l, err := s.administration.Grant(ctx, int64(lease/time.Second))
		if err != nil {
			t.Fatal(err)
		}
		put("dead", `{"v":1,"gids":["fe80::d"]}`, clientv3.WithLease(l.ID))
		a.want("a dead")
		began = time.Now()
		a.want("a")
		took = min(took, time.Since(began))
	}
	if took > within {
		t.Errorf("a dead host was gone after %v at least, want %v at most, of which its lease is %v", took, within, lease)
	}

	// What cannot be read hides nobody else, and is told.
	put("bad", "{")
	if got := a.until("an error", func(s membership.Snapshot) bool { return s.Err != nil }); names(got) != "a" {
		t.Errorf("the list is %q, want a", names(got))
	}
}

// Changes that never end do not hold back what they change. The processors may be others', so of three tries
// one has to be in time.
func TestChangesThatNeverEnd(t *testing.T) {
	s, a := oneHost(t)
	const most = 1000
	least := uint64(most)
	for i, want := 0, "a"; i < 3 && least >= most; i++ {
		name := fmt.Sprintf("busy%d", i)
		want += " " + name
		least = min(least, s.changesUntil(name, func() { a.want(want) }))
	}
	if least >= most {
		t.Errorf("a new member was told after %d changes or more, want fewer", most)
	}
}

// changesUntil changes the record of a member all the time until seen returns. It returns how many changes
// there were.
func (s *server) changesUntil(name string, seen func()) uint64 {
	ctx, stop := context.WithTimeout(s.t.Context(), time.Minute)
	var busy sync.WaitGroup
	defer busy.Wait()
	defer stop()
	var n atomic.Uint64
	for range 8 { // one alone would be late now and then
		busy.Go(func() {
			for ctx.Err() == nil {
				record := fmt.Sprintf(`{"v":1,"gids":["fe80::%x"]}`, n.Add(1))
				_, _ = s.administration.Put(ctx, "/ipoibcm/v1/blue/8001/members/"+name, record)
			}
		})
	}
	seen()
	return n.Load()
}

// A host that was published and whose list is full loses nobody when etcd is killed, and
// goes on when it is back.
func TestServerDies(t *testing.T) {
	t.Parallel() // it waits most of the time
	s := newServer(t)
	a := newHost(t, s.config("a"), "fe80::a")
	b := newHost(t, s.config("b"), "fe80::b")
	a.want("a b")
	b.want("a b")
	s.kill()
	a.keeps("a b", 2*testLease)
	if got := a.until("failing", func(s membership.Snapshot) bool { return !s.Failing.IsZero() }); got.Err == nil {
		t.Error("the source fails without a reason")
	}
	s.start()
	a.until("good again", func(s membership.Snapshot) bool { return s.Failing.IsZero() })
	a.keeps("a b", 2*testLease)
	b.end()
	a.want("a")
}

// oneHost is a server with the host a.
func oneHost(t *testing.T) (*server, *host) {
	t.Parallel() // it waits most of the time
	s := newServer(t)
	a := newHost(t, s.config("a"), "fe80::a")
	a.want("a")
	return s, a
}

// A host that ends takes its key away each time, also when the end of its watch is seen before the end of ctx.
func TestLeavesEachTime(t *testing.T) {
	s, a := oneHost(t)
	for range 20 {
		c := s.config("b")
		c.Lease = time.Hour
		b := newHost(t, c, "fe80::b")
		a.want("a b")
		b.end()
		a.want("a")
	}
}

// A host takes its key and its lease away also when a session has ended by an error and the host ends before it
// has another one, or before that one has found the key.
func TestLeavesAfterAnError(t *testing.T) {
	t.Parallel() // it waits most of the time
	s := newServer(t)
	for _, end := range []string{"no session", "list", "key"} {
		leavesAfterAnError(t, s, end)
	}
}

// leavesAfterAnError runs a host whose first session ends by an error, and which ends in its second one.
func leavesAfterAnError(t *testing.T, s *server, end string) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	session := 0
	reached := func(what string) {
		if session == 2 && what == end {
			stop()
		}
	}
	c := s.config("b")
	c.Lease = time.Hour
	c.User = "b" // the server does not ask for it, but each session begins with the password
	c.Password = func() (string, error) {
		session++
		reached("no session")
		if session == 2 {
			return "secret", ctx.Err() // an error: there is no session
		}
		return "secret", nil
	}
	src, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	src.Publish(member(t, "fe80::b"))
	published := false
	src.Run(ctx, func(ev membership.Event) {
		switch ev := ev.(type) {
		case membership.Listed:
			if session == 1 { // which is about to watch, and does so in vain
				s.compact(ctx, "elsewhere", "")
			}
			reached("list")
		case membership.Published:
			published = published || session == 1 && ev.Err == nil
			reached("key")
		}
	})
	if !published {
		t.Errorf("%s: the first session has published nothing", end)
	}
	if session < 2 {
		t.Errorf("%s: %d sessions, want a second one after an error", end, session)
	}
	got, err := s.administration.Get(t.Context(), c.Prefix()+"b")
	if err != nil {
		t.Fatal(err)
	}
	if got.Count != 0 {
		t.Errorf("%s: our key is there after the end, want it gone", end)
	}
	leases, err := s.administration.Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases.Leases {
		t.Errorf("%s: lease %x is left, want none", end, l.ID)
		if _, err := s.administration.Revoke(t.Context(), l.ID); err != nil { // for the next host
			t.Fatal(err)
		}
	}
}

// The watch goes on from a revision that has been compacted, by reading the list again.
func TestCompaction(t *testing.T) {
	s, a := oneHost(t)
	s.kill()
	s.start()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // etcd has just started
	defer cancel()
	s.compact(ctx, "/ipoibcm/v1/blue/8001/members/b", `{"v":1,"gids":["fe80::b"]}`)
	a.want("a b")
}

// compact puts a record again and again, and compacts the revisions before the last.
func (s *server) compact(ctx context.Context, key, value string) {
	s.t.Helper()
	var last int64
	for range 20 {
		r, err := s.administration.Put(ctx, key, value)
		if err != nil {
			s.t.Fatal(err)
		}
		last = r.Header.Revision
	}
	if _, err := s.administration.Compact(ctx, last); err != nil {
		s.t.Fatal(err)
	}
}

// Two hosts with one name: the second is told, and has it when the first has gone.
func TestOneNameTwice(t *testing.T) {
	s, first := oneHost(t)
	second := newHost(t, s.config("a"), "fe80::b")
	got := second.until("a word about the name", func(s membership.Snapshot) bool { return s.Unpublished != nil })
	if want := "another host, with GID fe80::a, has the name a"; !strings.Contains(got.Unpublished.Error(), want) {
		t.Errorf("unpublished because %v, want %q", got.Unpublished, want)
	}
	if !got.Failing.IsZero() {
		t.Error("the list fails, want only our own record not to be there")
	}
	first.end()
	second.until("published", func(s membership.Snapshot) bool { return s.Published })
}

// After a restart the host has another QPN and an old key: it takes that over at once.
func TestRestartTakesItsKey(t *testing.T) {
	t.Parallel() // it waits most of the time
	s := newServer(t)
	ctx := t.Context()
	if _, err := s.administration.Put(ctx, "/ipoibcm/v1/blue/8001/members/a",
		`{"v":1,"gids":["fe80::a"],"qpn":"0x000007"}`); err != nil {
		t.Fatal(err)
	}
	a := newHost(t, s.config("a"), "fe80::a")
	a.until("our QPN", func(s membership.Snapshot) bool { return len(s.Members) == 1 && s.Members[0].QPN == 0x123 })
}

// A host whose lease ends while it lives, as when etcd could not renew it in time, is back at once.
func TestLostLease(t *testing.T) {
	t.Parallel() // it waits most of the time
	s := newServer(t)
	c := s.config("a")
	c.Lease = time.Minute // renewed too rarely to help
	a := newHost(t, c, "fe80::a")
	a.until("published", func(s membership.Snapshot) bool { return s.Published })
	for round := range 2 {
		r, err := s.administration.Leases(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Leases) != 1 {
			t.Fatalf("%d leases, want 1", len(r.Leases))
		}
		before := a.want("a").Revision
		began := time.Now()
		if _, err := s.administration.Revoke(t.Context(), r.Leases[0].ID); err != nil {
			t.Fatal(err)
		}
		a.until("a new record", func(s membership.Snapshot) bool { return s.Revision >= before+2 && names(s) == "a" })
		if took := time.Since(began); took > c.Lease/4 { // it is renewed after a third of it
			t.Errorf("round %d: back after %v, want before the lease of %v would be renewed", round, took, c.Lease)
		}
	}
}

// Users and roles: a host can write its own key and read the others', and no more
// (docs/cluster.md).
func TestRoles(t *testing.T) {
	t.Parallel() // it waits most of the time
	s := newServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	adm := s.administration
	try := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	prefix := "/ipoibcm/v1/blue/8001/members/"
	end := clientv3.GetPrefixRangeEnd(prefix)
	for _, name := range []string{"root", "a"} {
		_, err := adm.RoleAdd(ctx, name)
		try(err)
		_, err = adm.UserAdd(ctx, name, "secret-"+name)
		try(err)
		_, err = adm.UserGrantRole(ctx, name, name)
		try(err)
	}
	_, err := adm.RoleGrantPermission(ctx, "a", prefix, end, clientv3.PermissionType(clientv3.PermRead))
	try(err)
	_, err = adm.RoleGrantPermission(ctx, "a", prefix+"a", "", clientv3.PermissionType(clientv3.PermReadWrite))
	try(err)
	_, err = adm.AuthEnable(ctx)
	try(err)

	c := s.config("a")
	c.User, c.Password = "a", func() (string, error) { return "secret-a", nil }
	a := newHost(t, c, "fe80::a")
	a.want("a")
	c.ID = "b" // with the password of a
	b := newHost(t, c, "fe80::b")
	got := b.until("a refusal", func(s membership.Snapshot) bool { return s.Unpublished != nil })
	if !strings.Contains(got.Unpublished.Error(), "permission denied") {
		t.Errorf("unpublished because %v, want a refusal", got.Unpublished)
	}
	c.Password = func() (string, error) { return "wrong", nil }
	w := newHost(t, c, "")
	// A busy server may be slow to refuse, which is a failure too.
	w.until("a refusal of the password", func(s membership.Snapshot) bool {
		return s.Err != nil && strings.Contains(s.Err.Error(), "authentication failed")
	})
}

// Where nobody listens the source fails, and ends when it is told to.
func TestNobodyListens(t *testing.T) {
	c := Config{Endpoints: []string{"127.0.0.1:1"}, Link: "blue", PKey: 0x8001, ID: "a"}
	h := newHost(t, c, "fe80::a")
	got := h.until("a failure", func(s membership.Snapshot) bool { return s.Err != nil })
	if !strings.Contains(got.Err.Error(), "connection refused") {
		t.Errorf("error %v, want that the connection was refused", got.Err)
	}
	began := time.Now()
	h.end()
	if took := time.Since(began); took > time.Minute { // what is tried has no end of its own
		t.Errorf("ended after %v, want within a minute", took)
	}
}
