package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/doctor"
)

func newDoctor() *cobra.Command {
	flags := defaults()
	var file string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor --underlay DEVICE",
		Short: "say whether run would work here, and what to do if not",
		Long: "doctor takes the configuration and flags of run, looks at everything that run\n" +
			"needs, and names a remedy for what is missing. It opens the provider as run\n" +
			"does and makes the interface for a moment, without setting it up; and, as root,\n" +
			"two network namespaces as demo does. The exit status is 0 only if run would work.",
		Example: "  ipoibcmd doctor --underlay eth0\n" +
			"  ipoibcmd doctor --config /etc/ipoibcm/ibcm0.yaml --json",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := configure(cmd, &flags, file)
			if err != nil {
				return usageError{err}
			}
			s, err := c.settings()
			if err != nil {
				return usageError{err}
			}
			d := doctor.Examine(gather(cmd.Context(), c, s))
			if asJSON {
				err = printJSON(d)
			} else {
				printDoctor(stdout, &d)
			}
			if err == nil && !d.OK {
				err = silentError{errors.New("run would not work")}
			}
			return err
		},
	}
	flags.bind(cmd.Flags())
	cmd.Flags().StringVar(&file, "config", "", "YAML file with the same settings (ipoibcmd init prints one)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printDoctor(w io.Writer, d *control.Doctor) {
	n, width := map[string]int{}, widthOf(w)
	for _, c := range d.Checks {
		n[c.Status]++
		printWrapped(w, fmt.Sprintf("%-8s %-13s ", c.Status, c.Name), 23, c.Detail, width)
		if c.Remedy != "" {
			printWrapped(w, fmt.Sprintf("%-8s %-13s -> ", "", ""), 26, c.Remedy, width)
		}
	}
	verdict := "run would work"
	if !d.OK {
		verdict = "run would not work"
	}
	fmt.Fprintf(w, "%s: %d ok, %d to look at, %d failed, %d skipped\n", verdict, n[control.CheckOK], n[control.CheckWarn], n[control.CheckFail], n[control.CheckSkipped])
}
