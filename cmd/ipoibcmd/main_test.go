package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/wire/pcapng"
)

// command runs one command line as the shell would.
func command(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	files := [2]*os.File{}
	for i := range files {
		f, err := os.CreateTemp(t.TempDir(), "out")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	old := [2]*os.File{os.Stdout, os.Stderr}
	os.Stdout, os.Stderr = files[0], files[1]
	defer func() { os.Stdout, os.Stderr = old[0], old[1] }()
	status = execute(t.Context(), args)
	out, _ := os.ReadFile(files[0].Name())
	errOut, _ := os.ReadFile(files[1].Name())
	return status, string(out), string(errOut)
}

// exitFiles are sockets that nobody listens on, and configurations that are refused.
type exitFiles struct{ stale, missing, peers, many, absent string }

func newExitFiles(t *testing.T) exitFiles {
	dir := t.TempDir()
	f := exitFiles{stale: filepath.Join(dir, "stale.sock"), missing: filepath.Join(dir, "none.sock"),
		peers: filepath.Join(dir, "peers.yaml"), many: filepath.Join(dir, "many.yaml"), absent: filepath.Join(dir, "absent.yaml")}
	if err := os.WriteFile(f.absent, []byte("device: nothere9\nprovider: ibverbs\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", f.stale)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	if err := os.WriteFile(f.peers, []byte("underlay: lo\nprovider: ibverbs\npeers: [10.0.0.1]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var list strings.Builder
	list.WriteString("underlay: lo\npeers:\n")
	for i := range 4097 {
		fmt.Fprintf(&list, "- fe80::%x\n", i+1)
	}
	if err := os.WriteFile(f.many, []byte(list.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return f
}

// An exitCase is a command line that fails.
type exitCase struct {
	name   string
	args   []string
	status int
	want   []string // on standard error
}

func (f exitFiles) cases() []exitCase {
	return []exitCase{
		{"unknown command", []string{"bogus"}, 2, []string{`ipoibcmd: unknown command "bogus"`, "see: ipoibcmd --help"}},
		{"words after a subcommand", []string{"show", "conn", "x"}, 2, []string{"ipoibcmd show conn: 1 arguments given"}},
		{"unknown subcommand", []string{"show", "bogus"}, 2,
			[]string{`unknown command "bogus"`, "see: ipoibcmd show --help"}},
		{"unknown subcommand with flags", []string{"show", "bogus", "--name", "ibcm0"}, 2,
			[]string{`ipoibcmd show: unknown command "bogus"`, "see: ipoibcmd show --help"}},
		{"misspelt command", []string{"statsu", "--json"}, 2,
			[]string{`ipoibcmd: unknown command "statsu"`, "did you mean status?", "see: ipoibcmd --help"}},
		{"misspelt subcommand", []string{"show", "niegh"}, 2,
			[]string{`unknown command "niegh"`, "did you mean neigh?"}},
		{"other word for a subcommand", []string{"show", "neighbors", "--control", f.missing}, 1,
			[]string{"ipoibcmd show neigh: no agent"}},
		{"no subcommand", []string{"show"}, 2, []string{"say what: conn, groups, neigh, routes, stats"}},
		{"unknown flag", []string{"status", "--bogus"}, 2, []string{"unknown flag: --bogus", "see: ipoibcmd status --help"}},
		{"argument too few", []string{"explain"}, 2,
			[]string{"ipoibcmd explain: 0 arguments given; usage: ipoibcmd explain IP"}},
		{"argument too many", []string{"run", "eth0"}, 2, []string{"see: ipoibcmd run --help"}},
		{"not an address", []string{"explain", "here"}, 2, []string{`"here" is not an IP address`}},
		{"negative snap", []string{"capture", "--snap=-1", "-"}, 2, []string{"--snap -1: must not be negative"}},
		{"help about nothing", []string{"help", "nosuch"}, 2,
			[]string{`ipoibcmd help: unknown command "nosuch"`, "see: ipoibcmd --help"}},
		{"help about nothing below", []string{"help", "show", "nosuch"}, 2, []string{`unknown command "show nosuch"`}},
		{"unknown shell", []string{"completion", "nosuch"}, 2, []string{`unknown command "nosuch"`}},
		{"no calls", []string{"ping", "--rdma", "-c", "0", "10.0.0.2"}, 2, []string{"--count 0: must be 1 to 100"}},
		{"too many calls", []string{"ping", "--rdma", "-c", "101", "10.0.0.2"}, 2, []string{"--count 101: must be 1 to 100"}},
		{"too large a call", []string{"ping", "--rdma", "-s", "16385", "10.0.0.2"}, 2,
			[]string{"--size 16385: must be 0 to 16384"}},
		{"ping of no address", []string{"ping", "--rdma", "here"},
			2, []string{`"here" is not an IP address or GID of a host`, "such as 10.0.0.2"}},
		{"status of no address", []string{"status", "--peer", "224.0.0.1"}, 2,
			[]string{`"224.0.0.1" is not an IP address or GID of a host`}},
		{"events of no address", []string{"monitor", "--peer", "::"}, 2,
			[]string{`"::" is not an IP address or GID of a host`}},
		{"past events of a peer", []string{"monitor", "--peer", "10.0.0.2", "--since", "10m"}, 2,
			[]string{"ipoibcmd monitor: --since is not for --peer"}},
		{"too many peers", []string{"run", "--config", f.many},
			exitConfig, []string{f.many + ": line 3: peers: 4097 are given, at most 4096 can be"}},
		{"run without underlay", []string{"run"}, 2,
			[]string{"no underlay: give --underlay DEVICE (ipoibcmd devices lists them)"}},
		{"bad configuration", []string{"run", "--underlay=eth0", "--mode=fast"}, 2, []string{`ipoibcmd run: mode "fast"`}},
		{"unknown provider", []string{"run", "--underlay=lo", "--provider=other"}, 2,
			[]string{`provider "other": must be softroce or ibverbs`}},
		{"provider of the other binary", []string{"run", "--underlay=lo", "--provider=ibverbs"},
			1, []string{
				"provider ibverbs: this program was built without libibverbs: use ipoibcmd-ibverbs, which make ibverbs builds"}},
		{"no such RDMA device", []string{"run", "--device=nothere9", "--provider=ibverbs"},
			2, []string{`device "nothere9": no RDMA device of that name has a network device`}},
		{"no such port", []string{"run", "--underlay=lo", "--port=0"}, 2,
			[]string{"port 0: the ports of a device are 1 to 255"}},
		{"RDMA device of softroce", []string{"run", "--underlay=lo", "--device=rxe0"},
			2, []string{`device "rxe0": only provider ibverbs has RDMA devices`}},
		{"no file", []string{"run", "--config", f.missing}, exitConfig, []string{"read configuration: open " + f.missing}},
		{"a device of the file that may come", []string{"run", "--config", f.absent},
			2, []string{`device "nothere9": no RDMA device of that name`}},
		{"peers with ibverbs", []string{"run", "--config", f.peers},
			exitConfig, []string{"peers: provider ibverbs cannot receive the copies"}},
		{"user with ibverbs", []string{"run", "--underlay=lo", "--provider=ibverbs", "--user=65534"}, 2,
			[]string{"user: provider ibverbs cannot go on as another user"}},
		{"no such underlay", []string{"run", "--underlay=nothere9"},
			1, []string{"underlay nothere9: there is no such device", "ipoibcmd devices lists what could serve"}},
		{"no agent", []string{"status", "--control", f.missing},
			1, []string{"no agent: " + f.missing + " does not exist", "start one with ipoibcmd run"}},
		{"dead agent", []string{"show", "conn", "--control", f.stale},
			1, []string{"no agent answers at " + f.stale, "it was probably killed"}},
		{"demo too short", []string{"demo", "--duration=1ms"}, 2, []string{"--duration 1ms: must be 100ms to 1m"}},
		{"demo underlay", []string{"demo", "--underlay-mtu=1000"}, 2, []string{"--underlay-mtu 1000: must be 1500 to 65535"}},
	}
}

func TestExitStatusAndHints(t *testing.T) {
	for _, tt := range newExitFiles(t).cases() {
		status, stdout, stderr := command(t, tt.args...)
		if status != tt.status || stdout != "" {
			t.Errorf("%s: exit status %d and output %q, want %d and none", tt.name, status, stdout, tt.status)
		}
		for _, want := range tt.want {
			if !strings.Contains(stderr, want) {
				t.Errorf("%s: %q does not say %q", tt.name, stderr, want)
			}
		}
		if strings.Count(stderr, "\n") > 2 {
			t.Errorf("%s: more than an error and a hint:\n%s", tt.name, stderr)
		}
	}
}

func TestErrorsAreJSONToo(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.sock")
	for _, args := range [][]string{
		{"status"}, {"show", "conn"}, {"show", "neigh"}, {"show", "routes"}, {"show", "groups"}, {"show", "stats"},
		{"explain", "10.0.0.2"}, {"monitor"},
	} {
		status, stdout, stderr := command(t, append(args, "--json", "--control", missing)...)
		var e control.Error
		switch err := json.Unmarshal([]byte(stdout), &e); {
		case err != nil:
			t.Errorf("%v: %v", args, err)
		case status != 1:
			t.Errorf("%v: status is %v, want 1", args, status)
		case stderr != "":
			t.Errorf("%v: stderr is %v, want \"\"", args, stderr)
		}
		switch {
		case e.Version != control.Version:
			t.Errorf("%v: Version is %v, want %v", args, e.Version, control.Version)
		case !strings.Contains(e.Error, "does not exist"):
			t.Errorf("%v: %q does not say \"does not exist\"", args, e.Error)
		case e.Hint == "":
			t.Errorf("%v: Hint is empty", args)
		}
	}
	status, stdout, _ := command(t, "status", "--json", "--bogus")
	var e control.Error
	switch err := json.Unmarshal([]byte(stdout), &e); {
	case err != nil:
		t.Errorf("a wrong flag: %v", err)
	case status != 2:
		t.Errorf("a wrong flag: status is %v, want 2", status)
	case e.Hint == "":
		t.Error("a wrong flag: Hint is empty")
	}
}

func TestInitPrintsTheSample(t *testing.T) {
	status, stdout, _ := command(t, "init")
	if status != 0 || stdout != string(sample) {
		t.Errorf("status %d, %d octets, want the %d of sample.yaml", status, len(stdout), len(sample))
	}
}

// fakeAgent answers as an agent does, with documents of the test's making.
func fakeAgent(t *testing.T, docs map[string]any) string {
	path := filepath.Join(t.TempDir(), "a.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for p, doc := range docs {
		mux.HandleFunc("GET "+p, func(w http.ResponseWriter, r *http.Request) {
			switch doc := doc.(type) {
			case []byte:
				w.Write(doc)
			case control.Error:
				w.WriteHeader(http.StatusServiceUnavailable)
				json.NewEncoder(w).Encode(doc)
			default:
				json.NewEncoder(w).Encode(doc)
			}
		})
	}
	srv := &http.Server{Handler: mux}
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
	return path
}

var (
	testStatus = control.Status{Version: 1,
		Interface: control.Interface{Name: "ibcm0", State: "up", Mode: "auto", MTU: 65520, UDMTU: 2044, ReceiveMTU: 65524,
			GID: "fe80::a", UDQPN: "0x000048",
			LinkAddr: "c0:00:00:48:fe80::a", PKey: "0xffff", QKey: "0x00000b1b", BroadcastGroup: "ff12:401b:ffff::ffff:ffff",
			UptimeMS: 90_000, Build: "test",
			Addresses: []control.Address{{Prefix: "10.0.0.1/24", State: "ok"}, {Prefix: "fd00::1/64", State: "duplicate"}}},
		Underlay: control.Underlay{Provider: "softroce", Device: "eth0", MTU: 9000, PathMTU: 4096, Active: true,
			Notes:    []string{"a note"},
			Offloads: []control.Offload{{Name: "gso", What: "batches", Why: "refused", Uses: 3}}},
		Peers: []control.Peer{{LinkAddr: "80:00:00:49:fe80::b", GID: "fe80::b", UDQPN: "0x000049",
			Addresses: []string{"10.0.0.2"}, Class: "rfc", Mode: "RC",
			MTU: 65520, State: "ESTABLISHED", AgeMS: 1500, TxPackets: 10, TxOctets: 1 << 20}},
		Warnings: []string{"look at this"},
	}
	testConns = control.Conns{Version: 1,
		Conns: []control.Conn{{Peer: "80:00:00:49:fe80::b", Mode: "UC", State: "ESTABLISHED", Role: "active",
			ServiceID: "0x0100000000000049", LocalQPN: "0x000050", RemoteQPN: "0x000051", MTU: 8996, Direction: "both",
			Crossing: "accepted"}}}
)

func TestTables(t *testing.T) {
	socket := fakeAgent(t, map[string]any{
		control.PathStatus: testStatus,
		control.PathConns:  testConns,
		control.PathNeigh: control.Neighbours{Version: 1,
			Neighbours: []control.Neighbour{{IP: "10.0.0.3", State: "INCOMPLETE", Queued: 3}}},
		control.PathRoutes: control.Routes{Version: 1,
			Routes: []control.Route{{NextHop: "10.0.0.2", Kind: "connection", Destinations: 3, MTU: 65520, Kernel: true}}},
		control.PathGroups: control.Groups{Version: 1,
			Groups: []control.Group{{MGID: "ff12:401b::1", Groups: []string{"224.0.0.1"}, Reasons: []string{"always"}}}},
		control.PathStats: control.Stats{Version: 1,
			Counters: []control.Counter{{Part: "cm", Name: "req_sent", Value: 4}, {Part: "cm", Name: "rej_sent"}}},
		control.PathExplain: control.Explanation{Version: 1, IP: "10.0.0.2", Mode: "rc", MTU: 65520, LastREJ: "28",
			Why: []string{"because"}},
	})
	for _, tt := range []struct {
		args      []string
		want, not []string
	}{
		{[]string{"status"},
			[]string{"ibcm0: up, mode auto, MTU 65520 (UD 2044, Receive MTU 65524), up 90.0s\n  ! look at this\n\nPEER ",
				"fe80::a", "0x000048", "0xffff",
				"ff12:401b:ffff::ffff:ffff", "10.0.0.1/24", "fd00::1/64 (duplicate)",
				"softroce on eth0, active, MTU 9000, IB path MTU 4096", "a note", "! look at this",
				"fe80::b", "RC", "rfc", "ESTABLISHED", "1.5s", "10 (1.0 MiB)", "10.0.0.2"}, []string{"10.0.0.1/24 (ok)", "gso"}},
		{[]string{"status", "--verbose"}, []string{"gso: batches off (refused), used 3 times",
			"build           test, process 0"}, nil},
		{[]string{"show", "conn"}, []string{"SERVICE ID", "0x0100000000000049", "UC", "active", "8996", "accepted"}, nil},
		{[]string{"show", "neigh"}, []string{"10.0.0.3", "INCOMPLETE", "3"}, nil},
		{[]string{"show", "routes"}, []string{"10.0.0.2", "connection", "65520", "3", "yes"}, nil},
		{[]string{"show", "groups"}, []string{"ff12:401b::1", "224.0.0.1", "always"}, nil},
		{[]string{"show", "stats"}, []string{"req_sent", "4"}, []string{"rej_sent"}},
		{[]string{"explain", "10.0.0.2"}, []string{"10.0.0.2", "mode", "rc", "65520", "last REJ", "28", "- because"},
			[]string{"next hop", "crossing"}},
	} {
		status, stdout, stderr := command(t, append(tt.args, "--control", socket)...)
		wantStatus := 0
		if tt.args[0] == "status" {
			wantStatus = exitDegraded // there is a warning
		}
		if status != wantStatus || stderr != "" {
			t.Errorf("%v: status %d, %q, want status %d", tt.args, status, stderr, wantStatus)
		}
		for _, want := range tt.want {
			if !strings.Contains(stdout, want) {
				t.Errorf("%v lacks %q:\n%s", tt.args, want, stdout)
			}
		}
		for _, not := range tt.not {
			if strings.Contains(stdout, not) {
				t.Errorf("%v shows %q:\n%s", tt.args, not, stdout)
			}
		}
		for _, l := range strings.Split(stdout, "\n") {
			if strings.ContainsRune(l, '│') {
				t.Errorf("%v: a border in %q", tt.args, l)
			}
		}
	}
}

func TestJSONIsTheAgentsDocument(t *testing.T) {
	socket := fakeAgent(t, map[string]any{control.PathStatus: testStatus, control.PathConns: testConns})
	for _, tt := range []struct {
		args []string
		want any
	}{{[]string{"status"}, testStatus}, {[]string{"show", "conn"}, testConns}} {
		status, stdout, _ := command(t, append(tt.args, "--json", "--control", socket)...)
		want, _ := json.MarshalIndent(tt.want, "", "  ")
		wantStatus := 0
		if tt.args[0] == "status" {
			wantStatus = exitDegraded
		}
		if status != wantStatus || stdout != string(want)+"\n" {
			t.Errorf("%v: status %d, got\n%s\nwant\n%s", tt.args, status, stdout, want)
		}
	}
}

func TestRefusalByTheAgent(t *testing.T) {
	socket := fakeAgent(t, map[string]any{control.PathStatus: control.Error{Version: 1, Error: "it is busy",
		Hint: "try again"}, control.PathConns: []byte("no JSON")})
	status, _, stderr := command(t, "status", "--control", socket)
	if want := "ipoibcmd status: it is busy\n  try again\n"; status != 1 || stderr != want {
		t.Errorf("status %d, %q, want 1, %q", status, stderr, want)
	}
	if status, _, stderr = command(t, "show", "conn", "--control", socket); status != 1 ||
		!strings.Contains(stderr, "read the agent's answer") {
		t.Errorf("no JSON: status %d, %q", status, stderr)
	}
	if status, _, stderr = command(t, "show", "neigh", "--control", socket); status != 1 ||
		!strings.Contains(stderr, "404") {
		t.Errorf("an agent of another version: status %d, %q", status, stderr)
	}
}

func TestMonitorAndCapture(t *testing.T) {
	out := true
	event := control.Event{Version: 1, Time: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.Local), Part: "cm",
		Kind: "cm-sent", Peer: "fe80::b", Out: &out, Text: "REQ",
		Fields: map[string]string{"ip": "10.0.0.2", "conn": "3"}}
	line, _ := json.Marshal(event)
	packets := pcapng.AppendPacket(pcapng.AppendHeader(nil, "test"), 0, time.Unix(1, 0), true, make([]byte, 60), 60, 0)
	cut := append(bytes.Clone(packets), packets[:9]...) // the agent was killed inside a block
	socket := fakeAgent(t, map[string]any{control.PathEvents: append(line, '\n'), control.PathCapture: cut})

	status, stdout, stderr := command(t, "monitor", "--control", socket)
	if want := "03:04:05.000006 cm-sent    > REQ  peer=fe80::b conn=3 ip=10.0.0.2\n"; stdout != want {
		t.Errorf("got %q, want %q", stdout, want)
	}
	if status != 1 || !strings.Contains(stderr, "the agent has stopped") {
		t.Errorf("status %d, %q: the agent's end is worth a word", status, stderr)
	}
	if _, stdout, _ = command(t, "monitor", "--json", "--control", socket); !strings.HasPrefix(stdout, string(line)+"\n") {
		t.Errorf("as JSON: %q", stdout)
	}

	file := filepath.Join(t.TempDir(), "x.pcapng")
	status, _, stderr = command(t, "capture", "--control", socket, file)
	switch b, _ := os.ReadFile(file); {
	case !bytes.Equal(b, packets):
		t.Errorf("b is %x, want %x", b, packets)
	case !strings.Contains(stderr, "capturing to "+file):
		t.Errorf("%q does not say %q", stderr, "capturing to "+file)
	case status != 1:
		t.Errorf("status is %v, want 1", status)
	}
	if _, stdout, _ = command(t, "capture", "--control", socket, "-"); stdout != string(packets) {
		t.Errorf("to standard output: %q", stdout)
	}
}

func TestWordsForSizesAndAges(t *testing.T) {
	for ms, want := range map[int64]string{0: "0ms", 999: "999ms", 1500: "1.5s", 119_900: "119.9s", 120_000: "2m0s",
		3_661_000: "1h1m1s", 48 * 3_600_000: "2d"} {
		if got := age(ms); got != want {
			t.Errorf("%d ms: %s, want %s", ms, got, want)
		}
	}
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 19: "1.5 MiB",
		1 << 30: "1.0 GiB", 1 << 41: "2.0 TiB"} {
		if got := octets(n); got != want {
			t.Errorf("%d octets: %s, want %s", n, got, want)
		}
	}
}

func TestDemoUDMTU(t *testing.T) {
	for _, tt := range []struct {
		mtu  int
		ipv4 bool
		want int
	}{{9000, false, 2044}, {1500, false, 1424}, {9000, true, 2044}, {1500, true, 1444}} {
		if got := (&demoOptions{mtu: tt.mtu, ipv4: tt.ipv4}).udMTU(); got != tt.want {
			t.Errorf("underlay MTU %d, IPv4 %v: UD MTU %d, want %d", tt.mtu, tt.ipv4, got, tt.want)
		}
	}
}

func TestDevices(t *testing.T) {
	status, stdout, stderr := command(t, "devices", "--json")
	var d control.Devices
	switch err := json.Unmarshal([]byte(stdout), &d); {
	case err != nil:
		t.Fatalf("%v", err)
	case status != 0:
		t.Fatalf("status is %v, want 0", status)
	case stderr != "":
		t.Fatalf("stderr is %v, want \"\"", stderr)
	}
	for _, u := range d.Underlays {
		if u.Name == "lo" || u.Name == "" {
			t.Errorf("underlay %+v", u)
		}
	}
	var b bytes.Buffer
	printDevices(&b, &control.Devices{
		Underlays: []control.UnderlayDevice{{Name: "eth0", Driver: "veth", Up: true, MTU: 1500, PathMTU: 1024,
			SpeedMbps: 10000,
			Features:  map[string]bool{"tx-udp-segmentation": true, "rx-gro": false}, Addresses: []string{"fe80::1/64"}},
			{Name: "eth1"}},
		RDMA: []control.RDMADevice{{Name: "rxe0", NetDevs: []string{"eth0"}, Nodes: []string{"/dev/infiniband/uverbs0"},
			Missing: []string{"umad"}}},
		Notes: []string{"a note"},
	})
	for _, want := range []string{"eth0", "veth", "1024", "10000 Mb/s", "fe80::1/64", "on", "off", "down", "?", "rxe0",
		"uverbs0", "umad", "a note"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("devices lack %q:\n%s", want, &b)
		}
	}
}

func TestHelpNamesEveryCommand(t *testing.T) {
	root := newRoot()
	var b bytes.Buffer
	root.SetOut(&b)
	root.SetArgs([]string{"--help"})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"run", "init", "demo", "status", "show", "explain", "monitor", "capture", "devices"} {
		if !strings.Contains(b.String(), fmt.Sprintf("\n  %s ", name)) {
			t.Errorf("help does not name %s:\n%s", name, &b)
		}
	}
}

// Help fits a terminal.
func TestHelpFits(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		var b bytes.Buffer
		c.SetOut(&b)
		if err := c.Help(); err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(b.String(), "\n") {
			if n := utf8.RuneCountInString(line); n > defaultWidth+1 {
				t.Errorf("%s --help: %d characters: %s", c.CommandPath(), n, line)
			}
		}
		for _, sub := range c.Commands() {
			if sub.Name() != "completion" { // the library's own words
				walk(sub)
			}
		}
	}
	walk(newRoot())
}

// The help of every command shows how it is used, with flags that it has.
func TestHelpHasExamples(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		for _, line := range strings.Split(c.Example, "\n") {
			line, _, _ = strings.Cut(line, " | ")
			line, _, _ = strings.Cut(line, " > ")
			words := strings.Fields(line)
			if len(words) < len(strings.Fields(c.CommandPath())) ||
				!strings.HasPrefix(strings.Join(words, " "), c.CommandPath()) {
				t.Errorf("%s: example %q is not of it", c.CommandPath(), line)
				continue
			}
			found, rest, err := c.Root().Find(words[1:])
			if err == nil {
				err = found.ParseFlags(rest)
			}
			if err == nil {
				err = found.ValidateArgs(found.Flags().Args())
			}
			if err != nil {
				t.Errorf("%s: example %q: %v", c.CommandPath(), line, err)
			}
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	for _, c := range newRoot().Commands() {
		walk(c)
	}
}

func TestHealthColumns(t *testing.T) {
	for _, tt := range []struct {
		h    *control.Health
		want [3]string
	}{
		{nil, [3]string{}},
		{&control.Health{Limit: 256, Window: 256}, [3]string{"", "0 of 256", ""}},
		{&control.Health{RTTUS: 71.4, InFlight: 3, Limit: 40, Window: 256, Packets: 2000, Retransmits: 15},
			[3]string{"71 µs", "3 of 40 (256)", "0.75 %"}},
		{&control.Health{RTTUS: 1234.5, InFlight: 512, Limit: 512, Window: 512, Packets: 10},
			[3]string{"1234 µs", "512 of 512", "0 %"}},
	} {
		rtt, flight, again := health(tt.h)
		if got := [3]string{rtt, flight, again}; got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.h, got, tt.want)
		}
	}
}

