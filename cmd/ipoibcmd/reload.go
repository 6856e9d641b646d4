package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"ipoibcm/agent"
	"ipoibcm/control"
)

// liveKeys are the settings that can change while the agent runs, with when a change takes effect.
var liveKeys = map[string]string{
	"addresses": control.EffectNow, "idle_timeout": control.EffectNow, "log_level": control.EffectNow,
	"peers": control.EffectNow,
	"allow": control.EffectNow, "peer_allow": control.EffectNow, "peer_trust": control.EffectNow,
	"mode": control.EffectNewConnections, "receive_mtu": control.EffectNewConnections,
	"traffic_class": control.EffectNewConnections,
	"arp_accept":    control.EffectNow, "limits.connections": control.EffectNow, "limits.neighbours": control.EffectNow,
	"offload.gso": control.EffectNow, "offload.gro": control.EffectNow, "offload.connected": control.EffectNow,
	"offload.tso": control.EffectNow, "offload.uso": control.EffectNow,
}

// restartReasons say why changes of other settings take a restart.
var restartReasons = map[string]string{
	"underlay": "queue pairs and sockets are on the old device", "provider": "queue pairs are the old provider's",
	"device": "queue pairs are on the old device", "port": "queue pairs are on the old port",
	"create_broadcast": "the group is joined", "gid": "queue pairs and connections have the old GID",
	"ecn":  "queue pairs have the old one",
	"name": "it would be another interface", "netns": "the interface is in the old namespace",
	"control": "clients use the old socket", "control_group": "the socket is open",
	"cm_transport": "connections are set up the old way", "service_id": "peers have been asked in the old order",
	"ud_mtu":  "buffers are laid out for the old one",
	"metrics": "its listener is open", "metric_peers": "series would begin and end",
	"metrics_tls":  "its listener is open; the file itself is read again when it changes",
	"metrics_auth": "its listener is open; the file itself is read again when it changes",
	"log_format":   "readers of the log expect the old one",
	"pkey":         "the link is another one", "qkey": "the UD QP has the old one",
	"offload.checksum": "the interface is made with it", "offload.one_thread": "threads are laid out for it",
	"threads":        "queues of the interface, sockets and queue pairs are divided among them",
	"offload.hold_p": "threads are laid out for it", "offload.busy_poll": "threads are laid out for it",
	"link": "this host is published under the old one", "membership": "the source of members runs",
	"member_id": "this host is published under the old one",
	"state_dir": "its files are open", "etcd": "the source of members runs",
	"user": "the process has given up the rights to change it", "sandbox": "what was given up cannot be had back",
}

// differences returns the settings in which b differs from a. largest is the size of the receive buffers in
// octets, which a reload cannot change.
func differences(a, b *Config, largest int) (changes []control.Change) {
	diff := func(key string, x, y reflect.Value) {
		from, to := settingText(x), settingText(y)
		if from == to {
			return
		}
		c := control.Change{Key: key, From: from, To: to, Effect: liveKeys[key]}
		if c.Effect == "" {
			c.Effect = control.EffectRestart
			c.Why = cmp.Or(restartReasons[key], restartReasons[strings.Split(key, ".")[0]])
		}
		if key == "receive_mtu" && b.ReceiveMTU > largest {
			c.Effect, c.Why = control.EffectRestart, fmt.Sprintf("receive buffers hold %d octets", largest)
		}
		changes = append(changes, c)
	}
	eachSetting("", reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem(), diff)
	return changes
}

// eachSetting visits the settings of two configurations by their names in the file.
func eachSetting(prefix string, a, b reflect.Value, visit func(key string, a, b reflect.Value)) {
	for i := range a.NumField() {
		key := prefix + a.Type().Field(i).Tag.Get("yaml")
		if a.Field(i).Kind() == reflect.Struct {
			eachSetting(key+".", a.Field(i), b.Field(i), visit)
			continue
		}
		visit(key, a.Field(i), b.Field(i))
	}
}

