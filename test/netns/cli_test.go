package netns

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
)

// output runs ipoibcmd in the host and returns standard output, standard error
// and the exit status.
func (h *host) output(args ...string) (stdout, stderr string, code int) {
	h.seg.Helper()
	ctx, cancel := context.WithTimeout(h.seg.ctx, patience)
	defer cancel()
	var out, errs bytes.Buffer
	c := exec.CommandContext(ctx, program, args...)
	c.Stdout, c.Stderr = &out, &errs
	h.Output(c)
	if c.ProcessState == nil {
		h.seg.Fatalf("ipoibcmd %s did not start", strings.Join(args, " "))
	}
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

// sentTo returns the octets that the connections of h to peer have sent.
func (h *host) sentTo(peer *host) (octets uint64) {
	for _, c := range h.conns(peer) {
		octets += c.TxOctets
	}
	return octets
}

// busy waits until h sends to peer, and returns how much it has sent.
func (h *host) busy(peer *host) (octets uint64) {
	h.seg.eventually(patience, h.Name+" is busy", func() error {
		if octets = h.sentTo(peer); octets < 1<<20 {
			return fmt.Errorf("it has sent %d octets", octets)
		}
		return nil
	})
	return octets
}

// says runs the program, which must end with that status and complain of nothing, and returns its output.
func (h *host) says(status int, args ...string) string {
	h.seg.Helper()
	out, stderr, code := h.output(args...)
	expect.Equal(h.seg, code, status, "%q: exit status", args)
	expect.Equal(h.seg, stderr, "", "%q: standard error", args)
	return out
}

// Every command that looks in works while the agent is busy, for people and for
// programs.
func TestLookingIn(t *testing.T) {
	parallel(t)
	_, a, b := startedPair(t)
	mine, _ := a.connect(b, "RC")
	both(b, a.reach)
	stop := transfer(a, b) // keep it busy
	defer stop()
	before := a.busy(b)
	in := a.status().Interface
	for _, tt := range []struct {
		args []string
		want []string // for people
		json []string // keys of the document
	}{
		{[]string{"status"}, []string{ifName, in.GID, in.UDQPN, in.BroadcastGroup, "mode rc", "MTU 65520", in.PKey, "rfc",
			"10.0.0.2"}, []string{"interface", "underlay", "peers"}},
		{[]string{"show", "conn"}, []string{"RC", "ESTABLISHED", mine.LocalQPN, mine.RemoteQPN, mine.ServiceID, "65520"},
			[]string{"conns"}},
		{[]string{"show", "neigh"}, []string{"10.0.0.2", "fd00::2", "REACHABLE"}, []string{"neighbours"}},
		{[]string{"show", "routes"}, []string{"10.0.0.2 ", "connection", "65520"}, []string{"routes"}},
		{[]string{"show", "groups"}, []string{in.BroadcastGroup, "224.0.0.1", "ff02::1"}, []string{"groups"}},
		{[]string{"show", "stats"}, []string{"established_", "tx_packets"}, []string{"counters"}},
		{[]string{"explain", "10.0.0.2"}, []string{"RC", "65520", "Receive MTU", "rfc"},
			[]string{"ip", "peer", "class", "mode", "mtu", "why"}},
		{[]string{"explain", "fd00::2"}, []string{"RC", "65520"}, []string{"why"}},
		{[]string{"explain", "239.1.1.1"}, []string{"UD"}, []string{"why"}},
		{[]string{"explain", "10.0.0.77"}, []string{"10.0.0.77"}, []string{"why"}},
	} {
		want := 0
		if tt.args[len(tt.args)-1] == "10.0.0.77" {
			want = 4 // nobody was asked for it
		}
		name := strings.Join(tt.args, " ")
		args := append(slices.Clone(tt.args), "--control", a.path(".sock"))
		if err := containsAll(a.says(want, args...), tt.want...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		out := a.says(want, append(args, "--json")...)
		var doc map[string]any
		if err := json.Unmarshal([]byte(out), &doc); err != nil {
			t.Errorf("%s --json: %v\n%s", name, err, out)
			continue
		}
		if doc["version"] != float64(control.Version) {
			t.Errorf("%s --json: version %v", name, doc["version"])
		}
		for _, k := range tt.json {
			if _, ok := doc[k]; !ok {
				t.Errorf("%s --json: no %q in %s", name, k, out)
			}
		}
	}
	if out, code := a.command("explain", "not-an-address", "--control", a.path(".sock")); code != 2 {
		t.Errorf("explain of nonsense: exit status %d\n%s", code, out)
	}
	if err := containsAll(a.metrics(), "# TYPE ", "ipoibcm_"); err != nil {
		t.Error(err)
	}
	if n := len(a.conns(b)); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
	if a.sentTo(b) == before {
		t.Errorf("the agent has sent nothing meanwhile")
	}
}

// Without an agent every command says so and what to do.
func TestNoAgent(t *testing.T) {
	parallel(t)
	_, a, b := newPair(t)
	a.run()
	a.kill() // its socket stays
	for _, cmd := range [][]string{{"status"}, {"show", "conn"}, {"show", "neigh"}, {"show", "routes"},
		{"show", "groups"}, {"show", "stats"},
		{"explain", "10.0.0.2"}, {"monitor"}, {"capture", b.path(".pcapng")}} {
		for _, tt := range []struct{ socket, what string }{
			{b.path(".sock"), "does not exist"}, {a.path(".sock"), "no agent answers"}} {
			args := append(slices.Clone(cmd), "--control", tt.socket)
			stdout, stderr, code := a.output(args...)
			switch err := containsAll(stderr, "no agent", tt.what, "ipoibcmd run"); {
			case err != nil:
				t.Errorf("%v: %v", args, err)
			case code != 1:
				t.Errorf("%v: code is %v, want 1", args, code)
			case stdout != "":
				t.Errorf("%v: stdout is %v, want \"\"", args, stdout)
			}
			if cmd[0] == "capture" {
				continue // has no --json
			}
			stdout, stderr, code = a.output(append(args, "--json")...)
			var e control.Error
			switch err := json.Unmarshal([]byte(stdout), &e); {
			case err != nil:
				t.Errorf("%v --json: %v", args, err)
			case code != 1:
				t.Errorf("%v --json: code is %v, want 1", args, code)
			case e.Version != control.Version:
				t.Errorf("%v --json: Version is %v, want %v", args, e.Version, control.Version)
			case !strings.Contains(e.Error, tt.what):
				t.Errorf("%v --json: %q does not say %q", args, e.Error, tt.what)
			case !strings.Contains(e.Hint, "ipoibcmd run"):
				t.Errorf("%v --json: %q does not say \"ipoibcmd run\"", args, e.Hint)
			case stderr != "":
				t.Errorf("%v --json: stderr is %v, want \"\"", args, stderr)
			}
		}
	}
	if _, err := os.Stat(b.path(".pcapng")); err == nil {
		t.Error("capture made a file though there was nothing to capture")
	}
}

func TestDevices(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{mtu: 4200})
	a := s.hosts[0]
	out, stderr, code := a.output("devices")
	if err := containsAll(out, underlay, "veth", "4200"); err != nil || code != 0 {
		t.Errorf("exit status %d, %v\n%s", code, err, stderr)
	}
	out, stderr, code = a.output("devices", "--json")
	var d control.Devices
	if err := json.Unmarshal([]byte(out), &d); err != nil || code != 0 {
		t.Fatalf("exit status %d, %v\n%s", code, err, stderr)
	}
	i := slices.IndexFunc(d.Underlays, func(u control.UnderlayDevice) bool { return u.Name == underlay })
	if i < 0 {
		t.Fatalf("no %s: %s", underlay, out)
	}
	switch u := d.Underlays[i]; {
	case !u.Up:
		t.Error("Up is false, want true")
	case u.MTU != 4200:
		t.Errorf("MTU is %v, want 4200", u.MTU)
	case u.PathMTU != 4096 && u.PathMTU != 2048:
		t.Errorf("%s is %+v", underlay, u)
	case u.Driver != "veth":
		t.Errorf("Driver is %v, want \"veth\"", u.Driver)
	case !u.Features["tx-udp-segmentation"]:
		t.Error("Features[\"tx-udp-segmentation\"] is false, want true")
	case len(u.Addresses) == 0:
		t.Error("Addresses has no elements, want some")
	}
}

// A follower is a command that runs until it is interrupted.
type follower struct {
	seg    *segment
	cmd    *exec.Cmd
	mu     sync.Mutex
	lines  []string
	err    bytes.Buffer
	done   chan struct{}
	status error
}

// follow starts such a command.
func (h *host) follow(args ...string) *follower {
	h.seg.Helper()
	f := &follower{seg: h.seg, cmd: exec.Command(program, args...), done: make(chan struct{})}
	out, err := f.cmd.StdoutPipe()
	h.seg.must(err)
	f.cmd.Stderr = &f.err
	h.seg.must(h.Start(f.cmd))
	go func() {
		defer close(f.done)
		for in := bufio.NewReader(out); ; {
			line, err := in.ReadString('\n')
			f.mu.Lock()
			f.lines = append(f.lines, strings.TrimSpace(line))
			f.mu.Unlock()
			if err != nil {
				io.Copy(io.Discard, out)
				break
			}
		}
		f.status = f.cmd.Wait()
	}()
	h.seg.Cleanup(func() {
		f.cmd.Process.Kill()
		<-f.done
	})
	return f
}

func (f *follower) output() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.lines)
}