// The exit status says whether the interface carries packets.
func TestStatusExit(t *testing.T) {
	for _, tt := range []struct {
		name, state string
		warnings    []string
		want        int
	}{
		{"up", "up", nil, 0},
		{"up with warnings", "up", []string{"mind the gap"}, 4},
		{"down", "down", nil, 3},
		{"underlay down", "underlay down", []string{"the underlay is down"}, 3},
	} {
		doc := control.Status{Version: 1, Interface: control.Interface{Name: "ibcm0", State: tt.state}, Warnings: tt.warnings}
		socket := fakeAgent(t, map[string]any{control.PathStatus: doc})
		for _, args := range [][]string{{"status"}, {"status", "--json"}} {
			if got, _, stderr := command(t, append(args, "--control", socket)...); got != tt.want || stderr != "" {
				t.Errorf("%s: %v: exit status %d and %q, want %d and silence", tt.name, args, got, stderr, tt.want)
			}
		}
	}
}

// Every flag whose values are few or known to the host completes them.
func TestCompletion(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"run", "--mode", ""}, "auto\t"},
		{[]string{"run", "--provider", ""}, "softroce\t"},
		{[]string{"doctor", "--log-level", ""}, "warn\n"},
		{[]string{"run", "--cm-transport", "in"}, "inband\t"},
		{[]string{"help", "show", ""}, "conn\t"},
		{[]string{"help", ""}, "doctor\t"},
	} {
		status, stdout, _ := command(t, append([]string{"__complete"}, tt.args...)...)
		if status != 0 || !strings.Contains(stdout, tt.want) {
			t.Errorf("%q: status %d, got %q, want %q in it", tt.args, status, stdout, tt.want)
		}
	}
}

func TestVersion(t *testing.T) {
	version, commit = "v9.8", "0123456789abcdef-dirty"
	defer func() { version, commit = "", "" }()
	status, stdout, _ := command(t, "version")
	if want := "ipoibcmd v9.8, commit 0123456789ab with changes, go1."; status != 0 || !strings.HasPrefix(stdout, want) {
		t.Errorf("status %d, %q, want %q", status, stdout, want)
	}
	_, stdout, _ = command(t, "version", "--json")
	var b control.Build
	switch err := json.Unmarshal([]byte(stdout), &b); {
	case err != nil:
		t.Errorf("%v", err)
	case b.Release != "v9.8":
		t.Errorf("b's Release is %v, want \"v9.8\"", b.Release)
	case b.Commit != "0123456789abcdef":
		t.Errorf("b's Commit is %v, want \"0123456789abcdef\"", b.Commit)
	case !b.Modified:
		t.Error("b's Modified is false, want true")
	}
	if _, stdout, _ = command(t, "--version"); !strings.Contains(stdout, "v9.8") {
		t.Errorf("--version: %q", stdout)
	}
}
