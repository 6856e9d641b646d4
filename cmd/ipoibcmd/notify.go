package main

import (
	"log/slog"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifier returns the function that sends our state to the service manager, and the interval in which the
// manager's watchdog expects to be notified. Without a manager they are nil and zero.
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
