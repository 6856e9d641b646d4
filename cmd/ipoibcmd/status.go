package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"ipoibcm/control"
)

// Exit statuses of status, beside those of every command. explain has them too: exitDown if packets are
// dropped, exitDegraded if the destination is unknown or leads to another device.
const (
	exitDown     = 3 // the interface carries nothing
	exitDegraded = 4 // the interface is up, and there are warnings
)

func newStatus() *cobra.Command {
	var flags clientFlags
	var peer string
	var verbose bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "show whether the interface is up, its peers, and how it is set up",
		Long: "status shows the interface, its peers and what an operator should look at, marked\n" +
			"with an exclamation mark. The exit status is 0 if the interface is up, 3 if it\n" +
			"is down, and 4 if it is up and there are warnings.",
		Example: `  ipoibcmd status
  ipoibcmd status --name ibcm1 --json
  ipoibcmd status --peer 10.0.0.2`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("peer") {
				return statusOfPeer(cmd.Context(), &flags, peer, verbose)
			}
			return statusOf(cmd.Context(), &flags, verbose)
		},
	}
	cmd.Flags().StringVar(&peer, "peer", "", "ask the agent of the host with this address, or this GID, over the fabric")
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "show the offloads of the underlay too, and what limits them")
	flags.bindJSON(cmd)
	return cmd
}

// statusOf shows the status of this host's agent.
func statusOf(ctx context.Context, flags *clientFlags, verbose bool) error {
	print := func(w io.Writer, s *control.Status) { printStatus(w, s, verbose) }
	return judge(ctx, flags, control.PathStatus, nil, print, verdict)
}

// statusOfPeer shows the status of another host's agent.
func statusOfPeer(ctx context.Context, flags *clientFlags, peer string, verbose bool) error {
	if err := checkHost(peer); err != nil {
		return err
	}
	print := func(w io.Writer, s *control.PeerStatus) { printPeerStatus(w, s, verbose) }
	return judge(ctx, flags, control.PathPeerStatus, url.Values{"ip": {peer}}, print,
		func(s *control.PeerStatus) error { return verdict(&s.Status) })
}

// verdict returns the error that sets the exit status for s.
func verdict(s *control.Status) error {
	switch {
	case s.Interface.State != "up":
		return exitError(exitDown)
	case len(s.Warnings) > 0:
		return exitError(exitDegraded)
	}
	return nil
}

// printStatus shows the state, the warnings and the peers before the rest.
func printStatus(w io.Writer, s *control.Status, verbose bool) {
	i, width := s.Interface, widthOf(w)
	printWrapped(w, "", columnGap, fmt.Sprintf("%s: %s, mode %s, MTU %d (UD %d, Receive MTU %d), up %s",
		i.Name, i.State, i.Mode, i.MTU, i.UDMTU, i.ReceiveMTU, age(i.UptimeMS)), width)
	for _, warning := range s.Warnings {
		printWrapped(w, "  ! ", 4, warning, width)
	}
	fmt.Fprintln(w)
	printPeers(w, s.Peers)
	fmt.Fprintln(w)
	printInterface(w, s, verbose)
}

func printPeers(w io.Writer, peers []control.Peer) {
	if len(peers) == 0 {
		fmt.Fprintln(w, "no peers yet: the first packet to an address resolves it")
		return
	}
	t := newTable("PEER", "MODE", "MTU", "STATE", "AGE", "ADDRESSES", "QPN", "TX", "RX", "CLASS", "CM")
	for _, p := range peers {
		t.add(p.GID, p.Mode, p.MTU, p.State, age(p.AgeMS), strings.Join(p.Addresses, " "), p.UDQPN,
			fmt.Sprintf("%d (%s)", p.TxPackets, octets(p.TxOctets)), fmt.Sprintf("%d (%s)", p.RxPackets, octets(p.RxOctets)),
			p.Class, p.CMPath)
	}
	t.render(w)
}

// subnetLine returns the state of an InfiniBand port and its subnet administrator.
func subnetLine(n *control.Subnet) string {
	s := either(n.SMLID == 0, n.Admin, fmt.Sprintf("subnet manager at LID %d, administrator %s", n.SMLID, n.Admin))
	if n.Joined {
		s += fmt.Sprintf("; broadcast group at LID %#x, SL %d, rate %s; %d paths", n.MLID, n.SL, n.Rate, n.Paths)
	}
	if n.GRHRequired {
		s += "; a GRH is required"
	}
	if n.Shared {
		s += "; the kernel has an interface on it, so groups are not left"
	}
	return s
}

// printInterface shows how the interface and its underlay are set up.
func printInterface(w io.Writer, s *control.Status, verbose bool) {
	i, u, width := s.Interface, s.Underlay, widthOf(w)
	const keys = 16
	line := func(key, format string, args ...any) {
		printWrapped(w, fmt.Sprintf("  %-*s", keys, key), keys+4, fmt.Sprintf(format, args...), width)
	}
	if i.Netns != "" {
		line("namespace", "%s", i.Netns)
	}
	line("GID", "%s", i.GID)
	line("link address", "%s", i.LinkAddr)
	line("UD QPN", "%s, P_Key %s, Q_Key %s", i.UDQPN, i.PKey, i.QKey)
	line("CM messages", "%s: %s", i.CMTransport, strings.Join(i.CMPaths, ", "))
	line("broadcast", "%s", i.BroadcastGroup)
	for n, a := range i.Addresses {
		line(either(n == 0, "addresses", ""), "%s%s", a.Prefix, either(a.State == "ok", "", " ("+a.State+")"))
	}
	state := activeOrDown(u)
	if n := u.Subnet; n != nil {
		line("port", "%s on %s, %s, LID %d, IB path MTU %d", u.Provider, u.Device, state, n.LID, u.PathMTU)
		line("subnet", "%s", subnetLine(n))
	} else {
		line("underlay", "%s on %s, %s, MTU %d, IB path MTU %d", u.Provider, u.Device, state, u.MTU, u.PathMTU)
	}
	for _, n := range u.Notes {
		line("", "%s", n)
	}
	if len(s.Protections) > 0 {
		line("sandbox", "%s", sandboxLine(s.Protections))
	}
	if !verbose {
		return
	}
	for _, p := range s.Protections {
		line("", "%s: %s", p.Name, p.Detail)
	}
	line("data threads", "%d", i.Threads)
	for n, o := range u.Offloads {
		state := either(o.On, "on", "off")
		if o.Why != "" {
			state += " (" + o.Why + ")"
		}
		line(either(n == 0, "offloads", ""), "%s: %s %s, used %d times", o.Name, o.What, state, o.Uses)
	}
	line("build", "%s, process %d", i.Build, i.PID)
}

func activeOrDown(u control.Underlay) string { return either(u.Active, "active", "DOWN") }

// sandboxLine says which parts of the sandbox are on, and which are off.
func sandboxLine(parts []control.Protection) string {
	names := map[bool][]string{} // of those that are on, and of those that are off
	for _, p := range parts {
		names[p.On] = append(names[p.On], p.Name)
	}
	text := strings.Join(names[true], ", ")
	if off := names[false]; len(off) > 0 {
		text += "; off: " + strings.Join(off, ", ")
	}
	return strings.TrimPrefix(text, "; ")
}
