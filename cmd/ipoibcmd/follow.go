package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"ipoibcm/control"
)

// maxEventLine bounds one line of the event stream, in octets.
const maxEventLine = 1 << 20

// monitor prints the events of the past, as far back as since, and then each new event, until ctx ends or
// the agent stops.
func monitor(ctx context.Context, flags *clientFlags, since time.Duration) error {
	query := url.Values{}
	if since > 0 {
		query.Set("since", since.String())
	}
	body, err := flags.stream(ctx, control.PathEvents, query)
	if err != nil {
		return err
	}
	defer body.Close()
	in := bufio.NewScanner(body)
	in.Buffer(nil, maxEventLine)
	for in.Scan() {
		if flags.json {
			fmt.Fprintf(stdout, "%s\n", in.Bytes())
			continue
		}
		var e control.Event
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			return fmt.Errorf("read the agent's events: %w", err)
		}
		fmt.Fprintln(stdout, eventLine(&e))
	}
	return streamEnd(ctx, in.Err())
}

// eventLine returns one event as a line for people.
func eventLine(e *control.Event) string {
	var b strings.Builder
	arrow := " "
	if e.Out != nil {
		arrow = either(*e.Out, ">", "<")
	}
	fmt.Fprintf(&b, "%s %-10s %s %s", e.Time.Local().Format("15:04:05.000000"), e.Kind, arrow, e.Text)
	if e.Peer != "" {
		fmt.Fprintf(&b, "  peer=%s", e.Peer)
	}
	for _, k := range slices.Sorted(maps.Keys(e.Fields)) { // so that lines can be compared
		fmt.Fprintf(&b, " %s=%s", k, e.Fields[k])
	}
	return b.String()
}

// streamEnd returns the command's result at the end of a stream. An interrupt is the normal end, so the
// result is nil. If the agent stops, the result is an error.
func streamEnd(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
		return err
	}
	return errors.New("the agent has stopped")
}

// capture copies the agent's pcapng stream to a file, packet by packet.
func capture(ctx context.Context, flags *clientFlags, path string, snap int) (err error) {
	if snap < 0 {
		return usageError{fmt.Errorf("--snap %d: must not be negative", snap)}
	}
	query := url.Values{}
	if snap > 0 {
		query.Set("snap", strconv.Itoa(snap))
	}
	body, err := flags.stream(ctx, control.PathCapture, query)
	if err != nil {
		return err
	}
	defer body.Close()
	out := os.Stdout
	if path != "-" {
		if out, err = os.Create(path); err != nil {
			return fmt.Errorf("create capture file: %w", err)
		}
		defer func() { err = errors.Join(err, out.Close()) }()
		fmt.Fprintf(os.Stderr, "capturing to %s; interrupt to stop\n", path)
	}
	return streamEnd(ctx, copyBlocks(out, body))
}

// maxBlock bounds one pcapng block, in octets.
const maxBlock = 1 << 20

// copyBlocks copies a pcapng stream block by block, each written as soon as it
// is whole: wherever the stream is cut, the file ends with a whole packet.
func copyBlocks(w io.Writer, r io.Reader) error {
	in := bufio.NewReaderSize(r, 1<<16)
	var block []byte
	for {
		head, err := in.Peek(8)
		if err != nil {
			return err
		}
		n := int(binary.LittleEndian.Uint32(head[4:]))
		if n < 12 || n > maxBlock {
			return fmt.Errorf("the agent's capture has a block of %d octets", n)
		}
		block = slices.Grow(block[:0], n)[:n]
		if _, err := io.ReadFull(in, block); err != nil {
			return err
		}
		if _, err := w.Write(block); err != nil {
			return err
		}
	}
}
