package ip

import "errors"

// ErrDontFragment says that a packet larger than the MTU has DF set.
var ErrDontFragment = errors.New("ip: packet is larger than the MTU and DF is set")

// A Fragmenter cuts one IPv4 packet into fragments (RFC 791 section 3.2). Use:
//
//	f, err := ip.NewFragmenter(pkt, mtu)
//	for err == nil && f.More() {
//		buf = f.Append(buf[:headroom])
//		…
//	}
type Fragmenter struct {
	pkt V4
	mtu int
	off int // octets of payload already handed out
}

// NewFragmenter checks that pkt may be cut into pieces of at most mtu octets,
// header included. A packet that fits comes out unchanged, as its one fragment.
// The error is [ErrDontFragment], or says what is wrong with pkt or mtu. pkt is
// only read, and must not change while f is in use.
func NewFragmenter(pkt []byte, mtu int) (Fragmenter, error) { panic("todo") }

// Count returns how many fragments are still to come.
func (f *Fragmenter) Count() int { panic("todo") }

// More reports whether there is a fragment left.
func (f *Fragmenter) More() bool { panic("todo") }

// Append appends the next fragment, header first, to b. It does not allocate if
// b has room for mtu octets.
func (f *Fragmenter) Append(b []byte) []byte { panic("todo") }
