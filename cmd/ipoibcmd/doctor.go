package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/doctor"
	"ipoibcm/redact"
)

func newDoctor() *cobra.Command {
	flags := defaults()
	var file, peer string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor --underlay DEVICE",
		Short: "say whether run would work here, and what to do if not",
		Long: "doctor takes the configuration and flags of run, looks at everything that run\n" +
			"needs, and names a remedy for what is missing. It opens the provider as run\n" +
			"does and makes the interface for a moment, without setting it up; and, as root,\n" +
			"two network namespaces as demo does. The exit status is 0 only if run would work.\n\n" +
			"With --peer it asks the running daemon (of --name or --control) about another\n" +
			"host: whether ARP and ND, CM messages and large packets get there and back, what\n" +
			"both must have alike, and how the connection does.",
		Example: "  ipoibcmd doctor --underlay eth0\n" +
			"  ipoibcmd doctor --config /etc/ipoibcm/ibcm0.yaml --json\n" +
			"  ipoibcmd doctor --peer 10.0.0.2",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if peer != "" {
				return doctorPeer(cmd, &flags, peer, asJSON)
			}
			all, err := configureAll(cmd, &flags, file)
			if err != nil {
				return usageError{err}
			}
			var failed error
			for _, s := range all {
				if len(all) > 1 && !asJSON {
					fmt.Fprintf(stdout, "%s:\n", s.Name)
				}
				err := printExam(doctor.Examine(gather(cmd.Context(), s)), "run would work", "run would not work", asJSON)
				failed = cmp.Or(err, failed)
			}
			return failed
		},
	}
	flags.bind(cmd.Flags())
	cmd.Flags().StringVar(&peer, "peer", "", "look at the path to this host, with the running daemon")
	cmd.Flags().StringVar(&file, "config", "", "YAML file with the same settings (ipoibcmd init prints one)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// printExam prints the checks, as a table with a verdict or as JSON. It returns an error if a check fails.
func printExam(d control.Doctor, good, bad string, asJSON bool) error {
	print := func(w io.Writer, d *control.Doctor) { printDoctor(w, d, either(d.OK, good, bad)) }
	return told(asJSON, &d, print, errorIf(!d.OK, errors.New(bad)))
}

func printDoctor(w io.Writer, d *control.Doctor, verdict string) {
	n, width := map[string]int{}, widthOf(w)
	for _, c := range d.Checks {
		n[c.Status]++
		printWrapped(w, fmt.Sprintf("%-8s %-13s ", c.Status, c.Name), 23, c.Detail, width)
		if c.Remedy != "" {
			printWrapped(w, fmt.Sprintf("%-8s %-13s -> ", "", ""), 26, c.Remedy, width)
		}
	}
	fmt.Fprintf(w, "%s: %d ok, %d to look at, %d failed, %d skipped\n", verdict, n[control.CheckOK],
		n[control.CheckWarn], n[control.CheckFail], n[control.CheckSkipped])
}

// doctorPeer asks the running daemon about one host.
func doctorPeer(cmd *cobra.Command, flags *Config, ip string, asJSON bool) error {
	if err := checkHost(ip); err != nil {
		return err
	}
	which := clientFlags{control: flags.Control}
	if cmd.Flags().Changed("name") {
		which.name = flags.Name
	}
	c, err := which.open()
	if err != nil {
		return err
	}
	f, err := gatherPeer(cmd.Context(), c, ip)
	if err != nil {
		return err
	}
	return printExam(examinePeer(&f), ip+" is reached as it should be", ip+" is not reached as it should be", asJSON)
}

// examinePeer examines f. Its texts can be those of the other host, so they are made plain.
func examinePeer(f *doctor.PeerFacts) control.Doctor {
	return redact.Texts(doctor.ExaminePeer(*f), func(s string) string { return plain(s, "") })
}

// gatherPeer gathers facts about one host. The packets that it sends make the daemon resolve that host.
func gatherPeer(ctx context.Context, c *client, ip string) (f doctor.PeerFacts, err error) {
	f.IP = ip
	about := url.Values{"ip": {ip}}
	if err := c.get(ctx, control.PathStatus, nil, &f.Own); err != nil {
		return f, err
	}
	knock(ip)
	if err := c.get(ctx, control.PathExplain, about, &f.Explained); err != nil {
		return f, err
	}
	echo := func(octets int) doctor.Echo {
		var got control.PeerPing
		err := c.get(ctx, control.PathPeerPing, url.Values{"ip": {ip}, "count": {"3"}, "size": {strconv.Itoa(octets)}}, &got)
		e := doctor.Echo{Tried: true}
		if err != nil {
			e.Err = err.Error()
			if h, ok := errors.AsType[hintError](err); ok {
				e.Hint = h.hint
			}
			_, e.Rejected = errors.AsType[rejectedError](err)
			return e
		}
		e.MS = slices.Min(got.MS)
		return e
	}
	f.LargeOctets = control.MaxPingSize
	if f.Small = echo(0); f.Small.Err == "" {
		f.Large = echo(f.LargeOctets)
		var theirs control.PeerStatus
		if c.get(ctx, control.PathPeerStatus, about, &theirs) == nil {
			f.Theirs = theirs.Status
		}
	}
	var conns control.Conns
	if err := c.get(ctx, control.PathConns, nil, &conns); err != nil {
		return f, err
	}
	for i := range conns.Conns {
		if v := &conns.Conns[i]; v.Peer == f.Explained.Peer && v.State == "ESTABLISHED" {
			f.Conn = v
		}
	}
	return f, nil
}

// knock sends a few packets to the host, so that the kernel and the daemon look for it.
func knock(ip string) {
	c, err := net.Dial("udp", net.JoinHostPort(ip, "9")) // discard
	if err != nil {
		return // explain says why
	}
	defer c.Close()
	for range 4 {
		_, _ = c.Write(nil)
		time.Sleep(knockEvery)
	}
}

const knockEvery = 250 * time.Millisecond
