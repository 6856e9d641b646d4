package datapath

import (
	"context"
	"errors"
	"net/netip"

	"ipoibcm/ib"
	"ipoibcm/tun"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
)

// Errors of the sending functions.
var (
	ErrFull   = errors.New("datapath: send queue full")
	ErrClosed = errors.New("datapath: closed")
	ErrTooBig = errors.New("datapath: packet larger than a send buffer")
	errTODO   = errors.New("datapath: coming")
)

// Config says what a Loop works on. Provider and TUN are required; the rest may
// be zero.
type Config struct {
	Provider verbs.Provider
	TUN      tun.Device

	PKey ib.PKey // zero means ib.DefaultPKey
	QKey ib.QKey // of the UD QP; zero means ib.QKeyIPoIB

	UDMTU      int // largest IP packet over UD in octets; zero means 2044
	ReceiveMTU int // of the shared receive buffers, octets, header included; zero means 65524

	// Depths in work requests. Zero means the number in brackets.
	SendDepth   int // per connection [128]
	UDSendDepth int // [512]
	UDRecvDepth int // [512]
	SRQDepth    int // buffers of ReceiveMTU shared by all RC connections [256]
	UCRecvDepth int // per connection without an SRQ [16]
	SendBuffers int // of 64 KiB, for all QPs together [512]
	UpDepth     int // frames on their way up [256]
}

// A Loop moves the packets of one interface.
type Loop struct{}

// New creates the UD QP (in RTS), the queues and the buffers. [Loop.Run] must
// be called, and then releases them all; or [Loop.Close] without Run.
func New(cfg Config) (*Loop, error) { return nil, errTODO }

// Run moves packets until ctx ends or the TUN or a CQ fails. It closes the TUN,
// destroys all QPs and queues it made and has ended all its goroutines when it
// returns. The result is nil if ctx ended.
func (l *Loop) Run(ctx context.Context) error { return errTODO }

// Close releases everything when Run was never called.
func (l *Loop) Close() error { return errTODO }

// UDQP returns the interface's UD QP, for its QPN and to attach groups.
func (l *Loop) UDQP() verbs.QP { return nil }

// SetTable makes the TUN reader use t from the next batch on.
func (l *Loop) SetTable(t *Table) {}

// Table returns the table in use.
func (l *Loop) Table() *Table { return nil }

// SetGroups says which inner multicast destinations are wanted. It matters where
// many groups ride on one (IPv4 underlay): what is not in the list is dropped.
// IPv4 broadcasts always pass. Nil means that everything is wanted.
func (l *Loop) SetGroups(groups []netip.Addr) {}

// Up is the bounded ring of frames for the control plane. Every frame must be
// released. It is closed when Run ends.
func (l *Loop) Up() <-chan *Frame { return nil }

// Barrier returns when nothing in hand uses a target, table or connection that
// was replaced before the call.
func (l *Loop) Barrier() {}

// Send sends one IP packet on p as the TUN reader would, from any goroutine:
// packets that waited for p, or fragments. It does not look at the table or the
// path's MTU, and never waits: ErrFull if the send queue or the buffers are
// used up. A Miss or Drop is ErrClosed.
func (l *Loop) Send(p *Path, packet []byte) error { return errTODO }

// SendUD sends payload behind a header of type t on the UD QP.
func (l *Loop) SendUD(dst UDDest, t encap.EtherType, payload []byte) error { return errTODO }

// InjectTUN gives the kernel an IP packet: ICMP errors, router advertisements.
func (l *Loop) InjectTUN(packet []byte) error { return errTODO }

// Counters returns the counts of the loop.
func (l *Loop) Counters() Counters { return Counters{} }
