package tuntest

import (
	"errors"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"ipoibcm/internal/expect"
)

func TestFake(t *testing.T) { synctest.Test(t, testFake) }

func testFake(t *testing.T) {
	f := New("ibcm0", 2)
	for i, want := range []bool{true, true, false} {
		if got := f.Send([]byte{byte(i), 7}); got != want {
			t.Errorf("send %d = %v, want %v", i, got, want)
		}
	}
	bufs, sizes := [][]byte{make([]byte, 4), make([]byte, 1), make([]byte, 4)}, make([]int, 3)
	switch n, err := f.Read(bufs, sizes); {
	case n != 2:
		t.Errorf("read %d (%v): n is %v, want 2", n, err, n)
	case err != nil:
		t.Errorf("read %d (%v): err is %v, want nil", n, err, err)
	case sizes[0] != 2:
		t.Errorf("read %d (%v): sizes[0] is %v, want 2", n, err, sizes[0])
	case sizes[1] != 1:
		t.Errorf("read %d (%v): sizes[1] is %v, want 1", n, err, sizes[1])
	case bufs[1][0] != 1:
		t.Errorf("read %d (%v): bufs[1][0] is %v, want 1", n, err, bufs[1][0])
	}
	if n, err := f.Write([][]byte{{1}, {2}, {3}}); n != 3 || err != nil {
		t.Errorf("write %d (%v)", n, err)
	}
	if p := f.Receive(time.Minute); len(p) != 1 || p[0] != 1 {
		t.Errorf("received %v", p)
	}
	f.Receive(time.Minute)
	if p := f.Receive(10 * time.Millisecond); p != nil {
		t.Errorf("received %v from an empty fake", p)
	}
	expect.Equal(t, f.Lost(), 2, "Lost")
	expect.Equal(t, f.Written(), 3, "Written")
	expect.Equal(t, f.Waiting(), 0, "Waiting")
	go func() { time.Sleep(time.Millisecond); f.Close() }() // the bubble's clock moves when Read waits
	if _, err := f.Read(bufs, sizes); !errors.Is(err, os.ErrClosed) {
		t.Errorf("read of a closed fake: %v", err)
	}
}
