package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
	"ipoibcm/mtu"
)

// demoOptions are the flags of demo.
type demoOptions struct {
	json       bool
	duration   time.Duration
	transfer   int // MiB
	mtu        int
	ipv4       bool
	pcap       string
	keep       bool
	terminal   bool
	executable string
}

func newDemo() *cobra.Command {
	var opt demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "make two hosts on this machine and show the whole product at work",
		Long: "demo makes two network namespaces joined by a veth pair, runs an agent in each,\n" +
			"and shows every part of the product at work: RC, UC and UD, MTU routes,\n" +
			"multicast, crossing REQs, a restart.\n" +
			"It needs root, leaves nothing behind, and exits with 0 only if every step holds.",
		Example: `  ipoibcmd demo
  ipoibcmd demo --duration 1s --json
  ipoibcmd demo --ipv4-underlay --underlay-mtu 1500 --pcap demo.pcapng
  ipoibcmd demo --keep`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return demo(cmd.Context(), opt) },
	}
	f := cmd.Flags()
	f.BoolVar(&opt.json, "json", false, "print one JSON object at the end instead of the checklist")
	f.DurationVar(&opt.duration, "duration", 2*time.Second, "how long each rate is measured")
	f.IntVar(&opt.transfer, "transfer", 64, "MiB of each transfer whose hashes are compared")
	f.MarkHidden("transfer") // for machines that are emulated
	f.IntVar(&opt.mtu, "underlay-mtu", 9000, "MTU of the veth pair")
	f.BoolVar(&opt.ipv4, "ipv4-underlay", false, "use IPv4 between the hosts instead of IPv6")
	f.StringVar(&opt.pcap, "pcap", "",
		"write the underlay's packets of both hosts, transfers left out, to this pcapng file")
	f.BoolVar(&opt.keep, "keep", false, "leave namespaces and two fresh agents running, and say how to look at them")
	return cmd
}

// check returns an error if a flag is out of range, or if the process is not root.
func (o *demoOptions) check() error {
	return cmp.Or(
		errorIf(o.duration < 100*time.Millisecond || o.duration > time.Minute,
			usageError{fmt.Errorf("--duration %v: must be 100ms to 1m", o.duration)}),
		errorIf(o.transfer < 1 || o.transfer > 4096,
			usageError{fmt.Errorf("--transfer %d: must be 1 to 4096", o.transfer)}),
		errorIf(o.mtu < 1500 || o.mtu > 65535,
			usageError{fmt.Errorf("--underlay-mtu %d: must be 1500 to 65535", o.mtu)}),
		errorIf(os.Geteuid() != 0,
			hintError{errors.New("demo makes network namespaces and needs root"), "sudo ipoibcmd demo"}),
	)
}

// udMTU returns the UD MTU that the agents choose: the largest that one frame of the underlay carries, but
// at most mtu.DefaultUD.
func (o *demoOptions) udMTU() int {
	return min(mtu.DefaultUD, mtu.LargestUD(o.mtu, o.ipv4))
}

// A demoResult is what demo --json prints.
type demoResult struct {
	OK    bool       `json:"ok"`
	Steps []demoStep `json:"steps"`
	RC    demoRate   `json:"rc"`
	UC    demoRate   `json:"uc"`
	UD    demoRate   `json:"ud"`
}

type demoStep struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	MS     int64  `json:"ms"`
}

type demoRate struct {
	Mbps float64 `json:"mbps"`
	MTU  int     `json:"mtu"`
}

// A demoRun is one run of the demo.
type demoRun struct {
	opt     demoOptions
	ctx     context.Context
	res     demoResult
	prefix  string // of the namespaces' names
	dir     string // sockets, logs, captures
	host    [2]*lab.Host
	agent   [2]*lab.Agent
	capture *demoCapture
	dump    *os.File
	started time.Time
}

// demo runs every step. A step that fails ends the run: the ones after it would
// only fail for the same reason.
func demo(ctx context.Context, opt demoOptions) (err error) {
	if err := opt.check(); err != nil {
		return err
	}
	if opt.executable, err = os.Executable(); err != nil {
		return err
	}
	_, tErr := unix.IoctlGetTermios(int(os.Stdout.Fd()), unix.TCGETS)
	opt.terminal = tErr == nil
	d := &demoRun{opt: opt, ctx: ctx, prefix: fmt.Sprintf("ipoibcm-%d-", os.Getpid()), started: time.Now()}
	d.res.Steps = []demoStep{}
	if d.dir, err = os.MkdirTemp("", d.prefix); err != nil {
		return err
	}
	if opt.pcap != "" {
		if d.dump, err = os.Create(opt.pcap); err != nil {
			return errors.Join(fmt.Errorf("create capture file: %w", err), os.RemoveAll(d.dir))
		}
	}
	if !opt.json {
		fmt.Fprintf(stdout, "two hosts on this machine, joined by %s and MTU %d\n", either(opt.ipv4, "IPv4", "IPv6"), opt.mtu)
	}
	runErr := d.run()
	logs := ""
	for i, a := range d.agent {
		if a != nil && runErr != nil {
			logs += fmt.Sprintf("%s:\n%s\n", string(rune('a'+i)), a.LogTail(8))
		}
	}
	kept := opt.keep && runErr == nil
	d.cleanup(kept)
	d.res.OK = runErr == nil
	if opt.json {
		printJSON(d.res)
		if runErr != nil {
			return silentError{runErr}
		}
		return nil
	}
	if ctx.Err() != nil && runErr != nil {
		return errors.New("interrupted; everything it made is gone")
	}
	if runErr != nil {
		return fmt.Errorf("%w\nThe agents' logs end with:\n%s", runErr, logs)
	}
	fmt.Fprintf(stdout, "all %d steps hold, in %.1f s\n", len(d.res.Steps), time.Since(d.started).Seconds())
	if kept {
		d.sayKept()
	}
	return nil
}

// step runs one step and shows it.
func (d *demoRun) step(name string, f func() (detail string, err error)) error {
	if err := d.ctx.Err(); err != nil {
		return errors.New("interrupted")
	}
	if d.opt.terminal && !d.opt.json {
		fmt.Fprintf(stdout, "  …  %-38s", name)
	}
	start := time.Now()
	detail, err := f()
	s := demoStep{Name: name, OK: err == nil, Detail: detail, MS: time.Since(start).Milliseconds()}
	if err != nil {
		s.Detail = err.Error()
		if d.ctx.Err() != nil {
			s.Detail = "interrupted"
		}
	}
	d.res.Steps = append(d.res.Steps, s)
	if !d.opt.json {
		mark, back := either(s.OK, "ok  ", "FAIL"), either(d.opt.terminal, "\r\x1b[K", "")
		fmt.Fprintf(stdout, "%s%s %-38s %6d ms  %s\n", back, mark, name, s.MS, s.Detail)
	}
	if err != nil {
		return fmt.Errorf("step %q: %s", name, s.Detail)
	}
	return nil
}

// cleanup ends the capture, the agents and the namespaces, and removes the files. With kept it ends only
// the capture.
func (d *demoRun) cleanup(kept bool) {
	d.stopCapture()
	if d.dump != nil {
		d.dump.Close()
	}
	if kept {
		return
	}
	for _, a := range d.agent {
		if a != nil {
			a.Kill()
		}
	}
	for _, h := range d.host {
		if h != nil {
			h.Close()
		}
	}
	os.RemoveAll(d.dir)
}

// path names a file of host i.
func (d *demoRun) path(i int, suffix string) string {
	return filepath.Join(d.dir, string(rune('a'+i))+suffix)
}
