package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"ipoibcm/control"
)

// age returns milliseconds as people say them.
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

// octets returns a size with a binary unit.
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

// fetch asks for one document.
func fetch[T any](ctx context.Context, flags *clientFlags, path string, query url.Values) (*T, error) {
	c, err := flags.open()
	if err != nil {
		return nil, err
	}
	doc := new(T)
	return doc, c.get(ctx, path, query, doc)
}

// printDoc prints a document, as JSON or by print.
func printDoc[T any](asJSON bool, doc *T, print func(io.Writer, *T)) error {
	if asJSON {
		return printJSON(doc)
	}
	print(stdout, doc)
	return nil
}

// told prints a document. If failure says that what the command was for has failed, told returns it as an
// error that the document reports.
func told[T any](asJSON bool, doc *T, print func(io.Writer, *T), failure error) error {
	if err := printDoc(asJSON, doc, print); err != nil || failure == nil {
		return err
	}
	return silentError{failure}
}

// show asks for one document and prints it, as JSON or by print.
func show[T any](ctx context.Context, flags *clientFlags, path string, query url.Values,
	print func(io.Writer, *T)) error {
	return judge(ctx, flags, path, query, print, func(*T) error { return nil })
}

// judge is show for a document that sets the exit status, which verdict returns.
func judge[T any](ctx context.Context, flags *clientFlags, path string, query url.Values, print func(io.Writer, *T),
	verdict func(*T) error) error {
	doc, err := fetch[T](ctx, flags, path, query)
	if err != nil {
		return err
	}
	return errors.Join(printDoc(flags.json, doc, print), verdict(doc))
}

// showing returns the function that shows one document without a choice of what is in it.
func showing[T any](path string, print func(io.Writer, *T)) func(context.Context, *clientFlags) error {
	return func(ctx context.Context, flags *clientFlags) error { return show(ctx, flags, path, nil, print) }
}

