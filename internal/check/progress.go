package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	tick = 250 * time.Millisecond // how often the line on a terminal is drawn
	// silence is how long an output that is no terminal may go without a line.
	silence = 20 * time.Second
	// timesFile keeps when each step ended, for the next run's estimate of the time left.
	timesFile = ".cache/times.json"
)

// A progress is the output of a run: what is written to it, and below that, on a
// terminal, one line that says what is under way and what remains. If the output is no
// terminal, the line is printed after each silence.
type progress struct {
	mu       sync.Mutex
	w        io.Writer
	terminal bool
	began    time.Time
	now      func() time.Time

	line   string    // on the terminal now
	last   time.Time // when something was written
	atLine bool      // the last write ended with a newline

	steps   int              // of the run
	begun   int              // steps that have begun
	names   []string         // of the steps under way
	details []*func() string // what those steps say of themselves
	stop    chan os.Signal
	closed  chan struct{}
	signal  os.Signal
	groups  []int // process groups under way

	// When each step ended, in this run and in the one before, in seconds after the run's begin.
	ends, endsBefore map[string]float64
}

// newProgress returns a progress that writes to f until end.
func newProgress(f *os.File) *progress {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	p := &progress{w: f, terminal: err == nil, now: time.Now, stop: make(chan os.Signal, 1), closed: make(chan struct{})}
	p.begin()
	if b, err := os.ReadFile(timesFile); err == nil {
		_ = json.Unmarshal(b, &p.endsBefore) // without it there is no estimate
	}
	signal.Notify(p.stop, os.Interrupt, syscall.SIGTERM)
	go p.run()
	return p
}

func (p *progress) begin() {
	p.began, p.atLine = p.now(), true
	p.last, p.ends = p.began, map[string]float64{}
}

// run draws the line until the end, and passes signals on to what is under way.
func (p *progress) run() {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-p.closed:
			return
		case s := <-p.stop:
			p.mu.Lock()
			p.signal = s
			for _, group := range p.groups {
				_ = syscall.Kill(-group, s.(syscall.Signal)) // it may have ended
			}
			p.mu.Unlock()
		case <-t.C:
			p.draw()
		}
	}
}

// interrupted reports whether the run was asked to end.
func (p *progress) interrupted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.signal != nil
}

// under adds a process group to which signals are passed on, until end is called.
func (p *progress) under(group int) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.groups = append(p.groups, group)
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.groups = slices.DeleteFunc(p.groups, func(g int) bool { return g == group })
	}
}

func (p *progress) elapsed() time.Duration { return p.now().Sub(p.began).Round(time.Second) }

// step begins a step, which lasts until end is called.
func (p *progress) step(name string) (end func()) {
	p.mu.Lock()
	p.begun++
	p.names = append(p.names, name)
	text := fmt.Sprintf("==== %d of %d: %s%s\n", p.begun, p.steps, name, p.left())
	began := p.now()
	p.mu.Unlock()
	fmt.Fprint(p, text)
	return func() {
		p.mu.Lock()
		now := p.now()
		p.names = slices.DeleteFunc(p.names, func(n string) bool { return n == name })
		p.ends[name] = now.Sub(p.began).Seconds()
		p.mu.Unlock()
		fmt.Fprintf(p, "==== %s has ended after %.0f s\n", name, now.Sub(began).Seconds())
	}
}

// left estimates the time left of the whole run, from the times of the run before. It
// returns "" if that had another number of steps.
func (p *progress) left() string {
	if len(p.endsBefore) != p.steps {
		return ""
	}
	// Of the steps that have ended in this run, the last one ended at time at. In the run before, the
	// last one of the same steps ended at time reached.
	var last, reached, at float64
	for name, end := range p.endsBefore {
		last = max(last, end)
		if now, ok := p.ends[name]; ok {
			reached, at = max(reached, end), max(at, now)
		}
	}
	next := last
	for name, end := range p.endsBefore {
		if _, ok := p.ends[name]; !ok {
			next = min(next, max(end, reached))
		}
	}
	rest := last - min(reached+p.now().Sub(p.began).Seconds()-at, next)
	return fmt.Sprintf(", about %v left", time.Duration(rest*float64(time.Second)).Round(time.Second))
}

// end removes the line. It saves the times of the steps if there are more than two and all have ended.
func (p *progress) end() {
	p.mu.Lock()
	p.clear()
	whole := p.signal == nil && len(p.ends) == p.steps && p.steps > 2
	p.mu.Unlock()
	signal.Stop(p.stop)
	close(p.closed)
	if !whole {
		return
	}
	if b, err := json.Marshal(p.ends); err == nil && os.MkdirAll(filepath.Dir(timesFile), 0o755) == nil {
		_ = os.WriteFile(timesFile, b, 0o644) // only the estimate is lost
	}
}

// Write shows b above the line.
func (p *progress) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	p.last, p.atLine = p.now(), bytes.HasSuffix(b, []byte("\n"))
	return p.w.Write(b)
}

// clear takes the line off the terminal.
func (p *progress) clear() {
	if p.line != "" {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.line = ""
	}
}

// about adds a detail to the line, until end is called.
func (p *progress) about(detail func() string) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.details = append(p.details, &detail)
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.details = slices.DeleteFunc(p.details, func(d *func() string) bool { return d == &detail })
	}
}

// draw brings the line on a terminal up to date. Without a terminal it prints a line
// after a silence.
func (p *progress) draw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.names) == 0 || !p.atLine || !p.terminal && p.now().Sub(p.last) < silence {
		return
	}
	detail, mark := "", ": "
	for _, d := range p.details {
		detail += mark + (*d)()
		mark = "; "
	}
	text := fmt.Sprintf("     %d of %d, %s%s; %v so far%s", p.begun, p.steps, strings.Join(p.names, " beside "), detail,
		p.elapsed(), p.left())
	if !p.terminal {
		fmt.Fprintln(p.w, text)
		p.last = p.now()
		return
	}
	if text = clip(strings.TrimSpace(text), p.width()); text != p.line {
		p.clear()
		p.line = text
		fmt.Fprint(p.w, text)
	}
}

// width is how many characters fit on one line of the terminal.
func (p *progress) width() int {
	f, ok := p.w.(*os.File)
	if !ok {
		return 79
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 79
	}
	return cmp.Or(int(size.Col), 80) - 1
}

func clip(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:max(0, n-1)]) + "…"
	}
	return s
}
