package netns

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/lab"
)

// rewrite replaces the settings of the host's file.
func (h *host) rewrite(yaml string) {
	h.seg.Helper()
	h.seg.must(os.WriteFile(h.path(".yaml"), []byte(yaml), 0o600))
}

// reload runs ipoibcmd reload, which must end so, and returns what it said.
func (h *host) reload(want int, args ...string) string {
	h.seg.Helper()
	out, errs, code := h.output(append([]string{"reload", "--control", h.path(".sock")}, args...)...)
	if code != want {
		h.seg.Errorf("reload %q: exit status %d, want %d\n%s%s", args, code, want, out, errs)
	}
	return out + errs
}

// settings is a configuration for hosts of these tests: what args says, as a file, so that
// no flag wins over it.
func (h *host) settings(more string) string {
	return fmt.Sprintf("underlay: %s\nname: %s\nud_mtu: %d\nlog_level: debug\naddresses: [%s/24, %s/64]\n%s",
		underlay, ifName, h.seg.udMTU, h.v4, h.v6, more)
}

// runFile starts the agent with a file and nothing else.
func (h *host) runFile(more string) {
	h.seg.Helper()
	h.rewrite(h.settings(more))
	a, err := lab.StartAgent(h.seg.ctx, h.Host, lab.AgentConfig{Program: program, Control: h.path(".sock"),
		Log:  h.path(".log"),
		Args: []string{"--config", h.path(".yaml")}})
	h.seg.must(err)
	h.agent = a
}

// index is the number of a device.
func (h *host) index(dev string) int {
	h.seg.Helper()
	l, err := h.Link(dev)
	h.seg.must(err)
	return l.Attrs().Index
}

// A pinger sends echo requests one after the other and counts those that nobody
// answered.
type pinger struct {
	stop chan struct{}
	wg   sync.WaitGroup
	sent int
	lost int
	last error
}

func (h *host) pinging(dst netip.Addr, every time.Duration) *pinger {
	p := &pinger{stop: make(chan struct{})}
	p.wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			p.sent++
			if _, err := h.Ping(lab.Ping{Dst: dst, Timeout: 2 * time.Second}); err != nil {
				p.lost, p.last = p.lost+1, err
			}
			select {
			case <-tick.C:
			case <-p.stop:
				return
			}
		}
	})
	return p
}

func (p *pinger) end() {
	close(p.stop)
	p.wg.Wait()
}

