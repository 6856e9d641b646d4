package vm

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"time"
)

// maxCapture bounds the octets of one capture. Later frames are only counted.
const maxCapture = 512 << 20

// A Packet is one frame of a capture, as its sender sent it.
type Packet struct {
	Time    time.Time
	From    string // the port's name
	Frame   []byte // Ethernet header and what follows
	Verdict Verdict
	Changed bool // the rule then changed octets of the frame; Frame does not show that
}

// A Capture holds the frames of a segment since its start, in the order of arrival.
type Capture struct {
	seg     *Segment
	packets []Packet
	octets  int
	lost    int
}

// Capture starts a capture.
func (s *Segment) Capture() *Capture {
	c := &Capture{seg: s}
	s.mu.Lock()
	s.captures = append(s.captures, c)
	s.mu.Unlock()
	return c
}

func (c *Capture) add(from string, frame []byte) {
	if c.octets += len(frame); c.octets > maxCapture {
		c.lost++
		return
	}
	c.packets = append(c.packets, Packet{Time: time.Now(), From: from, Frame: slices.Clone(frame)})
}

// verdict notes what the rule did to the last packet.
func (c *Capture) verdict(v Verdict, after []byte) {
	if c.octets <= maxCapture {
		p := &c.packets[len(c.packets)-1]
		p.Verdict, p.Changed = v, !bytes.Equal(p.Frame, after)
	}
}

// Packets returns the packets captured so far.
func (c *Capture) Packets() []Packet {
	c.seg.mu.Lock()
	defer c.seg.mu.Unlock()
	return slices.Clone(c.packets)
}

// Stop ends the capture and returns its packets. It is an error if some did not fit.
func (c *Capture) Stop() ([]Packet, error) {
	c.seg.mu.Lock()
	defer c.seg.mu.Unlock()
	c.seg.captures = slices.DeleteFunc(c.seg.captures, func(x *Capture) bool { return x == c })
	if c.lost > 0 {
		return c.packets, errors.New("the capture is too large")
	}
	return c.packets, nil
}

// WritePcap writes packets in the old format of libpcap.
func WritePcap(file string, packets []Packet) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	// The first word says that times are in nanoseconds; then come version 2.4, two words that nobody
	// uses, the longest frame, and Ethernet.
	_ = binary.Write(w, binary.LittleEndian, []uint32{0xa1b23c4d, 4<<16 | 2, 0, 0, maxFrame, 1})
	for _, p := range packets { // Flush returns the first error of all
		n := uint32(len(p.Frame))
		_ = binary.Write(w, binary.LittleEndian, []uint32{uint32(p.Time.Unix()), uint32(p.Time.Nanosecond()), n, n})
		w.Write(p.Frame)
	}
	return errors.Join(w.Flush(), f.Close())
}
