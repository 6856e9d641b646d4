package ip

import (
	"encoding/binary"
	"errors"

	"ipoibcm/wire"
)

// ErrDontFragment says that a packet larger than the MTU has DF set.
var ErrDontFragment = errors.New("ip: packet is larger than the MTU and DF is set")

// Option types of RFC 791 section 3.1.
const (
	optEnd    = 0
	optNop    = 1
	optCopied = 0x80 // flag: the option goes into every fragment

	maxV4Options = 40 // octets
)

// A Fragmenter cuts one IPv4 packet into fragments (RFC 791 section 3.2). Use:
//
//	f, err := ip.NewFragmenter(pkt, mtu)
//	for err == nil && f.More() {
//		buf = f.Append(buf[:headroom])
//		…
//	}
type Fragmenter struct {
	pkt    V4
	mtu    int
	off    int // octets of payload already handed out
	opts   [maxV4Options]byte
	optLen int // octets of opts: the options of fragments after the first
	whole  bool
	done   bool
}

// NewFragmenter checks that pkt may be cut into pieces of at most mtu octets, header included. A
// packet that fits stays unchanged, as its only fragment. A packet that is a fragment already is
// cut further. The error is [ErrDontFragment], or says what is wrong with pkt or mtu. pkt is only
// read, and must not change while f is in use.
func NewFragmenter(pkt []byte, mtu int) (Fragmenter, error) {
	p, err := AsV4(pkt)
	if err != nil {
		return Fragmenter{}, err
	}
	f := Fragmenter{pkt: p, mtu: mtu}
	if len(p) <= mtu {
		f.whole = true
		return f, nil
	}
	if p.DF() {
		return Fragmenter{}, ErrDontFragment
	}
	n := len(p.Payload())
	if mtu < MinMTU4 {
		return Fragmenter{}, &wire.FieldError{What: "IPv4 fragment", Field: "MTU", Value: uint64(max(0, mtu))}
	}
	if p.FragOffset()+n > 0xffff || p.MF() && n%8 != 0 {
		// Such fragments overrun the datagram, or leave a hole in it.
		return Fragmenter{}, &wire.FieldError{What: "IPv4 fragment", Field: "offset", Value: uint64(p.FragOffset())}
	}
	return f, f.copyOptions()
}

// copyOptions keeps the options that later fragments carry too.
func (f *Fragmenter) copyOptions() error {
	o := f.pkt.Options()
	for len(o) > 0 && o[0] != optEnd {
		if o[0] == optNop {
			o = o[1:]
			continue
		}
		if len(o) < 2 || o[1] < 2 || int(o[1]) > len(o) {
			return &wire.FieldError{What: "IPv4 header", Field: "option", Value: uint64(o[0])}
		}
		if o[0]&optCopied != 0 {
			f.optLen += copy(f.opts[f.optLen:], o[:o[1]])
		}
		o = o[o[1]:]
	}
	f.optLen = (f.optLen + 3) &^ 3 // end-of-options octets are zero
	return nil
}

// More reports whether there is a fragment left.
func (f *Fragmenter) More() bool { return len(f.pkt) > 0 && !f.done }

// Append appends the next fragment, header first, to b. It does not allocate if
// b has room for the MTU. Without [Fragmenter.More] it appends nothing.
func (f *Fragmenter) Append(b []byte) []byte {
	if !f.More() {
		return b
	}
	p, n := f.pkt, f.next()
	if f.whole {
		f.done = true
		return append(b, p...)
	}
	start, hlen := len(b), f.headerLen()
	b = append(b, p[:V4HeaderLen]...)
	if f.off == 0 {
		b = append(b, p.Options()...)
	} else {
		b = append(b, f.opts[:f.optLen]...)
	}
	b = append(b, p.Payload()[f.off:f.off+n]...)
	h := b[start : start+hlen]
	h[0] = 0x40 | byte(hlen/4)
	binary.BigEndian.PutUint16(h[2:], uint16(hlen+n))
	frag := uint16((p.FragOffset() + f.off) / 8)
	f.off += n
	f.done = f.off == len(p.Payload())
	if !f.done || p.MF() {
		frag |= 0x2000
	}
	binary.BigEndian.PutUint16(h[6:], frag)
	h[10], h[11] = 0, 0
	binary.BigEndian.PutUint16(h[10:], Checksum(h))
	return b
}

// headerLen returns the length of the next fragment's header in octets.
func (f *Fragmenter) headerLen() int {
	if f.off == 0 {
		return f.pkt.HeaderLen()
	}
	return V4HeaderLen + f.optLen
}

// next returns how many octets of payload the next fragment has.
func (f *Fragmenter) next() int {
	left := len(f.pkt.Payload()) - f.off
	room := f.mtu - f.headerLen()
	if f.whole || left <= room {
		return left
	}
	return room &^ 7
}
