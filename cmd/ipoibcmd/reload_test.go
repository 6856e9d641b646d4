package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ipoibcm/control"
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