// Settings change under traffic: no packet is lost, the connection and the users'
// routes stay, and each setting is in force afterwards.
func TestReload(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.runFile("")
	b.run("--mode", "auto")
	before, _ := a.connect(b, "RC")
	s.must(a.AddRoute(ifName, "10.77.0.0/16", b.v4.String()))
	index := a.index(ifName)
	ping := a.pinging(b.v4, 20*time.Millisecond)
	stop := transfer(a, b)

	if out := a.reload(0); !strings.Contains(out, "says what the daemon has already") {
		t.Errorf("nothing to do: %s", out)
	}
	third := "10.5.0.1/24"
	changed := "mode: auto\nreceive_mtu: 32772\nidle_timeout: 1h\npeer_allow: []\naddresses: [10.0.0.1/24, fd00::1/64, " + third + "]\n"
	text := strings.Replace(a.settings(changed), "addresses: [10.0.0.1/24, fd00::1/64]\n", "", 1)
	a.rewrite(text)
	if out := a.reload(0, "--check", "--diff"); !strings.Contains(out, "- rc\n  + auto\n") ||
		!strings.Contains(out, "5 settings would change") {
		t.Errorf("checked: %s", out)
	}
	if got := a.status().Interface.Mode; got != "rc" {
		t.Errorf("mode %s after a check, want rc", got)
	}
	if out := a.reload(0); !strings.Contains(out, "5 settings changed") {
		t.Errorf("reload: %s", out)
	}
	s.eventually(patience, "the new address is there", func() error {
		if !slices.ContainsFunc(a.status().Interface.Addresses, func(x control.Address) bool { return x.Prefix == third }) {
			return fmt.Errorf("%+v", a.status().Interface.Addresses)
		}
		return nil
	})
	in := a.status().Interface
	expect.Equal(t, in.Mode, "auto", "Mode")
	expect.Equal(t, in.ReceiveMTU, 32772, "ReceiveMTU")
	b.refused("nobody listens", "ping", "--rdma", in.GID)

	a.refusesReloads(text)
	a.reloadsBySignal(text)
	a.rewrite(a.settings("mode: auto\n"))
	a.reload(0)
	s.eventually(patience, "the address has gone", func() error {
		if slices.ContainsFunc(a.status().Interface.Addresses, func(x control.Address) bool { return x.Prefix == third }) {
			return fmt.Errorf("it is still there")
		}
		return nil
	})

	time.Sleep(10 * 20 * time.Millisecond) // for some echo requests at least, wherever all this took less
	stop()
	ping.end()
	a.lostNone(b, ping)
	after := a.conns(b)
	if len(after) != 1 || after[0].LocalCommID != before.LocalCommID {
		t.Errorf("connections %+v, want the one that was there before, %s", after, before.LocalCommID)
	}
	if got := a.index(ifName); got != index {
		t.Errorf("interface %d, want %d: it was made anew", got, index)
	}
	if _, text, err := a.RouteTo(netip.MustParseAddr("10.77.1.1")); err != nil || !strings.Contains(text, ifName) {
		t.Errorf("the user's route: %q, %v", text, err)
	}
}

// lostNone: no echo request was lost, or so much was sent that the queue of a TUN was full.
func (a *host) lostNone(b *host, ping *pinger) {
	t := a.seg
	t.Helper()
	if full := a.tunDrops() + b.tunDrops(); full != 0 { // on a busy machine the transfer fills the queue of the TUN
		t.Logf("%d packets found a full TUN queue; %d of %d echo requests were lost", full, ping.lost, ping.sent)
	} else if ping.lost != 0 {
		stats, _, _ := a.output("show", "stats", "--control", a.path(".sock"))
		t.Errorf("%d of %d echo requests were lost: %v\n%s", ping.lost, ping.sent, ping.last, stats)
	}
	if ping.sent < 10 {
		t.Errorf("%d echo requests, too few to say anything", ping.sent)
	}
}

// refusesReloads: what takes a restart is refused as a whole, and a bad file.
func (a *host) refusesReloads(text string) {
	t := a.seg
	t.Helper()
	a.rewrite(text + "pkey: 0x8001\n")
	a.rewrite(strings.Replace(text, "mode: auto", "mode: ud", 1) + "pkey: 0x8001\n")
	if out := a.reload(1); !strings.Contains(out, "only after a restart: the link is another one") {
		t.Errorf("refused: %s", out)
	}
	if got := a.status().Interface.Mode; got != "auto" {
		t.Errorf("mode %s after a refusal, want auto", got)
	}
	a.rewrite("underlay: eth0\nmood: bad\n")
	if out := a.reload(1); !strings.Contains(out, `unknown key "mood"`) {
		t.Errorf("a bad file: %s", out)
	}
}

// reloadsBySignal: SIGHUP does the same as the command, again and again.
func (a *host) reloadsBySignal(text string) {
	s := a.seg
	s.Helper()
	for i := range 10 {
		mode := []string{"rc", "auto"}[i%2]
		a.rewrite(strings.Replace(text, "mode: auto", "mode: "+mode, 1))
		s.must(syscall.Kill(a.agent.PID(), syscall.SIGHUP))
		s.eventually(patience, "SIGHUP reloads", func() error {
			if got := a.status().Interface.Mode; got != mode {
				return fmt.Errorf("mode %s, want %s", got, mode)
			}
			return nil
		})
	}
}

