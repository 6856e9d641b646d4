package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func newMan() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIRECTORY",
		Short: "write a manual page for each command",
		Long: "man writes the manual pages ipoibcmd(8), ipoibcmd-run(8) and so on into an\n" +
			"existing directory. They say what --help says. Their date is that of the\n" +
			"commit, so that two builds of it write the same.",
		Example: "  ipoibcmd man /usr/local/share/man/man8",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := args[0]
			if info, err := os.Stat(dir); err != nil || !info.IsDir() {
				return hintError{fmt.Errorf("%s is no directory", dir), "make it first: mkdir -p " + dir}
			}
			b := stamp()
			date, err := time.Parse(time.RFC3339, b.Time)
			if err != nil {
				date = time.Unix(0, 0)
			}
			date = date.UTC()
			root := cmd.Root()
			root.DisableAutoGenTag = true
			return doc.GenManTreeFromOpts(root, doc.GenManTreeOptions{Path: dir, CommandSeparator: "-",
				Header: &doc.GenManHeader{Section: "8", Date: &date, Source: "ipoibcmd " + b.Release,
					Manual: "IP over InfiniBand connected mode"}})
		},
	}
}
