package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"ipoibcm/control"
	"ipoibcm/doctor"
	"ipoibcm/redact"
)

// Bounds of a report.
const (
	maxReportItem  = 2 << 20          // octets of one file; the rest is left out
	maxReport      = 16 << 20         // octets of all files, before compression
	reportPatience = 10 * time.Second // longest wait for each file
	reportEvents   = time.Hour        // how far back events go
	reportLogLines = "5000"           // lines of the journal
)

func newBugreport() *cobra.Command {
	var flags clientFlags
	var config string
	cmd := &cobra.Command{
		Use:   "bugreport [FILE]",
		Short: "pack what is needed to look into a problem into one archive",
		Long: "bugreport asks the running daemon for status, tables, counters and past events,\n" +
			"and this host for its addresses, routes, rules, settings, firewall and log, and\n" +
			"packs them into FILE (default: ipoibcm-TIME.tar.gz), at most 16 MiB before\n" +
			"compression. CONTENTS in it says what is there, and what is not and why. It works\n" +
			"without a running daemon, too.\n\n" +
			"Identifiers of queue pairs and connections, the Q_Key, passwords, keys of the\n" +
			"kernel and comments of the configuration are left out; addresses, routes,\n" +
			"firewall rules and the log are not: look before you pass it on.",
		Example: "  ipoibcmd bugreport\n  ipoibcmd bugreport --name ibcm1 /tmp/report.tar.gz",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			now := time.Now()
			file := now.UTC().Format("ipoibcm-20060102-150405.tar.gz")
			if len(args) > 0 {
				file = args[0]
			}
			return bugreport(cmd.Context(), now, file, reportItems(&flags, config))
		},
	}
	flags.bind(cmd)
	cmd.Flags().StringVar(&config, "config", "", "the daemon's configuration file (default: /etc/ipoibcm/NAME.yaml)")
	return cmd
}

// A reportItem is one file of a report.
type reportItem struct {
	name string
	from string // where the file is taken from, for CONTENTS
	get  func(ctx context.Context) ([]byte, error)
}

// bugreport writes the items to an archive that did not exist before. An item that cannot be had is noted
// as missing; the others are packed all the same.
func bugreport(ctx context.Context, now time.Time, file string, items []reportItem) (err error) {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return hintError{fmt.Errorf("%s is there already", file), "name another file"}
	}
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			os.Remove(file)
		}
	}()
	z := gzip.NewWriter(f)
	w := tar.NewWriter(z)
	base := strings.TrimSuffix(filepath.Base(file), ".tar.gz")
	add := func(name string, b []byte) error {
		h := &tar.Header{Name: base + "/" + name, Mode: 0o600, Size: int64(len(b)), ModTime: now, Format: tar.FormatPAX}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := w.Write(b)
		return err
	}
	contents, left := new(strings.Builder), maxReport
	for _, it := range items {
		fmt.Fprintf(os.Stderr, "%-24s ", it.name)
		b, err := it.within(ctx)
		note := ""
		if len(b) > maxReportItem {
			b, note = b[:maxReportItem], fmt.Sprintf(", cut after %d MiB", maxReportItem>>20)
		}
		if err == nil && len(b) > left {
			err = fmt.Errorf("the report has %d MiB already", maxReport>>20)
		}
		if err != nil {
			note = strings.Join(strings.Fields(err.Error()), " ")
			fmt.Fprintf(contents, "%-24s missing: %s (%s)\n", it.name, note, it.from)
			fmt.Fprintf(os.Stderr, "missing: %s\n", note)
			continue
		}
		left -= len(b)
		fmt.Fprintf(contents, "%-24s %d octets%s (%s)\n", it.name, len(b), note, it.from)
		fmt.Fprintf(os.Stderr, "%d octets%s\n", len(b), note)
		if err := add(it.name, b); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if err := errors.Join(add("CONTENTS", []byte(contents.String())), w.Close(), z.Close()); err != nil {
		return err
	}
	fmt.Fprintln(stdout, file)
	return nil
}

// within gets an item, but waits for it no longer than reportPatience.
func (it *reportItem) within(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, reportPatience, fmt.Errorf("not there within %v", reportPatience))
	defer cancel()
	b, err := it.get(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return b, err
}

