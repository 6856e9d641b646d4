// Command bench measures TCP throughput of one stream over a raw veth pair and
// over ipoibcm in RC, UC and UD mode, on this machine, in namespaces of its own.
// The rounds are interleaved (raw RC UC UD raw RC …), so that what else the
// machine does hits all alike, and what counts is the ratio within a round.
//
//	go run ./internal/bench -program bin/ipoibcmd
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"ipoibcm/cmd/ipoibcmd/lab"
	"ipoibcm/control"
)

// A contender is one way for two hosts to reach each other.
type contender struct {
	name string
	mode string // of the agents; empty for the raw veth
	pair [2]*lab.Host
	dst  netip.Addr
}

// A row is the outcome for one contender at one underlay MTU.
type row struct {
	Name        string    `json:"name"`
	UnderlayMTU int       `json:"underlay_mtu"`
	Mbps        []float64 `json:"mbps"` // each round
	Median      float64   `json:"median_mbps"`
	Ratio       float64   `json:"median_ratio_to_raw"`
	Low         float64   `json:"lowest_ratio"`
	High        float64   `json:"highest_ratio"`
}

func main() {
	program := flag.String("program", "bin/ipoibcmd", "the ipoibcmd binary to measure")
	rounds := flag.Int("rounds", 5, "rounds, at least 3")
	duration := flag.Duration("duration", 2*time.Second, "length of each transfer")
	mtus := flag.String("mtu", "9000,1500", "underlay MTUs")
	asJSON := flag.Bool("json", false, "print JSON")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var rows []row
	for _, m := range strings.Split(*mtus, ",") {
		var mtu int
		if _, err := fmt.Sscan(m, &mtu); err != nil || mtu < 1500 || *rounds < 3 {
			fmt.Fprintln(os.Stderr, "bench: -mtu takes numbers from 1500, -rounds at least 3")
			os.Exit(2)
		}
		r, err := measure(ctx, *program, mtu, *rounds, *duration)
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		rows = append(rows, r...)
	}
	if *asJSON {
		json.NewEncoder(os.Stdout).Encode(map[string]any{"version": control.Version, "tcp_one_stream": rows})
		return
	}
	fmt.Printf("\nTCP, one stream, medians of %d interleaved rounds of %v\n\n", *rounds, *duration)
	fmt.Println("| underlay MTU | what | Gb/s | of raw veth | lowest – highest |")
	fmt.Println("| --- | --- | --- | --- | --- |")
	for _, r := range rows {
		fmt.Printf("| %d | %s | %.2f | %.2f | %.2f – %.2f |\n", r.UnderlayMTU, r.Name, r.Median/1000, r.Ratio, r.Low, r.High)
	}
}

func measure(ctx context.Context, program string, mtu, rounds int, d time.Duration) (rows []row, err error) {
	dir, err := os.MkdirTemp("", "ipoibcm-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	list := []*contender{{name: "raw veth"}, {name: "RC", mode: "rc"}, {name: "UC", mode: "uc"}, {name: "UD", mode: "ud"}}
	for i, c := range list {
		defer func() {
			for _, h := range c.pair {
				if h != nil {
					h.Close()
				}
			}
		}()
		stop, err := c.setUp(ctx, program, dir, i, mtu)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		defer stop()
	}
	got := make([][]float64, len(list))
	for round := range rounds {
		for i, c := range list {
			fmt.Fprintf(os.Stderr, "\runderlay MTU %d, round %d of %d, %-10s", mtu, round+1, rounds, c.name)
			t, err := c.pair[0].Send(ctx, c.pair[1], c.dst, 0, d)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			got[i] = append(got[i], t.Mbps())
		}
	}
	fmt.Fprint(os.Stderr, "\r\x1b[K")
	for i, c := range list {
		ratios := make([]float64, rounds)
		for n := range ratios {
			ratios[n] = got[i][n] / got[0][n]
		}
		rows = append(rows, row{c.name, mtu, got[i], median(got[i]), median(ratios), slices.Min(ratios), slices.Max(ratios)})
	}
	return rows, nil
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// setUp makes two hosts for c and starts its agents; stop ends them.
func (c *contender) setUp(ctx context.Context, program, dir string, n, mtu int) (stop func(), err error) {
	for i := range c.pair {
		if c.pair[i], err = lab.NewHost(fmt.Sprintf("ipoibcm-bench-%d-%d%c", os.Getpid(), n, 'a'+i)); err != nil {
			return nil, err
		}
	}
	if err := lab.Connect(c.pair[0], "eth0", c.pair[1], "eth0", mtu); err != nil {
		return nil, err
	}
	if c.mode == "" {
		c.dst = netip.MustParseAddr("192.0.2.2")
		for i, h := range c.pair {
			if err := h.AddAddr("eth0", fmt.Sprintf("192.0.2.%d/24", i+1)); err != nil {
				return nil, err
			}
		}
		return func() {}, nil
	}
	c.dst = netip.MustParseAddr("10.99.0.2")
	var agents []*lab.Agent
	stop = func() {
		for _, a := range agents {
			a.Kill()
		}
	}
	for i, h := range c.pair {
		name := filepath.Join(dir, fmt.Sprintf("%d%c", n, 'a'+i))
		a, err := lab.StartAgent(ctx, h, lab.AgentConfig{Program: program, Control: name + ".sock", Log: name + ".log",
			Args: []string{"--underlay", "eth0", "--mode", c.mode, "--address", fmt.Sprintf("10.99.0.%d/24", i+1)}})
		if err != nil {
			stop()
			return nil, err
		}
		agents = append(agents, a)
	}
	for end := time.Now().Add(5 * time.Second); ; {
		if _, err = c.pair[0].Ping(lab.Ping{Dst: c.dst, Timeout: 200 * time.Millisecond}); err == nil {
			return stop, nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			stop()
			return nil, err
		}
	}
}
