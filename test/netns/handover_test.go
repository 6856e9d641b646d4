package netns

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
)

// A keeper is a service manager with a file-descriptor store: it keeps what a process
// puts there and gives it to the next (sd_notify(3), sd_listen_fds(3)).
type keeper struct {
	h     *host
	conn  *net.UnixConn
	mu    sync.Mutex
	names []string // in the order they came
	files []*os.File
	said  []string
	// heard sees each message, and started what a process is given.
	heard   func(text string)
	started func(names []string)
}

func newKeeper(h *host) *keeper {
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: h.path(".notify"), Net: "unixgram"})
	h.seg.must(err)
	k := &keeper{h: h, conn: conn}
	done := make(chan struct{})
	h.seg.Cleanup(func() {
		conn.Close()
		<-done
		k.release()
	})
	go func() {
		defer close(done)
		k.listen()
	}()
	return k
}

func (k *keeper) listen() {
	b, oob := make([]byte, 4096), make([]byte, 4096)
	for {
		n, on, _, _, err := k.conn.ReadMsgUnix(b, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		var fds []int
		if msgs, err := unix.ParseSocketControlMessage(oob[:on]); err == nil {
			for _, m := range msgs {
				if got, err := unix.ParseUnixRights(&m); err == nil {
					fds = append(fds, got...)
				}
			}
		}
		k.take(string(b[:n]), fds)
	}
}

// take does what a message says.
func (k *keeper) take(text string, fds []int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.said = append(k.said, text)
	if k.heard != nil {
		k.heard(text)
	}
	name := ""
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "FDNAME="); ok {
			name = v
		}
	}
	switch {
	case strings.HasPrefix(text, "FDSTORE=1"):
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			k.names, k.files = append(k.names, name), append(k.files, os.NewFile(uintptr(fd), name))
		}
	case strings.HasPrefix(text, "FDSTOREREMOVE=1"):
		k.remove(name)
	}
}

func (k *keeper) remove(name string) {
	for i := len(k.names) - 1; i >= 0; i-- {
		if k.names[i] == name {
			k.files[i].Close()
			k.names, k.files = slices.Delete(k.names, i, i+1), slices.Delete(k.files, i, i+1)
		}
	}
}

// release lets go of all.
func (k *keeper) release() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range k.files {
		f.Close()
	}
	k.names, k.files = nil, nil
}

// put replaces what is kept under a name.
func (k *keeper) put(name string, f *os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.remove(name)
	k.names, k.files = append(k.names, name), append(k.files, f)
}

// has returns the names of what is kept, each once.
func (k *keeper) has() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	names := slices.Clone(k.names)
	slices.Sort(names)
	return strings.Join(slices.Compact(names), " ")
}

// hasInterface waits until the interface alone is kept.
func (k *keeper) hasInterface() {
	s := k.h.seg
	s.Helper()
	s.eventually(patience, "only the interface is kept", func() error {
		if got := k.has(); got != "tun" {
			return fmt.Errorf("kept is %q", got)
		}
		return nil
	})
}

// copies returns what is kept, for a process: the keeper may close its own as soon as that process says so.
func (k *keeper) copies() (names []string, files []*os.File) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, f := range k.files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		k.h.seg.must(err)
		files = append(files, os.NewFile(uintptr(fd), f.Name()))
	}
	return slices.Clone(k.names), files
}

// drain returns when all that was said before has been heard: a manager hears a process
// out before it takes note of its end.
func (k *keeper) drain() {
	k.h.seg.Helper()
	const mark = "X_DRAIN=1"
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: k.h.path(".notify"), Net: "unixgram"})
	k.h.seg.must(err)
	defer conn.Close()
	k.mu.Lock()
	k.said = nil
	k.mu.Unlock()
	_, err = conn.Write([]byte(mark))
	k.h.seg.must(err)
	for heard := false; !heard; time.Sleep(time.Millisecond) {
		k.mu.Lock()
		heard = slices.Contains(k.said, mark)
		k.mu.Unlock()
		k.h.seg.must(k.h.seg.ctx.Err())
	}
}

// start starts the host's agent, as run does, with what is kept.
func (k *keeper) start(args ...string) {
	k.h.seg.Helper()
	k.startWith(k.h.args(args...)...)
}

