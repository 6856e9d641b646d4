package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// hangupIsOurs reports whether SIGHUP asks run to reload its configuration. If run has a terminal, SIGHUP
// means that the terminal has gone, and the result is false.
func hangupIsOurs(args []string) bool {
	_, err := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
	return len(args) > 0 && args[0] == "run" && err != nil
}

// hangups returns the signals that ask for a reload. Without a file there is nothing to read again, and
// SIGHUP ends the context.
func hangups(ctx context.Context, file string) (context.Context, <-chan os.Signal, func()) {
	if signal.Ignored(syscall.SIGHUP) { // by nohup: nobody wants to hear of it
		return ctx, nil, func() {}
	}
	if file == "" {
		ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP)
		return ctx, nil, stop
	}
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	return ctx, c, func() { signal.Stop(c) }
}
