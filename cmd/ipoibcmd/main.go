// Command ipoibcmd gives a host a network interface whose IP packets travel as
// IP over InfiniBand, connected mode (RFC 4755), and shows what it does.
//
// This package reads flags and configuration, chooses the verbs provider, and
// is a client of the control socket. It decides nothing about the protocol.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"ipoibcm/control"
	"ipoibcm/sandbox"
)

func main() {
	_ = sandbox.Raise() // a missing capability is reported where it is needed
	ending := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) && !hangupIsOurs(os.Args[1:]) { // nohup ignores it
		ending = append(ending, syscall.SIGHUP) // the terminal has gone: leave nothing behind
	}
	ctx, stop := signal.NotifyContext(context.Background(), ending...)
	defer stop()
	os.Exit(execute(ctx, os.Args[1:]))
}

// execute runs one command line and returns the exit status: 0 done, 1 failed, 2 used wrongly, exitConfig. The
// commands status and explain have further ones.
func execute(ctx context.Context, args []string) int {
	root := newRoot()
	root.SetArgs(args)
	stdout.err = nil
	root.SetOut(stdout)
	cmd, err := root.ExecuteContextC(ctx)
	exit := exitError(0)
	if stdout.err != nil && (err == nil || errors.As(err, &exit)) {
		err = stdout.err // an exit status says nothing if the output did not arrive
	}
	if err == nil {
		return 0
	}
	if errors.As(err, &exit) {
		return int(exit)
	}
	var silent silentError
	if errors.As(err, &silent) {
		return 1
	}
	report(cmd, err)
	var config configError
	if errors.As(err, &config) {
		return exitConfig
	}
	var usage usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

// A silentError is a failure that has been reported already.
type silentError struct{ error }

// An exitError is the exit status of a command that has printed all there is to say.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// A usageError is the user's mistake on the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// A configError is a configuration file with which run fails however often it is started.
type configError struct{ error }

func (e configError) Unwrap() error { return e.error }

// exitConfig is the exit status for a configError: EX_CONFIG of sysexits.h. The unit is not started again
// after it. With status 2 a Go program ends by a panic and by the watchdog's SIGABRT too.
const exitConfig = 78

// A hintError says what to do next.
type hintError struct {
	error
	hint string
}

func (e hintError) Unwrap() error { return e.error }

// report prints err for people, or as a JSON document where --json was given.
func report(cmd *cobra.Command, err error) {
	h, _ := errors.AsType[hintError](err)
	if f := cmd.Flags().Lookup("json"); f != nil && f.Value.String() == "true" && stdout.err == nil {
		printJSON(control.Error{Version: control.Version, Error: err.Error(), Hint: h.hint})
		return
	}
	text := fmt.Sprintf("%s: %v\n", cmd.CommandPath(), err)
	if h.hint != "" {
		text += "  " + h.hint + "\n"
	}
	sayWithin(os.Stderr, text, logPatience)
}

// sayWithin writes text, but waits at most patience for a reader that has stalled: such a reader must not
// keep a daemon from ending.
func sayWithin(w io.Writer, text string, patience time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.WriteString(w, text)
	}()
	select {
	case <-done:
	case <-time.After(patience):
	}
}

func printJSON(v any) error {
	e := json.NewEncoder(stdout)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "ipoibcmd",
		Short:         "IP over InfiniBand connected mode (RFC 4755) on any Linux host",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       stamp().String(),
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if words := c.Flags().Args(); c.HasSubCommands() && len(words) > 0 { // the flag is that of a command we do not know
			return unknownCommand(c, words[0])
		}
		return usageError{hintError{err, "see: " + c.CommandPath() + " --help"}}
	})
	root.AddCommand(newRun(), newInit(), newDemo(), newStatus(), newMembers(), newShow(), newExplain(), newMonitor())
	root.AddCommand(newCapture(), newDevices(), newProbe(), newPing())
	root.AddCommand(newDoctor(), newVersion(), newReload(), newBugreport(), newMan(), newNode())
	root.SetHelpCommand(newHelp())
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	exampleCompletion(root)
	wrapFlags(root)
	strict(root)
	complete(root)
	return root
}

// wrapFlags has the library write the flags of root, and of all commands below it, in lines of defaultWidth. A
// template could say so too, but a program that runs templates keeps every exported method of every type
// that it makes, because a template may name any of them.
func wrapFlags(root *cobra.Command) {
	usage := root.UsageFunc()
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		var text strings.Builder
		out := cmd.OutOrStderr()
		cmd.SetOut(&text)
		err := usage(cmd)
		cmd.SetOut(out)
		wrapped := text.String()
		for _, flags := range []*pflag.FlagSet{cmd.LocalFlags(), cmd.InheritedFlags()} {
			if flags.HasAvailableFlags() {
				long := strings.TrimRightFunc(flags.FlagUsages(), unicode.IsSpace)
				short := strings.TrimRightFunc(flags.FlagUsagesWrapped(defaultWidth), unicode.IsSpace)
				wrapped = strings.Replace(wrapped, long, short, 1)
			}
		}
		_, werr := io.WriteString(out, wrapped)
		return errors.Join(err, werr)
	})
}

// strict makes wrong arguments of cmd, and of all commands below it, usage errors. The library itself
// treats some as failures, and answers others with the help text.
func strict(cmd *cobra.Command) {
	hint := "see: " + cmd.CommandPath() + " --help"
	if cmd.HasSubCommands() {
		cmd.SuggestionsMinimumDistance = 2 // letters
		cmd.Args = cobra.ArbitraryArgs     // RunE says what is wrong with them
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			if !cmd.HasParent() {
				return cmd.Help()
			}
			var names []string
			for _, sub := range cmd.Commands() {
				names = append(names, sub.Name())
			}
			return usageError{hintError{errors.New("say what: " + strings.Join(names, ", ")), hint}}
		}
	}
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usageError{hintError{fmt.Errorf("%d arguments given; usage: %s", len(args), cmd.UseLine()), hint}}
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		strict(sub)
	}
}

// unknownCommand returns the error for a word that is no command below cmd.
func unknownCommand(cmd *cobra.Command, word string) error {
	err := fmt.Errorf("unknown command %q", word)
	if like := cmd.SuggestionsFor(word); len(like) > 0 {
		err = fmt.Errorf("%w: did you mean %s?", err, strings.Join(like, " or "))
	}
	return usageError{hintError{err, "see: " + cmd.CommandPath() + " --help"}}
}

// newHelp returns the library's help command, except that it fails for an unknown command.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "help about a command",
		Example: "  ipoibcmd help run\n  ipoibcmd help show conn",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			found, _, err := cmd.Root().Find(args)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var names []string
			for _, sub := range found.Commands() {
				if sub.IsAvailableCommand() {
					names = append(names, sub.Name()+"\t"+sub.Short)
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return usageError{hintError{fmt.Errorf("unknown command %q", strings.Join(args, " ")),
					"see: " + cmd.Root().CommandPath() + " --help"}}
			}
			found.InitDefaultHelpFlag()
			found.InitDefaultVersionFlag()
			return found.Help()
		},
	}
}