// interrupt ends the command as Ctrl-C does, and it must end well.
func (f *follower) interrupt() {
	f.seg.Helper()
	f.cmd.Process.Signal(os.Interrupt)
	select {
	case <-f.done:
		if f.status != nil {
			f.seg.Errorf("%v: %v: %s", f.cmd.Args[1:], f.status, f.err.String())
		}
	case <-time.After(patience):
		f.seg.Errorf("%v did not end", f.cmd.Args[1:])
	}
}

// monitor shows the CM messages of both directions and what was decided.
func TestMonitor(t *testing.T) {
	parallel(t)
	s, a, b := startedPair(t)
	people := a.follow("monitor", "--control", a.path(".sock"))
	machine := a.follow("monitor", "--json", "--control", a.path(".sock"))
	// Somebody who comes late misses what was before: go on until both are there.
	s.eventually(patience, "monitor shows the handshake", func() error {
		a.connect(b, "RC")
		s.must(a.Down(ifName))
		a.noConns()
		b.noConns()
		s.must(a.Up(ifName))
		a.waitState("up")
		if err := containsAll(strings.Join(people.output(), "\n"), "REQ", "REP", "RTU", "DREQ", "DREP"); err != nil {
			return err
		}
		return containsAll(strings.Join(machine.output(), "\n"), "REQ", "REP", "RTU", "DREQ", "DREP")
	})
	people.interrupt()
	machine.interrupt()
	kinds, directions := map[string]int{}, map[bool]int{}
	for _, l := range machine.output() {
		if l == "" {
			continue
		}
		var e control.Event
		switch err := json.Unmarshal([]byte(l), &e); {
		case err != nil:
			t.Errorf("line %q: %v", l, err)
		case e.Version != control.Version:
			t.Errorf("line %q: Version is %v, want %v", l, e.Version, control.Version)
		case e.Text == "":
			t.Errorf("line %q: Text is empty", l)
		case e.Time.IsZero():
			t.Errorf("line %q: %v", l, err)
		}
		kinds[e.Part]++
		if e.Out != nil {
			directions[*e.Out]++
		}
	}
	switch {
	case kinds["cm"] == 0:
		t.Error("kinds[\"cm\"] is 0, want more")
	case kinds["conn"] == 0:
		t.Error("kinds[\"conn\"] is 0, want more")
	case kinds["neigh"] == 0:
		t.Error("kinds[\"neigh\"] is 0, want more")
	case directions[true] == 0:
		t.Error("directions[true] is 0, want more")
	case directions[false] == 0:
		t.Error("directions[false] is 0, want more")
	}
}

