package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"ipoibcm/logqueue"
	"ipoibcm/node"
)

func newNode() *cobra.Command {
	var opt node.Options
	var cniBin string
	cmd := &cobra.Command{
		Use:   "node",
		Short: "serve the pods of this host, for the CNI plugin",
		Long: "node starts an agent for each pod that the CNI plugin ipoibcm attaches, gives it\n" +
			"an underlay of its own (a macvlan device of the master), starts agents again that\n" +
			"died, and ends what belonged to pods that vanished. Agents and interfaces stay\n" +
			"when it ends; the next one finds them. It needs root.",
		Example: "  ipoibcmd node",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			queue := logqueue.New(os.Stderr, logqueue.Options{Level: slog.LevelInfo})
			defer queue.Close(logPatience)
			opt.Log = queue.Logger()
			if cniBin != "" {
				if err := installPlugin(cniBin); err != nil {
					return err
				}
			}
			notify, _ := notifier(opt.Log)
			return node.Run(cmd.Context(), opt, func() {
				opt.Log.Info("ready", "socket", opt.Socket)
				if notify != nil {
					notify("READY=1")
				}
			})
		},
	}
	cmd.Flags().StringVar(&opt.Socket, "socket", node.SocketPath, "where the plugin asks")
	cmd.Flags().StringVar(&opt.Dir, "state", node.Dir,
		"directory of what is known of each pod; it must not outlive a boot")
	cmd.Flags().StringVar(&cniBin, "cni-bin", "", "directory to copy the plugin to first, from where the image has it")
	_ = cmd.MarkFlagDirname("state")
	_ = cmd.MarkFlagDirname("cni-bin")
	return cmd
}

// plugin is where packages and the image have the CNI plugin.
const plugin = "/usr/lib/cni/ipoibcm"

// installPlugin copies the plugin into dir, in one step: a runtime may call it any time.
func installPlugin(dir string) error {
	text, err := os.ReadFile(plugin)
	if err != nil {
		return fmt.Errorf("install the plugin: %w", err)
	}
	to := filepath.Join(dir, "ipoibcm")
	if err := os.WriteFile(to+".new", text, 0o755); err != nil {
		return fmt.Errorf("install the plugin: %w", err)
	}
	return os.Rename(to+".new", to)
}
