package main

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

const twoInterfaces = `# of one host
provider: ibverbs
underlay: eth0
mode: uc
interfaces:
  - name: ib0
    addresses: [10.0.0.1/24]
  - name: ib1
    pkey: 0x8001
    mode: rc
    offload: {gso: false}
`

// severalOf returns the settings in a file with several interfaces.
func severalOf(text []byte) ([]settings, error) {
	top, err := parse(text)
	if err != nil {
		return nil, err
	}
	common, each, err := splitInterfaces(top)
	if err != nil {
		return nil, err
	}
	return decodeInterfaces(common, each)
}

// What stands beside the list holds for all, and what an interface says for itself wins.
func TestInterfaces(t *testing.T) {
	all, err := severalOf([]byte(twoInterfaces))
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 2 {
		t.Fatalf("%d interfaces, want 2", len(all))
	}
	for i, want := range []struct {
		name, mode string
		pkey       uint16
		addresses  []string
	}{
		{"ib0", "uc", 0xffff, []string{"10.0.0.1/24"}}, {"ib1", "rc", 0x8001, nil},
	} {
		c := all[i]
		expect.Equal(t, c.Name, want.name, "name of interface %d", i)
		expect.Equal(t, c.Mode, want.mode, "mode of interface %d", i)
		if c.PKey != want.pkey {
			t.Errorf("%s: P_Key 0x%04x, want 0x%04x", c.Name, c.PKey, want.pkey)
		}
		if !slices.Equal(c.Addresses, want.addresses) {
			t.Errorf("%s: addresses %v, want %v", c.Name, c.Addresses, want.addresses)
		}
	}
	// A switch is of one interface.
	expect.Equal(t, all[0].Offload.GSO, true, "GSO of interface 0")
	expect.Equal(t, all[1].Offload.GSO, false, "GSO of interface 1")
}

// The network device of an RDMA device is the underlay of interfaces too.
func TestUnderlayOfDevice(t *testing.T) {
	defer func(before func(string) string) { networkDevice = before }(networkDevice)
	networkDevice = func(device string) string { return map[string]string{"rxe0": "eth0"}[device] }
	for _, text := range []string{
		"provider: ibverbs\ndevice: rxe0\n",
		"provider: ibverbs\ndevice: rxe0\ninterfaces:\n- name: a\n",
		"provider: ibverbs\ninterfaces:\n- {name: a, device: rxe0}\n",
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		flags := defaults()
		all, err := configureAll(new(cobra.Command), &flags, file)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		expect.Equal(t, all[0].Underlay, "eth0", "%q: underlay", text)
	}
	if _, err := severalOf([]byte("provider: ibverbs\ninterfaces:\n- {name: a, device: mlx5_9}\n")); err == nil ||
		!strings.Contains(err.Error(), `line 3: interfaces[0]: device "mlx5_9": no RDMA device`) {
		t.Errorf("a device without a network device: %v", err)
	}
}

// A file without the list is left as it is.
func TestNoInterfaces(t *testing.T) {
	for _, text := range []string{"", "name: ib0\n", "- a\n"} {
		top, err := parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		common, each, err := splitInterfaces(top)
		if err != nil {
			t.Errorf("%q: %v, want it as it is", text, err)
		}
		if each != nil {
			t.Errorf("%q: a list of %d interfaces, want none", text, len(each))
		}
		expect.Equal(t, common, top, "%q: what is of all interfaces", text)
	}
}

// ibEth0 is of all interfaces.
const ibEth0 = "provider: ibverbs\nunderlay: eth0\n"