// settingText prints a setting as the file would have it.
func settingText(v reflect.Value) string {
	switch {
	case v.Kind() == reflect.Slice:
		return listText(v.Interface().([]string))
	case v.Kind() == reflect.Uint16:
		return fmt.Sprintf("0x%04x", v.Uint())
	case v.Kind() == reflect.Uint32:
		return fmt.Sprintf("0x%08x", v.Uint())
	}
	return fmt.Sprint(v.Interface())
}

func listText(words []string) string { return "[" + strings.Join(words, ", ") + "]" }

// live returns the settings that can change while the agent runs, as the agent has them.
func (s *settings) live() agent.Live {
	return agent.Live{Prefixes: s.prefixes, Mode: s.mode, ReceiveMTU: s.ReceiveMTU, Idle: s.machineIdle(), Peers: s.peers,
		Allow: s.allow, PeerAllow: s.ask, PeerTrust: s.trust, ARPAlways: s.ARPAccept == arpAlways,
		MaxConns: s.Limits.Connections, MaxNeighbours: s.Limits.Neighbours,
		TrafficClass: uint8(s.Class.fixed()), InheritClass: s.Class.inherits(),
		Offloads: map[string]bool{"gso": s.Offload.GSO, "gro": s.Offload.GRO,
			"connected": s.Offload.Connected,
			"tso":       s.Offload.TSO, "uso": s.Offload.USO}}
}

// reloader returns the function that plans a reload. It reads the new configuration with read, and compares
// it with the one in force: current, or the last one that a reload applied.
func reloader(file string, current settings, level *slog.LevelVar,
	read func() (settings, error)) func() (agent.Plan, error) {
	largest := current.ReceiveMTU
	return func() (agent.Plan, error) {
		next, err := read()
		if list := (*listError)(nil); errors.As(err, &list) {
			return agent.Plan{File: file, Changes: []control.Change{{Key: interfacesKey, Effect: control.EffectRestart,
				From: listText(list.from), To: listText(list.to), Why: "they are made when the process starts"}}}, nil
		}
		if err != nil {
			return agent.Plan{}, err
		}
		changes := differences(&current.Config, &next.Config, largest)
		return agent.Plan{File: file, Changes: changes, Live: next.live(), Done: func() {
			current = next
			level.Set(next.level)
		}}, nil
	}
}

