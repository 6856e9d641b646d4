package lab

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A Way says what a Wire does to all packets, each way: Lose and Displace are parts of
// 1000. A packet that is displaced is overtaken by three others.
type Way struct {
	Delay          time.Duration
	Lose, Displace int
}

// A Wire carries every frame between two devices of a host, later than it came. Unlike
// a Relay it does the same to every kind of packet, so that others can be compared.
type Wire struct {
	Packets, Lost, Displaced atomic.Int64

	stop atomic.Bool
	wg   sync.WaitGroup
}

const (
	// displacedBy is how many packets overtake one that is displaced.
	displacedBy = 3
	// wireFrames is how many frames are under way each way at most.
	wireFrames = 1 << 14
)

// NewWire joins the devices a and b of h. Close ends it.
func (h *Host) NewWire(a, b string, mtu int, way Way, seed uint64) (*Wire, error) {
	left, err := h.packetSocket(a)
	if err != nil {
		return nil, err
	}
	right, err := h.packetSocket(b)
	if err != nil {
		unix.Close(left)
		return nil, err
	}
	w := &Wire{}
	var both sync.WaitGroup
	for i, ends := range [][2]int{{left, right}, {right, left}} {
		both.Add(1)
		under := make(chan wireFrame, wireFrames)
		w.wg.Go(func() {
			defer close(under)
			w.take(ends[0], mtu, under, way, rand.New(rand.NewPCG(seed, uint64(i))))
		})
		w.wg.Go(func() {
			defer both.Done()
			w.give(ends[1], under)
		})
	}
	w.wg.Go(func() {
		both.Wait()
		unix.Close(left)
		unix.Close(right)
	})
	return w, nil
}

// Close ends the wire; nothing passes any more.
func (w *Wire) Close() {
	w.stop.Store(true)
	w.wg.Wait()
}

// A wireFrame is a frame under way, and when it arrives.
type wireFrame struct {
	at    time.Time
	frame []byte
}

// frames are for frames under way.
var frames = sync.Pool{New: func() any { b := make([]byte, 0, 10<<10); return &b }}

// take reads frames until the wire is closed. What finds no room is lost.
func (w *Wire) take(from, mtu int, under chan<- wireFrame, way Way, rnd *rand.Rand) {
	var late *wireFrame
	left := 0
	put := func(f wireFrame) {
		select {
		case under <- f:
		default:
			w.Lost.Add(1)
		}
	}
	release := func() {
		if late != nil {
			put(*late)
			late = nil
		}
	}
	for !w.stop.Load() {
		b := *frames.Get().(*[]byte)
		n, err := unix.Read(from, b[:min(cap(b), mtu+64)])
		if err != nil || n == 0 { // timeout, ENETDOWN
			release()
			if err != unix.EAGAIN && err != unix.EINTR {
				time.Sleep(time.Millisecond)
			}
			continue
		}
		w.Packets.Add(1)
		f := wireFrame{time.Now().Add(way.Delay), b[:n]}
		switch p := rnd.IntN(1000); {
		case p < way.Lose:
			w.Lost.Add(1)
			continue
		case p < way.Lose+way.Displace && late == nil:
			w.Displaced.Add(1)
			late, left = &f, displacedBy
			continue
		}
		put(f)
		if left--; left <= 0 {
			release()
		}
	}
}

// give writes frames when their time has come.
func (w *Wire) give(to int, under <-chan wireFrame) {
	for f := range under {
		if d := time.Until(f.at); d > 0 && !w.stop.Load() {
			time.Sleep(d)
		}
		unix.Write(to, f.frame)
		b := f.frame[:0]
		frames.Put(&b)
	}
}
