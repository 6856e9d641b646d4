// Package logqueue is a log that never makes its caller wait.
//
// Lines go into a bounded queue that one goroutine writes. Lines that do not fit, or
// cannot be written, are counted as lost, and a line behind the next one that is written
// says how many. Lines of one kind, which is a message and its level, are limited: after
// the first few there is one now and then that says how many were left out. Debug lines
// are not limited.
//
// It does not rotate files, and it does not know who reads them.
package logqueue

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"time"
)

// Options configures a Queue. The zero value is ready to use.
type Options struct {
	Level slog.Leveler // nil means Info
	JSON  bool         // one JSON object for each line, not key=value pairs

	// Lines is how many lines may wait for a slow reader. Zero means 1024.
	Lines int
	// Burst is how many lines of one kind are written at once, and Every is the
	// time from one to the next after these. Zero means 20, and 5 seconds.
	Burst int
	Every time.Duration
}

// Bounds.
const (
	maxLine    = 8 << 10     // octets; longer lines are cut
	tellEvery  = time.Minute // lines left out are reported after this time, if no line of their kind has done that
	defLines   = 1024
	defBurst   = 20
	defEvery   = 5 * time.Second
	cutMessage = "…\n"
)

// Counts are what a Queue has counted.
type Counts struct {
	Written uint64 // lines
	Lost    uint64 // lines that did not fit, or could not be written
	LeftOut uint64 // lines that were too many of their kind
}

// A Queue is a log that never makes its caller wait.
type Queue struct {
	w     io.Writer
	ch    chan []byte
	stop  chan struct{} // closed by Close
	done  chan struct{} // closed when everything is written
	limit limiter

	closed, written, lost, leftOut atomic.Uint64
	told                           uint64       // lost lines that are reported; run's own
	inner                          slog.Handler // formats into ch
}

// New starts a log that is written to w. Close ends it.
func New(w io.Writer, opt Options) *Queue {
	q := &Queue{w: w, ch: make(chan []byte, cmp.Or(opt.Lines, defLines)), stop: make(chan struct{}),
		done: make(chan struct{})}
	q.limit.init(opt.Burst, opt.Every)
	format := &slog.HandlerOptions{Level: opt.Level}
	if q.inner = slog.NewTextHandler(queueWriter{q}, format); opt.JSON {
		q.inner = slog.NewJSONHandler(queueWriter{q}, format)
	}
	go q.run()
	return q
}

// Logger returns the logger that writes to q.
func (q *Queue) Logger() *slog.Logger { return slog.New(handler{q, q.inner}) }

// Counts returns how many lines were written so far, and how many were not.
func (q *Queue) Counts() Counts {
	return Counts{Written: q.written.Load(), Lost: q.lost.Load(), LeftOut: q.leftOut.Load()}
}

// Close waits until what was logged is written, but no longer than patience: a reader that has stalled
// holds the writing goroutine for as long as it likes.
func (q *Queue) Close(patience time.Duration) {
	if q.closed.Swap(1) == 0 {
		close(q.stop)
	}
	select {
	case <-q.done:
	case <-time.After(patience):
	}
}

// A queueWriter takes whole lines from the formatting handler.
type queueWriter struct{ q *Queue }

func (w queueWriter) Write(line []byte) (int, error) {
	b := bytes.Clone(line[:min(len(line), maxLine)])
	if len(line) > maxLine {
		b = append(b[:maxLine-len(cutMessage)], cutMessage...)
	}
	select {
	case w.q.ch <- b:
	default:
		w.q.lost.Add(1)
	}
	return len(line), nil
}

// run writes lines until Close, and then those that are left.
func (q *Queue) run() {
	defer close(q.done)
	tick := time.Tick(tellEvery)
	for {
		select {
		case line := <-q.ch:
			q.write(line)
		case <-tick:
			q.tell(time.Now(), false)
		case <-q.stop:
			q.tell(time.Now(), true)
			for len(q.ch) > 0 { // nobody else takes lines out
				q.write(<-q.ch)
			}
			return
		}
	}
}

// write writes one line. If lines were lost that nobody has reported, it then writes how many.
func (q *Queue) write(line []byte) {
	if _, err := q.w.Write(line); err != nil {
		q.lost.Add(1) // the next line may fit again, as on a disk that was full
		return
	}
	q.written.Add(1)
	lost := q.lost.Load()
	if lost == q.told {
		return
	}
	text := fmt.Sprintf("time=%s level=WARN msg=\"lines of the log were lost\" count=%d\n",
		time.Now().Format(time.RFC3339Nano), lost-q.told)
	if _, err := io.WriteString(q.w, text); err == nil {
		q.told = lost
	}
}

// tell logs for each kind how many lines were left out and not reported yet. Unless all is set, it logs only
// kinds that have waited for tellEvery.
func (q *Queue) tell(now time.Time, all bool) {
	for _, k := range q.limit.overdue(now, all) {
		r := slog.NewRecord(now, slog.LevelWarn, "lines of one kind were left out", 0)
		r.AddAttrs(slog.String("kind", k.kind), slog.Uint64("count", k.count))
		q.inner.Handle(context.Background(), r)
	}
}

// A handler limits the lines of each kind, and passes the lines that it lets through to a handler that
// formats.
type handler struct {
	q *Queue
	slog.Handler
}

func (h handler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo {
		left, ok := h.q.limit.allow(r.Message, r.Level, r.Time)
		if !ok {
			h.q.leftOut.Add(1)
			return nil
		}
		if left > 0 {
			r = r.Clone()
			r.AddAttrs(slog.Uint64("left_out", left))
		}
	}
	return h.Handler.Handle(ctx, r)
}

func (h handler) WithAttrs(as []slog.Attr) slog.Handler {
	return handler{h.q, h.Handler.WithAttrs(as)}
}
func (h handler) WithGroup(name string) slog.Handler { return handler{h.q, h.Handler.WithGroup(name)} }
