package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

// Every setting is either changed live or says why it takes a restart.
func TestEverySettingCanBeReloadedOrSaysWhyNot(t *testing.T) {
	a, b := defaults(), defaults()
	eachSetting("", reflect.ValueOf(&b).Elem(), reflect.ValueOf(&b).Elem(), func(_ string, v, _ reflect.Value) {
		switch v.Kind() {
		case reflect.String:
			v.SetString(v.String() + "x")
		case reflect.Int:
			v.SetInt(v.Int() - 1)
		case reflect.Bool:
			v.SetBool(!v.Bool())
		case reflect.Uint16, reflect.Uint32:
			v.SetUint(v.Uint() - 1)
		case reflect.Slice:
			v.Set(reflect.ValueOf([]string{"fe80::9"}))
		case reflect.Pointer:
			off := false
			v.Set(reflect.ValueOf(&off))
		default:
			t.Fatalf("a setting of kind %v", v.Kind())
		}
	})
	var keys []string
	for _, c := range differences(&a, &b, a.ReceiveMTU) {
		keys = append(keys, c.Key)
		if c.From == c.To {
			t.Errorf("%s: from %q to the same", c.Key, c.From)
		}
		if restart := c.Effect == control.EffectRestart; restart != (c.Why != "") {
			t.Errorf("%s: effect %q, why %q", c.Key, c.Effect, c.Why)
		}
	}
	for _, key := range []string{"underlay", "netns", "pkey", "offload.gso", "offload.tso", "mode", "peer_trust"} {
		if !slices.Contains(keys, key) {
			t.Errorf("%s changed, and is not among %q", key, keys)
		}
	}
	n := 0
	eachSetting("", reflect.ValueOf(&a).Elem(), reflect.ValueOf(&a).Elem(),
		func(string, reflect.Value, reflect.Value) { n++ })
	if len(keys) != n {
		t.Errorf("%d of %d settings changed", len(keys), n)
	}
}

// The plan compares with what is in force, and a file that cannot be used changes
// nothing.
func TestReloader(t *testing.T) {
	var level slog.LevelVar
	file := filepath.Join(t.TempDir(), "a.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte("underlay: lo\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func() (settings, error) {
		c := defaults()
		if _, err := c.load(file); err != nil {
			return settings{}, err
		}
		return c.settings()
	}
	write("receive_mtu: 16388\n")
	c, err := read()
	if err != nil {
		t.Fatal(err)
	}
	plan := reloader(file, c, &level, read)
	effects := func(text string) string {
		t.Helper()
		write(text)
		p, err := plan()
		if err != nil {
			return err.Error()
		}
		var s []string
		for _, c := range p.Changes {
			s = append(s, c.Key+": "+c.Effect)
		}
		return strings.Join(s, ", ")
	}
	for _, tt := range []struct{ text, want string }{
		{"receive_mtu: 16388\n", ""},
		{"receive_mtu: 8196\nmode: auto\n", "mode: new connections, receive_mtu: new connections"},
		{"receive_mtu: 16389\n", "receive_mtu: restart"},
		{"receive_mtu: 16388\nlog_level: debug\nidle_timeout: 1m\n", "log_level: now, idle_timeout: now"},
		{"receive_mtu: 16388\noffload:\n  gso: false\n", "offload.gso: now"},
		{"receive_mtu: 16388\noffload:\n  hold_p: false\n", "offload.hold_p: restart"},
		{"receive_mtu: 16388\narp_accept: always\nlimits:\n  connections: 100\n", "arp_accept: now, limits.connections: now"},
		{"receive_mtu: 16388\ntraffic_class: inherit/104\n", "traffic_class: new connections"},
		{"receive_mtu: 16388\nmode: fast\n", `mode "fast": must be rc, uc, auto or ud`},
	} {
		if got := effects(tt.text); got != tt.want {
			t.Errorf("%q: got %q, want %q", tt.text, got, tt.want)
		}
	}
	write("receive_mtu: 8196\nlog_level: debug\n")
	p, err := plan()
	if err != nil {
		t.Fatal(err)
	}
	p.Done()
	if level.Level() != slog.LevelDebug {
		t.Errorf("log level %v, want DEBUG", level.Level())
	}
	if got := effects("receive_mtu: 16388\nlog_level: debug\n"); got != "receive_mtu: new connections" {
		t.Errorf("back to what it began with: got %q", got)
	}
}

func TestReloadInWords(t *testing.T) {
	socket := fakeAgent(t, map[string]any{})
	status, _, stderr := command(t, "reload", "--control", socket)
	if status != 1 || !strings.Contains(stderr, "404") {
		t.Errorf("an agent that cannot: status %d, %q", status, stderr)
	}
	for _, tt := range []struct {
		name        string
		r           control.Reload
		check, diff bool
		want        string
	}{
		{"nothing", control.Reload{File: "a.yaml"}, false, false, "a.yaml says what the daemon has already\n"},
		{"one", control.Reload{Changes: []control.Change{{Key: "mode", From: "rc", To: "uc",
			Effect: control.EffectNewConnections}}, Applied: true}, false, false,
			"mode           for new connections\n1 setting changed\n"},
		{"with values, checked", control.Reload{Changes: []control.Change{{Key: "mode", From: "rc", To: "uc",
			Effect: control.EffectNow}}}, true, true,
			"mode           at once\n  - rc\n  + uc\n1 setting would change\n"},
		{"refused", control.Reload{Changes: []control.Change{{Key: "pkey", Effect: control.EffectRestart, Why: "because"}},
			Refused: true}, false, false,
			"pkey           only after a restart: because\nnothing was changed; systemctl restart, or start run again, for " +
				"all of it\n"},
	} {
		var b strings.Builder
		printReload(&b, &tt.r, tt.check, tt.diff)
		if got := b.String(); got != tt.want {
			t.Errorf("%s: got\n%s\nwant\n%s", tt.name, got, tt.want)
		}
	}
}

// A fakeDaemon answers what it is asked to reload.
type fakeDaemon struct {
	socket string
	asked  []string // queries
}

// newFakeDaemon returns a daemon that was started with file.
func newFakeDaemon(t *testing.T, file string, refused bool) *fakeDaemon {
	t.Helper()
	d := &fakeDaemon{socket: filepath.Join(t.TempDir(), "a.sock")}
	l, err := net.Listen("unix", d.socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.asked = append(d.asked, r.URL.RawQuery)
		json.NewEncoder(w).Encode(control.Reload{Version: control.Version, File: file, Refused: refused})
	}))
	srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	return d
}

