// Package ibverbs is RDMA by the kernel: a verbs provider over libibverbs, for Soft-RoCE
// (rdma_rxe), for adapters that do RoCE, and for InfiniBand ports.
//
// The binding is our own and needs cgo and the build tag ibverbs; without them [Open] returns
// [ErrNotBuilt]. All decisions are plain Go and are tested without a device: which GID, what a
// completion means, what an event is. CM messages go through /dev/infiniband/umad* without any
// library.
//
// A RoCE device is found by its network device, and a GID by its address and its type RoCE v2,
// never by an index. An InfiniBand port has no network device and is found by device name and port
// number. There the user joins groups at the subnet administrator, through [verbs.SubnetPort], and
// gives the path of each packet.
//
// One C call posts a batch of work requests, and one takes a batch of completions. The device
// uses Go memory only if it is a pinned [verbs.Region].
//
// Sources: docs/adr/0012-libibverbs.md, ib_user_mad.h, libibverbs. Missing: unpredictable QPNs, as
// the kernel chooses them (docs/security.md); SEND with invalidate, which a memory region of
// libibverbs cannot serve; copies of multicast packets by unicast, which a kernel QP does not
// receive.
package ibverbs

import (
	"cmp"
	"errors"
	"log/slog"
	"time"

	"ipoibcm/ib"
)

// Options says which device to open. Either Underlay must be set, or Device, for an InfiniBand
// port.
type Options struct {
	// Underlay is the network device of the RDMA device's port, such as "eth0". Empty means an
	// InfiniBand port, which has none.
	Underlay string
	// Port is the port of Device if Underlay is empty. Zero means 1.
	Port int
	// Device is the name of the RDMA device. Empty means the one whose GIDs belong
	// to Underlay.
	Device string
	// GID is the only GID to use; it must be an address of Underlay. Zero means all. Then the
	// default GID is the IPv6 link-local one, or an IPv4 address if there is no IPv6.
	GID ib.GID
	// NoCM leaves the CM messages of the port to others: MADPort is nil. Without NoCM the Devices
	// of one process share them; only one process on a port can have them.
	NoCM bool
	// AddressWait bounds the wait for a GID to appear. Zero means 5 s, negative means no wait.
	AddressWait time.Duration
	// Stop ends the wait for a GID when it is closed; Open then returns ErrStopped.
	Stop <-chan struct{}
	// Log gets state changes; nil discards them.
	Log *slog.Logger
}

func (o *Options) addressWait() time.Duration {
	return max(0, cmp.Or(o.AddressWait, 5*time.Second))
}

func (o *Options) log() *slog.Logger {
	return cmp.Or(o.Log, slog.New(slog.DiscardHandler))
}

// ErrStopped says that Options.Stop was closed while Open waited.
var ErrStopped = errors.New("asked to stop")

// ErrNoDevice says that the underlay belongs to no RDMA device.
var ErrNoDevice = errors.New("no RDMA device on this network device")

// ErrNotBuilt says that this program was built without libibverbs.
var ErrNotBuilt = errors.New(
	"this program was built without libibverbs: use ipoibcmd-ibverbs, which make ibverbs builds")
