package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"ipoibcm/agent"
	"ipoibcm/hostnet"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/mtu"
	"ipoibcm/provider/softroce"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

func newRun() *cobra.Command {
	flags := defaults()
	var file string
	var exitOnEOF bool
	cmd := &cobra.Command{
		Use:   "run --underlay DEVICE",
		Short: "serve the interface until interrupted",
		Example: "  ipoibcmd run --underlay eth0 --address 10.0.0.1/24\n" +
			"  ipoibcmd run --config /etc/ipoibcm/ibcm0.yaml",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := configure(cmd, &flags, file)
			if err != nil {
				return usageError{err}
			}
			ctx := cmd.Context()
			if exitOnEOF {
				var stop context.CancelFunc
				ctx, stop = context.WithCancel(ctx)
				go func() {
					io.Copy(io.Discard, os.Stdin)
					stop()
				}()
			}
			return run(ctx, c)
		},
	}
	flags.bind(cmd.Flags())
	cmd.Flags().StringVar(&file, "config", "", "YAML file with the same settings (ipoibcmd init prints one)")
	cmd.Flags().BoolVar(&exitOnEOF, "exit-on-eof", false, "end when standard input does: for programs that start agents")
	cmd.Flags().MarkHidden("exit-on-eof")
	return cmd
}

func newInit() *cobra.Command {
	return &cobra.Command{
		Use:     "init",
		Short:   "print a commented sample configuration",
		Example: "  ipoibcmd init > /etc/ipoibcm/ibcm0.yaml",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := os.Stdout.Write(sample)
			return err
		},
	}
}

// run serves one interface as c says.
func run(ctx context.Context, c Config) error {
	s, err := c.settings()
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: s.level}))
	provider, gid, notes, err := openProvider(ctx, c, s, log)
	if errors.Is(err, softroce.ErrStopped) {
		return nil // interrupted before there was anything to end
	}
	if err != nil {
		return err
	}
	advice, _ := c.checkUD(s.gid)(provider.Port())
	for _, n := range slices.Concat(notes, advice) {
		log.Info("underlay", "note", n)
	}
	mode, err := ipoib.ParseMode(c.Mode)
	if err != nil {
		return errors.Join(err, provider.Close())
	}
	cmTransport, err := ipoib.ParseCMTransport(c.CMTransport)
	if err != nil {
		return errors.Join(err, provider.Close())
	}
	idle := s.idle
	if idle == 0 {
		idle = -1 // the file's 0 is the machine's never
	}
	opt := agent.Options{
		Provider: provider, GID: gid, Name: c.Name, Prefixes: s.prefixes, Control: c.controlPath(),
		Mode: mode, CM: cmTransport, UDMTU: c.UDMTU, ReceiveMTU: c.ReceiveMTU, PKey: ib.PKey(c.PKey) | ib.PKeyFull, QKey: ib.QKey(c.QKey),
		Idle: idle, Peers: s.peers, PeerAllow: s.allow, OwnTUNThread: off(c.Offload.OneThread), Build: build(), Notes: notes, Check: c.checkUD(s.gid), Log: log,
	}
	started := time.Now()
	return agent.Run(ctx, opt, func() {
		log.Info("interface up", "name", c.Name, "control", opt.Control, "took", time.Since(started).Round(time.Millisecond))
	})
}

// off says that a switch was set to false.
func off(b *bool) bool { return b != nil && !*b }

// openProvider opens what carries RDMA, and checks that the UD MTU fits it. The
// notes are what an operator should know about the choice.
func openProvider(ctx context.Context, c Config, s settings, log *slog.Logger) (verbs.Provider, ib.GID, []string, error) {
	if c.Provider != "softroce" {
		return nil, ib.GID{}, nil, fmt.Errorf("provider %q: this binary has softroce only", c.Provider)
	}
	link, err := hostnet.Lookup(c.Underlay)
	if err != nil {
		if errors.Is(err, hostnet.ErrNotFound) {
			err = errors.New("there is no such device")
		}
		return nil, ib.GID{}, nil, hintError{fmt.Errorf("underlay %s: %w", c.Underlay, err), "ipoibcmd devices lists what could serve"}
	}
	if !link.Up {
		return nil, ib.GID{}, nil, hintError{fmt.Errorf("underlay %s is down", c.Underlay), "ip link set " + c.Underlay + " up"}
	}
	dev, err := softroce.Open(softroce.Options{
		Underlay: c.Underlay, GID: s.gid, MaxUDPayload: c.UDMTU + encap.HeaderLen, PKeys: []ib.PKey{ib.PKey(cmp.Or(c.PKey, uint16(ib.DefaultPKey))) | ib.PKeyFull},
		NoGSO: off(c.Offload.GSO), NoGRO: off(c.Offload.GRO), Stop: ctx.Done(), Log: log,
	})
	if err != nil {
		return nil, ib.GID{}, nil, fmt.Errorf("open softroce on %s: %w", c.Underlay, err)
	}
	port := dev.Port()
	gid := s.gid
	if gid.IsZero() && len(port.GIDs) > 0 {
		gid = port.GIDs[0]
	}
	if _, err := c.checkUD(s.gid)(port); err != nil {
		return nil, ib.GID{}, nil, errors.Join(err, dev.Close())
	}
	var notes []string
	if s.gid.IsZero() && gid.Is4() {
		notes = append(notes, "no IPv6 address on the underlay: its IPv4 address "+gid.Addr().String()+" is the GID")
	}
	return dev, s.gid, notes, nil
}

// checkUD returns what says whether a port carries the UD MTU, and how.
func (c *Config) checkUD(gid ib.GID) func(verbs.Port) ([]string, error) {
	return func(port verbs.Port) ([]string, error) {
		g := gid
		if g.IsZero() && len(port.GIDs) > 0 {
			g = port.GIDs[0]
		}
		plan, err := mtu.PlanUD(c.UDMTU, mtu.Link{Underlay: port.UnderMTU, IPv4: g.Is4()})
		return plan.Notes, err
	}
}
