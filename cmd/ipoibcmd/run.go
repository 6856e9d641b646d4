package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/spf13/cobra"

	"ipoibcm/agent"
	"ipoibcm/ib"
	"ipoibcm/logqueue"
	"ipoibcm/provider/ibverbs"
	"ipoibcm/provider/softroce"
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
			readAll := func() ([]settings, error) { return configureAll(cmd, &flags, file) }
			all, err := readAll()
			if v := (*valueError)(nil); file != "" && err != nil && (!errors.As(err, &v) || !v.absent) {
				return configError{err}
			}
			if err != nil {
				return usageError{err}
			}
			ctx := cmd.Context()
			if exitOnEOF {
				var stop context.CancelFunc
				ctx, stop = context.WithCancel(ctx)
				go func() {
					untilEOF(os.Stdin)
					stop()
				}()
			}
			r := reloading{file: absolute(file), level: new(slog.LevelVar), read: func() (settings, error) {
				now, err := readAll()
				if err == nil && len(now) > 1 {
					err = &listError{namesOf(all), namesOf(now)}
				}
				if err != nil {
					return settings{}, err
				}
				return now[0], nil
			}}
			if hangupIsOurs(os.Args[1:]) {
				var stop func()
				ctx, r.hangup, stop = hangups(ctx, file)
				defer stop()
			}
			signal.Ignore(syscall.SIGPIPE) // the reader of the log may leave: a line is lost, and nothing else
			if len(all) > 1 {
				err = runAll(ctx, all, r, readAll)
			} else {
				err = run(ctx, all[0], r)
			}
			if errors.Is(err, syscall.EMFILE) {
				err = hintError{err, "raise the limit of descriptors: ulimit -n 256, or LimitNOFILE=256 of the service"}
			}
			return err
		},
	}
	flags.bind(cmd.Flags())
	cmd.Flags().StringVar(&file, "config", "", "YAML file with the same settings (ipoibcmd init prints one)")
	cmd.Flags().BoolVar(&exitOnEOF, "exit-on-eof", false, "end when standard input does: for programs that start agents")
	cmd.Flags().MarkHidden("exit-on-eof")
	return cmd
}

// absolute returns the path of a file from wherever clients are; empty for none.
func absolute(file string) string {
	if abs, err := filepath.Abs(file); err == nil && file != "" {
		return abs
	}
	return file
}

func newInit() *cobra.Command {
	return &cobra.Command{
		Use:     "init",
		Short:   "print a commented sample configuration",
		Example: "  ipoibcmd init > /etc/ipoibcm/ibcm0.yaml",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := stdout.Write(sample)
			return err
		},
	}
}

// logPatience is how long the end of run waits for the reader of its log.
const logPatience = 500 * time.Millisecond

// reloading is how the configuration of run changes while it runs.
type reloading struct {
	file   string // empty: there is no file
	read   func() (settings, error)
	hangup <-chan os.Signal
	level  *slog.LevelVar
	// together is what the interfaces of the process share; nil: there is one only.
	together *together
	member   int // number of this interface among them
	// kept are the descriptors that the process before us left for this interface in the service manager's
	// store. owner is the suffix of their names there.
	kept  []*os.File
	owner string
}

// run serves one interface as s says.
func run(ctx context.Context, s settings, r reloading) error {
	r.level.Set(s.level)
	queue := logqueue.New(os.Stderr, logqueue.Options{Level: r.level, JSON: s.LogFormat == "json"})
	defer queue.Close(logPatience)
	r.kept = heirs(activation.Files(true), []string{r.owner}, openStore, queue.Logger())[r.owner]
	return serve(ctx, s, r, queue)
}

// serve serves one interface as s says, and logs to queue.
func serve(ctx context.Context, s settings, r reloading, queue *logqueue.Queue) error {
	log := r.logger(queue.Logger(), s.Name)
	threads := s.threads()
	if s.Provider != ibVerbs && s.Offload.HoldP && os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + threads) // one more P for each thread that holds its P while it waits
	}
	store := openStore(r.owner)
	before := predecessorOf(r.kept, store, log)
	provider, notes, err := openProvider(ctx, s, threads, &before, log)
	if errors.Is(err, softroce.ErrStopped) || errors.Is(err, ibverbs.ErrStopped) {
		return nil // interrupted before there was anything to end
	}
	if err != nil {
		return err
	}
	plan, _ := s.checkUD(provider.Port())
	for _, n := range slices.Concat(notes, plan.Notes) {
		log.Info("underlay", "note", n)
	}
	members, endMembers, err := s.members(log)
	if err != nil {
		return errors.Join(err, provider.Close())
	}
	defer endMembers()
	opt := agent.Options{
		Members:  members,
		Provider: provider, GID: s.gid, Name: s.Name, Netns: s.Netns, Prefixes: s.prefixes, Control: s.controlPath(),
		Group:   s.Group,
		Metrics: s.Metrics, MetricPeers: s.MetricPeers, MetricsTLS: s.MetricsTLS, MetricsAuth: s.MetricsAuth,
		MaxConns: s.Limits.Connections, MaxNeighbours: s.Limits.Neighbours,
		Mode: s.mode, CM: s.cm, LinuxFirst: s.ServiceID == idLinux, UDMTU: int(s.UDMTU), TrafficClass: uint8(s.Class.fixed()),
		InheritClass: s.Class.inherits(),
		CopyECN:      s.ECN == ecnOn && s.Provider == softRoCE,
		ReceiveMTU:   s.ReceiveMTU, PKey: ib.PKey(s.PKey), QKey: ib.QKey(s.QKey),
		Idle: s.machineIdle(), ARPAlways: s.ARPAccept == arpAlways, Peers: s.peers, Allow: s.allow, PeerAllow: s.ask,
		PeerTrust:    s.trust,
		FewerThreads: s.Threads == 0,
		OwnTUNThread: !s.Offload.OneThread, NoChecksum: !s.Offload.Checksum, NoSegments: !s.Offload.TSO,
		NoDatagrams: !s.Offload.USO,
		Build:       stamp().String(), Notes: notes, Check: s.checkUD, NoQP1: whyNoQP1(provider),
		Log: log, LogCounts: func() (lost, leftOut uint64) { n := queue.Counts(); return n.Lost, n.LeftOut },
		CreateBroadcast: s.MakeLink, Shared: s.sharesPort(r.together.links(s)),
		Confine: s.confine(r.file), Store: store, Predecessor: before.Predecessor,
	}
	if opt.Notify, opt.Watchdog = notifier(log); r.together != nil {
		opt.Notify, opt.Watchdog = r.together.notifier(r.member), r.together.watchdog
	}
	if opt.Hangup = r.hangup; r.file != "" {
		opt.Reload = reloader(r.file, s, r.level, r.read)
	}
	started := time.Now()
	return agent.Run(ctx, opt, func() {
		log.Info("interface up", "name", s.Name, "control", opt.Control, "took", time.Since(started).Round(time.Millisecond))
	})
}

// machineIdle returns the idle time for the machine. The file's 0 means never, which is -1 to the machine.
func (s *settings) machineIdle() time.Duration {
	if s.idle == 0 {
		return -1
	}
	return s.idle
}

// sharesPort returns the function that reports whether the kernel, or this process besides c, has an
// interface on the same InfiniBand port and P_Key; nil on Ethernet.
func (c *Config) sharesPort(links int) func() bool {
	if !c.infiniBand() {
		return nil
	}
	return func() bool { return links > 1 || len(ibverbs.KernelIPoIB(c.Device, c.Port, ib.PKey(c.PKey))) > 0 }
}
