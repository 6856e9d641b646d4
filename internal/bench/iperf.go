package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"ipoibcm/internal/lab"
)

// A transfer is the outcome of one load.
type transfer struct {
	octets  float64 // that arrived, both ways
	seconds float64
	cpu     cpuUse
}

func (t transfer) mbps() float64 { return t.octets * 8 / 1e6 / t.seconds }

// cpuPerGB returns seconds of all processors for each 10⁹ octets.
func (t transfer) cpuPerGB() float64 { return t.cpu.ours.Seconds() / (t.octets / 1e9) }

// A load is TCP traffic from the first host of a pair to the second.
type load struct {
	streams int
	both    bool // with as many streams from the second host to the first at the same time
}

func (l load) String() string {
	switch {
	case l.both:
		return "both directions"
	case l.streams == 1:
		return oneStream
	}
	return fmt.Sprintf("%d streams", l.streams)
}

const oneStream = "1 stream"

// needIperf returns the version of iperf3, installing Debian's if it is missing.
func needIperf(ctx context.Context) (string, error) {
	if _, err := exec.LookPath("iperf3"); err != nil {
		fmt.Fprintln(os.Stderr, "installing iperf3")
		c := exec.CommandContext(ctx, "sh", "-c", "apt-get update && apt-get install -y --no-install-recommends iperf3")
		c.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := c.CombinedOutput(); err != nil {
			text := strings.TrimSpace(string(out))
			return "", fmt.Errorf("iperf3 is not installed and cannot be: %s", text[strings.LastIndexByte(text, '\n')+1:])
		}
	}
	out, err := exec.CommandContext(ctx, "iperf3", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("iperf3 --version: %w", err)
	}
	f := strings.Fields(string(out))
	if len(f) < 2 {
		return "", errors.New("iperf3 --version says nothing")
	}
	return f[1], nil
}

// runLoad sends for as long as a transfer of the run takes and measures the processor time used
// meanwhile. iperf3 makes the traffic if it is installed, else the lab's own sender.
func (b *bench) runLoad(ctx context.Context, m *mesh, l load) (t transfer, err error) {
	for try := 0; ; try++ { // a server may still be busy with the last client
		if b.iperf {
			t, err = iperf(ctx, m, l, b.seconds)
		} else {
			t, err = ownLoad(ctx, m, l, b.transferTime(0))
		}
		if err == nil || try == 2 || ctx.Err() != nil {
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	if err == nil {
		b.cpu.ours += t.cpu.ours
		b.cpu.other += t.cpu.other
		b.cpu.wall += t.cpu.wall
	}
	return t, err
}

// iperf runs one client, and a server for it alone, so that nothing is left of a load
// that failed.
func iperf(ctx context.Context, m *mesh, l load, seconds int) (t transfer, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds+15)*time.Second)
	defer cancel()
	server := exec.CommandContext(ctx, "iperf3", "-s", "-1", "--forceflush")
	lines, err := server.StdoutPipe()
	if err != nil {
		return t, err
	}
	if err := m.hosts[meshPeer].Start(server); err != nil {
		return t, fmt.Errorf("start iperf3: %w", err)
	}
	defer func() {
		cancel()
		server.Wait()
	}()
	if err := untilLine(lines, "Server listening"); err != nil {
		return t, err
	}
	args := []string{"-J", "-t", strconv.Itoa(seconds), "-P", strconv.Itoa(l.streams), "-c", m.addrs[meshPeer].String()}
	if l.both {
		args = append(args, "--bidir")
	}
	before, err := readCPU()
	if err != nil {
		return t, err
	}
	client := exec.CommandContext(ctx, "iperf3", args...)
	out, runErr := m.hosts[meshSender].Output(client)
	after, err := readCPU()
	if err != nil {
		return t, err
	}
	if t, err = decodeIperf(out); err != nil {
		return t, errors.Join(err, runErr)
	}
	t.cpu = before.until(after)
	return t, nil
}

// decodeIperf reads the JSON document that the client prints.
func decodeIperf(out []byte) (t transfer, err error) {
	type sum struct {
		Bytes   float64 `json:"bytes"`
		Seconds float64 `json:"seconds"`
	}
	var doc struct {
		Error string `json:"error"`
		End   struct {
			Received sum `json:"sum_received"`
			Reverse  sum `json:"sum_received_bidir_reverse"`
		} `json:"end"`
	}
	if err := json.Unmarshal(out, &doc); err != nil {
		return t, fmt.Errorf("iperf3: %w", err)
	}
	if doc.Error != "" {
		return t, fmt.Errorf("iperf3: %s", doc.Error)
	}
	t.octets, t.seconds = doc.End.Received.Bytes+doc.End.Reverse.Bytes, doc.End.Received.Seconds
	if !(t.octets > 0 && t.seconds > 0) {
		return t, errors.New("iperf3: nothing was received")
	}
	return t, nil
}

// ownLoad makes the load with the lab's own sender, once for each stream. It is for
// machines without iperf3.
func ownLoad(ctx context.Context, m *mesh, l load, d time.Duration) (t transfer, err error) {
	before, err := readCPU()
	if err != nil {
		return t, err
	}
	type outcome struct {
		t   lab.Transfer
		err error
	}
	done := make(chan outcome)
	n := 0
	send := func(from, to int) {
		n++
		go func() {
			t, err := m.hosts[from].Send(ctx, m.hosts[to], m.addrs[to], 0, d)
			done <- outcome{t, err}
		}()
	}
	for range l.streams {
		send(meshSender, meshPeer)
		if l.both {
			send(meshPeer, meshSender)
		}
	}
	for range n {
		o := <-done
		err = errors.Join(err, o.err)
		t.octets += float64(o.t.Octets)
		t.seconds = max(t.seconds, o.t.Duration.Seconds())
	}
	if err != nil {
		return t, err
	}
	after, err := readCPU()
	t.cpu = before.until(after)
	return t, err
}

// untilLine reads until the end of a line that contains want. It reads octet by octet,
// so that what follows remains in r.
func untilLine(r io.Reader, want string) error {
	var line []byte
	for one := make([]byte, 1); ; {
		if _, err := r.Read(one); err != nil {
			return fmt.Errorf("waiting for %q: %w (%q)", want, err, line)
		}
		if line = append(line, one[0]); one[0] == '\n' {
			if strings.Contains(string(line), want) {
				return nil
			}
			line = line[:0]
		}
	}
}
