package netns

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
)

// asks runs a command that asks the agent of another host, and reads its JSON.
func (h *host) asks(v any, args ...string) {
	h.seg.Helper()
	out, errs, code := h.output(append(args, "--control", h.path(".sock"), "--json")...)
	if code != 0 || json.Unmarshal([]byte(out), v) != nil {
		h.seg.Fatalf("%s: exit status %d\n%s%s", strings.Join(args, " "), code, out, errs)
	}
}

// refused runs such a command, which must fail and say why.
func (h *host) refused(want string, args ...string) {
	h.seg.Helper()
	out, errs, code := h.output(append(args, "--control", h.path(".sock"))...)
	if code != 1 || !strings.Contains(errs, want) {
		h.seg.Errorf("%s: exit status %d, want %q\n%s%s", strings.Join(args, " "), code, want, out, errs)
	}
}

// Agents ask each other over the fabric, also when nothing of IP works between
// their interfaces; and only those who may.
func TestAskPeers(t *testing.T) {
	parallel(t)
	s := newSegment(t, topology{hosts: 3})
	a, b, c := s.hosts[0], s.hosts[1], s.hosts[2]
	a.run()
	b.run()
	c.run(c.config("peer_allow: []\n")...)
	gid := b.status().Interface.GID
	// Before anything has been resolved there is only the GID.
	var ping control.PeerPing
	a.asks(&ping, "ping", "--rdma", gid, "--count", "4")
	if p := ping.Path; len(ping.MS) != 4 || p.GID != gid || p.Via != "as given" || p.RPCRDMA != 2 {
		t.Errorf("%+v", ping)
	}
	a.connect(b, "RC")
	a.asks(&ping, "ping", "--rdma", "10.0.0.2")
	if p := ping.Path; len(ping.MS) != 3 || p.GID != gid || p.Via != "neighbour" {
		t.Errorf("%+v", ping)
	}
	var st control.PeerStatus
	a.reach(b.v6)
	a.asks(&st, "status", "--peer", "fd00::2")
	if own := b.status(); st.Path.GID != gid || st.Status.Interface.PID != own.Interface.PID || len(st.Status.Peers) != len(own.Peers) {
		t.Errorf("%+v", st)
	}
	if out, errs, code := a.output("status", "--peer", "10.0.0.2", "--control", a.path(".sock")); code != 0 || !strings.Contains(out, gid) || !strings.Contains(out, "mode rc") {
		t.Errorf("exit status %d\n%s%s", code, out, errs)
	}
	f := a.follow("monitor", "--peer", "10.0.0.2", "--control", a.path(".sock"))
	s.eventually(patience, "the peer's events come", func() error {
		return containsAll(strings.Join(f.output(), "\n"), "REQ")
	})
	f.interrupt()

	// IP is broken at b in every way: addresses, routes and the interface itself.
	s.must(b.DelAddr(ifName, "10.0.0.2/24"))
	s.must(b.DelAddr(ifName, "fd00::2/64"))
	s.must(b.Down(ifName))
	s.eventually(patience, "the interface is down", func() error {
		if out, _, code := a.output("status", "--peer", gid, "--control", a.path(".sock"), "--json"); code != 0 || !strings.Contains(out, `"state": "down"`) {
			return fmt.Errorf("exit status %d: %s", code, out)
		}
		return nil
	})
	time.Sleep(50 * time.Millisecond)
	a.asks(&ping, "ping", "--rdma", "10.0.0.2")
	if p := ping.Path; len(ping.MS) != 3 || p.GID != gid || p.Via == "as given" {
		t.Errorf("with IP broken: %+v", ping)
	}

	a.refused("nobody listens", "ping", "--rdma", c.status().Interface.GID)
	a.refused("that is this host", "ping", "--rdma", a.status().Interface.GID)
	a.refused("the GID of its underlay", "ping", "--rdma", "10.0.0.99")
	a.refused("count", "ping", "--rdma", gid, "--count", "101")
	a.refused("is not an address", "status", "--peer", "host")
	if _, _, code := a.output("ping", "10.0.0.2"); code != 2 {
		t.Errorf("ping without --rdma: exit status %d", code)
	}

	b.stop()
	b.run(b.config("peer_allow: [192.0.2.0/24]\n")...)
	a.refused("peer_allow", "status", "--peer", b.status().Interface.GID)
	if n := b.counter("peers", "drop_not_allowed"); n != 1 {
		t.Errorf("%d were counted as not allowed", n)
	}
}