// startWith is start with these arguments and no others.
func (k *keeper) startWith(args ...string) {
	h := k.h
	h.seg.Helper()
	k.drain()
	names, files := k.copies()
	// A stored TUN comes once, as systemd has it: the same description is kept once.
	if i := slices.Index(names, "tun"); i >= 0 {
		for j := len(names) - 1; j > i; j-- {
			if names[j] == "tun" {
				files[j].Close()
				names, files = slices.Delete(names, j, j+1), slices.Delete(files, j, j+1)
			}
		}
	}
	if k.started != nil {
		k.started(names)
	}
	a, err := lab.StartAgent(h.seg.ctx, h.Host,
		lab.AgentConfig{Program: cmp.Or(h.old, program), Control: h.path(".sock"), Log: h.path(".log"),
			Args: args, Files: files, FileNames: names, Env: []string{"NOTIFY_SOCKET=" + h.path(".notify"), "FDSTORE=16"}})
	h.seg.must(err)
	h.agent = a
	h.seg.eventually(patience, "the interface is kept", func() error {
		if got := k.has(); !strings.Contains(got, "tun") {
			return fmt.Errorf("kept is %q", got)
		}
		return nil
	})
}

// restart ends the agent and starts it again, as systemctl restart does.
func (k *keeper) restart(args ...string) {
	k.h.seg.Helper()
	k.h.stop()
	k.start(args...)
}

// A gapMeter sends an echo request every 20 ms, whatever becomes of the others, and knows
// the longest time without an answer.
type gapMeter struct {
	stop chan struct{}
	wg   sync.WaitGroup
	mu   sync.Mutex
	last time.Time
	gap  time.Duration
	late time.Duration // by how much the meter itself was late to ask, at most
	got  int
	lost int
}

func (h *host) measureGap(dst netip.Addr) *gapMeter {
	g := &gapMeter{stop: make(chan struct{})}
	g.wg.Go(func() {
		const every = 20 * time.Millisecond
		tick := time.NewTicker(every)
		defer tick.Stop()
		for asked := time.Now(); ; {
			g.wg.Go(func() {
				_, err := h.Ping(lab.Ping{Dst: dst, Timeout: 3 * time.Second})
				g.mu.Lock()
				defer g.mu.Unlock()
				if err != nil {
					g.lost++
					return
				}
				now := time.Now()
				if !g.last.IsZero() {
					g.gap = max(g.gap, now.Sub(g.last))
				}
				g.last = now
				g.got++
			})
			select {
			case <-tick.C:
				g.late = max(g.late, time.Since(asked)-every)
				asked = time.Now()
			case <-g.stop:
				return
			}
		}
	})
	return g
}

// end returns the longest time without an answer, less that for which nobody asked.
func (g *gapMeter) end() (gap time.Duration, lost int) {
	close(g.stop)
	g.wg.Wait()
	return max(0, g.gap-g.late), g.lost
}

// otherVersion builds the program with another version.
func otherVersion(s *segment) string {
	out := filepath.Join(s.dir, "ipoibcmd-next")
	build := exec.Command("go", "build", "-ldflags", "-X main.version=99.9-next", "-o", out, "ipoibcm/cmd/ipoibcmd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		s.Fatalf("build: %v\n%s", err, text)
	}
	return out
}

// keptPair is a pair with an RC connection, and the agent of a has a keeper.
func keptPair(t *testing.T) (s *segment, a, b *host, k *keeper) {
	t.Helper()
	s, a, b = newPair(t)
	b.run()
	k = newKeeper(a)
	k.start()
	a.connect(b, "RC")
	return s, a, b, k
}

