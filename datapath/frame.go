package datapath

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire/encap"
)

// A FrameKind says why a frame went up.
type FrameKind uint8

// Kinds of frames. The first four come from the TUN and hold an IP packet, the
// others come from the fabric and hold what follows the 4-octet header.
const (
	TXMiss    FrameKind = iota // its path is a Miss
	TXNoRoute                  // the table has no entry for it
	TXTooBig                   // larger than the target's MTU
	TXControl                  // IGMP, MLD, ND: never sent by the loop itself
	RXARP                      // on the UD QP
	RXND                       // ICMPv6 133 to 137, on any QP
)

// String names k.
func (k FrameKind) String() string {
	return [...]string{"tx-miss", "tx-no-route", "tx-too-big", "tx-control", "rx-arp", "rx-nd"}[min(k, RXND)]
}

// A Frame is a packet on its way up. Its reader calls Release when done, after
// which Data is not its own any more.
type Frame struct {
	Kind FrameKind
	Type encap.EtherType // IPv4, IPv6 or ARP
	Data []byte          // the IP packet or ARP packet, without the 4-octet header

	// TX: the path it would have taken (nil: TXNoRoute, TXControl) and the
	// MTU it did not fit, in octets.
	Path *Path
	MTU  int

	// RX: who sent it. On a connection only Conn is set.
	SrcGID ib.GID // from the GRH
	SrcQPN ib.QPN // of the sender's UD QP
	DstGID ib.GID // ours, or the MGID
	Conn   *Conn

	pool chan *Frame
}

// Release gives f back. The zero Frame may be released.
func (f *Frame) Release() {
	if f.pool == nil {
		return
	}
	f.Path, f.Conn = nil, nil
	f.pool <- f // never blocks: the pool has room for all its frames
}

// String prints what f is, for people.
func (f *Frame) String() string {
	return fmt.Sprintf("%v %v %d octets", f.Kind, f.Type, len(f.Data))
}