// reportItems lists what goes into a report.
func reportItems(flags *clientFlags, config string) []reportItem {
	name := cmp.Or(flags.name, defaults().Name)
	if config == "" {
		config = "/etc/ipoibcm/" + name + ".yaml"
	}
	items := []reportItem{
		{"version.json", "this program", func(context.Context) ([]byte, error) {
			return json.MarshalIndent(stamp(),
				"", "  ")
		}},
		{"config.yaml", config, func(context.Context) ([]byte, error) { return reportConfig(config) }},
		{"doctor.json", "ipoibcmd doctor", func(ctx context.Context) ([]byte, error) { return reportDoctor(ctx, config) }},
	}
	for _, p := range []struct{ file, path string }{
		{"status.json", control.PathStatus}, {"conns.json", control.PathConns}, {"neighbours.json", control.PathNeigh},
		{"routes.json", control.PathRoutes},
		{"groups.json", control.PathGroups}, {"counters.json", control.PathStats}, {"runtime.json", control.PathRuntime},
	} {
		items = append(items, reportItem{p.file, "the daemon, " + p.path, func(ctx context.Context) ([]byte, error) {
			v, err := fetch[any](ctx, flags, p.path, nil)
			if err != nil {
				return nil, err
			}
			return json.MarshalIndent(redactJSON(*v), "", "  ")
		}})
	}
	items = append(items, reportItem{"events.txt", "the daemon, " + control.PathEvents,
		func(ctx context.Context) ([]byte, error) { return reportEventsOf(ctx, flags) }})
	for _, c := range []struct{ file, command string }{
		{"address.txt", "ip -details address"}, {"link-statistics.txt", "ip -statistics link"},
		{"neighbour.txt", "ip neighbour"},
		{"route4.txt", "ip route show table all"}, {"route6.txt", "ip -6 route show table all"}, {"rule4.txt", "ip rule"},
		{"rule6.txt", "ip -6 rule"},
		{"nexthop.txt", "ip nexthop"}, {"nftables.txt", "nft list ruleset"}, {"rdma.txt", "rdma link"},
		{"sockets.txt", "ss -lunp"},
		{"journal.txt", "journalctl --no-pager -n " + reportLogLines + " -u ipoibcm@" + name + ".service"},
	} {
		items = append(items, reportItem{"host/" + c.file, c.command, func(ctx context.Context) ([]byte, error) {
			words := strings.Fields(c.command)
			out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput()
			if err != nil && len(out) > 0 {
				err = fmt.Errorf("%w: %.200s", err, out)
			}
			if words[0] == "journalctl" {
				out = []byte(redact.Text(string(out)))
			}
			return out, err
		}})
	}
	for _, p := range []struct{ file, pattern string }{
		{"kernel.txt", "/proc/version"}, {"os-release.txt", "/etc/os-release"}, {"meminfo.txt", "/proc/meminfo"},
		{"modules.txt", "/proc/modules"},
		{"sysctl-ipv4.txt", "/proc/sys/net/ipv4/conf/*/*"}, {"sysctl-ipv6.txt", "/proc/sys/net/ipv6/conf/*/*"},
		{"sysctl-neigh.txt", "/proc/sys/net/ipv[46]/neigh/*/*"}, {"sysctl-core.txt", "/proc/sys/net/core/*"},
		{"snmp.txt", "/proc/net/snmp*"},
	} {
		items = append(items, reportItem{"host/" + p.file, p.pattern,
			func(context.Context) ([]byte, error) { return reportFiles(p.pattern) }})
	}
	return items
}

// What is left out of a report.
var (
	// secretKeys are the settings whose values are.
	secretKeys = regexp.MustCompile(`(?i)qkey|password|passwd|secret|token|private_key`)
	// secretFiles are the kernel's settings that are: the key of stable addresses (RFC 7217 section 5), and
	// that of receive hashes.
	secretFiles = []string{"stable_secret", "netdev_rss_key"}
)

const leftOut = "left out"

// reportConfig returns the configuration without the values of secretKeys, wherever they are, and without
// comments, which may have old ones.
func reportConfig(file string) ([]byte, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	top, err := parse(b)
	if err != nil {
		return nil, err
	}
	if top.Kind != yaml.MappingNode {
		return nil, errors.New("it has no keys and values")
	}
	leaveOut(top)
	var out bytes.Buffer
	e := yaml.NewEncoder(&out)
	e.SetIndent(2)
	err = errors.Join(e.Encode(top), e.Close())
	return out.Bytes(), err
}

// leaveOut takes comments and the values of secretKeys out of n.
func leaveOut(n *yaml.Node) {
	n.HeadComment, n.LineComment, n.FootComment = "", "", ""
	for i, child := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 1 && secretKeys.MatchString(target(n.Content[i-1]).Value) {
			secret := target(child)
			*secret = yaml.Node{Kind: yaml.ScalarNode, Value: leftOut, Anchor: secret.Anchor}
			continue
		}
		leaveOut(child)
	}
}

// reportDoctor examines the host as doctor does, for each interface of the file. The daemon has its
// interfaces already, so another name is tried.
func reportDoctor(ctx context.Context, file string) ([]byte, error) {
	configs, err := configsOf(file)
	if err != nil {
		return nil, err
	}
	var out []byte
	for _, c := range configs {
		c.Name, c.Control = "ibcm-report", ""
		s, err := c.settings()
		if err != nil {
			return nil, err
		}
		b, err := json.MarshalIndent(doctor.Examine(gather(ctx, s)), "", "  ")
		if err != nil {
			return nil, err
		}
		out = append(append(out, b...), '\n')
	}
	return out, nil
}

// reportEventsOf reads the past events. The stream does not end after them, so it takes what arrives within
// a second.
func reportEventsOf(ctx context.Context, flags *clientFlags) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second) // past events come at once
	defer cancel()
	body, err := flags.stream(ctx, control.PathEvents, url.Values{"since": {reportEvents.String()}})
	if err != nil {
		return nil, err
	}
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, 2*maxReportItem))
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil
	}
	if i := bytes.LastIndexByte(b, '\n'); i >= 0 {
		b = b[:i+1]
	}
	return []byte(redact.Text(string(b))), err
}

// reportFiles joins small files, each after its name. Those that cannot be read, and secretFiles, are named
// all the same.
func reportFiles(pattern string) ([]byte, error) {
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) == 0 {
		return nil, errors.Join(err, os.ErrNotExist)
	}
	slices.Sort(names)
	var out bytes.Buffer
	for _, n := range names {
		if slices.Contains(secretFiles, filepath.Base(n)) {
			fmt.Fprintf(&out, "%s: %s\n", n, leftOut)
			continue
		}
		b, err := os.ReadFile(n)
		if err != nil {
			fmt.Fprintf(&out, "%s: %v\n", n, err)
			continue
		}
		fmt.Fprintf(&out, "%s: %s\n", n, bytes.TrimRight(b, "\n"))
	}
	return out.Bytes(), nil
}

// redactJSON takes identifiers out of the texts of a document. Its numbers are no identifiers.
func redactJSON(v any) any {
	switch v := v.(type) {
	case string:
		return redact.Text(v)
	case []any:
		for i := range v {
			v[i] = redactJSON(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = redactJSON(v[k])
		}
	}
	return v
}
