package softroce

import (
	"testing"
	"time"
)

// A receiver whose user blocks it is found out, an idle one is not accused.
func TestAlive(t *testing.T) {
	a, _ := pair(t, families[0], nil)
	for range 3 {
		if err := a.Alive(10 * time.Second); err != nil {
			t.Fatalf("idle: %v", err)
		}
	}
	c := newCounterFD(t)
	held, release := make(chan struct{}, 1), make(chan struct{})
	stop, err := a.PollFD(c.fd, func() (bool, time.Duration) {
		select {
		case held <- struct{}{}:
			<-release
		default:
		}
		return false, 0
	})
	if err != nil {
		t.Fatal(err)
	}
	<-held
	if err := a.Alive(20 * time.Millisecond); err == nil {
		t.Error("blocked: no complaint")
	}
	close(release)
	if err := a.Alive(10 * time.Second); err != nil {
		t.Errorf("let go: %v", err)
	}
	stop()
}