func newReload() *cobra.Command {
	var flags clientFlags
	var file string
	var check, diff bool
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "have the daemon read its configuration file again",
		Long: "reload has the daemon read the file that it was started with, and change what is\n" +
			"different there without losing a packet or a connection. Where one of the\n" +
			"changes takes a restart nothing is touched, and the exit status is 1. SIGHUP\n" +
			"does the same.",
		Example: `  ipoibcmd reload
  ipoibcmd reload --check --diff
  ipoibcmd reload --config /etc/ipoibcm/ibcm0.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			daemons := []clientFlags{flags}
			if file != "" && flags.control == "" && flags.name == "" {
				configs, err := configsOf(file)
				if err != nil {
					return usageError{err}
				}
				others, _ := filepath.Glob(filepath.Join(control.SocketDir, "*.sock"))
				var refused bool
				if daemons, refused, err = daemonsOf(cmd.Context(), file, configs, others); err != nil {
					return err
				}
				check = check || refused // by one of them: nothing is changed in the others
			}
			return reloadAll(cmd.Context(), daemons, flags.json, check, diff)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration file of the daemon")
	cmd.Flags().BoolVar(&check, "check", false, "say what would change, and change nothing")
	cmd.Flags().BoolVar(&diff, "diff", false, "show old and new values")
	flags.bindJSON(cmd)
	return cmd
}

// daemonsOf returns the daemons that were started with file, one for each of its interfaces, and whether one
// of them refuses to reload it. Since the start of a daemon, name and socket in the file may have changed, even
// to those of another daemon. Then the daemon is the one among the sockets in others that has the file.
func daemonsOf(ctx context.Context, file string, configs []Config, others []string) (all []clientFlags,
	refused bool, err error) {
	ask := func(ctx context.Context, d clientFlags) error {
		r, err := askReload(ctx, &d, true)
		if err == nil && !sameFile(r.File, file) {
			err = hintError{fmt.Errorf("the agent at %s was started with %s", d.control, r.File),
				"name the right socket with --control"}
		}
		if err != nil {
			return fmt.Errorf("%s%w", either(len(configs) > 1, d.name+": ", ""), err)
		}
		all, refused = append(all, d), refused || r.Refused
		return nil
	}
	for _, c := range configs {
		named := c.controlPath()
		err = cmp.Or(err, ask(ctx, clientFlags{control: named, name: c.Name}))
		others = slices.DeleteFunc(others, func(path string) bool { return path == named || sameFile(path, named) })
	}
	if err == nil {
		return all, refused, nil
	}
	found := len(all)
	for _, path := range others {
		ctx, cancel := context.WithTimeout(ctx, searchPatience)
		_ = ask(ctx, clientFlags{control: path, name: strings.TrimSuffix(filepath.Base(path), ".sock")}) // of another file
		cancel()
	}
	if refused || len(all) > found {
		return all, refused, nil
	}
	return nil, false, err
}

// searchPatience is how long a daemon that may be of another file is waited for.
const searchPatience = 2 * time.Second

// sameFile reports whether two paths lead to one file.
func sameFile(a, b string) bool {
	x, errA := os.Stat(a)
	y, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(x, y)
}

// reloadAll has each daemon reload its configuration.
func reloadAll(ctx context.Context, daemons []clientFlags, asJSON, check, diff bool) error {
	several := len(daemons) > 1
	var refused error
	for i := range daemons {
		d := &daemons[i]
		r, err := askReload(ctx, d, check)
		if err != nil {
			return fmt.Errorf("%s%w", either(several, d.name+": ", ""), err)
		}
		print := func(w io.Writer, r *control.Reload) {
			if several {
				fmt.Fprintf(w, "%s:\n", d.name)
			}
			printReload(w, r, check, diff)
		}
		if err := printDoc(asJSON, r, print); err != nil {
			return err
		}
		if r.Refused {
			refused = silentError{errors.New("a change takes a restart")}
		}
	}
	return refused
}

// askReload asks the agent to reload its configuration, or with check what that would change.
func askReload(ctx context.Context, flags *clientFlags, check bool) (*control.Reload, error) {
	c, err := flags.open()
	if err != nil {
		return nil, err
	}
	query := url.Values{}
	if check {
		query.Set("check", "1")
	}
	r := new(control.Reload)
	return r, c.document(ctx, http.MethodPost, control.PathReload, query, r)
}

func printReload(w io.Writer, r *control.Reload, check, diff bool) {
	width := widthOf(w)
	for _, c := range r.Changes {
		text := map[string]string{control.EffectNow: "at once", control.EffectNewConnections: "for new connections",
			control.EffectRestart: "only after a restart"}[c.Effect]
		if c.Why != "" {
			text += ": " + c.Why
		}
		printWrapped(w, fmt.Sprintf("%-14s ", c.Key), 17, text, width)
		if diff {
			printWrapped(w, "  - ", 4, cmp.Or(c.From, `""`), width)
			printWrapped(w, "  + ", 4, cmp.Or(c.To, `""`), width)
		}
	}
	n := either(len(r.Changes) == 1, "1 setting", fmt.Sprintf("%d settings", len(r.Changes)))
	verdict := n + " changed"
	switch {
	case len(r.Changes) == 0:
		verdict = r.File + " says what the daemon has already"
	case r.Refused:
		verdict = "nothing was changed; systemctl restart, or start run again, for all of it"
	case check:
		verdict = n + " would change"
	}
	printWrapped(w, "", 2, verdict, width)
}
