package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/pcapng"
	"ipoibcm/wire/pcapng/pcapngtest"
)

// A served agent answers on a UNIX socket until the test ends.
type served struct {
	a    *Agent
	p    *stubProvider
	path string // of its socket
	http http.Client
	stop context.CancelFunc
	done chan error
}

// answerQueries answers those of a, as its driver does, until ctx ends; then the channel is closed.
func answerQueries(ctx context.Context, a *Agent) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case q := <-a.queries:
				q()
			case <-ctx.Done():
				return
			}
		}
	}()
	return done
}

func serveAgent(t *testing.T) *served {
	a, p := newAgent(t)
	a.service.routed = true
	path := filepath.Join(t.TempDir(), "run", "ibcm0.sock")
	l, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	s := &served{a: a, p: p, path: path, stop: stop, done: make(chan error, 1)}
	s.http.Transport = &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}}
	driver := answerQueries(ctx, a)
	go func() { s.done <- a.serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		<-driver
	})
	return s
}

func (s *served) open(t *testing.T, method, path string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://agent"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func get[T any](t *testing.T, s *served, path string) (v T) {
	t.Helper()
	resp := s.open(t, "GET", path)
	expect.MustEqual(t, resp.StatusCode, 200, "%s: StatusCode", path)
	expect.MustEqual(t, resp.Header.Get("Content-Type"), "application/json", "%s: Content-Type", path)
	d := json.NewDecoder(resp.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return v
}

func TestDocuments(t *testing.T) {
	s := serveAgent(t)
	st := get[control.Status](t, s, control.PathStatus)
	i, u := st.Interface, st.Underlay
	expect.Equal(t, st.Version, control.Version, "Version")
	expect.Equal(t, i.Name, "ibcm0", "Name")
	expect.Equal(t, i.State, "up", "State")
	expect.Equal(t, i.Mode, "rc", "Mode")
	expect.Equal(t, i.UDMTU, 2044, "UDMTU")
	expect.Equal(t, i.ReceiveMTU, 65524, "ReceiveMTU")
	expect.Equal(t, i.PID, os.Getpid(), "PID")
	expect.Equal(t, i.Build, "test", "Build")
	expect.Equal(t, u.Provider, "stub", "Provider")
	expect.Equal(t, u.Device, "eth0", "Device")
	expect.Equal(t, u.MTU, 9000, "MTU")
	expect.Equal(t, u.PathMTU, 4096, "PathMTU")
	if !slices.Equal(u.GIDs, []string{gidA.String()}) {
		t.Errorf("GIDs is %v, want %v", u.GIDs, []string{gidA.String()})
	}
	if !slices.ContainsFunc(i.Addresses, func(a control.Address) bool { return a.Prefix == "10.0.0.1/24" }) {
		t.Errorf("addresses %v", i.Addresses)
	}
	for path, version := range map[string]int{
		control.PathConns:  get[control.Conns](t, s, control.PathConns).Version,
		control.PathNeigh:  get[control.Neighbours](t, s, control.PathNeigh).Version,
		control.PathGroups: get[control.Groups](t, s, control.PathGroups).Version,
	} {
		if version != control.Version {
			t.Errorf("%s: version %d", path, version)
		}
	}
	want := []control.Route{{NextHop: "10.0.0.7", Kind: "resolve", Destinations: 1, MTU: 2044}}
	if r := get[control.Routes](t, s, control.PathRoutes); !slices.Equal(r.Routes, want) {
		t.Errorf("routes %+v, want %+v", r.Routes, want)
	}
	e := get[control.Explanation](t, s, control.PathExplain+"?ip=10.0.0.2")
	expect.Equal(t, e.IP, "10.0.0.2", "IP of the explanation")
	if len(e.Why) == 0 {
		t.Error("the explanation gives no reason")
	}
}

func TestStatsNameEveryPart(t *testing.T) {
	s := serveAgent(t)
	seen := map[string]bool{}
	parts := map[string]bool{}
	for _, c := range get[control.Stats](t, s, control.PathStats).Counters {
		if key := c.Part + "." + c.Name; seen[key] {
			t.Errorf("counter %s twice", key)
		} else {
			seen[key] = true
		}
		parts[c.Part] = true
	}
	for _, p := range []string{"ipoib", "datapath", "stub", "hostnet", "agent"} {
		if !parts[p] {
			t.Errorf("no counter of %s", p)
		}
	}
	for _, c := range []string{"datapath.tx_drop_ud_queue_full", "agent.events_lost", "hostnet.dump_retries",
		"stub.rx_packets"} {
		if !seen[c] {
			t.Errorf("no counter %s", c)
		}
	}
}

func TestMetrics(t *testing.T) {
	resp := serveAgent(t).open(t, "GET", control.PathMetrics)
	b, _ := io.ReadAll(resp.Body)
	for _, want := range []string{`ipoibcm_up{interface="ibcm0"} 1`, `ipoibcm_peers{interface="ibcm0",mode="RC"} 0`,
		`ipoibcm_stub_rx_packets_total{interface="ibcm0"} 7`, `ipoibcm_build_info{build="test",interface="ibcm0"} 1`,
		`ipoibcm_answered{interface="ibcm0"} 1`, "go_goroutines"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
}

func TestRefusals(t *testing.T) {
	s := serveAgent(t)
	for _, tt := range []struct {
		method, path string
		status       int
		text, hint   string
	}{
		{"GET", control.PathExplain + "?ip=nowhere", 400, `ip "nowhere" is not an address`, "?ip="},
		{"GET", control.PathExplain, 400, `ip "" is not an address`, "?ip="},
		{"GET", control.PathCapture + "?snap=0", 400, `snap "0"`, ""},
		{"GET", control.PathCapture + "?snap=x", 400, `snap "x"`, ""},
		{"GET", "/v2/status", 404, "not part of this API", control.PathStatus},
		{"POST", control.PathStatus, 404, "POST /v1/status: not part of this API", control.PathStatus},
	} {
		resp := s.open(t, tt.method, tt.path)
		var e control.Error
		if err := json.NewDecoder(resp.Body).Decode(&e); err != nil {
			t.Errorf("%s %s: %v", tt.method, tt.path, err)
		}
		switch {
		case resp.StatusCode != tt.status:
			t.Errorf("%s %s: StatusCode is %v, want %v", tt.method, tt.path, resp.StatusCode, tt.status)
		case e.Version != control.Version:
			t.Errorf("%s %s: Version is %v, want %v", tt.method, tt.path, e.Version, control.Version)
		case !strings.Contains(e.Error, tt.text):
			t.Errorf("%s %s: %q does not say %q", tt.method, tt.path, e.Error, tt.text)
		case !strings.Contains(e.Hint, tt.hint):
			t.Errorf("%s %s: %q does not say %q", tt.method, tt.path, e.Hint, tt.hint)
		}
	}
}

// The agent serves what docs/openapi.json describes, by the methods it names.
func TestOpenAPIIsServed(t *testing.T) {
	b, err := os.ReadFile("../docs/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	if len(doc.Paths) < 15 {
		t.Fatalf("%d paths are described, too few", len(doc.Paths))
	}
	s := serveAgent(t)
	for path, methods := range doc.Paths {
		for method := range methods {
			resp := s.open(t, strings.ToUpper(method), path)
			if resp.StatusCode == http.StatusNotFound {
				t.Errorf("%s %s is not served", method, path)
			}
			resp.Body.Close()
		}
	}
}

// Lists come in pages, and a parameter that makes no sense is refused.
func TestPagesAreServed(t *testing.T) {
	s := serveAgent(t)
	for _, path := range []string{control.PathStatus, control.PathConns, control.PathNeigh, control.PathRoutes} {
		for query, want := range map[string]int{"?limit=1&after=a&peer=fe80::1": 200, "?limit=0": 400,
			"?peer=somebody": 400} {
			resp := s.open(t, "GET", path+query)
			if resp.StatusCode != want {
				t.Errorf("%s%s: status %d, want %d", path, query, resp.StatusCode, want)
			}
			resp.Body.Close()
		}
	}
}

// The connections of one peer are found by its GID and by its IP address.
func TestConnsOfOnePeer(t *testing.T) {
	a := newAgentAmong(t, 3)
	ctx, cancel := context.WithCancel(t.Context())
	done := answerQueries(ctx, a)
	defer func() {
		cancel()
		<-done
	}()
	for query, want := range map[string]int{"": 3, "?peer=fe80::200:0:0:2": 1, "?peer=10.0.1.2": 1, "?peer=10.0.1.9": 0} {
		got, err := a.pagedConns(httptest.NewRequest("GET", control.PathConns+query, nil))
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Conns) != want {
			t.Errorf("%q: %d connections, want %d", query, len(got.Conns), want)
		}
		if want == 1 && !strings.HasSuffix(got.Conns[0].Peer, "2") {
			t.Errorf("%q: a connection to %s", query, got.Conns[0].Peer)
		}
	}
}

func TestEventStream(t *testing.T) {
	s := serveAgent(t)
	resp := s.open(t, "GET", control.PathEvents)
	lines := bufio.NewScanner(resp.Body)
	for _, text := range []string{"one", "two"} {
		s.a.hub.publish(s.a.event("agent", "test", text))
		var e control.Event
		if !lines.Scan() {
			t.Fatalf("no line, want the event %q at once: %v", text, lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("line %q: %v", lines.Text(), err)
		}
		expect.MustEqual(t, e.Text, text, "Text of the event")
	}
	s.a.hub.close() // the agent stops
	if lines.Scan() {
		t.Errorf("after the end: %q", lines.Text())
	}
	if resp := s.open(t, "GET", control.PathEvents); resp.StatusCode != 503 {
		t.Errorf("following a stopped agent: %s", resp.Status)
	}
}

func TestCaptureStream(t *testing.T) {
	s := serveAgent(t)
	resp := s.open(t, "GET", control.PathCapture+"?snap=24")
	tap := <-s.p.tap
	packet := append([]byte{0x45, 0, 0, 60}, make([]byte, 56)...)
	tap(true, packet)
	tap(false, packet)
	resp2 := s.open(t, "GET", control.PathCapture)
	<-s.p.tap // set again, for two

	// The stream has no end of its own: read until both packets are there.
	var b []byte
	buf := make([]byte, 4096)
	for {
		n, err := resp.Body.Read(buf)
		b = append(b, buf[:n]...)
		if c, perr := pcapngtest.Read(b); perr == nil && len(c.Packets) == 2 {
			for i, p := range c.Packets {
				expect.Equal(t, p.Out, i == 0, "packet %d: Out", i)
				expect.MustEqual(t, len(p.Data), 24, "packet %d: length of Data", i)
				expect.Equal(t, p.OrigLen, pcapng.EthernetLen+len(packet), "packet %d: OrigLen", i)
				expect.Equal(t, p.Data[12], 0x08, "packet %d: Data[12]", i)
			}
			break
		}
		if err != nil {
			t.Fatalf("the stream ended after %d octets: %v", len(b), err)
		}
	}
	if !bytes.Contains(b, []byte("eth0")) {
		t.Error("the interface has no name")
	}
	resp.Body.Close()
	resp2.Body.Close()
	for tap := <-s.p.tap; tap != nil; tap = <-s.p.tap {
		// Once both clients have left, the provider pays nothing.
	}
}

func TestTapDropsForASlowClient(t *testing.T) {
	a, _ := newAgent(t)
	slow := &tap{ch: make(chan tapped, captureDepth)}
	if err := a.taps.add(slow); err != nil {
		t.Fatal(err)
	}
	for range captureDepth + 3 {
		a.taps.packet(true, []byte{0x60})
	}
	if a.taps.dropped.Load() != 3 {
		t.Errorf("%d dropped, want 3", a.taps.dropped.Load())
	}
	a.taps.remove(slow)
	a.taps.packet(true, []byte{0x60}) // one that was under way
}

func TestServerEndsWithTheAgent(t *testing.T) {
	s := serveAgent(t)
	events := s.open(t, "GET", control.PathEvents)
	capture := s.open(t, "GET", control.PathCapture)
	s.stop()
	if err := <-s.done; err != nil {
		t.Errorf("serve: %v", err)
	}
	for _, r := range []*http.Response{events, capture} {
		if _, err := io.Copy(io.Discard, r.Body); err != nil && !strings.Contains(err.Error(), "EOF") {
			t.Errorf("stream: %v", err)
		}
	}
}

func TestAskGivesUp(t *testing.T) {
	a, _ := newAgent(t) // nobody drives it
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := a.viewConns(ctx); err == nil {
		t.Error("an answer from nobody")
	}
}

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "ibcm0.sock")
	l, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", st.Mode(), err)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "an agent answers there already") {
		t.Errorf("a second agent: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // killed: the socket stays
	l.Close()
	l, err = listen(path)
	if err != nil {
		t.Fatalf("a leftover socket: %v", err)
	}
	l.Close()
	if err := os.WriteFile(path, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "there is something else") {
		t.Errorf("a file in the way: %v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "mine" {
		t.Error("it was removed")
	}
}
