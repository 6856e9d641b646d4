package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"ipoibcm/control"
)

// newTable returns an empty table in the one style all commands use.
func newTable(w io.Writer, columns ...any) table.Writer {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	t.SetStyle(table.StyleLight)
	t.Style().Options.DrawBorder = false
	t.Style().Options.SeparateColumns = false
	t.Style().Options.SeparateHeader = false
	t.Style().Format.Header = text.FormatDefault
	t.AppendHeader(columns)
	return t
}

// age prints milliseconds as people say them.
func age(ms int64) string {
	d := time.Duration(ms) * time.Millisecond
	switch {
	case d < time.Second:
		return fmt.Sprintf("%dms", ms)
	case d < 2*time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < 48*time.Hour:
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// octets prints a size with a binary unit.
func octets(n uint64) string {
	for _, u := range []struct {
		at   uint64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.at {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(u.at), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

func newStatus() *cobra.Command {
	var flags clientFlags
	var peer string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show interface, mode, MTU, GID, QPN, groups and peers on one screen",
		Example: `  ipoibcmd status
  ipoibcmd status --name ibcm1 --json
  ipoibcmd status --peer 10.0.0.2`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("peer") {
				return show(cmd.Context(), &flags, control.PathPeerStatus, url.Values{"ip": {peer}}, printPeerStatus)
			}
			return show(cmd.Context(), &flags, control.PathStatus, nil, printStatus)
		},
	}
	cmd.Flags().StringVar(&peer, "peer", "", "ask the agent of the host with this address, or this GID, over the fabric")
	flags.bindJSON(cmd)
	return cmd
}

// show asks for one document and prints it, as JSON or by print.
func show[T any](ctx context.Context, flags *clientFlags, path string, query url.Values, print func(io.Writer, *T)) error {
	c, err := flags.open()
	if err != nil {
		return err
	}
	var doc T
	if err := c.get(ctx, path, query, &doc); err != nil {
		return err
	}
	if flags.json {
		return printJSON(doc)
	}
	print(os.Stdout, &doc)
	return nil
}

func printStatus(w io.Writer, s *control.Status) {
	i, u := s.Interface, s.Underlay
	line := func(key, format string, args ...any) {
		fmt.Fprintf(w, "  %-16s %s\n", key, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(w, "%s: %s, mode %s, MTU %d (UD %d, Receive MTU %d), up %s\n", i.Name, i.State, i.Mode, i.MTU, i.UDMTU, i.ReceiveMTU, age(i.UptimeMS))
	if i.Netns != "" {
		line("namespace", "%s", i.Netns)
	}
	line("link address", "%s", i.LinkAddr)
	line("GID", "%s", i.GID)
	line("UD QPN", "%s   P_Key %s   Q_Key %s", i.UDQPN, i.PKey, i.QKey)
	line("CM messages", "%s: %s", i.CMTransport, strings.Join(i.CMPaths, ", "))
	line("broadcast", "%s", i.BroadcastGroup)
	for n, a := range i.Addresses {
		key := ""
		if n == 0 {
			key = "addresses"
		}
		state := ""
		if a.State != "ok" {
			state = " (" + a.State + ")"
		}
		line(key, "%s%s", a.Prefix, state)
	}
	state := "active"
	if !u.Active {
		state = "DOWN"
	}
	line("underlay", "%s on %s, %s, MTU %d, IB path MTU %d", u.Provider, u.Device, state, u.MTU, u.PathMTU)
	for n, o := range u.Offloads {
		key, state := "", "on"
		if n == 0 {
			key = "offloads"
		}
		if !o.On {
			state = "off"
		}
		if o.Why != "" {
			state += " (" + o.Why + ")"
		}
		line(key, "%s: %s %s, used %d times", o.Name, o.What, state, o.Uses)
	}
	for _, n := range u.Notes {
		line("", "%s", n)
	}
	for _, warning := range s.Warnings {
		fmt.Fprintln(w, "  !", warning)
	}
	if len(s.Peers) == 0 {
		fmt.Fprintln(w, "no peers yet: the first packet to an address resolves it")
		return
	}
	t := newTable(w, "PEER", "QPN", "MODE", "CLASS", "MTU", "STATE", "CM", "AGE", "TX", "RX", "ADDRESSES")
	for _, p := range s.Peers {
		t.AppendRow(table.Row{p.GID, p.UDQPN, p.Mode, p.Class, p.MTU, p.State, p.CMPath, age(p.AgeMS),
			fmt.Sprintf("%d (%s)", p.TxPackets, octets(p.TxOctets)), fmt.Sprintf("%d (%s)", p.RxPackets, octets(p.RxOctets)), strings.Join(p.Addresses, " ")})
	}
	t.Render()
}

func newShow() *cobra.Command {
	cmd := &cobra.Command{Use: "show", Short: "show connections, neighbours, routes, groups or counters",
		Example: "  ipoibcmd show conn\n  ipoibcmd show stats --json"}
	for _, sub := range []struct {
		use, short string
		run        func(context.Context, *clientFlags) error
	}{
		{"conn", "IB connections: QPNs, communication IDs, service ID, MTU", func(ctx context.Context, f *clientFlags) error {
			return show(ctx, f, control.PathConns, nil, printConns)
		}},
		{"neigh", "the ARP and ND cache", func(ctx context.Context, f *clientFlags) error {
			return show(ctx, f, control.PathNeigh, nil, printNeigh)
		}},
		{"routes", "the table packets are sent by", func(ctx context.Context, f *clientFlags) error {
			return show(ctx, f, control.PathRoutes, nil, printRoutes)
		}},
		{"groups", "multicast groups joined, and why", func(ctx context.Context, f *clientFlags) error {
			return show(ctx, f, control.PathGroups, nil, printGroups)
		}},
		{"stats", "every counter, drops by reason included", func(ctx context.Context, f *clientFlags) error {
			return show(ctx, f, control.PathStats, nil, printStats)
		}},
	} {
		var flags clientFlags
		c := &cobra.Command{Use: sub.use, Short: sub.short, Example: "  ipoibcmd show " + sub.use + "\n  ipoibcmd show " + sub.use + " --json", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			return sub.run(cmd.Context(), &flags)
		}}
		flags.bindJSON(c)
		cmd.AddCommand(c)
	}
	return cmd
}

func printConns(w io.Writer, d *control.Conns) {
	if len(d.Conns) == 0 {
		fmt.Fprintln(w, "no connections")
		return
	}
	t := newTable(w, "PEER", "MODE", "STATE", "ROLE", "CM", "DIRECTION", "SERVICE ID", "QPN", "REMOTE", "MTU", "AGE", "IDLE", "TX", "RX", "RTT", "IN FLIGHT", "SENT AGAIN", "CROSSING")
	for _, c := range d.Conns {
		rtt, flight, again := health(c.Health)
		t.AppendRow(table.Row{c.Peer, c.Mode, c.State, c.Role, c.CMPath, c.Direction, c.ServiceID, c.LocalQPN, c.RemoteQPN, c.MTU,
			age(c.AgeMS), age(c.IdleMS), octets(c.TxOctets), octets(c.RxOctets), rtt, flight, again, c.Crossing})
	}
	t.Render()
}

// health is what the table says of a connection's path: the round trip, packets in
// flight of how many there may be now (and at most, if that is more), and how many
// were sent again.
func health(h *control.Health) (rtt, flight, again string) {
	if h == nil {
		return "", "", ""
	}
	if h.RTTUS > 0 {
		rtt = fmt.Sprintf("%.0f µs", h.RTTUS)
	}
	if flight = fmt.Sprintf("%d of %d", h.InFlight, h.Limit); h.Limit < h.Window {
		flight += fmt.Sprintf(" (%d)", h.Window)
	}
	if h.Packets > 0 {
		again = fmt.Sprintf("%.2g %%", 100*float64(h.Retransmits)/float64(h.Packets))
	}
	return rtt, flight, again
}

func printNeigh(w io.Writer, d *control.Neighbours) {
	t := newTable(w, "IP", "STATE", "LINK-LAYER ADDRESS", "AGE", "QUEUED")
	for _, n := range d.Neighbours {
		t.AppendRow(table.Row{n.IP, n.State, n.LinkAddr, age(n.AgeMS), n.Queued})
	}
	t.Render()
}

func printRoutes(w io.Writer, d *control.Routes) {
	t := newTable(w, "NEXT HOP", "KIND", "PEER", "MTU", "DESTINATIONS", "IN ip route")
	for _, r := range d.Routes {
		kernel := ""
		if r.Kernel {
			kernel = "yes"
		}
		t.AppendRow(table.Row{r.NextHop, r.Kind, r.Peer, r.MTU, r.Destinations, kernel})
	}
	t.Render()
}

func printGroups(w io.Writer, d *control.Groups) {
	t := newTable(w, "MGID", "IP GROUPS", "WHY", "AGE")
	for _, g := range d.Groups {
		t.AppendRow(table.Row{g.MGID, strings.Join(g.Groups, " "), strings.Join(g.Reasons, ", "), age(g.AgeMS)})
	}
	t.Render()
}

func printStats(w io.Writer, d *control.Stats) {
	t := newTable(w, "PART", "COUNTER", "VALUE")
	for _, c := range d.Counters {
		if c.Value != 0 {
			t.AppendRow(table.Row{c.Part, c.Name, c.Value})
		}
	}
	t.Render()
	fmt.Fprintln(w, "counters at zero are left out; --json has them all")
}

func newExplain() *cobra.Command {
	var flags clientFlags
	cmd := &cobra.Command{
		Use:   "explain IP",
		Short: "say why packets to IP go the way they go: mode, MTU, peer class, last REJ",
		Example: `  ipoibcmd explain 10.0.0.2
  ipoibcmd explain fd00::2 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ip, err := netip.ParseAddr(args[0])
			if err != nil {
				return usageError{fmt.Errorf("%q is not an IP address", args[0])}
			}
			return show(cmd.Context(), &flags, control.PathExplain, url.Values{"ip": {ip.String()}}, printExplanation)
		},
	}
	flags.bindJSON(cmd)
	return cmd
}

func printExplanation(w io.Writer, e *control.Explanation) {
	fmt.Fprintf(w, "%s\n", e.IP)
	for _, kv := range [][2]string{{"next hop", e.NextHop}, {"peer", e.Peer}, {"class", e.Class}, {"mode", e.Mode}, {"MTU", fmt.Sprint(e.MTU)}, {"last REJ", e.LastREJ}, {"crossing", e.Crossing}} {
		if kv[1] != "" && kv[1] != "0" {
			fmt.Fprintf(w, "  %-9s %s\n", kv[0], kv[1])
		}
	}
	for _, why := range e.Why {
		fmt.Fprintln(w, "  -", why)
	}
}

func newMonitor() *cobra.Command {
	var flags clientFlags
	var peer string
	cmd := &cobra.Command{
		Use:   "monitor",
		Short: "follow every CM message and decision until interrupted",
		Example: `  ipoibcmd monitor
  ipoibcmd monitor --json | jq -r .text
  ipoibcmd monitor --peer 10.0.0.2`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("peer") {
				return monitorPeer(cmd.Context(), &flags, peer)
			}
			return monitor(cmd.Context(), &flags)
		},
	}
	cmd.Flags().StringVar(&peer, "peer", "", "follow the agent of the host with this address, or this GID, over the fabric")
	flags.bindJSON(cmd)
	return cmd
}

func newCapture() *cobra.Command {
	var flags clientFlags
	var snap int
	cmd := &cobra.Command{
		Use:   "capture FILE",
		Short: "write the underlay's packets to FILE (- for standard output) as pcapng until interrupted",
		Example: `  ipoibcmd capture handshake.pcapng --snap 400
  ipoibcmd capture - | tshark -r - -Y infiniband.mad`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return capture(cmd.Context(), &flags, args[0], snap) },
	}
	flags.bind(cmd)
	cmd.Flags().IntVar(&snap, "snap", 0, "keep only the first octets of each packet (0: all)")
	return cmd
}

// fieldOrder returns the keys of an event's fields sorted, so that lines can be compared.
func fieldOrder(f map[string]string) []string {
	keys := make([]string, 0, len(f))
	for k := range f {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
