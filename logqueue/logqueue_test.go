package logqueue

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A sink is a reader of the log that can stall and fail.
type sink struct {
	mu    sync.Mutex
	text  bytes.Buffer
	fail  bool
	stall chan struct{} // not nil: a write waits until it is closed
}

func (s *sink) Write(b []byte) (int, error) {
	s.mu.Lock()
	stall := s.stall
	s.mu.Unlock()
	if stall != nil {
		<-stall
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail {
		return 0, errors.New("broken pipe")
	}
	return s.text.Write(b)
}

func (s *sink) set(fail bool, stall chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail, s.stall = fail, stall
}

func (s *sink) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// countLines counts the lines of s that contain want.
func countLines(s, want string) (n int) {
	for line := range strings.Lines(s) {
		if strings.Contains(line, want) {
			n++
		}
	}
	return n
}

func TestStalledReaderDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sink{stall: make(chan struct{})}
		q := New(s, Options{Level: slog.LevelDebug, Lines: 10})
		log := q.Logger()
		begin := time.Now()
		for range 100 {
			log.Debug("a line")
			synctest.Wait()
		}
		if d := time.Since(begin); d != 0 {
			t.Errorf("logging took %v while nobody read, want no time", d)
		}
		// One is being written, ten wait.
		if got := q.Counts().Lost; got != 89 {
			t.Errorf("%d lines lost, want 89", got)
		}
		begin = time.Now()
		q.Close(time.Second)
		if d := time.Since(begin); d != time.Second {
			t.Errorf("Close took %v beside a stalled reader, want its patience of 1s", d)
		}
		close(s.stall)
		synctest.Wait()
		if got := countLines(s.String(), "a line"); got != 11 {
			t.Errorf("%d lines written at last, want 11:\n%s", got, s)
		}
		if got := countLines(s.String(), `"lines of the log were lost" count=89`); got != 1 {
			t.Errorf("%d lines say that 89 were lost, want 1:\n%s", got, s)
		}
	})
}

func TestFailedWriteIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sink{fail: true}
		q := New(s, Options{})
		log := q.Logger()
		log.Info("one")
		log.Info("two")
		synctest.Wait()
		if got := q.Counts().Lost; got != 2 {
			t.Errorf("%d lines lost, want 2", got)
		}
		s.set(false, nil)
		log.Info("three")
		q.Close(time.Second)
		if got, want := countLines(s.String(), "count=2"), 1; got != want {
			t.Errorf("%d lines say that 2 were lost, want %d:\n%s", got, want, s)
		}
		if got := q.Counts().Written; got != 1 {
			t.Errorf("%d lines written, want 1", got)
		}
	})
}

func TestCloseWritesWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sink{}
		q := New(s, Options{})
		for n := range 30 {
			q.Logger().Info(fmt.Sprint("line ", n))
		}
		q.Close(time.Second)
		q.Close(time.Second) // again is harmless
		if got := countLines(s.String(), "line "); got != 30 {
			t.Errorf("%d lines written, want 30", got)
		}
	})
}

func TestLinesOfOneKindAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sink{}
		q := New(s, Options{Burst: 3, Every: 5 * time.Second, Lines: 1 << 16})
		log := q.Logger().With("name", "ibcm0")
		for range 1000 { // 100 seconds
			log.Info("forged")
			time.Sleep(100 * time.Millisecond)
		}
		log.Warn("forged") // another level is another kind
		log.Info("honest")
		synctest.Wait()
		if got, want := countLines(s.String(), "msg=forged name=ibcm0"), 3+19+1; got != want {
			t.Errorf("%d lines written, want %d:\n%s", got, want, s)
		}
		if got := countLines(s.String(), "left_out=49"); got < 17 {
			t.Errorf("%d lines say that 49 were left out, want 17 or more:\n%s", got, s)
		}
		if got := countLines(s.String(), "msg=honest"); got != 1 {
			t.Errorf("%d lines of another kind, want 1", got)
		}
		before := countLines(s.String(), "were left out")
		time.Sleep(2 * tellEvery)
		if got := countLines(s.String(), `"lines of one kind were left out" kind=forged`) - before; got != 1 {
			t.Errorf("%d lines say what was left out last, want 1:\n%s", got, s)
		}
		told := uint64(0)
		for line := range strings.Lines(s.String()) {
			var n uint64
			if _, after, ok := strings.Cut(line, "left_out="); ok {
				fmt.Sscan(after, &n)
			} else if _, after, ok := strings.Cut(line, "count="); ok {
				fmt.Sscan(after, &n)
			}
			told += n
		}
		if got := q.Counts().LeftOut; told != got {
			t.Errorf("the log tells of %d lines left out, %d were", told, got)
		}
		q.Close(time.Second)
	})
}

func TestDebugIsNotLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sink{}
		q := New(s, Options{Level: slog.LevelDebug, Burst: 1})
		for range 20 {
			q.Logger().Debug("why")
			synctest.Wait()
		}
		q.Close(time.Second)
		if got := countLines(s.String(), "why"); got != 20 {
			t.Errorf("%d lines, want 20", got)
		}
	})
}

func TestKindsAreBounded(t *testing.T) {
	var l limiter
	l.init(1, time.Hour)
	now := time.Unix(1e9, 0)
	passed := 0
	for n := range 10 * maxKinds {
		if _, ok := l.allow(fmt.Sprint("message ", n), slog.LevelInfo, now); ok {
			passed++
		}
	}
	if got, want := len(l.kinds), maxKinds+1; got != want {
		t.Errorf("%d kinds are kept, want %d", got, want)
	}
	if want := maxKinds + 1; passed != want {
		t.Errorf("%d lines passed, want %d: one of each kind that is kept", passed, want)
	}
}

func TestLongLinesAreCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sink{}
		q := New(s, Options{})
		q.Logger().Info(strings.Repeat("x", 10*maxLine))
		q.Close(time.Second)
		got := s.String()
		if len(got) > maxLine {
			t.Errorf("a line of %d octets, want %d at most", len(got), maxLine)
		}
		if !strings.HasSuffix(got, cutMessage) {
			t.Errorf("the line ends in %q, want %q", got[len(got)-8:], cutMessage)
		}
	})
}