// A restart, and an upgrade, leaves the interface with all that users have put there, the
// link-layer address, and neighbours; a ping misses little, and a stream goes on.
func TestHandOver(t *testing.T) {
	parallel(t)
	s, a, b, k := keptPair(t)
	next := otherVersion(s)
	s.must(a.AddRoute(ifName, "10.77.0.0/16", b.v4.String()))
	s.must(a.AddAddr(ifName, "10.9.9.1/24"))
	index, link := a.index(ifName), a.link()
	gaps := []time.Duration{}
	for i, prog := range []string{"", next, next} {
		gaps = append(gaps, restartsWithGaps(k, b, i, prog, index, link)...)
	}
	// A stream goes on, whatever it does to a ping beside it.
	moved := transfer(a, b)
	time.Sleep(200 * time.Millisecond)
	k.restart()
	a.reach(b.v4)
	moved()
	if slices.Min(gaps) > 300*time.Millisecond {
		t.Errorf("gaps of %v, want 300 ms at most where the machine is not busy", gaps)
	}
	if slices.Max(gaps) > 3*time.Second {
		t.Errorf("gaps of %v, one of them much too long", gaps)
	}
	if got := a.status().Interface.Build; !strings.Contains(got, "99.9-next") {
		t.Errorf("version %q after the upgrade, want 99.9-next", got)
	}
	if _, text, err := a.RouteTo(netip.MustParseAddr("10.77.1.1")); err != nil || !strings.Contains(text, ifName) {
		t.Errorf("the user's route: %q, %v", text, err)
	}
	if _, text, err := a.RouteTo(netip.MustParseAddr("10.9.9.2")); err != nil || !strings.Contains(text, ifName) {
		t.Errorf("the user's address: %q, %v", text, err)
	}
	b.send(a, a.v6, 4<<20) // sums are compared
	a.send(b, b.v4, 4<<20)

	stopIsStop(k)
}

// restartsWithGaps restarts a's daemon as prog and returns how long echo requests were not
// answered, there and back. Interface, link-layer address and neighbours are as before.
func restartsWithGaps(k *keeper, b *host, i int, prog string, index int, link string) (gaps []time.Duration) {
	a, t := k.h, k.h.seg
	t.Helper()
	before := a.conns(b)
	there, back := a.measureGap(b.v4), b.measureGap(a.v6)
	w := k.h.seg.stopwatch()
	time.Sleep(200 * time.Millisecond)
	a.old = prog
	k.restart()
	time.Sleep(300 * time.Millisecond)
	for _, m := range []struct {
		name string
		*gapMeter
	}{{"there", there}, {"back", back}} {
		gap, lost := m.end()
		_, waited := w.read()
		t.Logf("restart %d: %s: gap %v, of which at most %v were waiting for a processor; %d lost", i, m.name,
			gap.Round(time.Millisecond), waited.Round(time.Millisecond), lost)
		gaps = append(gaps, max(0, gap-waited))
	}
	if got := a.index(ifName); got != index {
		t.Errorf("restart %d: interface %d, want %d: it was made anew", i, got, index)
	}
	if got := a.link(); got != link {
		t.Errorf("restart %d: link-layer address %s, want %s", i, got, link)
	}
	if n := a.counter("ipoib", "neigh_queries"); n != 0 {
		t.Errorf("restart %d: %d queries for neighbours that are known, want none", i, n)
	}
	after, _ := a.paired(b, "RC")
	if len(before) == 1 && after.LocalCommID == before[0].LocalCommID {
		t.Errorf("restart %d: connection %s is the old one", i, after.LocalCommID)
	}
	k.hasInterface()
	return gaps
}

// stopIsStop: the manager lets go, and the interface with it.
func stopIsStop(k *keeper) {
	a, t := k.h, k.h.seg
	t.Helper()
	a.stop()
	if _, err := a.Link(ifName); err != nil {
		t.Errorf("the interface is gone while the manager keeps it: %v", err)
	}
	k.release()
	// What another test is just starting has this process's descriptors until it executes its program.
	a.seg.eventually(patience, "the interface is gone when the manager has let go of it", func() error {
		if _, err := a.Link(ifName); err == nil {
			return errors.New("it is there")
		}
		return nil
	})
}