// reload of a file with several interfaces asks each first whether all can change, and is for no daemon of
// another file.
func TestReloadOfSeveral(t *testing.T) {
	other := filepath.Join(t.TempDir(), "other.yaml")
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		refused int    // the interface of which a change takes a restart; -1: none
		other   string // the file of the second daemon; empty: the same
		status  int
		asked   []string // the queries that each is asked with
		says    string
	}{
		{"all can", -1, "", 0, []string{"check=1", ""}, "ib1:\n"},
		{"one cannot", 1, "", 1, []string{"check=1", "check=1"}, "ib1:\n"},
		{"one has another file", -1, other, 1, []string{"check=1"}, "was started with " + other},
		{"one has a file that is gone", -1, "/nothere/other.yaml", 1, []string{"check=1"}, "was started with /nothere/other.yaml"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "several.yaml")
			text := "provider: ibverbs\nunderlay: eth0\ninterfaces:\n"
			var daemons []*fakeDaemon
			for i := range 2 {
				of := file
				if i == 1 && tt.other != "" {
					of = tt.other
				}
				daemons = append(daemons, newFakeDaemon(t, of, i == tt.refused))
				text += fmt.Sprintf("  - {name: ib%d, control: %s}\n", i, daemons[i].socket)
			}
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			status, out, errs := command(t, "reload", "--config", file)
			if status != tt.status {
				t.Errorf("status %d, want %d: %s%s", status, tt.status, out, errs)
			}
			for i, d := range daemons {
				if !slices.Equal(d.asked, tt.asked) {
					t.Errorf("ib%d was asked %q, want %q", i, d.asked, tt.asked)
				}
			}
			if !strings.Contains(out+errs, tt.says) {
				t.Errorf("no %q in %q", tt.says, out+errs)
			}
		})
	}
}

// A daemon whose name or socket is another one in the file now is found by the file.
func TestReloadFindsTheDaemon(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.yaml")
	other := filepath.Join(t.TempDir(), "b.yaml")
	for _, f := range []string{file, other} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ours, theirs := newFakeDaemon(t, file, true), newFakeDaemon(t, other, false)
	missing := filepath.Join(t.TempDir(), "none.sock")
	for _, tt := range []struct {
		name   string
		named  string // the socket in the file
		others []string
		found  bool
		want   string // of the error
	}{
		{"its own socket", ours.socket, nil, true, ""},
		{"a socket that is not there", missing, []string{theirs.socket, ours.socket}, true, ""},
		{"the socket of another daemon", theirs.socket, []string{theirs.socket, ours.socket}, true, ""},
		{"no daemon of the file", missing, []string{theirs.socket}, false, "none.sock does not exist"},
		{"only another daemon", theirs.socket, []string{theirs.socket}, false, "was started with " + other},
	} {
		configs := []Config{{Name: "a", Control: tt.named}}
		all, refused, err := daemonsOf(t.Context(), file, configs, slices.Clone(tt.others))
		expect.Equal(t, refused, tt.found, "%s: refused", tt.name)
		if tt.found {
			if err != nil || len(all) != 1 {
				t.Errorf("%s: %+v, %v, want one daemon", tt.name, all, err)
				continue
			}
			expect.Equal(t, all[0].control, ours.socket, "%s: socket", tt.name)
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	if i := slices.IndexFunc(theirs.asked, func(query string) bool { return query != "check=1" }); i >= 0 {
		t.Errorf("the other daemon was asked %q", theirs.asked[i])
	}
}
