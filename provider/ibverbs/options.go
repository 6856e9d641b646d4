// Package ibverbs is RDMA by the kernel: a verbs provider over libibverbs, for
// Soft-RoCE (rdma_rxe), for adapters that do RoCE, and for InfiniBand ports.
//
// The binding is our own and needs cgo and the build tag ibverbs; without them
// [Open] says so. Everything that decides is plain Go and is tested without a
// device: which GID, what a completion means, what an event is. CM messages go
// through /dev/infiniband/umad* without any library.
//
// A device is found by its network device, and a GID by its address and its type
// RoCE v2, never by an index; an InfiniBand port, which has no network device, by the
// names of both. There the user joins groups at the subnet administrator, through
// [verbs.SubnetPort], and says the path of each packet.
//
// Work requests are posted, and completions taken, a batch at a time through one C call
// each; C sees Go memory only if it is a pinned [verbs.Region].
//
// Sources: docs/adr/0012-libibverbs.md, ib_user_mad.h, libibverbs. Missing:
// QPNs are the kernel's and not unpredictable (docs/security.md); SEND with invalidate,
// which a memory region of libibverbs cannot serve; copies of multicast packets by
// unicast, which a kernel QP does not receive.
package ibverbs

import (
	"cmp"
	"errors"
	"log/slog"
	"time"

	"ipoibcm/ib"
)

// Options says which device to open. Underlay must be set, or Device of an InfiniBand port.
type Options struct {
	// Underlay is the network device of the RDMA device's port, such as "eth0". Empty
	// means that the port is an InfiniBand one, which has none.
	Underlay string
	// Port is that of Device where there is no Underlay. Zero means 1.
	Port int
	// Device is the name of the RDMA device. Empty means the one whose GIDs belong
	// to Underlay.
	Device string
	// GID is the only GID to use; it must be an address of Underlay. Zero means
	// all, first the IPv6 link-local one, or an IPv4 address if there is no IPv6.
	GID ib.GID
	// NoCM leaves CM messages to others: MADPort is nil. Two Devices on one port
	// cannot both have them.
	NoCM bool
	// AddressWait bounds the wait for a GID that is not there yet. Zero means 5 s,
	// negative means no wait.
	AddressWait time.Duration
	// Stop ends that wait when it is closed; Open then returns ErrStopped.
	Stop <-chan struct{}
	// Log gets state changes; nil discards them.
	Log *slog.Logger
}

func (o *Options) addressWait() time.Duration {
	return max(0, cmp.Or(o.AddressWait, 5*time.Second))
}

func (o *Options) log() *slog.Logger {
	if o.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return o.Log
}

// ErrStopped says that Options.Stop was closed while Open waited.
var ErrStopped = errors.New("asked to stop")

// ErrNoDevice says that no RDMA device has the underlay for its port.
var ErrNoDevice = errors.New("no RDMA device on this network device")

// ErrNotBuilt says that this program was made without libibverbs.
var ErrNotBuilt = errors.New(
	"this program was built without libibverbs: use ipoibcmd-ibverbs, which make ibverbs builds")
