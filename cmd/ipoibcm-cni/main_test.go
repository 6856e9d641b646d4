package main

import (
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"go.yaml.in/yaml/v3"

	"ipoibcm/node"
)

func TestConfigure(t *testing.T) {
	c, err := configure([]byte(`{"cniVersion":"1.1.0","name":"n","type":"ipoibcm","master":"eth0","pkey":"0x8001","ipam":{"type":"host-local"}}`))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := c.PKey, jsonNumber(0x8001); got != want {
		t.Errorf("pkey is %#x, want %#x", got, want)
	}
	if got, want := c.Socket, node.SocketPath; got != want {
		t.Errorf("socket is %s, want %s", got, want)
	}
	for _, tt := range []struct{ name, conf, want string }{
		{"no master", `{"ipam":{"type":"host-local"}}`, "master"},
		{"no IPAM", `{"master":"eth0"}`, "ipam"},
		{"pkey too large", `{"master":"eth0","pkey":65536,"ipam":{"type":"x"}}`, "not understood"},
		{"no JSON", `{`, "not understood"},
	} {
		_, err := configure([]byte(tt.conf))
		var said *types.Error
		if !errors.As(err, &said) {
			t.Errorf("%s: got %v, want an error of CNI", tt.name, err)
		} else if !strings.Contains(said.Msg, tt.want) {
			t.Errorf("%s: got %q, want %q in it", tt.name, said.Msg, tt.want)
		}
	}
}

// No setting of the agent is ignored: the plugin takes it or refuses it.
func TestEverySettingIsTakenOrRefused(t *testing.T) {
	sample, err := os.ReadFile("../ipoibcmd/sample.yaml")
	if err != nil {
		t.Fatal(err)
	}
	taken := []string{"name", "mode", "ud_mtu", "receive_mtu", "pkey", "link", "membership", "peers", "etcd"}
	keys := append(regexp.MustCompile(`(?m)^([a-z_]+):`).FindAllStringSubmatch(string(sample), -1), []string{"", "interfaces"})
	if len(keys) < 30 {
		t.Fatalf("%d settings found in sample.yaml", len(keys))
	}
	for _, key := range keys {
		if refused := notHere[key[1]] != ""; refused == slices.Contains(taken, key[1]) {
			t.Errorf("%s: refused is %v", key[1], refused)
		}
	}
}

// What would be ignored is refused in words, by ADD and STATUS; DEL goes on.
func TestRefuse(t *testing.T) {
	const conf = `{"cniVersion":"1.1.0","name":"n","type":"ipoibcm","master":"eth0","mode":"rc","ipam":{"type":"host-local"}`
	if err := refuse([]byte(conf + `,"runtimeConfig":{},"args":{}}`)); err != nil {
		t.Errorf("nothing to refuse: %v", err)
	}
	for key, want := range map[string]string{
		"member_id": "names each pod", "state_dir": "one for each pod",
		"gid": "each pod has its own", "underlay": "master",
	} {
		text := conf + `,"` + key + `":"x"}`
		var said *types.Error
		if err := refuse([]byte(text)); !errors.As(err, &said) {
			t.Errorf("%s: got %v, want an error of CNI", key, err)
			continue
		}
		if !strings.HasPrefix(said.Msg, key+" cannot be set here: ") || !strings.Contains(said.Msg, want) {
			t.Errorf("%s: got %q, want %q in it", key, said.Msg, want)
		}
		if got, want := said.Code, uint(types.ErrInvalidNetworkConfig); got != want {
			t.Errorf("%s: code %d, want %d", key, got, want)
		}
		for name, run := range map[string]func(*skel.CmdArgs) error{"ADD": command(add), "STATUS": command(status)} {
			if err := run(&skel.CmdArgs{StdinData: []byte(text)}); err == nil ||
				!strings.Contains(err.Error(), "cannot be set here") {
				t.Errorf("%s with %s: %v", name, key, err)
			}
		}
		if _, err := configure([]byte(text)); err != nil {
			t.Errorf("DEL with %s: %v", key, err)
		}
	}
}