func TestBadInterfaces(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"no list", "interfaces: 3\n", "want a list"},
		{"an empty list", "interfaces: []\n", "want a list"},
		{"an item that is a word", "interfaces: [ib0]\n", "interfaces[0]: want keys and values"},
		{"an unknown key", "provider: ibverbs\n\nunderlay: eth0\ninterfaces:\n- name: a\n  nam: x\n",
			`line 6: unknown key "nam"`},
		{"a word for a number", ibEth0 + "interfaces:\n\n- {name: a,\n   port: x}\n", `line 6: "x" where a number belongs`},
		{"a fraction", ibEth0 + "interfaces:\n- limits:\n    neighbours: 16.9\n", `line 5: "16.9" where a whole number belongs`},
		{"a second document", ibEth0 + "interfaces:\n- name: a\n---\nname: b\n", "more than one YAML document"},
		{"a bad value", ibEth0 + "interfaces:\n- mode: x\n", "interfaces[0]: mode"},
		{"a list within", ibEth0 + "interfaces:\n- interfaces: []\n", `unknown key "interfaces"`},
		{"one name twice", ibEth0 + "interfaces:\n- name: a\n- name: a\n", `name "a" is that of interfaces[0]`},
		{"one socket", ibEth0 + "control: /run/x\ninterfaces:\n- name: a\n- name: b\n", `control "/run/x" is that of`},
		{"one address of metrics", ibEth0 + "metrics: 127.0.0.1:9\ninterfaces:\n- name: a\n- name: b\n", "metrics"},
		{"softroce", "underlay: eth0\ninterfaces:\n- name: a\n- name: b\n", "provider ibverbs only"},
		{"too many", "interfaces:\n" + strings.Repeat("- name: a\n", maxInterfaces+1), "at most 64"},
	} {
		if _, err := severalOf([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// The interfaces of a process are others after a restart only: until then no setting of one changes.
func TestConfigOf(t *testing.T) {
	a, b := settings{Config: Config{Name: "a"}}, settings{Config: Config{Name: "b", Mode: "uc"}}
	for _, tt := range []struct {
		name   string
		before []settings
		now    []settings
		change string // of the list; empty: none
	}{
		{"the same", []settings{a, b}, []settings{a, b}, ""},
		{"another order", []settings{a, b}, []settings{b, a}, ""},
		{"one is gone", []settings{a, b}, []settings{b}, "[a, b] [b]"},
		{"this one is gone", []settings{a, b}, []settings{a}, "[a, b] [a]"},
		{"one is new", []settings{b}, []settings{a, b}, "[b] [a, b]"},
	} {
		c, err := configOf("b", tt.before, func() ([]settings, error) { return tt.now, nil })
		plan, planErr := reloader("f", b, new(slog.LevelVar), func() (settings, error) { return c, err })()
		if planErr != nil {
			t.Errorf("%s: %v", tt.name, planErr)
			continue
		}
		expect.Equal(t, plan.File, "f", "%s: file", tt.name)
		if tt.change == "" {
			expect.Equal(t, c.Mode, "uc", "%s: mode of b", tt.name)
			expect.Equal(t, len(plan.Changes), 0, "%s: number of changes", tt.name)
			continue
		}
		if len(plan.Changes) != 1 {
			t.Errorf("%s: changes %+v, want that of the list", tt.name, plan.Changes)
			continue
		}
		got := plan.Changes[0]
		expect.Equal(t, got.Key, "interfaces", "%s: key", tt.name)
		expect.Equal(t, got.Effect, control.EffectRestart, "%s: effect", tt.name)
		expect.Equal(t, got.From+" "+got.To, tt.change, "%s: change", tt.name)
	}
	bad := errors.New("bad")
	if _, err := configOf("a", []settings{a}, func() ([]settings, error) { return nil, bad }); !errors.Is(err, bad) {
		t.Errorf("got %v, want %v", err, bad)
	}
}

// The service is ready when all interfaces are, and lives while all do.
func TestTogether(t *testing.T) {
	var told []string
	g := newTogether(func(s string) { told = append(told, s) }, 2)
	a, b := g.notifier(0), g.notifier(1)
	for _, tt := range []struct {
		from func(string)
		say  string
		want string // what the manager hears; empty: nothing
	}{
		{a, "READY=1\nSTATUS=up", ""},
		{a, "WATCHDOG=1", ""},
		{a, "WATCHDOG=1", ""},
		{b, "READY=1", "READY=1"},
		{b, "WATCHDOG=1", "WATCHDOG=1"},
		{b, "WATCHDOG=1", ""},
		{a, "STATUS=x", ""},
		{a, "RELOADING=1\nMONOTONIC_USEC=5", "RELOADING=1\nMONOTONIC_USEC=5"},
		{a, "READY=1", "READY=1"},
		{b, "STOPPING=1", "STOPPING=1"},
	} {
		told = nil
		tt.from(tt.say)
		if got := strings.Join(told, "|"); got != tt.want {
			t.Errorf("%q: the manager hears %q, want %q", tt.say, got, tt.want)
		}
	}
	if newTogether(nil, 2).notifier(0) != nil {
		t.Error("there is a notifier without a manager")
	}
}

// Interfaces of one port and partition share what the administrator does not count.
func TestLinks(t *testing.T) {
	g := newTogether(nil, 4)
	for _, c := range []Config{{Device: "a", Port: 1, PKey: 0xffff}, {Device: "a", Port: 1, PKey: 0x7fff},
		{Device: "a", Port: 2, PKey: 0xffff}, {Device: "a", Port: 1, PKey: 0x8001}} {
		g.all = append(g.all, settings{Config: c})
	}
	for i, want := range []int{2, 2, 1, 1} {
		if got := g.links(g.all[i]); got != want {
			t.Errorf("interface %d: %d on its port and partition, want %d", i, got, want)
		}
	}
	var alone *together
	if got := alone.links(settings{}); got != 1 {
		t.Errorf("an interface alone: %d, want 1", got)
	}
}
