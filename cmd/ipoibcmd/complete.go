package main

import (
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/Mellanox/rdmamap"
	"github.com/spf13/cobra"

	"ipoibcm/control"
	"ipoibcm/hostnet"
)

// values are the words that complete a flag, by the name of the flag. A tab separates a word from its
// description.
var values = map[string][]string{
	"mode": {"rc\treliable connections", "uc\tunreliable connections", "auto\tboth, RC preferred",
		"ud\tno connections"},
	"provider":     {softRoCE + "\tRoCEv2 over UDP sockets", ibVerbs + "\tkernel Soft-RoCE, RoCE adapters"},
	"log-format":   {"text", "json"},
	"log-level":    {"debug", "info", "warn", "error"},
	"cm-transport": {"auto\tQP 1 where it leads to the peer", "gsi\tQP 1", "inband\tthe UD QPs"},
	"ecn": {"auto\tRC, where peer and path allow it, the default",
		"on\tall; for a link whose hosts all pass marks on", "off"},
	"threads": {"auto\tas many as processors, 4 at most, but 1 on two; the default", "1\tone"},
	"ud-mtu": {"auto\twhat one frame of the underlay carries, the default",
		"2044\tthe most of auto; in fragments on an IPv6 underlay of 1500"},
}

// lookups complete what depends on the host.
var lookups = map[string]func() []string{
	"underlay": underlays,
	"device":   rdmamap.GetRdmaDeviceList,
	"name":     agents,
}

// complete gives the flags of cmd, and of all commands below it, the completion of their values. It
// completes file names only for --config and for the argument of capture.
func complete(cmd *cobra.Command) {
	for name, list := range values {
		if cmd.Flags().Lookup(name) != nil {
			register(cmd, name, func() []string { return list })
		}
	}
	for name, look := range lookups {
		if cmd.Flags().Lookup(name) != nil && (name != "name" || cmd.Flags().Lookup("underlay") == nil) {
			register(cmd, name, look)
		}
	}
	if cmd.Flags().Lookup("config") != nil {
		_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	}
	if cmd.ValidArgsFunction == nil && !cmd.HasSubCommands() && cmd.Name() != "capture" {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, sub := range cmd.Commands() {
		complete(sub)
	}
}

func register(cmd *cobra.Command, name string, list func() []string) {
	err := cmd.RegisterFlagCompletionFunc(name,
		func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return list(), cobra.ShellCompDirectiveNoFileComp
		})
	if err != nil {
		panic(err) // our bug: there is no such flag, or it has a completion already
	}
}

// underlays names the devices that could be an underlay.
func underlays() (names []string) {
	all, _ := hostnet.Devices() // none: nothing completes
	for _, d := range all {
		if i, err := net.InterfaceByName(d.Link.Name); err != nil || i.Flags&net.FlagLoopback == 0 {
			names = append(names, d.Link.Name)
		}
	}
	slices.Sort(names)
	return names
}

// agents names the interfaces whose agents have a socket in the usual place.
func agents() (names []string) {
	found, _ := filepath.Glob(filepath.Join(control.SocketDir, "*.sock"))
	for _, path := range found {
		names = append(names, strings.TrimSuffix(filepath.Base(path), ".sock"))
	}
	return names
}

// exampleCompletion adds examples to the command completion, which the library makes.
func exampleCompletion(root *cobra.Command) {
	for _, c := range root.Commands() {
		if c.Name() != "completion" {
			continue
		}
		c.Example = "  ipoibcmd completion bash > /etc/bash_completion.d/ipoibcmd"
		for _, shell := range c.Commands() {
			shell.Example = "  ipoibcmd completion " + shell.Name()
		}
	}
}
