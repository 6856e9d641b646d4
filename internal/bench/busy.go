package main

import (
	"context"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

const (
	testBusy     = "ping beside busy programs" // ms
	besideBusy   = "two busy programs beside"
	busyPrograms = 2
	busyRounds   = 7
	busyPings    = 1500 * time.Millisecond
)

// besideBusy measures pings to the bystander while [busyPrograms] other programs each want a whole processor.
func (b *bench) besideBusy(ctx context.Context, m *mesh) error {
	ctx, stop := context.WithCancel(ctx)
	var programs []*exec.Cmd
	defer func() {
		stop()
		for _, c := range programs {
			_ = c.Wait()
		}
	}()
	for range busyPrograms {
		// The timeout ends the program if we are killed.
		c := exec.CommandContext(ctx, "timeout", "60", "sh", "-c", "while :; do :; done")
		c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
		if err := c.Start(); err != nil {
			return fmt.Errorf("start a busy program: %w", err)
		}
		programs = append(programs, c)
	}
	time.Sleep(settle / 5)
	p, err := runPings(m.hosts[meshSender], m.addrs[meshBystander], b.transferTime(busyPings))
	if err != nil {
		return err
	}
	if len(p.ms) == 0 {
		return fmt.Errorf("none of %d pings was answered", p.sent)
	}
	for _, q := range []float64{0.50, 0.99} {
		b.r.add(m.key(testBusy, busyVariant(q)), "ms", quantile(p.ms, q))
	}
	return nil
}

func busyVariant(q float64) string { return fmt.Sprintf("p%.0f, %s", 100*q, besideBusy) }

// busyTargets returns the target of the row at each place where it was measured.
func busyTargets(r *Report) (list []target) {
	for _, p := range r.places(testBusy) {
		v := busyVariant(0.99)
		list = append(list, target{name: fmt.Sprintf("RC's ping of wireguard-go's, %s, %v", v, p), atMost: true, bound: 1.2,
			num: p.key(testBusy, v, oursRC), den: p.key(testBusy, v, wireguard)})
	}
	return list
}