// tunDrops is how many packets the kernel had no room for in the queue of the TUN.
func (h *host) tunDrops() uint64 {
	h.seg.Helper()
	l, err := h.Link(ifName)
	h.seg.must(err)
	return l.Attrs().Statistics.TxDropped
}

// The list of peers changes live: a host that is added is found, without multicast.
func TestReloadPeers(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	gid, err := b.LinkLocal(underlay)
	s.must(err)
	nobody := "peers: [\"fe80::dead\"]\n"
	a.runFile(nobody)
	b.runFile(nobody) // so that a does not hear b announce its address
	if _, err := a.Ping(lab.Ping{Dst: b.v4, Timeout: 500 * time.Millisecond}); err == nil {
		t.Error("a host that is no peer answers")
	}
	a.rewrite(a.settings("peers: [\"" + gid.String() + "\"]\n"))
	a.reload(0)
	a.reach(b.v4)
}

// Limits, the traffic class, offloads and how far announcements are believed change under traffic, and
// each is in force afterwards.
func TestReloadTuning(t *testing.T) {
	parallel(t)
	s, a, b := newPair(t)
	a.runFile("")
	b.run()
	before, _ := a.connect(b, "RC")
	ping := a.pinging(b.v4, 20*time.Millisecond)
	stop := transfer(a, b)
	offloads := func() map[string]control.Offload {
		m := map[string]control.Offload{}
		for _, o := range a.status().Underlay.Offloads {
			m[o.Name] = o
		}
		return m
	}
	was := offloads()
	live := []string{"gso", "gro", "connected", "tso", "uso"}
	text := "traffic_class: 104\narp_accept: always\nlimits:\n  connections: 16\n  neighbours: 32\noffload:\n"
	for _, name := range live {
		text += "  " + name + ": false\n"
	}
	a.rewrite(a.settings(text))
	if out := a.reload(0); !strings.Contains(out, "9 settings changed") {
		t.Errorf("reload: %s", out)
	}
	if got := a.conns(b); len(got) != 1 || got[0].LocalCommID != before.LocalCommID {
		t.Errorf("connections %+v, want the one that was there before", got)
	}
	for _, name := range live {
		if o := offloads()[name]; o.On || o.Why != "switched off" {
			t.Errorf("offload %s: %+v, want off", name, o)
		}
	}
	s.unused(offloads, live)
	if out := a.reload(0); !strings.Contains(out, "says what the daemon has already") {
		t.Errorf("again: %s", out)
	}

	// What the threads and the interface are made with is refused, each with its reason.
	a.rewrite(a.settings(text + "  checksum: false\n  hold_p: false\n"))
	out := a.reload(1)
	for _, why := range []string{"the interface is made with it", "threads are laid out for it", "nothing was changed"} {
		if !strings.Contains(out, why) {
			t.Errorf("refused: %q does not say %q", out, why)
		}
	}

	a.rewrite(a.settings(""))
	a.reload(0)
	stop()
	for _, name := range live {
		if o := offloads()[name]; o.On != was[name].On {
			t.Errorf("offload %s: %+v, want it as it was: %+v", name, o, was[name])
		}
	}
	ping.end()
	if full := a.tunDrops() + b.tunDrops(); full == 0 && ping.lost != 0 {
		stats, _, _ := a.output("show", "stats", "--control", a.path(".sock"))
		t.Errorf("%d of %d echo requests were lost: %v\n%s", ping.lost, ping.sent, ping.last, stats)
	}
}

// unused waits until none of these offloads is used for 200 ms of a stream: what was under way when they went off
// may still be counted.
func (s *segment) unused(offloads func() map[string]control.Offload, names []string) {
	s.Helper()
	s.eventually(patience, "no offload that is off is used", func() error {
		used := offloads()
		time.Sleep(200 * time.Millisecond)
		for _, name := range names {
			if now := offloads()[name].Uses; now != used[name].Uses {
				return fmt.Errorf("offload %s was used %d times", name, now-used[name].Uses)
			}
		}
		return nil
	})
}
