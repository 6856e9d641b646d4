package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"ipoibcm/control"
)

func newPing() *cobra.Command {
	var flags clientFlags
	var rdma bool
	var count, size int
	cmd := &cobra.Command{
		Use:   "ping --rdma IP",
		Short: "call the agent of another host over the fabric, below IP",
		Long: `Ask the agent on this host to call procedure 0 of another host's agent by
RPC-over-RDMA, or with --size the procedure that returns what it is given.
Nothing of the IP layer between the two is used: where ping fails and this does
not, queue pairs and CM work and the fault is above them.`,
		Example: `  ipoibcmd ping --rdma 10.0.0.2
  ipoibcmd ping --rdma fe80::a831:11ff:fe43:e8e3 --count 10 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !rdma {
				return usageError{hintError{errors.New("only --rdma is offered"), "for packets of IP use the system's ping"}}
			}
			if err := cmp.Or(
				errorIf(count < 1 || count > control.MaxPings,
					usageError{fmt.Errorf("--count %d: must be 1 to %d", count, control.MaxPings)}),
				errorIf(size < 0 || size > control.MaxPingSize,
					usageError{fmt.Errorf("--size %d: must be 0 to %d", size, control.MaxPingSize)}),
				checkHost(args[0]),
			); err != nil {
				return err
			}
			query := url.Values{"ip": {args[0]}, "count": {strconv.Itoa(count)}, "size": {strconv.Itoa(size)}}
			return show(cmd.Context(), &flags, control.PathPeerPing, query, printPing)
		},
	}
	cmd.Flags().BoolVar(&rdma, "rdma", false, "over the fabric (RPC-over-RDMA)")
	cmd.Flags().IntVarP(&count, "count", "c", 3, fmt.Sprintf("calls to make, 1 to %d", control.MaxPings))
	cmd.Flags().IntVarP(&size, "size", "s", 0, fmt.Sprintf("octets that the other agent is to return, 0 to %d",
		control.MaxPingSize))
	flags.bindJSON(cmd)
	return cmd
}

// checkHost returns an error unless s is an address that a host can have.
func checkHost(s string) error {
	ip, err := netip.ParseAddr(s)
	if err != nil || ip.IsMulticast() || ip.IsUnspecified() {
		return usageError{hintError{fmt.Errorf("%q is not an IP address or GID of a host", s),
			"such as 10.0.0.2, or the GID that status shows there"}}
	}
	return nil
}

func printPath(w io.Writer, p *control.PeerPath) {
	printWrapped(w, "", columnGap,
		fmt.Sprintf("asked %s at GID %s (%s) over RPC-over-RDMA version %d, connected in %.2f ms",
			p.IP, p.GID, p.Via, p.RPCRDMA, p.SetupMS), widthOf(w))
}

func printPing(w io.Writer, p *control.PeerPing) {
	printPath(w, &p.Path)
	what := either(p.Size > 0, fmt.Sprintf("ECHO of %d octets", p.Size), "NULL")
	for i, ms := range p.MS {
		fmt.Fprintf(w, "  %s %d: %.3f ms\n", what, i+1, ms)
	}
	sorted := slices.Sorted(slices.Values(p.MS))
	if len(sorted) > 1 {
		fmt.Fprintf(w, "%d calls answered, min %.3f, median %.3f, max %.3f ms\n", len(sorted), sorted[0],
			sorted[len(sorted)/2], sorted[len(sorted)-1])
	}
}

func printPeerStatus(w io.Writer, p *control.PeerStatus, verbose bool) {
	printPath(w, &p.Path)
	var b strings.Builder
	if p.Status.Interface.GID == "" && p.Status.Limited != "" {
		printBrief(&b, &p.Status)
	} else {
		printStatus(&b, &p.Status, verbose)
	}
	if p.Status.Limited != "" {
		fmt.Fprintln(&b, "  not shown:", p.Status.Limited)
	}
	_, _ = io.WriteString(w, plain(b.String(), "\n"))
}

// printBrief prints the short status that the agent of another host gives to hosts that it does not trust.
func printBrief(w io.Writer, s *control.Status) {
	i := s.Interface
	printWrapped(w, "", columnGap,
		fmt.Sprintf("%s, mode %s, UD MTU %d, Receive MTU %d, underlay %s, IB path MTU %d, build %s",
			i.State, i.Mode, i.UDMTU, i.ReceiveMTU, activeOrDown(s.Underlay), s.Underlay.PathMTU, i.Build), widthOf(w))
}

// plain returns s, a text of another host, without the control characters that a terminal would obey. It
// replaces all but those in keep by U+FFFD.
func plain(s, keep string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && !strings.ContainsRune(keep, r) {
			return '\ufffd'
		}
		return r
	}, s)
}

// peerEvery is how often a peer is asked for its events.
const peerEvery = time.Second

// monitorPeer prints the events of another host's agent as they come, until ctx ends.
func monitorPeer(ctx context.Context, flags *clientFlags, peer string) error {
	if err := checkHost(peer); err != nil {
		return err
	}
	c, err := flags.open()
	if err != nil {
		return err
	}
	tick := time.NewTicker(peerEvery)
	defer tick.Stop()
	for after := uint64(0); ; {
		var got control.PeerEvents
		if err := c.get(ctx, control.PathPeerEvents, url.Values{"ip": {peer}, "after": {strconv.FormatUint(after, 10)}},
			&got); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		for _, e := range got.Events {
			if flags.json {
				if err := json.NewEncoder(stdout).Encode(e); err != nil {
					return err
				}
				continue
			}
			fmt.Fprintln(stdout, plain(eventLine(&e), ""))
		}
		after = got.Last
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}
