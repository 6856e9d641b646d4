package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/hostnet"
)

// Captures that nobody reads hold what is allowed for all of them together, and one
// that is read meanwhile gets its packets.
func TestUnreadCapturesAreBounded(t *testing.T) {
	a, p := newAgent(t)
	go func() {
		for range p.tap { // each change of the clients sets it
		}
	}()
	defer func() { close(p.tap) }()
	var unread []*tap
	for range maxFollowers - 1 {
		c := &tap{ch: make(chan tapped, captureDepth)}
		if err := a.taps.add(c); err != nil {
			t.Fatal(err)
		}
		unread = append(unread, c)
	}
	reader := &tap{ch: make(chan tapped, captureDepth)}
	if err := a.taps.add(reader); err != nil {
		t.Fatal(err)
	}
	packet := make([]byte, 9000)
	packet[0] = 0x60
	got := 0
	for range captureDepth {
		a.taps.packet(true, packet)
		select {
		case p := <-reader.ch:
			reader.taken(&p)
			got++
		default:
		}
	}
	if got != captureDepth {
		t.Errorf("who reads got %d of %d packets", got, captureDepth)
	}
	held := 0
	for _, c := range unread {
		for len(c.ch) > 0 {
			p := <-c.ch
			held += len(p.ip) + tapOverhead
			c.taken(&p)
		}
		if n := c.octets.Load(); n != 0 {
			t.Errorf("%d octets are counted of an empty queue", n)
		}
	}
	if held > captureOctets {
		t.Errorf("%d octets wait for those who do not read, want %d at most", held, captureOctets)
	}
	if held < captureOctets/2 {
		t.Errorf("%d octets wait for those who do not read: less than half of what is allowed, %d", held, captureOctets)
	}
}

// A connection without a request ends, also after it had one.
func TestIdleClientsAreLetGo(t *testing.T) {
	a, _ := newAgent(t)
	a.clientIdle = 50 * time.Millisecond
	path := filepath.Join(t.TempDir(), "ibcm0.sock")
	l, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go a.serve(ctx, l)
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: agent\r\n\r\n", "/nowhere")
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	b, err := io.ReadAll(conn)
	if err != nil {
		t.Errorf("the connection did not end: %v", err)
	}
	if !strings.Contains(string(b), "404") {
		t.Errorf("the answer is %q", b)
	}
}

// Beyond the bound a client is told so, and one of those before it goes on.
func TestClientsAreBounded(t *testing.T) {
	s := serveAgent(t)
	s.open(t, "GET", control.PathEvents)
	path := s.path
	var idle []net.Conn
	for range maxClients {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, c)
	}
	resp := s.open(t, "GET", control.PathStatus)
	var e control.Error
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%d clients are connected already", maxClients); resp.StatusCode != 503 || e.Error != want {
		t.Errorf("one too many: %s, %q; want 503 and %q", resp.Status, e.Error, want)
	}
	if got := s.a.clientsRefused.Load(); got == 0 {
		t.Errorf("it was not counted")
	}
	for _, c := range idle {
		c.Close()
	}
	for end := time.Now().Add(10 * time.Second); ; {
		if resp := s.open(t, "GET", control.PathStatus); resp.StatusCode == 200 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("places are not free again")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Users who may only look do not take all places.
func TestMembersLeavePlaces(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can connect as another user")
	}
	inner, err := net.Listen("unix", fmt.Sprintf("@ipoibcm-members-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	l := newClients(inner, new(atomic.Uint64))
	defer l.Close()
	connect := func(uid uintptr) *client {
		t.Helper()
		var out net.Conn
		err := hostnet.OwnThread(func() (err error) { // the thread ends, and its user with it
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uid, ^uintptr(0)); e != 0 {
				return e
			}
			out, err = net.Dial("unix", inner.Addr().String())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { out.Close() })
		in, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close() })
		return in.(*client)
	}
	const root, nobody = 0, 65534
	first := connect(nobody)
	for range maxMembers - 1 {
		if c := connect(nobody); c.turned != "" {
			t.Fatalf("refused before there are %d: %s", maxMembers, c.turned)
		}
	}
	beyond := connect(nobody)
	if beyond.turned == "" {
		t.Errorf("a member beyond %d is served", maxMembers)
	}
	beyond.Close()
	first.Close()
	if c := connect(nobody); c.turned != "" {
		t.Errorf("a place is not free again: %s", c.turned)
	}
	for range maxClients - maxMembers {
		if c := connect(root); c.turned != "" {
			t.Fatalf("root is refused: %s", c.turned)
		}
	}
	if c := connect(root); c.turned == "" {
		t.Errorf("more than %d are served", maxClients)
	}
}

// Where descriptors are few nobody may keep one for as long as he likes, and short
// requests are answered.
func TestFollowersLeaveDescriptors(t *testing.T) {
	s := serveAgent(t)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	few := was
	few.Cur = uint64(len(fds)) + followDescriptors + 3
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &was)
	refused := false
	for range maxFollowers { // both ends are descriptors of this process
		resp := s.open(t, "GET", control.PathEvents)
		var e control.Error
		if resp.StatusCode == 503 && json.NewDecoder(resp.Body).Decode(&e) == nil &&
			strings.Contains(e.Error, "descriptors left") {
			refused = true
			break
		}
	}
	if !refused {
		t.Errorf("no follower was refused although descriptors are few")
	}
	if resp := s.open(t, "GET", control.PathStatus); resp.StatusCode != 200 {
		t.Errorf("status: %s, want an answer", resp.Status)
	}
}
