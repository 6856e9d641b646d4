// Package tun opens a TUN device and moves IP packets through it in batches.
//
// A packet is exactly an IPv4 or IPv6 datagram, with the checksum that it has on
// the wire. Between [File] and the kernel a header before each packet (IFF_VNET_HDR)
// says more: who computes the checksum ([Checksums]), and that the packet is a GSO packet
// of several TCP packets ([Segments]) or UDP datagrams ([Datagrams]). The package knows no
// address; netlink is for hostnet.
//
// Sources: drivers/net/tun.c, Documentation/networking/tuntap, struct virtio_net_hdr.
package tun

// Sizes in octets.
const (
	// MaxMTU is the largest MTU [Open] sets: what connected mode can carry.
	MaxMTU = 65520
	// DefaultMTU is used when Options.MTU is zero.
	DefaultMTU = MaxMTU
	// MinMTU is the smallest that the kernel accepts.
	MinMTU = 68
)

// A Device is one queue of a TUN device, or a fake of it (tuntest).
//
// One goroutine reads and any number write. A Device never keeps a buffer after the
// call that got it.
type Device interface {
	// Name is the name of the interface.
	Name() string
	// Index is its interface index in the namespace where it was opened.
	Index() int
	// Read blocks for one packet, then takes as many more as are there and
	// fit bufs, without blocking. Packet i is bufs[i][:sizes[i]]. A packet
	// longer than its buffer is cut, or lost if it was part of a GSO packet.
	// len(sizes) must be at least len(bufs). After Close the error is
	// os.ErrClosed.
	Read(bufs [][]byte, sizes []int) (n int, err error)
	// Write hands each of bufs, one packet each, to the kernel, and may change the headers in them.
	// It does not stop at a packet that the kernel refuses (malformed, or the interface is down). n
	// counts the packets that the kernel took; err is the last refusal.
	Write(bufs [][]byte) (n int, err error)
	// Close ends a Read and removes the interface, unless another process has its descriptor too.
	// Close of a further queue leaves the interface.
	Close() error
}

// A Pollable is a Device whose input another goroutine can wait for, together with other
// descriptors. Read and TryRead may not run at once.
type Pollable interface {
	Device
	// FD is the descriptor to poll(2) for input. It must not be in use any more when Close is
	// called.
	FD() int
	// TryRead is Read, but returns 0 and no error when there is no packet.
	TryRead(bufs [][]byte, sizes []int) (n int, err error)
}
