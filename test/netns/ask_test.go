package netns

import (
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/roce"
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

// misused runs a command that is not to be used so, and is to say so.
func (h *host) misused(want string, args ...string) {
	h.seg.Helper()
	out, errs, code := h.output(append(args, "--control", h.path(".sock"))...)
	if code != 2 || !strings.Contains(errs, want) {
		h.seg.Errorf("%s: exit status %d, want 2 and %q\n%s%s", strings.Join(args, " "), code, want, out, errs)
	}
}

// echoes has the agent at a GID return as much as it may.
func (h *host) echoes(gid string) {
	h.seg.Helper()
	var echo control.PeerPing
	h.asks(&echo, "ping", "--rdma", gid, "--size", "16384")
	if len(echo.MS) != 3 {
		h.seg.Errorf("%d echoes, want 3", len(echo.MS))
	}
	if echo.Size != 16384 {
		h.seg.Errorf("echoes of %d octets, want 16384", echo.Size)
	}
	h.misused("--size 16385", "ping", "--rdma", gid, "--size", "16385")
}

// trusts returns the arguments with which h trusts the others.
func (h *host) trusts(others ...*host) []string {
	h.seg.Helper()
	var gids []string
	for _, o := range others {
		gid, err := o.LinkLocal(underlay)
		h.seg.must(err)
		gids = append(gids, gid.String())
	}
	return h.config("peer_trust: [\"" + strings.Join(gids, "\", \"") + "\"]\n")
}

// Agents ask each other over the fabric, also when nothing of IP works between
// their interfaces; and only those who may.
func TestAskPeers(t *testing.T) {
	parallel(t)
	s, a, b, c := newTrio(t)
	a.run()
	b.run(b.trusts(a)...)
	c.run(c.config("peer_allow: []\n")...)
	gid := b.status().Interface.GID
	a.refused("10.0.0.77: it is not a neighbour that this host knows", "ping", "--rdma", "10.0.0.77")
	// Before anything has been resolved there is only the GID.
	var ping control.PeerPing
	a.asks(&ping, "ping", "--rdma", gid, "--count", "4")
	expect.Equal(t, len(ping.MS), 4, "length of MS")
	expect.Equal(t, ping.Path.GID, gid, "GID")
	expect.Equal(t, ping.Path.Via, "as given", "Via")
	expect.Equal(t, ping.Path.RPCRDMA, 2, "RPCRDMA")
	a.connect(b, "RC")
	a.echoes(gid)
	a.asks(&ping, "ping", "--rdma", "10.0.0.2")
	expect.Equal(t, len(ping.MS), 3, "length of MS")
	expect.Equal(t, ping.Path.GID, gid, "GID")
	expect.Equal(t, ping.Path.Via, "neighbour", "Via")
	var st control.PeerStatus
	a.reach(b.v6)
	a.asks(&st, "status", "--peer", "fd00::2")
	own := b.status()
	expect.Equal(t, st.Path.GID, gid, "GID")
	expect.Equal(t, st.Status.Interface.PID, own.Interface.PID, "PID")
	expect.Equal(t, len(st.Status.Peers), len(own.Peers), "length of Peers")
	out, errs, code := a.output("status", "--peer", "10.0.0.2", "--control", a.path(".sock"))
	if code != 0 {
		t.Errorf("exit status %d, want 0\n%s", code, errs)
	}
	if err := containsAll(out, gid, "mode rc"); err != nil {
		t.Error(err)
	}
	f := a.follow("monitor", "--peer", "10.0.0.2", "--control", a.path(".sock"))
	s.eventually(patience, "the peer's events come", func() error {
		return containsAll(strings.Join(f.output(), "\n"), "REQ")
	})
	f.interrupt()

	a.asksWithoutIP(b, gid)
	a.refused("nobody listens", "ping", "--rdma", c.status().Interface.GID)
	a.refused("that is this host", "ping", "--rdma", a.status().Interface.GID)
	a.refused("the GID of its underlay", "ping", "--rdma", "10.0.0.99")
	a.misused("--count 101", "ping", "--rdma", gid, "--count", "101")
	a.misused("is not an IP address", "status", "--peer", "host")
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

// asksWithoutIP breaks IP at b in every way: addresses, routes and the interface itself.
// Its agent still answers.
func (a *host) asksWithoutIP(b *host, gid string) {
	s := a.seg
	s.Helper()
	var ping control.PeerPing
	s.must(b.DelAddr(ifName, "10.0.0.2/24"))
	s.must(b.DelAddr(ifName, "fd00::2/64"))
	s.must(b.Down(ifName))
	s.eventually(patience, "the interface is down", func() error {
		if out, _, code := a.output("status", "--peer", gid, "--control", a.path(".sock"), "--json"); code != 3 ||
			!strings.Contains(out, `"state": "down"`) {
			return fmt.Errorf("exit status %d: %s", code, out)
		}
		return nil
	})
	time.Sleep(50 * time.Millisecond)
	a.asks(&ping, "ping", "--rdma", "10.0.0.2")
	p := ping.Path
	expect.Equal(s, len(ping.MS), 3, "with IP broken: length of MS")
	expect.Equal(s, p.GID, gid, "with IP broken: GID")
	if p.Via == "as given" {
		s.Error("with IP broken: Via is \"as given\", want another")
	}
}

// What an agent tells others over the fabric has no identifier of a connection that
// is up, whoever asks; and who is not trusted learns of no neighbour.
func TestPeersLearnNoIdentifiers(t *testing.T) {
	parallel(t)
	s, a, b, c := newTrio(t)
	a.run()
	b.run(b.trusts(a)...)
	c.run()
	a.connect(b, "RC")
	b.connect(c, "RC")
	gid := b.status().Interface.GID
	ask := func(h *host, args ...string) string {
		t.Helper()
		out, errs, code := h.output(append(args, "--control", h.path(".sock"), "--json")...)
		if code != 0 {
			t.Fatalf("%s: exit status %d\n%s", strings.Join(args, " "), code, errs)
		}
		return out
	}
	f := a.follow("monitor", "--peer", gid, "--control", a.path(".sock"), "--json")
	s.eventually(patience, "the peer's events come", func() error {
		return containsAll(strings.Join(f.output(), "\n"), "REQ", "connection up", c.v4.String())
	})
	f.interrupt()
	status := ask(a, "status", "--peer", gid)
	told := map[string]string{"STATUS, trusted": status, "EVENTS": strings.Join(f.output(), "\n"),
		"STATUS": ask(c, "status", "--peer", gid)}
	times := regexp.MustCompile(`"[^"]*T\d\d:\d\d:\d\d[^"]*"`) // their digits may be those of anything
	for what, text := range told {
		text = times.ReplaceAllString(text, "")
		for name, id := range b.identifiers() {
			for _, form := range []string{id, fmt.Sprint(number(t, id))} {
				if strings.Contains(strings.ToLower(text), form) {
					t.Errorf("%s has the %s %s:\n%s", what, name, id, text)
				}
			}
		}
	}
	if err := containsAll(status, a.v4.String(), c.v4.String(), ifName); err != nil {
		t.Errorf("who is trusted does not learn: %v", err)
	}
	for _, secret := range []string{gid[len("fe80::"):], a.v4.String(), b.v4.String(), ifName} {
		if _, st, _ := strings.Cut(told["STATUS"], `"status"`); strings.Contains(st, secret) {
			t.Errorf("who is not trusted learns %q:\n%s", secret, st)
		}
	}
	c.refused("is told only", "monitor", "--peer", gid)
	c.refused("peer_trust", "monitor", "--peer", gid)
	c.refused(c.status().Interface.GID, "monitor", "--peer", gid)
	if n := b.counter("peers", "drop_not_trusted"); n != 3 {
		t.Errorf("%d were counted as not trusted, want 3", n)
	}
	out, errs, code := c.output("status", "--peer", gid, "--control", c.path(".sock"))
	if code != 0 {
		t.Errorf("status --peer of one that does not trust us: exit status %d, want 0\n%s", code, errs)
	}
	if err := containsAll(out, "up, mode rc", "peer_trust"); err != nil {
		t.Error(err)
	}
}

// identifiers returns what protects the connections of the host, in hexadecimal.
func (h *host) identifiers() map[string]string {
	h.seg.Helper()
	all, err := h.agent.Conns(h.seg.ctx)
	h.seg.must(err)
	if len(all) < 2 {
		h.seg.Fatalf("%d connections, want at least 2", len(all))
	}
	ids := map[string]string{"UD QPN": h.status().Interface.UDQPN, "Q_Key": h.status().Interface.QKey}
	for i, c := range all {
		ids[fmt.Sprint("local QPN ", i)], ids[fmt.Sprint("remote QPN ", i)] = c.LocalQPN, c.RemoteQPN
		ids[fmt.Sprint("local communication ID ", i)] = c.LocalCommID
		ids[fmt.Sprint("remote communication ID ", i)] = c.RemoteCommID
	}
	for name, id := range ids {
		ids[name] = strings.ToLower(strings.TrimPrefix(id, "0x"))
	}
	return ids
}

// number reads a hexadecimal number.
func number(t *testing.T, hex string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(hex, 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestAskBesideForgedREQs: an agent is asked while others ask it too, 100 a second, in the
// names of hosts on the link that do not exist. Each of sixteen who are there is answered.
func TestAskBesideForgedREQs(t *testing.T) {
	parallel(t)
	const perSecond, askers = 100, 16
	s := newSegment(t, topology{hosts: 3})
	b, c, x := s.hosts[0], s.hosts[1], s.hosts[2]
	b.run("--log-level", "info")
	c.run("--log-level", "info")
	f := s.forge(x, b, askingREQ, perSecond/4)
	gid := b.status().Interface.GID
	for i := range askers {
		// Each asker comes beside a quarter of a second of forged REQs. The agent answers it after those that came
		// before. So on a machine too busy for 100 a second one burst waits, and not all that were ever sent.
		f.renew()
		var burst sync.WaitGroup
		burst.Go(func() { _, _ = f.send(s.ctx, roce.Port, perSecond) })
		start := time.Now()
		var p control.PeerPing
		if err := c.agent.Get(s.ctx, control.PathPeerPing+"?ip="+url.QueryEscape(gid)+"&count=1", &p); err != nil {
			t.Errorf("asker %d: %v", i, err)
		}
		t.Logf("answered after %v", time.Since(start).Round(time.Millisecond))
		burst.Wait()
	}
	if n := b.counter("peers", "cm_rx_req"); n < 2*perSecond {
		t.Errorf("%d REQs reached the service: this shows nothing", n)
	}
}
