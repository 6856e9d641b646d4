package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/provider/ibverbs"
)

// The build may set version and commit: go build -ldflags "-X main.version=1.2 -X main.commit=…". If one is
// empty, stamp takes it from the build information, which go build writes in a checkout.
var version, commit string

// stamp returns what the program was built from.
func stamp() control.Build {
	b := control.Build{Version: control.Version, Release: version, Commit: commit, Go: runtime.Version(),
		Providers: []string{softRoCE}}
	if ibverbs.Built {
		b.Providers = append(b.Providers, ibVerbs)
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && b.Commit == "":
			b.Commit = s.Value
		case s.Key == "vcs.time":
			b.Time = s.Value
		case s.Key == "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	if b.Release == "" && info.Main.Version != "(devel)" {
		b.Release = info.Main.Version
	}
	var dirty bool
	b.Commit, dirty = strings.CutSuffix(b.Commit, "-dirty")
	b.Modified = b.Modified || dirty
	return b
}

func newVersion() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "show what this program was built from",
		Example: "  ipoibcmd version\n  ipoibcmd version --json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := stamp()
			if asJSON {
				return printJSON(b)
			}
			_, err := fmt.Fprintf(stdout, "ipoibcmd %s\nproviders %s\n", b, strings.Join(b.Providers, ", "))
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