// What host-local gives becomes what the service is asked for.
func TestAttachment(t *testing.T) {
	var r current.Result
	err := json.Unmarshal([]byte(`{"cniVersion":"1.1.0","ips":[{"address":"10.77.0.5/24","gateway":"10.77.0.1"},{"address":"fd00::5/64"}],
		"routes":[{"dst":"0.0.0.0/0"},{"dst":"10.88.0.1/16","gw":"10.77.0.9","mtu":9000},{"dst":"fd01::/64"},
		{"dst":"10.89.0.0/16","table":100,"priority":50,"advmss":1400,"scope":0},{"dst":"10.90.0.0/16","scope":253}]}`), &r)
	if err != nil {
		t.Fatal(err)
	}
	c := netConf{Master: "eth0", Mode: "uc", UDMTU: 1444, PKey: 0x8001}
	c.Name = "fabric"
	got, err := attachment(c, &skel.CmdArgs{ContainerID: "id", IfName: "net1", Netns: "/run/netns/x"}, &r)
	if err != nil {
		t.Fatal(err)
	}
	want := node.Attachment{Key: node.Key{ContainerID: "id", IfName: "net1"}, Network: "fabric", Netns: "/run/netns/x",
		Master: "eth0", Mode: "uc", UDMTU: 1444, PKey: 0x8001,
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.77.0.5/24"), netip.MustParsePrefix("fd00::5/64")},
		Routes: []node.Route{
			{Dst: netip.MustParsePrefix("0.0.0.0/0"), GW: netip.MustParseAddr("10.77.0.1")}, // of the address
			{Dst: netip.MustParsePrefix("10.88.0.0/16"), GW: netip.MustParseAddr("10.77.0.9"), MTU: 9000},
			{Dst: netip.MustParsePrefix("fd01::/64")}, // to the link: no gateway of its family
			{Dst: netip.MustParsePrefix("10.89.0.0/16"), GW: netip.MustParseAddr("10.77.0.1"), Table: 100, Priority: 50,
				AdvMSS: 1400, Scope: new(0)},
			{Dst: netip.MustParsePrefix("10.90.0.0/16"), Scope: new(253)}, // to the link: its scope says so
		}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if _, err := attachment(c, &skel.CmdArgs{}, &current.Result{}); err == nil {
		t.Error("a result without an address is taken")
	}
	if _, err := prefix(&net.IPNet{IP: net.IPv4(10, 0, 0, 1), Mask: net.CIDRMask(100, 128)}); err == nil {
		t.Error("a mask of the other family is taken")
	}
}

// The network of the example for Kubernetes is one that the plugin takes.
func TestExample(t *testing.T) {
	text, err := os.ReadFile("../../packaging/kubernetes/network.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var example struct {
		Metadata struct{ Name string }
		Spec     struct{ Config string }
	}
	if err := yaml.Unmarshal(text, &example); err != nil {
		t.Fatal(err)
	}
	c, err := configure([]byte(example.Spec.Config))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := c.Type, "ipoibcm"; got != want {
		t.Errorf("its type is %q, want %q", got, want)
	}
	if got, want := c.Name, example.Metadata.Name; got != want {
		t.Errorf("its network is %q, want the object's name %q", got, want)
	}
}

// What is taken as a number is that number, in quotes or not.
func FuzzNumber(f *testing.F) {
	f.Add([]byte(`"0x8001"`))
	f.Add([]byte(`65535`))
	f.Add([]byte(`"65536"`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var a, b jsonNumber
		if a.UnmarshalJSON(in) != nil {
			return
		}
		if err := b.UnmarshalJSON([]byte(strconv.Itoa(int(a)))); err != nil || a != b {
			t.Errorf("%q is %d, and again %d (%v)", in, a, b, err)
		}
	})
}
