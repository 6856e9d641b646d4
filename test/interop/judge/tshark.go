package judge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// ErrNoTshark says that tshark is not installed.
var ErrNoTshark = errors.New("tshark is not installed")

// Malformed returns the complaints of tshark about a capture, one line per packet:
// malformed packets, RoCEv2 that it does not dissect as InfiniBand, and expert notes of
// severity "error". Known faults of tshark itself are left out.
func Malformed(ctx context.Context, pcap string) ([]string, error) {
	rows, err := Fields(ctx, pcap, "", "frame.number", "frame.protocols", "_ws.malformed", "_ws.expert.severity",
		"_ws.expert.message", "udp.dstport", "infiniband.bth.opcode")
	if err != nil {
		return nil, err
	}
	var bad []string
	for _, r := range rows {
		number, protocols, malformed, severity, message, port := r[0], r[1], r[2], r[3], r[4], r[5]
		switch {
		case partOf[r[6]] && strings.Contains(protocols, "infiniband:"):
			// tshark takes a part of a message for the whole, and complains of it.
		case guessed(protocols):
			// The octets that a test sends over TCP are random.
		case malformed != "":
			bad = append(bad, fmt.Sprintf("packet %s (%s): malformed: %s", number, protocols, malformed))
		case port == "4791" && !strings.Contains(protocols, "infiniband"):
			bad = append(bad, fmt.Sprintf("packet %s: %s, not InfiniBand", number, protocols))
		case strings.Contains(severity, "8388608") && !Known(message): // PI_ERROR
			bad = append(bad, fmt.Sprintf("packet %s (%s): %s", number, protocols, message))
		}
	}
	return bad, nil
}

// guessed reports whether tshark has guessed a protocol above TCP over InfiniBand, from
// the first octets of the data (Thrift, for one, begins with 0x80 or a small number).
func guessed(protocols string) bool {
	_, inner, ok := strings.Cut(protocols, "infiniband:")
	return ok && strings.Contains(inner, ":tcp:")
}

// partOf holds the opcodes of SEND first, middle and last, for RC and UC.
var partOf = map[string]bool{"0": true, "1": true, "2": true, "32": true, "33": true, "34": true}

// Known reports whether an expert note is not about a fault: that the UDP checksum is 0,
// as RoCEv2 senders, rxe among them, leave it on IPv6 too.
func Known(message string) bool {
	return strings.Contains(message, "Illegal checksum value (0)") ||
		strings.Contains(message, "Illegal Checksum value (0)")
}

// Fields returns the values of fields, one row per packet that filter lets
// through. Several values of one field are joined by commas.
func Fields(ctx context.Context, pcap, filter string, fields ...string) ([][]string, error) {
	// tshark guesses RPC-over-RDMA from a few octets, which our test data may contain.
	return run(ctx, []string{"--disable-protocol", "rpcordma"}, pcap, filter, fields)
}

// RPCFields is Fields for a capture of RPC-over-RDMA, over RoCE or iWARP.
func RPCFields(ctx context.Context, pcap, filter string, fields ...string) ([][]string, error) {
	// The heuristics come first, so that a TCP port of another protocol does not decide.
	return run(ctx, []string{"-o", "tcp.try_heuristic_first:TRUE"}, pcap, filter, fields)
}

func run(ctx context.Context, options []string, pcap, filter string, fields []string) ([][]string, error) {
	if _, err := exec.LookPath("tshark"); err != nil {
		return nil, ErrNoTshark
	}
	args := append(options, "-n", "-r", pcap, "-T", "fields", "-E", "separator=|", "-E", "occurrence=a")
	if filter != "" {
		args = append(args, "-Y", filter)
	}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	c := exec.CommandContext(ctx, "tshark", args...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil {
		return nil, fmt.Errorf("tshark: %w: %s", err, stderr.Bytes())
	}
	var rows [][]string
	for _, l := range strings.Split(strings.TrimRight(stdout.String(), "\n"), "\n") {
		if l == "" {
			continue
		}
		r := strings.Split(l, "|")
		if len(r) != len(fields) {
			return nil, fmt.Errorf("tshark printed %d fields instead of %d: %q", len(r), len(fields), l)
		}
		rows = append(rows, r)
	}
	return rows, nil
}
