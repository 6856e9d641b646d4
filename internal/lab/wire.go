package lab

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Way says what a Wire does to the packets in each direction. Lose and Displace are how
// many packets in 1000 are lost and displaced, on average. Three other packets overtake a
// displaced one, or fewer if none arrives for 2 ms.
type Way struct {
	Delay          time.Duration
	Lose, Displace int
}

// A Wire carries every frame between two devices of a host, after a delay. Unlike a
// Relay it treats every kind of packet alike, so that other tunnels can be compared.
type Wire struct {
	Packets, Lost, Displaced atomic.Int64

	carrier
}

const (
	// displacedBy is how many packets overtake a displaced one.
	displacedBy = 3
	// wireFrames is how many frames are under way at most in each direction.
	wireFrames = 1 << 14
)

// NewWire joins the devices a and b of h. Close ends it.
func (h *Host) NewWire(a, b string, mtu int, way Way, seed uint64) (*Wire, error) {
	w := &Wire{}
	return w, w.start(h, a, b, seed, func(from, to int, rnd *rand.Rand) {
		under := make(chan wireFrame, wireFrames)
		go func() {
			defer close(under)
			w.take(from, mtu, under, way, rnd)
		}()
		w.give(to, under)
	})
}

// A wireFrame is a frame under way, and when it arrives.
type wireFrame struct {
	at  time.Time
	buf *[]byte
	n   int
}

// frames holds the buffers of frames under way.
var frames = sync.Pool{New: func() any { b := make([]byte, 10<<10); return &b }}

// A frameBatch is the frames that one system call reads or writes. With fewer system calls the wire
// is not the bottleneck of a path.
type frameBatch struct {
	bufs [wireBatch]*[]byte
	iovs [wireBatch]unix.Iovec
	msgs [wireBatch]struct {
		unix.Msghdr
		n uint32
	}
}

// wireBatch is how many frames one system call reads or writes at most.
const wireBatch = 32

// set makes slot i hold n octets of buf.
func (b *frameBatch) set(i int, buf *[]byte, n int) {
	b.bufs[i] = buf
	b.iovs[i].Base = &(*buf)[0]
	b.iovs[i].SetLen(n)
	b.msgs[i].Iov, b.msgs[i].n = &b.iovs[i], 0
	b.msgs[i].SetIovlen(1)
}

// call makes the system call trap, recvmmsg or sendmmsg, with the slots from..to-1, and returns how
// many of them it completed.
func (b *frameBatch) call(trap uintptr, fd, from, to, flags int) (int, error) {
	done, _, errno := unix.Syscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(&b.msgs[from])), uintptr(to-from),
		uintptr(flags), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(done), nil
}

// take reads frames and sends them to the channel under, until the wire is closed. It loses and displaces
// frames as way says, and drops a frame if under is full.
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
	var b frameBatch
	for i := range b.bufs {
		b.set(i, frames.Get().(*[]byte), mtu+64)
	}
	for !w.stop.Load() {
		n, err := b.call(unix.SYS_RECVMMSG, from, 0, wireBatch, unix.MSG_WAITFORONE)
		if err != nil || n == 0 { // timeout, ENETDOWN
			release()
			if err != unix.EAGAIN && err != unix.EINTR {
				time.Sleep(time.Millisecond)
			}
			continue
		}
		w.Packets.Add(int64(n))
		at := time.Now().Add(way.Delay)
		for i := range n {
			f := wireFrame{at, b.bufs[i], int(b.msgs[i].n)}
			switch p := rnd.IntN(1000); {
			case p < way.Lose:
				w.Lost.Add(1)
				continue // its buffer stays
			case p < way.Lose+way.Displace && late == nil:
				w.Displaced.Add(1)
				late, left = &f, displacedBy
			default:
				put(f)
				if left--; left <= 0 {
					release()
				}
			}
			b.set(i, frames.Get().(*[]byte), mtu+64)
		}
	}
}

// give writes each frame when it is due. It writes frames that are due together in one batch.
func (w *Wire) give(to int, under <-chan wireFrame) {
	var b frameBatch
	n := 0
	write := func() {
		for i := 0; i < n; {
			done, _ := b.call(unix.SYS_SENDMMSG, to, i, n, 0)
			if done == 0 { // the device takes no such frame, or is gone
				w.Lost.Add(1)
			}
			i += max(done, 1)
		}
		for _, buf := range b.bufs[:n] {
			frames.Put(buf)
		}
		n = 0
	}
	for {
		var f wireFrame
		open := true
		select {
		case f, open = <-under:
		default:
			if n > 0 {
				write()
			}
			f, open = <-under
		}
		if !open {
			break
		}
		if d := time.Until(f.at); d > 0 && !w.stop.Load() {
			if n > 0 {
				write()
			}
			time.Sleep(time.Until(f.at))
		}
		b.set(n, f.buf, f.n)
		if n++; n == wireBatch {
			write()
		}
	}
	if n > 0 {
		write()
	}
}
