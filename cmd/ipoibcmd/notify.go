package main

import (
	"log/slog"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifier returns the function that tells the service manager how we are, and how long the manager waits
// for a sign of life; nil and zero where there is none.
func notifier(log *slog.Logger) (notify func(string), watchdog time.Duration) {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return nil, 0
	}
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("the service manager's watchdog is not fed", "err", err)
	}
	return func(text string) {
		if _, err := daemon.SdNotify(false, text); err != nil {
			log.Warn("cannot notify the service manager", "text", text, "err", err)
		}
	}, watchdog
}
