package tuntest

import (
	"errors"
	"os"
	"testing"
	"time"
)

func TestFake(t *testing.T) {
	f := New("ibcm0", 2)
	for i, want := range []bool{true, true, false} {
		if got := f.Send([]byte{byte(i), 7}); got != want {
			t.Errorf("send %d = %v, want %v", i, got, want)
		}
	}
	bufs, sizes := [][]byte{make([]byte, 4), make([]byte, 1), make([]byte, 4)}, make([]int, 3)
	if n, err := f.Read(bufs, sizes); n != 2 || err != nil || sizes[0] != 2 || sizes[1] != 1 || bufs[1][0] != 1 {
		t.Errorf("read %d (%v): %v %v", n, err, sizes, bufs)
	}
	if n, err := f.Write([][]byte{{1}, {2}, {3}}); n != 3 || err != nil {
		t.Errorf("write %d (%v)", n, err)
	}
	if p := f.Receive(time.Second); len(p) != 1 || p[0] != 1 {
		t.Errorf("received %v", p)
	}
	f.Receive(time.Second)
	if p := f.Receive(10 * time.Millisecond); p != nil {
		t.Errorf("received %v from an empty fake", p)
	}
	if f.Lost() != 2 || f.Written() != 3 || f.Waiting() != 0 {
		t.Errorf("lost %d, written %d, waiting %d", f.Lost(), f.Written(), f.Waiting())
	}
	go func() { time.Sleep(10 * time.Millisecond); f.Close() }()
	if _, err := f.Read(bufs, sizes); !errors.Is(err, os.ErrClosed) {
		t.Errorf("read of a closed fake: %v", err)
	}
}
