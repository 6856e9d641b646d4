package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"ipoibcm/control"
)

// membersEvery is how often --watch looks.
const membersEvery = time.Second

func newMembers() *cobra.Command {
	var flags clientFlags
	var watch bool
	cmd := &cobra.Command{
		Use:   "members",
		Short: "show who is on the link, who says so, and who was heard",
		Long: "members shows the hosts that get a copy of every broadcast, where the underlay\n" +
			"has no multicast: how old the list is, what is wrong with its source, who\n" +
			"published which addresses, and when each was last heard. The state is self,\n" +
			"heard (within five minutes), quiet (before that), silent (never) or refused (by\n" +
			"the setting allow).",
		Example: `  ipoibcmd members
  ipoibcmd members --watch
  ipoibcmd members --json | jq '.members[] | select(.state == "silent")'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if watch {
				return watchMembers(cmd.Context(), &flags)
			}
			return show(cmd.Context(), &flags, control.PathMembers, nil, printMembers)
		},
	}
	flags.bindJSON(cmd)
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "print it again whenever it changes, until interrupted")
	return cmd
}

// watchMembers prints the list whenever anything but an age has changed.
func watchMembers(ctx context.Context, flags *clientFlags) error {
	var last *control.Members
	tick := time.NewTicker(membersEvery)
	defer tick.Stop()
	for {
		now, err := fetch[control.Members](ctx, flags, control.PathMembers, nil)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if !sameMembers(last, now) {
			if err := printChange(now, last == nil, flags.json); err != nil {
				return err
			}
			last = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func printChange(d *control.Members, first, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(stdout).Encode(d)
	}
	if !first {
		fmt.Fprintln(stdout)
	}
	fmt.Fprintln(stdout, time.Now().Format(time.TimeOnly))
	printMembers(stdout, d)
	return stdout.err
}

// sameMembers reports whether two lists are the same apart from ages and the count of failures.
func sameMembers(a, b *control.Members) bool {
	if a == nil || b == nil {
		return a == b
	}
	plain := func(d *control.Members) control.Members {
		c := *d
		c.AgeMS, c.Failures, c.Members = 0, 0, nil
		c.FailingMS = min(c.FailingMS, 1)
		for _, m := range d.Members {
			m.HeardMS = 0
			c.Members = append(c.Members, m)
		}
		return c
	}
	return reflect.DeepEqual(plain(a), plain(b))
}

func printMembers(w io.Writer, d *control.Members) {
	width := widthOf(w)
	if !d.Copies {
		printWrapped(w, "", 2, "broadcasts go by multicast: there is no list of members", width)
		return
	}
	state := "age " + age(d.AgeMS)
	switch {
	case d.Source == "static":
		state = "of the configuration"
	case !d.Known:
		state = "it has not answered yet"
	case d.Saved:
		state += ", of before the start"
	}
	if d.Revision > 0 {
		state += fmt.Sprintf(", revision %d", d.Revision)
	}
	n := map[string]int{}
	for _, m := range d.Members {
		n[m.State]++
	}
	link, members := either(d.Link != "", "link "+d.Link+", ", ""), either(len(d.Members) == 1, "member", "members")
	printWrapped(w, "", 2, fmt.Sprintf("%s%s: %d %s, %d heard; %s", link, d.Source, len(d.Members), members,
		n[control.MemberHeard], state), width)
	for _, line := range memberTrouble(d) {
		printWrapped(w, "  ! ", 4, line, width)
	}
	if len(d.Members) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := newTable("MEMBER", "STATE", "HEARD", "GID", "ADDRESSES", "QPN", "BY")
	for _, m := range d.Members {
		t.add(m.ID, m.State, either(m.Heard, age(m.HeardMS), ""),
			strings.Join(m.GIDs, " "), strings.Join(m.IPs, " "), m.UDQPN, m.By)
	}
	t.render(w)
}

// memberTrouble returns what an operator should look at.
func memberTrouble(d *control.Members) (lines []string) {
	switch {
	case d.Error != "" && d.FailingMS > 0:
		lines = append(lines, fmt.Sprintf("the source fails since %s, and the last list stays: %s",
			age(d.FailingMS), d.Error))
	case d.Error != "":
		lines = append(lines, d.Error)
	}
	if d.Unpublished != "" {
		lines = append(lines, "others do not find this host: "+d.Unpublished)
	}
	if len(d.Held) > 0 {
		lines = append(lines, "named no more, and kept for a moment: "+strings.Join(d.Held, " "))
	}
	if d.Note != "" {
		lines = append(lines, d.Note)
	}
	return lines
}
