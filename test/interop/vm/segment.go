package vm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
)

// portQueue bounds the frames that wait for one port. The segment drops more, as a
// switch would, and counts them.
const portQueue = 4096

// tapQueue is how many frames may wait in a host's device. The kernel's default is 1000,
// and a UC QP sends all packets of a message at once: more than 1000 for 1 MiB.
const tapQueue = 8192

// maxFrame is the largest Ethernet frame, in octets.
const maxFrame = 65536 + 14

// maxHeld is how long a frame waits at most for the frames that overtake it, see [Verdict].
const maxHeld = 20 * time.Millisecond

// A Segment is an Ethernet in this process: guests and TAP devices of host
// namespaces are its ports. Rules lose, repeat, reorder and damage frames, and
// captures see each frame as its sender sent it.
type Segment struct {
	mu       sync.Mutex
	ports    []*port
	macs     map[[6]byte]*port
	rule     Rule
	held     []*held
	captures []*Capture

	dropped atomic.Uint64 // frames dropped because a queue was full
	wg      sync.WaitGroup
}

// A Verdict says what becomes of a frame. The zero Verdict lets it pass.
type Verdict struct {
	Drop bool
	// Copies is how many further times the frame arrives. It has no effect if Behind is not zero.
	Copies int
	// Behind is how many later frames of the same sender overtake the frame, if they are sent
	// within maxHeld.
	Behind int
}

// A Rule decides what becomes of each frame, and may change its octets. from is the
// name of the sending port. The calls of a Rule do not overlap.
type Rule func(from string, frame []byte) Verdict

// A port is something that sends and receives frames.
type port struct {
	name  string
	queue chan []byte
	end   io.Closer
}

type held struct {
	from  *port
	frame []byte
	left  int
	timer *time.Timer
}

// NewSegment returns a segment without ports.
func NewSegment() *Segment { return &Segment{macs: map[[6]byte]*port{}} }

// SetRule makes r decide on every frame from now on. If r is nil all frames pass.
func (s *Segment) SetRule(r Rule) {
	s.mu.Lock()
	s.rule = r
	s.mu.Unlock()
}

// Dropped returns how many frames found a full queue.
func (s *Segment) Dropped() uint64 { return s.dropped.Load() }

// AddHost makes a TAP device in h, up, without DAD, as a port of the segment.
func (s *Segment) AddHost(h *lab.Host, dev string, mac net.HardwareAddr, mtu int) error {
	var f *os.File
	err := h.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		ifr, err := unix.NewIfreq(dev)
		if err == nil {
			ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
		}
		if err != nil {
			unix.Close(fd)
			return err
		}
		f = os.NewFile(uintptr(fd), dev)
		return nil
	})
	if err != nil {
		return fmt.Errorf("make TAP %s in %s: %w", dev, h.Name, err)
	}
	l, err := h.Link(dev)
	if err == nil {
		err = errors.Join(h.Sysctl("net/ipv6/conf/"+dev+"/accept_dad", "0"), h.Netlink().LinkSetHardwareAddr(l, mac),
			h.Netlink().LinkSetTxQLen(l, tapQueue), h.SetMTU(dev, mtu), h.Up(dev))
	}
	if err != nil {
		f.Close()
		return err
	}
	s.add(h.Name, f, f.Read, func(b []byte) error { _, err := f.Write(b); return err })
	return nil
}

// addStream makes the connection c a port of the segment. Each frame on it follows its
// length (QEMU's socket backend).
func (s *Segment) addStream(name string, c net.Conn) {
	read := func(b []byte) (int, error) {
		var n [4]byte
		if _, err := io.ReadFull(c, n[:]); err != nil {
			return 0, err
		}
		l := int(binary.BigEndian.Uint32(n[:]))
		if l > len(b) {
			return 0, fmt.Errorf("frame of %d octets", l)
		}
		return io.ReadFull(c, b[:l])
	}
	var out []byte
	s.add(name, c, read, func(b []byte) error {
		out = append(binary.BigEndian.AppendUint32(out[:0], uint32(len(b))), b...)
		_, err := c.Write(out)
		return err
	})
}

func (s *Segment) add(name string, end io.Closer, read func([]byte) (int, error), write func([]byte) error) {
	p := &port{name: name, queue: make(chan []byte, portQueue), end: end}
	s.mu.Lock()
	s.ports = append(s.ports, p)
	s.mu.Unlock()
	s.wg.Go(func() {
		for f := range p.queue {
			_ = write(f) // a host that is down loses it
		}
	})
	s.wg.Go(func() {
		buf := make([]byte, maxFrame)
		for {
			n, err := read(buf)
			if err != nil {
				s.remove(p)
				return
			}
			if n >= 14 {
				s.forward(p, slices.Clone(buf[:n]))
			}
		}
	})
}

// remove ends a port whose other end is gone.
func (s *Segment) remove(p *port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.ports, p); i >= 0 {
		s.ports = slices.Delete(s.ports, i, i+1)
		maps.DeleteFunc(s.macs, func(_ [6]byte, q *port) bool { return q == p })
		close(p.queue)
		p.end.Close()
	}
}

// forward passes a frame through captures and rule and delivers it. The frame belongs to
// the segment from then on.
func (s *Segment) forward(from *port, frame []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.macs[[6]byte(frame[6:12])] = from
	for _, c := range s.captures {
		c.add(from.name, frame)
	}
	var v Verdict
	if s.rule != nil {
		v = s.rule(from.name, frame)
	}
	for _, c := range s.captures {
		c.verdict(v, frame)
	}
	var due []*held
	for _, h := range s.held {
		if h.from == from {
			if h.left--; h.left <= 0 {
				due = append(due, h)
			}
		}
	}
	switch {
	case v.Drop:
	case v.Behind > 0:
		h := &held{from: from, frame: frame, left: v.Behind}
		h.timer = time.AfterFunc(maxHeld, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.release(h)
		})
		s.held = append(s.held, h)
	default:
		for range v.Copies + 1 {
			s.deliver(from, frame)
		}
	}
	for _, h := range due {
		s.release(h)
	}
}

// release delivers a held frame, unless it was delivered before.
func (s *Segment) release(h *held) {
	if i := slices.Index(s.held, h); i >= 0 {
		h.timer.Stop()
		s.held = slices.Delete(s.held, i, i+1)
		s.deliver(h.from, h.frame)
	}
}

func (s *Segment) deliver(from *port, frame []byte) {
	to := s.macs[[6]byte(frame[:6])]
	for _, p := range s.ports {
		if p == from || to != nil && p != to {
			continue
		}
		select {
		case p.queue <- frame:
		default:
			s.dropped.Add(1)
		}
	}
}

// Close ends all ports.
func (s *Segment) Close() {
	s.mu.Lock()
	ports := slices.Clone(s.ports)
	s.mu.Unlock()
	for _, p := range ports {
		s.remove(p)
	}
	s.wg.Wait()
}