func newShow() *cobra.Command {
	cmd := &cobra.Command{Use: "show", Short: "show connections, neighbours, routes, groups or counters",
		Example: "  ipoibcmd show conn\n  ipoibcmd show stats --json"}
	for _, sub := range []struct {
		use, short string
		aliases    []string
		run        func(context.Context, *clientFlags) error
	}{
		{"conn", "IB connections: QPNs, communication IDs, service ID, MTU", []string{"connections", "connection"},
			showing(control.PathConns, printConns)},
		{"neigh", "the ARP and ND cache", []string{"neighbours", "neighbors", "neighbour", "neighbor"},
			showing(control.PathNeigh, printNeigh)},
		{"routes", "the table packets are sent by", []string{"route"}, showing(control.PathRoutes, printRoutes)},
		{"groups", "multicast groups joined, and why", []string{"group"}, showing(control.PathGroups, printGroups)},
		{"stats", "every counter, drops by reason included", []string{"counters"},
			showing(control.PathStats, printStats)},
	} {
		var flags clientFlags
		c := &cobra.Command{Use: sub.use, Aliases: sub.aliases, Short: sub.short, Example: "  ipoibcmd show " + sub.use +
			"\n  ipoibcmd show " + sub.use + " --json", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
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
	t := newTable("PEER", "MODE", "STATE", "MTU", "AGE", "IDLE", "TX", "RX", "RTT", "IN FLIGHT", "SENT AGAIN", "WAITING",
		"ROLE", "DIRECTION",
		"SERVICE ID", "QPN", "REMOTE QPN", "CM", "CROSSING")
	for _, c := range d.Conns {
		rtt, flight, again := health(c.Health)
		t.add(c.Peer, c.Mode, c.State, c.MTU, age(c.AgeMS), age(c.IdleMS), octets(c.TxOctets), octets(c.RxOctets),
			rtt, flight, again, waiting(&c),
			c.Role, c.Direction, c.ServiceID, c.LocalQPN, c.RemoteQPN, c.CMPath, c.Crossing)
	}
	t.render(w)
}

// waiting returns the table's text about packets for a peer that wait to be sent: how many wait, and how
// many were dropped or marked. It is empty if there were none.
func waiting(c *control.Conn) string {
	if c.TxBacklog == 0 && c.TxOverflow+c.TxLate+c.TxMarked == 0 {
		return ""
	}
	out := fmt.Sprint(c.TxBacklog)
	if n := c.TxOverflow + c.TxLate; n > 0 {
		out += fmt.Sprintf(", %d dropped", n)
	}
	if c.TxMarked > 0 {
		out += fmt.Sprintf(", %d marked", c.TxMarked)
	}
	return out
}

// health returns the table's texts about a connection's path: the round trip; the packets in flight, how
// many there may be now, and the window if that is larger; the share of packets that were sent again.
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
	t := newTable("IP", "STATE", "AGE", "QUEUED", "LINK-LAYER ADDRESS")
	for _, n := range d.Neighbours {
		t.add(n.IP, n.State, age(n.AgeMS), n.Queued, n.LinkAddr)
	}
	t.render(w)
}

func printRoutes(w io.Writer, d *control.Routes) {
	t := newTable("NEXT HOP", "KIND", "MTU", "DESTINATIONS", "IN ip route", "PEER")
	for _, r := range d.Routes {
		t.add(r.NextHop, r.Kind, r.MTU, r.Destinations, either(r.Kernel, "yes", ""), r.Peer)
	}
	t.render(w)
}

func printGroups(w io.Writer, d *control.Groups) {
	t := newTable("MGID", "AGE", "WHY", "IP GROUPS")
	for _, g := range d.Groups {
		t.add(g.MGID, age(g.AgeMS), strings.Join(g.Reasons, ", "), strings.Join(g.Groups, " "))
	}
	t.render(w)
}

func printStats(w io.Writer, d *control.Stats) {
	t := newTable("PART", "COUNTER", "VALUE")
	for _, c := range d.Counters {
		if c.Value != 0 {
			t.add(c.Part, c.Name, c.Value)
		}
	}
	t.render(w)
	fmt.Fprintln(w, "counters at zero are left out; --json has them all")
}

func newExplain() *cobra.Command {
	var flags clientFlags
	cmd := &cobra.Command{
		Use:   "explain IP",
		Short: "say why packets to IP go the way they do",
		Long: "explain says where a packet to IP would go now, and why. Exit status 0: to a\n" +
			"neighbour that is known, a group or this host; 3: nowhere; 4: not known yet\n" +
			"(nobody was asked), or by another device.",
		Example: `  ipoibcmd explain 10.0.0.2
  ipoibcmd explain fd00::2 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ip, err := netip.ParseAddr(args[0])
			if err != nil {
				return usageError{fmt.Errorf("%q is not an IP address", args[0])}
			}
			return judge(cmd.Context(), &flags, control.PathExplain, url.Values{"ip": {ip.String()}}, printExplanation, outcome)
		},
	}
	flags.bindJSON(cmd)
	return cmd
}

// outcome returns the error that sets the exit status for e.
func outcome(e *control.Explanation) error {
	switch e.Outcome {
	case "dropped":
		return exitError(exitDown)
	case "unknown", "elsewhere":
		return exitError(exitDegraded)
	}
	return nil
}

func printExplanation(w io.Writer, e *control.Explanation) {
	width := widthOf(w)
	fmt.Fprintf(w, "%s\n", e.IP)
	for _, kv := range [][2]string{{"next hop", e.NextHop}, {"peer", e.Peer}, {"class", e.Class}, {"mode", e.Mode},
		{"MTU", either(e.MTU != 0, strconv.Itoa(e.MTU), "")}, {"outcome", e.Outcome}, {"last REJ", e.LastREJ},
		{"crossing", e.Crossing}} {
		if kv[1] != "" {
			printWrapped(w, fmt.Sprintf("  %-10s", kv[0]), 12, kv[1], width)
		}
	}
	for _, why := range e.Why {
		printWrapped(w, "  - ", 4, why, width)
	}
}

func newMonitor() *cobra.Command {
	var flags clientFlags
	var peer string
	var since time.Duration
	cmd := &cobra.Command{
		Use:   "monitor",
		Short: "follow every CM message and decision until interrupted",
		Example: `  ipoibcmd monitor
  ipoibcmd monitor --since 10m
  ipoibcmd monitor --json | jq -r .text
  ipoibcmd monitor --peer 10.0.0.2`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("peer") && cmd.Flags().Changed("since") {
				return usageError{hintError{errors.New("--since is not for --peer"),
					"of another host the events that its agent has kept are shown in any case"}}
			}
			if cmd.Flags().Changed("peer") {
				return monitorPeer(cmd.Context(), &flags, peer)
			}
			if since < 0 {
				return usageError{fmt.Errorf("--since %v: must not be negative", since)}
			}
			return monitor(cmd.Context(), &flags, since)
		},
	}
	cmd.Flags().DurationVar(&since, "since", 0,
		"show past events of so long too, as far as the daemon has kept them (1024)")
	cmd.Flags().StringVar(&peer, "peer", "",
		"follow the agent of the host with this address, or this GID, over the fabric")
	flags.bindJSON(cmd)
	return cmd
}

func newCapture() *cobra.Command {
	var flags clientFlags
	var snap int
	cmd := &cobra.Command{
		Use:   "capture FILE",
		Short: "write packets of the underlay to FILE (or -) as pcapng",
		Example: `  ipoibcmd capture handshake.pcapng --snap 400
  ipoibcmd capture - | tshark -r - -Y infiniband.mad`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return capture(cmd.Context(), &flags, args[0], snap) },
	}
	flags.bind(cmd)
	cmd.Flags().IntVar(&snap, "snap", 0, "keep only the first octets of each packet (0: all)")
	return cmd
}