// The agent's end is told to whoever follows it.
func TestMonitorOutlivesAgent(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{})
	a := s.hosts[0]
	a.run()
	f := a.follow("monitor", "--control", a.path(".sock"))
	s.eventually(patience, "monitor follows", func() error {
		s.must(a.AddAddr(ifName, "10.5.0.1/24"))
		s.must(a.DelAddr(ifName, "10.5.0.1/24"))
		if len(f.output()) == 0 {
			return fmt.Errorf("no line yet")
		}
		return nil
	})
	a.stop()
	select {
	case <-f.done:
	case <-time.After(patience):
		t.Fatal("monitor goes on without an agent")
	}
	if f.status == nil || !strings.Contains(f.err.String(), "the agent has stopped") {
		t.Errorf("monitor ended with %v: %s", f.status, f.err.String())
	}
}

// capture writes a file that can be read, packet by packet, and whole after
// Ctrl-C.
func TestCaptureFile(t *testing.T) {
	parallel(t)
	s, a, b := startedPair(t)
	file := a.path(".pcapng")
	f := a.follow("capture", file, "--control", a.path(".sock"))
	s.eventually(patience, "the file has begun", func() error {
		if st, err := os.Stat(file); err != nil || st.Size() == 0 {
			return fmt.Errorf("%v", err)
		}
		return nil
	})
	a.connect(b, "RC")
	b.ping(a.v4, maxMTU, true)
	s.eventually(patience, "the packets are in the file while it grows", func() error {
		raw, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		fs, err := readFrames(wholeBlocks(raw))
		if err != nil {
			t.Fatal(err)
		}
		var cm, rc int
		for _, x := range fs {
			if x.BTH.DestQPN() == ib.QPNGSI {
				cm++
			} else if x.transport == ib.RC {
				rc++
			}
		}
		if cm < 3 || rc < 2*maxMTU/4096 {
			return fmt.Errorf("%d CM messages and %d RC packets", cm, rc)
		}
		return nil
	})
	f.interrupt()
	raw, err := os.ReadFile(file)
	s.must(err)
	if len(wholeBlocks(raw)) != len(raw) {
		t.Errorf("the file ends inside a block")
	}
	if _, err := exec.LookPath("tshark"); err != nil {
		t.Log("tshark is not installed: its opinion of the file was not asked")
	} else {
		out, err := exec.Command("tshark", "-r", file, "-Y", "infiniband.mad.attributeid == 0x0010", "-T", "fields", "-e",
			"infiniband.bth.destqp").CombinedOutput()
		if err != nil || !strings.Contains(string(out), "0x") {
			t.Errorf("tshark sees no REQ: %v\n%s", err, out)
		}
	}
	// A snap length cuts the packets, not the file.
	short := a.follow("capture", "-", "--snap", "100", "--control", a.path(".sock"))
	s.eventually(patience, "packets on standard output", func() error {
		a.reach(b.v4)
		if n := len(strings.Join(short.output(), "\n")); n < 500 {
			return fmt.Errorf("%d octets", n)
		}
		return nil
	})
	short.interrupt()
}

// A REQ in flight, a follower and a busy device do not keep SIGTERM waiting.
func TestStopIsQuick(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	a.follow("monitor", "--control", a.path(".sock"))
	a.follow("capture", a.path(".pcapng"), "--snap", "64", "--control", a.path(".sock"))
	stop := transfer(a, b)
	defer stop()
	s.eventually(patience, "the transfer runs", func() error {
		if c := a.conns(b); len(c) != 1 || c[0].TxOctets < 1<<20 {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
	b.kill() // a gets no DREP
	start := time.Now()
	s.must(syscall.Kill(a.agent.PID(), syscall.SIGTERM))
	a.stop()
	if d := time.Since(start); d > patience/3 { // the REQ would be repeated for longer
		t.Errorf("it took %v", d)
	}
}