// What is left behind and cannot be used is refused with the reason, and the daemon
// begins anew; the interface stays where it can.
func TestHandOverRefused(t *testing.T) {
	parallel(t)
	s, a, b, k := keptPair(t)
	file := func(text string) *os.File {
		f, err := os.CreateTemp(s.dir, "state")
		s.must(err)
		_, err = f.WriteString(text)
		s.must(err)
		return f
	}
	pipe := func() *os.File {
		r, w, err := os.Pipe()
		s.must(err)
		s.Cleanup(func() { w.Close() })
		return r
	}
	for _, tt := range []struct {
		name    string
		prepare func()
		yaml    string
		want    string
		same    bool // the interface stays
	}{
		{"garbage", func() { k.put("state", file("\x00\x01garbage")) }, "", "not a state of ipoibcmd", true},
		{"newer", func() { k.put("state", file(`{"version":2,"future":true}`)) }, "",
			"version 2, and this program knows 1", true},
		{"a pipe", func() { k.put("state", pipe()) }, "", "a file of mode", true},
		{"no TUN", func() { k.put("tun", file("")) }, "", "it is no TUN with an interface", false},
		{"strange", func() { k.put("strange", file("")) }, "",
			`a descriptor of the service manager's is not known" name=strange`, true},
		{"another P_Key", func() {}, "pkey: 0x8001\n", "the process before was on another link", true},
		{"and back", func() {}, "", "the process before was on another link", true},
		{"other offloads", func() {}, "offload: {checksum: false}\n", "offload.checksum has changed", false},
	} {
		index, link := a.index(ifName), a.link()
		a.stop()
		tt.prepare()
		var args []string
		if tt.yaml != "" {
			args = a.config(tt.yaml)
		}
		k.start(args...)
		s.eventually(patience, tt.name+": the reason in the log", func() error {
			if log := a.agent.LogTail(400); !strings.Contains(log, tt.want) {
				return fmt.Errorf("no %q in\n%s", tt.want, log)
			}
			return nil
		})
		if got := a.index(ifName); (got == index) != tt.same {
			t.Errorf("%s: interface %d, before %d; want the same: %v", tt.name, got, index, tt.same)
		}
		if got := a.link(); (got == link) != (tt.name == "strange" || tt.name == "no TUN" || tt.name == "other offloads") {
			t.Errorf("%s: link-layer address %s, before %s", tt.name, got, link)
		}
		k.mu.Lock()
		k.remove("strange")
		k.mu.Unlock()
		if tt.yaml == "" {
			a.connect(b, "RC")
		}
	}
}

// A crash keeps the interface and what users have put there too. Peers find the daemon
// under another QPN, and what it had made of routes is gone or made anew.
func TestHandOverCrash(t *testing.T) {
	parallel(t)
	s, a, b, k := keptPair(t)
	s.must(a.AddRoute(ifName, "10.77.0.0/16", b.v4.String()))
	index, link := a.index(ifName), a.link()
	a.waitRoute(patience, b.v4, maxMTU)
	a.kill()
	if n := len(a.hostRoutes()); n == 0 {
		t.Error("no host routes after the crash, want those that it had made: the test needs some")
	}
	k.start("--mode", "ud")
	if got := a.index(ifName); got != index {
		t.Errorf("interface %d, want %d: it was made anew", got, index)
	}
	if got := a.link(); got == link {
		t.Errorf("link-layer address %s as before the crash: peers would go on with connections that are gone", got)
	}
	s.eventually(patience, "routes to peers are those of mode ud", func() error {
		for _, r := range a.hostRoutes() {
			if strings.Contains(r, "mtu 65") {
				return fmt.Errorf("%q", r)
			}
		}
		return nil
	})
	a.reach(b.v4)
	if _, text, err := a.RouteTo(netip.MustParseAddr("10.77.1.1")); err != nil || !strings.Contains(text, ifName) {
		t.Errorf("the user's route: %q, %v", text, err)
	}
}

// Addresses that the process before was configured with, and this one is not, go.
func TestHandOverAddresses(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	a := s.hosts[0]
	k := newKeeper(a)
	old := netip.MustParseAddr("10.55.0.1")
	k.start("--address", old.String()+"/24")
	k.restart()
	if a.hasAddr(old) {
		t.Errorf("%v is on the interface, want it gone with the setting", old)
	}
	if !a.hasAddr(a.v4) {
		t.Errorf("%v is not on the interface", a.v4)
	}
}

func (h *host) hasAddr(x netip.Addr) bool {
	h.seg.Helper()
	for _, p := range h.status().Interface.Addresses {
		if strings.HasPrefix(p.Prefix, x.String()+"/") {
			return true
		}
	}
	return false
}
